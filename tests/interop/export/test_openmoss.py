"""OpenMOSS chunks, opened by the safetensors library as OpenMOSS does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spile.interop.export import Exported, openmoss
from support import stored

Run = Callable[..., tuple[Path, Exported]]


@pytest.mark.parametrize("chunk", [8 * 24 * 2, 1 << 20])
def test_safetensors_opens_the_same_chunks_of_every_hook(
    written: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(openmoss, "FILE_BYTES", chunk)
    dest, made = exported(written, "openmoss", taps="resid_post.1,expert_ids.1")
    numbers: set[int] = set()
    for tap, hook in (
        ("resid_post.1", "blocks.1.hook_resid_post"),
        ("expert_ids.1", "blocks.1.mlp.hook_expert_indices"),
    ):
        paths = sorted((dest / hook).glob("chunk-*.safetensors"))
        assert paths[0].name == "chunk-00000000.safetensors"
        numbers.add(len(paths))
        parts = [load_file(path) for path in paths]
        assert {part["activation"].shape[1:] for part in parts} == {(8, written.rows[tap].shape[1])}
        values = torch.cat([part["activation"] for part in parts]).float().reshape(104, -1)
        assert values.tolist() == written.rows[tap][:104].astype("float32").tolist()
        assert str(parts[0]["activation"].dtype) == f"torch.{made.taps[tap]}"
        tokens = torch.cat([part["tokens"] for part in parts])
        assert tokens.dtype == torch.int64
        assert tokens.reshape(-1).tolist() == written.index["token_id"][:104].tolist()
        for name in ("mask", "attention_mask"):
            mask = torch.cat([part[name] for part in parts])
            assert mask.shape == tokens.shape
            assert mask.bool().all()
    assert len(numbers) == 1
    assert (numbers.pop() > 1) == (chunk < 1 << 20)

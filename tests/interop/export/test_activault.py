"""activault's files, opened by torch as activault does."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from spile.interop.export import Exported, activault
from spile.interop.export.activault import split_evenly
from support import stored

Run = Callable[..., tuple[Path, Exported]]


def as_numpy(states: torch.Tensor) -> np.ndarray:
    if states.dtype == torch.bfloat16:
        return states.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return states.numpy()


def test_torch_opens_files_of_one_length_in_stored_order(
    written: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activault, "FILE_BYTES", 8 * 24)  # a context or two
    dest, made = exported(written, "activault", taps="resid_post.1,q.1", context_size=8)
    config = json.loads((dest / "cfg.json").read_bytes())
    assert config["total_tokens"] == made.rows == 104
    assert config["upload_config"]["hooks"] == ["blocks.1.attn.hook_q", "blocks.1.hook_resid_post"]
    for tap, hook in zip(("q.1", "resid_post.1"), config["upload_config"]["hooks"], strict=True):
        stated = json.loads((dest / hook / "metadata.json").read_bytes())
        paths = sorted((dest / hook).glob("*.saved.pt"))
        assert len(paths) == config["n_total_files"] == 13
        assert {path.stat().st_size for path in paths} == {stated["bytes_per_file"]}
        parts = [torch.load(path, weights_only=True) for path in paths]
        for part in parts:
            assert list(part["states"].shape) == stated["shape"]
            assert list(part["input_ids"].shape) == stated["input_ids_shape"]
            assert str(part["states"].dtype) == stated["dtype"] == f"torch.{made.taps[tap]}"
            assert part["tensor_bytes"] == part["states"].nbytes + part["input_ids"].nbytes
        states = np.concatenate([as_numpy(part["states"]) for part in parts])
        assert states.dtype == written.rows[tap].dtype
        assert states.tobytes() == written.rows[tap][:104].tobytes()
        ids = torch.cat([part["input_ids"] for part in parts]).reshape(-1)
        assert ids.dtype == torch.int64
        assert ids.tolist() == written.index["token_id"][:104].tolist()
        stats = json.loads((dest / hook / "statistics.json").read_bytes())
        wide = written.rows[tap].reshape(111, -1).astype(np.float64)
        np.testing.assert_allclose(stats["mean"], wide.mean(axis=0), rtol=1e-9)
        np.testing.assert_allclose(stats["std"], wide.std(axis=0), rtol=1e-9)


@pytest.mark.parametrize("contexts", [1, 2, 7, 13, 97, 1000, 1013])
@pytest.mark.parametrize("most", [1, 2, 5, 100, 5000])
def test_equal_files_leave_less_than_one_context_each_over(contexts: int, most: int) -> None:
    files, each = split_evenly(contexts, most)
    assert 1 <= each <= most
    assert 0 <= contexts - files * each < -(-contexts // most)


def test_contexts_that_fill_no_file_are_left_over(
    floats: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activault, "split_evenly", lambda contexts, most: (6, contexts // 6))
    _, made = exported(floats, "activault", taps="resid_post.0")
    assert made.rows == 6 * 2 * 8
    assert made.left_over == 111 - 96

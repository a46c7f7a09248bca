"""The legacy shards, read as the legacy scripts read them."""

import ast
import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.interop.export import Exported, export, legacy
from support import stored, tiny

Run = Callable[..., tuple[Path, Exported]]


@pytest.mark.parametrize("size", [400, 1 << 20])
def test_shards_hold_documents_by_layer(
    written: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(legacy, "FILE_BYTES", size)
    dest, made = exported(written, "legacy", taps="resid_post:0+2")
    ds = spile.open(str(written.path))
    metadata = json.loads((dest / "metadata.json").read_bytes())
    assert metadata["layers"] == [0, 2]
    paths = sorted(dest.glob("shard_*.pkl.gz"))
    assert paths[0].name == "shard_0001.pkl.gz"
    assert (len(paths) > 1) == (size == 400)
    seen: list[int] = []
    for path in paths:
        shard = pickle.loads(gzip.decompress(path.read_bytes()))  # our own, a moment old
        assert list(shard) == [0, 2]
        for layer, samples in shard.items():
            for sample in samples:
                assert set(sample) == {"sample_idx", "activation", "shape", "text_preview"}
                expected = ds.document(sample["sample_idx"]).read(f"resid_post.{layer}")
                values = sample["activation"]
                assert values.dtype.name == made.taps["resid_post.0"]
                assert np.array_equal(values, expected.astype(values.dtype))
                assert sample["shape"] == values.shape
                assert sample["text_preview"] == f"text of {sample['sample_idx']}"
        seen += [sample["sample_idx"] for sample in shard[0]]
    assert len(seen) == len(set(seen)) == metadata["total_samples"]
    assert metadata["total_shards"] == len(paths)
    assert set(seen) == set(written.index["doc"].tolist())


def test_where_no_preview_is_stored_the_tokens_are_decoded(tmp_path: Path, model: Path) -> None:
    made = stored.build(
        tmp_path / "out", [[300]], taps={"resid_post.0": 4}, model_source=str(model), preview=0
    )
    export(str(made.path), tmp_path / "dest", to="legacy")
    with gzip.open(tmp_path / "dest" / "shard_0001.pkl.gz") as file:
        (sample,) = pickle.load(file)[0]
    assert 0 < len(sample["text_preview"]) <= 200


def test_no_pickle_is_ever_read() -> None:
    source = Path(spile.__file__)
    for path in source.parent.rglob("*.py"):
        if "pickle" not in path.read_text() and "torch" not in path.read_text():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                read = node.value.id in ("pickle", "torch") and node.attr in ("load", "loads")
                assert not read, f"{path}:{node.lineno}"


def test_the_command_writes_them(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", taps={"resid_post.3": 4})
    tiny.spile("export", str(made.path), "--to", "legacy", str(tmp_path / "dest"))
    assert (tmp_path / "dest" / "metadata.json").is_file()


def test_previews_come_from_the_datasets_own_tokenizer(tmp_path: Path, model: Path) -> None:
    files = {"tokenizer.json": (model / "tokenizer.json").read_bytes()}
    options: dict[str, Any] = {"taps": {"resid_post.0": 4}, "preview": 0, "tokenizer": files}
    made = stored.build(tmp_path / "out", [[300]], **options)
    export(str(made.path), tmp_path / "dest", to="legacy")
    with gzip.open(tmp_path / "dest" / "shard_0001.pkl.gz") as file:
        (sample,) = pickle.load(file)[0]
    assert 0 < len(sample["text_preview"]) <= 200

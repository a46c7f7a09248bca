"""saev's files, mapped as its protocol says (its own package on PyPI is older than that)."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spile.interop.export import Exported, saev
from support import stored

Run = Callable[..., tuple[Path, Exported]]


@pytest.mark.parametrize("size", [3000, 1 << 20])
def test_any_vector_is_where_the_protocol_says(
    written: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(saev, "_FILE_BYTES", size)
    dest, made = exported(written, "saev", taps="resid_post:0+2")
    (folder,) = (dest / "saev" / "shards").iterdir()
    stated = json.loads((folder / "metadata.json").read_bytes())
    text = json.dumps(stated, sort_keys=True, separators=(",", ":"))
    assert folder.name == hashlib.sha256(text.encode()).hexdigest()
    assert stated["layers"] == [0, 2]
    assert stated["n_examples"] * stated["content_tokens_per_example"] == made.rows == 104
    each = stated["max_tokens_per_shard"] // (8 * 2)
    shape = (each, 2, 8, 6)
    shards = json.loads((folder / "shards.json").read_bytes())
    assert sum(shard["n_examples"] for shard in shards) == 13
    assert len(shards) == -(-13 // each)
    maps = [np.memmap(folder / shard["name"], np.float32, "r", shape=shape) for shard in shards]
    for row in range(104):
        example, token = divmod(row, 8)
        for place, layer in enumerate(stated["layers"]):
            vector = maps[example // each][example % each, place, token]
            expected = written.rows[f"resid_post.{layer}"][row].astype(np.float32)
            assert np.array_equal(vector, expected)
    tokens = np.load(dest / "token_ids.npy")
    assert tokens.shape == (13, 8)
    assert np.array_equal(tokens.reshape(-1), written.index["token_id"][:104])

"""DeepSpec's target cache, read by a reader that was written from its layout.

(deepseek-ai/DeepSpec@afdfa7c, `deepspec/data/target_cache_dataset.py`. With the folder of a
checkout in SPILE_DEEPSPEC_SOURCE, its own `CacheDataset` reads it, too.)
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from interop.export.conftest import Drafted
from spile.interop.export import Exported, deepspec, export

TAPS = ("embed", "resid_post.1", "resid_post.2", "final_norm")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
READS = """
import json, sys
sys.path.insert(0, sys.argv[2])
from deepspec.data.target_cache_dataset import CacheDataset
data = CacheDataset(sys.argv[1])
for number in range(len(data)):
    print(json.dumps({name: value.float().tolist() for name, value in data[number].items()}))
"""


def exported(drafted: Drafted, dest: Path) -> Exported:
    return export(str(drafted.path), dest, to="deepspec", taps=",".join(TAPS))


def samples(folder: Path) -> Iterator[dict[str, np.ndarray]]:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    layers, width = len(manifest["target_layer_ids"]), manifest["hidden_size"]
    for record in struct.iter_unpack("<QIIQQQQQ", (folder / "samples.idx").read_bytes()):
        _, shard, tokens, *places = record
        data = (folder / manifest["shards"][shard]["file_name"]).read_bytes()

        def taken(place: int, dtype: str | np.dtype[np.generic], *shape: int) -> np.ndarray:
            count = int(np.prod(shape))
            return np.frombuffer(data, dtype, count, place).reshape(shape)  # noqa: B023

        yield {
            "input_ids": taken(places[0], "<i4", tokens),
            "attention_mask": taken(places[1], "u1", tokens),
            "loss_mask": taken(places[2], "u1", tokens),
            "target_hidden_states": taken(places[3], BFLOAT16, tokens, layers * width),
            "target_last_hidden_states": taken(places[4], BFLOAT16, tokens, width),
        }


@pytest.mark.parametrize("shard_bytes", [3000, 1 << 30])
def test_samples_lie_where_the_index_says(
    drafted: Drafted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(deepspec, "_SHARD_BYTES", shard_bytes)
    made = exported(drafted, tmp_path / "dest")
    assert made.rows == sum(map(len, drafted.tokens))
    manifest = json.loads((tmp_path / "dest" / "manifest.json").read_bytes())
    assert manifest["version"] == 2 and manifest["index_record_size"] == 56
    assert manifest["target_layer_ids"] == [-1, 1, 2]
    assert manifest["num_samples"] == len(drafted.tokens)
    assert (manifest["num_shards"] == 1) == (shard_bytes > 3000)
    found = [*samples(tmp_path / "dest")]
    wanted = zip(drafted.layers(*TAPS), drafted.tokens, drafted.masks, strict=True)
    for sample, (rows, tokens, mask) in zip(found, wanted, strict=True):
        assert sample["input_ids"].tolist() == tokens.tolist()
        assert sample["attention_mask"].tolist() == [1] * len(tokens)
        assert sample["loss_mask"].tolist() == mask.tolist()
        aside = np.ascontiguousarray(rows[:, :3]).reshape(len(tokens), -1)
        assert sample["target_hidden_states"].tobytes() == aside.tobytes()
        last = np.ascontiguousarray(rows[:, 3])
        assert sample["target_last_hidden_states"].tobytes() == last.tobytes()


def test_deepspecs_own_reader_takes_every_sample(drafted: Drafted, tmp_path: Path) -> None:
    source = os.environ.get("SPILE_DEEPSPEC_SOURCE")
    if not source:
        pytest.skip("SPILE_DEEPSPEC_SOURCE does not name a checkout of DeepSpec")
    exported(drafted, tmp_path / "dest")
    command = [sys.executable, "-c", READS, str(tmp_path / "dest"), source]
    read = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in read.stdout.splitlines() if line.startswith("{")]
    for sample, own in zip(found, samples(tmp_path / "dest"), strict=True):
        for name, values in sample.items():
            assert values == own[name].astype(np.float32).tolist()

"""With `verify`, neither a dataset nor an export gives a byte of a damaged file."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import spile
from chaos.harness import run
from spile.core.errors import CorruptError
from spile.objects import open_objects
from support import servers, stored


@pytest.fixture
def dataset(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", ((30, 20), (25,)))


def damaged_shard(dataset: stored.Stored, unit: int = 1) -> str:
    """Change one value of a shard to another valid one; return the shard's key."""
    shard = dataset.done(unit).shards[0]
    stored.flip(dataset.path / shard.key, shard.bytes - 3)
    return shard.key


def test_a_damaged_shard_is_refused_when_it_is_first_read(dataset: stored.Stored) -> None:
    key = damaged_shard(dataset)
    ds = spile.open(str(dataset.path), verify=True)
    tap, start = dataset.done(1).shards[0].tap, ds.unit_starts[1]
    assert len(ds.read(tap, 0, start)) == start  # the other unit's file is sound
    for _ in range(2):
        with pytest.raises(CorruptError, match=f"{key}: checksum does not match"):
            ds.read(tap, start, start + 1)
    with pytest.raises(CorruptError, match="checksum"):
        list(ds.batches([tap], 10))
    assert len(spile.open(str(dataset.path)).read(tap, start, start + 1)) == 1


@pytest.mark.parametrize("part", ["index", "documents_table"])
def test_what_stands_beside_the_rows_is_checked_too(dataset: stored.Stored, part: str) -> None:
    file = getattr(dataset.done(0), part)
    stored.flip(dataset.path / file.key, file.bytes - 1)
    ds = spile.open(str(dataset.path), verify=True)
    with pytest.raises(CorruptError, match=file.key):
        {
            "index": lambda: ds.index(0, 5),
            "documents_table": ds.documents,
        }[part]()


def test_a_sound_dataset_reads_as_without_and_in_another_process_too(
    dataset: stored.Stored,
) -> None:
    plain, ds = spile.open(str(dataset.path)), spile.open(str(dataset.path), verify=True)
    again = pickle.loads(pickle.dumps(ds))
    damaged_shard(dataset)
    for tap in plain.taps:
        assert np.array_equal(ds.read(tap, 0, 40), plain.read(tap, 0, 40), equal_nan=True)
    with pytest.raises(CorruptError, match="checksum"):
        list(again.batches(again.taps, 10))


def test_files_in_a_bucket_are_checked(dataset: stored.Stored) -> None:
    url = servers.new_gcs_store()
    bucket = open_objects(url)
    key = damaged_shard(dataset)
    for each in dataset.listed():
        assert bucket.create(each, dataset.objects.get(each))
    ds = spile.open(url, verify=True)
    with pytest.raises(CorruptError, match=key):
        list(ds.batches(ds.taps, 10))


def test_an_export_refuses_damage(dataset: stored.Stored, tmp_path: Path) -> None:
    key = damaged_shard(dataset)
    result = run("export", dataset.path, "--to", "npy", tmp_path / "dest")
    assert result.code == 3
    assert key in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    with pytest.raises(CorruptError, match="checksum"):
        spile.export(spile.open(str(dataset.path)), tmp_path / "dest", to="npy")

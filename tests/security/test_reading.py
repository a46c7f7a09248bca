"""Datasets that a stranger made, through all that reads them: open, read, verify, gc.

Either one is refused by an error of ours, or everything is read within bounds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from security.hostile import body_of, changed, fuzz, only_our_errors, refused, sealed
from spile.core.errors import CorruptError
from spile.dataset import format as fmt
from spile.dataset.format import encode_record
from spile.dataset.maintain.verify import verify
from spile.dataset.read.opening import open_dataset
from spile.objects import LocalObjects
from support import stored
from support.stored import Stored

KINDS = {fmt.UNITS: "units", fmt.CURRENT.done_key(0): "done", fmt.MANIFEST: "manifest",
         fmt.SCALES: "scales"}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return stored.build(tmp_path_factory.mktemp("h") / "d", ((3, 2), (4,)), taps=stored.SCALED)


def read_all(made: Stored, partial: bool) -> None:
    ds = open_dataset(str(made.path), partial=partial)
    for tap in ds.taps:
        with only_our_errors():
            rows = ds.read(tap, 0, 4)
            assert rows.shape == (min(4, ds.num_tokens), *ds.shape(tap))
            assert rows.dtype == ds.dtype(tap)
        with only_our_errors():
            ds.read(tap, 0, ds.num_tokens)
        with only_our_errors():
            ds.statistics(tap)
    with only_our_errors():
        assert len(ds.index(0, ds.num_tokens)) == ds.num_tokens
    with only_our_errors():
        ds.document(0)


@fuzz(40)
@pytest.mark.parametrize("key", KINDS)
@given(data=st.data())
def test_a_sealed_record_is_refused_or_rows_are_read_within_bounds(
    dataset: Stored, key: str, data: st.DataObject
) -> None:
    with stored.changed(dataset, key, fmt.MANIFEST) as paths:
        record = sealed(KINDS[key], data.draw(changed(body_of(paths[key].read_bytes()))))
        if record is None:
            return
        if key == fmt.CURRENT.done_key(0):
            paths[fmt.MANIFEST].unlink()
        paths[key].write_bytes(record)
        for partial in (False, True):
            with only_our_errors():
                read_all(dataset, partial)
        with only_our_errors():
            verify(dataset.objects)


@pytest.mark.parametrize("rows", [10, 10**6, 10**15])
def test_rows_that_are_not_stored_are_not_promised(dataset: Stored, rows: int) -> None:
    done = dataset.done(0)
    last = {shard.tap: shard.key for shard in done.shards}
    shards = tuple(
        replace(shard, count=rows - shard.first) if last[shard.tap] == shard.key else shard
        for shard in done.shards
    )
    grown = replace(done, rows=rows, shards=shards, index=replace(done.index, count=rows))
    with stored.forged_units(dataset, [grown, dataset.done(1)]):
        ds = open_dataset(str(dataset.path))
        for tap in ds.taps:
            with refused("rows"):
                ds.read(tap, 0, ds.num_tokens)
        with refused("rows"):
            ds.index(0, ds.num_tokens)


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"shape": [2]}, {"shape": [1 << 20]}])
def test_rows_of_another_kind_than_the_table_says_are_refused(
    dataset: Stored, change: dict[str, Any]
) -> None:
    with stored.changed(dataset, fmt.UNITS) as paths:
        body = body_of(paths[fmt.UNITS].read_bytes())
        body["taps"]["logprob"] |= change
        paths[fmt.UNITS].write_bytes(encode_record("units", body))
        with refused("rows of logprob"):
            open_dataset(str(dataset.path)).read("logprob", 0, 4)


@pytest.mark.parametrize("folder", ["attempts", "workers", "done"])
def test_a_folder_that_leads_out_of_the_store_is_not_followed(folder: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_bytes(b"secret")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / folder).symlink_to(tmp_path / "outside")
    objects = LocalObjects(tmp_path / "store")
    with pytest.raises(CorruptError):
        objects.get(f"{folder}/x")
    with pytest.raises(CorruptError):
        objects.create(f"{folder}/y", b"")
    with pytest.raises(CorruptError):
        objects.delete(f"{folder}/x")
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["x"]


def test_a_folder_below_a_link_lies_where_the_link_leads(tmp_path: Path) -> None:
    for place in ("outside/deep", "store/own/deep"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "x").write_bytes(place.encode())
    (tmp_path / "store" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "store" / "in").symlink_to(tmp_path / "store" / "own")
    objects = LocalObjects(tmp_path / "store")
    with pytest.raises(CorruptError):
        objects.get("out/deep/x")
    assert objects.get("in/deep/x") == b"store/own/deep"

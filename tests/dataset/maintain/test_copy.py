"""Files that are to be passed on: each byte is read once, hashed, and compared."""

from pathlib import Path

import numpy as np
import pytest

import stored
from spile.core.errors import CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.format import Shard
from spile.dataset.maintain.copy import read_finished
from spile.dataset.read import checked_file
from spile.dataset.read.checked_file import CheckedFile
from spile.objects import LocalObjects


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> stored.Stored:
    taps = {"resid_post.0": 600}
    return stored.build(tmp_path / "out", taps=taps, shard_bytes=1 << 20, compress=request.param)


def shard_of(made: stored.Stored) -> Shard:
    return made.done(1).shards[0]


class Counting(LocalObjects):
    """Notes what is read."""

    ranges: list[tuple[int, int]]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self.ranges.append((start, stop))
        return super().get_range(key, start, stop)


def read_rows(file: CheckedFile, count: int, step: int) -> np.ndarray:
    return np.concatenate([
        file.rows("resid_post.0", at, min(at + step, count)) for at in range(0, count, step)
    ])  # fmt: skip


@pytest.mark.parametrize("step", [1, 5, 42])
def test_rows_come_in_any_pieces_and_the_file_is_checked(made: stored.Stored, step: int) -> None:
    file = CheckedFile(made.objects, shard_of(made))
    rows = read_rows(file, 42, step)
    file.check()
    expected = made.rows["resid_post.0"][made.starts[1] : made.starts[2]]
    assert rows.tobytes() == expected.tobytes()


def test_the_bytes_of_rows_are_not_read_twice(made: stored.Stored) -> None:
    shard, objects = shard_of(made), Counting(made.path)
    objects.ranges = []
    file = CheckedFile(objects, shard)
    assert file.header
    before = len(objects.ranges)
    read_rows(file, 42, 5)
    file.check()
    # A compressed file's table is at its end, and read before the rest: here, with the rest.
    assert sum(stop - start for start, stop in objects.ranges[before:]) <= shard.bytes + (1 << 16)
    if not shard.key.endswith(".zst"):
        assert sum(stop - start for start, stop in objects.ranges[before:]) == shard.bytes


def test_pieces_are_the_whole_file(made: stored.Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_file, "WINDOW_BYTES", 1000)
    shard = shard_of(made)
    pieces = list(CheckedFile(made.objects, shard).pieces())
    assert max(map(len, pieces)) == 1000
    assert b"".join(pieces) == made.objects.get(shard.key)


@pytest.mark.parametrize("place", [0, 0.3, 0.6, 1])
@pytest.mark.parametrize("rows_too", [False, True])
def test_damage_is_found_wherever_it_is(made: stored.Stored, place: float, rows_too: bool) -> None:
    shard = shard_of(made)
    stored.flip(made.path / shard.key, int(place * (shard.bytes - 1)))
    with pytest.raises(CorruptError, match=shard.key):
        file = CheckedFile(made.objects, shard)
        if rows_too:
            read_rows(file, 42, 5)
        file.check()


def test_a_finished_dataset_is_its_table_and_every_record(made: stored.Stored) -> None:
    table, records = read_finished(made.objects)
    assert table.fingerprint == made.table.fingerprint
    assert [done.unit for done in records] == [0, 1, 2, 3, 4]
    manifest = fmt.decode_record("manifest.json", made.objects.get("manifest.json"), "manifest")
    made.objects.delete("manifest.json")
    with pytest.raises(StoreError, match="every unit is done, but there is no manifest.json yet"):
        read_finished(made.objects)
    forged = fmt.encode_record("manifest", {**manifest, "rows": manifest["rows"] + 1})
    made.objects.create("manifest.json", forged)
    with pytest.raises(CorruptError, match="manifest.json: does not follow from the done records"):
        read_finished(made.objects)
    for key in ("manifest.json", "segments/000000.safetensors", "done/000000/00000002.json"):
        made.objects.delete(key)
    with pytest.raises(StoreError, match="4 of 5 units are done"):
        read_finished(made.objects)

"""Copied files: each byte is read once, hashed, and compared."""

from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import CorruptError
from spile.dataset.format import Shard
from spile.dataset.read.checked_file import CheckedFile
from spile.objects import LocalObjects
from support import stored


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> stored.Stored:
    taps = {"resid_post.0": 600}
    return stored.build(tmp_path / "out", taps=taps, shard_bytes=1 << 20, compress=request.param)


def shard_of(made: stored.Stored) -> Shard:
    return made.done(1).shards[0]


class Counting(LocalObjects):
    """A store that records what is read."""

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


def test_pieces_are_the_whole_file(made: stored.Stored) -> None:
    shard = shard_of(made)
    pieces = list(CheckedFile(made.objects, shard).pieces(1000))
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

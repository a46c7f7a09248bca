"""Ranges that were read once are read from a disk, up to a limit of bytes."""

from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.core.system import System, using
from spile.objects import LocalObjects, Objects
from spile.objects.cache import cached
from support import remote, servers, stored

PIECE = 1 << 20
DATA = np.random.default_rng(0).bytes(5 * PIECE + 77)


class Repeating(System):
    """A system whose random names are all the same."""

    def token(self, size: int) -> str:
        return "5a" * size


def counting(data: bytes = DATA) -> remote.Counting:
    objects = remote.Counting()
    objects.create("a/b", data)
    return objects


def keeping(objects: remote.Counting, folder: Path, most: int, digest: str = "d0") -> Objects:
    return cached(objects, folder, most, {"a/b": digest}.get)


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_was_read_is_not_asked_for_again(tmp_path: Path) -> None:
    objects = counting()
    kept = keeping(objects, tmp_path, 100 * PIECE)
    for start, stop in ((0, 10), (5, PIECE + 5), (0, len(DATA)), (3 * PIECE, len(DATA)), (9, 9)):
        assert kept.get_range("a/b", start, stop) == DATA[start:stop]
    assert objects.ranges[:3] == [(0, PIECE), (PIECE, 2 * PIECE), (2 * PIECE, 6 * PIECE)]
    again = counting()
    assert keeping(again, tmp_path, 100 * PIECE).get_range("a/b", 1, len(DATA)) == DATA[1:]
    assert again.ranges == []


def test_the_folder_holds_no_more_than_it_may(tmp_path: Path) -> None:
    objects = counting()
    kept = keeping(objects, tmp_path, 3 * PIECE)
    rng = np.random.default_rng(1)
    for start in rng.integers(0, len(DATA), 60).tolist():
        assert kept.get_range("a/b", start, start + PIECE) == DATA[start : start + PIECE]
        assert held(tmp_path) <= 3 * PIECE


def test_a_piece_that_was_damaged_or_cut_is_fetched_again(tmp_path: Path) -> None:
    kept = keeping(counting(), tmp_path, 100 * PIECE)
    kept.get_range("a/b", 0, 2 * PIECE)
    first, second = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    stored.flip(first, 1000)
    second.write_bytes(b"")
    objects = counting()
    again = keeping(objects, tmp_path, 100 * PIECE)
    assert again.get_range("a/b", 0, 2 * PIECE) == DATA[: 2 * PIECE]
    assert objects.ranges == [(0, 2 * PIECE)]


def test_another_file_under_the_same_key_is_read_anew(tmp_path: Path) -> None:
    keeping(counting(), tmp_path, 100 * PIECE).get_range("a/b", 0, 10)
    other = counting(DATA[::-1])
    assert keeping(other, tmp_path, 100 * PIECE, "d1").get_range("a/b", 0, 10) == DATA[:-11:-1]


def test_what_no_record_describes_is_not_kept(tmp_path: Path) -> None:
    kept = cached(counting(), tmp_path, 100 * PIECE, lambda key: None)
    assert kept.get_range("a/b", 0, 10) == DATA[:10]
    assert held(tmp_path) == 0


def test_another_dataset_at_the_same_url_is_not_read_from_the_cache(tmp_path: Path) -> None:
    """Both have the same keys, rows and lengths; only digests tell the files apart."""
    url, kept = servers.new_s3_store(), tmp_path / "kept"
    for seed in (1, 2):
        with using(Repeating()):
            made = stored.build(tmp_path / str(seed), ((40,), (30,)), seed=seed)
        remote.upload(made.path, url)
        there, here = spile.open(url, cache=kept), spile.open(made.path)
        for tap in here.taps:
            assert there.read(tap, 0, 70).tobytes() == here.read(tap, 0, 70).tobytes()


def test_a_disk_needs_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on a local disk"):
        cached(LocalObjects(tmp_path), tmp_path / "cache", 100 * PIECE, lambda key: None)
    with pytest.raises(ConfigError, match="at least 1MiB"):
        cached(counting(), tmp_path, 5, lambda key: None)


def test_a_bucket_gives_the_batches_of_the_same_dataset_on_a_disk(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", ((700, 300), (900,)), shard_bytes=5000)
    url = remote.upload(made.path, servers.new_s3_store())
    here = spile.open(str(made.path))
    for ds in (spile.open(url), spile.open(url, cache=tmp_path / "kept", cache_bytes="8MiB")):
        for options in ({"block": 256}, {"shuffle": "full"}, {"where": "pos > 2", "block": 256}):
            pairs = zip(
                ds.batches(ds.taps, 100, window=512, **options),  # type: ignore[arg-type]
                here.batches(ds.taps, 100, window=512, **options),  # type: ignore[arg-type]
                strict=True,
            )
            for there, wanted in pairs:
                assert all(there[name].tobytes() == wanted[name].tobytes() for name in wanted)
    assert held(tmp_path / "kept") > 0
    with pytest.raises(ConfigError, match="cache_bytes"):
        spile.open(url, cache=tmp_path, cache_bytes="lots")

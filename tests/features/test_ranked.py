"""Entries in order: the first of each latent, whatever the pieces they come in."""

import numpy as np
import pytest

from spile.features import ranked
from spile.features.ranked import Entries, Ranked, descending, drawn_keys, hashes, values_of


@pytest.mark.parametrize("buffered", [0, 1 << 20])
def test_the_first_entries_are_kept_and_earlier_ones_win_ties(
    buffered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked, "_BUFFERED", buffered)
    rng = np.random.default_rng(0)
    latent, key = rng.integers(0, 5, 400), rng.integers(0, 30, 400).astype(np.uint32)
    place = np.arange(400) * 3
    kept = Ranked(7, 11)
    for at in range(0, 400, 37):
        part = slice(at, at + 37)
        arrays = latent[part].astype(np.int32), key[part], place[part]
        kept.add(Entries(*arrays, key[part].astype(np.float32), place[part].astype(np.int32)))
    found = kept.entries()
    for each in range(7):
        wanted = sorted((k, p) for c, k, p in zip(latent, key, place, strict=True) if c == each)[
            :11
        ]
        mine = np.flatnonzero(found.latent == each)
        assert list(zip(found.key[mine], found.place[mine], strict=True)) == wanted
        full = len(wanted) == 11
        assert kept.threshold[each] == (wanted[-1][0] if full else np.iinfo(np.uint32).max)


def test_keys_of_values_descend_and_give_the_values_back() -> None:
    values = np.array([np.inf, 1e30, 3, 2.5, 1e-30, 0, -1e-30, -1, -7, -np.inf], np.float32)
    keys = descending(values)
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert np.array_equal(values_of(keys), values)


def test_hashes_are_those_of_the_format_page() -> None:
    # The first outputs of SplitMix64 with seed 0 are 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4.
    golden = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert hashes(golden).tolist() == [0xE220A839, 0x6E789E6A]
    keys = drawn_keys(np.array([5], np.uint32), np.array([3], np.uint32))
    assert keys.tolist() == [6 * 0x9E3779B1 % (1 << 32)]

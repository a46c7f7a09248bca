"""Tallies: their memory is bounded by ranges, and merging them is counting at once."""

import numpy as np

from spile.dataset.codec.features import LatentCounts
from spile.dataset.records.features import FeatureOptions
from spile.features.ranked import hashes
from spile.features.tally import Tally, range_bounds

OPTIONS = FeatureOptions(examples=3, drawn=8)


def test_many_latents_are_cut_into_ranges() -> None:
    assert range_bounds(1024, FeatureOptions(), signed=False) == (0, 1024)
    bounds = range_bounds(1 << 20, FeatureOptions(), signed=False)
    assert bounds[0] == 0 and bounds[-1] == 1 << 20 and 5 < len(bounds) < 30
    assert max(np.diff(bounds)) - min(np.diff(bounds)) <= 1


def test_merged_tallies_equal_one_tally_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    latents = rng.integers(0, 20, (6, 50))
    values = rng.integers(1, 9, (6, 50)).astype(np.float32) / 4
    rows = np.sort(rng.integers(0, 10, (6, 50)), axis=1)

    def added(tally: Tally, unit: int) -> Tally:
        places = np.arange(10) + (unit << 32)
        tokens = np.arange(10, dtype=np.int32) + 100 * unit
        tally.add(latents[unit], values[unit], rows[unit], places, hashes(places), tokens)
        return tally

    whole = Tally(0, 20, OPTIONS, signed=False)
    merged = Tally(0, 20, OPTIONS, signed=False)
    for unit in range(6):
        added(whole, unit)
        part = added(Tally(0, 20, OPTIONS, signed=False), unit).columns()
        merged.merge(LatentCounts("part", part, 20))
    one, other = whole.columns(), merged.columns()
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert np.array_equal(one[name], other[name]), name
    assert one["count"].sum() == 300
    tokens = one["drawn/token"]
    assert np.array_equal(tokens, one["drawn/unit"] * 100 + one["drawn/row"])

"""Statistics of all rows do not depend on how the rows were grouped."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.codec.statistics import TapStats, merged
from support.marks import examples
from support.stored import describe

TIGHT = 1e-12


def close(a: np.ndarray | float, b: np.ndarray | float) -> bool:
    return bool(np.allclose(a, b, rtol=TIGHT, atol=0))


def agree(stats: TapStats, rows: np.ndarray) -> bool:
    return (
        stats.count == len(rows)
        and close(stats.mean, rows.mean(axis=0))
        and close(stats.variance, rows.var(axis=0))
        and close(stats.mean_norm, np.linalg.norm(rows, axis=1).mean())
        and stats.max_abs == np.abs(rows).max()
        and stats.nonfinite == 0
    )


@pytest.mark.parametrize("offset", [0.3, 100.0, -1000.0])
@examples(60)
@given(st.lists(st.integers(0, 400), max_size=12), st.integers(0, 2**32 - 1))
def test_merged_groups_are_the_statistics_of_all_rows(
    offset: float, cuts: list[int], seed: int
) -> None:
    rows = np.random.default_rng(seed).standard_normal((400, 5)) * [1, 2, 3, 40, 0.5] + offset
    parts = [describe(part) for part in np.split(rows, sorted(cuts))]
    assert agree(merged(parts, 5), rows)


def test_merging_is_the_same_in_any_tree() -> None:
    rows = np.random.default_rng(3).standard_normal((97, 4)) + 7
    leaves = [describe(rows[i : i + 5]) for i in range(0, 97, 5)]
    halves = [merged(leaves[:7], 4), merged(leaves[7:], 4)]
    backwards = merged(reversed(leaves), 4)
    for stats in (merged(leaves, 4), merged(halves, 4), backwards):
        assert agree(stats, rows)


def test_a_row_at_a_time_is_enough() -> None:
    rows = np.random.default_rng(4).standard_normal((300, 3)) * 5 + 2
    assert agree(merged((describe(rows[i : i + 1]) for i in range(300)), 3), rows)


def test_merging_leaves_its_argument_alone() -> None:
    rows = np.random.default_rng(5).standard_normal((20, 2))
    part = describe(rows[:10])
    before = (part.count, part.mean.copy(), part.m2.copy())
    total = TapStats.empty(2)
    total.merge(part)
    total.merge(describe(rows[10:]))
    assert (part.count, part.mean.tolist(), part.m2.tolist()) == (
        before[0],
        before[1].tolist(),
        before[2].tolist(),
    )


def test_nothing_merged_is_empty_and_divides_by_no_zero() -> None:
    stats = merged([TapStats.empty(3), TapStats.empty(3)], 3)
    assert (stats.count, stats.mean_norm, stats.max_abs) == (0, 0.0, 0.0)
    assert stats.variance.tolist() == [0, 0, 0]


def test_nonfinite_values_are_counted_over_all_groups() -> None:
    total = TapStats.empty(1)
    for count in (0, 3, 0, 4):
        total.merge(TapStats(5, np.zeros(1), np.zeros(1), 0.0, 0.0, count))
    assert total.nonfinite == 7


def test_clipped_values_are_counted_over_all_groups() -> None:
    parts = [TapStats(5, np.zeros(1), np.zeros(1), 0.0, 0.0, 0, count) for count in (0, 3, 0, 4)]
    assert merged(parts, 1).clipped == 7


def test_tensors_read_back_exactly_and_are_told_apart_by_tap() -> None:
    rng = np.random.default_rng(6)
    first, second = (describe(rng.standard_normal((9, 4))) for _ in range(2))
    second.nonfinite, second.clipped = 2, 3
    tensors = {**first.to_tensors("mlp_out.1"), **second.to_tensors("mlp_out.10")}
    for tap, wanted in (("mlp_out.1", first), ("mlp_out.10", second)):
        read = TapStats.from_tensors(tap, tensors, 4)
        assert read.to_tensors("x").keys() == wanted.to_tensors("x").keys()
        for name, value in wanted.to_tensors("x").items():
            assert np.array_equal(read.to_tensors("x")[name], value)
            assert read.to_tensors("x")[name].dtype == value.dtype


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_blocks_in_float32_agree_with_all_rows_in_float64(count: int, dtype: str) -> None:
    wide = np.random.default_rng(count).standard_normal((count, 2, 12)) * 3 + 40
    rows = wide.astype(DTYPES_BY_NAME[dtype])
    exact, found = TapStats.of_rows(rows), TapStats.of_blocks(rows)
    assert np.allclose(found.mean, exact.mean, rtol=1e-7)
    assert np.allclose(found.variance, exact.variance, rtol=1e-5, atol=1e-10)
    assert np.isclose(found.norm_sum, exact.norm_sum, rtol=1e-6)
    assert (found.count, found.max_abs, found.nonfinite) == (count, exact.max_abs, 0)


def test_blocks_count_what_is_not_finite_and_keep_huge_values() -> None:
    rows = np.ones((130, 3), np.float32)
    rows[70, 1], rows[129, 2] = np.nan, np.inf
    assert TapStats.of_blocks(rows).nonfinite == 2
    rows[70, 1], rows[129, 2] = 1e30, -3e38  # their squares are infinite in float32
    found = TapStats.of_blocks(rows)
    assert (found.nonfinite, found.max_abs) == (0, float(np.float32(3e38)))
    assert np.isclose(found.norm_sum, np.linalg.norm(rows.astype(np.float64), axis=1).sum())
    assert TapStats.of_blocks(rows[:0]).count == 0

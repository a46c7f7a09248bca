"""Moments and extremes equal numpy's over all rows, whatever the blocks."""

import numpy as np
import pytest
from scipy import stats

from spile.serve.digest import KEPT, Extremes, Moments

ROWS, WIDTH = 700, 9


@pytest.fixture
def rows() -> np.ndarray:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((ROWS, WIDTH)) * np.geomspace(0.1, 300, WIDTH) + 50
    return values.astype(np.float32)


def taken(rows: np.ndarray, block: int, positions: np.ndarray | None = None) -> Moments:
    moments = Moments(rows.shape[1], 16)
    where = np.arange(len(rows)) % 16 if positions is None else positions
    for first in range(0, len(rows), block):
        part = slice(first, first + block)
        moments.add(rows[part], where[part], 4, first)
    return moments


@pytest.mark.parametrize("block", [1, 64, 1000])
def test_moments_are_those_of_all_rows(rows: np.ndarray, block: int) -> None:
    found, wide = taken(rows, block), rows.astype(np.float64)
    assert found.count == ROWS
    np.testing.assert_allclose(found.mean, wide.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.deviation, wide.std(axis=0), rtol=1e-4)
    expected = stats.kurtosis(wide, axis=0, fisher=False)
    np.testing.assert_allclose(found.kurtosis_of_channels, expected, rtol=1e-3)
    of_rows = stats.kurtosis(wide, axis=1, fisher=False).mean()
    assert found.kurtosis == pytest.approx(of_rows, rel=1e-3)
    assert found.norm == pytest.approx(np.linalg.norm(wide, axis=1).mean(), rel=1e-5)
    np.testing.assert_array_equal(found.largest, np.abs(rows).max(axis=0))


@pytest.mark.parametrize("block", [1, 30, 1000])
def test_extremes_are_the_largest_and_least_of_all_rows(rows: np.ndarray, block: int) -> None:
    found = taken(rows, block)
    for channel in range(WIDTH):
        best = np.argsort(-rows[:, channel], kind="stable")[:KEPT]
        hits = found.high.of(channel)
        assert [row for _, _, row in hits] == best.tolist()
        np.testing.assert_array_equal([value for value, _, _ in hits], rows[best, channel])
        assert {unit for _, unit, _ in hits} == {4}
        least = np.argsort(rows[:, channel], kind="stable")[:KEPT]
        assert [row for _, _, row in found.low.of(channel)] == least.tolist()


def test_fewer_rows_than_are_kept_are_all_given() -> None:
    extremes = Extremes(2)
    extremes.add(np.array([[1, 5], [3, 2]], np.float32), 0, np.array([7, 8]))
    assert extremes.of(0) == [(3.0, 0, 8), (1.0, 0, 7)]
    assert extremes.of(1) == [(5.0, 0, 7), (2.0, 0, 8)]


def test_norms_are_known_by_position() -> None:
    rows = np.ones((6, 4), np.float32)
    rows[[0, 3]] *= 10
    found = taken(rows, 2, np.array([0, 1, 2, 0, 1, 99]))
    assert found.norms_at[:3].tolist() == [40, 4, 2]
    assert found.rows_at[:3].tolist() == [2, 2, 1]
    assert found.rows_at[-1] == 1, "what lies beyond is counted with the last"


def test_what_is_not_finite_is_counted_and_spoils_nothing(rows: np.ndarray) -> None:
    broken = rows.copy()
    broken[3, 2], broken[40, 0] = np.nan, np.inf
    found = taken(broken, 64)
    assert found.nonfinite == 2
    assert np.isfinite(np.array([found.norm, found.kurtosis, *found.mean, *found.largest])).all()


def test_huge_values_do_not_overflow() -> None:
    rows = np.array([[3e18, 1], [-3e18, 2], [1e18, 3]], np.float32)
    found = taken(rows, 2)
    assert np.isfinite([found.norm, found.kurtosis, *found.deviation]).all()


def test_a_channel_that_never_changes_has_no_kurtosis() -> None:
    found = taken(np.full((5, 1), 2, np.float32), 2)
    assert np.isnan(found.kurtosis_of_channels).all()
    assert np.isnan(found.kurtosis)

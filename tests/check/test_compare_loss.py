"""The error of storing, for values whose error can be worked out by hand."""

import numpy as np
import pytest

from spile.check.compare import Loss, LossCounter


def test_the_numbers_are_those_of_all_rows_together() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((50, 3, 4)).astype(np.float32)
    exact[..., 0] *= 300  # a channel that dominates
    rounded = (exact * (1 + rng.uniform(-0.1, 0.1, exact.shape))).astype(np.float32)
    stored = (rounded + rng.standard_normal(exact.shape) * 0.01).astype(np.float32)
    counter = LossCounter((3, 4))
    for rows in (slice(0, 7), slice(7, 7), slice(7, 50)):
        counter.add(exact[rows], rounded[rows], stored[rows])
    loss = counter.result()
    wide, off = exact.reshape(50, 12).astype(float), rounded.reshape(50, 12).astype(float)
    found = stored.reshape(50, 12).astype(float)
    distances = [np.linalg.norm(wide[:, c] - off[:, c]) for c in range(12)]
    lengths = [np.linalg.norm(wide[:, c]) for c in range(12)]
    cosines = [
        float(a @ b) / (np.linalg.norm(a) * np.linalg.norm(b))
        for a, b in zip(wide, found, strict=True)
    ]
    overall = np.linalg.norm(wide - off) / np.linalg.norm(wide)
    assert loss.relative_l2 == pytest.approx(overall, rel=1e-9)
    assert loss.typical_channel == pytest.approx(np.median(np.divide(distances, lengths)), rel=1e-9)
    assert loss.cosine == pytest.approx(np.mean(cosines), rel=1e-9)


def test_a_small_channel_shows_where_a_large_one_hides_it() -> None:
    exact = np.ones((10, 5), np.float32)
    exact[:, 0] = 1e4
    rounded = exact.copy()
    rounded[:, 1:] = 0  # nothing is left of them
    counter = LossCounter((5,))
    counter.add(exact, rounded, rounded)
    loss = counter.result()
    assert loss.relative_l2 < 1e-3
    assert loss.typical_channel == 1.0


def test_channels_and_rows_that_are_all_zero_say_nothing() -> None:
    exact = np.array([[3.0, 0, 4], [0, 0, 0]], np.float32)
    rounded = np.array([[3.0, 0, 5], [0, 0, 0]], np.float32)
    counter = LossCounter((3,))
    counter.add(exact, rounded, rounded)
    loss = counter.result()
    assert loss.relative_l2 == pytest.approx(1 / 5)
    assert loss.typical_channel == pytest.approx((0 + 1 / 4) / 2)
    assert loss.cosine == pytest.approx((9 + 20) / (5 * np.sqrt(34)))
    nothing = LossCounter((3,))
    nothing.add(exact[1:], exact[1:], exact[1:])
    assert nothing.result() == Loss(0.0, 0.0, 1.0)


def test_a_single_number_in_each_row_is_one_channel() -> None:
    exact, rounded = np.array([3.0, -4.0], np.float32), np.array([3.0, -4.5], np.float32)
    counter = LossCounter(())
    counter.add(exact, rounded, rounded)
    loss = counter.result()
    assert loss.relative_l2 == loss.typical_channel == pytest.approx(0.1)
    assert loss.cosine == pytest.approx(1.0), "signs agree"


def test_patterns_of_short_contexts_are_counted_at_their_own_positions() -> None:
    rng = np.random.default_rng(1)
    counter = LossCounter((2, 6))
    short, long = (rng.random((5, 2, n)).astype(np.float32) for n in (3, 6))
    counter.add(short, short * np.float32(1.5), short)
    counter.add(long, long, long)
    loss = counter.result()
    sizes = np.square(long.astype(float)).sum(axis=0)
    gaps = np.zeros((2, 6))
    sizes[:, :3] += np.square(short.astype(float)).sum(axis=0)
    gaps[:, :3] = np.square(short.astype(float) / 2).sum(axis=0)
    assert loss.relative_l2 == pytest.approx(np.sqrt(gaps.sum() / sizes.sum()), rel=1e-6)
    assert loss.typical_channel == pytest.approx(np.median(np.sqrt(gaps / sizes)), rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])  # in the reference, rounded, stored
def test_rows_with_what_is_no_number_are_left_out(bad: float, where: int) -> None:
    rng = np.random.default_rng(2)
    exact = rng.standard_normal((6, 2, 4)).astype(np.float32)
    given = [exact, exact * np.float32(1.1), exact * np.float32(1.1) + np.float32(0.01)]
    healthy, spoiled = LossCounter((2, 4)), LossCounter((2, 4))
    healthy.add(*(np.delete(array, 3, axis=0) for array in given))
    given[where] = given[where].copy()
    given[where][3, 1, 2] = bad
    spoiled.add(*given)
    assert spoiled.result() == healthy.result()
    nothing = LossCounter((2, 4))
    nothing.add(*(array[3:4] for array in given))
    assert nothing.result() == Loss(0.0, 0.0, 1.0)

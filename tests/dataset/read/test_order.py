"""The order of rows: uniform by chi-square tests, and shared out evenly among ranks."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

import spile
from spile.core.errors import ConfigError
from spile.dataset.read.order import BatchOptions, Order, RankShare
from spile.dataset.read.rows import StoredRows
from support import stored

ROWS, BLOCK = 3072, 256
LEAST = 1e-3  # of p-values; seeds are fixed, so a test passes always or never


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> StoredRows:
    path = tmp_path_factory.mktemp("order") / "out"
    stored.build(path, ((1000, 24), (1024,), (900, 124)), taps={"logprob": 1}, shard_bytes=4000)
    return spile.open(str(path))._stored


def drawn(rows: StoredRows, seed: int, epoch: int = 0, **options: Any) -> np.ndarray:
    order = Order(rows, BatchOptions(1, seed=seed, **{"window": 1024, **options}), 1)
    windows = [order.window((epoch, number)) for number in range(len(order.ends(epoch)))]
    return np.concatenate([np.empty(0, np.int64), *(found[places] for found, places in windows)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"shuffle": "full"}, marks=pytest.mark.full),
        pytest.param({"window": 5000}, marks=pytest.mark.full),
    ],
)
def test_every_place_of_an_epoch_is_as_likely_for_a_row(
    rows: StoredRows, options: dict[str, Any]
) -> None:
    places = [int(np.flatnonzero(drawn(rows, seed, **options) == 777)[0]) for seed in range(1500)]
    counts, _ = np.histogram(places, 24, (0, ROWS))
    assert stats.chisquare(counts).pvalue > LEAST


@pytest.mark.parametrize("options", [{"shuffle": "full"}, {"window": 5000}])
def test_any_two_rows_are_as_likely_to_be_neighbours(
    rows: StoredRows, options: dict[str, Any]
) -> None:
    table, adjacent = np.zeros((12, 12)), 0
    for seed in range(60):
        order = drawn(rows, seed, **options)
        np.add.at(table, (order[:-1] // BLOCK, order[1:] // BLOCK), 1)
        adjacent += np.count_nonzero(np.diff(order) == 1)
    expected = np.full((12, 12), BLOCK * BLOCK) - BLOCK * np.eye(12)
    expected *= table.sum() / expected.sum()
    assert stats.chisquare(table.ravel(), expected.ravel()).pvalue > LEAST
    # of a random order's pairs, about one is of rows that were neighbours
    assert LEAST < stats.poisson.cdf(adjacent, 60 * (ROWS - 1) / ROWS) < 1 - LEAST


def test_within_a_window_any_two_rows_are_as_likely_to_be_neighbours(rows: StoredRows) -> None:
    """The order of a window's blocks. (The order of all blocks decides which share a window.)"""
    table = np.zeros((4, 4))
    for seed in range(60):
        for window in drawn(rows, seed).reshape(3, 1024):
            _, block = np.unique(window // BLOCK, return_inverse=True)
            np.add.at(table, (block[:-1], block[1:]), 1)
    expected = np.full((4, 4), BLOCK * BLOCK) - BLOCK * np.eye(4)
    expected *= table.sum() / expected.sum()
    assert stats.chisquare(table.ravel(), expected.ravel()).pvalue > LEAST


def test_any_two_blocks_are_as_likely_to_share_a_window(rows: StoredRows) -> None:
    together = np.zeros((12, 12))
    for seed in range(400):
        for window in drawn(rows, seed).reshape(3, 1024):
            blocks = np.unique(window // BLOCK)
            together[np.ix_(blocks, blocks)] += 1
    counts = together[np.triu_indices(12, 1)]
    assert stats.chisquare(counts).pvalue > LEAST


@pytest.mark.parametrize("shuffle", ["window", "full"])
def test_each_epoch_has_an_order_of_its_own(rows: StoredRows, shuffle: str) -> None:
    orders = {drawn(rows, 1, epoch, shuffle=shuffle).tobytes() for epoch in range(5)}
    assert len(orders) == 5
    assert {np.sort(np.frombuffer(o, np.int64)).tobytes() for o in orders} == {
        np.arange(ROWS).tobytes()
    }


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 700}, {"block": 100}])
@pytest.mark.parametrize("where", [None, "pos % 3 == 1", "first", "pos > 99"])
@pytest.mark.parametrize("shuffle", ["window", "full", None])
def test_an_epoch_is_the_rows_that_were_asked_for(
    rows: StoredRows, options: dict[str, Any], where: str | None, shuffle: str | None
) -> None:
    found = drawn(rows, 3, shuffle=shuffle, where=where, **options)
    pos, flags = rows.index(0, ROWS)["pos"], rows.index(0, ROWS)["flags"]
    kept = {None: pos >= 0, "pos % 3 == 1": pos % 3 == 1, "first": flags & 8 != 0,
            "pos > 99": pos > 99}[where]  # fmt: skip
    assert np.array_equal(np.sort(found), np.flatnonzero(kept))
    more: dict[str, Any] = {"window": 1024, **options}
    order = Order(rows, BatchOptions(1, shuffle=shuffle, where=where, **more), 1)  # type: ignore
    assert order.rows == len(found)
    ends = order.ends(0)
    assert np.diff(ends, prepend=0).max(initial=0) <= order.capacity


@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("batch", [1, 5, 64, 100])
def test_ranks_share_every_batch_and_the_epoch_within_one_row(world: int, batch: int) -> None:
    shares = [RankShare(batch, rank, world) for rank in range(world)]
    counts = np.zeros(world, int)
    for position in range(0, 1003, batch):
        size = min(batch, 1003 - position)
        parts = [share.part(position, size) for share in shares]
        assert parts[0][0] == position
        assert parts[-1][1] == position + size
        assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
        counts += [high - low for low, high in parts]
        assert np.ptp(counts) <= 1


def test_a_window_is_given_in_rows_or_bytes() -> None:
    assert BatchOptions(1, window=5).window_rows(100) == 5
    assert BatchOptions(1, window="1MiB").window_rows(1024) == 1024
    for wrong in (0, -1, "much", "10"):
        with pytest.raises(ConfigError, match="window must be"):
            BatchOptions(1, window=wrong).window_rows(100)


@pytest.mark.parametrize(
    "options", [{"seed": -1}, {"shuffle": "all"}, {"block": 0}, {"where": "post > 1"}]
)
def test_what_cannot_be_is_refused(rows: StoredRows, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Order(rows, BatchOptions(1, **{"window": 10, **options}), 1)

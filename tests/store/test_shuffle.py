"""Shuffled batches: every row once, in an order fixed by the seed, resumable anywhere."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
import stored
from spile.errors import ConfigError
from spile.store.shuffle import Batches

TAPS = {"resid_post.0": 3, "mlp_out.1": 2}
LENGTHS = ((700, 300), (900,), (0,), (257, 600), (401,))
ROWS = 3158  # thirteen blocks, the last one short


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    path = tmp_path_factory.mktemp("shuffle") / "out"
    return stored.build(path, LENGTHS, taps=TAPS, dtype="bfloat16", shard_bytes=1000)


@pytest.fixture(scope="module")
def ds(source: stored.Stored) -> spile.Dataset:
    return spile.open(str(source.path))


def batches(ds: spile.Dataset, batch_size: int = 100, **options: Any) -> Batches:
    return ds.batches(list(TAPS), batch_size, **{"window": 1024, **options})


def numbers(source: stored.Stored, index: np.ndarray) -> np.ndarray:
    """The stored row of each entry: its document and offset say which."""
    where = {(e["doc"], e["offset"]): i for i, e in enumerate(source.index)}
    return np.array([where[e["doc"], e["offset"]] for e in index])


def order(source: stored.Stored, items: list[dict[str, np.ndarray]]) -> np.ndarray:
    return numbers(source, np.concatenate([item["index"] for item in items]))


def same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(x[k].tobytes() == y[k].tobytes() for k in x)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(
    ("batch_size", "window"),
    [(1, 1024), (100, 1), (100, 700), (1024, 1024), (5000, 1024), (100, 1 << 16), (5000, 1)],
)
def test_an_epoch_gives_every_row_once(
    source: stored.Stored, ds: spile.Dataset, batch_size: int, window: int
) -> None:
    found = list(batches(ds, batch_size, window=window))
    rows = order(source, found)
    assert np.array_equal(np.sort(rows), np.arange(ROWS))
    for tap in TAPS:
        values = np.concatenate([item[tap] for item in found])
        assert values.dtype == source.rows[tap].dtype
        assert values.tobytes() == source.rows[tap][rows].tobytes()
    assert np.concatenate([i["index"] for i in found]).tobytes() == source.index[rows].tobytes()


def test_batches_have_their_size_and_the_last_one_the_rest(ds: spile.Dataset) -> None:
    found = batches(ds, 1000)
    assert len(found) == 4
    assert [len(item["index"]) for item in found] == [1000, 1000, 1000, 158]


def test_drop_last_drops_only_a_short_batch(ds: spile.Dataset) -> None:
    whole = batches(ds, 1000, drop_last=True)
    assert len(whole) == 3
    assert [len(item["index"]) for item in whole] == [1000] * 3
    exact = batches(ds, ROWS // 2, drop_last=True)
    assert [len(item["index"]) for item in exact] == [ROWS // 2] * 2
    assert list(batches(ds, ROWS + 1, drop_last=True)) == []


def test_a_batch_may_span_windows(source: stored.Stored, ds: spile.Dataset) -> None:
    small = order(source, list(batches(ds, 64)))
    spanning = order(source, list(batches(ds, 2500)))
    assert np.array_equal(small, spanning), "the order does not depend on the batch size"


def test_a_batch_given_out_is_not_overwritten_by_later_ones(ds: spile.Dataset) -> None:
    kept = batches(ds, 300)
    first = next(kept)
    before = {name: value.copy() for name, value in first.items()}
    list(kept)
    assert same([first], [before])


def test_the_seed_fixes_the_order(source: stored.Stored, ds: spile.Dataset) -> None:
    again = spile.open(str(source.path))
    assert same(list(batches(ds, seed=5)), list(batches(again, seed=5)))
    orders = {order(source, list(batches(ds, seed=seed))).tobytes() for seed in range(6)}
    assert len(orders) == 6


def test_without_shuffling_rows_come_as_stored(source: stored.Stored, ds: spile.Dataset) -> None:
    rows = order(source, list(batches(ds, 130, shuffle=False)))
    assert np.array_equal(rows, np.arange(ROWS))


def test_neighbours_are_parted(source: stored.Stored, ds: spile.Dataset) -> None:
    rows = order(source, list(batches(ds, window=1 << 16)))
    # of a random permutation's neighbours, 2 / rows are neighbours in the file
    assert np.mean(np.abs(np.diff(rows)) == 1) < 10 / ROWS
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.1
    windowed = order(source, list(batches(ds, window=1024)))
    assert np.mean(np.abs(np.diff(windowed)) == 1) < 20 / ROWS


def test_the_first_window_is_drawn_from_the_whole_dataset(
    source: stored.Stored, ds: spile.Dataset
) -> None:
    drawn = [order(source, [next(batches(ds, 1024, seed=seed))]) for seed in range(5)]
    assert np.mean([np.ptp(rows) for rows in drawn]) > 0.7 * ROWS
    assert len({np.sort(rows).tobytes() for rows in drawn}) == 5, "each seed draws others"


@pytest.fixture(scope="module", params=["plain", "scaled"])
def shaped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> stored.Stored:
    scaled = request.param == "scaled"
    taps = stored.SCALED if scaled else stored.SHAPED
    path = tmp_path_factory.mktemp("shaped") / "out"
    return stored.build(path, LENGTHS, taps=taps, shard_bytes=3000, compress=scaled)


@pytest.mark.parametrize(("batch_size", "window"), [(100, 1024), (1024, 1), (5000, 1 << 16)])
def test_rows_of_any_shape_and_dtype_go_with_their_index(
    shaped: stored.Stored, batch_size: int, window: int
) -> None:
    ds = spile.open(str(shaped.path))
    found = list(ds.batches(ds.taps, batch_size, window=window, seed=2))
    rows = order(shaped, found)
    assert np.array_equal(np.sort(rows), np.arange(ROWS))
    assert (np.diff(rows) != 1).any()
    for tap, values in shaped.rows.items():
        got = np.concatenate([item[tap] for item in found])
        assert (got.shape, got.dtype) == (values.shape, values.dtype)
        assert got.tobytes() == values[rows].tobytes()
    resumed = ds.batches(ds.taps, batch_size, window=window, seed=2)
    next(resumed)
    fresh = spile.open(str(shaped.path)).batches(ds.taps, batch_size, window=window, seed=2)
    fresh.load_state_dict(resumed.state_dict())
    assert same(list(fresh), found[1:])


# -- resuming --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}, {"window": 1}])
def test_a_state_continues_with_the_same_next_batches(
    ds: spile.Dataset, source: stored.Stored, options: dict[str, Any]
) -> None:
    whole = list(batches(ds, 90, seed=3, **options))
    rng = np.random.default_rng(0)
    for stop in sorted(
        {0, 1, len(whole) - 1, len(whole), *rng.integers(0, len(whole), 8).tolist()}
    ):
        running = batches(ds, 90, seed=3, **options)
        for _ in range(stop):
            next(running)
        state = json.loads(json.dumps(running.state_dict()))
        assert same(list(running), whole[stop:])
        fresh = batches(spile.open(str(source.path)), 90, seed=3, **options)
        fresh.load_state_dict(state)
        assert same(list(fresh), whole[stop:])


def test_an_iterator_can_go_back_to_an_earlier_state(ds: spile.Dataset) -> None:
    running = batches(ds, 90)
    next(running)
    state = running.state_dict()
    rest = list(running)
    running.load_state_dict(state)
    assert same(list(running), rest)


def test_another_batch_size_may_continue(source: stored.Stored, ds: spile.Dataset) -> None:
    whole = order(source, list(batches(ds, 50)))
    running = batches(ds, 50)
    first = [next(running) for _ in range(7)]
    other = batches(ds, 333)
    other.load_state_dict(running.state_dict())
    assert np.array_equal(order(source, [*first, *other]), whole)


@pytest.mark.parametrize("other", [{"seed": 1}, {"window": 2048}, {"shuffle": False}])
def test_the_state_of_another_iteration_is_refused(
    ds: spile.Dataset, other: dict[str, Any]
) -> None:
    state = batches(ds, **other).state_dict()
    with pytest.raises(ConfigError, match=f"another iteration: {next(iter(other))}"):
        batches(ds).load_state_dict(state)


def test_the_state_of_another_dataset_is_refused(ds: spile.Dataset, tmp_path: Path) -> None:
    larger = stored.build(tmp_path / "larger", (*LENGTHS, (5,)), taps=TAPS, dtype="bfloat16",
                          shard_bytes=1 << 20)  # fmt: skip
    state = batches(spile.open(str(larger.path))).state_dict()
    with pytest.raises(ConfigError, match="rows"):
        batches(ds).load_state_dict(state)
    with pytest.raises(ConfigError):
        batches(ds).load_state_dict({})


# -- what is asked for -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_no_rows_is_refused(ds: spile.Dataset, size: int) -> None:
    with pytest.raises(ConfigError, match=f"got {size}"):
        batches(ds, size)


def test_only_the_taps_asked_for_are_given(ds: spile.Dataset) -> None:
    assert next(ds.batches(["mlp_out.1"], 4)).keys() == {"mlp_out.1", "index"}
    assert next(ds.batches([], 4)).keys() == {"index"}


def test_an_interrupt_between_windows_neither_loses_rows_nor_mixes_them(
    source: stored.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = spile.open(str(source.path))
    expected = list(batches(ds, 100, window=256))
    iterator = batches(ds, 100, window=256)
    found = [next(iterator), next(iterator)]
    real = ds.read_into
    calls = 0

    def interrupted(tap: str, start: int, out: np.ndarray) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first tap's buffer is overwritten by then
            raise KeyboardInterrupt
        real(tap, start, out)

    with monkeypatch.context() as patch:
        patch.setattr(ds, "read_into", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert iterator.state_dict()["position"] == 200
    assert same(found + list(iterator), expected)

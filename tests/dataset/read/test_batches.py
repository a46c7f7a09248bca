"""Shuffled batches: every row once, in an order fixed by the seed, resumable anywhere."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, CorruptError
from spile.core.index import BOS, EOS, SPECIAL
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.read.batches import Batches
from support import stored, tiny

TAPS = {"resid_post.0": 3, "mlp_out.1": 2}
LENGTHS = ((700, 300), (900,), (0,), (257, 600), (401,))
ROWS = 3158  # thirteen blocks, the last one short


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    path = tmp_path_factory.mktemp("shuffle") / "out"
    return stored.copied(path, LENGTHS, taps=TAPS, dtype="bfloat16", shard_bytes=1000)


@pytest.fixture(scope="module")
def ds(source: stored.Stored) -> spile.Dataset:
    return spile.open(str(source.path))


def batches(ds: spile.Dataset, batch_size: int = 100, **options: Any) -> Batches:
    return ds.batches(list(TAPS), batch_size, **{"window": 1024, **options})


def numbers(source: stored.Stored, index: np.ndarray) -> np.ndarray:
    """Return the stored row of each entry, which its document and offset identify."""
    where = {(e["doc"], e["offset"]): i for i, e in enumerate(source.index)}
    return np.array([where[e["doc"], e["offset"]] for e in index])


def order(source: stored.Stored, items: list[dict[str, np.ndarray]]) -> np.ndarray:
    return numbers(source, np.concatenate([item["index"] for item in items]))


def in_unit(source: stored.Stored, rows: np.ndarray, unit: int) -> np.ndarray:
    return (rows >= source.starts[unit]) & (rows < source.starts[unit + 1])


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
        assert values.dtype == np.float32
        assert values.tobytes() == source.given[tap][rows].tobytes()
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
    rows = order(source, list(batches(ds, 130, shuffle=None)))
    assert np.array_equal(rows, np.arange(ROWS))


def test_shuffle_may_be_true_or_false_as_in_torch(ds: spile.Dataset) -> None:
    assert same(list(batches(ds, shuffle=True)), list(batches(ds)))
    assert same(list(batches(ds, shuffle=False, seed=1)), list(batches(ds, shuffle=None)))
    state = batches(ds, shuffle=False).state_dict()
    assert state == batches(ds, shuffle=None).state_dict()
    with pytest.raises(ConfigError, match="shuffle is True, False, 'window' or 'full', not 'all'"):
        batches(ds, shuffle="all")


def test_batches_say_what_they_are_and_where_they_stand(ds: spile.Dataset) -> None:
    shuffled = batches(ds, epochs=2, seed=3)
    next(shuffled)
    assert repr(shuffled) == (
        "<spile batches of 100 rows (resid_post.0, mlp_out.1): 3,158 rows an epoch, "
        "shuffle='window', seed=3; at row 100 of epoch 0 of 2>"
    )
    assert "in stored order; at row 0 of epoch 0 of no end>" in repr(
        batches(ds, shuffle=False, epochs=None)
    )


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
    return stored.copied(path, LENGTHS, taps=taps, shard_bytes=3000, compress=scaled)


@pytest.mark.parametrize(("batch_size", "window"), [(100, 1024), (1024, 1), (5000, 1 << 16)])
def test_rows_of_any_shape_and_dtype_go_with_their_index(
    shaped: stored.Stored, batch_size: int, window: int
) -> None:
    ds = spile.open(str(shaped.path))
    found = list(ds.batches(ds.taps, batch_size, window=window, seed=2))
    rows = order(shaped, found)
    assert np.array_equal(np.sort(rows), np.arange(ROWS))
    assert (np.diff(rows) != 1).any()
    for tap, values in shaped.given.items():
        got = np.concatenate([item[tap] for item in found])
        assert (got.shape, got.dtype) == (values.shape, values.dtype)
        assert got.tobytes() == values[rows].tobytes()
    resumed = ds.batches(ds.taps, batch_size, window=window, seed=2)
    next(resumed)
    fresh = spile.open(str(shaped.path)).batches(ds.taps, batch_size, window=window, seed=2)
    fresh.load_state_dict(resumed.state_dict())
    assert same(list(fresh), found[1:])


# -- epochs, rows and forms that are asked for -----------------------------------------------


def test_a_full_shuffle_gives_every_row_once_from_anywhere(
    source: stored.Stored, ds: spile.Dataset
) -> None:
    found = list(batches(ds, 300, shuffle="full"))
    rows = order(source, found)
    assert np.array_equal(np.sort(rows), np.arange(ROWS))
    for tap in TAPS:
        given = np.concatenate([item[tap] for item in found])
        assert given.tobytes() == source.given[tap][rows].tobytes()
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.1
    other = order(source, list(batches(ds, 300, shuffle="full", window=77)))
    assert np.array_equal(rows, other), "what is read together is no part of the order"


def test_each_epoch_gives_every_row_once_in_another_order(
    source: stored.Stored, ds: spile.Dataset
) -> None:
    found = batches(ds, 1000, epochs=3)
    assert len(found) == 12
    items = list(found)
    assert [len(item["index"]) for item in items] == [1000, 1000, 1000, 158] * 3
    epochs = [order(source, items[at : at + 4]) for at in (0, 4, 8)]
    for rows in epochs:
        assert np.array_equal(np.sort(rows), np.arange(ROWS))
    assert len({rows.tobytes() for rows in epochs}) == 3
    endless = batches(ds, 1000, epochs=None, drop_last=True)
    assert [len(next(endless)["index"]) for _ in range(10)] == [1000] * 10
    assert endless.state_dict()["epoch"] == 3
    with pytest.raises(TypeError):
        len(endless)
    assert list(batches(ds, 10, epochs=0)) == []
    assert list(batches(ds, ROWS + 1, epochs=None, drop_last=True)) == []


def test_an_epoch_that_has_ended_is_counted_at_once(ds: spile.Dataset) -> None:
    for drop_last, given in ((False, 4), (True, 3)):
        running = batches(ds, 1000, epochs=2, drop_last=drop_last)
        for _ in range(given):
            next(running)
        state = running.state_dict()
        assert (state["epoch"], state["position"]) == (1, 0)
        rest = [item["index"].tobytes() for item in running]
        assert len(rest) == given and running.state_dict()["epoch"] == 2
        # A state that names the end of the epoch instead continues with the same batch.
        again = batches(ds, 1000, epochs=2, drop_last=drop_last)
        again.load_state_dict({**state, "epoch": 0, "position": min(1000 * given, ROWS)})
        assert [item["index"].tobytes() for item in again] == rest


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"epoch": None}, {"position": 1.0}])
def test_what_is_no_state_is_refused(ds: spile.Dataset, wrong: dict[str, Any]) -> None:
    state = batches(ds).state_dict()
    with pytest.raises(ConfigError, match="no state of this iteration"):
        batches(ds).load_state_dict({**state, **wrong})


@pytest.mark.parametrize("shuffle", ["window", "full", None])
def test_only_rows_that_were_asked_for_are_given(
    source: stored.Stored, ds: spile.Dataset, shuffle: str | None
) -> None:
    found = batches(ds, 100, where="not first and pos % 2 == 0", shuffle=shuffle)
    kept = np.flatnonzero((source.index["pos"] % 2 == 0) & (source.index["flags"] & 8 == 0))
    assert found.rows == len(kept)
    items = list(found)
    rows = order(source, items)
    assert np.array_equal(np.sort(rows), kept)
    assert np.concatenate([i["mlp_out.1"] for i in items]).tobytes() == (
        source.given["mlp_out.1"][rows].tobytes()
    )
    assert list(batches(ds, 100, where="pos > 1000", shuffle=shuffle)) == []
    with pytest.raises(ConfigError, match="--where"):
        batches(ds, where="positive")


@pytest.mark.parametrize("form", ["plain", "scaled"])
def test_rows_are_normalized_by_the_statistics_of_the_dataset(tmp_path: Path, form: str) -> None:
    made = stored.copied(
        tmp_path / "out", taps={"plain": stored.SHAPED, "scaled": stored.SCALED}[form]
    )
    ds = spile.open(str(made.path))
    rows = {tap: values.astype(np.float64) for tap, values in made.rows.items()}
    for tap in ("resid_post.0", "q.1"):
        mean, std = rows[tap].mean(0), rows[tap].std(0)
        length = np.linalg.norm(rows[tap].reshape(111, -1), axis=1).mean()
        wanted = {
            "mean": rows[tap] - mean,
            "std": (rows[tap] - mean) / std,
            "norm": rows[tap] / length * np.sqrt(6),
        }
        for normalize, expected in wanted.items():
            (batch,) = ds.batches(tap, 111, shuffle=None, normalize=normalize)  # type: ignore
            assert batch[tap].dtype == np.float32
            np.testing.assert_allclose(batch[tap], expected, rtol=1e-4, atol=1e-3)
            (half,) = ds.batches(tap, 111, shuffle=None, normalize=normalize, dtype="bfloat16")  # type: ignore
            assert half[tap].tobytes() == batch[tap].astype(half[tap].dtype).tobytes()
    with pytest.raises(ConfigError, match="normalize"):
        ds.batches("q.1", 5, normalize="max")  # type: ignore[arg-type]


def test_rows_are_converted_and_rounded_once(shaped: stored.Stored) -> None:
    ds = spile.open(str(shaped.path))
    for name in ("float32", "bfloat16", "float16"):
        dtype = DTYPES_BY_NAME[name]
        (batch,) = ds.batches(ds.taps, ROWS, shuffle=None, dtype=name)
        for tap, values in shaped.rows.items():
            wanted = values if values.dtype.kind == "i" else values.astype(dtype)
            assert batch[tap].dtype == wanted.dtype
            assert batch[tap].tobytes() == wanted.tobytes()
    (kept,) = ds.batches(ds.taps, ROWS, shuffle=None, dtype="stored")
    assert all(kept[tap].tobytes() == rows.tobytes() for tap, rows in shaped.rows.items())
    with pytest.raises(ConfigError, match="no dtype"):
        ds.batches(ds.taps, 5, dtype="float7")


def test_loaders_get_stored_rows_unless_a_dtype_is_named(shaped: stored.Stored) -> None:
    ds = spile.open(str(shaped.path))
    running = ds.batches(ds.taps, 1000, shuffle=None)
    given = [next(running.unconverted()), next(running), *running.unconverted()]
    for tap in ds.taps:
        rows, wide = shaped.rows[tap], shaped.given[tap]
        wanted = [rows[:1000], wide[1000:2000], rows[2000:3000], rows[3000:]]
        assert [batch[tap].tobytes() for batch in given] == [part.tobytes() for part in wanted]
    (named,) = ds.batches("q.1", ROWS, shuffle=None, dtype="float32").unconverted()
    assert named["q.1"].tobytes() == shaped.given["q.1"].tobytes()


def test_codes_and_scales_can_be_had_as_they_are_stored(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED)
    ds = spile.open(str(made.path))
    for batch in ds.batches(ds.taps, 40, encoded=True):
        rows = numbers(made, batch["index"])
        for tap in ("resid_post.0", "q.1", "v.1"):
            assert batch[tap].codes.tobytes() == made.coded[tap].codes[rows].tobytes()
            assert batch[tap].decode().tobytes() == made.rows[tap][rows].tobytes()
        assert batch["logprob"].tobytes() == made.rows["logprob"][rows].tobytes()


def test_memory_is_used_again_only_when_nobody_looks_at_it(ds: spile.Dataset) -> None:
    iterator = batches(ds, 100)
    view = next(iterator)["mlp_out.1"][5:7, 1]
    kept, seen = view.copy(), set[int]()
    for batch in iterator:
        seen.add(batch["mlp_out.1"].ctypes.data)
        assert not np.shares_memory(batch["mlp_out.1"], view)
        assert np.array_equal(view, kept)
    assert len(seen) <= 3


# -- ranks and workers -----------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("options", [{}, {"shuffle": "full"}, {"where": "pos > 1"}])
def test_ranks_give_the_same_batches_in_parts(
    ds: spile.Dataset, world: int, options: dict[str, Any]
) -> None:
    whole = list(batches(ds, 100, epochs=2, **options))
    ranks = [
        list(batches(ds, 100, epochs=2, rank=rank, world=world, **options)) for rank in range(world)
    ]
    parts = list(zip(*ranks, strict=True))
    joined = [{name: np.concatenate([p[name] for p in part]) for name in part[0]} for part in parts]
    assert same(joined, whole), "disjoint, none missing, and in the one order"
    counts = [sum(len(item["index"]) for item in items) for items in ranks]
    assert max(counts) - min(counts) <= 1


def test_more_ranks_than_rows_stay_in_step(ds: spile.Dataset) -> None:
    given = [batches(ds, 3, rank=rank, world=5) for rank in range(5)]
    for _ in range(4):
        assert sorted(len(next(g)["index"]) for g in given) == [0, 0, 1, 1, 1]
    with pytest.raises(ConfigError, match="rank"):
        batches(ds, rank=2, world=2)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_take_batches_in_turn(ds: spile.Dataset, workers: int) -> None:
    begun = batches(ds, 130, epochs=2)
    for _ in range(5):
        next(begun)
    each = [list(begun.in_turn(worker, workers)) for worker in range(workers)]
    rest = list(begun)
    turns = [each[n % workers][n // workers] for n in range(sum(map(len, each)))]
    assert same(turns, rest)


def test_a_dataset_goes_to_another_process_with_the_units_it_has(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", commit=(0, 1))
    ds = spile.open(str(made.path), partial=True)
    made.ledger.commit(made.attempt(3))
    again = pickle.loads(pickle.dumps(ds))
    assert (again.units, again.num_tokens) == ([0, 1], ds.num_tokens)
    assert same(list(again.batches(ds.taps, 9)), list(ds.batches(ds.taps, 9)))


# -- resuming --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"shuffle": None}, {"drop_last": True}, {"window": 1}])
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


@pytest.mark.varied
def test_random_points_continue_alike_whoever_goes_on(
    ds: spile.Dataset, pytestconfig: pytest.Config
) -> None:
    points = 34 if pytestconfig.getoption("--chaos-full") else 8
    rng = np.random.default_rng(7)
    for options in ({"seed": 4}, {"shuffle": "full"}, {"where": "pos != 3", "window": 300}):
        plan = {"epochs": 3, **options}
        whole = list(batches(ds, 64, **plan))
        for stop in rng.integers(0, len(whole), points).tolist():
            counted = batches(ds, 64, **plan)
            for _ in range(stop):
                assert counted.skip()
            state = json.loads(json.dumps(counted.state_dict()))
            world = int(rng.integers(1, 5))
            ranks = [batches(ds, 64, rank=rank, world=world, **plan) for rank in range(world)]
            parts: list[dict[str, np.ndarray]] = []
            for rank in ranks:
                rank.load_state_dict(state)
                parts.append(next(rank))
                assert rank.state_dict()["position"] == (ranks[0].state_dict()["position"])
            joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            assert same([joined], whole[stop : stop + 1])


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


@pytest.mark.parametrize("other", [{"seed": 1}, {"window": 2048}, {"shuffle": None}])
def test_the_state_of_another_iteration_is_refused(
    ds: spile.Dataset, other: dict[str, Any]
) -> None:
    state = batches(ds, **other).state_dict()
    with pytest.raises(ConfigError, match=f"another iteration: {next(iter(other))}"):
        batches(ds).load_state_dict(state)


def test_a_state_from_when_special_meant_fewer_tokens_is_refused(ds: spile.Dataset) -> None:
    rows = batches(ds, where="not special")
    state = rows.state_dict()
    assert state["special"] == BOS | EOS | SPECIAL
    rows.load_state_dict(state)
    del state["special"]  # as it was before
    with pytest.raises(ConfigError, match="another iteration: special None there, 7 here"):
        rows.load_state_dict(state)
    assert "special" not in batches(ds, where="not bos").state_dict()


def test_the_state_of_another_dataset_is_refused(ds: spile.Dataset, tmp_path: Path) -> None:
    larger = stored.copied(tmp_path / "larger", (*LENGTHS, (5,)), taps=TAPS, dtype="bfloat16",
                          shard_bytes=1 << 20)  # fmt: skip
    state = batches(spile.open(str(larger.path))).state_dict()
    with pytest.raises(ConfigError, match="rows"):
        batches(ds).load_state_dict(state)
    with pytest.raises(ConfigError):
        batches(ds).load_state_dict({})
    state = batches(ds).state_dict()
    for wrong in ({"position": -1}, {"epoch": None}, {"position": "1"}, {"drawn": "otherwise"}):
        with pytest.raises(ConfigError):
            batches(ds).load_state_dict({**state, **wrong})


def test_a_state_of_a_tap_is_not_taken_once_another_recipe_makes_it(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out")
    first, _ = stored.add_pass(made, {"q.0": 4})
    own, added = (spile.open(made.path).batches(tap, 7) for tap in ("resid_post.0", "q.0"))
    first.drop()
    stored.add_pass(made, {"q.0": 4}, dtype="float16")
    again = spile.open(made.path).batches(["resid_post.0", "q.0"], 7)
    with pytest.raises(ConfigError, match=r"another iteration: there q\.0 had another recipe"):
        again.load_state_dict(added.state_dict())
    again.load_state_dict(own.state_dict())  # the rows are the same, in the same order
    again.load_state_dict({**own.state_dict(), "taps": None})  # of an earlier version


# -- what is asked for -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_no_rows_is_refused(ds: spile.Dataset, size: int) -> None:
    with pytest.raises(ConfigError, match=f"got {size}"):
        batches(ds, size)


def test_only_the_taps_asked_for_are_given(ds: spile.Dataset) -> None:
    assert next(ds.batches(["mlp_out.1"], 4)).keys() == {"mlp_out.1", "index"}
    assert next(ds.batches([], 4)).keys() == {"index"}
    assert next(ds.batches(["mlp_out.1"], 4, index=False)).keys() == {"mlp_out.1"}


@pytest.mark.parametrize("compress", [False, True])
def test_what_could_not_be_read_loses_no_rows_and_is_read_again(
    tmp_path: Path, compress: bool
) -> None:
    source = stored.copied(
        tmp_path / "out", LENGTHS, taps=TAPS, shard_bytes=1000, compress=compress
    )
    expected = list(batches(spile.open(str(source.path)), 100, window=256))
    iterator = batches(spile.open(str(source.path)), 100, window=256)
    rows = order(source, expected)
    unit = max((0, 1, 3, 4), key=lambda unit: np.argmax(in_unit(source, rows, unit)))
    damaged = source.done(unit).index.key
    with stored.changed(source, damaged) as paths:
        paths[damaged].write_bytes(b"")
        found: list[dict[str, np.ndarray]] = []
        with pytest.raises(CorruptError, match=re.escape(damaged)):
            found.extend(iterator)
        given = iterator.state_dict()["position"]
        assert 0 < given < ROWS
        with pytest.raises(CorruptError):
            next(iterator)
        assert iterator.state_dict()["position"] == given
    assert same(expected[given // 100 :], list(iterator))


# -- memory ----------------------------------------------------------------------------------

_MEMORY = """
import sys, spile
ds = spile.open(sys.argv[1])

def anonymous():
    with open("/proc/self/status") as file:
        status = file.read()
    return int(status.split("RssAnon:")[1].split()[0]) << 10

def peak(**options):
    most = 0
    for batch in ds.batches(ds.taps, 64, window=1024, **options):
        most = max(most, anonymous())
    return most

next(ds.batches(ds.taps, 8, window=8))  # what is imported late
before = anonymous()
print(max(peak(), peak(shuffle=None), peak(where="pos > 0", epochs=2)) - before)
"""


@pytest.mark.full
@pytest.mark.parametrize("compress", [False, True])
def test_memory_is_two_windows_and_what_is_being_read(tmp_path: Path, compress: bool) -> None:
    made = stored.build(
        tmp_path / "out", ((12_000,), (12_000,)), taps={"resid_post.0": 512}, dtype="float32",
        shard_bytes=1 << 22, compress=compress, seq_len=500,
    )  # fmt: skip
    held = sum(array.nbytes for array in made.rows.values())
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(made.path)], capture_output=True, text=True,
        # What is freed is given back at once: what malloc keeps of it differs from run to run.
        env={**tiny.environment(), "MALLOC_TRIM_THRESHOLD_": "131072"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    window = (1024 + 255) * (512 * 4 + 22)
    most = 2 * window + (16 << 20 if compress else 8 << 20)
    assert int(result.stdout) < most < held, f"{result.stdout} of {held}"

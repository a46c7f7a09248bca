"""Batches straight from the model: the rows that a dataset would hold, each once an epoch."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, DataError, InputError
from spile.core.tensors import DTYPES_BY_NAME
from spile.metrics import Counters
from spile.run.pipeline import display
from spile.run.stream import ActivationStream
from support.marks import some

TAPS = ["resid_post.1", "mlp_out.0"]
RUNTIME = Runtime(batch_tokens=256)


def recipe(model: Path, corpus: Path, **more: Any) -> Recipe:
    fields = {"taps": "resid_post:1,mlp_out:0", "seq_len": 64, "unit_tokens": 500, **more}
    return Recipe(model=str(model), corpus=str(corpus), **fields)


@pytest.fixture(
    scope="module",
    params=some(["bfloat16", "float8_e4m3", "int8"], "float8_e4m3"),
)
def both(
    request: pytest.FixtureRequest,
    model: Path,
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[spile.Dataset, Recipe]:
    """A dataset, and the recipe of the same rows."""
    chosen = recipe(model, corpus, store_dtype=request.param)
    out = str(tmp_path_factory.mktemp("feed") / "out")
    spile.extract(chosen, out, RUNTIME)
    return spile.open(out), chosen


def joined(batches: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.concatenate([batch[name] for batch in batches])


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)
        for a, b in zip(one, other, strict=True)
    )


def left_over() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("spile-stream", "read-"))]


def test_an_epoch_gives_the_rows_of_an_extraction_bit_for_bit(
    both: tuple[spile.Dataset, Recipe],
) -> None:
    ds, chosen = both
    found = list(spile.stream(chosen, RUNTIME, batch_size=100, window=700, seed=3))
    assert {len(batch["index"]) for batch in found[:-1]} == {100}
    assert len(found[-1]["index"]) == (ds.num_tokens - 1) % 100 + 1
    entries, stored = joined(found, "index"), ds.index(0, ds.num_tokens)
    order, wanted = (np.lexsort((i["offset"], i["doc"])) for i in (entries, stored))
    assert entries[order].tobytes() == stored[wanted].tobytes()
    for tap in TAPS:
        rows, kept = joined(found, tap), ds.read(tap, 0, ds.num_tokens)
        assert rows.dtype == kept.dtype
        assert rows[order].tobytes() == np.ascontiguousarray(kept[wanted]).tobytes()
    assert not np.array_equal(order, wanted), "they are shuffled"
    assert left_over() == []


def test_unshuffled_it_is_the_dataset_in_its_order(
    both: tuple[spile.Dataset, Recipe],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ds, chosen = both
    monkeypatch.setattr(display, "_SILENT_SECONDS", 0.002)  # until the first rows
    found = list(spile.stream(chosen, RUNTIME, batch_size=333, window=100, shuffle=False))
    assert same(found, list(ds.batches(TAPS, 333, shuffle=None)))
    assert "spile: computing rows  0:0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def plain(model: Path, corpus: Path) -> Recipe:
    return recipe(model, corpus)


def streamed(chosen: Recipe, batch_size: int = 100, **more: Any) -> ActivationStream:
    return spile.stream(chosen, RUNTIME, **{"batch_size": batch_size, "window": 700, **more})


@pytest.mark.full
def test_the_seed_and_the_window_fix_the_order_whatever_the_batch_size(plain: Recipe) -> None:
    first = list(streamed(plain, seed=1, epochs=2))
    other = list(streamed(plain, 37, seed=1, epochs=2))
    assert joined(first, "index").tobytes() == joined(other, "index").tobytes()
    half = len(joined(first, "index")) // 2
    entries = joined(first, "index")
    assert not np.array_equal(entries[:half], entries[half:]), "each epoch has its own order"
    assert np.array_equal(np.sort(entries[:half]), np.sort(entries[half:]))
    assert not np.array_equal(entries[:half], joined(list(streamed(plain, seed=2)), "index"))


def test_a_state_continues_with_the_same_next_batch(plain: Recipe) -> None:
    begun = streamed(plain, 150, seed=4, epochs=2)
    assert repr(begun).startswith("<spile stream of 150 rows (mlp_out.0, resid_post.1): shuffle=")
    assert repr(begun).endswith("seed=4; at row 0 of epoch 0 of 2>")
    states, whole = [begun.state_dict()], []
    for batch in begun:
        whole.append({name: values.copy() for name, values in batch.items()})
        states.append(begun.state_dict())
    again = streamed(plain, 150, seed=4, epochs=2)
    for at in (len(whole) // 2 + 1, 0, len(whole)):
        again.load_state_dict(json.loads(json.dumps(states[at])))
        assert again.state_dict() == states[at]
        found = [next(again) for _ in range(min(2, len(whole) - at))]
        assert same(found, whole[at : at + 2])
    assert list(again) == []
    again.close()
    with pytest.raises(ConfigError, match="of another stream: seed 4 there, 5 here"):
        streamed(plain, seed=5).load_state_dict(states[0])


@pytest.mark.full
def test_a_state_counts_epochs_and_rows_as_that_of_a_dataset_does(
    both: tuple[spile.Dataset, Recipe],
) -> None:
    ds, chosen = both
    options: dict[str, Any] = {"epochs": 2, "window": 700}
    rows = spile.stream(chosen, RUNTIME, batch_size=999, **options)
    made = ds.batches(TAPS, 999, **options)
    while True:
        one, other = rows.state_dict(), made.state_dict()
        assert [one[key] for key in ("epoch", "position")] == [other["epoch"], other["position"]]
        assert (next(rows, None) is None) == (ended := next(made, None) is None)
        if ended:
            break
    assert (one["epoch"], one["position"]) == (2, 0)


WRONG: list[dict[str, Any]] = [
    {"epoch": -1}, {"epoch": True}, {"position": "0"}, {"position": 701}, {"begin": None},
    {"begin": [0, 0, 0]}, {"begin": [0, 0, 0, -1]}, {"begin": [5, 0, 0, 0]},
    {"begin": [0, 0, 10_000, 0]},
]  # fmt: skip


def test_what_is_no_state_is_refused_and_changes_nothing(plain: Recipe) -> None:
    stream = streamed(plain)
    before = stream.state_dict()
    for wrong in WRONG:
        with pytest.raises(ConfigError, match="no state of this stream"):
            stream.load_state_dict({**before, **wrong})
        assert stream.state_dict() == before, wrong


def test_units_that_are_consumed_are_not_computed_again(plain: Recipe) -> None:
    counters = Counters()
    begun = streamed(plain, 100, counters=counters)
    states, given = [begun.state_dict()], []
    for batch in begun:
        given.append(batch)
        states.append(begun.state_dict())
    everything, state = counters["prepared"], states[-2]
    fewer = Counters()
    again = streamed(plain, 100, counters=fewer)
    again.load_state_dict(state)
    assert same(list(again), given[-1:])
    assert fewer["prepared"] < everything / 2


def test_some_taps_some_rows_another_dtype_and_no_index(plain: Recipe) -> None:
    whole = list(streamed(plain, shuffle=None))
    keep = joined(whole, "index")["pos"] >= 3
    alias = "blocks.1.hook_resid_post"
    found = list(
        streamed(plain, taps=alias, shuffle=None, index=False, where="pos >= 3", dtype="stored")
    )
    assert all(batch.keys() == {alias} for batch in found)
    rows, wide = joined(found, alias), joined(whole, TAPS[0])
    assert (rows.dtype, wide.dtype) == (DTYPES_BY_NAME["bfloat16"], np.float32)
    assert np.array_equal(rows.astype(np.float32), wide[keep])


def test_drop_last_leaves_out_the_short_batch_of_each_epoch(plain: Recipe) -> None:
    found = list(streamed(plain, 900, epochs=2, drop_last=True))
    assert {len(batch["index"]) for batch in found} == {900}
    assert len(found) % 2 == 0


def test_a_slow_reader_holds_back_the_model(plain: Recipe) -> None:
    counters = Counters()
    with streamed(plain, 10, window=20, epochs=None, counters=counters) as stream:
        next(stream)
        waited = time.monotonic()
        while time.monotonic() < waited + 30 and counters["prepared"] < 500:
            time.sleep(0.05)
        before = counters["prepared"]
        time.sleep(0.3)
        assert counters["prepared"] <= before + 1500, "at most the units that are held"
    assert left_over() == []


def test_what_fails_while_computing_is_raised_to_the_reader(
    infinite: Path, corpus: Path, plain: Recipe
) -> None:
    with pytest.raises(DataError, match="NaN or infinity in unit \\d.*, token 0 "):
        list(streamed(recipe(infinite, corpus)))
    assert left_over() == []
    with pytest.raises(InputError, match="the corpus has no rows"):
        list(streamed(plain, where="pos >= 9999"))
    with pytest.raises(ConfigError, match="no tap 'q.0' in the recipe"):
        streamed(plain, taps="q.0")
    assert left_over() == []

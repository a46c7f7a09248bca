"""Lanes: results do not depend on them, and after a failure complete units stay."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.config import Recipe, Runtime
from spile.core.errors import DataError, StoreError
from spile.core.index import FLAGS
from spile.dataset import format as fmt
from spile.dataset.codec.shard import ShardWriter
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.metrics import Counters
from spile.objects import open_objects
from support.stored import unit_files

TAPS = "embed,resid_pre:0,attn_in:0"  # cheap, and one for each lane
SHARDS = Runtime(shard_bytes=4096, batch_tokens=128, write_threads=3)


def recipe(model: Path, corpus: Path, **more: Any) -> Recipe:
    fields = {"taps": TAPS, "seq_len": 64, "unit_tokens": 700, **more}
    return Recipe(model=str(model), corpus=str(corpus), **fields)


def units_on_disk(out: Path) -> tuple[set[int], set[int]]:
    """Return the committed units, and the units that have files."""
    return Ledger(open_objects(str(out))).done_units(), {unit for unit, _ in unit_files(out)}


def fails_on(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    *names: str,
    before: Callable[[str], None] = lambda key: None,
) -> list[str]:
    """Let shards whose key holds all `names` fail; return the requested keys, in order."""
    real, asked = getattr(ShardWriter, method), []

    def failing(self: ShardWriter, *given: Any) -> Any:
        before(self.key)
        asked.append(self.key)
        if all(name in self.key for name in names):
            raise StoreError(f"{self.key}: the disk is on fire")
        return real(self, *given)

    monkeypatch.setattr(ShardWriter, method, failing)
    return asked


def test_as_many_lanes_as_you_like_write_the_same_bytes(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    wanted = recipe(model, corpus, store_dtype="float8_e4m3")
    found: list[dict[tuple[int, str], bytes]] = []
    for threads in (1, 8):
        out = tmp_path / f"{threads}"
        runtime = Runtime(shard_bytes=4096, batch_tokens=128, write_threads=threads)
        spile.extract(wanted, str(out), runtime)
        assert verify(open_objects(str(out))).ok
        found.append(unit_files(out))
    assert found[0] == found[1]
    names = {name for _, name in found[0]}
    assert {"embed.00001.safetensors", "resid_pre.0.00001.safetensors"} < names, "several shards"
    assert len({unit for unit, _ in found[0]}) > 2


def test_an_error_in_a_lane_is_raised_once_and_what_was_committed_stays(
    model: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out, all_writing = tmp_path / "out", threading.Barrier(3)

    def after_the_first(key: str) -> None:
        if "/00000001/" in key:  # so that it is known which units are committed
            deadline = time.monotonic() + 30
            while not (out / fmt.CURRENT.done_key(0)).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            all_writing.wait(30)
            if "/resid_pre.0." not in key:
                time.sleep(0.5)  # the other lanes, those that are asked first, fail later

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "spile"):
        fails_on(patch, "write", "/00000001/", before=after_the_first)
        before = threading.active_count()
        with pytest.raises(StoreError, match=r"resid_pre\.0.*the disk is on fire"):
            spile.extract(recipe(model, corpus), str(out), replace(SHARDS, queue_depth=64))
        assert threading.active_count() == before, "every lane has ended"
    assert caplog.messages == [], "three lanes have failed, and one of them is heard"
    assert units_on_disk(out) == ({0}, {0})
    report = verify(open_objects(str(out)), partial=True)
    assert (report.faults, report.orphans, report.units_done) == ([], [], 1)
    kept = unit_files(out)
    spile.extract(recipe(model, corpus), str(out), SHARDS)
    assert verify(open_objects(str(out))).ok
    assert kept.items() <= unit_files(out).items()


def test_where_one_lane_fails_the_others_begin_nothing_more(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()

    def before(key: str) -> None:
        if "/embed." in key:
            time.sleep(0.5)  # so that batches wait in every lane's queue
            failing.set()
        else:
            failing.wait()
            time.sleep(0.3)

    whole = recipe(model, corpus, unit_tokens=None)
    asked = fails_on(monkeypatch, "write", "/embed.", before=before)
    runtime = Runtime(batch_tokens=64, write_threads=3, queue_depth=4)
    with pytest.raises(StoreError, match="on fire"):
        spile.extract(whole, str(tmp_path / "out"), runtime)
    taps = [key.rpartition("/")[2].removesuffix(".00000.safetensors") for key in asked]
    assert sorted(taps) == ["attn_in.0", "embed", "resid_pre.0"]
    assert units_on_disk(tmp_path / "out") == (set(), set())


def test_an_ended_unit_is_committed_though_a_faster_lane_fails_later(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, failing = tmp_path / "out", threading.Event()

    def before(key: str) -> None:
        if "/00000001/" in key and "/embed." in key:
            failing.set()
        elif "/00000000/" in key and "/attn_in.0." in key:
            assert failing.wait(30)  # this lane is a unit behind
            time.sleep(0.2)

    fails_on(monkeypatch, "write", "/00000001/", "/embed.", before=before)
    # Batches enough wait in a queue for the fast lane to reach the next unit.
    runtime = Runtime(batch_tokens=256, write_threads=3, queue_depth=16)
    with pytest.raises(StoreError, match="on fire"):
        spile.extract(recipe(model, corpus), str(out), runtime)
    assert units_on_disk(out) == ({0}, {0})
    assert verify(open_objects(str(out)), partial=True).faults == []


def test_an_error_while_a_shard_is_made_durable_is_raised(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, next_one = tmp_path / "out", threading.Event()

    def written(key: str) -> None:
        if "/attn_in.0.00001" in key:
            next_one.set()

    def closing(key: str) -> None:
        if "/attn_in.0.00000" in key:
            assert next_one.wait(30), "it is written on meanwhile"

    with monkeypatch.context() as patch:
        fails_on(patch, "write", "no such shard", before=written)
        fails_on(patch, "close", "/attn_in.0.00000", before=closing)
        with pytest.raises(StoreError, match="on fire"):
            spile.extract(recipe(model, corpus), str(out), SHARDS)
    assert units_on_disk(out) == (set(), set())
    spile.extract(recipe(model, corpus), str(out), SHARDS)
    assert verify(open_objects(str(out))).ok


def test_the_surprise_of_next_tokens_is_counted_without_last_ones(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    counters, out = Counters(), str(tmp_path / "out")
    recipe = Recipe(model=str(model), corpus=str(corpus), taps="logprob,embed", seq_len=64)
    spile.extract(recipe, out, counters=counters)
    ds = spile.open(out)
    rows = ds.read("logprob", 0, ds.num_tokens).astype(np.float64)
    known = ds.index(0, ds.num_tokens)["flags"] & FLAGS["last"] == 0
    assert counters["predicted"] == np.count_nonzero(known) < ds.num_tokens
    assert counters["surprise"] == pytest.approx(-rows[known].sum(), rel=1e-5)


def test_what_int8_cannot_hold_is_refused_whatever_is_allowed(
    corpus: Path, tmp_path: Path, infinite: Path
) -> None:
    for dtype, allow in (("float8_e4m3", False), ("int8", True)):
        wanted = recipe(infinite, corpus, taps="embed", store_dtype=dtype)
        with pytest.raises(DataError, match="embed: NaN or infinity in unit 0") as caught:
            spile.extract(wanted, str(tmp_path / dtype), Runtime(allow_nonfinite=allow))
        assert ("int8 cannot hold" in str(caught.value)) == (dtype == "int8")
        assert units_on_disk(tmp_path / dtype) == (set(), set())
    kept = recipe(infinite, corpus, taps="embed", store_dtype="float8_e4m3")
    spile.extract(kept, str(tmp_path / "kept"), Runtime(allow_nonfinite=True))
    dataset = spile.open(str(tmp_path / "kept"))
    rows = dataset.read("embed", 0, dataset.num_tokens)
    assert dataset.statistics("embed").nonfinite == np.isnan(rows).sum() > 0

"""Stages that fail: nothing committed is lost, nobody waits forever, the cause is raised."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import spile
from spile.core.config import Recipe, Runtime
from spile.core.errors import DataError, Interrupted, StoreError
from spile.core.units import Unit
from spile.corpus.reader import CorpusReader
from spile.dataset.maintain.verify import verify
from spile.dataset.records.heartbeat import Presence, read_workers
from spile.dataset.write.unit_writer import UnitWriter
from spile.metrics import Counters
from spile.objects import local as objects
from spile.objects import open_objects
from spile.plan.job import ExtractionJob
from spile.run.pipeline import worker as pipeline
from spile.run.step.sweep import Sweep


def recipe(model: Path, corpus: Path, **more: Any) -> Recipe:
    fields = {"taps": "resid_post:1", "seq_len": 64, "unit_tokens": 500, **more}
    return Recipe(model=str(model), corpus=str(corpus), **fields)


def test_a_commit_whose_sync_fails_keeps_the_files_its_record_names(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = objects.sync

    def failing(folder: Path) -> None:
        if folder.parent.name == "done" and any(folder.glob("*.json")):
            raise OSError(24, "Too many open files")
        real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "sync", failing)
        with pytest.raises(StoreError, match="Too many open files"):
            spile.extract(recipe(model, corpus), str(out))
    report = verify(open_objects(str(out)), partial=True)
    assert (report.faults, report.units_done) == ([], 1)
    spile.extract(recipe(model, corpus), str(out))
    assert verify(open_objects(str(out))).ok


def test_a_failed_writer_ends_the_wait_for_units_that_others_hold(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    other = Presence(open_objects(str(out)), 30)
    other.start()
    for unit in range(1, 50):
        other.hold(unit)
    monkeypatch.setattr("spile.dataset.records.heartbeat.process_ended", lambda record: False)

    def failing(self: UnitWriter, *parts: Any, **described: Any) -> None:
        raise StoreError("the disk is on fire")

    monkeypatch.setattr(UnitWriter, "finish", failing)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            spile.extract(recipe(model, corpus), str(out))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    other.close("done")
    assert [str(error) for error in raised] == ["the disk is on fire"]


def test_what_is_counted_is_what_was_read_and_what_was_written(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    counters, out = Counters(), tmp_path / "out"
    kept = recipe(model, corpus, taps="embed,logprob", where="doc in (3, 30)")
    outcome = spile.extract(kept, str(out), counters=counters)
    assert counters["units"] == outcome.units > 2
    assert counters["bytes"] == outcome.rows * (32 * 2 + 4)
    records = [json.loads(path.read_bytes()) for path in sorted((out / "done").glob("*/*"))]
    assert counters["tokens"] == sum(record["tokens"] for record in records)
    assert [record["rows"] > 0 for record in records].count(True) == 2
    (worker,) = (json.loads(path.read_bytes()) for path in (out / "workers").iterdir())
    assert worker["tokens"] == counters["tokens"]


def test_tidying_up_never_hides_the_cause(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: UnitWriter, *arguments: Any) -> None:
        raise StoreError("the first cause")

    def hopeless(self: UnitWriter) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(UnitWriter, "write", failing)
    monkeypatch.setattr(UnitWriter, "discard", hopeless)
    with pytest.raises(StoreError, match="the first cause"):
        spile.extract(recipe(model, corpus), str(tmp_path / "out"))


def test_only_the_unit_that_computes_and_the_next_are_kept_from_others(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    writing, go_on = threading.Event(), threading.Event()
    real = UnitWriter.write

    def slow(self: UnitWriter, *given: Any) -> None:
        writing.set()
        go_on.wait(60)
        real(self, *given)

    monkeypatch.setattr(UnitWriter, "write", slow)
    wanted = recipe(model, corpus, taps="embed", unit_tokens=400)
    runtime = Runtime(batch_tokens=64, queue_depth=1)
    thread = threading.Thread(target=lambda: spile.extract(wanted, str(out), runtime), daemon=True)
    thread.start()
    try:
        assert writing.wait(60)
        time.sleep(0.3)  # time enough to take more
        (worker,) = read_workers(open_objects(str(out))).values()
        assert worker["units"] == [0, 1]
    finally:
        go_on.set()
        thread.join(60)
    (worker,) = read_workers(open_objects(str(out))).values()
    assert (worker["state"], worker["units"]) == ("done", [])
    report = verify(open_objects(str(out)))
    assert report.ok and report.units_done > 4


def test_a_unit_that_is_whole_is_committed_when_the_next_cannot_be_read(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", pipeline.prepare_unit

    def failing(
        job: ExtractionJob, reader: CorpusReader, unit: Unit, *more: Any, **named: Any
    ) -> Any:
        if unit.first_doc > 0:
            raise DataError("the corpus is on fire")
        return real(job, reader, unit, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "prepare_unit", failing)
        with pytest.raises(DataError, match="the corpus is on fire"):
            spile.extract(recipe(model, corpus, taps="embed"), str(out))
    report = verify(open_objects(str(out)), partial=True)
    assert (report.faults, report.orphans, report.units_done) == ([], [], 1)


def test_a_stop_starts_no_other_step_and_says_what_will_be_redone(
    model: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a CPU a step may take long, and cannot be taken back."""
    stop, running, ends = (threading.Event() for _ in range(3))
    started: list[int] = []
    real = Sweep.__call__

    class Finished:
        def block_until_ready(self) -> None:
            running.set()
            assert ends.wait(60)

    def held(step: Sweep, batch: Any) -> Any:
        output = real(step, batch)
        started.append(output.tokens)
        object.__setattr__(output, "finished", Finished())
        return output

    def stopping() -> None:
        assert running.wait(60)
        stop.set()
        until = time.monotonic() + 60
        while "stopping" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        ends.set()

    monkeypatch.setattr(Sweep, "__call__", held)
    caplog.set_level("INFO", "spile")
    thread = threading.Thread(target=stopping)
    thread.start()
    with pytest.raises(Interrupted):
        spile.extract(
            recipe(model, corpus), str(tmp_path / "out"), Runtime(batch_tokens=64), stop=stop
        )
    thread.join()
    assert len(started) == 1
    said = f"stopping: finishing the step in hand; {started[0]} tokens of an unfinished unit will"
    assert said in caplog.text
    report = verify(open_objects(str(tmp_path / "out")), partial=True)
    assert (report.faults, report.orphans, report.units_done) == ([], [], 0)

"""Status: the progress of a dataset, from its store alone."""

import dataclasses
import json
import signal
from pathlib import Path

import pytest

from spile.cli.look import status_text
from spile.core.errors import StoreError
from spile.dataset import format as fmt
from spile.dataset.format import TapInfo
from spile.dataset.records.heartbeat import Presence
from spile.status.status import read_status
from support import stored

UNITS = ((5, 9, 0), (9,), (0, 3))


@pytest.fixture
def complete(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", UNITS)


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", UNITS, commit=(2,))


def test_a_complete_dataset_is_added_up(complete: stored.Stored) -> None:
    status = read_status(complete.objects)
    assert status.state == "complete"
    assert (status.units, status.units_done) == (3, 3)
    assert (status.documents, status.documents_total) == (4, 6)
    assert status.rows == status.tokens == len(complete.index) == 26
    assert status.tokens_estimated == 26
    assert status.skipped == {"no tokens": 2}
    files = list(complete.objects.list("attempts/"))
    assert status.bytes == sum(complete.objects.size(key) for key in files)
    assert status.taps == {tap: [width] for tap, width in stored.TAPS.items()}
    assert status.fingerprint == complete.table.fingerprint
    assert status.recipe == complete.table.recipe.to_json()
    assert status.workers == []


def test_an_unfinished_dataset_counts_what_is_done(unfinished: stored.Stored) -> None:
    status = read_status(unfinished.objects)
    assert status.state == "unfinished"
    assert (status.units, status.units_done, status.rows) == (3, 1, 3)
    assert (status.documents, status.documents_total) == (1, 6)
    assert status.tokens_estimated == 26
    assert status.skipped == {"no tokens": 1}


def test_taps_are_told_by_layer(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", UNITS, taps={"resid_post.10": 4, "resid_post.9": 4})
    assert [*read_status(made.objects).taps] == ["resid_post.9", "resid_post.10"]
    assert "taps       resid_post.9 [4], resid_post.10 [4]" in status_text(
        "out", read_status(made.objects)
    )


def test_rows_kept_are_told_from_tokens_read(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, taps=stored.SHAPED, where="pos in (1, 2)")
    status = read_status(dataset.objects)
    assert (status.rows, status.tokens, status.tokens_estimated) == (8, 26, 26)
    assert status.documents == 4, "documents are counted as they were read"
    assert status.taps == {
        "resid_post.0": [6], "q.1": [2, 3], "expert_ids.1": [2], "logprob": [],
    }  # fmt: skip
    text = status_text("acts/x", status)
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert lines["rows"][0] == "8"
    assert lines["tokens"][0] == "26"
    assert "q.1 [2, 3]" in text
    assert "resid_post.0 [6]" in text


def test_attempts_without_a_record_count_for_nothing(unfinished: stored.Stored) -> None:
    before = read_status(unfinished.objects)
    unfinished.attempt(0)
    assert read_status(unfinished.objects) == before


def test_a_worker_at_work_is_running_and_a_killed_one_is_dead(unfinished: stored.Stored) -> None:
    with stored.worker_process(unfinished.path, 1) as (name, process):
        status = read_status(unfinished.objects)
        assert status.state == "running"
        (worker,) = status.workers
        assert (worker["name"], worker["state"]) == (name, "running")
        assert (worker["units"], worker["tokens"], worker["pid"]) == ([1], 12, process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        status = read_status(unfinished.objects)
        assert status.state == "unfinished"
        assert [worker["state"] for worker in status.workers] == ["dead"]


def test_a_failed_worker_gives_its_reason(unfinished: stored.Stored) -> None:
    worker = Presence(unfinished.objects, 30)
    worker.start()
    worker.close("failed", error="StoreError: disk full")
    status = read_status(unfinished.objects)
    assert status.state == "unfinished"
    assert (status.workers[0]["state"], status.workers[0]["error"]) == (
        "failed",
        "StoreError: disk full",
    )


def test_a_dataset_whose_units_are_all_done_is_complete_whoever_lives(
    complete: stored.Stored,
) -> None:
    worker = Presence(complete.objects, 30)
    worker.tell(state="running")
    worker.hold(0)
    assert read_status(complete.objects).state == "complete"


def test_a_torn_heartbeat_is_no_obstacle(unfinished: stored.Stored) -> None:
    unfinished.objects.create("workers/torn.json", b'{"units": [')
    assert read_status(unfinished.objects).workers == []


def test_a_status_is_json(unfinished: stored.Stored) -> None:
    Presence(unfinished.objects, 30).close("done")
    status = read_status(unfinished.objects)
    assert json.loads(json.dumps(status.to_json())) == status.to_json()
    assert status.to_json()["units_done"] == 1


def test_taps_that_are_added_have_their_own_progress_and_workers(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", UNITS)
    alone = read_status(made.objects)
    whole, _ = stored.add_pass(made, {"z.0": 4})
    part, rows = stored.add_pass(made, {"q.0": TapInfo((2, 3), "float32")}, commit=(2,))
    with stored.worker_process(tmp_path / "out" / fmt.pass_prefix(part.name), 1) as (name, _):
        status = read_status(made.objects)
    added = {each.name: each for each in status.passes}
    assert dataclasses.replace(status, passes=[]) == alone and not status.over
    assert (added[whole.name].state, added[whole.name].workers) == ("complete", [])
    running = added[part.name]
    assert (running.state, running.units, running.units_done) == ("running", 3, 1)
    assert running.taps == {"q.0": [2, 3]} and [w["name"] for w in running.workers] == [name]
    sizes = map(part.objects.size, part.objects.list("attempts/"))
    assert running.bytes == sum(sizes)
    lines = status_text("acts/x", status).splitlines()
    assert lines[0] == "acts/x: complete"
    assert any(line.startswith("  added      z.0 [4]: 3 of 3 units, ") for line in lines)
    at = next(n for n, line in enumerate(lines) if line.startswith("  adding     q.0 [2, 3]: 1 of"))
    assert lines[at].endswith(", running") and name in lines[at + 2]
    assert status.to_json()["passes"][0]["units"] == 3
    for unit in (0, 1):
        assert part.ledger.commit(stored.write_added(made, part, unit, rows))
    waiting = {each.name: each.state for each in read_status(made.objects).passes}
    assert waiting[part.name] == "unfinished", "readers show it once it has a manifest"
    assert part.ledger.complete(part.ledger.table())
    assert read_status(made.objects).over
    part.drop()
    assert [each.name for each in read_status(made.objects).passes] == [whole.name]


def test_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no dataset"):
        read_status(stored.LocalObjects(tmp_path / "nowhere"))

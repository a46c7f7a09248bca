"""Workers: running, stale, failed or done processes, and shares that nobody has taken."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spile.cli.look import status_text
from spile.dataset.records.heartbeat import HeartbeatObserver
from spile.status.status import Status, read_status
from spile.status.workers import describe_workers, rate_of
from support import stored, tiny, zygote

SLICE = """
import sys
from pathlib import Path
from spile.run.pipeline.progress import Meter
from spile.metrics import Counters
from spile.objects import LocalObjects
from spile.dataset.records import heartbeat
from spile.dataset.records.heartbeat import Presence
heartbeat._BEAT_SECONDS = 0.1
presence, counters = Presence(LocalObjects(Path(sys.argv[1])), 30), Counters()
presence.tell(share=sys.argv[2])
presence.report(Meter(counters).beat)
presence.start()
presence.tell(state="running", units_done=1)
presence.hold(int(sys.argv[3]))
print(presence.name, flush=True)
for line in sys.stdin:
    counters.add(tokens=int(line.split()[1])) if line.startswith("did") else None
    if line.startswith("end"):
        _, state, error = line.split(maxsplit=2)
        presence.close(state, **({"error": error.strip()} if error.strip() != "-" else {}))
        break
"""


class Slice:
    """A process that sends heartbeats as a worker does."""

    def __init__(self, path: Path, share: str, unit: int) -> None:
        self.process = zygote.Popen(
            [sys.executable, "-c", SLICE, str(path), share, str(unit)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=tiny.environment(),
        )  # fmt: skip
        assert self.process.stdout
        self.name = self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, state: str, error: str = "-") -> None:
        self.say(f"end {state} {error}")
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", commit=(0, 1))


@contextlib.contextmanager
def started(path: Path, *shares: str) -> Iterator[list[Slice]]:
    slices: list[Slice] = []
    try:
        for unit, share in enumerate(shares, 2):
            slices.append(Slice(path, share, unit))
        yield slices
    finally:
        for each in slices:
            each.kill()


def seen(look: Callable[[], Status], name: str, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Poll until a worker has the wanted state."""
    limit = time.monotonic() + 120
    while True:
        (worker,) = (w for w in look().workers if w["name"] == name)
        if wanted(worker):
            return worker
        assert time.monotonic() < limit, worker
        time.sleep(0.1)


def test_slices_that_stand_still_have_failed_are_done_or_never_came(
    unfinished: stored.Stored,
) -> None:
    with started(unfinished.path, "0/4", "1/4", "2/4") as (still, failed, done):
        observer = HeartbeatObserver(stale_after=1.0)

        def look() -> Status:
            return read_status(unfinished.objects, observer)

        still.say("did 100")
        failed.end("failed", "StoreError: the disk is full")
        done.end("done")
        seen(look, still.name, lambda w: w["progress"].get("tokens") and w["state"] == "running")
        still.process.send_signal(signal.SIGSTOP)
        stale = seen(look, still.name, lambda w: w["state"] == "stale")
        assert stale["unmoved_seconds"] >= 1.0 and stale["units"] == [2]
        status = look()
        assert status.state == "unfinished", "nobody is known to be at work"
        states = {w["share"]: w["state"] for w in status.workers}
        assert states == {"0/4": "stale", "1/4": "failed", "2/4": "done", "3/4": "not started"}
        text = status_text("acts", status)
        assert "1 failed, 1 stale, 1 not started, 1 done" in text
        lines = {word: line for line in text.splitlines() for word in line.split()}
        assert "StoreError: the disk is full" in lines[failed.name]
        assert "last beat" in lines[still.name] and "about" not in lines[still.name]
        assert "share 3/4  not started" in text

        # The first look cannot know that: it knows only the age that the record states.
        once = read_status(unfinished.objects)
        assert once.state == "running"
        (line,) = (w for w in status_text("acts", once).splitlines() if still.name in w)
        assert "running" in line and "by its clock" in line and "last beat about" in line

        still.process.send_signal(signal.SIGCONT)
        seen(look, still.name, lambda w: w["state"] == "running")
        still.kill()
        assert seen(look, still.name, lambda w: w["state"] != "running")["state"] == "dead"


def test_a_share_that_was_started_again_is_shown_as_it_is_now(unfinished: stored.Stored) -> None:
    with started(unfinished.path, "0/2") as (first,):
        first.end("failed", "DataError: NaN")
    with started(unfinished.path, "0/2") as (second,):
        workers = read_status(unfinished.objects).workers
        assert [(w["name"], w["state"]) for w in workers] == [
            (second.name, "running"),
            ("share 1/2", "not started"),
        ]
        assert workers[0]["earlier"] == 1
        assert "started 2 times" in status_text("acts", read_status(unfinished.objects))


def record(**changes: Any) -> dict[str, Any]:
    return {"state": "running", "units": [1], "counter": 3, "pid": 1, "host": "elsewhere",
            "boot": "x", **changes}  # fmt: skip


def test_rates_add_up_and_the_slowest_of_several_is_named() -> None:
    fast, slow = {"rate": 900.0, "tokens": 500}, {"rate": 100.0, "tokens": 200}
    workers = describe_workers({
        "a": record(progress=fast), "b": record(progress=slow),
        "c": record(progress=fast, state="done"),
        "d": record(progress=fast, world={"coordinator": "h:1", "process": 1}),
    })  # fmt: skip
    assert rate_of(workers) == (1000.0, "b"), "of a world the leader speaks for all"
    assert {w["name"]: w.get("lag") for w in workers} == {"a": 0, "b": 300, "c": None, "d": None}
    assert rate_of([w for w in workers if w["name"] == "a"]) == (900.0, None)
    assert rate_of([]) == (None, None)


@pytest.mark.parametrize(
    "progress", [None, 3, [], {"rate": "fast"}, {"rate": -1}, {"tokens": 1e30, "updated": True}]
)
def test_a_stranger_s_progress_is_left_out(progress: Any) -> None:
    (worker,) = describe_workers({"a": record(progress=progress)})
    assert worker["progress"] == {} and "beat_age_seconds" not in worker
    assert rate_of([worker]) == (None, None)


@pytest.mark.parametrize("value", ["many\x1b[2J", -3, [1], {"a": 1}, 1.5, True])
@pytest.mark.parametrize("name", ["units_done", "tokens", "share", "error", "state"])
def test_a_stranger_s_words_are_shown_as_words(
    name: str, value: Any, unfinished: stored.Stored
) -> None:
    status = read_status(unfinished.objects)
    workers = describe_workers({"a": record(**{name: value}), "b": record()})
    text = status_text("acts", dataclasses.replace(status, workers=workers))
    assert "\x1b" not in text and " a" in text


def test_a_stranger_s_number_of_shares_is_no_reason_to_list_them_all() -> None:
    assert len(describe_workers({"a": record(share="0/999999999")})) == 1

"""The parent of a working process: what it passes on, and its report when the child is gone."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spile.dataset.records.heartbeat import Presence
from spile.objects import open_objects
from spile.run.world.rank import Rank
from support.marks import some
from support.worlds import ABORTED, Member, planted, runs, wait_until

RANK = Rank("127.0.0.1:9", 3, 0)
JOINED = ("--coordinator", RANK.coordinator, "--num-processes", "3", "--process-id", "0")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Member]]:
    """A parent whose child runs only the code given here."""
    started: list[Member] = []

    def start(code: str) -> Member:
        flags = ("extract", "--out", str(tmp_path / "out"), *JOINED)
        started.append(Member(flags, planted(tmp_path / "plant", code)))
        return started[-1]

    yield start
    for member in started:
        member.end()


def ended(member: Member) -> int:
    wait_until(lambda: member.poll() is not None, 20, lambda: member.err)
    return member.process.returncode


@pytest.mark.parametrize("code", some([0, 2, 3, 130], 3))
def test_an_exit_code_is_passed_on_without_a_word(
    code: int, start: Callable[[str], Member]
) -> None:
    member = start(f"os._exit({code})")
    assert ended(member) == code
    assert member.err == ""


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_signal_is_passed_on(
    number: signal.Signals, start: Callable[[str], Member], tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    member = start(
        "import pathlib, signal, time\n"
        f"signal.signal({int(number)}, lambda *_: os._exit(42))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)"
    )
    wait_until(ready.exists, 20)
    member.process.send_signal(number)
    assert ended(member) == 42


def test_the_child_ends_with_its_parent(start: Callable[[str], Member]) -> None:
    member = start("import time\ntime.sleep(60)")
    wait_until(lambda: member.worker() is not None, 20)
    worker = member.worker()
    assert worker
    began = time.monotonic()
    member.process.kill()
    wait_until(lambda: not runs(worker), 10)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("number", "named"),
    some(
        [(signal.SIGKILL, "when memory runs out"), (signal.SIGSEGV, "signal 11")],
        (signal.SIGKILL, "when memory runs out"),
    ),
)
def test_a_child_that_was_killed_is_told_of_in_one_line(
    number: signal.Signals, named: str, start: Callable[[str], Member]
) -> None:
    member = start(f"os.kill(os.getpid(), {int(number)})")
    assert ended(member) == 128 + number
    assert member.err.startswith("spile [slice 0, process 0 of 3]: its process was ended by signal")
    assert named in member.err
    assert member.err.endswith("start all processes again\n")
    assert member.err.count("\n") == 1


def test_a_world_that_nobody_else_came_to_names_who_is_missing(
    start: Callable[[str], Member], tmp_path: Path
) -> None:
    old, present = came(tmp_path, 1), came(tmp_path, 2, start=False)
    # The first one's only word falls before this process begins: it is of an earlier world.
    member = start(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n"
        "    time.sleep(0.01)\n"
        "os.abort()"
    )
    wait_until(lambda: member.worker() is not None, 20)
    present.start()
    (tmp_path / "go").touch()
    assert ended(member) == ABORTED
    assert "processes 0, 1 of 3 never joined" in member.last_line
    for presence in (old, present):
        presence.close("done")


def test_a_world_that_had_begun_its_work_misses_nobody(
    start: Callable[[str], Member], tmp_path: Path
) -> None:
    """Other processes may use another name of the coordinator."""
    member = start(
        "from spile.objects import open_objects\n"
        "from spile.dataset.records.heartbeat import Presence\n"
        f"presence = Presence(open_objects({str(tmp_path / 'out')!r}), 30)\n"
        f"world = {{'coordinator': {RANK.coordinator!r}, 'process': 0}}\n"
        "presence.tell(state='running', world=world)\n"
        "presence.start()\n"
        "os.abort()"
    )
    assert ended(member) == ABORTED
    assert "a process stopped answering, and the world ended with it" in member.last_line


def came(folder: Path, process: int, *, start: bool = True) -> Presence:
    presence = Presence(open_objects(str(folder / "out")), 30)
    presence.tell(world={"coordinator": RANK.coordinator, "process": process})
    if start:
        presence.start()
        presence._stop.set()  # no second word
    return presence

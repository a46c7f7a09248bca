"""Restarting a slice: when, after what pause, how often, and how a stop reaches it."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.harness import check_refused, run
from spile.core.errors import ConfigError
from spile.dataset import format as fmt
from spile.fleet.supervise import Patience
from support import stored, tiny
from support.worlds import Member, planted, runs, wait_until

Start = Callable[..., Member]
ALONE = ("--world", "host")  # so that nobody looks for a cluster, which takes a second
# The n-th start of the child finds n words in `starts`; the last one is its own.
COUNTED = """
import pathlib, signal, sys, time
starts = pathlib.Path({starts!r})
with starts.open("a") as file:
    file.write("x")
nth = len(starts.read_text())
"""
# What a worker that has done a unit leaves in the store.
WORKED = """
from spile.objects import open_objects
from spile.dataset.records.heartbeat import Presence
presence = Presence(open_objects({out!r}), 30)
presence.tell(state="running", units_done=1)
presence.start()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Supervise a child that runs only the code given here."""
    started: list[Member] = []

    def start(code: str, *flags: str, joined: tuple[str, ...] = ALONE) -> Member:
        names = {"starts": str(tmp_path / "starts"), "out": str(tmp_path / "out")}
        code = (COUNTED + code).format(**names)
        command = ("supervise", "--backoff", "0.01", *flags, "--")
        command += ("extract", "--out", names["out"], *joined)
        started.append(Member(command, planted(tmp_path / "plant", code)))
        return started[-1]

    yield start
    for member in started:
        member.end()


def ended(member: Member) -> int:
    wait_until(lambda: member.poll() is not None, 30, lambda: member.err)
    return member.process.returncode


def starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text()) if path.exists() else 0


def test_what_may_pass_is_started_again_with_one_line_that_says_why(
    start: Start, tmp_path: Path
) -> None:
    failures = {
        "os._exit(3)": "a data or store fault (exit 3)",
        "os._exit(134)": "a process of its world was lost (exit 134)",
        "os._exit(130)": "another process of its world was told to stop (exit 130)",
        "os.kill(os.getpid(), 9)": "signal 9 (Killed), as the kernel does when memory runs out",
        "os.abort()": "signal 6 (Aborted)",
        "os.kill(os.getpid(), 11)": "signal 11 (Segmentation fault)",
        "os._exit(77)": "exit 77",
    }
    plant = "".join(f"if nth == {n}: {code}\n" for n, code in enumerate(failures, 1))
    member = start(plant + "os._exit(0)")
    assert ended(member) == 0
    assert starts(tmp_path) == len(failures) + 1
    lines = member.err.splitlines()
    for n, (line, named) in enumerate(zip(lines, failures.values(), strict=True), 1):
        assert f"{named}; restart {n} of 10 in " in line


def test_what_a_restart_cannot_mend_is_not_started_again(start: Start, tmp_path: Path) -> None:
    member = start("os._exit(2)")
    assert ended(member) == 2
    assert starts(tmp_path) == 1
    assert member.err == (
        "spile: not restarted: exit code 2 means bad input, which a restart cannot fix\n"
    )


def test_it_gives_up_with_the_last_code_when_nothing_is_ever_done(
    start: Start, tmp_path: Path
) -> None:
    member = start("os._exit(3)", "--max-restarts", "2")
    assert ended(member) == 3
    assert starts(tmp_path) == 3
    assert member.last_line.endswith("(exit 3); giving up after 2 restarts without a unit done")


def test_a_unit_done_begins_the_count_anew(start: Start, tmp_path: Path) -> None:
    code = "if nth == 5: os._exit(0)\nif nth % 2 == 0:\n" + "".join(
        f"    {line}\n" for line in WORKED.strip().splitlines()
    )
    member = start(code + "os._exit(3)", "--max-restarts", "2")
    assert ended(member) == 0, member.err
    counted = [line.partition("restart ")[2][:1] for line in member.err.splitlines()]
    assert counted == ["1", "1", "2", "1"]


def test_a_unit_of_taps_that_are_added_counts_as_any(start: Start, tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out")
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=())
    held = f"Presence(open_objects({added.objects.url!r}), 30)"
    lines = [
        "from spile.objects import open_objects",
        "from spile.dataset.records.heartbeat import Presence",
        f"presence = {held}",
        "presence.tell(state='running')",
        "presence.hold(nth)",  # the units before it were done by others
    ]
    done = stored.write_added(made, added, 2, rows)
    record = fmt.encode_record("done", done.to_json())
    lines += [
        f"if nth == 2: open_objects({added.objects.url!r}).create("
        f"{added.ledger.layout.done_key(2)!r}, {record!r})",
        "os._exit(0 if nth == 4 else 3)",
    ]
    code = "\n".join(lines).replace("{", "{{").replace("}", "}}")
    member = start(code, "--max-restarts", "2")
    assert ended(member) == 0, member.err
    counted = [line.partition("restart ")[2][:1] for line in member.err.splitlines()]
    assert counted == ["1", "1", "2"]


def test_the_reason_is_the_one_the_work_gave(start: Start) -> None:
    failing = WORKED + "presence.close('failed', error='StoreError: no space')\nos._exit(3)"
    code = "if nth == 2: os._exit(0)\n" + failing
    member = start(code)
    assert ended(member) == 0
    assert "StoreError: no space; restart 1 of 10" in member.last_line


@pytest.mark.parametrize(
    ("at_signal", "code"), [("os._exit(130)", 130), ("os._exit(0)", 0), ("os.abort()", 130)]
)
def test_a_signal_is_passed_on_and_nothing_is_started_any_more(
    at_signal: str, code: int, start: Start, tmp_path: Path
) -> None:
    member = start(f"signal.signal(15, lambda *_: {at_signal})\nstarts.with_name('ready').touch()\n"
                   "time.sleep(60)")  # fmt: skip
    wait_until((tmp_path / "ready").exists, 20)
    member.process.send_signal(signal.SIGTERM)
    assert ended(member) == code
    assert starts(tmp_path) == 1
    assert member.err == ""


def test_a_signal_ends_a_pause_at_once(start: Start) -> None:
    member = start("os._exit(3)", "--backoff", "40")
    wait_until(lambda: "restart 1" in member.err, 20)
    began = time.monotonic()
    member.process.send_signal(signal.SIGTERM)
    assert ended(member) == 130
    assert time.monotonic() - began < 5


def test_the_work_ends_with_its_supervisor(start: Start) -> None:
    member = start("time.sleep(60)")
    wait_until(lambda: member.worker() is not None, 20)
    worker = member.worker()
    assert worker
    member.process.kill()
    wait_until(lambda: not runs(worker), 10)


def test_one_of_a_world_waits_for_process_0_to_come_back(start: Start, tmp_path: Path) -> None:
    where = f"127.0.0.1:{tiny.free_port()}"
    joined = ("--coordinator", where, "--num-processes", "2", "--process-id", "1")
    member = start("os._exit({{1: 134, 2: 2}}.get(nth, 0))", joined=joined)
    assert ended(member) == 0, member.err
    assert starts(tmp_path) == 3


def test_one_of_a_world_that_never_met_is_told_what_is_wrong(start: Start, tmp_path: Path) -> None:
    where = f"127.0.0.1:{tiny.free_port()}"
    joined = ("--coordinator", where, "--num-processes", "2", "--process-id", "1")
    assert ended(start("os._exit(2)", joined=joined)) == 2
    assert starts(tmp_path) == 1


def test_an_aborted_world_names_who_never_came(start: Start) -> None:
    joined = ("--coordinator", "127.0.0.1:9", "--num-processes", "2", "--process-id", "0")
    member = start("os._exit(0) if nth == 2 else os.abort()", joined=joined)
    assert ended(member) == 0
    assert "processes 0, 1 of 2 never joined; start all of them; restart 1" in member.last_line


def test_pauses_double_and_are_capped() -> None:
    patience = Patience(backoff=1.0, max_backoff=20.0)
    pauses = [patience.pause(n) for n in range(1, 8)]
    for pause, longest in zip(pauses, [1, 2, 4, 8, 16, 20, 20], strict=True):
        assert 0.75 * longest <= pause <= longest
    assert patience.pause(10_000) <= 20


def test_bad_settings_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    extract = ("--", "extract", "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="--max-restarts must be at least 0, got -1"):
        Patience(max_restarts=-1)
    check_refused(run("supervise", "--backoff", "90", *extract), 2, "--backoff", "90")
    check_refused(run("supervise", "--", "verify", "x"), 2, "the command is missing")
    check_refused(run("supervise"), 2, "the command is missing")
    check_refused(run("supervise", "--", "extract"), 2, "--out is missing")
    check_refused(run("supervise", *extract, "--share", "4/4"), 2, "from 0/4 to 3/4")
    check_refused(run("supervise", *extract, "--seq-len", "x"), 2, "--seq-len")


def test_of_a_command_that_drives_others_any_unit_done_is_progress(
    start: Start, tmp_path: Path
) -> None:
    code = """
if nth == 2:
    folder = pathlib.Path({out!r}) / "done" / "000000"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{{nth:08d}}.json").touch()
os._exit(3)
"""
    member = start(code, "--max-restarts", "1", joined=("--engine", "ray"))
    assert ended(member) == 3
    assert starts(tmp_path) == 3, member.err  # and not two

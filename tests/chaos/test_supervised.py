"""Under supervision: whatever is killed is started again, and the dataset is made once.

`make chaos-fleets` runs them; tests/fleet/test_supervise.py is what the suite runs.
"""

import random
import signal
import time
from pathlib import Path

import pytest

from chaos.harness import Witness, Work, check_same
from support.worlds import Member, check_equal, planted, slow_steps, wait_until

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def work(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, Path]:
    work, out = Work(model, corpus), tmp_path_factory.mktemp("reference") / "out"
    work.options["taps"] = "resid_post:2"
    work.extract(out)
    return work, out


def done(out: Path) -> int:
    return len(list(out.glob("done/*/*.json")))


def supervised(work: Work, out: Path, folder: Path, *more: str) -> Member:
    flags = ("--backoff", "0.1", "--", "extract", *work.flags(out, stale_after=2), *more)
    return Member(("supervise", *flags), planted(folder / "plant", slow_steps(0.1)))


def wait_for_a_unit(member: Member, out: Path) -> None:
    before = done(out)
    wait_until(lambda: done(out) > before or member.poll() is not None, 60, lambda: member.err)


def killed_until_done(work: Work, out: Path, rng: random.Random, limit: int) -> int:
    """Kill the worker until its supervisor has come to the end; returns how many times."""
    witness, member, kills = Witness(out), supervised(work, out, out.parent), 0
    try:
        while member.poll() is None:
            wait_for_a_unit(member, out)
            time.sleep(rng.uniform(0, 0.2))
            if kills < limit and member.worker() is not None:
                member.send(signal.SIGKILL)
                kills += 1
            witness.look()
            witness.check()
        assert member.process.returncode == 0, member.err
        # (A kill after the work was done causes no restart.)
        assert kills - 1 <= member.err.count("; restart 1 of 10 in ") <= kills, member.err
    finally:
        member.end()
    return kills


@pytest.mark.full
def test_a_worker_killed_again_and_again_is_started_again(
    work: tuple[Work, Path], tmp_path: Path
) -> None:
    wanted = 20
    rng, kills = random.Random(4), 0
    while kills < wanted:
        out = tmp_path / str(kills)
        kills += killed_until_done(work[0], out, rng, wanted - kills)
        check_same(out, work[1])


@pytest.mark.full
def test_a_run_that_is_stopped_drains_and_the_same_command_goes_on(
    work: tuple[Work, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for code in (130, 0):
        member = supervised(work[0], out, tmp_path)
        try:
            if code:
                wait_for_a_unit(member, out)
                member.process.send_signal(signal.SIGTERM)
            wait_until(lambda m=member: m.poll() is not None, 60)
            assert member.process.returncode == code, member.err
            assert "restart" not in member.err
        finally:
            member.end()
    check_same(out, work[1])


@pytest.mark.full
def test_a_world_of_two_supervised_processes_comes_back_by_itself(
    work: tuple[Work, Path], tmp_path: Path
) -> None:
    out, where = tmp_path / "out", "127.0.0.1:7788"
    joined = ("--coordinator", where, "--num-processes", "2", "--heartbeat-timeout", "10")
    joined += ("--start-timeout", "60", "--process-id")
    members = [supervised(work[0], out, tmp_path, *joined, str(n)) for n in range(2)]
    try:
        for killed in (1, 0):
            before = done(out)
            wait_until(lambda n=before: done(out) > n, 90, lambda: members[0].err)
            members[killed].send(signal.SIGKILL)
        wait_until(lambda: None not in [m.poll() for m in members], 120, lambda: members[0].err)
        assert [m.process.returncode for m in members] == [0, 0], members[0].err + members[1].err
    finally:
        for member in members:
            member.end()
    check_equal(out, work[1])

"""Power cuts: at every moment of a command, what a disk may hold then is sound, or plainly refused.

The states are those that strict POSIX allows (`power.py`): all of them where they are few, and else
the extremes and random ones, of every prefix of what a command did.
"""

import shutil
import signal
from pathlib import Path

import pytest

import spile
from chaos.commands import Command, Commands, again, begin, spec
from chaos.harness import Witness, run
from chaos.power import Disk, Event, materialise, prefixes, read_events
from spile.core.errors import SpileError
from support import faults

pytestmark = pytest.mark.chaos

SEED = 0
ENDED = "ended"


@pytest.fixture(scope="module")
def known(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    if faults.library() is None:
        pytest.skip("no C compiler, or no glibc: nothing can be preloaded")
    return Commands(model, tmp_path_factory.mktemp("commands"))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["extract", "compact", "shuffle", "gc", "export-npy", "repair-copy"]
)
def test_a_power_cut_at_any_moment_loses_nothing_that_was_committed(
    name: str, known: Commands, tmp_path: Path
) -> None:
    tried = cut(known[name], tmp_path, [0], most=12, rerun=40)
    print(f"{name}: {tried}")  # noqa: T201


@pytest.mark.parametrize("name", ["compact", "export-npy"])
def test_a_power_cut_at_some_moments_loses_nothing_that_was_committed(
    name: str, known: Commands, tmp_path: Path
) -> None:
    cut(known[name], tmp_path, [0], most=2, rerun=200, every=7)


@pytest.mark.full
@pytest.mark.parametrize("name", ["extract", "compact", "shuffle"])
def test_the_next_run_makes_durable_what_a_killed_run_left_unsynced(
    name: str, known: Commands, tmp_path: Path
) -> None:
    """After a kill behind each link, a record exists whose folder was never synced."""
    calls = known[name].calls(tmp_path / "calls")
    links = [number for number, call in enumerate(calls, 1) if call.name == "link"]
    for number in links:
        folder = tmp_path / str(number)
        folder.mkdir()
        cut(known[name], folder, [number, 0], most=4, rerun=10**9, only_last=True)


def cut(
    command: Command,
    folder: Path,
    kills: list[int],
    *,
    most: int,
    rerun: int,
    every: int = 1,
    only_last: bool = False,
) -> str:
    """Record a command, cut the power at every moment, and look at what may be left.

    Args:
        kills: a run for each, killed after so many calls; 0: it comes to its end.
        most: states of a moment: all of them, or the extremes and random ones.
        every: one state in so many is looked at,
        rerun: and of those one in so many is where the command goes on.
        only_last: of all moments the last one.
    """
    begin(command, at := folder / "at")
    disk, log = Disk(at), folder / "log"
    for number in kills:
        result = command.started(at, spec(at, "record", number, log))
        assert result.code == (-signal.SIGKILL if number else 0), result.err
    events = [*read_events(log), Event("N", (ENDED,))]
    first = len(events) if only_last else 1
    states = prefixes(disk, events, seed=SEED, most=most, first=first)
    looked = again_from = 0
    for number, (noted, state) in enumerate(states):
        if number % every and ENDED not in noted:
            continue
        shutil.rmtree(at, ignore_errors=True)  # (records name paths: it is always the same place)
        materialise(state, at)
        check_after_cut(command, at, noted)
        looked += 1
        if looked % rerun == 0:
            again(command, at)
            again_from += 1
    return f"{len(events)} moments, {looked} states, the command run again from {again_from}"


def check_after_cut(command: Command, at: Path, noted: list[str]) -> None:
    """Check that what is left is sound or plainly refused, and that every commit is there."""
    if command.name == "repair-copy":
        check_repair(command, at, noted)
        return
    # (When a shuffle has its table it removes its runs, and a cut may undo some of that.)
    removing = any((at / name / "units.json").exists() for name in command.datasets)
    for name in (*command.datasets, *(() if removing else command.passing)):
        witness = Witness(at / name)
        witness.look()
        witness.check()  # a record implies its files
    committed = [note.removeprefix("committed ") for note in noted if note != ENDED]
    if command.datasets:
        # (A shuffle removes its runs when nothing needs them any more.)
        missing = [path for path in committed if "/scratch/" not in path]
        missing = [path for path in missing if not Path(path).exists()]
        assert not missing, f"committed, and lost: {missing}"
        out = at / command.datasets[0]
        try:
            spile.open(str(out), partial=True)
        except SpileError as error:
            assert not (out / "units.json").exists(), error
        else:
            assert run("gc", out).code == 0
            audit = run("verify", out, "--partial", "--json")
            assert (audit.code, audit.json["faults"]) == (0, []), audit.out
        if ENDED in noted:
            command.finished(at)
    elif ENDED in noted or (at / "new/dest").exists():
        # An export has its name only when it is whole. Of its staging the next one removes what is
        # left.
        assert (at / "new/dest").exists()
        again(command, at)


def check_repair(command: Command, at: Path, noted: list[str]) -> None:
    """Units 0 and 1 are as they were, missing, or made again; no committed unit is lost."""
    committed = {int(Path(note).stem) for note in noted if note != ENDED}
    for _ in range(2):
        audit = run("verify", at / "out", "--partial", "--json").json
        assert set(audit["damaged"]) <= {0} - committed, audit
        assert set(audit["missing"]) <= {0, 1} - committed, audit
        assert run("gc", at / "out").code == 0  # and it takes nothing that is needed
    if ENDED in noted:
        command.finished(at)

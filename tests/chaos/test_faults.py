"""Every system call, faulted: whatever fails, wherever, the same command ends as if nothing had.

One fault at a time (support/faults.py) at every call that changes files; after it,
what was committed stands, what exits 0 is whole, and the same command run again makes what an
undisturbed one makes. `make chaos-faults` tries every call, and prints how many; the suite some.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from chaos.commands import Call, Commands, Tally, again, begin, try_fault, with_fault
from support import faults

pytestmark = pytest.mark.chaos

NAMES = ("extract", "more", "add-taps", "drop", "gc-dropped", "compact", "copy", "merge", "shuffle",
         "gc", "export-npy", "export-parquet", "export-zarr", "repair", "repair-copy")  # fmt: skip
KILLED = -signal.SIGKILL
KILLS = 1000
SPLIT = 10  # tests that share them


@pytest.fixture(scope="module")
def known(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    if faults.library() is None:
        pytest.skip("no C compiler, or no glibc: nothing can be preloaded")
    return Commands(model, tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def calls(known: Commands, tmp_path_factory: pytest.TempPathFactory) -> "Calls":
    return Calls(known, tmp_path_factory.mktemp("calls"))


class Calls:
    """The calls of each command, counted once."""

    def __init__(self, known: Commands, folder: Path) -> None:
        self._known, self._folder = known, folder
        self._found: dict[str, list[Call]] = {}

    def of(self, name: str) -> list[Call]:
        if name not in self._found:
            self._found[name] = self._known[name].calls(self._folder / name)
        return self._found[name]


@pytest.mark.full
@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_at_any_call_neither_loses_nor_hides_anything(
    name: str, fault: str, known: Commands, calls: Calls, tmp_path: Path
) -> None:
    """(With SPILE_FAULT_CALLS=20 at about 20 calls of a command, others for each fault.)"""
    tally, counted = Tally(), calls.of(name)
    every = max(1, len(counted) // int(os.environ.get("SPILE_FAULT_CALLS", len(counted))))
    for nth, call in enumerate(counted, 1):
        chosen = (nth + faults.FAULTS.index(fault)) % every == 0
        if chosen and faults.applies(fault, call.name, nth):
            try_fault(known[name], tmp_path / str(nth), fault, nth, tally)
    print(f"{name}, {fault}: {tally}")  # noqa: T201
    assert not tally.wrong, "\n".join(tally.wrong)


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("extract", 1),
        ("gc-dropped", 1),
        ("compact", 2),
        ("merge", 1),
        ("repair-copy", 1),
    ],
)
def test_a_fault_at_some_calls_neither_loses_nor_hides_anything(
    name: str, points: int, known: Commands, calls: Calls, tmp_path: Path
) -> None:
    """(Another fault at each, one after the other.)"""
    tally, counted = Tally(), calls.of(name)
    for place in range(points):
        nth = (2 * place + 1) * len(counted) // (2 * points)
        fault = faults.FAULTS[(place * 3 + len(name)) % len(faults.FAULTS)]
        try_fault(known[name], tmp_path / str(nth), fault, nth, tally)
    assert not tally.wrong, "\n".join(tally.wrong)


def test_a_full_disk_at_a_done_record_leaves_no_files_without_the_record(
    known: Commands, calls: Calls, tmp_path: Path
) -> None:
    counted, tally = calls.of("compact"), Tally()
    made = [c.name == "link" and "/done/" in c.path for c in counted].index(True) + 1
    for nth in (made, made + 1):  # the link, and then the sync of its folder
        try_fault(known["compact"], tmp_path / str(nth), "full", nth, tally)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.calls == {"link": 1, "sync": 1}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(SPLIT))
def test_a_thousand_random_kills_lose_nothing(
    seed: int, known: Commands, calls: Calls, tmp_path: Path
) -> None:
    """One command after another, each killed up to four times before it comes to its end."""
    rng, tally, began, number = random.Random(seed), Tally(), time.monotonic(), 0
    while tally.ends[KILLED] < KILLS // SPLIT:
        name, folder, number = rng.choice(NAMES), tmp_path / str(number), number + 1
        begin(known[name], folder)
        for _ in range(rng.randint(1, 4)):
            nth = rng.randint(1, len(calls.of(name)))
            with_fault(known[name], folder, rng.choice(faults.KILLS), nth, tally)
        again(known[name], folder)
        shutil.rmtree(folder)
    killed, seconds = tally.ends[KILLED], time.monotonic() - began
    print(f"seed {seed}: {killed} kills in {number} commands, 0 lost, {seconds:.0f} s: {tally}")  # noqa: T201

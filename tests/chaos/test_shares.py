"""Machines with shares of one output: some are killed, one is slow, the others do the rest.

`make chaos-fleets` runs them.
"""

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import Witness, Work, check_same, launch
from support import tiny
from support.worlds import ABORTED, Group, check_equal, planted, slow_steps, wait_until

pytestmark = pytest.mark.chaos


def work_for(machines: int, model: Path, folder: Path) -> tuple[Work, int]:
    """About four units for each machine, extracted by one process; returns their number, too."""
    corpus = tiny.write_corpus(folder / "corpus.jsonl", 32 * machines, seed=5)
    work = Work(model, corpus)
    work.options["taps"] = "resid_post:0+2"
    work.extract(folder / "reference")
    return work, len(list((folder / "reference" / "done").glob("*/*")))


def workers(out: Path) -> dict[str, dict[str, Any]]:
    """The last record of each worker, by share."""
    records = [json.loads(path.read_bytes()) for path in out.glob("workers/**/*.json")]
    return {record["share"]: record for record in records}


def said(processes: list[subprocess.Popen[str]]) -> str:
    """Return what the processes that have ended wrote to stderr."""
    return "\n".join(p.communicate()[1] for p in processes if p.poll() is not None)


@pytest.mark.full
def test_every_unit_is_done_once_though_shares_are_killed_or_slow(
    model: Path, tmp_path: Path
) -> None:
    machines, kills = 32, 8
    work, units = work_for(machines, model, tmp_path)
    assert units >= 4 * machines
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    rng = random.Random(2)
    slow, *killed = rng.sample(range(machines), kills + 1)
    started: list[subprocess.Popen[str]] = []
    for index in range(machines):
        spec: dict[str, Any] = {"gate": str(gate), "crowd": machines}
        spec["slow"] = machines / 16 if index == slow else 0.05
        flags = work.flags(out, share=f"{index}/{machines}")
        started.append(launch(spec, "extract", *flags))
    witness = Witness(out)
    for index in killed:
        wait_until(lambda: len(list(out.glob("done/*/*.json"))) > kills, 300, lambda: said(started))
        time.sleep(rng.uniform(0, 0.3))
        started[index].kill()
    witness.look()
    lost = 0
    for index, process in enumerate(started):
        _, err = process.communicate(timeout=300)
        assert process.returncode == (-signal.SIGKILL if index in killed else 0), err
        lost += err.count("was done by another worker first")
    witness.look()
    witness.check()
    check_same(out, tmp_path / "reference")
    records = workers(out)
    done = {index: records[f"{index}/{machines}"].get("units_done", 0) for index in range(machines)}
    own = (slow + 1) * units // machines - slow * units // machines
    assert done[slow] < own, "nobody helped the slow one"
    alive = set(range(machines)) - {slow, *killed}
    assert sum(done[index] for index in alive) > len(alive) * units / machines
    assert lost <= machines // 3 + 1, "helpers did what others were doing"


@pytest.mark.full
def test_a_killed_slice_of_two_is_started_again_and_makes_the_same(
    model: Path, tmp_path: Path
) -> None:
    work, units = work_for(2, model, tmp_path)
    out, slow = tmp_path / "out", planted(tmp_path / "plant", slow_steps(0.1))

    def slice_of(index: int) -> Group:
        flags = work.flags(out, share=f"{index}/2", stale_after=2)
        return Group(flags, 2, 1, environments=dict.fromkeys(range(2), slow))

    def done() -> int:
        return len(list(out.glob("done/*/*.json")))

    witness = Witness(out)
    with slice_of(0) as first, slice_of(1) as second:
        second.until(lambda: done() >= 2)
        for member in second.members:
            member.send(signal.SIGKILL)
        codes = second.wait(30)
        assert set(codes) <= {128 + signal.SIGKILL, ABORTED}, second.said()
        witness.look()
        with slice_of(1) as again:
            again.finish()
            first.finish()
    witness.look()
    witness.check()
    check_equal(out, tmp_path / "reference")
    assert done() == units

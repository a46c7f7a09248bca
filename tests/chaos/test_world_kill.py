"""Worlds that lose a process: every survivor ends and says what to do, and a restart completes.

`make chaos-kills` runs them: more than forty kills of four processes, every mesh on every world,
and a link that is cut.
"""

import dataclasses
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import Witness, Work, run
from support.worlds import (
    ABORTED,
    HEARTBEAT,
    Group,
    Member,
    check_equal,
    planted,
    slow_steps,
    wait_until,
)

pytestmark = pytest.mark.chaos

KILLED = 128 + signal.SIGKILL
SOON = HEARTBEAT + 10  # seconds within which survivors are gone
START = 20  # seconds to wait for all of them to come
AGAIN = "start all processes again"


@dataclasses.dataclass(frozen=True)
class Reference:
    """The dataset that one process makes on one device, and the work that makes it."""

    work: Work
    out: Path
    slow: dict[str, str]

    def world(self, out: Path, processes: int, mesh: str = "1d", **changes: Any) -> Group:
        environments = dict.fromkeys(range(processes), self.slow)
        changes = {"environments": environments, "devices": 1, **changes}
        flags = self.work.flags(out, mesh=mesh, **changes.pop("options", {}))
        return Group(flags, processes, **changes)

    def check_same(self, out: Path) -> None:
        """Check that every unit is there exactly once, whatever was killed."""
        check_equal(out, self.out)


@pytest.fixture(scope="module")
def reference(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    work = Work(model, corpus)
    work.options["batch_tokens"] = 256
    work.extract(folder / "out")
    return Reference(work, folder / "out", planted(folder / "plant", slow_steps(0.1)))


def done(out: Path) -> int:
    return len(list(out.glob("done/*/*.json")))


def check_survivors(world: Group, lost: Member, seconds: float = SOON) -> None:
    """Check that survivors end in time with the code for a restart, and ask for one."""
    survivors = [member for member in world.members if member is not lost]
    codes = world.wait_for(survivors, seconds)
    assert set(codes) == {ABORTED}, world.said()
    for member in survivors:
        assert member.last_line.endswith(AGAIN), member.err


@pytest.mark.full
@pytest.mark.parametrize(("killed", "paused"), [(0, 1), (1, 0)])
def test_a_world_restarts_after_a_killed_and_a_paused_process(
    killed: int, paused: int, reference: Reference, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    witness = Witness(out)
    with reference.world(out, 2) as world:
        world.until(lambda: done(out) >= 1)
        world[killed].send(signal.SIGKILL)
        check_survivors(world, world[killed])
        assert world.wait_for([world[killed]], 5) == [KILLED]
        assert "ended by signal 9" in world[killed].last_line
    witness.look()
    before = done(out)
    with reference.world(out, 2) as world:
        world.until(lambda: done(out) > before)
        world[paused].send(signal.SIGSTOP)
        check_survivors(world, world[paused])
        assert world[paused].poll() is None
        witness.look()
        assert not (out / "manifest.json").exists()
        with reference.world(out, 2, "data=2", options={"stale_after": 1}) as another:
            another.finish()
        # It wakes up when all is done, in a world that is no more.
        world[paused].send(signal.SIGCONT)
        assert world.wait(SOON) == [ABORTED, ABORTED], world.said()
        assert world[paused].last_line.endswith(AGAIN)
    witness.look()
    witness.check()
    reference.check_same(out)


@pytest.mark.full
def test_worlds_killed_at_random_moments_end_in_the_same_dataset(
    reference: Reference, tmp_path: Path
) -> None:
    rng = random.Random(11)
    wanted, processes = 40, 4
    kills = dataset = 0
    while kills < wanted:
        out = tmp_path / str(dataset)
        kills += killed_until_done(reference, out, processes, rng, wanted - kills)
        reference.check_same(out)
        dataset += 1


def killed_until_done(
    reference: Reference, out: Path, processes: int, rng: random.Random, limit: int
) -> int:
    """Start the world until it comes to its end; returns how many times a process was killed."""
    witness, kills = Witness(out), 0
    while True:
        with reference.world(out, processes, start_timeout=START) as world:
            if kills == limit:
                world.finish()
                return kills
            seconds = wait_for_a_moment(world, out, rng, early=limit > 1)
            lost = rng.choice(world.members)
            # The one that was started, or the one that works: either takes the other with it.
            started = rng.random() < 0.3 or lost.worker() is None
            if lost.poll() is not None:
                world.finish()
                return kills
            lost.process.kill() if started else lost.send(signal.SIGKILL)
            kills += 1
            survivors = [member for member in world.members if member is not lost]
            codes = world.wait_for(survivors, seconds)
            for member, code in zip(survivors, codes, strict=True):
                # One that was about to leave may have left; one that comes later finds nobody.
                left = code == 0 and (out / "manifest.json").exists()
                alone = code == 2 and "not reached within" in member.last_line
                assert left or alone or code == ABORTED, world.said()
                assert left or alone or member.last_line.endswith(AGAIN), member.err
        witness.look()
        witness.check()
        if (out / "units.json").exists():
            assert run("verify", out, "--partial", "--json").json["faults"] == []


def wait_for_a_moment(world: Group, out: Path, rng: random.Random, *, early: bool) -> float:
    """Among units, soon after the start of the work, or `early`, at any time from its own start.

    Returns how long survivors may take.
    """
    before, chance = done(out), rng.random()
    if early and chance < 0.2:
        time.sleep(rng.uniform(0, 6))
        return START + SOON
    began = (lambda: done(out) > before) if chance < 0.8 else (lambda: "devices (" in world[0].err)
    wait_until(lambda: began() or not world.running, 600, world.said)
    time.sleep(rng.uniform(0, 0.5))
    return SOON


@pytest.mark.full  # (some of them are in tests/e2e/test_world.py)
@pytest.mark.parametrize("mesh", ["1d", "2d", "3d", "fsdp=4", "data=4", "auto"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_world_makes_the_same_dataset_on_every_mesh(
    processes: int, mesh: str, reference: Reference, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    devices = 4 // processes
    with reference.world(out, processes, mesh, devices=devices, environments={}) as world:
        world.finish()
    reference.check_same(out)


# -- a link between two hosts ----------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable: 10.78.0.1 and 10.78.0.2."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    names = tuple(f"spile_{os.getpid()}_{n}" for n in (1, 2))
    first, second = names
    folders = [Path("/etc/netns") / name for name in names]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        # Gloo listens where the host's own name points to: each has a file of names of its own.
        for folder, number in zip(folders, (1, 2), strict=True):
            folder.mkdir(parents=True)
            names_file = f"127.0.0.1 localhost\n10.78.0.{number} {socket.gethostname()}\n"
            (folder / "hosts").write_text(names_file)
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", second)
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.full
def test_a_world_whose_link_is_cut_ends_on_both_sides(
    hosts: tuple[str, str], reference: Reference, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prefixes = {n: ["ip", "netns", "exec", name] for n, name in enumerate(hosts)}
    where = {"prefixes": prefixes, "coordinator": "10.78.0.1:7777"}
    with reference.world(out, 2, **where) as world:
        world.until(lambda: done(out) >= 1)
        subprocess.run(["ip", "-n", hosts[1], "link", "set", "eth0", "down"], check=True)
        assert world.wait(SOON) == [ABORTED, ABORTED], world.said()
        for member in world.members:
            assert member.last_line.endswith(AGAIN), member.err
    assert not (out / "manifest.json").exists()
    subprocess.run(["ip", "-n", hosts[1], "link", "set", "eth0", "up"], check=True)
    with reference.world(out, 2, **where) as world:
        world.finish()
    reference.check_same(out)

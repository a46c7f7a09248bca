"""Hosts with an sshd each, a world over them launched by ssh, and links that are cut.

In the suite one host is down from the start; `make chaos-fleets` cuts links during the work, too.
"""

import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from chaos.harness import Result, Witness, Work, run
from support.launches import made, path_with
from support.netns import Hosts, need_hosts
from support.worlds import (
    ABORTED,
    HEARTBEAT,
    check_equal,
    on_devices,
    planted,
    slow_steps,
    wait_until,
)

__all__ = ["made"]  # a fixture

pytestmark = pytest.mark.chaos

SOON = HEARTBEAT + 10
FORWARDED = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
             "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES")  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    need_hosts()
    with Hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


class Launch:
    """A run on those hosts, as a user would start it and look at it."""

    def __init__(
        self, hosts: Hosts, name: str, folder: Path, flags: list[str], restarts: int = 0,
        *, slow: bool = True,
    ) -> None:  # fmt: skip
        self.hosts, self.name, self._flags, self._restarts = hosts, name, flags, restarts
        self._tools = folder / "tools"
        self._tools.mkdir()
        ssh = self._tools / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shlex.join(hosts.inside())} {shutil.which("ssh")} "$@"\n')
        ssh.chmod(0o755)
        self._program = folder / "spile"
        paths = planted(folder / "plant", slow_steps(0.3 if slow else 0))["PYTHONPATH"]
        self._program.write_text(f'#!/bin/sh\nexec {sys.executable} -m spile.cli "$@"\n')
        self._program.chmod(0o755)
        self._env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **on_devices(1)}

    def start(self, *more: str) -> Result:
        env = [f"--env={name}={value}" for name, value in self._env.items()]
        env += [f"--env={name}" for name in FORWARDED]
        flags = ["--world-size", "2", "--max-restarts", str(self._restarts), *env]
        flags += ["--spile", str(self._program)]
        return self.call("ssh", *flags, *more, "--", *self._flags)

    def call(self, *words: str) -> Result:
        where = ["--hosts", self.hosts.file, "--ssh-config", self.hosts.config, "--name", self.name]
        flags = list(words)
        flags[flags.index("ssh") + 1 : flags.index("ssh") + 1] = map(str, where)
        with mock.patch.dict(os.environ, PATH=path_with(self._tools)):
            return run("launch", *flags)

    def code(self, number: int) -> int | None:
        """Return the exit code of the process on that host."""
        name = self.hosts.names[number]
        try:
            return int((self.hosts.home(name) / f".spile/{self.name}/{number}/code").read_text())
        except (OSError, ValueError):
            return None

    def codes(self) -> list[int | None]:
        return [self.code(number) for number in range(self.hosts.count)]

    def said(self) -> str:
        return "\n".join(
            f"-- {path}\n{path.read_text()[-3000:]}"
            for path in sorted(self.hosts.folder.glob(f"home/*/.spile/{self.name}/*/log"))
        )


def done(out: Path) -> int:
    return len(list(out.glob("done/*/*.json")))


@pytest.mark.full
def test_a_world_is_launched_again_on_a_host_that_was_down(
    hosts: Hosts, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, expected = made
    out = tmp_path / "out"
    launch = Launch(hosts, "late", tmp_path, work.flags(out, start_timeout=120), slow=False)
    hosts.cut("h2")
    check_half_started(launch)
    hosts.mend("h2")
    check_other_half_started(launch)
    wait_until(lambda: None not in launch.codes(), 120, launch.said)
    check_ended(launch)
    check_equal(out, expected)


def check_half_started(launch: Launch) -> None:
    """One host is down: the other is started, and the line names the one that was not."""
    down = launch.start()
    assert down.code == 3, down.out
    assert down.err.startswith("spile: 1 of 2 failed: h2 (slice 0, process 1): ssh: connect to")
    assert "run the same command again: what already runs is left alone" in down.err
    assert "h1 (slice 0, process 0): started (pid " in down.out


def check_other_half_started(launch: Launch) -> None:
    again = launch.start()
    assert again.code == 0, again.err
    assert "h1 (slice 0, process 0): already running" in again.out
    assert "h2 (slice 0, process 1): started (pid " in again.out


def check_ended(launch: Launch) -> None:
    assert launch.codes() == [0, 0], launch.said()
    status = launch.call("status", "ssh")
    assert status.out.count("ended with exit code 0") == 2, status.out + status.err
    logs = launch.call("logs", "ssh", "--lines", "5")
    assert "== h1 (slice 0" in logs.out
    assert "never started" not in logs.out


@pytest.mark.full
def test_a_world_is_launched_again_after_its_ssh_link_was_cut(
    hosts: Hosts, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, expected = made
    out = tmp_path / "out"
    flags = work.flags(out, heartbeat_timeout=HEARTBEAT, start_timeout=60)
    launch, witness = Launch(hosts, "world", tmp_path, flags), Witness(out)
    started = launch.start()
    assert started.code == 0, started.err
    assert started.out.count("started (pid ") == 2
    wait_until(lambda: done(out) >= 1 or launch.codes() != [None, None], 60, launch.said)
    hosts.cut("h2")
    wait_until(lambda: launch.codes() == [ABORTED, ABORTED], SOON, launch.said)
    witness.look()
    before = done(out)
    assert not (out / "manifest.json").exists()
    check_half_started(launch)
    hosts.mend("h2")
    check_other_half_started(launch)
    wait_until(lambda: None not in launch.codes(), 90, launch.said)
    assert done(out) > before
    check_ended(launch)
    witness.look()
    witness.check()
    check_equal(out, expected)


@pytest.mark.full
def test_links_cut_at_random_moments_end_in_the_same_dataset(
    hosts: Hosts, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, expected = made
    out, rng = tmp_path / "out", random.Random(5)
    flags = work.flags(out, heartbeat_timeout=HEARTBEAT, start_timeout=15)
    launch, witness = Launch(hosts, "cuts", tmp_path, flags), Witness(out)
    for _ in range(5):
        before = done(out)
        started = launch.start()
        assert started.code == 0, started.err
        wait_until(lambda b=before: done(out) > b or None not in launch.codes(), 60, launch.said)
        time.sleep(rng.uniform(0, 1))
        if (out / "manifest.json").exists():
            break
        hosts.cut(cut := rng.choice(hosts.names))
        wait_until(lambda: None not in launch.codes(), 60, launch.said)
        hosts.mend(cut)
        witness.look()
        witness.check()
    assert launch.start().code == 0
    wait_until(lambda: None not in launch.codes(), 90, launch.said)
    assert launch.codes() == [0, 0], launch.said()
    witness.look()
    witness.check()
    check_equal(out, expected)


@pytest.mark.full
def test_a_supervised_world_whose_link_is_cut_comes_back_by_itself(
    hosts: Hosts, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, expected = made
    out = tmp_path / "out"
    flags = work.flags(out, heartbeat_timeout=HEARTBEAT, start_timeout=60)
    launch = Launch(hosts, "supervised", tmp_path, flags, restarts=5)
    started = launch.start()
    assert started.code == 0, started.err
    wait_until(lambda: done(out) >= 1 or launch.codes() != [None, None], 60, launch.said)
    hosts.cut("h2")
    wait_until(lambda: launch.said().count("restart 1 of 5") == 2, SOON, launch.said)
    hosts.mend("h2")
    wait_until(lambda: None not in launch.codes(), 120, launch.said)
    assert launch.codes() == [0, 0], launch.said()
    check_equal(out, expected)

"""A real Slurm of several nodes: arrays and joined nodes, cancelled and requeued as they work.

The suite runs an array that nobody disturbs; `make chaos-fleets` runs all.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from chaos.harness import Witness, Work, run
from support import tiny
from support.launches import made
from support.slurm_cluster import Cluster, need_slurm
from support.worlds import HEARTBEAT, check_equal, on_devices, planted, slow_steps

__all__ = ["made"]  # a fixture

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Cluster]:
    need_slurm()
    nodes = 3 if pytestconfig.getoption("--chaos-full") else 2
    ports = [tiny.free_port() for _ in range(nodes + 1)]
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes, ports) as cluster:
        yield cluster


class Launch:
    """A run on that cluster, as a user would start it and look at it."""

    def __init__(
        self, cluster: Cluster, folder: Path, flags: list[str], *, slow: bool = True
    ) -> None:
        self._cluster, self._folder, self._flags = cluster, folder, flags
        self._program = folder / "spile"
        self._program.write_text(f'#!/bin/sh\nexec {sys.executable} -m spile.cli "$@"\n')
        self._program.chmod(0o755)
        env = {"JAX_PLATFORMS": "cpu", **on_devices(1)}
        if slow:
            env |= {"SPILE_PLANT": "1", **planted(folder / "plant", slow_steps(0.3))}
        self._env = [f"--env={name}={value}" for name, value in env.items()]

    def start(self, *how: str) -> str:
        """Return the job's number."""
        ways = [*how, *self._env, "--max-restarts", "0", "--spile", str(self._program)]
        said = self.call("slurm", *ways, "--folder", str(self._folder), "--", *self._flags)
        return said.strip()

    def call(self, *words: str) -> str:
        flags = list(words)
        place = flags.index("slurm") + 1
        flags[place:place] = ["--name", "run1", "--log-folder", str(self._folder)]
        with mock.patch.dict(os.environ, self._cluster.environment):
            done = run("launch", *flags)
        assert done.code == 0, done.err
        return done.out

    def said(self) -> str:
        logs = sorted(self._folder.glob("run1.log.*"))
        texts = [f"-- {path.name}\n{path.read_text()[-2500:]}" for path in logs]
        return "\n".join([self._cluster.call("squeue", "--array"), *texts])

    def ended(self) -> bool:
        return self._cluster.call("squeue", "--noheader", "--name=run1").strip() == ""

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, self.said()
            time.sleep(0.3)  # squeue is not free

    def requeue(self, number: str) -> None:
        """The restart happens at once; Slurm by itself would wait two minutes."""
        self._cluster.call("scontrol", "requeue", number)
        pending = ("squeue", "--noheader", "--array", f"--jobs={number}", "--format=%T")
        self.until(lambda: self._cluster.call(*pending).strip() == "PENDING")
        self._cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")


def done(out: Path) -> int:
    return len(list(out.glob("done/*/*.json")))


def test_an_array_makes_the_same(cluster: Cluster, made: tuple[Work, Path], tmp_path: Path) -> None:
    work, expected = made
    out = tmp_path / "out"
    launch = Launch(cluster, tmp_path, work.flags(out), slow=False)
    launch.start("--slices", "2")
    assert "run1" in launch.call("status", "slurm")
    launch.until(launch.ended)
    check_equal(out, expected)
    logs = launch.call("logs", "slurm")
    # (A share that finds all units done says nothing of itself.)
    assert all(f"_{number} <==" in logs for number in range(2)), logs


@pytest.mark.full
def test_an_array_with_a_cancelled_and_a_requeued_task_makes_the_same(
    cluster: Cluster, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, expected = made
    out = tmp_path / "out"
    launch, witness = Launch(cluster, tmp_path, work.flags(out, stale_after=2)), Witness(out)
    number = launch.start("--slices", "2")
    launch.until(lambda: done(out) >= 1)
    assert "run1" in launch.call("status", "slurm")
    cluster.call("scancel", f"{number}_0")
    launch.requeue(f"{number}_1")
    witness.look()
    assert not (out / "manifest.json").exists()
    launch.until(launch.ended)
    witness.look()
    witness.check()
    check_equal(out, expected)
    assert "interrupted; what is committed stays valid" in launch.call("logs", "slurm")


@pytest.mark.full
def test_joined_nodes_that_are_requeued_as_they_work_make_the_same(
    cluster: Cluster, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, expected = made
    out = tmp_path / "out"
    flags = work.flags(out, heartbeat_timeout=HEARTBEAT, start_timeout=60)
    launch, witness = Launch(cluster, tmp_path, flags), Witness(out)
    number = launch.start("--world-size", "2")
    launch.until(lambda: done(out) >= 1)
    launch.requeue(number)
    witness.look()
    launch.until(launch.ended)
    witness.look()
    witness.check()
    check_equal(out, expected)
    # And one that is stopped for good.
    launch.start("--world-size", "2")
    launch.call("stop", "slurm")
    launch.until(launch.ended, 30)

"""SkyPilot: a managed job for each slice, which SkyPilot restores when it is preempted."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from spile.core.errors import ConfigError
from spile.launch.command import FILE, Command
from spile.launch.job import PORT, LaunchJob, Seat
from spile.launch.target import (
    LaunchTarget,
    TargetFlags,
    TargetRow,
    check_counts,
    from_flags,
    to_yaml,
)

_WORLD = f"""\
export COORDINATOR_ADDRESS="$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"
export NUM_HOSTS="$SKYPILOT_NUM_NODES" HOST_ID="$SKYPILOT_NODE_RANK"
"""


@dataclass(frozen=True, kw_only=True)
class Sky(LaunchTarget):
    slices: int = 1
    world_size: int = 1  # a TPU pod counts as one: its hosts find each other
    accelerators: str | None = None
    infra: str | None = None
    cpus: str | None = None
    memory: str | None = None
    spot: bool = False

    def __post_init__(self) -> None:
        check_counts(slices=self.slices, world_size=self.world_size)
        if self.world_size > 1 and (self.accelerators or "").startswith("tpu-"):
            raise ConfigError(
                f"--world-size {self.world_size}: SkyPilot takes a TPU pod for one node, whatever "
                "its hosts: leave it out"
            )

    def render(self, job: LaunchJob) -> Sequence[Command]:
        if job.container is not None or job.credentials is not None:
            raise ConfigError(
                "--container and --credentials are not for sky, which has its own way to sign in: "
                "let --setup install spile"
            )
        return [self._launch(job, number) for number in range(self.slices)]

    def task(self, job: LaunchJob, number: int) -> dict[str, Any]:
        """The task's file, as data. It holds the names of secrets, not their values."""
        wanted = {
            "infra": self.infra,
            "accelerators": self.accelerators,
            "cpus": self.cpus,
            "memory": self.memory,
            "use_spot": True if self.spot else None,
        }
        seat = Seat(slice=number, slices=self.slices)
        task: dict[str, Any] = {
            "name": self._name(job, number),
            "num_nodes": self.world_size,
            "resources": {name: value for name, value in wanted.items() if value is not None},
            "envs": {**job.env, **seat.environment()},
            "secrets": dict.fromkeys(job.secrets),
            "setup": job.setup and f"{job.setup}\n",
            "run": self.script(job),
        }
        return {name: value for name, value in task.items() if value or name == "num_nodes"}

    def script(self, job: LaunchJob) -> str:
        """The script that each node runs."""
        world = _WORLD if self.world_size > 1 else ""
        enter = f"cd -- {shlex.quote(job.folder)}\n" if job.folder else ""
        return f"{world}{enter}exec {shlex.join(job.command)}\n"

    def status(self, job: LaunchJob) -> Sequence[Command]:
        return [Command(argv=("sky", "jobs", "queue"))]

    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]:
        how = ("--no-follow", f"--tail={lines}")
        return [self._each(job, number, "logs", *how) for number in range(self.slices)]

    def stop(self, job: LaunchJob) -> Sequence[Command]:
        return [self._each(job, number, "cancel", "--yes") for number in range(self.slices)]

    def _launch(self, job: LaunchJob, number: int) -> Command:
        secrets = [f"--secret={name}" for name in job.secrets]
        argv = ("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, FILE)
        return Command(
            argv=argv, where=f"slice {number}", file=to_yaml(self.task(job, number)),
            suffix=".yaml", env=job.secrets,
        )  # fmt: skip

    def _each(self, job: LaunchJob, number: int, verb: str, *how: str) -> Command:
        argv = ("sky", "jobs", verb, f"--name={self._name(job, number)}", *how)
        return Command(argv=argv, where=f"slice {number}")

    def _name(self, job: LaunchJob, number: int) -> str:
        return f"{job.name}-{number}" if self.slices > 1 else job.name


def _add_flags(flags: TargetFlags) -> None:
    flags.slices()
    flags.world_size()
    flags.add(
        "--accelerators",
        "accelerators of each host, e.g. A100:8 or tpu-v5litepod-64",
        "X",
    )
    flags.add("--infra", "where to run, e.g. gcp/us-central1", "X")
    flags.machine()


SKY = TargetRow("sky", "SkyPilot, any cloud", _add_flags, partial(from_flags, Sky))

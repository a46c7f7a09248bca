"""Slurm: an array of slices, each a job of one node or of several joined ones."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from spile.core.errors import ConfigError
from spile.launch.command import Command
from spile.launch.job import LaunchJob
from spile.launch.target import LaunchTarget, TargetFlags, TargetRow, check_counts, from_flags

_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?", re.DOTALL)
_OURS = ("--array", "--nodes", "--ntasks", "--ntasks-per-node", "--job-name", "--output")
# Each job has its own port: several may share a node.
_PORT = "$((61440 + SLURM_JOB_ID % 4096))"
_HOST_ID = 'HOST_ID=$SLURM_PROCID; export HOST_ID; exec "$@"'
_COLUMNS = "%.18i %.12j %.2t %.10M %.6D %R"


@dataclass(frozen=True, kw_only=True)
class Slurm(LaunchTarget):
    slices: int = 1
    world_size: int = 1
    options: tuple[str, ...] = ()  # of sbatch, as the user gives them
    log_folder: str = "."  # seen by all nodes

    def __post_init__(self) -> None:
        check_counts(slices=self.slices, world_size=self.world_size)
        for option in self.options:
            if not _OPTION.fullmatch(option):
                raise ConfigError(f"--sbatch must be --OPTION=VALUE, got {option!r}")
            if option.partition("=")[0] in _OURS:
                raise ConfigError(
                    f"--sbatch {option}: that is the launcher's (--slices, --world-size, --name)"
                )
        if any(c in self.log_folder for c in "%\\\n"):
            raise ConfigError(
                f"--log-folder must not contain %, \\ or a newline, which Slurm would interpret; "
                f"got {self.log_folder!r}"
            )

    def render(self, job: LaunchJob) -> Sequence[Command]:
        """sbatch reads the script from standard input; the environment goes with the submission."""
        numbered = "%A_%a" if self.slices > 1 else "%j"
        argv = ["sbatch", "--parsable", f"--job-name={job.name}", f"--nodes={self.world_size}"]
        argv += ["--ntasks-per-node=1", "--requeue", "--open-mode=append", "--export=ALL"]
        argv += [f"--output={self._log(job, numbered)}"]
        if self.slices > 1:
            argv += [f"--array=0-{self.slices - 1}"]
        if job.folder:
            argv += [f"--chdir={job.folder}"]
        env = job.environment()
        return [Command(argv=(*argv, *self.options), stdin=self.script(job), env=env)]

    def script(self, job: LaunchJob) -> str:
        """The script that Slurm runs on the first node of each job."""
        lines = ["#!/bin/sh", "set -e"]
        names = list(job.environment())
        if job.setup:
            lines.append(job.setup)
        if self.slices > 1:
            lines.append(f'export MACHINE_ID="$SLURM_ARRAY_TASK_ID" TOTAL_MACHINES={self.slices}')
            names += ["MACHINE_ID", "TOTAL_MACHINES"]
        task: list[str] = []
        if self.world_size > 1:
            lines.append('first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
            lines.append(f'export COORDINATOR_ADDRESS="$first:{_PORT}" NUM_HOSTS={self.world_size}')
            names += ["COORDINATOR_ADDRESS", "NUM_HOSTS", "HOST_ID"]
            task = ["sh", "-c", _HOST_ID, "sh"]
        command = job.container_run(names, "--rm") if job.container else job.command
        # A process that fails ends the others, which would wait for it.
        srun = ("srun", "--kill-on-bad-exit=1", *task, *command)
        return "\n".join([*lines, f"exec {shlex.join(srun)}"]) + "\n"

    def status(self, job: LaunchJob) -> Sequence[Command]:
        return [Command(argv=("squeue", "--me", f"--name={job.name}", f"--format={_COLUMNS}"))]

    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]:
        files = f"{shlex.quote(self._log(job, ''))}*"
        told = f"""\
set -- {files}
[ -e "$1" ] || {{ echo "never started, or with another --log-folder"; exit 0; }}
tail -n {lines} -- "$@"
"""
        return [Command(argv=("sh", "-s"), stdin=told)]

    def stop(self, job: LaunchJob) -> Sequence[Command]:
        return [Command(argv=("scancel", "--me", f"--name={job.name}"))]

    def _log(self, job: LaunchJob, numbered: str) -> str:
        return f"{self.log_folder}/{job.name}.log.{numbered}"


def _add_flags(flags: TargetFlags) -> None:
    flags.slices()
    flags.world_size()
    flags.many(
        "--sbatch", "OPTION", "pass an option to sbatch, e.g. --sbatch=--partition=gpu", "options"
    )
    flags.add("--log-folder", "folder for the logs of all nodes [.]", "DIR", default=".")


SLURM = TargetRow(
    "slurm",
    "a Slurm cluster",
    _add_flags,
    partial(from_flags, Slurm),
    contained=True,
    shares_folder=True,
    folder_with_container=True,
)

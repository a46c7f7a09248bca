"""Processes on this machine: slices side by side, each of one process or several."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from spile.core.errors import ConfigError
from spile.launch.job import PORT, Seat
from spile.launch.target import Host, Hosts, TargetFlags, TargetRow, check_counts, from_flags


@dataclass(frozen=True, kw_only=True)
class Local(Hosts):
    """Processes on this machine; in containers, if the job has one."""

    slices: int = 1
    world_size: int = 1
    port: int = PORT
    gpus_each: int | None = None  # GPUs that each process has for itself

    def __post_init__(self) -> None:
        check_counts(slices=self.slices, world_size=self.world_size, port=self.port)
        if self.gpus_each is not None:
            check_counts(gpus_each=self.gpus_each)

    def hosts(self) -> Sequence[Host]:
        seats = [
            Seat(
                slice=number, slices=self.slices, process=process, processes=self.world_size,
                coordinator=f"127.0.0.1:{self.port + number}",
                own=self._own(number * self.world_size + process),
            )
            for number in range(self.slices)
            for process in range(self.world_size)
        ]  # fmt: skip
        return [Host(seat, ("sh", "-s"), str(seat)) for seat in seats]

    def _own(self, number: int) -> dict[str, str]:
        if self.gpus_each is None:
            return {}
        first = number * self.gpus_each
        seen = range(first, first + self.gpus_each)
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))}


def _add_flags(flags: TargetFlags) -> None:
    flags.slices()
    flags.world_size()
    flags.port("the first slice")
    flags.number("--gpus-each", "GPUs that each process sees [all]")


def _build_docker(a: argparse.Namespace) -> Local:
    if not a.container:
        raise ConfigError("--container IMAGE@sha256:DIGEST is missing")
    return from_flags(Local, a)


LOCAL = TargetRow(
    "local", "processes on this machine", _add_flags, partial(from_flags, Local),
    shares_folder=True, starts_here=True,
)  # fmt: skip
DOCKER = TargetRow(
    "docker", "containers on this machine", _add_flags, _build_docker, contained=True
)

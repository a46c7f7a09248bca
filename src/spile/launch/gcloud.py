"""TPU VMs of Google Cloud: made, by request or through the queue, and told what to run.

Every slice is one TPU, by its own name; all its hosts are told at once (`--worker=all`) and find
each other. `gcloud_run.py` does what this says.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spile.core.errors import ConfigError
from spile.launch import script
from spile.launch.command import FILE, Command
from spile.launch.job import Job, Seat, check_name
from spile.launch.target import check_counts

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")


@dataclass(frozen=True)
class Node:
    """One TPU: which slice it is, what it is called, where it is."""

    slice: int
    name: str
    zone: str

    def __str__(self) -> str:
        return f"{self.name} ({self.zone})"


@dataclass(frozen=True, kw_only=True)
class Gcloud:
    zones: tuple[str, ...]  # tried in turn
    tpus: tuple[str, ...] = ()  # their names [the job's name, numbered]
    slices: int = 1
    project: str | None = None
    accelerator_type: str | None = None  # with the version: what is missing is made
    runtime_version: str | None = None
    spot: bool = False
    queued: bool = False
    keep: bool = False  # stay, and bring back what is preempted
    retries: int = 10
    delete: bool = False  # when stopped

    def __post_init__(self) -> None:
        check_counts(slices=self.slices)
        if not self.zones:
            raise ConfigError("--zone is missing: where are the TPUs, or may they be?")
        if (self.accelerator_type is None) != (self.runtime_version is None):
            raise ConfigError(
                "--accelerator-type and --runtime-version belong together: they say what to make"
            )
        if (self.spot or self.queued) and not self.makes:
            raise ConfigError("--spot and --queued are of TPUs to make: add --accelerator-type")
        words = (*self.zones, self.project, self.accelerator_type, self.runtime_version)
        for word in words:
            if word is not None and not _WORD.fullmatch(word):
                raise ConfigError(f"gcloud has no zone, project, type or version {word!r}")
        for tpu in self.tpus:
            check_name("--tpu", tpu)
        if self.retries < 0:
            raise ConfigError(f"--retries must be at least 0, got {self.retries}")

    @property
    def makes(self) -> bool:
        return self.accelerator_type is not None

    def nodes(self, job: Job) -> list[Node]:
        """In the first zone; where they really are is found by asking."""
        names = self.tpus or tuple(f"{job.name}-{number}" for number in range(self.slices))
        return [Node(number, name, self.zones[0]) for number, name in enumerate(names)]

    def everywhere(self, node: Node) -> list[Node]:
        return [replace(node, zone=zone) for zone in self.zones]

    # -- what is rented ----------------------------------------------------------------------

    def create(self, node: Node) -> Command:
        assert self.accelerator_type and self.runtime_version
        what = (f"--accelerator-type={self.accelerator_type}",
                f"--runtime-version={self.runtime_version}")  # fmt: skip
        spot = ("--spot",) if self.spot else ()
        if self.queued:
            what = (f"--node-id={node.name}", *what)
        kind = "queued-resources" if self.queued else "tpu-vm"
        return self._gcloud(node, kind, "create", *what, *spot)

    def describe(self, node: Node) -> Command:
        return self._gcloud(node, "tpu-vm", "describe", "--format=value(state)")

    def describe_queued(self, node: Node) -> Command:
        return self._gcloud(node, "queued-resources", "describe", "--format=value(state.state)")

    def delete_node(self, node: Node) -> Command:
        if self.queued:
            return self._gcloud(node, "queued-resources", "delete", "--force")
        return self._gcloud(node, "tpu-vm", "delete")

    def list_all(self) -> list[Command]:
        return [
            Command(argv=self._words("tpu-vm", "list", zone), where=zone) for zone in self.zones
        ]

    # -- what runs on it ---------------------------------------------------------------------

    def send(self, job: Job, node: Node) -> Command:
        """The script goes as a file: a command line is no place for what it holds."""
        text = f'rm -f -- "$0"\n{script.start(job, self._seat(job, node))}'
        words = self._words("tpu-vm", "scp", node.zone)
        argv = (*words, "--worker=all", FILE, f"{node.name}:{_sent(job)}")
        return Command(argv=argv, where=str(node), file=text, suffix=".sh")

    def start(self, job: Job, node: Node) -> Command:
        return self._ssh(node, f"sh {_sent(job)}")

    def state(self, job: Job, node: Node) -> Command:
        return self._ssh(node, script.status(job, self._seat(job, node)))

    def log(self, job: Job, node: Node, lines: int) -> Command:
        return self._ssh(node, script.logs(job, self._seat(job, node), lines))

    def end(self, job: Job, node: Node) -> Command:
        return self._ssh(node, script.stop(job, self._seat(job, node)))

    # -- as every target ---------------------------------------------------------------------

    def render(self, job: Job) -> Sequence[Command]:
        """As if nothing went wrong, in the first zone."""
        found: list[Command] = []
        for node in self.nodes(job):
            found += [self.describe(node)]
            if self.makes:
                found += [self.create(node)]
            if self.queued:
                found += [self.describe_queued(node)]
            found += [self.send(job, node), self.start(job, node)]
        return found

    def status(self, job: Job) -> Sequence[Command]:
        return [*self.list_all(), *(self.state(job, node) for node in self.nodes(job))]

    def logs(self, job: Job, lines: int) -> Sequence[Command]:
        return [self.log(job, node, lines) for node in self.nodes(job)]

    def stop(self, job: Job) -> Sequence[Command]:
        ends = [self.end(job, node) for node in self.nodes(job)]
        if not self.delete:
            return ends
        return [*ends, *(self.delete_node(node) for node in self.nodes(job))]

    def _seat(self, job: Job, node: Node) -> Seat:
        return Seat(slice=node.slice, slices=len(self.nodes(job)))

    def _words(self, kind: str, verb: str, zone: str) -> tuple[str, ...]:
        project = () if self.project is None else (f"--project={self.project}",)
        return ("gcloud", "compute", "tpus", kind, verb, f"--zone={zone}", *project, "--quiet")

    def _gcloud(self, node: Node, kind: str, verb: str, *how: str) -> Command:
        argv = (*self._words(kind, verb, node.zone), *how, node.name)
        return Command(argv=argv, where=str(node))

    def _ssh(self, node: Node, line: str) -> Command:
        return self._gcloud(node, "tpu-vm", "ssh", "--worker=all", f"--command={line}")


def _sent(job: Job) -> str:
    return f".spile-{job.name}.sh"

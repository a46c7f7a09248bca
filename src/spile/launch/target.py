"""What every target can say: the commands that start a run, look at it, and stop it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spile.core.errors import ConfigError
from spile.launch import script
from spile.launch.command import Command
from spile.launch.job import Job, Seat


class Target(Protocol):
    """Nothing here runs anything."""

    def render(self, job: Job) -> Sequence[Command]:
        """What starts it."""
        ...

    def status(self, job: Job) -> Sequence[Command]: ...

    def logs(self, job: Job, lines: int) -> Sequence[Command]: ...

    def stop(self, job: Job) -> Sequence[Command]: ...


@dataclass(frozen=True)
class Host:
    """A process's seat and the command that gives it a shell there."""

    seat: Seat
    shell: tuple[str, ...]
    where: str


class Hosts(ABC):
    """A target of known hosts, each of which is handed a script."""

    @abstractmethod
    def hosts(self) -> Sequence[Host]: ...

    def render(self, job: Job) -> Sequence[Command]:
        return self._each(lambda seat: script.start(job, seat))

    def status(self, job: Job) -> Sequence[Command]:
        return self._each(lambda seat: script.status(job, seat))

    def logs(self, job: Job, lines: int) -> Sequence[Command]:
        return self._each(lambda seat: script.logs(job, seat, lines))

    def stop(self, job: Job) -> Sequence[Command]:
        return self._each(lambda seat: script.stop(job, seat))

    def _each(self, write: Callable[[Seat], str]) -> Sequence[Command]:
        return [
            Command(argv=host.shell, where=host.where, stdin=write(host.seat))
            for host in self.hosts()
        ]


def check_counts(**counts: int) -> None:
    """Raises:
    ConfigError: unless each is at least 1.
    """
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {count}")

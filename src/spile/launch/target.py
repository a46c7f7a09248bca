"""What every launch target shares: its interface, its row in the table of targets, its flags.

The table itself is in `flags.py`.
"""

import argparse
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import yaml

from spile.core.errors import ConfigError
from spile.core.flags import Flags
from spile.launch import script
from spile.launch.command import Command, Result, run_all
from spile.launch.job import GRACE, PORT, LaunchJob, Seat

# Keys that YAML parsers of every version read as text.
_PLAIN_KEY = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_]\w*", re.IGNORECASE)
_TIMEOUT = 3 * GRACE  # seconds for a status or a stop


class LaunchTarget(ABC):
    """A place to run a job: returns the commands of each action; only `act` runs them."""

    @abstractmethod
    def render(self, job: LaunchJob) -> Sequence[Command]:
        """The commands that start the job."""

    @abstractmethod
    def status(self, job: LaunchJob) -> Sequence[Command]: ...

    @abstractmethod
    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]: ...

    @abstractmethod
    def stop(self, job: LaunchJob) -> Sequence[Command]: ...

    def commands(self, action: str, job: LaunchJob, lines: int) -> Sequence[Command]:
        """The commands of an action: submit, status, logs or stop."""
        if action == "logs":
            return self.logs(job, lines)
        return {"submit": self.render, "status": self.status, "stop": self.stop}[action](job)

    def act(self, action: str, job: LaunchJob, lines: int) -> list[Result]:
        """Run an action on all hosts at once; the results include failures."""
        timeout = None if action == "submit" else _TIMEOUT
        return run_all(self.commands(action, job, lines), timeout)


@dataclass(frozen=True)
class Host:
    """A process's seat, and the command that opens a shell on its host."""

    seat: Seat
    shell: tuple[str, ...]
    where: str


class Hosts(LaunchTarget):
    """A target with known hosts, each of which gets a script."""

    @abstractmethod
    def hosts(self) -> Sequence[Host]: ...

    def render(self, job: LaunchJob) -> Sequence[Command]:
        return self._each(lambda seat: script.start(job, seat))

    def status(self, job: LaunchJob) -> Sequence[Command]:
        return self._each(lambda seat: script.status(job, seat))

    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]:
        return self._each(lambda seat: script.logs(job, seat, lines))

    def stop(self, job: LaunchJob) -> Sequence[Command]:
        return self._each(lambda seat: script.stop(job, seat))

    def _each(self, write: Callable[[Seat], str]) -> Sequence[Command]:
        return [
            Command(argv=host.shell, where=host.where, stdin=write(host.seat))
            for host in self.hosts()
        ]


class TargetFlags(Flags):
    """The flags of one target, in a group of their own."""

    def slices(self) -> None:
        self.number("--slices", "number of slices, which work independently [1]", 1)

    def world_size(self) -> None:
        self.number("--world-size", "hosts joined in each slice (see docs/worlds.md) [1]", 1)

    def port(self, where: str) -> None:
        self.number("--port", f"port where the processes of {where} meet [{PORT}]", PORT)

    def machine(self) -> None:
        """What each host of a cluster or cloud should be."""
        self.add("--cpus", "CPU cores of each host", "X")
        self.add("--memory", "memory of each host", "X")
        self.switch("--spot", "use preemptible machines")


@dataclass(frozen=True)
class TargetRow:
    """A row of the table of targets: a target's name, flags and construction."""

    name: str
    about: str  # completes "start extract on …"
    add_flags: Callable[[TargetFlags], None]
    build: Callable[[argparse.Namespace], LaunchTarget]  # raises ConfigError
    _: KW_ONLY
    on_hosts: bool = True  # takes the flags of hosts: the program, setup lines, a folder, a key
    contained: bool = False  # takes the flags of containers
    mount_flag: str = "--mount"  # makes a folder visible in a container
    device: str = "cpu"  # of a container, unless --device names another
    sudo: bool = False  # only root may use the container engine there
    shares_folder: bool = False  # every host sees the folder where the command is given
    starts_here: bool = False  # runs start in that folder
    folder_with_container: bool = False  # --folder applies to containers, too


def from_flags(kind: type[Any], arguments: argparse.Namespace) -> Any:
    """Construct a target from the flags, each named as the field that it sets."""
    flags: dict[str, Any] = {each.name: getattr(arguments, each.name) for each in fields(kind)}
    several = [name for name, value in flags.items() if isinstance(value, list)]
    return kind(**flags | {name: tuple(flags[name]) for name in several})


def check_counts(**counts: int) -> None:
    """Raises:
    ConfigError: if one is less than 1.
    """
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {count}")


def to_yaml(document: Mapping[str, Any]) -> str:
    """Dump a manifest: keys in their order, every text quoted, scripts as blocks of lines.

    kubectl and SkyPilot read other versions of YAML than PyYAML writes, in which more words are
    numbers or booleans (`y`, `1e3`); a quoted word is text in all of them.
    """
    return yaml.dump(
        document, Dumper=_ManifestDumper, sort_keys=False, allow_unicode=True, width=1 << 30
    )


class _ManifestDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        script = text.endswith("\n") and "\n" in text[:-1]
        return yaml.ScalarNode("tag:yaml.org,2002:str", text, style="|" if script else '"')

    def represent_object(self, value: dict[str, Any]) -> yaml.MappingNode:
        node = self.represent_mapping("tag:yaml.org,2002:map", value)
        for key, _ in node.value:
            if _PLAIN_KEY.fullmatch(key.value):
                key.style = None
        return node


_ManifestDumper.add_representer(str, _ManifestDumper.represent_text)
_ManifestDumper.add_representer(dict, _ManifestDumper.represent_object)

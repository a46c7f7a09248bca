"""The interface of every target: the commands that start a run, look at it, and stop it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from spile.core.errors import ConfigError
from spile.launch import script
from spile.launch.command import Command
from spile.launch.job import LaunchJob, Seat

# Keys that YAML parsers of every version read as text.
_PLAIN_KEY = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_]\w*", re.IGNORECASE)


class LaunchTarget(Protocol):
    """Returns commands; nothing here runs them."""

    def render(self, job: LaunchJob) -> Sequence[Command]:
        """The commands that start the job."""
        ...

    def status(self, job: LaunchJob) -> Sequence[Command]: ...

    def logs(self, job: LaunchJob, lines: int) -> Sequence[Command]: ...

    def stop(self, job: LaunchJob) -> Sequence[Command]: ...


@dataclass(frozen=True)
class Host:
    """A process's seat, and the command that opens a shell on its host."""

    seat: Seat
    shell: tuple[str, ...]
    where: str


class Hosts(ABC):
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

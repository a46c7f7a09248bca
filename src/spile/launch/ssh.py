"""Hosts reached by ssh: each its own slice, or joined in groups."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spile.core.errors import ConfigError
from spile.launch.job import PORT, Seat
from spile.launch.target import Host, Hosts, TargetFlags, TargetRow, check_counts

_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_]([A-Za-z0-9_.-]*|[0-9A-Fa-f:]+)")
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")
# Notice hosts that are cut off, and never ask for a password.
_SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of a hosts file: the destination of ssh, and the address that other hosts use."""

    login: str
    address: str

    @property
    def meeting_place(self) -> str:
        return f"[{self.address}]" if ":" in self.address else self.address


@dataclass(frozen=True, kw_only=True)
class Ssh(Hosts):
    lines: tuple[Line, ...]
    world_size: int = 1
    port: int = PORT
    config: str | None = None  # of ssh

    def __post_init__(self) -> None:
        check_counts(world_size=self.world_size, port=self.port)
        if len(self.lines) % self.world_size:
            raise ConfigError(
                f"--world-size {self.world_size} does not divide the {len(self.lines)} hosts"
            )

    def hosts(self) -> Sequence[Host]:
        found: list[Host] = []
        ssh = (*_SSH, "-F", self.config) if self.config else _SSH
        for number, line in enumerate(self.lines):
            first = self.lines[number - number % self.world_size]
            seat = Seat(
                slice=number // self.world_size,
                slices=len(self.lines) // self.world_size,
                process=number % self.world_size,
                processes=self.world_size,
                coordinator=f"{first.meeting_place}:{self.port}",
            )
            shell = (*ssh, "--", line.login, "sh -s")
            found.append(Host(seat, shell, f"{line.login} ({seat})"))
        return found


def parse_hosts(text: str, source: str) -> tuple[Line, ...]:
    """Parse one host per line, `[USER@]HOST [ADDRESS]`; # starts a comment.

    Raises:
        ConfigError: naming the line.
    """
    found: list[Line] = []
    for number, line in enumerate(text.splitlines(), 1):
        login, *more = line.partition("#")[0].split() or [""]
        if not login:
            continue
        address = more[0] if more else login.rpartition("@")[2]
        if len(more) > 1 or not _HOST.fullmatch(login) or not _ADDRESS.fullmatch(address):
            raise ConfigError(
                f"{source}, line {number}: must be [USER@]HOST, or that and the address by which "
                f"other hosts reach it; got {line.strip()!r}"
            )
        found.append(Line(login, address))
    if not found:
        raise ConfigError(f"{source}: there is no host in it")
    logins = [line.login for line in found]
    twice = sorted({login for login in logins if logins.count(login) > 1})
    if twice:
        raise ConfigError(f"{source}: {', '.join(twice)} is there twice; a host runs one process")
    return tuple(found)


def _add_flags(flags: TargetFlags) -> None:
    flags.world_size()
    flags.add("--hosts", "file with [USER@]HOST [ADDRESS] on each line", "FILE", required=True)
    flags.port("a slice")
    flags.add("--ssh-config", "configuration file for ssh", "FILE")


def _build(a: argparse.Namespace) -> Ssh:
    try:
        text = Path(a.hosts).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {a.hosts}: {getattr(error, 'strerror', '') or error}") from None
    lines = parse_hosts(text, a.hosts)
    return Ssh(lines=lines, world_size=a.world_size, port=a.port, config=a.ssh_config)


SSH = TargetRow("ssh", "hosts reached by ssh", _add_flags, _build, contained=True)

"""The job to run, on any target: arguments, environment, container; and each process's seat."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from spile.core.errors import ConfigError

PORT = 8476  # where the processes of a slice connect
MASK = "***"
GRACE = 60  # seconds for a run to stop by itself

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # also allowed by Kubernetes and GCE
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}")
_PLACED = ("--coordinator", "--num-processes", "--process-id", "--share")
_KEY_IN_CONTAINER = "/credentials/key.json"
GOOGLE_KEY = "GOOGLE_APPLICATION_CREDENTIALS"


@dataclass(frozen=True, kw_only=True)
class Container:
    """The image in which the command runs, and what it can access on its host."""

    image: str
    engine: str = "docker"
    device: str = "cpu"  # cpu, gpu or tpu
    mounts: tuple[str, ...] = ()  # HOST:CONTAINER[:ro]
    sudo: bool = False

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            raise ConfigError(
                f"--container must be IMAGE@sha256:DIGEST, so that every host runs the same; got "
                f"{self.image!r}"
            )
        for mount in self.mounts:
            parts = mount.split(":")
            sound = all(part.startswith("/") for part in parts[:2]) and parts[2:] in ([], ["ro"])
            if len(parts) < 2 or not sound:
                raise ConfigError(f"--mount must be /HOST:/CONTAINER or with :ro, got {mount!r}")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One process: its slice of how many, and its process number in that slice."""

    slice: int = 0
    slices: int = 1
    process: int = 0
    processes: int = 1
    coordinator: str | None = None
    own: Mapping[str, str] = field(default_factory=dict[str, str])  # e.g. which GPUs it sees

    @property
    def number(self) -> int:
        """Its number among all processes."""
        return self.slice * self.processes + self.process

    def environment(self) -> dict[str, str]:
        """The environment of this process; the command is the same everywhere."""
        found = dict(self.own)
        if self.slices > 1:
            found |= {"MACHINE_ID": str(self.slice), "TOTAL_MACHINES": str(self.slices)}
        if self.processes > 1 and self.coordinator:
            found |= {
                "COORDINATOR_ADDRESS": self.coordinator,
                "NUM_HOSTS": str(self.processes),
                "HOST_ID": str(self.process),
            }
        return found

    def __str__(self) -> str:
        if self.processes == 1:
            return f"slice {self.slice}"
        return f"slice {self.slice}, process {self.process}"


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """An extraction, as started on every host."""

    name: str
    extract: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    container: Container | None = None
    credentials: str | None = None  # a service account's key, on every host
    restarts: int | None = None  # 0: no supervisor
    spile: str = "spile"
    setup: str = ""  # shell lines of the user, run first
    folder: str | None = None

    def __post_init__(self) -> None:
        check_name("--name", self.name)
        for name, value in (*self.env.items(), *self.secrets.items()):
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"{name!r} is not a valid name of an environment variable")
            if "\0" in value:
                raise ConfigError(f"the value of {name} holds a NUL, which is not allowed")
        for word in (*self.extract, self.spile, self.setup, self.folder or ""):
            if "\0" in word:
                raise ConfigError(f"{word!r} holds a NUL, which is not allowed")
        if self.container is not None and self.spile != "spile":
            raise ConfigError("--spile is for hosts: in a container, the image's entrypoint runs")
        if not self.spile or self.spile.startswith("-"):
            raise ConfigError(f"--spile must name a program, got {self.spile!r}")
        if self.credentials is not None and not PurePosixPath(self.credentials).is_absolute():
            raise ConfigError(f"--credentials must be an absolute path, got {self.credentials!r}")
        for word in self.extract:
            if word.partition("=")[0] in _PLACED:
                raise ConfigError(
                    f"{word.partition('=')[0]}: the launcher sets it for each process; leave it "
                    "out (--world-size says how many are joined)"
                )

    def masked(self) -> "LaunchJob":
        """The same job for display, with its secrets masked."""
        return replace(self, secrets=dict.fromkeys(self.secrets, MASK))

    @property
    def command(self) -> tuple[str, ...]:
        """The command for every host, word by word."""
        return (self.spile, *self.arguments)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command without the program, which in a container is the image's own."""
        if self.restarts == 0:
            return ("extract", *self.extract)
        restarts = () if self.restarts is None else ("--max-restarts", str(self.restarts))
        return ("supervise", *restarts, "--", "extract", *self.extract)

    def environment(self, seat: Seat | None = None) -> dict[str, str]:
        """All variables set for the command, including secrets."""
        key: dict[str, str] = {}
        if self.credentials is not None:
            key[GOOGLE_KEY] = _KEY_IN_CONTAINER if self.container else self.credentials
        seated = {} if seat is None else seat.environment()
        return {**self.env, **self.secrets, **key, **seated}

    def container_run(self, environment: Sequence[str], *how: str) -> tuple[str, ...]:
        """`docker run …`, taking variables of those names from its own environment.

        So no value is ever on a command line.
        """
        container = self.container
        assert container is not None
        run = [*self.engine(environment), "run", *how, "--net=host", f"--stop-timeout={GRACE}"]
        gpus = "--gpus=all" if container.engine == "docker" else "--device=nvidia.com/gpu=all"
        run += {"tpu": ["--privileged"], "gpu": [gpus], "cpu": []}[container.device]
        run += [f"--env={name}" for name in environment]
        mounts = container.mounts
        if self.credentials is not None:
            mounts = (*mounts, f"{self.credentials}:{_KEY_IN_CONTAINER}:ro")
        run += [f"--volume={mount}" for mount in mounts]
        return (*run, container.image, *self.arguments)

    def engine(self, environment: Sequence[str] = ()) -> tuple[str, ...]:
        """The container engine's command, with sudo if needed."""
        container = self.container
        assert container is not None
        if not container.sudo:
            return (container.engine,)
        kept = (f"--preserve-env={','.join(environment)}",) if environment else ()
        return ("sudo", "--non-interactive", *kept, container.engine)


def check_name(flag: str, name: str) -> None:
    """Check a name: it becomes part of the names of pods, machines and folders."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{flag} must be at most 40 lower-case letters, digits and dashes, and begin with a "
            f"letter; got {name!r}"
        )


def exported(environment: Mapping[str, str]) -> str:
    """Shell lines that set the environment, whatever the values contain."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())

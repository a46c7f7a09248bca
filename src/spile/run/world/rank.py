"""The rank of this process: from flags, the environment, or the cluster. No devices.

Each of the three settings is taken from the first of these that is given:

    coordinator    --coordinator, COORDINATOR_ADDRESS, JAX_COORDINATOR_ADDRESS
    processes      --num-processes, NUM_HOSTS, JAX_NUM_PROCESSES
    process        --process-id, HOST_ID, CLOUD_TPU_TASK_ID, TPU_WORKER_ID, JAX_PROCESS_ID

Where neither a coordinator nor a number of processes is given, jax looks for a cluster it knows:
a TPU pod on GCE or GKE, Slurm, Open MPI, Kubernetes.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spile.core.config import Runtime
from spile.core.errors import ConfigError

ABORTED = 134  # exit code of a process that jax aborted because another was lost: "start me again"
RESTART = "nothing that was committed is lost: start all processes again"

_COORDINATOR = ("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
_PROCESSES = ("NUM_HOSTS", "JAX_NUM_PROCESSES")
_PROCESS = ("HOST_ID", "CLOUD_TPU_TASK_ID", "TPU_WORKER_ID", "JAX_PROCESS_ID")
_POD = "TPU_WORKER_HOSTNAMES"
_SLICE = "MEGASCALE_SLICE_ID"
_SLICES = "MEGASCALE_NUM_SLICES"
_DETECTION_SECONDS = 60


@dataclass(frozen=True)
class Rank:
    """One process among those that are joined."""

    coordinator: str  # HOST:PORT
    processes: int
    process: int
    slice: str = "0"
    devices: tuple[int, ...] | None = None  # of its host, if other processes share the host

    @property
    def leads(self) -> bool:
        return self.process == 0

    def __str__(self) -> str:
        return f"slice {self.slice}, process {self.process} of {self.processes}"


def find_rank(runtime: Runtime, environ: Mapping[str, str]) -> Rank | None:
    """Return this process's rank; None if it works alone.

    Raises:
        ConfigError: if the given settings do not make a rank.
    """
    if runtime.world == "host":
        return None
    coordinator = runtime.coordinator or _first(environ, _COORDINATOR)[1]
    processes = _number(runtime.num_processes, environ, _PROCESSES, "--num-processes")
    if coordinator is None and processes is None:
        rank = _checked(_detected(environ), environ)
        if rank is None and runtime.process_id is not None:
            raise ConfigError(
                f"--process-id {runtime.process_id} is given, but neither how many processes there "
                "are nor where they meet: add --num-processes N and --coordinator HOST:PORT"
            )
        return rank
    if processes is None:
        raise ConfigError(
            f"a coordinator is given ({coordinator}), but not how many processes there are: add "
            "--num-processes N"
        )
    if processes < 1:
        raise ConfigError(f"there must be at least 1 process, got {processes}")
    if runtime.process_id is not None:
        _check_range(runtime.process_id, processes)
    if processes == 1:
        return None
    if coordinator is None:
        raise ConfigError(
            f"{processes} processes are to be joined, but no address is given: add "
            "--coordinator HOST:PORT, the address of process 0"
        )
    process = _number(runtime.process_id, environ, _PROCESS, "--process-id")
    if process is None:
        raise ConfigError(
            f"{processes} processes are to be joined, but which of them is this? add "
            f"--process-id, from 0 to {processes - 1}"
        )
    return _checked(Rank(coordinator, processes, process, environ.get(_SLICE, "0")), environ)


def _checked(rank: Rank | None, environ: Mapping[str, str]) -> Rank | None:
    if rank is None:
        return None
    _check_range(rank.process, rank.processes)
    host, _, port = rank.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--coordinator must be HOST:PORT, got {rank.coordinator!r}")
    pod = [name for name in environ.get(_POD, "").split(",") if name]
    slices = environ.get(_SLICES, "")
    joined = {len(pod), len(pod) * int(slices) if slices.isdecimal() else 0}
    if len(pod) > 1 and rank.processes not in joined:
        raise ConfigError(
            f"the pod has {len(pod)} hosts ({_POD}), but {rank.processes} processes are to be "
            f"joined: start one on each host, with --num-processes {len(pod)}"
        )
    return rank


def _check_range(process: int, processes: int) -> None:
    if not 0 <= process < processes:
        raise ConfigError(
            f"--process-id {process} is out of range: {processes} processes are numbered from 0 "
            f"to {processes - 1}"
        )


def _detected(environ: Mapping[str, str]) -> Rank | None:
    """Return the rank that jax detects, by a private function of jax."""
    try:
        clusters: Any = importlib.import_module("jax._src.clusters")
        detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):
        return None
    try:
        coordinator, processes, process, devices = detect(
            None, None, None, None, None, _DETECTION_SECONDS
        )
    except TypeError:  # a jax version with another signature
        return None
    except Exception as error:
        raise ConfigError(
            "jax sees a cluster here, but not which of its processes this is "
            f"({type(error).__name__}: {error}): give --coordinator, --num-processes and "
            "--process-id, or --world host to work alone"
        ) from error
    if coordinator is None or processes is None or process is None or processes < 2:
        return None
    devices = None if devices is None else tuple(devices)
    return Rank(coordinator, int(processes), int(process), environ.get(_SLICE, "0"), devices)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    return next(((name, environ[name]) for name in names if environ.get(name)), ("", None))


def _number(
    given: int | None, environ: Mapping[str, str], names: tuple[str, ...], flag: str
) -> int | None:
    if given is not None:
        return given
    name, text = _first(environ, names)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a number, got {text!r}; or give {flag}")
    return int(text)

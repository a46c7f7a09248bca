"""The devices that a step is compiled for: those of this machine, or of another one.

`libtpu`, a compiler for TPUs, needs no TPU. Where it is not available (it exists only for x86-64),
the same number of virtual CPU devices stands in: the model is cut in the same way and the same
collectives appear, but the rest of the program is a CPU's.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from spile.core.errors import ConfigError
from spile.plan.chips import Chip, Topology, chip_of, parse_topology

COMPILERS = ("libtpu", "cpu", "here")
_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_LIBTPU_HINT = "it exists for x86-64 Linux only"


@dataclass(frozen=True)
class CompileTarget:
    """Devices, the chip they stand for, and their compiler."""

    name: str
    chip: Chip | None  # None: an unknown device
    devices: Sequence[Any]
    hosts: int
    on: str
    notes: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """The platform of the chip, whatever stands in for it."""
        return self.chip.platform if self.chip else self.devices[0].platform

    @property
    def memory(self) -> int | None:
        if self.chip:
            return self.chip.memory
        return (self.devices[0].memory_stats() or {}).get("bytes_limit")


def find_target(topology: str | None, on: str | None) -> CompileTarget:
    """Choose the devices to compile for; call this before jax looks for devices.

    Raises:
        ConfigError: if these devices are not available here.
    """
    if on not in (None, *COMPILERS):
        raise ConfigError(f"--on must be one of {', '.join(COMPILERS)}; got {on!r}")
    if topology is None:
        if on in ("libtpu", "cpu"):
            raise ConfigError(f"--on {on} needs a --topology, e.g. v5e-64")
        return _here(None)
    wanted = parse_topology(topology)
    notes: tuple[str, ...] = ()
    if on is None:
        on, notes = _default(wanted)
    if on == "here":
        return _here(wanted)
    if on == "libtpu":
        return CompileTarget(topology, wanted.chip, _compile_only(wanted), wanted.hosts, on)
    notes += (
        "compiled for virtual CPU devices: the collectives are the same (a CPU sends bfloat16 as "
        "float32; it is counted as bfloat16), the temporaries are not, so memory is estimated",
    )
    return CompileTarget(topology, wanted.chip, virtual_cpus(wanted.chips), wanted.hosts, on, notes)


def _default(wanted: Topology) -> tuple[str, tuple[str, ...]]:
    if wanted.chip.platform == "gpu":
        found = any(importlib.util.find_spec(plugin) for plugin in _GPU_PLUGINS)
        return ("here", ()) if found else ("cpu", ("there is no GPU here",))
    if importlib.util.find_spec("libtpu"):
        return "libtpu", ()
    return "cpu", (f"libtpu cannot be imported here: {_LIBTPU_HINT}",)


def _here(wanted: Topology | None) -> CompileTarget:
    devices = jax.devices()
    kind = devices[0].device_kind
    if wanted and (len(devices) != wanted.chips or chip_of(kind) != wanted.chip):
        raise ConfigError(
            f"--on here: this machine has {len(devices)} x {kind}, not {wanted.name}; choose "
            "--on cpu"
        )
    name = wanted.name if wanted else f"{len(devices)} x {kind}"
    return CompileTarget(name, chip_of(kind), devices, jax.process_count(), "here")


def virtual_cpus(count: int) -> Sequence[Any]:
    """Return a number of virtual CPU devices."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # jax has already started; it may have enough devices
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(
            f"{count} virtual CPU devices are needed, but jax has started with {len(devices)}; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def _compile_only(wanted: Topology) -> Sequence[Any]:
    """Return devices for which programs can be compiled, but not run."""
    if wanted.libtpu_name is None:
        raise ConfigError(f"--on libtpu is for TPUs, not for {wanted.name}; choose --on cpu")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--on libtpu: libtpu is not installed ({_LIBTPU_HINT}); `pip install libtpu`, or "
            "choose --on cpu"
        )
    # libtpu must not query the cloud's metadata, nor keep other processes from compiling.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    # Some kinds expose the two cores of a chip as two devices, unless configured as one.
    found = 0
    for config in ({}, {"chip_config_name": "megacore"}):
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=wanted.libtpu_name, **config
        )
        found = len(described.devices)
        if found == wanted.chips:
            return described.devices
    raise ConfigError(
        f"--topology {wanted.name}: libtpu has {found} devices for {wanted.libtpu_name}, not "
        f"{wanted.chips}"
    )

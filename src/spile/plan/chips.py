"""Speed and price of chips, and the number of chips in a cloud's topology name. No jax.

Figures are per chip, in bytes and seconds, as their makers publish them; prices change weekly.
The share of a chip's peak that a program reaches is measured only for the H200. The other shares
are assumptions, and `why` gives the reason for each.
"""

import re
from dataclasses import dataclass

from spile.core.config import HAS_BFLOAT16
from spile.core.errors import ConfigError

_GIB = 1 << 30
_CLOUD = "https://docs.cloud.google.com/tpu/docs/"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus (TPU specs)"
_GPUS = "https://jax-ml.github.io/scaling-book/gpus (summary of GPU specs)"
_NVLINK = "NVLink: mlcommons/inference_results_v4.1, closed/NVIDIA/systems/H200-SXM-141GBx8"
_T4 = "https://www.nvidia.com/en-us/data-center/tesla-t4/ (specifications)"
# Compiled from the clouds' own price lists.
_SKY = "https://github.com/skypilot-org/skypilot-catalog"
_TPU_PRICES = f"{_SKY} catalogs/v8/gcp/vms.csv at 8427bbf"
_GPU_PRICES = f"{_SKY} catalogs/v8/nebius/vms.csv at 0082b04 (Nebius)"
_MFU = "https://maxtext.readthedocs.io/en/maxtext-v0.2.0/reference/models/tiering.html"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip."""

    name: str
    kind: str  # jax's name for such a device
    platform: str
    peak: float  # FLOP/s in bfloat16; in float16, if the chip has no bfloat16
    reached: float  # share of the peak that a step's matrix products sustain
    why: str
    memory: int
    bandwidth: float  # of its memory
    # Bytes a second that a TPU sends to its neighbours along one axis of the torus, in both
    # directions together; that a GPU sends to any other GPU of its host.
    interconnect: float
    host_link: float  # bytes a second into the host's memory
    on_demand: float | None  # dollars an hour
    spot: float | None
    sources: tuple[str, ...]
    capability: float = 0.0  # compute capability of an NVIDIA GPU

    @property
    def lacks_bfloat16(self) -> bool:
        return 0 < self.capability < HAS_BFLOAT16

    @property
    def half(self) -> str:
        """The dtype of 16 bits that `peak` counts."""
        return "float16" if self.lacks_bfloat16 else "bfloat16"

    @property
    def sustained(self) -> float:
        return self.peak * self.reached


_ASSUMED = "assumed: nothing was measured on it"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4", kind="TPU v4", platform="tpu", peak=275e12, reached=0.60, why=_ASSUMED,
            memory=32 * _GIB, bandwidth=1.2e12, interconnect=9e10, host_link=1.5e10,
            on_demand=3.22, spot=0.9215,
            sources=(_CLOUD + "v4", _BOOK, _TPU_PRICES + ", us-central2"),
        ),
        Chip(
            name="v5e", kind="TPU v5 lite", platform="tpu", peak=197e12, reached=0.60, why=_ASSUMED,
            # The chip has 16 GB; the compiler lets a program use this much.
            memory=int(15.75 * _GIB), bandwidth=819e9, interconnect=1e11, host_link=1.5e10,
            on_demand=1.20, spot=0.24493,
            sources=(_CLOUD + "v5e", _BOOK, _TPU_PRICES + ", us-central1"),
        ),
        Chip(
            name="v5p", kind="TPU v5", platform="tpu", peak=459e12, reached=0.65,
            why=f"assumed: what training reaches, {_MFU}",
            memory=95 * _GIB, bandwidth=2765e9, interconnect=2e11, host_link=1.5e10,
            on_demand=4.20, spot=0.92856,
            sources=(_CLOUD + "v5p-training", _BOOK, _TPU_PRICES + ", us-central1"),
        ),
        Chip(
            name="v6e", kind="TPU v6 lite", platform="tpu", peak=920e12, reached=0.50,
            why=f"assumed: what training reaches, {_MFU}",
            memory=32 * 10**9, bandwidth=1.6e12, interconnect=2e11, host_link=3.2e10,
            on_demand=2.70, spot=0.57285,
            sources=(_BOOK, _TPU_PRICES + ", us-central1"),
        ),
        Chip(
            name="h100", kind="NVIDIA H100", platform="gpu", peak=990e12, reached=0.66,
            why="assumed: like the H200, which has the same processor and power",
            memory=80 * 10**9, bandwidth=3.35e12, interconnect=4.5e11, host_link=52e9,
            on_demand=2.95, spot=1.25, capability=9.0,
            sources=(_GPUS, _NVLINK, _GPU_PRICES, "host link: as the H200"),
        ),
        Chip(
            name="h200", kind="NVIDIA H200", platform="gpu", peak=990e12, reached=653 / 990,
            why="measured: chained matrix products at 7B shapes, sustained (docs/benchmarks.md)",
            memory=141 * 10**9, bandwidth=4.8e12, interconnect=4.5e11, host_link=52e9,
            on_demand=3.50, spot=1.45, capability=9.0,
            sources=(_GPUS, _NVLINK, _GPU_PRICES, "host link: measured"),
        ),
        Chip(
            name="t4", kind="Tesla T4", platform="gpu", peak=65e12, reached=0.40, why=_ASSUMED,
            # 16 GB, of which Colab and Kaggle show 15 GiB.
            memory=15 * _GIB, bandwidth=3e11, interconnect=1.2e10, host_link=1.2e10,
            on_demand=None, spot=None, capability=7.5,
            sources=(_T4, "links: PCIe 3 x16, of whose 15.8 GB/s three quarters are assumed"),
        ),
    )
}  # fmt: skip

# Chips -> shape of their torus.
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8",
}  # fmt: skip
_CORES = 2  # of a v4 or v5p chip: topology names count cores
_PER_HOST = 4
_GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Topology:
    """A number of connected chips."""

    name: str
    chip: Chip
    chips: int
    hosts: int
    shape: str | None = None  # of the torus, if there is one

    @property
    def libtpu_name(self) -> str | None:
        return f"{self.chip.name}:{self.shape}" if self.shape else None


def parse_topology(text: str) -> Topology:
    """Parse `v5e-64`, `v5litepod-64`, `v4-8`, `h200`, `h200-8`.

    Raises:
        ConfigError: if there is no such topology.
    """
    match = re.fullmatch(r"([a-z][a-z0-9]*)(?:-([1-9][0-9]*))?", text.lower())
    name = match[1].replace("v5litepod", "v5e") if match else ""
    if not match or name not in CHIPS or (CHIPS[name].platform == "tpu" and not match[2]):
        raise ConfigError(
            f"--topology {text}: no such topology; choose e.g. v5e-64, v4-8, v6e-8, v5p-64, h200, "
            f"h100-8 or t4 (chips: {', '.join(CHIPS)})"
        )
    chip, count = CHIPS[name], int(match[2] or 1)
    if chip.platform == "gpu":
        if count > _GPUS_PER_HOST or _GPUS_PER_HOST % count:
            raise ConfigError(f"--topology {text}: choose 1, 2, 4 or 8 GPUs, on one host")
        return Topology(text, chip, count, 1)
    cores = _CORES if name in ("v4", "v5p") else 1
    shapes = _DEEP if cores > 1 else _FLAT
    shape = None if count % cores else shapes.get(count // cores)
    if shape is None:
        known = ", ".join(f"{name}-{chips * cores}" for chips in shapes)
        raise ConfigError(f"--topology {text}: choose from {known}")
    chips = count // cores
    # Eight chips with one core each may share a host.
    hosts = 1 if chips == 8 and cores == 1 else chips // _PER_HOST
    return Topology(text, chip, chips, hosts, shape)


def chip_of(kind: str) -> Chip | None:
    """Return the chip by jax's name for the device; None if it is not known."""
    found = [chip for chip in CHIPS.values() if kind.startswith(chip.kind)]
    return max(found, key=lambda chip: len(chip.kind), default=None)

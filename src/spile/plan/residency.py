"""Where the blocks of a model are kept while it runs: on the device, in host memory, or on disk.

If they do not all fit on the device, all rows of a sweep pass one block before the next is needed,
and the next block is copied meanwhile (`run/step/sweep.py`). No jax.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.core.humanize import size
from spile.core.system import available_memory
from spile.core.tensors import as_bytes
from spile.models.layout import ONE_DEVICE, Cuts
from spile.objects.opened import Opened, OpenedFile
from spile.plan.chips import Chip
from spile.plan.roofline import MEMORY_SHARE, Workload

# Three streamed blocks are on the device: one finishing, one computing, one being copied in.
SLOTS = 3
_DECODED = 2  # decoded copies of packed blocks on the device: one finishing, one computing
_HOST_SHARE = 0.8  # share of the host's free memory for weights
# Shares of a device's memory for the streams of a sweep. Hiding a disk takes long sweeps.
_STREAMS_SHARE, _LONG_STREAMS_SHARE = 0.1, 0.25
_DISK_RATE = 2e9  # bytes a second, assumed for files that are not local
_BLOCK_RATE = 7e9  # most bytes a second at which a block is read, hashed and copied
_SAMPLE, _SAMPLE_SECONDS, _READERS = 16 << 20, 0.3, 8
_LINK_RATE, _FLOPS, _BANDWIDTH = 12e9, 2e14, 1e12  # for a device that is not in plan/chips.py
_DECODED_SHARE = 0.05  # largest share of a sweep's time to decode packed blocks, if memory allows
_MARGIN = 2.0  # a sweep is this many times as long as would just hide the copies
_MOST_SWEPT = 4 << 20  # tokens
# If the host keeps the streams, those of four batches are on the device: one leaves, one is
# computed from another, and one arrives.
_FETCHED = 4


@dataclass(frozen=True)
class Machine:
    """The devices of a run, as far as its plan knows them."""

    platform: str
    memory: int | None = None  # bytes of each device
    chip: Chip | None = None
    processes: int = 1
    cuts: Cuts = ONE_DEVICE  # how the model is laid out on the devices


@dataclass(frozen=True)
class Residency:
    """Where each block is kept, and how many rows pass it at once."""

    kept: tuple[str, ...]  # by block: "resident", "host" or "disk"
    batch_rows: int  # rows of one program, for each group of devices
    sweep_rows: int  # rows that pass a block before the next one is needed
    block_bytes: int  # size of a block as it is kept
    link_rate: float  # bytes a second at which streamed blocks arrive
    hidden: float  # estimated share of a sweep's copies that compute hides
    packed: bool = False  # whether blocks stay packed until they run, on the device as well
    stream_bytes: int = 0  # host memory for a sweep's streams, if the device has no room for them
    looks_up: bool = False  # whether embeddings are read from the file instead of the device
    kept_bytes: int = 0  # host memory for streams that entered blocks, which gradients need again

    @property
    def streams(self) -> bool:
        """Whether the host runs the model block by block."""
        return self.packed or any(where != "resident" for where in self.kept)

    def count(self, where: str) -> int:
        return self.kept.count(where)

    @property
    def on_device(self) -> int:
        """Blocks for which the device has room."""
        if not self.streams:
            return len(self.kept)
        return min(len(self.kept), self.count("resident") + SLOTS)

    @property
    def host_bytes(self) -> int:
        return self.count("host") * self.block_bytes + self.stream_bytes + self.kept_bytes

    @property
    def spills(self) -> bool:
        """Whether streams wait in host memory for their next block."""
        return self.stream_bytes > 0

    @property
    def streams_on_device(self) -> int:
        """Rows whose streams the device has room for."""
        return min(self.sweep_rows, _FETCHED * self.batch_rows) if self.spills else self.sweep_rows

    def told(self, seq_len: int) -> str:
        """Describe where blocks are kept, the length of a sweep, and how far it hides copies."""
        if not self.streams:
            return str(self)
        swept = f"{self.sweep_rows * seq_len:,} tokens pass each before the next"
        swept += ", their streams in host memory meanwhile" if self.spills else ""
        hidden = "copies hide" if self.hidden >= 1 else f"{self.hidden:.0%} of the copies hide"
        return f"{self}; {swept}" + (
            f", {hidden}" if self.count("resident") < len(self.kept) else ""
        )

    def __str__(self) -> str:
        if not self.streams:
            return "all on the device"
        places = {"resident": "on the device", "host": "in host memory", "disk": "on disk"}
        told = [f"{self.count(k)} {place}" for k, place in places.items() if self.count(k)]
        packed = " (packed)" if self.packed else ""
        blocks = f"{len(self.kept)} blocks of {size(self.block_bytes)}{packed}"
        return f"of {blocks}, {', '.join(told)}"


def all_resident(work: Workload, rows: int) -> Residency:
    return Residency(("resident",) * work.depth, rows, rows, work.block_weights, 0.0, 1.0)


def may_stream(runtime: Runtime, processes: int) -> bool:
    """Return whether a model that does not fit may be streamed; joined processes split it."""
    return runtime.weights != "resident" and processes == 1


def streamed_bytes(
    work: Workload, resident: int, sweep_tokens: int, *, looks_up: bool = False
) -> int:
    """Return the bytes on a device that keeps some blocks while the others are streamed.

    `sweep_tokens`: tokens of a sweep, for one group of devices.
    """
    held = min(work.depth, resident + SLOTS) * work.packed_block
    if work.packed:
        held += _DECODED * work.block_weights
    streams = sweep_tokens * work.passing
    by_layer: dict[int | None, int] = {}
    for tap in work.taps:
        by_layer[tap.layer] = by_layer.get(tap.layer, 0) + work.tap_bytes(tap)
    taps = 2 * max(by_layer.values(), default=0)
    held += work.outer_weights(embedding=not looks_up) + work.back_through_block
    return held + streams + taps + work.temporaries


def choose_residency(
    step: Callable[[int], Workload],
    rows: tuple[int, int],
    runtime: Runtime,
    machine: Machine,
    *,
    most_rows: int,
    host_memory: int | None = None,
    files: Sequence[Opened] = (),
) -> Residency:
    """Decide where blocks are kept, and how many rows pass them at once.

    Args:
        step: returns the workload of a step with a given number of rows.
        rows: the rows of a step that is large enough, and of one that fits beside the whole model.
        most_rows: the most rows of a sweep: those of the largest unit.
        host_memory: free bytes of the host; by default, of this machine.
        files: the files of the weights; their rate is measured if blocks are read from there.
    """
    enough, fitting = rows
    wanted, work = runtime.weights, step(fitting)
    free = (available_memory() or 0) if host_memory is None else host_memory
    platform, memory, processes = machine.platform, machine.memory, machine.processes
    if memory is None and platform == "cpu":
        memory = free
        machine = replace(machine, memory=free)
    fits = not memory or work.device_bytes <= MEMORY_SHARE * memory
    if wanted == "resident" or (wanted == "auto" and (fits or not may_stream(runtime, processes))):
        return all_resident(work, fitting)
    if processes > 1:
        raise ConfigError(
            f"--weights {wanted}: joined processes ({processes}) cannot stream blocks; split the "
            "model with --mesh (fsdp), or leave --weights out"
        )
    if wanted == "host" and platform == "cpu":
        return all_resident(work, fitting)  # the device's memory is the host's
    fixed = runtime.batch_tokens is not None or not memory
    while not fixed and enough > 1 and _too_large(step(enough), enough, memory or 0):
        enough //= 2
    work = step(enough)
    if wanted in ("host", "disk"):
        kept = (wanted,) * work.depth
    else:
        on_host = 0 if platform == "cpu" else int(_HOST_SHARE * free // work.packed_block)
        kept = _spread(work, memory or 0, on_host)
    from_files = platform != "cpu" and "disk" in kept
    disk = min(_BLOCK_RATE, disk_rate(files)) if from_files else _DISK_RATE
    return _sized(work, enough, kept, machine, most_rows, disk, free)


def _too_large(work: Workload, rows: int, memory: int) -> bool:
    return streamed_bytes(work, 0, rows * work.seq_len) > MEMORY_SHARE * memory


def _spread(work: Workload, memory: int, on_host: int) -> tuple[str, ...]:
    """Put blocks on the device as far as they fit, then into host memory, the rest on disk."""
    most = work.depth if work.packed else work.depth - SLOTS
    for share in (_STREAMS_SHARE, _LONG_STREAMS_SHARE):
        room, resident = (MEMORY_SHARE - share) * memory, 0
        while resident < most and streamed_bytes(work, resident + 1, 0) <= room:
            resident += 1
        if resident + on_host >= work.depth:
            break
    kept = ["resident" if here else "" for here in evenly(resident, work.depth)]
    others = [n for n, where in enumerate(kept) if not where]
    hosted = evenly(min(on_host, len(others)), len(others))
    for n, here in zip(others, hosted, strict=True):
        kept[n] = "host" if here else "disk"
    return tuple(kept)


def _sized(
    work: Workload,
    rows: int,
    kept: tuple[str, ...],
    machine: Machine,
    most_rows: int,
    disk: float,
    host_memory: int,
) -> Residency:
    """Choose the sweep's length so that copies hide behind compute, as far as memory allows."""
    streamed = [where for where in kept if where != "resident"]
    if machine.platform == "cpu":
        return Residency(kept, rows, rows, work.packed_block, disk, 1.0, looks_up=True)
    chip, memory = machine.chip, machine.memory
    link = chip.host_link if chip else _LINK_RATE
    copying = sum(work.packed_block / (link if w == "host" else disk) for w in streamed)
    per_row = work.flops / rows / (chip.sustained if chip else _FLOPS)
    needed = copying / per_row
    decoding = work.depth * 2 * work.block_weights / (chip.bandwidth if chip else _BANDWIDTH)
    enough = _MARGIN * needed
    if work.packed:
        enough = max(enough, decoding / _DECODED_SHARE / per_row)
    each = work.seq_len * work.passing
    most = max(rows, min(most_rows, _MOST_SWEPT // work.seq_len))
    wanted = max(rows, min(most // rows, math.ceil(enough / rows)) * rows)
    swept, spilled = wanted, 0
    if memory:
        left = int(MEMORY_SHARE * memory - streamed_bytes(work, kept.count("resident"), 0))
        swept = max(rows, min(wanted, left // each // rows * rows))
        on_host = int(_HOST_SHARE * host_memory) - kept.count("host") * work.packed_block
        longer = min(wanted, on_host // each // rows * rows)
        # (Other values that pass from block to block would stay on the device.)
        if not work.beside and longer > swept and _FETCHED * rows * each <= left:
            swept, spilled = longer, longer * each
    slowest = min((link if where == "host" else disk for where in streamed), default=link)
    hidden = min(1.0, swept / max(needed, 1e-9))
    packed = bool(work.packed)
    return Residency(kept, rows, swept, work.packed_block, slowest, hidden, packed, spilled)


def evenly(count: int, of: int) -> list[bool]:
    """Mark `count` of `of` places, spaced as evenly as possible."""
    return [(n + 1) * count // of > n * count // of for n in range(of)]


def disk_rate(files: Sequence[Opened]) -> float:
    """Measure the bytes a second at which a few threads read the largest of some local files."""
    local = [file for file in files if isinstance(file, OpenedFile)]
    if not local:
        return _DISK_RATE
    largest = max(local, key=OpenedFile.size)
    begin = time.perf_counter()

    def read(thread: int) -> int:
        done, place = 0, thread * _SAMPLE
        while place < largest.size() and time.perf_counter() - begin < _SAMPLE_SECONDS:
            stop = min(place + _SAMPLE, largest.size())
            largest.read_into(place, as_bytes(np.empty(stop - place, np.uint8)))
            done, place = done + stop - place, place + _READERS * _SAMPLE
        return done

    with ThreadPoolExecutor(_READERS) as pool:
        total = sum(pool.map(read, range(_READERS)))
    return max(1e6, total / (time.perf_counter() - begin))

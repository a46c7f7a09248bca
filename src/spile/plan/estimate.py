"""Cost of a job before it runs: documents, tokens, bytes, memory, dollars, rates. No jax."""

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from spile.core.config import STORE_DTYPES, Runtime
from spile.core.errors import ConfigError
from spile.core.pool import COVARIANCE, JACOBIAN, is_reduced, reduces
from spile.core.system import available_memory
from spile.core.tensors import DTYPES_BY_NAME, HEADER_ALIGN
from spile.core.threads import mapped
from spile.corpus.pack import labels_for, slots_for
from spile.dataset.codec.columns import Ints
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.models.config.arch import Arch
from spile.models.config.specs import axis_sizes
from spile.models.layout import ONE_DEVICE, Cuts, Layout, fitting_layout, parse_layout
from spile.models.splices import FUNCTION
from spile.objects import Objects
from spile.plan.encoders import stored_taps
from spile.plan.job import ExtractionJob, prepare_documents
from spile.plan.prices import BEATS_AN_HOUR, Price, Requests, requests_of
from spile.plan.residency import (
    Machine,
    Residency,
    choose_residency,
    may_stream,
    streamed_bytes,
)
from spile.plan.roofline import MEMORY_SHARE, Roofline, Workload, recomputes, sweet_spot
from spile.plan.survey import Counted, Survey

_log = logging.getLogger("spile.plan")
# Rough sizes in bytes: a token's text; a document's entry in the documents file; a kept column.
_CHARACTERS = 4
_DOCUMENT = 32
_KEPT = 64
_STREAMS_SHARE = 0.4  # of the host's free memory, for streams that a way back needs


@dataclass(frozen=True)
class Estimate:
    """The cost of a job. Sizes are bytes. Tokens, and all that follows from them, are estimated
    from a sample, unless `exact`: then every unit was counted."""

    documents: int
    tokens: int
    rows: int
    units: int
    units_done: int
    bytes_per_tap: dict[str, int]
    index_bytes: int
    overhead_bytes: int
    remaining_bytes: int
    free_bytes: int | None
    batch_rows: int  # rows in a step or a sweep, on all devices together
    mesh: str
    residency: Residency
    weights_bytes: int  # on each device, at once
    device_bytes: int
    memory: int | None  # bytes of each device
    host_bytes: int
    bytes_by_dtype: dict[
        str, int
    ]  # size of the whole dataset for every --store-dtype; of sums, as float64
    monthly_dollars: float | None = None  # to keep the whole dataset, if it goes to a cloud
    priced_as: str | None = None
    requests: Requests | None = None  # to write the remaining units, if they go to a bucket
    request_dollars: float | None = None  # for these requests
    hourly_dollars: float | None = None  # for the heartbeats of one worker
    warnings: tuple[str, ...] = ()
    kept_bytes: int = 0  # part of the overhead: the columns that --keep names
    remaining_tokens: int = 0
    tokens_error: int | None = None  # half-width of a 95% confidence interval
    packing: float | None = None  # share of the packed positions that hold tokens
    flops: float = 0.0  # for the tokens alone, whatever else runs
    exact: bool = False
    recomputes: bool | None = None  # whether blocks are computed again for gradients, if tapped

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_per_tap.values()) + self.index_bytes + self.overhead_bytes


def batch_rows(
    job: ExtractionJob,
    runtime: Runtime,
    platform: str,
    memory: int | None = None,
    cuts: Cuts = ONE_DEVICE,
) -> int:
    """Return the packed rows that a group of devices reads in a step, at most those of a unit.

    Unless the user set --batch-tokens, the number is halved until a step fits into `memory`.
    """
    tokens = runtime.batch_tokens or sweet_spot(job.checkpoint.arch, platform)
    largest = int(job.table.units.tokens.max())
    share = -(-largest // job.recipe.seq_len // cuts.layout.groups)
    rows = max(1, min(tokens // job.recipe.seq_len, share))
    if memory and not runtime.batch_tokens:
        while rows > 1 and step_of(job, rows, platform, cuts).device_bytes > MEMORY_SHARE * memory:
            rows //= 2
    return rows


def _planned_residency(job: ExtractionJob, runtime: Runtime, machine: Machine) -> Residency:
    """Return where a job's blocks are kept, and how many rows pass them at once."""
    platform, cuts = machine.platform, machine.cuts
    largest = int(job.table.units.tokens.max())
    found = choose_residency(
        lambda rows: step_of(job, rows, platform, cuts),
        (
            batch_rows(job, runtime, platform, None, cuts),
            batch_rows(job, runtime, platform, machine.memory, cuts),
        ),
        runtime,
        machine,
        most_rows=-(-largest // job.recipe.seq_len // cuts.layout.groups),
        files=job.checkpoint.files,
    )
    if found.streams:
        work = step_of(job, found.batch_rows, platform, cuts)
        refuse_streamed(work, found)
        found = _with_streams_kept(found, work) if job.objective else found
    return found


def refuse_streamed(work: Workload, found: Residency) -> None:
    """Raise if a step needs several blocks at once, and they are streamed."""
    told: str | None = None
    if work.other:
        kind = "jacobian" if work.pool == JACOBIAN else "cov"
        told = f"--reduce {kind}:{work.other.name}: needs the values of two blocks at once"
    elif work.writers:
        told = "--writers: edges need the values of several blocks at once"
    elif any(encoder.sae.across for encoder in work.encoders.values()):
        told = (
            "--encode-error: errors of a cross-layer transcoder need the values of several blocks "
            "at once"
        )
    elif work.steps:
        told = "--steps: integrated gradients need every block on the device"
    elif work.objective and not goes_back(work.arch):
        told = (
            "gradients of blocks that lend keys, or have embeddings of their own, need every block "
            "on the device"
        )
    if told:
        raise ConfigError(f"{told}, and here {found}; leave --weights out, or use more devices")


def goes_back(arch: Arch) -> bool:
    """Return whether a sweep can compute gradients: nothing but the stream passes blocks."""
    return not (arch.lends or arch.layer_embed)


def _with_streams_kept(found: Residency, work: Workload) -> Residency:
    """Shorten a sweep until the host has room for the stream that enters each block."""
    each = work.seq_len * work.passing * (work.depth + 1)
    room = int(_STREAMS_SHARE * (available_memory() or 0))
    rows = max(found.batch_rows, room // each // found.batch_rows * found.batch_rows)
    swept = min(found.sweep_rows, rows)
    return replace(found, sweep_rows=swept, kept_bytes=swept * each)


def fits(
    job: ExtractionJob, runtime: Runtime, platform: str, memory: int | None, layout: Layout
) -> bool:
    """Return whether a step fits into each device of a layout."""
    try:
        cuts = Cuts.of(layout, axis_sizes(job.checkpoint.arch), quiet=True)
    except ConfigError:
        return False
    rows = batch_rows(job, runtime, platform, memory, cuts)
    return not memory or step_of(job, rows, platform, cuts).device_bytes <= MEMORY_SHARE * memory


def planned_cuts(
    job: ExtractionJob,
    runtime: Runtime,
    platform: str,
    devices: int,
    memory: int | None,
    processes: int = 1,
) -> Cuts:
    """Return how the model is cut, in the user's layout on the devices or in one that fits."""
    suits = partial(fits, job, runtime, platform, memory)
    layout = chosen_layout(runtime, devices, processes, suits)
    return Cuts.of(layout, axis_sizes(job.checkpoint.arch))


def chosen_layout(
    runtime: Runtime, devices: int, processes: int, fits: Callable[[Layout], bool]
) -> Layout:
    """Return the layout that the user set, or the fastest one that fits."""
    layout = parse_layout(runtime.mesh, devices, processes, runtime.fsdp)
    if layout is None:
        layout, fitting = fitting_layout(devices, devices // processes, fits)
        if not fitting and not may_stream(runtime, processes):
            _log.warning("estimated memory: the model fits no mesh of %d devices", devices)
    return layout


def step_of(job: ExtractionJob, rows: int, platform: str, cuts: Cuts) -> Workload:
    """Return the workload of a step in which each group of devices reads `rows` rows."""
    recipe, arch = job.recipe, job.checkpoint.arch
    return Workload(
        arch=arch,
        taps=job.reached,
        cuts=cuts,
        seq_len=recipe.seq_len,
        rows=rows * cuts.layout.groups,
        compute_dtype=recipe.compute_dtype,
        store_dtype=recipe.store_dtype,
        whole=True,
        encoders=job.encoders,
        splices=job.splices,
        packed=job.checkpoint.packed_bytes() if cuts.layout.size == 1 else {},
        pool=reduces(recipe.pool),
        # (A span that begins in a packed row, and one that ends there.)
        slots=slots_for(math.ceil(job.table.kept * recipe.seq_len) + 1),
        labels=labels_for(_labels(job)) if reduces(recipe.pool) == COVARIANCE else 0,
        other=job.beside,
        objective=job.objective,
        compared=job.baseline.width if job.baseline else 0,
        steps=recipe.steps or 0,
        writers=job.writers,
    )


def _labels(job: ExtractionJob) -> int:
    """Return the labels of a unit, as many as a sample has."""
    units = job.table.units
    return max(1, round(job.table.kept * int(units.tokens.sum()) / max(1, len(units))))


def row_quantum(layout: Layout, processes: int) -> int:
    """Return the number that must divide a step's rows, which groups and processes share."""
    return math.lcm(layout.groups, processes)


def estimate(
    job: ExtractionJob,
    runtime: Runtime,
    machine: Machine,
    *,
    done: set[int],
    free_bytes: int | None,
    out: Objects | None = None,
    found: Survey | None = None,
    price: Price | None = None,
) -> Estimate:
    """Estimate the cost of a job.

    Args:
        out: where the dataset goes; sets the size of shards, and how many wait in memory.
        found: counts of the corpus; without them the unit table's estimates are used.
        price: the prices of the bucket where the dataset goes.
    """
    recipe, table, platform = job.recipe, job.table.taps, machine.platform
    total, left = (found.total, found.left) if found else _by_table(job, done)
    tokens, kept_rows, overhead = round(total.tokens), int(total.rows), round(total.beside)
    residency = _planned_residency(job, runtime, machine)
    together = _rows_together(job, runtime, machine, residency)
    each = job.table.row_bytes
    unwritten = int(left.rows * each + left.beside)
    whole = kept_rows * each + overhead
    shard = job.table.shard_limit(out, runtime.shard_bytes) if out else runtime.shard_bytes
    asked_for = requests_of(_rows_left(job, done, left), table, shard) if price else None
    waiting = 0
    if out and out.most_streamed and not runtime.spool:
        waiting = shard * (len(table) + out.most_closing)
    held, needed = _device_bytes(job, machine, residency)
    return Estimate(
        documents=int(job.table.units.num_docs.sum()),
        tokens=tokens,
        rows=kept_rows,
        units=len(job.units),
        units_done=len(done),
        bytes_per_tap={tap: kept_rows * info.row_bytes for tap, info in table.items()},
        index_bytes=kept_rows * job.table.index_dtype.itemsize,
        overhead_bytes=overhead,
        kept_bytes=round(total.kept),
        remaining_bytes=min(unwritten, runtime.max_bytes or unwritten),
        free_bytes=free_bytes,
        batch_rows=together,
        mesh=str(machine.cuts.layout),
        residency=residency,
        weights_bytes=held,
        device_bytes=needed,
        memory=machine.memory,
        host_bytes=_pipeline_bytes(
            job,
            runtime,
            together // machine.processes,
            machine.cuts.layout.size // machine.processes,
        )
        + waiting
        + residency.host_bytes,
        bytes_by_dtype={
            dtype: kept_rows * (_row_bytes_as(job, dtype) + job.table.index_dtype.itemsize)
            + overhead
            for dtype in (("float64",) if is_reduced(recipe.pool) else STORE_DTYPES)
        },
        monthly_dollars=price and price.monthly(min(whole, runtime.max_bytes or whole)),
        priced_as=price and str(price),
        requests=asked_for,
        request_dollars=price and asked_for and price.requests(asked_for),
        hourly_dollars=price and price.writes * BEATS_AN_HOUR / 1000,
        warnings=tuple(_warnings(job, platform)),
        remaining_tokens=round(left.tokens),
        tokens_error=found.tokens_error if found else None,
        packing=found.packing if found else None,
        flops=tokens / recipe.seq_len * step_of(job, 1, platform, ONE_DEVICE).flops,
        exact=found is not None and found.exact and not runtime.compress,
        recomputes=_recomputes(job, machine, residency) if job.objective else None,
    )


def _rows_together(
    job: ExtractionJob, runtime: Runtime, machine: Machine, residency: Residency
) -> int:
    """Return the rows of a step or sweep, which groups of devices and processes must share."""
    groups, seq_len = machine.cuts.layout.groups, job.recipe.seq_len
    quantum = row_quantum(machine.cuts.layout, machine.processes)
    asked = (runtime.batch_tokens or 0) // seq_len * groups
    if asked % quantum:
        raise ConfigError(
            f"--batch-tokens {runtime.batch_tokens} makes {asked} rows, which "
            f"{machine.processes} processes cannot share evenly; choose a multiple of "
            f"{quantum // groups * seq_len}"
        )
    return -(-residency.sweep_rows * groups // quantum) * quantum


def _recomputes(job: ExtractionJob, machine: Machine, residency: Residency) -> bool:
    work = step_of(job, residency.batch_rows, machine.platform, machine.cuts)
    return residency.streams or recomputes(work, machine.memory)


def _device_bytes(job: ExtractionJob, machine: Machine, residency: Residency) -> tuple[int, int]:
    """Return the bytes of the weights on each device, and of everything there."""
    work = step_of(job, residency.batch_rows, machine.platform, machine.cuts)
    if job.objective:
        work = replace(work, remat=recomputes(work, machine.memory))
    if not residency.streams:
        return work.weights, work.device_bytes
    looks_up, swept = residency.looks_up, residency.streams_on_device * job.recipe.seq_len
    held = work.outer_weights(embedding=not looks_up) + residency.on_device * work.packed_block
    resident = residency.count("resident")
    return held, streamed_bytes(work, resident, swept, looks_up=looks_up)


def _pipeline_bytes(job: ExtractionJob, runtime: Runtime, rows: int, devices: int) -> int:
    """Return the bytes that a process holds in its queues, of `rows` rows in a step.

    Args:
        devices: of the process.
    """
    taps = job.table.taps.values()
    per_row = sum(info.channels * info.storage.itemsize for info in taps)
    in_flight = 2 * runtime.queue_depth + 1
    if job.recipe.pool:
        per_row *= min(1.0, 4 * job.table.kept)  # (in float32, in slots that are not all used)
    covariances = 0
    if reduces(job.recipe.pool) == COVARIANCE:
        # Products as they arrive, in float32; and those of a unit and of one label in float64.
        channels = [info.channels for info in job.table.taps.values()]
        arriving = 4 * in_flight * labels_for(_labels(job)) * devices
        covariances = sum((arriving + 16 * (_labels(job) + 1)) * each**2 for each in channels)
    # Three units at once: one is packed, one computes, one is committed.
    compared = 4 * job.baseline.width if job.baseline else 0
    units = 3 * (64 + compared) * int(job.table.units.tokens.max())
    return int(in_flight * rows * job.recipe.seq_len * per_row) + units + covariances


def _rows_left(job: ExtractionJob, done: set[int], left: Counted) -> Ints:
    """Estimate the rows of each unfinished unit, in proportion to its tokens in the table."""
    tokens = np.delete(job.table.units.tokens, [unit for unit in done if unit < len(job.units)])
    return np.ceil(tokens * (left.rows / max(1, tokens.sum()))).astype(np.int64)


def _by_table(job: ExtractionJob, done: set[int]) -> tuple[Counted, Counted]:
    """Count the whole job and its unfinished part, from the unit table alone."""

    units, beside = job.table.units, unit_overheads(job.table)

    def added(chosen: npt.NDArray[np.bool_]) -> Counted:
        tokens = int(units.tokens[chosen].sum())
        kept = int(units.num_docs[chosen].sum()) * _KEPT * len(job.recipe.keep)
        return Counted(tokens, tokens * job.table.kept, int(beside[chosen].sum()), kept=kept)

    left = np.ones(len(units), np.bool_)
    left[[unit for unit in done if unit < len(units)]] = False
    return added(np.ones_like(left)), added(left)


def _row_bytes_as(job: ExtractionJob, store_dtype: str) -> int:
    """Return the bytes of a row over all taps, if stored as `store_dtype`."""
    arch, seq_len = job.checkpoint.arch, job.recipe.seq_len
    infos = stored_taps(job.taps, job.encoders, arch, seq_len, store_dtype, job.recipe.pool)
    return sum(info.row_bytes for info in infos.values())


def _warnings(job: ExtractionJob, platform: str) -> Iterator[str]:
    """Yield warnings about float8 products, own functions, and taps with very large rows."""
    if job.recipe.compute_dtype == "float8_e4m3":
        slower = "" if platform == "gpu" else "; this device emulates them, which is no faster"
        yield (
            "products in float8: on the demo model rows were 3 to 8% off, in bfloat16 0.5 to 1.3%; "
            f"`spile check` measures yours{slower}"
        )
    if any(splice.kind == FUNCTION for splice in job.splices):
        yield "the cost of your own function in --splice is not counted; --calibrate measures it"
    stream = job.checkpoint.arch.width * DTYPES_BY_NAME[job.recipe.store_dtype].itemsize
    stored = [tap for tap in job.taps if tap.kind.advice and tap.name in job.table.taps]
    for tap in reversed({tap.site: tap for tap in reversed(stored)}.values()):
        each = job.table.taps[tap.name].row_bytes
        yield (
            f"{tap.site} takes {each:,} bytes per row and tap, {each / stream:.0f} times a "
            f"residual stream's: {tap.kind.advice}"
        )


@dataclass(frozen=True)
class Throughput:
    """Rates in tokens per second."""

    text_rate_per_core: float | None  # of reading, tokenizing and packing; measured on a sample
    device_rate: float | None  # upper bound over all devices; None for unknown chips
    cores: int  # of this machine

    @property
    def cores_needed(self) -> float | None:
        """Cores needed so that the devices never wait for text."""
        if not self.text_rate_per_core or not self.device_rate:
            return None
        return self.device_rate / self.text_rate_per_core

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values for display."""
        if not self.text_rate_per_core:
            return []
        shown = [("text to tokens", f"{self.text_rate_per_core:,.0f} tok/s a core")]
        if self.device_rate and self.cores_needed:
            need = f"{self.cores_needed:.1f} cores (of {self.cores} here)"
            shown.append(("  the devices need", f"{need} at {self.device_rate:,.0f} tok/s"))
        return shown


def measure_throughput(job: ExtractionJob, runtime: Runtime, machine: Machine) -> Throughput:
    """Measure the text rate on the corpus's head, in CPU seconds; compute the devices' rate."""
    with closing(job.reader()) as reader:
        documents, _ = reader.sample(0)
        prepare_documents(job.recipe, job.tokenizer, documents)  # warm up: start threads, compile
        began = time.process_time()
        documents, _ = reader.sample(0)
        packed = prepare_documents(job.recipe, job.tokenizer, documents).packed
        spent = time.process_time() - began
    rate = None
    if machine.chip and job.recipe.compute_dtype == machine.chip.half:
        platform, cuts = machine.platform, machine.cuts
        work = step_of(job, batch_rows(job, runtime, platform, None, cuts), platform, cuts)
        rate = work.tokens / Roofline.of(work, 0.0, machine.chip).seconds
    measured = packed.num_tokens / spent if packed.num_tokens and spent else None
    return Throughput(measured, rate, os.cpu_count() or 1)


def refuse_if_too_large(cost: Estimate, where: str) -> None:
    """Raise if a run would fill the disk, or if its weights alone fill the device."""
    if cost.memory is not None and cost.weights_bytes > cost.memory:
        raise ConfigError(
            f"the weights take {cost.weights_bytes / 1e9:.1f} GB, but the device has "
            f"{cost.memory / 1e9:.1f} GB; leave --weights out, choose shallower taps, a smaller "
            "model or more devices"
        )
    if cost.free_bytes is not None and cost.remaining_bytes > cost.free_bytes:
        raise ConfigError(
            f"{where}: about {cost.remaining_bytes / 1e9:.2f} GB would be written, but only "
            f"{cost.free_bytes / 1e9:.2f} GB are free; choose fewer taps or documents, or "
            "--ignore-space"
        )


def unit_overheads(table: Table) -> Ints:
    """Return the bytes of each unit besides its rows: statistics, headers, documents file."""
    taps, recipe, units = table.taps.values(), table.recipe, table.units
    headers = sum(HEADER_ALIGN + 16 * info.channels for info in taps) + 3 * HEADER_ALIGN
    characters = np.minimum(units.num_docs * recipe.preview, _CHARACTERS * units.tokens)
    return headers + characters + units.num_docs * (_DOCUMENT + _KEPT * len(recipe.keep))


class Budget:
    """Decides whether another unit may begin.

    Done units count with the bytes in their records. Units in progress, or about to begin, count
    with their estimates, scaled by the ratio of actual to estimated bytes of the done units.
    """

    def __init__(self, table: Table, ledger: Ledger, limit: int | None) -> None:
        self._table, self._ledger, self._limit = table, ledger, limit
        self._stored: dict[int, int] = {}  # by unit, for done units
        self.spent = False  # whether a unit did not fit beside the done units alone

    @property
    def limited(self) -> bool:
        return self._limit is not None

    @cached_property
    def _estimated(self) -> list[int]:
        """Estimated bytes of each unit; computed only if there is a limit."""
        table = self._table
        rows = (table.units.tokens * table.kept).astype(np.int64)
        return (rows * table.row_bytes + unit_overheads(table)).tolist()

    def allows(self, unit: int, done: Collection[int], in_hand: Collection[int]) -> bool:
        """Return whether a unit fits beside the units that are done and in progress.

        If it does not fit only because of units in progress, the budget is not spent: those may
        fail, or turn out smaller than estimated, so the caller should ask again.

        Args:
            in_hand: units that any worker is doing.
        """
        if self._limit is None:
            return True
        self._read(done)
        self.spent = self.spent or self._expected({unit}) > self._limit
        return not self.spent and self._expected({*in_hand, unit}) <= self._limit

    def leaves_out(self, missing: Collection[int], done: Collection[int]) -> bool:
        """Return whether one of the missing units does not fit beside the done ones."""
        if self._limit is None or not missing:
            return False
        self._read(done)
        return self._expected({max(missing, key=self._estimated.__getitem__)}) > self._limit

    def _read(self, done: Collection[int]) -> None:
        new = sorted({*done}.intersection(range(len(self._estimated))) - {*self._stored})
        for record in mapped(self._ledger.read_done, new, self._ledger.objects.parallel):
            if record is not None:
                self._stored[record.unit] = sum(file.bytes for file in record.files())

    def _expected(self, coming: Collection[int]) -> float:
        """Return the bytes stored so far plus those expected for the coming units."""
        stored = sum(self._stored.values())
        guessed = sum(self._estimated[unit] for unit in self._stored)
        more = sum(self._estimated[unit] for unit in {*coming} - {*self._stored})
        return stored + more * (stored / guessed if guessed else 1.0)

"""Compile the step of an extraction ahead of time, also for devices that are not here.

Only a model's config.json is needed. Figures from the compiled program (memory, collectives) and
from formulas (FLOPs, memory traffic) give an estimate of tokens per second, and of the cost.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from spile.compile.collectives import Collective, added, read_collectives, sent_by_all
from spile.compile.targets import CompileTarget
from spile.core.config import Recipe, Runtime, activation_dtype
from spile.core.errors import ConfigError
from spile.core.pool import COVARIANCE, JACOBIAN, Pool
from spile.core.tensors import DTYPES_BY_NAME
from spile.corpus.pack import Batch, labels_for, slots_for
from spile.models.config.arch import Arch
from spile.models.config.kernel_choice import recurrence_kernel, told_recurrence
from spile.models.config.specs import (
    array_axes,
    axis_sizes,
)
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.files.lenses import Lens
from spile.models.forward.decoder import needs_whole_block
from spile.models.forward.ops import gpu_capability
from spile.models.forward.sharding import Shards, make_mesh
from spile.models.forward.sparse_latents import device_arrays
from spile.models.forward.splice import load_changes
from spile.models.forward.weights import LayerSchedule, Params, abstract_params
from spile.models.layout import Cuts, Layout
from spile.models.objectives import LOGIT_DIFF, LOSS, Objective
from spile.models.splices import Splice
from spile.models.taps import Tap
from spile.plan.baselines import Baseline, find_baseline
from spile.plan.compute_dtype import settled_compute_dtype
from spile.plan.encoders import find_encoders, stored_taps
from spile.plan.estimate import chosen_layout, refuse_streamed, row_quantum
from spile.plan.lenses import find_lens
from spile.plan.objectives import find_objective
from spile.plan.pooling import reducing, refuse_sums
from spile.plan.residency import Machine, Residency, choose_residency, streamed_bytes
from spile.plan.roofline import MEMORY_SHARE, Roofline, Workload, recomputes, sweet_spot
from spile.plan.splices import find_splices
from spile.plan.tapped import seq_len_of, taps_of, writers_of
from spile.run.step.devices import StepDevices
from spile.run.step.load import lens_arrays
from spile.run.step.resident import ResidentStep
from spile.run.step.settings import StepSettings
from spile.run.step.step import StagePrograms, Step
from spile.run.step.stored import Extras
from spile.run.step.sweep import Sweep, SweepOptions

_UNIT_TOKENS = 4_000_000  # tokens of a unit by default: the longest sweep
_CONTEXTS = 16  # contexts in a row: cuDNN's kernel is compiled for a fixed maximum
_SPANS = 4  # in a packed row, of pooled values: their number is the corpus's
_LABELS = 2  # in a unit, of a covariance
_TOO_LARGE = ("RESOURCE_EXHAUSTED", "HbmOom", "exceeds available", "out of memory")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Properties of a compiled step; sizes are bytes, for one device."""

    topology: str
    on: str  # the compiler's devices
    devices: int
    hosts: int
    mesh: str
    cut: str  # which axes of the model are split, and which are replicated
    seq_len: int
    tokens: int  # read by all devices in a step
    compute_dtype: str
    store_dtype: str
    weights: int
    kept: str  # where the blocks are
    host_memory: int  # for blocks, on each host
    taps: int
    temporaries: int | None  # None: the compiler found that they do not fit
    estimated_temporaries: int
    memory: int | None
    fits: bool | None
    flops: int
    traffic: int
    collectives: dict[str, Collective]
    seconds: Roofline | None = None  # None: the chip is unknown, or its float32 speed is
    tokens_per_second: float | None = None  # upper bound
    tokens_one_by_one: float | None = None  # per second, if kernels run one by one (on a GPU)
    dollars: float | None = None  # per billion tokens, on demand
    dollars_spot: float | None = None
    compiling: float  # seconds
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        limit = self.seconds.limit if self.seconds else None
        return {**dataclasses.asdict(self), "limit": limit}


@dataclass(frozen=True)
class Question:
    """A model and the options for its step, before a mesh is chosen."""

    arch: Arch
    recipe: Recipe
    runtime: Runtime
    target: CompileTarget
    encoders: Mapping[str, SparseEncoder] = field(
        default_factory=dict[str, SparseEncoder]
    )  # by tap
    splices: tuple[Splice, ...] = ()
    baseline: Baseline | None = None
    lens: Lens | None = None

    def __post_init__(self) -> None:
        if self.pool:
            shape = self.seq_len, self.taps, self.arch
            refuse_sums(self.pool, self.store_dtype, *shape, self.encoders)

    @property
    def seq_len(self) -> int:
        return seq_len_of(self.recipe, self.arch)

    @cached_property
    def compute_dtype(self) -> str:
        capability = self.target.chip.capability if self.target.chip else gpu_capability()
        return settled_compute_dtype(self.recipe.compute_dtype, self.target.platform, capability)

    @classmethod
    def of(cls, arch: Arch, recipe: Recipe, runtime: Runtime, target: CompileTarget) -> Self:
        """Find the encoders, splices, baseline and lens that a recipe names."""
        if not recipe.taps:
            raise ConfigError("--taps is missing; give at least one tap, e.g. resid_post:12")
        taps = taps_of(recipe, arch)
        return cls(
            arch,
            recipe,
            runtime,
            target,
            find_encoders(recipe, taps, arch),
            find_splices(recipe.splice, taps, arch),
            find_baseline(recipe, taps, arch, seq_len_of(recipe, arch)),
            find_lens(recipe, taps, arch),
        )

    @property
    def taps(self) -> tuple[Tap, ...]:
        return taps_of(self.recipe, self.arch)

    @property
    def writers(self) -> tuple[Tap, ...]:
        """The taps that edges come from."""
        return writers_of(self.recipe, self.taps, self.arch)

    @cached_property
    def objective(self) -> Objective | None:
        return find_objective(self.recipe.objective, self.taps, self.arch, self.compute_dtype)

    @property
    def store_dtype(self) -> str:
        wide = self.recipe.compute_dtype == "float32"
        return self.recipe.store_dtype or ("float32" if wide else "bfloat16")

    @cached_property
    def pool(self) -> Pool | None:
        if self.recipe.reduce is None:
            return Pool.parse(self.recipe.pool) if self.recipe.pool else None
        return Pool.parse(reducing(self.recipe).pool or "")

    @property
    def sums(self) -> bool:
        """Whether sums by label are stored in place of rows."""
        return self.pool is not None and self.pool.labels is not None

    def workload(self, layout: Layout) -> Workload:
        """Return the step on this layout, with as many rows as fit, unless the user set a number.

        Raises:
            ConfigError: if the model cannot be split for this layout.
        """
        arch, target, seq_len, taps = self.arch, self.target, self.seq_len, self.taps
        pool = self.pool if self.pool and self.pool.sums else None
        other = Tap.from_name(pool.beside) if pool and pool.beside else None
        together = taps if other is None else (*taps, other)
        aims = self.objective.aims if self.objective else ()
        depth = max(tap.layers_needed(arch) for tap in (*together, *aims))
        quantum = row_quantum(layout, target.hosts)
        work = Workload(
            arch=arch,
            taps=taps,
            cuts=Cuts.of(layout, axis_sizes(arch), quiet=True),
            seq_len=seq_len,
            rows=quantum,
            compute_dtype=self.compute_dtype,
            store_dtype=self.store_dtype,
            whole=needs_whole_block((*together, *aims), depth),
            encoders=self.encoders,
            splices=self.splices,
            pool=pool.by if pool else None,
            slots=slots_for(_SPANS) if pool else 0,
            labels=labels_for(_LABELS) if pool and pool.by == COVARIANCE else 0,
            other=other,
            objective=self.objective,
            compared=self.baseline.width if self.baseline else 0,
            writers=self.writers,
            steps=self.recipe.steps or 0,
        )
        work = dataclasses.replace(work, remat=recomputes(work, self.target.memory))
        platform = target.platform if target.chip is None else "accelerator"
        tokens = self.runtime.batch_tokens or sweet_spot(arch, platform)
        rows = max(1, tokens // seq_len)
        while True:
            work = dataclasses.replace(work, rows=-(-rows * layout.groups // quantum) * quantum)
            if self.runtime.batch_tokens or rows == 1 or self.holds(work):
                return work
            rows //= 2

    def holds(self, work: Workload) -> bool:
        """Return whether a step fits into a device's memory, by our estimate."""
        memory = self.target.memory
        return memory is None or work.device_bytes <= MEMORY_SHARE * memory

    def residency(self, work: Workload) -> Residency:
        """Return where blocks are kept; an unknown host is assumed to have enough memory."""
        groups = work.cuts.layout.groups
        memory, tokens = self.target.memory, self.runtime.batch_tokens
        enough = work.rows // groups
        if not tokens:
            enough = max(1, sweet_spot(self.arch, self.target.platform) // work.seq_len)
        return choose_residency(
            lambda rows: dataclasses.replace(work, rows=rows * groups),
            (enough, work.rows // groups),
            self.runtime,
            Machine(self.target.platform, memory, self.target.chip, self.target.hosts),
            most_rows=_UNIT_TOKENS // work.seq_len,
            host_memory=sys.maxsize,
        )

    def layout(self) -> Layout:
        """Return the layout that the user set, or the fastest one that fits."""

        def fits(layout: Layout) -> bool:
            work = self._possible(layout)
            return work is not None and self.holds(work)

        return chosen_layout(self.runtime, len(self.target.devices), self.target.hosts, fits)

    def layouts(self) -> list[Layout]:
        """Return the layouts worth trying: powers of two, and divisors of the number of heads."""
        devices = len(self.target.devices)
        twos = {1 << n for n in range(devices.bit_length())}
        heads = {n for n in range(1, devices + 1) if self.arch.num_heads % n == 0}
        tried: list[Layout] = []
        for model in sorted(n for n in twos | heads if devices % n == 0):
            for fsdp in sorted(n for n in twos if devices // model % n == 0):
                layout = Layout(devices // model // fsdp, fsdp, model)
                work = self._possible(layout)
                if work is None:
                    continue
                # Gathering weights that would fit anyway gains nothing.
                memory = self.target.memory
                roomy = memory is None or work.weights * fsdp <= memory / 2
                if (fsdp == 1 or not roomy) and self.holds(work):
                    tried.append(layout)
        return tried

    def _possible(self, layout: Layout) -> Workload | None:
        try:
            return self.workload(layout)
        except ConfigError:
            return None


def compile_step(question: Question, layout: Layout) -> Compiled:
    """Compile the step for one layout; block by block if the model does not fit."""
    target, work = question.target, question.workload(layout)
    kept = question.residency(work)
    if kept.streams:
        refuse_streamed(work, kept)
        work = dataclasses.replace(work, rows=kept.batch_rows * layout.groups)
    batch = _full_batch(work)
    begin = time.perf_counter()
    refused: tuple[str, ...] = ()
    programs: Sequence[StagePrograms] = ()
    try:
        programs = _abstract_step(question, work, kept).compile(batch)
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
        if not any(sign in told for sign in _TOO_LARGE):
            raise
        refused = (f"the compiler: {told.splitlines()[0][:300]}",)
    seconds = time.perf_counter() - begin
    made = [run.memory_analysis() for run, _ in programs]
    moved = [compact.memory_analysis().output_size_in_bytes for _, compact in programs if compact]
    temporaries = max((each.temp_size_in_bytes for each in made), default=None)
    taps, weights = work.taps_bytes, work.weights
    fits, needed = False, work.device_bytes
    if kept.streams:
        streams = kept.streams_on_device * work.seq_len
        needed = streamed_bytes(work, kept.count("resident"), streams)
        weights = work.outer_weights() + kept.on_device * work.packed_block
        taps = needed - weights - work.temporaries  # with the streams of a sweep
        fits = target.memory is None or weights + taps + (temporaries or 0) <= target.memory
    elif made:
        (only,) = made
        held = only.argument_size_in_bytes + only.output_size_in_bytes + (temporaries or 0)
        # While a step runs, the rows of the step before it are copied to the host.
        held += moved[0] - only.alias_size_in_bytes
        taps = only.output_size_in_bytes + moved[0]
        fits = target.memory is None or held <= target.memory
    if target.on == "cpu":
        fits = target.memory is None or needed <= MEMORY_SHARE * target.memory
    collectives = _collectives([run for run, _ in programs], work, target)
    return Compiled(
        topology=target.name,
        on=target.on,
        devices=len(target.devices),
        hosts=target.hosts,
        mesh=str(layout),
        cut=work.cuts.told(array_axes(work.arch).values()),
        seq_len=work.seq_len,
        tokens=work.tokens,
        compute_dtype=work.compute_dtype,
        store_dtype="float64" if question.sums else work.store_dtype,
        weights=weights,
        kept=kept.told(work.seq_len),
        host_memory=kept.host_bytes * layout.size // target.hosts,
        taps=taps,
        temporaries=temporaries,
        estimated_temporaries=work.temporaries,
        memory=target.memory,
        fits=None if target.memory is None else fits and not refused,
        flops=work.flops,
        traffic=work.traffic,
        collectives=collectives,
        **(_speed(work, target, collectives, kept) if programs else {}),
        compiling=seconds,
        notes=(*target.notes, *refused, *_said(question, work)),
    )


def _collectives(
    programs: Sequence[Any], work: Workload, target: CompileTarget
) -> dict[str, Collective]:
    """Add up what the programs send between devices."""
    collectives: dict[str, Collective] = {}
    for program in programs:
        found = read_collectives(
            program.as_text(),
            len(target.devices),
            trips=_schedule(work).cycles,
            # A CPU sends bfloat16 as float32.
            narrow=target.on == "cpu" and work.compute_dtype == "bfloat16",
        )
        collectives = added(collectives, found)
    return collectives


def search(question: Question) -> list[Compiled]:
    """Compile every mesh worth trying; return the fastest that fits first."""
    found = [compile_step(question, layout) for layout in question.layouts()]
    if not found:
        raise ConfigError(
            f"--search: this step fits no mesh of {len(question.target.devices)} devices, by "
            "estimate; choose fewer --batch-tokens, or more devices"
        )

    def order(each: Compiled) -> tuple[bool, float, float]:
        # Among equally fast meshes, prefer the one with less work besides the bottleneck.
        beside = sum(vars(each.seconds).values()) if each.seconds else 0.0
        return not each.fits, -(each.tokens_per_second or 0.0), beside

    return sorted(found, key=order)


def _speed(
    work: Workload, target: CompileTarget, found: dict[str, Collective], kept: Residency
) -> dict[str, Any]:
    """Return the roofline, and the rates and prices that follow from it."""
    chip = target.chip
    if chip is None or work.compute_dtype != chip.half:
        return {}
    seconds = Roofline.of(work, sent_by_all(found), chip)
    copies = kept.host_bytes / chip.host_link * kept.batch_rows / kept.sweep_rows
    seconds = dataclasses.replace(seconds, host_link=seconds.host_link + copies)
    rate = work.tokens / seconds.seconds
    hours = 1e9 / rate / 3600 * len(target.devices)
    return {
        "seconds": seconds,
        "tokens_per_second": rate,
        "tokens_one_by_one": work.tokens / seconds.one_by_one,
        "dollars": None if chip.on_demand is None else hours * chip.on_demand,
        "dollars_spot": None if chip.spot is None else hours * chip.spot,
    }


def _said(question: Question, work: Workload) -> list[str]:
    target, said = question.target, list[str]()
    capability = target.chip.capability if target.chip else gpu_capability()
    recurrence = recurrence_kernel(
        *(target.platform, work.arch, work.compute_dtype, capability),
        wanted=question.runtime.attention,
    )
    if recurrence:
        said.append(f"recurrent layers: {told_recurrence(recurrence)}")
    if work.labels:
        said.append(f"sums of {work.labels} labels in a unit; more take as much memory each")
    elif work.pool not in (None, JACOBIAN):
        said.append(f"room for {work.slots} documents or other spans in each row")
    if target.chip is None:
        return [*said, "unknown device: no estimate of its speed"]
    if work.compute_dtype != target.chip.half:
        return [*said, f"no estimate of the speed of {work.compute_dtype}"]
    reached = f"{target.chip.reached:.0%} of the {target.chip.name}'s peak"
    return [*said, f"speed is a limit, at {reached} ({target.chip.why})"]


def _schedule(work: Workload) -> LayerSchedule:
    return LayerSchedule.of(work.arch, work.depth, whole=work.whole)


def _abstract_step(question: Question, work: Workload, kept: Residency) -> Step:
    """Return the step, with shapes in place of weights; a sweep if the model is streamed."""
    target = question.target
    shards, schedule = _shards(work, target), _schedule(work)
    if kept.streams:
        schedule = dataclasses.replace(schedule, cycles=0)
    changes, _ = load_changes(work.splices, activation_dtype(work.compute_dtype), shards)
    settings = StepSettings(
        arch=work.arch,
        taps=work.taps if work.other is None else (*work.taps, work.other),
        schedule=schedule,
        place=StepDevices(target.devices[0], shards),
        compute_dtype=work.compute_dtype,
        store_dtype=work.store_dtype,
        attention=question.runtime.attention,
        encoders=work.encoders,
        spliced=tuple(changes),
        pool=work.pool,
        beside=work.other,
        objective=work.objective,
        writers=work.writers,
        steps=work.steps or None,
        remat=work.remat,
        lens_adds=question.lens.adds if question.lens else None,
    )
    extras, shapes = _extras(question, work, shards, changes), params_of(work, shards, schedule)
    if not kept.streams:
        return ResidentStep(shapes, settings, extras)
    options = SweepOptions(rows=work.rows, looks_up=kept.looks_up)
    return Sweep(Future(), settings, shapes, options, extras)


def _shards(work: Workload, target: CompileTarget) -> Shards | None:
    if work.cuts.layout.size == 1:
        return None
    mesh = make_mesh(work.cuts.layout, target.devices)
    return Shards(mesh, work.cuts, array_axes(work.arch))


def _extras(
    question: Question, work: Workload, shards: Shards | None, changes: Mapping[Tap, Partial]
) -> Extras:
    """Shapes in place of the arrays that a step reads besides the weights."""
    shaped = partial(jax.ShapeDtypeStruct, sharding=shards.whole if shards else None)
    stored = stored_taps(work.taps, work.encoders, work.arch, work.seq_len, work.store_dtype)

    def shapes(encoder: SparseEncoder) -> dict[str, Any]:
        arrays = device_arrays(load_arrays(encoder.sae)[0], activation_dtype(work.compute_dtype))
        return {name: shaped(array.shape, array.dtype) for name, array in arrays.items()}

    def shaped_as(arrays: Any) -> Any:
        return jax.tree.map(lambda array: shaped(array.shape, array.dtype), arrays)

    baseline = question.baseline
    lenses, _ = lens_arrays(question.lens, work.taps, activation_dtype(work.compute_dtype))
    return Extras(
        scales={
            name: shaped(info.shape, jnp.dtype("float32"))
            for name, info in stored.items()
            if info.dtype == "int8"
        },
        encoders={tap: shapes(encoder) for tap, encoder in work.encoders.items()},
        changes=shaped_as(tuple(changes.values())),
        lenses=shaped_as(lenses),
        baselines=shaped_as(baseline.arrays(work.taps, work.writers, work.steps))
        if baseline
        else {},
    )


def params_of(
    work: Workload, shards: Shards | None, schedule: LayerSchedule | None = None
) -> Params:
    """Return the shapes and shardings of the arrays that a run would load."""
    dtype, schedule = DTYPES_BY_NAME[work.compute_dtype], schedule or _schedule(work)
    return abstract_params(work.arch, schedule, head=work.head, dtype=dtype, shards=shards)


def _full_batch(work: Workload) -> Batch:
    """Return rows without padding in which every token is kept."""
    zeros = np.zeros((work.rows, work.seq_len), np.int32)
    full = np.full(work.rows, work.seq_len, np.int32)
    pooled: dict[str, np.ndarray] = {}
    if work.pool:
        pooled["slots"], pooled["sizes"] = zeros, np.zeros((work.rows, work.slots), np.int32)
    if work.labels:
        pooled["labels"] = np.zeros((work.rows, work.labels), np.int32)
    if work.objective and work.objective.kind in (LOSS, LOGIT_DIFF):
        pooled["aimed"] = zeros.astype(np.int8)
    if work.objective and work.objective.kind == LOGIT_DIFF:
        pooled["answers"] = np.zeros((*zeros.shape, 2), np.int32)
    if work.compared:
        pooled["beside"] = np.zeros((*zeros.shape, work.compared), np.float32)
    return Batch(zeros, zeros, zeros, full, None, full, contexts=_CONTEXTS, **pooled)

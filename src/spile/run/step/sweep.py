"""The sweep: a step that runs the model block by block, all rows through one before the next.

A sweep is a large step. Its rows are cut into batches, whose streams stay on the device; the host
runs one block after another, each for all batches, while the next block's weights are on their way
(`models/forward/streamed.py`). A block's taps leave the device as soon as it is done.

On a CPU every step is a sweep, so that rows do not depend on where weights are kept: XLA compiles a
block in a scan and a block alone differently, and they round differently.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from spile.core.recipe import error_name, latent_names
from spile.core.threads import NEVER, Cancellation
from spile.corpus.pack import Batch
from spile.dataset.format import scale_name
from spile.models.config.arch import Layer
from spile.models.config.specs import head_specs
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.forward.decoder import (
    BEFORE,
    GAPS,
    Beside,
    by_stage,
    needs_whole_block,
    of_any_block,
    stage_kinds,
)
from spile.models.forward.sharding import PINNED
from spile.models.forward.streamed import Passing, SpilledStreams, SweptModel, walk
from spile.models.forward.weights import Params, WeightArrays
from spile.models.sites import LENSES
from spile.models.taps import Tap
from spile.run.step.backward import BackwardStage, local_objective, stages_back
from spile.run.step.output import Runs, StepOutput, StepRows
from spile.run.step.settings import Computed, Stage, StepInputs, StepSettings
from spile.run.step.step import Programs, StagePrograms, input_shapes, step_inputs
from spile.run.step.stored import Extras, Reduced


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep runs, and whom it tells."""

    rows: int = sys.maxsize  # of a batch; a sweep has many
    looks_up: bool = False  # the host looks up embeddings, which the device does not hold
    spills: bool = False  # between blocks, the streams of all but a few batches are on the host
    cancellation: Cancellation = NEVER  # checked between blocks
    # Called once, when the first sweep has read every tensor, or before the first commit.
    compare_hashes: Callable[[], None] = lambda: None
    # Called after each sweep with the seconds that the device waited for weights.
    waited: Callable[[float], None] = lambda seconds: None


def _renamed(
    taps: Sequence[Tap], given: Mapping[str, Any], *, back: bool = False
) -> dict[str, Any]:
    """Rename values from the stored names of a stage's taps to their numbers, or back.

    Numbered, so that stages of a kind are one program. Other stages' values are left out.
    """
    names: dict[str, str] = {}
    for number, tap in enumerate(taps):
        for ours, theirs in zip(_stored_names(str(number)), _stored_names(tap.name), strict=True):
            names |= {ours: theirs} if back else {theirs: ours}
    return {names[name]: value for name, value in given.items() if name in names}


def _stored_names(tap: str) -> list[str]:
    """Every name under which a tap's rows, or their scales, may be stored."""
    names = [tap, *latent_names(tap), error_name(tap)]
    return [*names, *map(scale_name, names)]


_OUTER = "outer."  # before the names of arrays outside the blocks, in a block's program


@dataclass(frozen=True)
class _SweptStage:
    """One stage of a sweep: its taps and splices, and the arrays that they need."""

    taps: tuple[Tap, ...]  # as they are stored; their places are their slots
    stage: Stage
    ends: bool  # nothing reads the stream that leaves it
    encoders: Mapping[str, SparseEncoder]  # by slot
    extras: Extras  # by slot

    @cached_property
    def local(self) -> tuple[Tap, ...]:
        """The taps as the stage computes them, without their layer."""
        return tuple(map(of_any_block, self.taps))

    @cached_property
    def forms(self) -> tuple[Tap, ...]:
        """The taps as they are stored, by slot, without their layer."""
        return tuple(
            replace(tap, layer=0) if tap.site in LENSES else local
            for tap, local in zip(self.taps, self.local, strict=True)
        )

    @property
    def reads_head(self) -> bool:
        """Whether a lens predicts here, so that a block's program has the head, too."""
        return any(tap.site in LENSES for tap in self.taps)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What identifies the program of this stage: equal for blocks of a kind."""
        changes = self.extras.changes
        return (
            self.stage,
            self.ends,
            self.local,
            self.forms,
            tuple(self.encoders.items()),
            jax.tree.structure(changes),
            tuple(array.shape for array in jax.tree.leaves(changes)),
        )

    def program(self, settings: StepSettings, contexts: int, part: int) -> Any:
        """Return the jitted function of this stage, under the name that it has in a trace.

        It takes the weights, the extras, the stream, what is read beside it, and a batch's inputs.
        It returns what is stored, the next stream, what later stages need, and a small array that
        is ready when the others are: a stream cannot be waited for once the next stage has taken
        its memory.
        """
        taps = {str(number): tap for number, tap in enumerate(self.forms)}
        computed = {str(number): tap.name for number, tap in enumerate(self.local)}

        def run(
            weights: WeightArrays, extras: Extras, stream: Any, beside: Beside, inputs: StepInputs
        ) -> tuple[Any, ...]:
            outer = {n.removeprefix(_OUTER): a for n, a in weights.items() if n.startswith(_OUTER)}
            own = {name: a for name, a in weights.items() if not name.startswith(_OUTER)}
            stream, onward, found = settings.stage_values(
                self.stage, own, extras.changes, (stream, beside), inputs.read, contexts
            )
            values = {slot: found[name] for slot, name in computed.items()}
            values |= {GAPS: found[GAPS]} if GAPS in found else {}
            made = settings.stored(values, taps, self.encoders, extras, inputs, part, outer)
            return made, None if self.ends else stream, onward, inputs.counts + 0

        kind = self.stage.kind
        run.__name__ = kind if isinstance(kind, str) else "block"
        overwrites = isinstance(kind, Layer) and not self.ends and not settings.objective
        return jax.jit(run, donate_argnums=(2,) if overwrites else ())


@dataclass(kw_only=True)
class _SweptBatch(Passing):
    """A batch on its way through the blocks, and its rows that have been computed."""

    batch: Batch
    runs: Runs
    kept: Array
    inputs: StepInputs
    rows: dict[str, Array] = field(default_factory=dict[str, Array])
    reduced: dict[str, Reduced] = field(default_factory=dict[str, Reduced])
    gaps: Array | None = None
    # If there is a way back: the streams that entered stages, and the cotangent on its way.
    entered: dict[int, Any] = field(default_factory=dict[int, Any])
    cotangent: Any = None


class Sweep:
    """Runs large batches through a model block by block."""

    def __init__(
        self,
        model: Future[SweptModel],
        settings: StepSettings,
        shapes: Params,
        options: SweepOptions,
        extras: Extras | None = None,
    ) -> None:
        """Args:
        shapes: of the model, all its blocks in `tail`, to compile for.
        extras: the arrays besides the weights.
        """
        self.settings, self._model, self._shapes = settings, model, shapes
        self._options, self._compared = options, False
        self._place, self._depth = settings.place, settings.schedule.depth
        extras = self._place.everywhere(extras or Extras())
        self.programs = Programs(settings, shapes, extras, "sweep", options.looks_up)
        self._kinds = stage_kinds(settings.arch, self._depth)
        self._stages = self._stages_with(extras)
        self._back = self._stages_back_with(extras) if settings.objective else {}
        place, spills = self._place, options.spills
        self._spilled = SpilledStreams(place.stream(), place.stream(PINNED)) if spills else None

    def loaded(self, seconds: float) -> bool:
        """Wait up to `seconds` for the model; return whether loading has ended, well or not."""
        return bool(wait([self._model], seconds).done)

    def check(self) -> None:
        """Compare hashes the first time, and then whether files have changed since.

        Each sweep ends with this. So no sweep has read anything else than what was hashed.
        """
        model = self._ready
        if self._compared:
            model.check()
        else:
            self._options.compare_hashes()
            self._compared = True

    @cached_property
    def _ready(self) -> SweptModel:
        return self._model.result()

    def _stages_with(self, extras: Extras) -> dict[int, _SweptStage]:
        settings, depth = self.settings, self._depth
        changes = dict(zip(settings.spliced, extras.changes, strict=True))
        plain = [tap for tap in settings.taps if not tap.kind.of]
        tapped, spliced = by_stage(plain, depth), by_stage(changes, depth)
        scores_all = any(tap.site == "attn_pattern" for tap in settings.taps)
        whole = settings.compares or needs_whole_block(tuple(plain), depth)
        whole = whole or settings.objective is not None
        stages: dict[int, _SweptStage] = {}
        for number, kind in enumerate(self._kinds, -1):
            taps = tuple(tapped[number])
            own = Extras(
                _renamed(taps, extras.scales),
                _renamed(taps, extras.encoders),
                tuple(changes[tap] for tap in spliced[number]),
                _renamed(taps, extras.lenses),
            )
            local = tuple(dict.fromkeys(map(of_any_block, taps)))
            stage = Stage(kind, local, tuple(map(of_any_block, spliced[number])), scores_all)
            ends = number == depth - 1 and isinstance(kind, Layer) and not whole
            encoders = _renamed(taps, settings.encoders)
            stages[number] = _SweptStage(taps, stage, ends, encoders, own)
        return stages

    def _stages_back_with(self, extras: Extras) -> dict[int, BackwardStage]:
        settings, depth = self.settings, self._depth
        assert settings.objective
        changes = dict(zip(settings.spliced, extras.changes, strict=True))
        gradients = {tap: tap.source for tap in settings.taps if tap.kind.of}
        tapped, spliced = by_stage(gradients.values(), depth), by_stage(changes, depth)
        aims, way = by_stage(settings.objective.aims, depth), stages_back(settings, depth)
        stages: dict[int, BackwardStage] = {}
        for number in way:
            taps = tuple(tap for tap, source in gradients.items() if source in tapped[number])
            stages[number] = BackwardStage(
                self._kinds[number + 1],
                taps,
                tuple(map(of_any_block, spliced[number])),
                local_objective(settings.objective, tuple(aims[number])),
                _renamed(taps, settings.encoders),
                Extras(
                    _renamed(taps, extras.scales),
                    _renamed(taps, extras.encoders),
                    tuple(changes[tap] for tap in spliced[number]),
                    baselines=_renamed(taps, extras.baselines),
                ),
                number == way[0],
            )
        return stages

    # -- a sweep -----------------------------------------------------------------------------------

    def __call__(self, batch: Batch) -> StepOutput:
        """Sweep over a large batch; return when the last block has been handed to the device."""
        started = time.perf_counter()
        swept = self._swept_over(batch)
        gathers = self.settings.gathers
        own = slice(None) if gathers else self._place.own
        found = tuple(
            StepRows(
                each.runs[own], each.rows, each.reduced, gathers, each.gaps, each.batch.scored_docs
            )
            for each in swept
        )
        return StepOutput(int(batch.lengths.sum()), found, started, swept[-1].done)

    def compute(self, batch: Batch) -> list[Computed]:
        """Compute a step; its rows leave the device, block by block."""
        return [Computed(each.rows, each.reduced, each.gaps) for each in self._swept_over(batch)]

    def _swept_over(self, batch: Batch) -> list[_SweptBatch]:
        model, options = self._ready, self._options
        last = self._stages[self._depth].taps or self.settings.compares
        kinds = self._kinds if last else self._kinds[:-1]
        batches = map(self._put, self._parts(batch))
        swept = walk(kinds, model, batches, self._run, self._spilled, options.cancellation)
        if self._back:
            self._go_back(model, swept)
        self.check()
        options.waited(model.blocks.waited)
        model.blocks.waited = 0.0
        return swept

    def _go_back(self, model: SweptModel, swept: Sequence[_SweptBatch]) -> None:
        """Take the batches back through the stages, all of them through one before the next."""
        blocks = model.blocks
        blocks.backward = True
        try:
            for number, stage in self._back.items():
                inside = isinstance(stage.kind, Layer)
                if inside:
                    self._options.cancellation.check()
                weights = blocks.take(number) if inside else model.outer
                for each in swept:
                    self._run_back(number, self._used(number, weights, model.outer), each)
                if inside:
                    blocks.used(number, swept[-1].done)
                del weights
        finally:  # the next sweep begins with the first block
            blocks.backward = False
        for each in swept:
            each.entered.clear()
            each.cotangent = None

    def _run_back(self, number: int, weights: WeightArrays, each: _SweptBatch) -> None:
        stage, stream = self._back[number], each.entered.pop(number)
        programs = self._back_programs_for(number, each.batch, each.runs)
        if stream is not None:
            stream = jax.device_put(stream, self._place.stream())
        made, each.cotangent, each.done = programs.run(
            weights, stage.extras, stream, each.cotangent, each.inputs
        )
        self._keep(stage.taps, programs, made, each)

    def _keep(
        self, taps: Sequence[Tap], programs: StagePrograms, made: Computed, each: _SweptBatch
    ) -> None:
        """Let a stage's rows leave the device."""
        if not made.rows:
            return
        found = programs.compact(made.rows, each.kept), made.reduced
        if (host := self._place.host(gathered=self.settings.gathers)) is not None:
            found = jax.device_put(found, host)
        each.rows |= _renamed(taps, found[0], back=True)
        each.reduced |= _renamed(taps, found[1], back=True)

    def _enters(self, number: int, stream: Any, each: _SweptBatch) -> None:
        """Keep the stream that enters a stage, if the way back leads through it."""
        if number not in self._back:
            return
        if stream is not None and self._place.device.platform != "cpu":
            stream = jax.device_put(stream, self._place.stream(PINNED))
        each.entered[number] = stream

    def _put(self, part: Batch) -> _SweptBatch:
        part = self._place.divisible(part)
        runs = Runs.of(part, self._place.devices)
        look_up = self._ready.embedding
        embedded = look_up(part.tokens) if look_up else None
        kept, arrays = self._place.put(runs.places, (*step_inputs(part), embedded))
        *inputs, stream = arrays
        return _SweptBatch(
            batch=part, runs=runs, kept=kept, inputs=StepInputs(*inputs), stream=stream
        )  # fmt: skip

    def _run(
        self, number: int, weights: WeightArrays, beside: Beside, each: _SweptBatch
    ) -> tuple[Any, Any, Any]:
        """Run a stage for a batch. Its rows leave the device."""
        stage = self._stages[number]
        programs = self._programs_for(number, each.batch, each.runs)
        if number < 0:
            self._enters(number, each.stream, each)
        made, stream, onward, done = programs.run(
            self._used(number, weights, self._ready.outer),
            stage.extras,
            each.stream,
            beside,
            each.inputs,
        )
        each.gaps = self._place.fetch(made.gaps) if made.gaps is not None else each.gaps
        self._keep(stage.taps, programs, made, each)
        self._enters(number + 1, stream, each)
        return stream, onward, done

    def _parts(self, batch: Batch) -> list[Batch]:
        """Cut a batch into batches of equal shape; the last is filled up with empty rows."""
        rows = min(self._options.rows, len(batch.tokens))
        return [_some_rows(batch, start, rows) for start in range(0, len(batch.tokens), rows)]

    # -- its programs ------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> list[StagePrograms]:
        """Compile every program that a sweep over a batch of this shape runs."""
        return [
            programs(number, part, Runs.of(part, self._place.devices))
            for programs, numbers in (
                (self._programs_for, self._stages), (self._back_programs_for, self._back)
            )
            for part in map(self._place.divisible, self._parts(batch))
            for number in numbers
        ]  # fmt: skip

    def _programs_for(self, number: int, batch: Batch, runs: Runs) -> StagePrograms:
        return self._programs_of(
            self._stages[number], number, batch, runs, lambda: self._entering(number, batch)
        )

    def _back_programs_for(self, number: int, batch: Batch, runs: Runs) -> StagePrograms:
        stage = self._back[number]

        def entering() -> tuple[Any, ...]:
            onward = None if stage.starts else self._entering(number + 1, batch)[0]
            return self._entering(number, batch)[0], onward

        return self._programs_of(stage, number, batch, runs, entering)

    def _programs_of(
        self, stage: Any, number: int, batch: Batch, runs: Runs, entering: Callable[[], Any]
    ) -> StagePrograms:
        """Return the programs of a stage, of either direction.

        Args:
            entering: returns the shapes of what enters the stage besides weights and inputs.
        """
        contexts = self.programs.contexts(batch)
        shapes = tuple(None if a is None else a.shape for a in step_inputs(batch))
        return self.programs.stage(
            (stage.key, contexts, shapes),
            runs,
            lambda: stage.program(self.settings, contexts, runs.size),
            lambda: (
                self._used(number, self._weight_shapes(number), self._shapes.outer),
                stage.extras,
                *entering(),
                input_shapes(batch, self._place),
            ),
        )

    def _weight_shapes(self, number: int) -> WeightArrays:
        inside = isinstance(self._kinds[number + 1], Layer)
        return self._shapes.tail[number] if inside else self._shapes.outer

    def _used(self, number: int, weights: WeightArrays, outer: WeightArrays) -> WeightArrays:
        """Return the arrays that a stage uses.

        Args:
            weights: those of a block, or those outside the blocks.
            outer: those outside the blocks. A block whose stream a lens reads has its head, too.
        """
        kind, arch = self._kinds[number + 1], self.settings.arch
        late = {spec.name for spec in head_specs(arch)}
        if isinstance(kind, Layer):
            if not self._stages[number].reads_head:
                return weights
            late |= {"embed"} if arch.tied_head else set()
            return {**weights, **{_OUTER + name: outer[name] for name in late if name in outer}}
        if kind == BEFORE:
            late |= {"embed"} if self._options.looks_up else set()
            return {name: array for name, array in weights.items() if name not in late}
        late |= {"embed"} if arch.tied_head else set()  # which is the head, too
        return {name: array for name, array in weights.items() if name in late}

    def _entering(self, number: int, batch: Batch) -> tuple[Any, Beside]:
        """The shapes of a stage's stream, and of what it reads beside it."""
        arch, computed = self.settings.arch, self.settings.computed
        kind, shape, like = self._kinds[number + 1], batch.tokens.shape, self._place.by_rows
        if kind == BEFORE:
            looks_up = self._options.looks_up
            found = "float16" if self.settings.compute_dtype == "float16" else computed
            return like((*shape, arch.width), found) if looks_up else None, (None, None)
        stream = like((*shape, arch.width), "float32" if arch.wide_stream else computed)
        if not isinstance(kind, Layer):
            return stream, (None, None)
        sized = arch.of(kind)
        own = like((*shape, sized.layer_embed), computed) if sized.layer_embed else None
        heads = like((*shape, sized.num_kv_heads, sized.head_dim), computed)
        beside: Any = own, (heads, heads) if kind.borrows else None
        return stream, beside


def _some_rows(batch: Batch, start: int, rows: int) -> Batch:
    """Some rows of a batch; beyond its end, empty ones."""

    def cut(array: np.ndarray) -> np.ndarray:
        part = array[start : start + rows]
        missing = [(0, rows - len(part)), *[(0, 0)] * (part.ndim - 1)]
        return np.pad(part, missing) if len(part) < rows else part

    return replace(batch, **batch.each(cut))

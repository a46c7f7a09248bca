"""A step of a model that is larger than its device: all rows pass a block before the next begins.

A sweep is a large step. Its rows are cut into batches, whose streams stay on the device; the host
runs one block after another, each for all batches, while the next block's weights are on their way
(`models/forward/streamed.py`). A block's taps leave the device as soon as it is done.

On a CPU every step is a sweep, so that rows do not depend on where weights are kept: a block alone
is compiled otherwise than a block of a scan, and rounds otherwise.
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.tree_util import Partial
from jaxtyping import Array

from spile.core.recipe import latent_names
from spile.core.threads import NEVER, Cancellation
from spile.corpus.pack import Batch
from spile.dataset.records.format import scale_name
from spile.models.config.arch import Layer
from spile.models.config.specs import head_specs
from spile.models.forward.decoder import (
    after_blocks,
    before_blocks,
    needs_whole_block,
    of_any_block,
    one_block,
    stage_of,
)
from spile.models.forward.sharding import PINNED
from spile.models.forward.streamed import EmbeddingRows, StreamedBlocks
from spile.models.forward.weights import Arrays, Params
from spile.models.taps import Tap
from spile.run.step.resident import (
    Reduced,
    Runs,
    Step,
    StepOutput,
    StepRows,
    StepSettings,
    stored_values,
)


@dataclass(frozen=True)
class SweptModel:
    """A model whose blocks come in turn."""

    blocks: StreamedBlocks
    embedding: EmbeddingRows | None  # None: it is in `outer`
    outer: Arrays  # before and after the blocks


@dataclass(frozen=True)
class _Slots:
    """The taps of one stage, numbered, so that stages of a kind are one program."""

    taps: tuple[Tap, ...]  # as they are stored
    local: tuple[Tap, ...]  # as the stage computes them, without their layer

    @classmethod
    def of(cls, taps: Sequence[Tap]) -> "_Slots":
        return cls(tuple(taps), tuple(map(of_any_block, taps)))

    def renamed(self, given: Mapping[str, Any], *, back: bool = False) -> dict[str, Any]:
        """Values by stored name, under the names of the slots; or those back under theirs."""
        names: dict[str, str] = {}
        for number, tap in enumerate(self.taps):
            slot = str(number)
            for ours, theirs in zip(_stored_names(slot), _stored_names(tap.name), strict=True):
                names |= {ours: theirs} if back else {theirs: ours}
        return {names[name]: value for name, value in given.items() if name in names}


def _stored_names(tap: str) -> list[str]:
    """Every name under which a tap's rows, or their scales, may be stored."""
    names = [tap, *latent_names(tap)]
    return [*names, *map(scale_name, names)]


@dataclass
class _Passing:
    """A batch on its way through the blocks."""

    batch: Batch
    runs: Runs
    kept: Any
    inputs: Any
    stream: Any
    rows: dict[str, Array]
    reduced: dict[str, Reduced]
    own: dict[int, Any] = field(default_factory=dict[int, Any])  # embeddings of blocks to come
    lent: dict[int | None, Any] = field(default_factory=dict["int | None", Any])  # by window
    done: Any = None  # ready when all that was handed to the device is done


class Sweep(Step):
    """Runs large batches through a model block by block."""

    def __init__(
        self,
        model: Future[SweptModel],
        *given: Any,
        rows: int,
        looks_up: bool,
        spills: bool = False,
        shapes: Params,
        cancellation: Cancellation = NEVER,
        read: Callable[[], None] = lambda: None,
        waited: Callable[[float], None] = lambda seconds: None,
        **options: Any,
    ) -> None:
        """Args:
        rows: of a batch; a sweep has many.
        looks_up: the host looks up embeddings, which the device does not hold.
        spills: between blocks, the streams of all but a few batches are in host memory.
        shapes: of the model, all its blocks in `tail`, to compile for.
        cancellation: checked between blocks.
        read: called after the first sweep, when every tensor has been read.
        waited: called after each sweep with the seconds that the device waited for weights.

        The others are those of `Step`.
        """
        super().__init__(Future(), *given, shapes=shapes, **options)
        self._model, self._rows, self._cancellation = model, rows, cancellation
        self._read, self._waited, self._swept = read, waited, False
        self._looks_up, self._spills = looks_up, spills
        self._stages = self._taps_by_stage()
        depth = self.settings.schedule.depth
        self._spliced: dict[int, dict[Tap, Partial]] = {}
        for tap, change in self._changes.items():
            self._spliced.setdefault(stage_of(tap, depth), {})[of_any_block(tap)] = change
        self._whole = needs_whole_block(self.settings.taps, self.settings.schedule.depth)

    def loaded(self, seconds: float) -> bool:
        return bool(wait([self._model], seconds).done)

    @cached_property
    def _ready(self) -> SweptModel:
        return self._model.result()

    def _taps_by_stage(self) -> dict[int, _Slots]:
        """The taps of each block; -1: before the blocks, `depth`: after them."""
        depth = self.settings.schedule.depth
        by_stage: dict[int, list[Tap]] = {stage: [] for stage in range(-1, depth + 1)}
        for tap in self.settings.taps:
            by_stage[stage_of(tap, depth)].append(tap)
        return {stage: _Slots.of(taps) for stage, taps in by_stage.items()}

    # -- a sweep -----------------------------------------------------------------------------------

    def __call__(self, batch: Batch) -> StepOutput:
        """Sweep over a large batch; return when the last block has been handed to the device."""
        started = time.perf_counter()
        passing = self._swept_over(batch)
        found = tuple(StepRows(p.runs[self._own], p.rows, p.reduced) for p in passing)
        return StepOutput(int(batch.lengths.sum()), found, started, passing[-1].done)

    def compute(self, batch: Batch) -> Any:
        """Compute a step; its rows leave the device, block by block."""
        return [(passing.rows, passing.reduced) for passing in self._swept_over(batch)]

    def _swept_over(self, batch: Batch) -> list[_Passing]:
        model = self._ready
        passing: list[_Passing] = []
        for part in self._parts(batch):
            passing.append(self._begun(part))
            self._spill(passing, len(passing) - 1)
        depth = self.settings.schedule.depth
        for layer in range(depth):
            self._cancellation.check()
            block = model.blocks.take(layer)
            for number, each in enumerate(passing):
                self._fetch(passing, number)
                self._through(layer, each, block)
                self._spill(passing, number)
            model.blocks.used(layer, passing[-1].done)
            del block  # or it would still be there while the next one comes
        for number, each in enumerate(passing):
            self._fetch(passing, number)
            self._ended(each)
        if not self._swept:
            self._swept = True
            self._read()
        self._waited(model.blocks.waited)
        model.blocks.waited = 0.0
        return passing

    def _fetch(self, passing: Sequence[_Passing], number: int) -> None:
        """Bring a batch's stream to the device; the next one's sets out before the work begins."""
        for each in (passing[number], passing[(number + 1) % len(passing)]):
            if self._spills and each.stream is not None:
                each.stream = jax.device_put(each.stream, self._stream_place())

    def _spill(self, passing: Sequence[_Passing], number: int) -> None:
        """Let a batch's stream leave the device; those of a few may be there, or on their way."""
        if self._spills:
            each = passing[number]
            each.stream = jax.device_put(each.stream, self._stream_place(PINNED))
            jax.block_until_ready(passing[(number - 2) % len(passing)].stream)

    def _stream_place(self, kind: str = "device") -> Any:
        if self._shards:
            return self._shards.by_rows.with_memory_kind(kind)
        return SingleDeviceSharding(self._device, memory_kind=kind)

    def compile(self, batch: Batch) -> Any:
        """Compile every program that a sweep over a batch of this shape runs.

        Returns those of each stage of each part: the stage itself, and one that packs its rows.
        """
        found: list[tuple[Any, Any]] = []
        for part in map(self._divisible, self._parts(batch)):
            runs = Runs.of(part, self._devices)
            found += [self._stage_program(stage, part, runs) for stage in self._stages]
        return found

    def _parts(self, batch: Batch) -> list[Batch]:
        """Cut a batch into batches of equal shape; the last is filled up with empty rows."""
        rows = min(self._rows, len(batch.tokens))
        return [_some_rows(batch, start, rows) for start in range(0, len(batch.tokens), rows)]

    def _begun(self, batch: Batch) -> _Passing:
        part = self._divisible(batch)
        runs = Runs.of(part, self._devices)
        look_up = self._ready.embedding
        embedded = look_up(part.tokens) if look_up else None
        kept, inputs = self._put(runs.places, (*_arrays_of(part), embedded))
        passing = _Passing(part, runs, kept, inputs[:-1], inputs[-1], {}, {})
        run, compact = self._stage_program(-1, part, runs)
        found = run(self._first(self._ready.outer), *self._arguments(-1), passing.stream, None,
                    *passing.inputs)  # fmt: skip
        passing.own = dict(enumerate(self._keep(-1, passing, compact, *found)))
        return passing

    def _first(self, outer: Arrays) -> Arrays:
        """The arrays that are used before the blocks."""
        late = {spec.name for spec in head_specs(self.settings.arch)}
        late |= {"embed"} if self._looks_up else set()
        return {name: array for name, array in outer.items() if name not in late}

    def _last(self, outer: Arrays) -> Arrays:
        """The arrays that are used after the blocks; the embedding only if it is the head."""
        used = {spec.name for spec in head_specs(self.settings.arch)}
        used |= {"embed"} if self.settings.arch.tied_head else set()
        return {name: array for name, array in outer.items() if name in used}

    def _through(self, layer: int, passing: _Passing, block: Any) -> None:
        run, compact = self._stage_program(layer, passing.batch, passing.runs)
        kind = self.settings.arch.layers[layer]
        beside = passing.own.pop(layer, None), passing.lent[kind.window] if kind.borrows else None
        found = run(block, *self._arguments(layer), passing.stream, beside, *passing.inputs)
        lends = self._keep(layer, passing, compact, *found)
        if lends is not None:
            passing.lent[kind.window] = lends

    def _ended(self, passing: _Passing) -> None:
        depth = self.settings.schedule.depth
        if self._stages[depth].taps:
            run, compact = self._stage_program(depth, passing.batch, passing.runs)
            late = self._last(self._ready.outer)
            found = run(late, *self._arguments(depth), passing.stream, None, *passing.inputs)
            self._keep(depth, passing, compact, *found)
        passing.stream = None
        passing.lent.clear()

    def _keep(
        self,
        stage: int,
        passing: _Passing,
        compact: Any,
        stream: Any,
        beside: Any,
        rows: Any,
        reduced: Any,
        done: Any,
    ) -> Any:
        """Take a stage's results; what is stored leaves the device. Return what goes with it."""
        passing.stream, passing.done = stream, done
        if not rows:
            return beside
        found = compact(rows, passing.kept), reduced
        if self._host is not None:
            found = jax.device_put(found, self._host)
        passing.rows |= self._stages[stage].renamed(found[0], back=True)
        passing.reduced |= self._stages[stage].renamed(found[1], back=True)
        return beside

    # -- its programs ------------------------------------------------------------------------------

    def _arguments(self, stage: int) -> tuple[dict[str, Any], dict[str, Any], tuple[Partial, ...]]:
        """The scales and encoders of a stage's taps, by slot, and the changes made there."""
        slots, changes = self._stages[stage], self._spliced.get(stage, {})
        return slots.renamed(self._scales), slots.renamed(self._encoders), tuple(changes.values())

    def _stage_program(self, stage: int, batch: Batch, runs: Runs) -> tuple[Any, Any]:
        """The programs of a stage, compiled: the stage itself, and one that packs its rows."""
        slots, depth = self._stages[stage], self.settings.schedule.depth
        by_rows = self._shards.by_rows if self._shards else None
        by_runs = self._shards.by_runs() if self._shards else None

        def like(shape: Any, dtype: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        kinds = slots.renamed(self.settings.encoders)
        arrays = _arrays_of(batch)
        arch = self.settings.arch
        dtype = "float32" if arch.wide_stream and stage >= 0 else self.settings.computed
        stream = like((*batch.tokens.shape, arch.width), dtype, by_rows)
        shapes: Any = self._shapes
        beside: Any = None
        if stage == -1:
            kind, weights = None, self._first(shapes.outer)
            stream = stream if self._looks_up else None
        elif stage == depth:
            kind, weights = None, self._last(shapes.outer)
        else:
            kind, weights = arch.layers[stage], shapes.tail[stage]
            sized, dtype = arch.of(kind), self.settings.computed
            own = like((*batch.tokens.shape, sized.layer_embed), dtype, by_rows)
            heads = (*batch.tokens.shape, sized.num_kv_heads, sized.head_dim)
            heads = like(heads, dtype, by_rows)
            beside = own if sized.layer_embed else None, (heads, heads) if kind.borrows else None
        ends = kind is not None and stage == depth - 1 and not self._whole
        contexts = self._contexts(batch)
        spliced, changes = tuple(self._spliced.get(stage, {})), self._arguments(stage)[-1]
        key = (
            kind or stage,  # blocks of a kind share a program
            ends,
            slots.local,
            tuple(kinds.items()),
            spliced,
            jax.tree.structure(changes),
            tuple(array.shape for array in jax.tree.leaves(changes)),
            contexts,
            batch.tokens.shape,
            _shape_of(batch.columns),
        )
        function = partial(
            _stage,
            self.settings,
            kind=kind,
            last=stage == depth,
            ends=ends,
            taps={str(n): tap for n, tap in enumerate(slots.local)},
            kinds=kinds,
            spliced=spliced,
            contexts=contexts,
            part=runs.size,
        )
        run = self._program(
            key,
            jax.jit(
                _named(function, stage, depth), donate_argnums=(4,) if kind and not ends else ()
            ),
            lambda: (
                weights,
                *self._arguments(stage),
                stream,
                beside,
                *[None if a is None else like(a.shape, a.dtype, by_rows) for a in arrays],
            ),
        )
        if not slots.taps:
            return run, None
        compact = self._program(
            (key, runs.places.shape),
            self._compact,
            lambda: (
                {n: like(a.shape, a.dtype, by_runs) for n, a in run.out_info[2].items()},
                like(runs.places.shape, runs.places.dtype, by_runs),
            ),
        )
        return run, compact


def _named(function: Callable[..., Any], stage: int, depth: int) -> Callable[..., Any]:
    """The function under the name that it has in a trace."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = {-1: "before_blocks", depth: "after_blocks"}.get(stage, "block")
    return named


def _stage(
    settings: StepSettings,
    weights: Arrays,
    scales: Mapping[str, Array],
    arrays: Mapping[str, Arrays],
    changes: tuple[Partial, ...],
    stream: Any,
    beside: Any,
    tokens: Array,
    positions: Array,
    segments: Array,
    counts: Array,
    columns: Array | None,
    *,
    kind: Layer | None,
    last: bool,
    ends: bool,
    taps: Mapping[str, Tap],
    kinds: Mapping[str, Any],
    spliced: tuple[Tap, ...],
    contexts: int,
    part: int,
) -> tuple[Array | None, Any, dict[str, Array], dict[str, Reduced], Array]:
    """Run one stage: return the stream, what goes with it, the stored rows, their statistics, and a
    small array.

    With the stream go the embeddings that blocks have of their own, and keys and values that later
    blocks borrow: `beside` has those of this block. The small array is ready when the others are. A
    stream cannot be waited for once the next stage has taken its memory.
    """
    inputs, local = (tokens, positions, segments, columns), tuple(dict.fromkeys(taps.values()))
    shared: dict[str, Any] = {"arch": settings.arch, "taps": local, "shards": settings.shards}
    shared["store_dtype"] = settings.carried
    splice = dict(zip(spliced, changes, strict=True))
    with jax.default_matmul_precision(settings.precision):
        if kind is not None:
            attend = settings.attend(tokens.shape[1], contexts)
            stream, onward, found = one_block(
                weights,
                stream,
                inputs,
                layer=kind,
                own=beside[0],
                lent=beside[1],
                attention=attend,
                scores_all=any(tap.site == "attn_pattern" for tap in settings.taps),
                splice=splice,
                **shared,
            )
        elif last:
            onward, found = None, after_blocks(weights, stream, inputs, **shared)
        else:
            stream, onward, found = before_blocks(weights, stream, inputs, splice=splice, **shared)
        rows, reduced = stored_values(
            {slot: found[tap.name] for slot, tap in taps.items()},
            scales,
            arrays,
            (counts, columns),
            tokens.shape[1],
            part,
            taps=taps,
            encoders=kinds,
            store_dtype=settings.store_dtype,
            shards=settings.shards,
        )
    return None if last or ends else stream, onward, rows, reduced, counts + 0


def _arrays_of(batch: Batch) -> tuple[np.ndarray | None, ...]:
    return batch.tokens, batch.positions, batch.segments, batch.counts, batch.columns


def _shape_of(array: np.ndarray | None) -> tuple[int, ...] | None:
    return None if array is None else array.shape


def _some_rows(batch: Batch, start: int, rows: int) -> Batch:
    """Some rows of a batch; beyond its end, empty ones."""

    def cut(array: np.ndarray) -> np.ndarray:
        part = array[start : start + rows]
        missing = [(0, rows - len(part)), *[(0, 0)] * (part.ndim - 1)]
        return np.pad(part, missing) if len(part) < rows else part

    return replace(
        batch,
        tokens=cut(batch.tokens),
        positions=cut(batch.positions),
        segments=cut(batch.segments),
        lengths=cut(batch.lengths),
        columns=None if batch.columns is None else cut(batch.columns),
        counts=cut(batch.counts),
    )

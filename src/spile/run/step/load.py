"""Load a job's model, resident or swept, and make the step that runs it.

The scales of int8 channels are measured once, on a dataset's first contexts, and then shared.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import numpy as np
import xxhash

from spile.core.config import activation_dtype
from spile.core.pool import reduces
from spile.core.tensors import DTYPES_BY_NAME, as_bytes
from spile.core.threads import NEVER, cancellation
from spile.corpus.pack import Batch, PackedUnit
from spile.dataset.codec.quantization import DECODED, INT8_MAX
from spile.dataset.format import SCALE_DTYPE
from spile.models.config.specs import array_axes
from spile.models.files.encoders.tensors import load_arrays
from spile.models.files.lenses import Lens
from spile.models.forward.decoder import needs_whole_block
from spile.models.forward.sharding import Shards, make_mesh
from spile.models.forward.sparse_latents import device_arrays
from spile.models.forward.splice import load_changes
from spile.models.forward.streamed import EmbeddingRows, SweptModel, load_blocks
from spile.models.forward.weight_loader import ArrayLoader
from spile.models.forward.weights import LayerSchedule, Params, abstract_params
from spile.models.layout import Cuts
from spile.models.sites import LENSES
from spile.models.taps import Tap
from spile.plan.estimate import goes_back
from spile.plan.job import ExtractionJob, prepare_unit
from spile.plan.residency import Residency
from spile.run.step.devices import StepDevices
from spile.run.step.resident import ResidentStep
from spile.run.step.settings import StepSettings
from spile.run.step.step import Step
from spile.run.step.stored import Extras
from spile.run.step.sweep import Sweep, SweepOptions
from spile.run.world.devices import memory_limit, memory_used
from spile.run.world.world import RunContext

_log = logging.getLogger("spile.run")
_ENOUGH = 16_384  # kept tokens to measure
_HEADROOM = 1.25  # over the largest value seen; larger values are clipped, and counted
_Model = TypeVar("_Model", Params, SweptModel)


def lens_arrays(
    lens: Lens | None, taps: Sequence[Tap], dtype: str
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return a lens's arrays by the first tap of each layer that reads it, and their hashes."""
    found, hashes, layers = dict[str, dict[str, Any]](), dict[str, str](), set[int | None]()
    for tap in taps if lens else ():
        if tap.site not in LENSES or tap.layer in layers:
            continue
        layers.add(tap.layer)
        assert lens and tap.layer is not None
        arrays = lens.load(tap.layer)
        for name, array in arrays.items():
            digest = xxhash.xxh3_128_hexdigest(as_bytes(array))
            hashes[f"lens at layer {tap.layer}: {name}"] = digest
        arrays["matrix"] = arrays["matrix"].astype(DTYPES_BY_NAME[dtype])
        found[tap.name] = {**arrays}
    return found, hashes


@dataclass(frozen=True)
class StepLoader:
    """Loads a job's model, and makes the step that runs its batches."""

    context: RunContext
    job: ExtractionJob
    device: Any
    cuts: Cuts
    residency: Residency  # where blocks are kept
    recomputes: bool | None = None  # whether blocks are computed again for gradients

    def step(self, batches: Callable[[PackedUnit], Iterator[Batch]]) -> ResidentStep | Sweep:
        """Return the step; `batches` cuts a packed unit into steps.

        A process that works alone loads the model in the background, so that the step can be
        compiled and the first texts read meanwhile; its first call waits for the model.
        """
        settings, extras, _ = self._prepared
        make = self._sweep() if self._swept else self._resident()
        if settings.store_dtype != "int8":
            return make(settings, extras)
        measuring = make(replace(settings, store_dtype=settings.computed), extras)
        return make(settings, replace(extras, scales=self._scales(measuring, batches)))

    def _resident(self) -> Callable[[StepSettings, Extras], ResidentStep]:
        model = self._in_background(partial(self._loader.params, head=self.job.needs_head))
        return lambda settings, extras: ResidentStep(model, settings, extras, self._shapes)

    def _sweep(self) -> Callable[[StepSettings, Extras], Sweep]:
        job, loader, residency = self.job, self._loader, self.residency
        options = SweepOptions(
            rows=residency.batch_rows * self.cuts.layout.groups,
            looks_up=residency.looks_up,
            spills=residency.spills,
            # (Processes that are joined must not stop at different blocks.)
            cancellation=cancellation() if self.context.world.processes == 1 else NEVER,
            compare_hashes=self._compare_hashes if residency.streams else lambda: None,
            waited=lambda seconds: self.context.counters.add(waited_for_weights=seconds),
        )

        def load() -> SweptModel:
            blocks = load_blocks(loader, residency.kept, self.device)
            tied = job.needs_head and job.checkpoint.arch.tied_head
            embedding = not options.looks_up or tied
            outer = loader.outer(head=job.needs_head, embedding=embedding)
            looked_up = EmbeddingRows(job.checkpoint, loader) if options.looks_up else None
            # (What was loaded at once is not read again.)
            check = loader.check if residency.streams else lambda: None
            return SweptModel(blocks, outer, looked_up, check)

        model = self._in_background(load)
        return lambda settings, extras: Sweep(model, settings, self._shapes, options, extras)

    def _in_background(self, load: Callable[[], _Model]) -> "Future[_Model]":
        """Begin to load a model; processes that are joined wait for it here."""
        counters = self.context.counters

        def told() -> _Model:
            before = memory_used(self.device)
            with counters.timed("loading"):
                model = load()
            if not self.residency.streams:
                self._compare_hashes()
            if jax.device_count() > 1:
                limit = memory_limit(self.device)
                _log.info(
                    "each device: %.2f GB in use before loading, %.2f GB after, of %s",
                    before / 1e9,
                    memory_used(self.device) / 1e9,
                    "an unknown total" if limit is None else f"{limit / 1e9:.2f} GB",
                )
            return model

        pool = ThreadPoolExecutor(1, "load")
        loading = pool.submit(told)
        pool.shutdown(wait=False)
        if self.context.world.processes > 1:  # they exchange messages in one fixed order
            with counters.timed("waited_for_model"):
                loading.result()
        return loading

    def _compare_hashes(self) -> None:
        """Refuse weights that differ from those of the dataset's other units."""
        world = self.context.world
        digests = self._loader.digests(world.process, world.processes, head=self.job.needs_head)
        shares = world.gather("weights", digests | self._prepared[-1])
        if shares is not None:
            found = {name: hash for share in shares for name, hash in share.items()}
            self.context.ledger.check_weights(found)
        world.share("weights", True)

    # -- scales of int8 channels -------------------------------------------------------------------

    def _scales(
        self, measuring: Step, batches: Callable[[PackedUnit], Iterator[Batch]]
    ) -> dict[str, np.ndarray]:
        """Return the stored scales; measure and store them first if nobody has.

        `measuring`: a step that keeps values as they are computed.
        """
        world, ledger, table = self.context.world, self.context.ledger, self.job.table
        if world.share("scales missing", ledger.read_scales(table) is None):
            _log.info("measuring the scale of each channel on the corpus's first contexts")
            largest = self._largest(measuring, batches)
            by_process = world.gather("largest", {t: v.tolist() for t, v in largest.items()})
            if by_process is not None:
                ledger.create_scales(table, {tap: _scale(by_process, tap) for tap in largest})
            world.share("scales", True)
        scales = ledger.read_scales(table)
        assert scales is not None
        return scales

    def _largest(
        self, step: Step, batches: Callable[[PackedUnit], Iterator[Batch]]
    ) -> dict[str, np.ndarray]:
        """The largest value of each channel, over the rows that this process holds."""
        scaled = {n: info for n, info in self.job.table.taps.items() if info.scaled_by == "channel"}
        largest = {tap: np.zeros(info.shape, DECODED) for tap, info in scaled.items()}
        for packed in self._first_contexts():
            for batch in batches(packed):
                output = step(batch)
                for tap, most in largest.items():
                    values = np.abs(output.rows_of(tap).astype(DECODED))
                    finite = np.where(np.isfinite(values), values, 0.0)
                    np.maximum(most, finite.max(axis=0, initial=0.0), out=most)
        return largest

    def _first_contexts(self) -> Iterator[PackedUnit]:
        """The first packed rows, until they hold `_ENOUGH` kept tokens; the same everywhere."""
        missing = _ENOUGH
        with closing(self.job.reader()) as reader:
            for unit in self.job.units:
                packed = prepare_unit(self.job, reader, unit, with_table=False).packed
                before = np.cumsum(packed.counts) - packed.counts
                count = int(np.searchsorted(before, missing))
                yield packed.first(count)
                missing -= int(packed.counts[:count].sum())
                if missing <= 0:
                    return

    # -- what is loaded ----------------------------------------------------------------------------

    @cached_property
    def _prepared(self) -> tuple[StepSettings, Extras, dict[str, str]]:
        """The settings, the arrays of encoders and splices, and hashes of those arrays by name."""
        job, recipe = self.job, self.job.recipe
        computed = activation_dtype(recipe.compute_dtype)
        encoders: dict[str, Mapping[str, Any]] = {}
        hashes: dict[str, str] = {}
        for tap, encoder in job.encoders.items():
            arrays, digests = load_arrays(encoder.sae)
            encoders[tap] = device_arrays(arrays, computed)
            hashes |= {f"encoder of {tap}: {name}": digest for name, digest in digests.items()}
        changes, digests = load_changes(job.splices, computed, self._shards)
        lenses, own = lens_arrays(job.lens, job.taps, computed)
        settings = StepSettings(
            arch=job.checkpoint.arch,
            taps=job.computed,
            beside=job.beside,
            lens_adds=job.lens.adds if job.lens else None,
            schedule=self._schedule,
            place=StepDevices(self.device, self._shards),
            compute_dtype=recipe.compute_dtype,
            store_dtype=recipe.store_dtype,
            attention=self.context.runtime.attention,
            encoders=job.encoders,
            spliced=tuple(changes),
            pool=reduces(recipe.pool),
            compares=job.compares,
            objective=job.objective,
            steps=recipe.steps,
            writers=job.writers,
            remat=bool(self.recomputes),
        )
        baselines = job.baseline.arrays(job.taps, job.writers, recipe.steps) if job.baseline else {}
        extras = Extras({}, encoders, tuple(changes.values()), lenses, baselines)
        return settings, extras, hashes | digests | own

    @property
    def _swept(self) -> bool:
        # (Values of two blocks meet in one program, which a sweep does not have.)
        job = self.job
        whole = job.beside or job.recipe.steps or job.writers or job.crosses
        whole = whole or (job.objective and not goes_back(job.checkpoint.arch))
        return self.residency.streams or (self.device.platform == "cpu" and not whole)

    @cached_property
    def _shards(self) -> Shards | None:
        if self.cuts.layout.size == 1:
            return None
        axes = array_axes(self.job.checkpoint.arch)
        return Shards(make_mesh(self.cuts.layout, jax.devices()), self.cuts, axes)

    @cached_property
    def _schedule(self) -> LayerSchedule:
        depth = self.job.layers
        whole = needs_whole_block(self.job.reached, depth)
        schedule = LayerSchedule.of(self.job.checkpoint.arch, depth, whole=whole)
        return schedule.one_by_one if self._swept else schedule

    @cached_property
    def _loader(self) -> ArrayLoader:
        dtype = DTYPES_BY_NAME[self.job.recipe.compute_dtype]
        return ArrayLoader(self.job.checkpoint, self._schedule, dtype, self._shards)

    @cached_property
    def _shapes(self) -> Params:
        return abstract_params(
            self.job.checkpoint.arch,
            self._schedule,
            head=self.job.needs_head,
            dtype=DTYPES_BY_NAME[self.job.recipe.compute_dtype],
            shards=self._shards,
        )


def _scale(by_process: list[dict[str, Any]], tap: str) -> np.ndarray:
    """The scales of a tap's channels, from the largest values that each process has seen."""
    largest = np.max([np.asarray(each[tap], DECODED) for each in by_process], axis=0)
    smallest = np.finfo(SCALE_DTYPE).tiny
    # A channel that is always zero can have any scale.
    return np.where(largest > 0, np.maximum(largest * _HEADROOM / INT8_MAX, smallest), 1.0)

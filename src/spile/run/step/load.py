"""Load a job's model, resident or swept, and make the step that runs it."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import jax

from spile.core.config import activation_dtype
from spile.core.tensors import DTYPES_BY_NAME
from spile.core.threads import NEVER, cancellation
from spile.corpus.pack import Batch, PackedUnit
from spile.dataset.records.ledger import Ledger
from spile.metrics import Counters
from spile.models.config.specs import array_axes
from spile.models.files.sae import load_arrays
from spile.models.forward.decoder import needs_whole_block
from spile.models.forward.sharding import Shards, make_mesh
from spile.models.forward.sparse_latents import device_arrays
from spile.models.forward.splice import load_changes
from spile.models.forward.streamed import EmbeddingRows, SweptModel, load_blocks
from spile.models.forward.weights import ArrayLoader, LayerSchedule, Params, abstract_params
from spile.models.layout import ONE_DEVICE, Cuts
from spile.plan.job import ExtractionJob
from spile.plan.residency import Residency
from spile.run.step.calibrate import channel_scales
from spile.run.step.resident import ResidentStep
from spile.run.step.step import StepDevices, StepSettings
from spile.run.step.stored import Extras
from spile.run.step.sweep import Sweep, SweepOptions
from spile.run.world.devices import memory_limit, memory_used
from spile.run.world.world import SingleWorld, World

_log = logging.getLogger("spile.run")
_Model = TypeVar("_Model", Params, SweptModel)


@dataclass(frozen=True)
class StepLoader:
    """Loads a job's model, and makes the step that runs its batches."""

    job: ExtractionJob
    ledger: Ledger
    device: Any
    cuts: Cuts = ONE_DEVICE
    world: World = field(default_factory=SingleWorld)
    residency: Residency | None = None  # where blocks are kept; None: on the device
    attention: str = "auto"  # kernel, as `--attention` has it
    counters: Counters = field(default_factory=Counters)

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
        scales = channel_scales(self.job, self.ledger, measuring, batches, self.world)
        return make(settings, replace(extras, scales=scales))

    def _resident(self) -> Callable[[StepSettings, Extras], ResidentStep]:
        model = self._in_background(partial(self._loader.params, head=self.job.needs_head))
        return lambda settings, extras: ResidentStep(model, settings, extras, self._shapes)

    def _sweep(self) -> Callable[[StepSettings, Extras], Sweep]:
        residency, world = self.residency, self.world
        options = SweepOptions(
            rows=residency.batch_rows * self.cuts.layout.groups if residency else sys.maxsize,
            looks_up=residency is not None and residency.looks_up,
            spills=residency is not None and residency.spills,
            # (Processes that are joined must not stop at different blocks.)
            cancellation=cancellation() if world.processes == 1 else NEVER,
            read=self._compare_hashes if self._streams else lambda: None,
            waited=lambda seconds: self.counters.add(waited_for_weights=seconds),
        )

        job, loader = self.job, self._loader

        def load() -> SweptModel:
            kept = residency.kept if residency else ("resident",) * self._schedule.depth
            blocks = load_blocks(loader, kept, self.device)
            tied = job.needs_head and job.checkpoint.arch.tied_head
            embedding = not options.looks_up or tied
            outer = loader.outer(head=job.needs_head, embedding=embedding)
            looked_up = EmbeddingRows(job.checkpoint, loader) if options.looks_up else None
            return SweptModel(blocks, outer, looked_up)

        model = self._in_background(load)
        return lambda settings, extras: Sweep(model, settings, self._shapes, options, extras)

    def _in_background(self, load: Callable[[], _Model]) -> "Future[_Model]":
        """Begin to load a model; processes that are joined wait for it here."""

        def told() -> _Model:
            before = memory_used(self.device)
            with self.counters.timed("loading"):
                model = load()
            if not self._streams:
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
        if self.world.processes > 1:  # they exchange messages in one fixed order
            with self.counters.timed("waited_for_model"):
                loading.result()
        return loading

    def _compare_hashes(self) -> None:
        """Refuse weights that differ from those of the dataset's other units."""
        world = self.world
        digests = self._loader.digests(world.process, world.processes, head=self.job.needs_head)
        shares = world.gather("weights", digests | self._prepared[-1])
        if shares is not None:
            found = {name: hash for share in shares for name, hash in share.items()}
            self.ledger.check_weights(found)
        world.share("weights", True)

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
        settings = StepSettings(
            arch=job.checkpoint.arch,
            taps=job.taps,
            schedule=self._schedule,
            place=StepDevices(self.device, self._shards),
            compute_dtype=recipe.compute_dtype,
            store_dtype=recipe.store_dtype,
            attention=self.attention,
            encoders=job.encoders,
            spliced=tuple(changes),
        )
        return settings, Extras({}, encoders, tuple(changes.values())), hashes | digests

    @property
    def _streams(self) -> bool:
        return self.residency is not None and self.residency.streams

    @property
    def _swept(self) -> bool:
        return self._streams or self.device.platform == "cpu"

    @cached_property
    def _shards(self) -> Shards | None:
        if self.cuts.layout.size == 1:
            return None
        axes = array_axes(self.job.checkpoint.arch)
        return Shards(make_mesh(self.cuts.layout, jax.devices()), self.cuts, axes)

    @cached_property
    def _schedule(self) -> LayerSchedule:
        taps, depth = self.job.taps, self.job.layers
        whole = needs_whole_block(taps, depth)
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

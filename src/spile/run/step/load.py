"""Load a job's model and make the step that runs it."""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from spile.core.config import activation_dtype
from spile.core.tensors import DTYPES_BY_NAME
from spile.core.threads import NEVER, cancellation
from spile.corpus.pack import Batch, PackedUnit
from spile.dataset.records.ledger import Ledger
from spile.metrics import Counters
from spile.models.config.specs import array_axes
from spile.models.files.sae import Arrays, SparseEncoder, load_arrays
from spile.models.forward.decoder import needs_whole_block
from spile.models.forward.sharding import Shards, make_mesh
from spile.models.forward.sparse_latents import device_arrays
from spile.models.forward.splice import load_changes
from spile.models.forward.streamed import EmbeddingRows, load_blocks
from spile.models.forward.weights import ArrayLoader, LayerSchedule, abstract_params
from spile.models.layout import ONE_DEVICE, Cuts
from spile.plan.job import ExtractionJob
from spile.plan.residency import Residency
from spile.run.step.calibrate import channel_scales
from spile.run.step.resident import Step
from spile.run.step.sweep import Sweep, SweptModel
from spile.run.world.devices import memory_limit, memory_used
from spile.run.world.world import SingleWorld, World

_log = logging.getLogger("spile.run")


def load_step(
    job: ExtractionJob,
    ledger: Ledger,
    device: Any,
    batches: Callable[[PackedUnit], Iterator[Batch]],
    cuts: Cuts = ONE_DEVICE,
    world: World | None = None,
    *,
    residency: Residency | None = None,
    attention: str = "auto",
    counters: Counters | None = None,
) -> Step:
    """Return a step that runs a job's batches.

    A process that works alone loads the model in the background, so that the step can be compiled
    and the first texts read meanwhile; its first call waits for the model.

    Args:
        residency: where blocks are kept; on the device, if it is not given.
        attention: the kernel (`--attention`).
    """
    world, counters = world or SingleWorld(), counters or Counters()
    arch, recipe = job.checkpoint.arch, job.recipe
    shards = None
    if cuts.layout.size > 1:
        shards = Shards(make_mesh(cuts.layout, jax.devices()), cuts, array_axes(arch))
    streams = residency is not None and residency.streams
    swept = streams or device.platform == "cpu"
    looks_up = residency is not None and residency.looks_up
    schedule = LayerSchedule.of(arch, job.layers, whole=needs_whole_block(job.taps, job.layers))
    if swept:
        schedule = schedule.one_by_one
    dtype, computed = DTYPES_BY_NAME[recipe.compute_dtype], activation_dtype(recipe.compute_dtype)
    encoders: dict[str, tuple[SparseEncoder, Arrays]] = {}
    hashes: dict[str, str] = {}
    for tap, encoder in job.encoders.items():
        arrays, digests = load_arrays(encoder.sae)
        encoders[tap] = encoder, device_arrays(arrays, computed)
        hashes |= {f"encoder of {tap}: {name}": digest for name, digest in digests.items()}
    splices, digests = load_changes(job.splices, computed, shards)
    hashes |= digests
    loader = ArrayLoader(job.checkpoint, schedule, dtype, shards)

    def compare_hashes() -> None:
        """Refuse weights that are not those of the dataset's other units."""
        digests = loader.digests(world.process, world.processes, head=job.needs_head)
        shares = world.gather("weights", digests | hashes)
        if shares is not None:
            ledger.check_weights({name: hash for share in shares for name, hash in share.items()})
        world.share("weights", True)

    def load() -> Any:
        before = memory_used(device)
        with counters.timed("loading"):
            if swept:
                kept = residency.kept if residency else ("resident",) * schedule.depth
                blocks = load_blocks(loader, kept, device)
                needed = not looks_up or (job.needs_head and arch.tied_head)
                outer = loader.outer(head=job.needs_head, embedding=needed)
                rows = EmbeddingRows(job.checkpoint, loader) if looks_up else None
                model = SweptModel(blocks, rows, outer)
            else:
                model = loader.params(head=job.needs_head)
        if not streams:
            compare_hashes()
        if jax.device_count() > 1:
            _log.info(
                "each device: %.2f GB in use before loading, %.2f GB after, of %s",
                before / 1e9,
                memory_used(device) / 1e9,
                _gigabytes(memory_limit(device)),
            )
        return model

    pool = ThreadPoolExecutor(1, "load")
    loading = pool.submit(load)
    pool.shutdown(wait=False)
    kind: Any = Step
    if swept:
        rows = residency.batch_rows * cuts.layout.groups if residency else sys.maxsize
        kind = partial(
            Sweep,
            rows=rows,
            looks_up=looks_up,
            spills=residency is not None and residency.spills,
            # (Processes that are joined must not stop at different blocks.)
            cancellation=cancellation() if world.processes == 1 else NEVER,
            read=compare_hashes if streams else lambda: None,
            waited=lambda seconds: counters.add(waited_for_weights=seconds),
        )
    make = partial(
        kind,
        loading,
        arch,
        job.taps,
        schedule,
        compute_dtype=recipe.compute_dtype,
        device=device,
        shards=shards,
        encoders=encoders,
        splices=splices,
        attention=attention,
        shapes=abstract_params(arch, schedule, head=job.needs_head, dtype=dtype, shards=shards),
    )
    if world.processes > 1:  # what processes tell each other has one order
        with counters.timed("waited_for_model"):
            loading.result()
    scales = None
    if recipe.store_dtype == "int8":
        measuring = make(store_dtype=computed)
        scales = channel_scales(job, ledger, measuring, batches, world)
    return make(store_dtype=recipe.store_dtype, scales=scales)


def _gigabytes(size: int | None) -> str:
    return "an unknown total" if size is None else f"{size / 1e9:.2f} GB"

"""A model on a mesh of virtual CPU devices, or on one of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from spile.core.tensors import DTYPES_BY_NAME
from spile.corpus.pack import Batch
from spile.models.config.specs import array_axes, axis_sizes
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.forward.decoder import needs_whole_block
from spile.models.forward.sharding import Shards, make_mesh
from spile.models.forward.weight_loader import load_params
from spile.models.forward.weights import LayerSchedule
from spile.models.layout import Cuts, Layout
from spile.models.sites import AFTER_BLOCKS, LENSES
from spile.models.taps import Tap, parse_taps
from spile.plan.objectives import find_objective
from spile.run.step.devices import StepDevices
from spile.run.step.resident import ResidentStep
from spile.run.step.settings import StepSettings
from spile.run.step.stored import Extras


def shards_of(checkpoint: Checkpoint, layout: Layout) -> Shards:
    arch = checkpoint.arch
    mesh = make_mesh(layout, jax.devices()[: layout.size])
    return Shards(mesh, Cuts.of(layout, axis_sizes(arch)), array_axes(arch))


def make_step(
    directory: Path,
    taps: str,
    layout: Layout | None,
    store_dtype: str = "float32",
    compute_dtype: str = "float32",
    *,
    scales: Mapping[str, Any] | None = None,
    encoders: Mapping[str, tuple[SparseEncoder, Any]] | None = None,
    splices: Mapping[Tap, Partial] | None = None,
    pool: str | None = None,
    compares: bool = False,
    beside: Tap | None = None,
    lens: Mapping[str, Mapping[str, Any]] | None = None,
) -> ResidentStep:
    """`encoders`: by tap, each with its arrays; `lens`: the arrays of one whose map is added."""
    checkpoint = open_checkpoint(str(directory))
    chosen = parse_taps(taps, checkpoint.arch)
    objective = find_objective(None, chosen, checkpoint.arch, compute_dtype)
    aims = objective.aims if objective else ()
    computed = (*chosen, Tap("logprob")) if compares else (*chosen, *aims)
    depth = max(tap.layers_needed(checkpoint.arch) for tap in computed)
    schedule = LayerSchedule.of(checkpoint.arch, depth, whole=needs_whole_block(computed, depth))
    shards = shards_of(checkpoint, layout) if layout else None
    params, _ = load_params(
        checkpoint,
        schedule,
        head=any(tap.site in (*AFTER_BLOCKS, *LENSES) for tap in computed),
        dtype=DTYPES_BY_NAME[compute_dtype],
        shards=shards,
    )
    encoders, splices = encoders or {}, splices or {}
    settings = StepSettings(
        arch=checkpoint.arch, taps=chosen, schedule=schedule, compute_dtype=compute_dtype,
        store_dtype=store_dtype, place=StepDevices(jax.devices()[0], shards),
        encoders={tap: encoder for tap, (encoder, _) in encoders.items()}, spliced=tuple(splices),
        pool=pool, compares=compares, objective=objective, beside=beside,
        lens_adds=True if lens else None,
    )  # fmt: skip
    arrays = {tap: arrays for tap, (_, arrays) in encoders.items()}
    extras = Extras(scales or {}, arrays, tuple(splices.values()), lens or {})
    return ResidentStep(params, settings, extras)


def make_batch(rows: int, seq: int = 24, *, keep: bool = False, vocab: int = 250) -> Batch:
    """Rows of two documents, some with padding; `keep` stores only some positions of each."""
    rng = np.random.default_rng(rows)
    tokens, positions, segments = (np.zeros((rows, seq), np.int32) for _ in range(3))
    lengths = rng.integers(4, seq + 1, rows).astype(np.int32)
    lengths[0], lengths[-1] = seq, 0
    for row, length in enumerate(lengths):
        cut = length // 3
        tokens[row, :length] = rng.integers(0, vocab, length)
        positions[row, :length] = [*range(cut), *range(length - cut)]
        segments[row, :length] = [1] * cut + [2] * (length - cut)
    if not keep:
        return Batch(tokens, positions, segments, lengths, None, lengths, contexts=16)
    counts = np.minimum(lengths, rng.integers(0, 6, rows)).astype(np.int32)
    columns = np.zeros((rows, 5), np.int32)
    for row, count in enumerate(counts):
        columns[row, :count] = np.sort(rng.permutation(lengths[row])[:count])
    return Batch(tokens, positions, segments, lengths, columns, counts, contexts=16)


def pooled(batch: Batch, slots: int, *, labels: int = 0) -> Batch:
    """The same batch, in which the kept tokens of each of a row's documents are one span.

    Args:
        labels: number of labels; those of the spans follow one another.
    """
    columns = batch.columns
    if columns is None:
        columns = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)
    found = np.zeros(columns.shape, np.int32)
    sizes = np.zeros((len(columns), slots), np.int32)
    for row, count in enumerate(batch.counts):
        _, numbers = np.unique(batch.segments[row][columns[row, :count]], return_inverse=True)
        found[row, :count] = numbers + 1
        sizes[row] = np.bincount(numbers, minlength=slots)
    batch = replace(batch, slots=found, sizes=sizes)
    if not labels:
        return batch
    of_labels = np.zeros((len(columns), labels), np.int32)
    for row, slot in np.argwhere(sizes > 0).tolist():
        of_labels[row, (row + slot) % labels] = slot + 1
    return replace(batch, labels=of_labels)


def scored(batch: Batch, places: int) -> Batch:
    """The same batch, with an engine's log-probability of -1 of some tokens of each row."""
    rng = np.random.default_rng(3)
    columns, docs = (np.zeros((len(batch.lengths), places), np.int64) for _ in range(2))
    for row, length in enumerate(batch.lengths.tolist()):
        following = batch.segments[row][1:] == batch.segments[row][:-1]
        (found,) = np.nonzero(following & (batch.segments[row][1:] > 0))
        count = min(places, len(found), row % (places + 1))
        columns[row, :count] = np.sort(rng.permutation(found)[:count])
        docs[row, :count] = 1 + 2 * row + batch.segments[row][columns[row, :count]]
        assert length or not count
    claimed = np.where(docs > 0, -1.0, 0.0).astype(np.float32)
    return replace(batch, scored=columns.astype(np.int32), claimed=claimed, scored_docs=docs)

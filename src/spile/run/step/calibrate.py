"""Scales of int8 channels, measured once on a dataset's first contexts and then shared."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from spile.corpus.pack import Batch, PackedUnit
from spile.dataset.codec.quantization import DECODED, INT8_MAX
from spile.dataset.records.format import SCALE_DTYPE
from spile.dataset.records.ledger import Ledger
from spile.plan.job import ExtractionJob, prepare_unit
from spile.run.step.step import Step
from spile.run.world.world import World

_log = logging.getLogger("spile.run")
_ENOUGH = 16_384  # kept tokens to measure
_HEADROOM = 1.25  # over the largest value seen; larger values are clipped, and counted


def channel_scales(
    job: ExtractionJob,
    ledger: Ledger,
    measuring: Step,
    batches: Callable[[PackedUnit], Iterator[Batch]],
    world: World,
) -> dict[str, np.ndarray]:
    """Return the stored scales; measure and store them first if nobody has.

    Args:
        measuring: a step that keeps values as they are computed.
        batches: cuts a packed unit into steps.
    """
    if world.share("scales missing", ledger.read_scales(job.table) is None):
        _log.info("measuring the scale of each channel on the corpus's first contexts")
        largest = _largest(job, measuring, batches)
        by_process = world.gather("largest", {t: v.tolist() for t, v in largest.items()})
        if by_process is not None:
            ledger.create_scales(job.table, _scales(by_process))
        world.share("scales", True)
    scales = ledger.read_scales(job.table)
    assert scales is not None
    return scales


def _largest(
    job: ExtractionJob, step: Step, batches: Callable[[PackedUnit], Iterator[Batch]]
) -> dict[str, np.ndarray]:
    """The largest value of each channel, over the rows that this process holds."""
    taps = [name for name, info in job.table.taps.items() if info.scaled_by == "channel"]
    largest = {tap: np.zeros(job.table.taps[tap].shape, DECODED) for tap in taps}
    for packed in _first_contexts(job):
        for batch in batches(packed):
            output = step(batch)
            for tap in taps:
                values = np.abs(output.rows_of(tap).astype(DECODED))
                finite = np.where(np.isfinite(values), values, 0.0)
                np.maximum(largest[tap], finite.max(axis=0, initial=0.0), out=largest[tap])
    return largest


def _scales(by_process: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    largest = {
        tap: np.max([np.asarray(each[tap], DECODED) for each in by_process], axis=0)
        for tap in by_process[0]
    }
    # A channel that is always zero can have any scale.
    smallest = np.finfo(SCALE_DTYPE).tiny
    return {
        tap: np.where(values > 0, np.maximum(values * _HEADROOM / INT8_MAX, smallest), 1.0)
        for tap, values in largest.items()
    }


def _first_contexts(job: ExtractionJob) -> Iterator[PackedUnit]:
    """The first packed rows, until they hold `_ENOUGH` kept tokens; the same in every process."""
    missing = _ENOUGH
    with closing(job.reader()) as reader:
        for unit in job.units:
            packed = prepare_unit(job, reader, unit, with_table=False).packed
            before = np.cumsum(packed.counts) - packed.counts
            count = int(np.searchsorted(before, missing))
            yield packed.first(count)
            missing -= int(packed.counts[:count].sum())
            if missing <= 0:
                return

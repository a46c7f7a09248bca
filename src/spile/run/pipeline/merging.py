"""Pooled rows, made on the host: parts of spans are merged in float64, in stored order.

So a row has the same bits however its span is cut into steps. It is written once its last part has
arrived; until then its sum is held.
"""

import numpy as np

from spile.core.pool import MOMENTS, reduces
from spile.core.recipe import latent_names
from spile.corpus.pooled_spans import PooledSpans
from spile.dataset.codec.quantization import DECODED
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import TapInfo
from spile.dataset.records.table import Table
from spile.plan.job import PreparedUnit


class SpanMerger:
    """Merges the parts of one tap of one unit."""

    def __init__(self, spans: PooledSpans, by: str, info: TapInfo, source: str = "") -> None:
        """Args:
        by: "mean" (parts are sums), "max" or `MOMENTS` (sums, and squared deviations).
        source: the name of the parts. Those of latents are of all of them: the tap keeps the
            largest of the merged ones, or their ids.
        """
        self._spans, self._by, self._info, self.source = spans, by, info, source
        self._done = 0  # parts that have arrived
        self._open: dict[int, np.ndarray] = {}  # by row
        self._counted: dict[int, int] = {}  # tokens of each open row so far

    def add(self, parts: np.ndarray) -> tuple[np.ndarray, list[TapStats]]:
        """Take the parts of whole packed rows; return the rows that they complete, as stored.

        Their statistics come for each packed row, whatever a step holds.
        """
        spans, first = self._spans, self._done
        self._done += len(parts)
        rows, ends = spans.parts[first : self._done], spans.ends[first : self._done]
        whole = np.empty((np.count_nonzero(ends), *parts.shape[1:]), np.float64)
        alone = ends & spans.alone[rows]
        whole[alone[ends]] = parts[alone]
        place = np.cumsum(ends) - 1  # among the rows that are completed
        for part in np.flatnonzero(~alone).tolist():
            row, count = int(rows[part]), int(spans.part_counts[first + part])
            before = self._open.pop(row, None), self._counted.pop(row, 0)
            found = self._merged(*before, parts[part].astype(np.float64), count)
            if ends[part]:
                whole[place[part]] = found
            else:
                self._open[row], self._counted[row] = found, before[1] + count
        if self._by != "max":
            counts = spans.index["count"][rows[ends]]
            whole /= counts.reshape(-1, *[1] * (whole.ndim - 1))
        storage = self._info.storage
        with np.errstate(over="ignore"):  # of float16, which is reported as not finite
            wide = whole.astype(storage if storage == np.float64 else DECODED)
            stored = self._largest(wide) if self._info.latents else wide
            stored = stored.astype(storage)
        _, begins = np.unique(spans.part_places[first : self._done][ends], return_index=True)
        groups = np.split(np.arange(len(stored)), begins[1:]) if len(stored) else []
        stats = [TapStats.of_rows(stored[group]) for group in groups]
        if self._info.latents and not self._are_ids:
            for each, group in zip(stats, groups, strict=True):
                active = np.count_nonzero(wide[group] > 0, axis=1)
                each.truncated = int(np.count_nonzero(active > self._info.width))
        return stored, stats

    @property
    def _are_ids(self) -> bool:
        return self._info.storage.kind == "i"

    def _largest(self, latents: np.ndarray) -> np.ndarray:
        """Return the largest latents of each row, or their ids; ties go to the lower id."""
        ids = np.argsort(-latents, axis=1, kind="stable")[:, : self._info.width]
        return ids if self._are_ids else np.take_along_axis(latents, ids, axis=1)

    def _merged(
        self, before: np.ndarray | None, counted: int, part: np.ndarray, count: int
    ) -> np.ndarray:
        """Merge a part of `count` tokens with those before it."""
        if before is None:
            return part
        if self._by == "max":
            return np.maximum(before, part)
        both = before + part
        if self._by == MOMENTS:  # Chan's update
            apart = before[..., 0] / counted - part[..., 0] / count
            both[..., 1] += apart * apart * (counted * count / (counted + count))
        return both


def mergers(table: Table, prepared: PreparedUnit) -> dict[str, SpanMerger]:
    """Return what makes the pooled rows of a unit, by tap; nothing unless values are reduced."""
    by = reduces(table.recipe.pool)
    spans = prepared.packed.pooled if by else None
    if by is None or spans is None:
        return {}
    latents = [latent_names(tap) for tap in table.recipe.encode]
    sources = {name: values for values, ids in latents for name in (values, ids)}
    return {
        tap: SpanMerger(spans, by, info, sources.get(tap, tap)) for tap, info in table.taps.items()
    }

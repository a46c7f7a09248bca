"""Pooled rows, made on the host: parts of spans are merged in float64, in stored order.

So a row has the same bits however its span is cut into steps. (The products of a covariance are
summed by step, so its bits are those of the steps' size.) It is written once its last part has
arrived; until then its sum is held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spile.core.pool import COVARIANCE, JACOBIAN, MOMENTS, reduces
from spile.core.recipe import latent_names
from spile.corpus.pooled_spans import PooledSpans
from spile.dataset.codec.quantization import DECODED
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import TapInfo
from spile.dataset.records.table import Table
from spile.plan.job import PreparedUnit


class PartMerger(Protocol):
    """Merges the parts of one tap of one unit; `source` is the name under which they come."""

    source: str

    def add(
        self, parts: np.ndarray, products: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, list[TapStats]]:
        """Take the parts of whole packed rows; return the rows that they complete, as stored.

        Args:
            products: of these packed rows' deviations, by label, if covariances are summed; those
                of several devices are added up.
        """
        ...


class SpanMerger:
    """Merges sums or maxima."""

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

    def add(
        self, parts: np.ndarray, products: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, list[TapStats]]:
        """Statistics come for each packed row, whatever a step holds."""
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


@dataclass
class _Label:
    """What is known of a label so far."""

    count: int
    sums: np.ndarray  # of its tokens' values
    squares: np.ndarray  # [width, width]: the products of their deviations from the mean


class CovarianceMerger:
    """Merges the sums of labels, and the products of their tokens' deviations.

    A row is the mean of a label's tokens, followed by the upper triangle of their covariance.
    """

    def __init__(self, spans: PooledSpans, info: TapInfo, source: str) -> None:
        self._spans, self._info, self.source = spans, info, source
        self._done = 0  # parts that have arrived
        self._labels: dict[int, _Label] = {}  # those with parts to come, by row

    def add(
        self, parts: np.ndarray, products: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, list[TapStats]]:
        spans, first = self._spans, self._done
        self._done += len(parts)
        rows, ends = spans.parts[first : self._done], spans.ends[first : self._done]
        counts = spans.part_counts[first : self._done]
        wide = parts.reshape(len(parts), self._info.channels).astype(np.float64)
        for row in np.unique(rows).tolist():
            own = rows == row
            self._labels[row] = self._merged(row, wide[own], int(counts[own].sum()), products)
        stored = np.empty((np.count_nonzero(ends), self._info.width), np.float64)
        upper = np.triu_indices(self._info.channels)
        for out, row in zip(stored, rows[ends].tolist(), strict=True):
            label = self._labels.pop(row)
            out[: self._info.channels] = label.sums / label.count
            out[self._info.channels :] = label.squares[upper] / label.count
        return stored, [TapStats.of_rows(row[None], self._info.channels) for row in stored]

    def _merged(
        self, row: int, sums: np.ndarray, count: int, products: Sequence[np.ndarray]
    ) -> _Label:
        """Merge the tokens of a step with those before them (Chan's update)."""
        total = np.zeros(self._info.channels)
        for part in sums:
            total += part
        squares = np.zeros((self._info.channels,) * 2)
        before = self._labels.get(row)
        if before is not None:
            apart = before.sums / before.count - total / count
            share = before.count * count / (before.count + count)
            np.multiply.outer(apart * share, apart, out=squares)
            squares += before.squares
            total, count = before.sums + total, before.count + count
        for each in products:
            squares += each[row]
        return _Label(count, total, squares)


class JacobianMerger:
    """Merges the Jacobians of a unit's prompts: a row is how many there are, and their mean."""

    def __init__(self, spans: PooledSpans, info: TapInfo, source: str) -> None:
        self._spans, self._info, self.source = spans, info, source
        self._done, self._prompts = 0, 0.0
        self._sum = np.zeros(info.width - 1)

    def add(
        self, parts: np.ndarray, products: Sequence[np.ndarray] = ()
    ) -> tuple[np.ndarray, list[TapStats]]:
        """`parts`: how many prompts packed rows hold; `products`: the sums of their Jacobians."""
        ends = self._spans.ends[self._done : self._done + len(parts)]
        self._done += len(parts)
        self._prompts += float(parts.sum(dtype=np.float64))
        for each in products:
            self._sum += each.reshape(-1)
        if not ends.any():
            return np.empty((0, self._info.width)), []
        row = np.concatenate([[self._prompts], self._sum / max(1.0, self._prompts)])[None]
        return row, [TapStats.of_rows(row, self._info.channels)]


def mergers(table: Table, prepared: PreparedUnit) -> dict[str, PartMerger]:
    """Return what makes the pooled rows of a unit, by tap; nothing unless values are reduced."""
    by = reduces(table.recipe.pool)
    spans = prepared.packed.pooled if by else None
    if by is None or spans is None:
        return {}
    if by == COVARIANCE:
        return {tap: CovarianceMerger(spans, info, tap) for tap, info in table.taps.items()}
    if by == JACOBIAN:
        return {tap: JacobianMerger(spans, info, tap) for tap, info in table.taps.items()}
    latents = [latent_names(tap) for tap in table.recipe.encode]
    sources = {name: values for values, ids in latents for name in (values, ids)}
    return {
        tap: SpanMerger(spans, by, info, sources.get(tap, tap)) for tap, info in table.taps.items()
    }

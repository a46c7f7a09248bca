"""Latents that are active in the same rows, on a sample of rows.

The rows with the smallest hashes are drawn, so samples of different units merge into the sample of
all of them. Two latents are as near as the cosine of their activity: the number of drawn rows in
which both are active, divided by the geometric mean of the numbers in which each is.
"""

import numpy as np

from spile.core.errors import CorruptError
from spile.dataset.codec.columns import Columns
from spile.features.ranked import hashes

_LEAST = 2  # rows in which both are active
_PAIRS = 1 << 24  # counted at a time


class RowSample:
    """The drawn rows, and the ids of their active latents."""

    def __init__(self, most: int, width: int) -> None:
        self._most, self._width = most, width
        self._place = np.zeros(0, np.int64)
        self._hash = np.zeros(0, np.uint32)
        self._ids = np.zeros((0, width), np.int32)
        self._added = list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
        self._waiting = 0

    def add(self, places: np.ndarray, hashed: np.ndarray, ids: np.ndarray) -> None:
        """Add rows that follow; `ids`: [rows, width], −1 where no latent is active."""
        if not self._width or not self._most:
            return
        if len(self._place) == self._most:  # ordered by hash, and the later row loses a tie
            chosen = np.flatnonzero(hashed < self._hash[-1])
            places, hashed, ids = places[chosen], hashed[chosen], ids[chosen]
        self._added.append((places, hashed, ids.astype(np.int32)))
        self._waiting += len(places)
        if self._waiting > self._most // 2:
            self._sort()

    def _sort(self) -> None:
        if not self._added:
            return
        places, hashed, ids = zip(*self._added, strict=True)
        place = np.concatenate([self._place, *places])
        both = np.concatenate([self._hash, *hashed])
        order = np.argsort(both, kind="stable")[: self._most]
        every = np.concatenate([self._ids, *ids])
        self._place, self._hash, self._ids = place[order], both[order], every[order]
        self._added, self._waiting = [], 0

    def merge(self, key: str, columns: Columns) -> None:
        """Add the drawn rows of units that follow."""
        unit, row, ids = (columns.get(name) for name in ("unit", "row", "ids"))
        if unit is None or row is None or ids is None or ids.shape != (len(unit), self._width):
            raise CorruptError(key, f"does not hold rows of {self._width} latents")
        place = unit.astype(np.int64) << 32 | row
        self.add(place, hashes(place), ids)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the drawn rows, in the order of their hashes."""
        self._sort()
        return {
            "unit": (self._place >> 32).astype(np.int32),
            "row": (self._place & 0xFFFFFFFF).astype(np.int32),
            "ids": self._ids,
        }


def neighbours(ids: np.ndarray, latents: int, count: int) -> dict[str, np.ndarray]:
    """Return the columns of the nearest latents of each: `ids`, −1 where there is none, `score`.

    Args:
        ids: [rows, width] of the drawn rows.
    """
    found = np.full((latents, count), -1, np.int32)
    scores = np.zeros((latents, count), np.float32)
    rows, places = np.nonzero(ids >= 0)
    flat = ids[rows, places].astype(np.int64)
    active = np.bincount(flat, minlength=latents)
    order = np.argsort(flat, kind="stable")
    by_latent = rows[order]  # the rows of each latent, one after the other
    ends = np.cumsum(active)
    per_row = np.bincount(rows, minlength=len(ids))
    first_of_row = np.cumsum(per_row) - per_row
    work = np.cumsum(active * max(1, ids.shape[1]))
    low = 0
    while low < latents and count:
        high = int(np.searchsorted(work, (work[low - 1] if low else 0) + _PAIRS, side="right"))
        high = min(latents, max(high, low + 1))
        begin = int(ends[low - 1]) if low else 0
        chosen = by_latent[begin : int(ends[high - 1])]
        own = np.repeat(np.arange(low, high), active[low:high])
        sizes = per_row[chosen]
        starts = np.repeat(first_of_row[chosen] - (np.cumsum(sizes) - sizes), sizes)
        other = flat[starts + np.arange(int(sizes.sum()))]
        pairs, together = np.unique(np.repeat(own, sizes) * latents + other, return_counts=True)
        a, b = np.divmod(pairs, latents)
        kept = np.flatnonzero((a != b) & (together >= _LEAST))
        a, b, together = a[kept], b[kept], together[kept]
        near = together / np.sqrt(active[a].astype(np.float64) * active[b])
        by_score = np.lexsort((b, -near, a))
        a, b, near = a[by_score], b[by_score], near[by_score]
        counts = np.bincount(a - low, minlength=high - low)
        rank = np.arange(len(a)) - np.repeat(np.cumsum(counts) - counts, counts)
        best = np.flatnonzero(rank < count)
        found[a[best], rank[best]] = b[best]
        scores[a[best], rank[best]] = near[best]
        low = high
    return {"ids": found, "score": scores}

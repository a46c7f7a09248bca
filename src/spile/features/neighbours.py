"""The sample of rows from which neighbours follow.

The rows with the smallest hashes are drawn, so samples of different units merge into the sample of
all of them, and two encoders of one dataset have the same rows in theirs.
"""

import numpy as np

from spile.core.errors import CorruptError
from spile.dataset.codec.columns import Columns
from spile.features.ranked import hashes


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

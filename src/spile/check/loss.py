"""What the stored form costs: rows as stored, against the same rows in float32. No jax."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Loss:
    """Distances that rounding alone makes, and how well the stored rows still point.

    A few channels are much larger than all others and dominate any total: `typical_channel`, the
    median over channels of each one's own relative distance, shows what the rest has become.
    """

    relative_l2: float
    typical_channel: float
    cosine: float  # the mean over rows, of what is stored with what should be


class LossCounter:
    """Gathers the rows of one tap."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._gap, self._size = np.zeros(shape), np.zeros(shape)  # sums of squares, by channel
        self._cosines: list[np.ndarray] = []

    def add(self, exact: np.ndarray, rounded: np.ndarray, stored: np.ndarray) -> None:
        """Rows in float32, the same as storing them alone would leave them, and as they are."""
        wide, alone, found = (array.astype(np.float64) for array in (exact, rounded, stored))
        # A row with infinity or NaN says nothing of rounding; `check` has other words for it.
        finite = np.isfinite(wide) & np.isfinite(alone) & np.isfinite(found)
        flat = (-1, math.prod(exact.shape[1:]))
        sound = finite.reshape(flat).all(axis=1)
        wide, alone, found = wide[sound], alone[sound], found[sound]
        inside = tuple(map(slice, exact.shape[1:]))  # attention patterns: as long as the context
        self._gap[inside] += np.square(wide - alone).sum(axis=0)
        self._size[inside] += np.square(wide).sum(axis=0)
        ours, theirs = wide.reshape(flat), found.reshape(flat)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        known = lengths > 0
        self._cosines.append((ours * theirs).sum(axis=1)[known] / lengths[known])

    def result(self) -> Loss:
        gap, size = self._gap.reshape(-1), self._size.reshape(-1)
        used = size > 0
        each = np.sqrt(gap[used] / size[used])
        cosines = np.concatenate(self._cosines)
        return Loss(
            relative_l2=float(np.sqrt(gap.sum() / size.sum())) if used.any() else 0.0,
            typical_channel=float(np.median(each)) if used.any() else 0.0,
            cosine=float(cosines.mean()) if len(cosines) else 1.0,
        )

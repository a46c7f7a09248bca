"""Statistics of a tap: exact counts, float64 moments, mergeable in any grouping of whole rows.

The device reduces each packed row in float32, in two passes: the second corrects the rounding error
of the mean. The host merges the results in float64, in stored order. Packed rows are a function of
recipe and unit, so the result does not depend on the batch size, the mesh or the machine count.
Pooled rows exist on the host alone, which measures those that a packed row completes. So do rows
that another engine made: the host measures those by blocks, as the device would.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from spile.core.errors import CorruptError

_BLOCK = 64  # rows that are measured together: few enough to stay in a core's cache


@dataclass
class TapStats:
    """Moments of one tap's rows, per channel."""

    count: int
    mean: np.ndarray
    m2: np.ndarray  # sum of squared deviations
    norm_sum: float
    max_abs: float  # among finite values
    nonfinite: int
    clipped: int = 0  # values that exceed the range of their channel's scale
    truncated: int = 0  # rows with more active latents than are kept

    @classmethod
    def empty(cls, width: int) -> "TapStats":
        return cls(0, np.zeros(width), np.zeros(width), 0.0, 0.0, 0)

    @classmethod
    def of_rows(cls, rows: np.ndarray, channels: int | None = None) -> "TapStats":
        """Measure rows as they are stored, in float64.

        Args:
            channels: the first values of a row that are measured, if not all are.
        """
        flat = rows.reshape(len(rows), -1)
        nonfinite = int(np.count_nonzero(~np.isfinite(flat)))
        wide = flat[:, :channels].astype(np.float64)
        finite = np.isfinite(wide)
        with np.errstate(invalid="ignore"):  # infinities, if they were allowed
            mean = wide.mean(axis=0)
            m2 = np.square(wide - mean).sum(axis=0)
            norms = np.sqrt(np.square(wide).sum(axis=1))
        largest = np.abs(wide).max(initial=0.0, where=finite)
        return cls(len(rows), mean, m2, float(norms.sum()), float(largest), nonfinite)

    @classmethod
    def of_blocks(cls, rows: np.ndarray) -> "TapStats":
        """Measure rows as the device does: in float32, a block at a time, in two passes.

        Ten times as fast as `of_rows`, and as exact as a run's statistics.
        """
        total = cls.empty(rows[:1].size if len(rows) else 0)
        for first in range(0, len(rows), _BLOCK):
            total.merge(cls._of_block(rows[first : first + _BLOCK]))
        return total

    @classmethod
    def _of_block(cls, rows: np.ndarray) -> "TapStats":
        wide = rows.reshape(len(rows), -1).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.square(wide).sum(axis=1))
            if not np.isfinite(norms).all():  # a value is not finite, or its square is not
                return cls.of_rows(rows)
        largest = max(float(wide.max()), -float(wide.min()))
        mean = wide.mean(axis=0)
        wide -= mean
        rest = wide.mean(axis=0).astype(np.float64)  # the rounding error of the mean
        m2 = np.einsum("nc,nc->c", wide, wide) - len(rows) * np.square(rest)
        total = float(norms.sum(dtype=np.float64))
        return cls(len(rows), mean + rest, np.maximum(m2, 0.0), total, largest, 0)

    @property
    def variance(self) -> np.ndarray:
        return self.m2 / max(1, self.count)

    @property
    def mean_norm(self) -> float:
        return self.norm_sum / max(1, self.count)

    def __repr__(self) -> str:
        return (
            f"TapStats(count={self.count:,}, width={len(self.mean)}, "
            f"mean_norm={self.mean_norm:.4g}, max_abs={self.max_abs:.4g}, "
            f"nonfinite={self.nonfinite})"
        )

    def merge(self, other: "TapStats") -> None:
        """Add another group of rows (Chan's update)."""
        if not other.count:
            return
        if other.mean.shape != self.mean.shape:
            raise CorruptError(
                "statistics", f"are of {len(other.mean)} channels, where {len(self.mean)} are"
            )
        total = self.count + other.count
        with np.errstate(invalid="ignore"):  # infinities, if they were allowed
            delta = other.mean - self.mean
            self.mean = self.mean + delta * (other.count / total)
            self.m2 = self.m2 + other.m2 + delta * delta * (self.count * other.count / total)
        self.count = total
        self.norm_sum += other.norm_sum
        self.max_abs = max(self.max_abs, other.max_abs)
        self.nonfinite += other.nonfinite
        self.clipped += other.clipped
        self.truncated += other.truncated

    def to_tensors(self, tap: str) -> dict[str, np.ndarray]:
        return {
            f"{tap}/count": np.array([self.count], np.int64),
            f"{tap}/mean": self.mean,
            f"{tap}/m2": self.m2,
            f"{tap}/norm_sum": np.array([self.norm_sum]),
            f"{tap}/max_abs": np.array([self.max_abs]),
            f"{tap}/nonfinite": np.array([self.nonfinite], np.int64),
            f"{tap}/clipped": np.array([self.clipped], np.int64),
            f"{tap}/truncated": np.array([self.truncated], np.int64),
        }

    @classmethod
    def from_tensors(cls, tap: str, tensors: Mapping[str, np.ndarray], width: int) -> "TapStats":
        """Rebuild the statistics of rows of `width` values from the tensors of `to_tensors`.

        Raises:
            CorruptError: if a tensor is missing, or of another shape or dtype.
        """

        def moments(name: str, shape: tuple[int, ...]) -> np.ndarray:
            found = tensors.get(f"{tap}/{name}")
            if found is None or found.ndim != 1 or found.dtype != np.float64:
                raise CorruptError("statistics", f"hold no {name} of {tap}")
            if found.shape != shape:
                raise CorruptError("statistics", f"hold a {name} of {tap} of another size")
            return np.array(found)

        def count(name: str) -> int:
            found = tensors.get(f"{tap}/{name}")
            if found is None or found.shape != (1,) or found.dtype != np.int64 or found[0] < 0:
                raise CorruptError("statistics", f"hold no {name} of {tap}")
            return int(found[0])

        mean = moments("mean", (width,))
        return cls(
            count("count"),
            mean,
            moments("m2", mean.shape),
            moments("norm_sum", (1,)).item(),
            moments("max_abs", (1,)).item(),
            count("nonfinite"),
            count("clipped"),
            count("truncated"),
        )


def merged(parts: Iterable[TapStats], width: int) -> TapStats:
    """Merge all groups of rows. (`width` is used only if there is no group.)"""
    total: TapStats | None = None
    for part in parts:
        if total is None:
            total = replace(part)
        else:
            total.merge(part)
    return total or TapStats.empty(width)

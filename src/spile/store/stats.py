"""Statistics of a tap: exact counts, float64 moments, mergeable in any grouping of whole rows.

The device reduces each packed row (in float32, two passes); the host merges those in float64 in
stored order. Packed rows are a function of recipe and unit, so the result does not depend on the
batch size, the mesh or the machine count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass
class TapStats:
    """Moments of one tap's rows, per channel."""

    count: int
    mean: np.ndarray
    m2: np.ndarray  # sum of squared deviations
    norm_sum: float
    max_abs: float  # of what is finite
    nonfinite: int
    clipped: int = 0  # values larger than their channel's scale can hold

    @classmethod
    def empty(cls, width: int) -> "TapStats":
        return cls(0, np.zeros(width), np.zeros(width), 0.0, 0.0, 0)

    @property
    def variance(self) -> np.ndarray:
        return self.m2 / max(1, self.count)

    @property
    def mean_norm(self) -> float:
        return self.norm_sum / max(1, self.count)

    def merge(self, other: "TapStats") -> None:
        """Add another group of rows (Chan's update)."""
        if not other.count:
            return
        total = self.count + other.count
        with np.errstate(invalid="ignore"):  # infinities, where they were asked to be kept
            delta = other.mean - self.mean
            self.mean = self.mean + delta * (other.count / total)
            self.m2 = self.m2 + other.m2 + delta * delta * (self.count * other.count / total)
        self.count = total
        self.norm_sum += other.norm_sum
        self.max_abs = max(self.max_abs, other.max_abs)
        self.nonfinite += other.nonfinite
        self.clipped += other.clipped

    def to_tensors(self, tap: str) -> dict[str, np.ndarray]:
        return {
            f"{tap}/count": np.array([self.count], np.int64),
            f"{tap}/mean": self.mean,
            f"{tap}/m2": self.m2,
            f"{tap}/norm_sum": np.array([self.norm_sum]),
            f"{tap}/max_abs": np.array([self.max_abs]),
            f"{tap}/nonfinite": np.array([self.nonfinite], np.int64),
            f"{tap}/clipped": np.array([self.clipped], np.int64),
        }

    @classmethod
    def from_tensors(cls, tap: str, tensors: Mapping[str, np.ndarray]) -> "TapStats":
        def scalar(name: str) -> float:
            return tensors[f"{tap}/{name}"][0].item()

        return cls(
            int(scalar("count")),
            np.array(tensors[f"{tap}/mean"]),
            np.array(tensors[f"{tap}/m2"]),
            scalar("norm_sum"),
            scalar("max_abs"),
            int(scalar("nonfinite")),
            int(scalar("clipped")),
        )


def merged(parts: Iterable[TapStats], width: int) -> TapStats:
    total = TapStats.empty(width)
    for part in parts:
        total.merge(part)
    return total

"""What is counted of latents, as columns: counts, sums, a histogram, and chosen rows of each.

`LatentCounts` is what a part holds and what a summary holds, for one range of latents. A list of
entries for each latent (`top`, `drawn`, `hist`) is stored flat, with where each latent's entries
end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spile.core.errors import CorruptError

BINS = 128  # of magnitudes: four for each power of two, from 2^-16 to 2^16
_LOWEST = (127 - 16) << 2  # the exponent and two bits of the mantissa of 2^-16 in float32
_SHIFT = 21
_MAGNITUDE = np.int32(0x7FFFFFFF)

ENTRY = {"value": np.float32, "unit": np.int32, "row": np.int32, "token": np.int32}
_LISTS = {"top": ENTRY, "drawn": ENTRY, "hist": {"bin": np.int16, "count": np.int64}}
_PLAIN = {"count": np.int64, "sum": np.float64}


def bins_of(values: npt.NDArray[np.float32], *, signed: bool) -> npt.NDArray[np.int64]:
    """Return the bin of each value: by its magnitude, and of signed values negative ones first."""
    bits = np.ascontiguousarray(values).view(np.int32)
    bins = ((bits & _MAGNITUDE) >> _SHIFT).astype(np.int64)
    bins -= _LOWEST
    np.clip(bins, 0, BINS - 1, out=bins)
    if signed:
        bins = np.where(bits < 0, BINS - 1 - bins, BINS + bins)
    return bins


def bin_edges(*, signed: bool) -> np.ndarray:
    """Return where bins begin and end. The first and last also hold all that lies beyond."""
    bits = (np.arange(BINS + 1, dtype=np.int32) + _LOWEST) << _SHIFT
    edges = bits.view(np.float32).astype(np.float64)
    edges[0] = 0.0
    return np.concatenate([-edges[:0:-1], edges]) if signed else edges


@dataclass(frozen=True)
class LatentCounts:
    """Columns of one range of latents, checked."""

    key: str
    columns: Mapping[str, np.ndarray]
    latents: int

    def __post_init__(self) -> None:
        for name, dtype in _PLAIN.items():
            self._check(name, dtype, self.latents)
        for name, fields in _LISTS.items():
            self._check(f"{name}/ends", np.int64, self.latents)
            ends = self.columns[f"{name}/ends"]
            count = int(ends[-1]) if self.latents else 0
            if (np.diff(ends, prepend=0) < 0).any():
                raise CorruptError(self.key, f"{name}/ends does not ascend")
            for each, dtype in fields.items():
                self._check(f"{name}/{each}", dtype, count)

    def _check(self, name: str, dtype: npt.DTypeLike, length: int) -> None:
        found = self.columns.get(name)
        if found is None or found.dtype != np.dtype(dtype) or found.shape != (length,):
            raise CorruptError(self.key, f"does not hold {name} of {length} latents")

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def run(self, name: str, latent: int) -> slice:
        """Return the place of a latent's entries in the columns of a list."""
        ends = self.columns[f"{name}/ends"]
        return slice(int(ends[latent - 1]) if latent else 0, int(ends[latent]))

    def latents_of(self, name: str) -> np.ndarray:
        """Return the latent of each entry of a list."""
        counts = np.diff(self.columns[f"{name}/ends"], prepend=0)
        return np.repeat(np.arange(self.latents), counts)

    def check_places(self, units: int) -> None:
        """Refuse entries of units that do not exist."""
        for name in ("top", "drawn"):
            unit, row = self.columns[f"{name}/unit"], self.columns[f"{name}/row"]
            if len(unit) and not (unit.min() >= 0 and unit.max() < units and row.min() >= 0):
                raise CorruptError(self.key, f"{name} names rows that do not exist")


def flat_histogram(hist: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of a table [latents, bins] of counts."""
    rows, bins = np.nonzero(hist)
    return {
        "hist/ends": np.cumsum(np.count_nonzero(hist, axis=1), dtype=np.int64),
        "hist/bin": bins.astype(np.int16),
        "hist/count": hist[rows, bins].astype(np.int64),
    }


def ends_of_latents(latents: np.ndarray, count: int) -> np.ndarray:
    """Return where each latent's entries end, from the latent of each entry in ascending order."""
    return np.cumsum(np.bincount(latents, minlength=count), dtype=np.int64)

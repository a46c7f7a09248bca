"""What is kept of a tap's rows while they pass: moments, extremes, norms by position."""

import numpy as np

KEPT = 24  # rows at each end of every channel
_LARGE = 1e6  # from which on fourth powers need float64


class Extremes:
    """The rows at which each channel is largest, those first at which it is most."""

    def __init__(self, width: int) -> None:
        self.values = np.full((KEPT, width), -np.inf, np.float32)
        self.units = np.full((KEPT, width), -1, np.int32)
        self.rows = np.full((KEPT, width), -1, np.int64)

    def add(self, values: np.ndarray, unit: int, rows: np.ndarray) -> None:
        """`rows`: numbers within the unit."""
        least = self.values[-1]
        beats = values > least
        if np.count_nonzero(beats) > 4 * beats.shape[1] * KEPT and len(values) > KEPT:
            # At first nearly all do: only the block's own largest are worth sorting.
            cut = np.partition(values, len(values) - KEPT, axis=0)[len(values) - KEPT]
            beats &= values >= cut
        at, channels = np.nonzero(beats)
        if not len(at):
            return
        touched = np.unique(channels)
        channel = np.concatenate([np.tile(touched, KEPT), channels])
        value = np.concatenate([self.values[:, touched].ravel(), values[at, channels]])
        units = np.concatenate([self.units[:, touched].ravel(), np.full(len(at), unit, np.int32)])
        numbers = np.concatenate([self.rows[:, touched].ravel(), rows[at]])
        order = np.lexsort((-value, channel))
        begins = np.searchsorted(channel[order], touched)
        best = order[begins[None, :] + np.arange(KEPT)[:, None]]
        self.values[:, touched], self.units[:, touched] = value[best], units[best]
        self.rows[:, touched] = numbers[best]

    def of(self, channel: int) -> list[tuple[float, int, int]]:
        """(value, unit, row within it), the largest first."""
        parts = (part[:, channel].tolist() for part in (self.values, self.units, self.rows))
        return [hit for hit in zip(*parts, strict=True) if hit[1] >= 0]


class Moments:
    """Of one tap: each channel's moments and extremes, and the norms of rows."""

    def __init__(self, width: int, positions: int) -> None:
        self.width, self.count, self.nonfinite = width, 0, 0
        self._shift = np.zeros(width)  # near the mean, so that powers stay small
        self._sums = np.zeros((4, width))  # of the first four powers of what lies beyond it
        self.largest = np.zeros(width, np.float32)  # absolute
        self.high, self.low = Extremes(width), Extremes(width)
        self._kurtosis = 0.0
        self.norms_at = np.zeros(positions)
        self.rows_at = np.zeros(positions, np.int64)

    def add(self, rows: np.ndarray, positions: np.ndarray, unit: int, first: int) -> np.ndarray:
        """Rows (float32) of a unit from one on; what is not finite is counted, and taken for 0.

        Returns the rows as they were taken.
        """
        finite = np.isfinite(rows)
        if not finite.all():
            self.nonfinite += int(rows.size - np.count_nonzero(finite))
            rows = np.where(finite, rows, np.float32(0))
        largest = np.abs(rows).max(axis=0)
        np.maximum(self.largest, largest, out=self.largest)
        wide = rows.astype(np.float64) if largest.max(initial=0) > _LARGE else rows
        norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
        at = np.minimum(positions, len(self.norms_at) - 1)
        self.norms_at += np.bincount(at, norms, len(self.norms_at))
        self.rows_at += np.bincount(at, minlength=len(self.rows_at))
        if not self.count:
            self._shift = wide.mean(axis=0, dtype=np.float64)
        self._add_powers(wide - self._shift.astype(wide.dtype))
        self._kurtosis += float(_kurtosis_of_rows(wide).sum())
        numbers = np.arange(first, first + len(rows), dtype=np.int64)
        self.high.add(rows, unit, numbers)
        self.low.add(-rows, unit, numbers)
        self.count += len(rows)
        return rows

    def _add_powers(self, beyond: np.ndarray) -> None:
        squares = beyond * beyond
        self._sums[0] += beyond.sum(axis=0, dtype=np.float64)
        self._sums[1] += squares.sum(axis=0, dtype=np.float64)
        self._sums[2] += np.einsum("ij,ij->j", squares, beyond)
        self._sums[3] += np.einsum("ij,ij->j", squares, squares)

    @property
    def mean(self) -> np.ndarray:
        return self._shift + self._sums[0] / max(1, self.count)

    @property
    def deviation(self) -> np.ndarray:
        """Of each channel."""
        first, second = self._sums[:2] / max(1, self.count)
        return np.sqrt(np.maximum(second - first**2, 0))

    @property
    def kurtosis_of_channels(self) -> np.ndarray:
        """Over rows: 3 of a normal distribution; NaN of a channel that never changes."""
        first, second, third, fourth = self._sums / max(1, self.count)
        variance = np.maximum(second - first**2, 0)
        central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
        return _ratio(central, variance**2)

    @property
    def kurtosis(self) -> float:
        """Over a row's channels, on average; NaN of rows of one value."""
        return self._kurtosis / self.count if self.count and self.width > 1 else float("nan")

    @property
    def norm(self) -> float:
        return float(self.norms_at.sum() / max(1, self.count))


def _kurtosis_of_rows(rows: np.ndarray) -> np.ndarray:
    beyond = rows - rows.mean(axis=1, keepdims=True)
    squares = beyond * beyond
    fourth = np.einsum("ij,ij->i", squares, squares) / max(1, rows.shape[1])
    found = _ratio(fourth, squares.mean(axis=1) ** 2)
    return np.nan_to_num(found)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)

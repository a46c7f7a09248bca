"""Moments and extremes of all rows, read once, in the background, block by block.

Blocks are read in an order that is spread over the dataset, so that even the first results describe
all of it. Memory and the number of bytes read are bounded. Rows are identified by unit, since their
numbers change while a dataset grows. Sparse latents are counted by id: the columns of a stored row
are ranks, and do not identify a latent.
"""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spile.core.errors import CorruptError, SpileError
from spile.core.tap_order import RANKED
from spile.dataset.codec.columns import Ints
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.dtypes import STORED
from spile.dataset.read.latents import pair_of

_BLOCK_BYTES = 8 << 20  # of the widest tap's float32 rows
_BLOCK_ROWS = 1024
_SAMPLE_BYTES = 256 << 20
_SAMPLE_ROWS = 4096
_MOST_POSITIONS = 1 << 17
_GOLDEN = 0.6180339887
KEPT = 24  # rows kept at each end of every channel
_LATENT_BYTES = (
    256 << 20
)  # limit for the top rows of all latents: the more latents, the fewer rows each
_LARGE = 1e6  # beyond this, fourth powers need float64
_NO_NUMBERS = np.zeros(0, np.int64)

_log = logging.getLogger("spile.serve")


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a unit."""

    unit: int
    first: int
    count: int


class Blocks:
    """Blocks to read, stored as columns because a large dataset has millions."""

    def __init__(self, columns: np.ndarray) -> None:
        """`columns`: unit, first row and number of rows of each block."""
        self._columns, self._taken = columns, 0

    @classmethod
    def of_rows(cls, units: Ints, rows: Ints, most: int) -> "Blocks":
        """Cut the rows of units into blocks of at most `most` rows."""
        counts: Ints = -(-rows // most)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        first: Ints = (np.arange(int(counts.sum())) - before) * most
        sizes = np.minimum(most, np.repeat(rows, counts) - first)
        return cls(np.stack([np.repeat(units, counts), first, sizes]))

    def and_then(self, more: "Blocks") -> "Blocks":
        """Return the remaining blocks, followed by others."""
        return Blocks(np.concatenate([self._left, more._left], axis=1))

    def spread(self) -> "Blocks":
        """Return the remaining blocks, spread over the dataset by multiples of the golden ratio."""
        order = np.argsort(np.arange(len(self)) * _GOLDEN % 1, kind="stable")
        return Blocks(self._left[:, order])

    def take(self) -> RowBlock:
        """Remove and return the next block."""
        self._taken += 1
        return RowBlock(*self._columns[:, self._taken - 1].tolist())

    def __len__(self) -> int:
        return self._columns.shape[1] - self._taken

    @property
    def _left(self) -> np.ndarray:
        return self._columns[:, self._taken :]


@dataclass
class Sample:
    """A random sample of the rows read so far; the same rows for every tap."""

    index: np.ndarray
    units: np.ndarray
    rows: np.ndarray  # numbers within the unit
    keys: np.ndarray  # random; the rows with the smallest keys stay
    values: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    def __len__(self) -> int:
        return len(self.keys)


class Digest:
    """Reads a dataset that may grow; can be queried at any time."""

    def __init__(self, dataset: Dataset, most_bytes: int) -> None:
        self.lock = threading.Lock()  # held while reading `moments`
        positions = min(dataset.recipe.seq_len, _MOST_POSITIONS)
        found = (pair_of(dataset, tap) for tap in dataset.taps)
        self._ids_of = dict(pair for pair in found if pair)  # the ids' tap, by the values' tap
        taps = [tap for tap in dataset.taps if tap not in self._ids_of.values()]
        taps = [tap for tap in taps if tap.partition(".")[0] not in RANKED] or taps
        self._widths = {tap: dataset.width(tap) for tap in taps}
        self.moments = {
            tap: Moments(self._widths[tap], positions) for tap in taps if tap not in self._ids_of
        }
        kept = top_rows_kept(sum(dataset.num_latents(tap) for tap in self._ids_of))
        self.latents = {
            tap: LatentMoments(tap, dataset.num_latents(tap), positions, kept)
            for tap in taps
            if tap in self._ids_of
        }
        total, widest = sum(self._widths.values()), max(self._widths.values())
        self._block_rows = max(16, min(_BLOCK_ROWS, _BLOCK_BYTES // (4 * widest)))
        self._most_sampled = max(64, min(_SAMPLE_ROWS, _SAMPLE_BYTES // (4 * total)))
        row_bytes = sum(
            dataset.dtype(tap, STORED).itemsize * dataset.width(tap) for tap in dataset.taps
        )
        self._most_rows = max(self._block_rows, most_bytes // row_bytes)
        self._sample = _empty(self._widths, dataset.index_dtype)
        self._drawn: list[Sample] = []  # not joined yet, because joining copies the whole sample
        self._dataset, self.rows_read = dataset, 0
        # A row is sampled if its key is below this: 20% more rows than the sample holds.
        self._limit = min(1.0, 1.2 * self._most_sampled / max(1, self.rows_wanted))
        self._waiting = Blocks.of_rows(_NO_NUMBERS, _NO_NUMBERS, 1)
        self._known = _NO_NUMBERS  # units
        self._reading = False
        self._changed, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="digest", daemon=True)
        self.error: str | None = None
        self.see(dataset)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def see(self, dataset: Dataset) -> None:
        """Continue with the dataset's current state: read its new units as well."""
        units, rows = np.array(dataset.units, np.int64), np.diff(dataset.unit_starts)
        new = ~np.isin(units, self._known)
        blocks = Blocks.of_rows(units[new], rows[new], self._block_rows)
        with self.lock:
            self._dataset, self._known = dataset, units
            self._waiting = self._waiting.and_then(blocks).spread()
        self._changed.set()

    @property
    def rows_wanted(self) -> int:
        """The number of rows to read of the dataset's current state."""
        return min(self._dataset.num_tokens, max(self._most_rows, self.rows_read))

    @property
    def at_work(self) -> bool:
        return self._reading or self._more

    @property
    def _more(self) -> bool:
        return len(self._waiting) > 0 and self.rows_read < self._most_rows

    @property
    def sample(self) -> Sample:
        """The current sample, which is never modified."""
        return self._sample

    @property
    def version(self) -> tuple[tuple[str, ...], int, bool]:
        """A key that changes when results computed from the sample are outdated."""
        return tuple(self._widths), len(self._sample).bit_length(), self.at_work

    def _run(self) -> None:
        for block in self._blocks():
            try:
                self._read(block)
            except SpileError as error:
                # The page shows the blocks that can be read, and this error.
                self.error = str(error)
                _log.warning("%s", error)

    def _blocks(self) -> Iterator[RowBlock]:
        while True:
            self._changed.clear()  # first: `close` sets `_stopped` before it wakes this thread
            if self._stopped.is_set():
                return
            if self._more:
                self._reading = True
                with self.lock:
                    block = self._waiting.take()
                yield block
                self._reading = False
            else:
                self._changed.wait()

    def _read(self, block: RowBlock) -> None:
        dataset = self._dataset
        rows = dataset.rows_of_unit(block.unit)
        assert rows  # (a unit that was done stays done)
        start = rows[0] + block.first
        stop = start + block.count
        index = dataset.index(start, stop)
        keys = np.random.default_rng([block.unit, block.first]).random(block.count)
        chosen = np.flatnonzero(keys < self._limit)
        values: dict[str, np.ndarray] = {}
        for tap in self._widths:
            if self._stopped.is_set():
                return
            rows = read_rows(dataset, tap, start, stop)
            at = (index["pos"], block.unit, block.first)
            if tap in self._ids_of:
                ids = read_rows(dataset, self._ids_of[tap], start, stop, np.int64)
                with self.lock:
                    rows = self.latents[tap].add(rows, ids, *at)
            else:
                with self.lock:
                    rows = self.moments[tap].add(rows, *at)
            values[tap] = rows[chosen]
        units = np.full(len(chosen), block.unit)
        self._keep(
            Sample(index[chosen], units, block.first + chosen, keys[chosen], values), block.count
        )

    def _keep(self, new: Sample, count: int) -> None:
        self._drawn.append(new)
        self.rows_read += count
        if self._more and 4 * sum(map(len, self._drawn)) < len(self._sample):
            return
        sample, self._drawn = joined([self._sample, *self._drawn]), []
        if len(sample) > self._most_sampled:
            self._limit = float(np.partition(sample.keys, self._most_sampled)[self._most_sampled])
            sample = chosen_of(sample, sample.keys < self._limit)
        self._sample = sample


def _empty(widths: dict[str, int], index: np.dtype[Any]) -> Sample:
    values = {tap: np.zeros((0, width), np.float32) for tap, width in widths.items()}
    return Sample(np.zeros(0, index), _NO_NUMBERS, _NO_NUMBERS, np.zeros(0), values)


def joined(samples: list[Sample]) -> Sample:
    """Concatenate samples."""
    return Sample(
        *(
            np.concatenate([getattr(each, name) for each in samples])
            for name in ("index", "units", "rows", "keys")
        ),
        values={
            tap: np.concatenate([each.values[tap] for each in samples]) for tap in samples[0].values
        },
    )


def chosen_of(sample: Sample, which: np.ndarray) -> Sample:
    """Return some rows of a sample."""
    parts = (sample.index, sample.units, sample.rows, sample.keys)
    return Sample(
        *(part[which] for part in parts),
        values={tap: values[which] for tap, values in sample.values.items()},
    )


def read_rows(
    dataset: Dataset, tap: str, start: int, stop: int, dtype: type[np.generic] = np.float32
) -> np.ndarray:
    """Read rows start..stop as [rows, channels]: each value of a row is a channel."""
    found = dataset.read(tap, start, stop, dtype=STORED)
    return found.reshape(len(found), dataset.width(tap)).astype(dtype)


def top_rows_kept(latents: int) -> int:
    """Return the number of rows to keep for each latent; `latents` counts all taps' latents."""
    return max(1, min(KEPT, _LATENT_BYTES // (16 * max(1, latents))))


class Extremes:
    """The rows at which each channel is largest, in descending order."""

    def __init__(self, width: int) -> None:
        self.values = np.full((KEPT, width), -np.inf, np.float32)
        self.units = np.full((KEPT, width), -1, np.int32)
        self.rows = np.full((KEPT, width), -1, np.int64)

    def add(self, values: np.ndarray, unit: int, rows: np.ndarray) -> None:
        """`rows`: numbers within the unit."""
        least = self.values[-1]
        beats = values > least
        if np.count_nonzero(beats) > 4 * beats.shape[1] * KEPT and len(values) > KEPT:
            # At first nearly all rows do: sort only the largest of the block.
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
        """Return (value, unit, row within the unit) of each kept row, the largest first."""
        parts = (part[:, channel].tolist() for part in (self.values, self.units, self.rows))
        return [hit for hit in zip(*parts, strict=True) if hit[1] >= 0]


class _Norms:
    """The norms of one tap's rows, by position, and the number of nonfinite values."""

    def __init__(self, width: int, positions: int) -> None:
        self.width, self.nonfinite = width, 0
        self.count: int = 0  # rows
        self.norms_at = np.zeros(positions)
        self.rows_at = np.zeros(positions, np.int64)

    def _finite(self, rows: np.ndarray) -> np.ndarray:
        """Count nonfinite values, and return the rows with 0 in their place."""
        finite = np.isfinite(rows)
        if finite.all():
            return rows
        self.nonfinite += int(rows.size - np.count_nonzero(finite))
        return np.where(finite, rows, np.float32(0))

    def _add_norms(self, norms: np.ndarray, positions: np.ndarray) -> None:
        at = np.minimum(positions, len(self.norms_at) - 1)
        self.norms_at += np.bincount(at, norms, len(self.norms_at))
        self.rows_at += np.bincount(at, minlength=len(self.rows_at))

    @property
    def norm(self) -> float:
        return float(self.norms_at.sum() / max(1, self.count))


class Moments(_Norms):
    """One tap's statistics: each channel's moments and extremes, and the norms of rows."""

    def __init__(self, width: int, positions: int) -> None:
        super().__init__(width, positions)
        self._shift = np.zeros(width)  # near the mean, so that powers stay small
        self._sums = np.zeros((4, width))  # of the first four powers of the deviations from it
        self.largest = np.zeros(width, np.float32)  # absolute
        self.high, self.low = Extremes(width), Extremes(width)
        self._kurtosis = 0.0

    def add(self, rows: np.ndarray, positions: np.ndarray, unit: int, first: int) -> np.ndarray:
        """Add rows (float32) of a unit, from `first` on; count nonfinite values.

        Returns the rows with nonfinite values replaced by 0.
        """
        rows = self._finite(rows)
        largest = np.abs(rows).max(axis=0)
        np.maximum(self.largest, largest, out=self.largest)
        wide = rows.astype(np.float64) if largest.max(initial=0) > _LARGE else rows
        self._add_norms(np.sqrt(np.einsum("ij,ij->i", wide, wide)), positions)
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
        """Standard deviation of each channel."""
        first, second = self._sums[:2] / max(1, self.count)
        return np.sqrt(np.maximum(second - first**2, 0))

    @property
    def kurtosis_of_channels(self) -> np.ndarray:
        """Kurtosis of each channel over rows: 3 for a normal distribution; NaN for a constant."""
        first, second, third, fourth = self._sums / max(1, self.count)
        variance = np.maximum(second - first**2, 0)
        central = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
        return _ratio(central, variance**2)

    @property
    def kurtosis(self) -> float:
        """Mean kurtosis over a row's channels; NaN if rows have a single value."""
        return self._kurtosis / self.count if self.count and self.width > 1 else float("nan")


class LatentExtremes:
    """The rows in which each latent is largest.

    There are far more latents than channels, and most of them do not occur in a block. So nothing
    is sorted: a larger value replaces the smallest.
    """

    def __init__(self, latents: int, kept: int) -> None:
        self.kept = kept
        self._values = np.full((latents, kept), -np.inf, np.float32)
        self._units = np.full((latents, kept), -1, np.int32)
        self._rows = np.full((latents, kept), -1, np.int64)
        self._least = np.full(latents, -np.inf, np.float32)

    def add(
        self,
        latents: np.ndarray,
        values: np.ndarray,
        ranks: np.ndarray,
        unit: int,
        rows: np.ndarray,
    ) -> None:
        """Add values of one unit.

        Args:
            ranks: how many values of the same latent precede each; all are at least as large.
            rows: numbers within the unit.
        """
        worth = np.flatnonzero((ranks < self.kept) & (values > self._least[latents]))
        for rank in range(self.kept):
            # A latent occurs at most once per rank, so all can be placed at once.
            worth = worth[ranks[worth] >= rank]
            now = worth[ranks[worth] == rank]
            now = now[values[now] > self._least[latents[now]]]
            if not len(now):
                return
            own = latents[now]
            held = self._values[own]
            place = held.argmin(axis=1)
            held[np.arange(len(now)), place] = values[now]
            self._least[own] = held.min(axis=1)
            self._values[own, place] = values[now]
            self._units[own, place], self._rows[own, place] = unit, rows[now]

    def of(self, latent: int) -> list[tuple[float, int, int]]:
        """Return (value, unit, row within the unit) of each kept row, the largest first."""
        parts = (part[latent].tolist() for part in (self._values, self._units, self._rows))
        hits = [hit for hit in zip(*parts, strict=True) if hit[1] >= 0]
        return sorted(hits, key=lambda hit: (-hit[0], *hit[1:]))


class LatentMoments(_Norms):
    """One encoded tap's statistics: how often each latent fires, how strongly, and where most.

    A latent fires in a row if it is among the row's stored latents, with a value above zero.
    """

    def __init__(self, tap: str, latents: int, positions: int, kept: int) -> None:
        super().__init__(latents, positions)
        self.tap = tap
        self.fires = np.zeros(latents, np.int64)  # rows
        self._sum = np.zeros(latents)
        self.largest = np.zeros(latents, np.float32)
        self.high = LatentExtremes(latents, kept)

    def add(
        self, rows: np.ndarray, ids: np.ndarray, positions: np.ndarray, unit: int, first: int
    ) -> np.ndarray:
        """Add rows (float32) of a unit, from `first` on, and the ids of their latents.

        Returns the rows with nonfinite values, which are counted, replaced by 0.

        Raises:
            CorruptError: if an id is not one of the encoder's.
        """
        if ids.size and not (ids.min() >= 0 and ids.max() < self.width):
            raise CorruptError(self.tap, f"has ids of latents that are not among {self.width}")
        rows = self._finite(rows)
        self._add_norms(np.linalg.norm(rows.astype(np.float64), axis=1), positions)
        self.count += len(rows)
        places, _ = found = np.nonzero(rows > 0)
        latents, values = ids[found], rows[found]
        if not len(latents):
            return rows
        # Sort by latent, its largest value first: positive floats sort like their bits.
        keys = (latents.astype(np.uint64) << 32) | ~values.view(np.uint32)
        order = np.argsort(keys)
        latents, values, places = latents[order], values[order], places[order]
        begins = np.flatnonzero(np.diff(latents, prepend=-1))
        fired, counts = latents[begins], np.diff(begins, append=len(latents))
        self.fires[fired] += counts
        self._sum[fired] += np.add.reduceat(values.astype(np.float64), begins)
        self.largest[fired] = np.maximum(self.largest[fired], values[begins])
        ranks = np.arange(len(latents)) - np.repeat(begins, counts)
        self.high.add(latents, values, ranks, unit, first + places)
        return rows

    @property
    def mean(self) -> np.ndarray:
        """Mean of each latent over the rows in which it fires; NaN if it never does."""
        return _ratio(self._sum, self.fires)

    def total(self, latent: int) -> float:
        """Sum of a latent's values."""
        return float(self._sum[latent])

    @property
    def active(self) -> float:
        """Mean number of latents that fire in a row."""
        return float(self.fires.sum() / max(1, self.count))


def _kurtosis_of_rows(rows: np.ndarray) -> np.ndarray:
    beyond = rows - rows.mean(axis=1, keepdims=True)
    squares = beyond * beyond
    fourth = np.einsum("ij,ij->i", squares, squares) / max(1, rows.shape[1])
    found = _ratio(fourth, squares.mean(axis=1) ** 2)
    return np.nan_to_num(found)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)

"""Sparse latents of a dataset: two taps, values and ids, read as one.

A row holds the largest latents first. If fewer are active, the remaining values are zero, with ids
of inactive latents. The ids of a row therefore always differ, and writing values to their ids gives
the dense row of all latents.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spile.core.errors import ConfigError, CorruptError
from spile.core.recipe import latent_names
from spile.dataset.read.dtypes import STORED

_WINDOW_BYTES = 32 << 20  # read at a time


class ReadableDataset(Protocol):
    """The part of `Dataset` that this module needs."""

    @property
    def taps(self) -> list[str]: ...
    @property
    def encoded(self) -> list[str]: ...
    @property
    def num_tokens(self) -> int: ...
    def name(self, tap: str) -> str: ...
    def width(self, tap: str) -> int: ...
    def num_latents(self, tap: str) -> int: ...
    def dtype(self, tap: str, dtype: npt.DTypeLike | None = None) -> np.dtype[Any]: ...
    def read(
        self, tap: str, start: int, stop: int, *, dtype: npt.DTypeLike | None = None
    ) -> np.ndarray: ...
    def index(self, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Latents:
    """Active latents of consecutive rows, in compressed sparse row (CSR) form.

    Row i has `ids[indptr[i]:indptr[i + 1]]` and the same slice of `values`, the largest first.
    `scipy.sparse.csr_array((values, ids, indptr), shape=(len(latents), width))` is equivalent.
    """

    indptr: np.ndarray  # int64
    ids: np.ndarray
    values: np.ndarray
    width: int  # latents of the encoder

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def rows(self) -> np.ndarray:
        """The row of each active latent, counted from the first row read."""
        return np.repeat(np.arange(len(self)), np.diff(self.indptr))

    def dense(self) -> np.ndarray:
        """Return [rows, width], zero where a latent is inactive or was not kept."""
        out = np.zeros((len(self), self.width), self.values.dtype)
        out[self.rows, self.ids] = self.values
        return out


@dataclass(frozen=True)
class TopRows:
    """The rows in which a channel or a latent is largest, the largest first."""

    rows: np.ndarray  # row numbers in the dataset
    values: np.ndarray  # float32
    index: np.ndarray  # entries of those rows: token_id, doc, offset, pos, flags


def pair_of(dataset: ReadableDataset, tap: str) -> tuple[str, str] | None:
    """Return the taps that hold the latents and the ids of an encoded tap, by any of its names."""
    pairs = ((encoded, latent_names(encoded)) for encoded in dataset.encoded)
    return next((pair for encoded, pair in pairs if tap in (encoded, *pair)), None)


def read_latents(
    dataset: ReadableDataset,
    tap: str,
    start: int,
    stop: int,
    dtype: npt.DTypeLike | None = None,
) -> Latents:
    """Return the latents of rows start..stop of an encoded tap.

    Args:
        tap: its name in the model (`resid_post.12`), or that of either of its two taps.
        dtype: of the values, as in `Dataset.read`.
    """
    pair = pair_of(dataset, tap)
    if pair is None:
        name, _ = latent_names(tap)
        if name in dataset.taps:
            raise ConfigError(f"{tap}: rows have all of them, as values; ds.read({name!r})")
        encoded = ", ".join(dataset.encoded) or "none"
        raise ConfigError(f"no latents of {tap!r} here; taps that were encoded: {encoded}")
    values, ids = (np.asarray(dataset.read(name, start, stop, dtype=dtype)) for name in pair)
    active = values != 0
    indptr = np.zeros(len(values) + 1, np.int64)
    np.cumsum(active.sum(axis=1), out=indptr[1:])
    found = Latents(indptr, ids[active], values[active], dataset.num_latents(pair[0]))
    if len(found.ids) and not (found.ids.min() >= 0 and found.ids.max() < found.width):
        raise CorruptError(pair[1], f"names latents that are not among {found.width}")
    return found


def top_rows(dataset: ReadableDataset, tap: str, channel: int, count: int) -> TopRows:
    """Return the rows where one channel of a tap is largest, in memory independent of their number.

    Among equal values the first row is preferred; NaN is ignored.

    Args:
        channel: the channel of a row, counted along all axes. In an encoded tap, the latent; then
            only rows in which it is active and was kept are returned.
    """
    pair = pair_of(dataset, tap)
    tap = pair[0] if pair else dataset.name(tap)
    most = dataset.num_latents(tap) if pair else dataset.width(tap)
    if not 0 <= channel < most or count < 1:
        raise ConfigError(
            f"{tap} has {'latents' if pair else 'channels'} 0 to {most - 1}, not {channel}"
            if count > 0
            else f"at least one row must be asked for, not {count}"
        )
    rows, values = np.empty(0, np.int64), np.empty(0, np.float32)
    for first, found in _values_of(dataset, tap, pair, channel):
        known = np.flatnonzero(found > 0 if pair else ~np.isnan(found))
        rows = np.concatenate([rows, first + known])
        values = np.concatenate([values, found[known]])
        best = np.lexsort((rows, -values))[:count]
        rows, values = rows[best], values[best]
    entries = [dataset.index(row, row + 1) for row in rows.tolist()] or [dataset.index(0, 0)]
    return TopRows(rows, values, np.concatenate(entries))


def _values_of(
    dataset: ReadableDataset, tap: str, pair: tuple[str, str] | None, channel: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row of each window, and the channel's value in each of its rows."""
    names = pair or (tap,)
    row = sum(dataset.width(name) * dataset.dtype(name, STORED).itemsize for name in names)
    step = max(1, _WINDOW_BYTES // max(1, row))
    for start in range(0, dataset.num_tokens, step):
        stop = min(start + step, dataset.num_tokens)
        stored = np.asarray(dataset.read(tap, start, stop, dtype=STORED))
        stored = stored.reshape(stop - start, -1)
        if pair is None:
            yield start, stored[:, channel].astype(np.float32)
            continue
        rows, places = np.nonzero(dataset.read(pair[1], start, stop) == channel)
        found = np.zeros(stop - start, np.float32)
        found[rows] = stored[rows, places]
        yield start, found

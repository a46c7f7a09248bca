"""A tap as an array that is read when it is sliced: `ds["resid_post.9"][:100]`."""

import math
import operator
from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from spile.core.errors import ConfigError
from spile.core.humanize import size
from spile.dataset.read.rows import Rows, StoredRows

LARGEST = 4 << 30  # bytes that are read at once without a range
_TOGETHER = 1024  # rows that an iteration reads at a time


class TapSource(Protocol):
    """The part of `Dataset` that the rows of a tap need."""

    @property
    def url(self) -> str: ...
    def __len__(self) -> int: ...
    def shape(self, tap: str) -> tuple[int, ...]: ...
    def width(self, tap: str) -> int: ...
    def dtype(self, tap: str) -> np.dtype[Any]: ...
    def read(self, tap: str, start: int, stop: int) -> np.ndarray: ...


class TapRows:
    """All rows of a tap, in stored order. Indexing reads rows, by the rules of numpy.

    The first index may be a number, a slice, or an array of row numbers or booleans; others apply
    to what was read. `np.asarray` reads all rows, up to 4 GiB.

    Attributes:
        tap: the name of the tap.
    """

    def __init__(self, dataset: TapSource, stored: StoredRows, tap: str) -> None:
        self.tap, self._dataset, self._stored = tap, dataset, stored

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._dataset.shape(self.tap))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which rows are read."""
        return self._dataset.dtype(self.tap)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all rows in memory."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: Any) -> np.ndarray:
        first, *rest = cast(tuple[Any, ...], key if isinstance(key, tuple) else (key,))
        if first is Ellipsis:
            first, rest = slice(None), [Ellipsis, *rest]
        if isinstance(first, slice):
            start, stop, step = first.indices(len(self))
            if step == 1:
                found = self._dataset.read(self.tap, start, max(start, stop))
            else:
                found = self._take(np.arange(start, stop, step))
            return found[(slice(None), *rest)] if rest else found
        if np.ndim(first):
            found = self._take(self._numbers(np.asarray(first)))
            return found[(slice(None), *rest)] if rest else found
        try:
            row = operator.index(first)
        except TypeError:
            raise IndexError(
                f"rows of {self.tap} are chosen by a number, a slice or an array of numbers or "
                f"booleans, not by {first!r}"
            ) from None
        (row,) = self._numbers(np.array([row])).tolist()
        return self._dataset.read(self.tap, row, row + 1)[(0, *rest)]

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), _TOGETHER):
            yield from self[start : start + _TOGETHER]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"the rows of {self.tap} are read from files, which makes a copy")
        refuse_if_large(self._dataset, self.tap, len(self), self.dtype)
        return np.asarray(self[:], dtype)

    def __repr__(self) -> str:
        shape = " x ".join(f"{length:,}" for length in self.shape)
        return f"<spile tap {self.tap}: {shape} in {self.dtype} of {self._dataset.url}>"

    def _numbers(self, chosen: np.ndarray) -> Rows:
        """Return row numbers, from 0, that numbers or booleans choose."""
        count = len(self)
        if chosen.dtype == np.bool_:
            if chosen.shape != (count,):
                raise IndexError(f"{chosen.shape} booleans do not choose among {count:,} rows")
            return np.flatnonzero(chosen)
        if chosen.ndim != 1 or not (chosen.dtype.kind in "iu" or not chosen.size):
            raise IndexError(
                f"row numbers are integers along one axis, not {chosen.dtype} of {chosen.shape}"
            )
        numbers = chosen.astype(np.int64)
        outside = (numbers < -count) | (numbers >= count)
        if outside.any():
            raise IndexError(f"{self.tap}: no row {numbers[outside][0]}; there are {count:,}")
        return np.where(numbers < 0, numbers + count, numbers)

    def _take(self, rows: Rows) -> np.ndarray:
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        order = np.argsort(rows, kind="stable")
        if np.array_equal(order, np.arange(len(order))):
            self._stored.take(self.tap, rows, out)
            return out
        ascending = np.empty_like(out)
        self._stored.take(self.tap, rows[order], ascending)
        out[order] = ascending
        return out


def refuse_if_large(dataset: TapSource, tap: str, rows: int, dtype: np.dtype[Any]) -> None:
    """Raise if so many rows of a tap are more than is read at once without a range.

    Raises:
        ConfigError: if they are, with what to write instead.
    """
    one = dataset.width(tap) * dtype.itemsize
    if rows * one > LARGEST:
        most = LARGEST // one
        raise ConfigError(
            f"{dataset.url}: {rows:,} rows of {tap} take {size(rows * one)}, and at most "
            f"{size(LARGEST)} are read at once unless you say which rows; read a part, as in "
            f"ds.read({tap!r}, 0, {most:_}), or all in pieces, as in "
            f"ds.batches({tap!r}, 4096, shuffle=False)"
        )

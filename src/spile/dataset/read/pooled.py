"""One row for each document: the mean or the maximum of its rows, the first or the last of them.

The dataset is read once, in stored order, so that neither its size nor its order matters. The rows
of a document lie in one unit, in any order, but in a shuffled dataset anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from spile.core.errors import ConfigError
from spile.core.options import listed
from spile.core.pool import is_reduced
from spile.dataset.codec.quantization import DECODED
from spile.dataset.read.choice import RowChoice
from spile.dataset.read.rows import Rows, StoredRows
from spile.dataset.read.tables import DocumentTables

_WINDOW_BYTES = 32 << 20  # of rows in float32, read at a time
_SCANNED = 1 << 20  # rows whose index is read at a time, and at least pooled together

PoolBy = Literal["mean", "last", "max", "first"]


class PooledRows:
    """One row for each document that has rows, in the order of the corpus.

    `pooled["label"]` is a column of the same documents: row i, label i and doc[i] belong together.

    Attributes:
        rows: [documents, width] in float32; with the axes of a row, if it has several.
        doc: the ordinals of the documents in the corpus, ascending.
        counts: how many rows were pooled for each.
    """

    def __init__(
        self, rows: np.ndarray, doc: Rows, counts: Rows, told: str, tables: DocumentTables
    ) -> None:
        """`told`: what the rows are, in words; `tables`: those of all documents."""
        self.rows, self.doc, self.counts = rows, doc, counts
        self._told, self._tables = told, tables

    def __getitem__(self, column: str) -> np.ndarray:
        """Return a kept column, or another of `Dataset.document_columns`: one value for each row.

        Texts are in an array of objects, and a missing number is NaN.
        """
        if not isinstance(column, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"pooled rows have columns by name: {listed(self._tables.columns)}; their rows are "
                f"`.rows`, as in pooled.rows[{column}]"
            )
        found = self._tables.arrays(["doc", column])
        return found[column][np.searchsorted(found["doc"], self.doc)]

    __iter__ = None  # (or Python would try pooled[0], pooled[1], …)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.rows, dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        shape = " x ".join(f"{size:,}" for size in self.rows.shape)
        columns = listed(self._tables.columns)
        return f"<spile pooled rows: {self._told}, {shape} in {self.rows.dtype}; columns {columns}>"


def pooled(
    stored: StoredRows,
    tables: DocumentTables,
    tap: str,
    by: PoolBy,
    choice: RowChoice | None,
) -> PooledRows:
    """Return one row for each document that has rows, or rows of the choice.

    Sums are in float64. Memory holds the result, and twice as much again for the documents of one
    unit (of a shuffled dataset: for all).
    """
    if by not in get_args(PoolBy):
        raise ConfigError(f"rows are pooled by 'mean', 'max', 'first' or 'last', not by {by!r}")
    if is_reduced(stored.table.recipe.pool):
        raise ConfigError(
            f"{stored.objects.url}: holds sums by label, not rows of documents; use "
            f"ds.reduced({tap!r})"
        )
    info = stored.table.taps[tap]
    ids = (
        info.storage.kind == "i" and not info.scaled_by and info.shape
    )  # (a rank alone is a number)
    if by in ("mean", "max") and (info.latents or ids):
        raise ConfigError(
            f"{tap}: place k of a row is its k-th largest, whichever that is, so that the {by} "
            "over rows has no meaning; pool by 'first' or 'last'"
        )
    groups = [_documents_in(stored, start, stop, choice) for start, stop in _ranges(stored)]
    doc = _joined([group.doc for group in groups])
    if choice is not None and not len(doc):
        raise ConfigError(f"where {choice.where!r}: matches no row of {stored.objects.url}")
    order = np.argsort(doc)
    places = np.argsort(order)  # of each document in the result
    rows = np.empty((len(doc), *info.shape), DECODED)
    done = 0
    for group in groups:
        part, done = places[done : done + len(group.doc)], done + len(group.doc)
        if by in ("mean", "max"):
            rows[part] = _reduced(stored, tap, by, choice, group)
        else:
            _take(stored, tap, group.first if by == "first" else group.last, part, rows)
    counts = _joined([group.counts for group in groups])[order]
    told = f"{by} of {tap}" + (f" where {choice.where}" if choice else "")
    return PooledRows(rows, doc[order], counts, told, tables)


@dataclass(frozen=True)
class _Documents:
    """The documents in a range of rows that has all of their rows.

    Attributes:
        doc: their ordinals, ascending.
        counts: how many rows were chosen of each.
        first: the chosen row of the smallest offset, and that offset.
        last: the same of the largest.
    """

    start: int
    stop: int
    doc: Rows
    counts: Rows
    first: Rows
    first_offset: Rows
    last: Rows
    last_offset: Rows

    @classmethod
    def merged(cls, start: int, stop: int, parts: Sequence[Sequence[Rows]]) -> "_Documents":
        """Merge parts, in which documents may occur several times: the fields from `doc` on."""
        each = [_joined([part[field] for part in parts]) for field in range(6)]
        doc, counts, first, first_offset, last, last_offset = each
        early, late = np.lexsort((first_offset, doc)), np.lexsort((last_offset, doc))
        begins = np.flatnonzero(np.diff(doc[early], prepend=-1))
        early, late = early[begins], late[np.append(begins[1:], len(doc))[: len(begins)] - 1]
        return cls(
            start,
            stop,
            doc[early],
            np.bincount(np.searchsorted(doc[early], doc), counts, len(early)).astype(np.int64),
            first[early],
            first_offset[early],
            last[late],
            last_offset[late],
        )

    @property
    def fields(self) -> tuple[Rows, ...]:
        return (
            self.doc,
            self.counts,
            self.first,
            self.first_offset,
            self.last,
            self.last_offset,
        )


def _ranges(stored: StoredRows) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that share no document: units, small ones together."""
    start = 0
    for stop in stored.starts[1:].tolist() if not stored.table.shuffled else [stored.count]:
        if stop > start and (stop - start >= _SCANNED or stop == stored.count):
            yield start, stop
            start = stop


def _documents_in(
    stored: StoredRows, start: int, stop: int, choice: RowChoice | None
) -> _Documents:
    """Return the documents in a range of rows, from the index alone."""
    parts: list[Sequence[Rows]] = []
    for low in range(start, stop, _SCANNED):
        rows, entries = _chosen(stored, low, min(low + _SCANNED, stop), choice)
        offset = entries["offset"].astype(np.int64)
        each = entries["doc"], np.ones(len(rows), np.int64), rows, offset, rows, offset
        parts.append(_Documents.merged(low, stop, [each]).fields)
    return _Documents.merged(start, stop, parts)


def _chosen(
    stored: StoredRows, start: int, stop: int, choice: RowChoice | None
) -> tuple[Rows, np.ndarray]:
    """Return the numbers of the chosen rows in a range, and their index entries."""
    entries, rows = stored.index(start, stop), np.arange(start, stop)
    if choice is None:
        return rows, entries
    mask = choice.mask(entries)
    return rows[mask], entries[mask]


def _reduced(
    stored: StoredRows, tap: str, by: str, choice: RowChoice | None, group: _Documents
) -> np.ndarray:
    """Return the mean or the maximum of each document's rows."""
    info = stored.table.taps[tap]
    window = _window(stored, tap)
    dtype, start = (np.float64, 0.0) if by == "mean" else (DECODED, -np.inf)
    found = np.full((len(group.doc), info.width), start, dtype)
    for low in range(group.start, group.stop, len(window)):
        rows, entries = _chosen(stored, low, min(low + len(window), group.stop), choice)
        stored.take(tap, rows, window[: len(rows)])
        values = window.reshape(len(window), info.width)
        # (A loop over runs of one document is eight times faster than `reduceat`.)
        begins = np.flatnonzero(np.diff(entries["doc"], prepend=-1))
        places = np.searchsorted(group.doc, entries["doc"][begins]).tolist()
        bounds = [*begins.tolist(), len(rows)]
        for place, first, last in zip(places, bounds, bounds[1:], strict=False):
            if by == "mean":
                found[place] += values[first:last].sum(axis=0, dtype=np.float64)
            else:
                np.maximum(found[place], values[first:last].max(axis=0), out=found[place])
    if by == "mean":
        found /= group.counts[:, None]
    return found.astype(DECODED).reshape(-1, *info.shape)


def _take(stored: StoredRows, tap: str, rows: Rows, places: Rows, out: np.ndarray) -> None:
    """Read rows in any order to their places in a buffer."""
    window, order = _window(stored, tap), np.argsort(rows)
    for low in range(0, len(rows), len(window)):
        part = order[low : low + len(window)]
        stored.take(tap, rows[part], window[: len(part)])
        out[places[part]] = window[: len(part)]


def _window(stored: StoredRows, tap: str) -> np.ndarray:
    info = stored.table.taps[tap]
    rows = max(1, _WINDOW_BYTES // (info.width * DECODED.itemsize))
    return np.empty((min(rows, stored.count), *info.shape), DECODED)


def _joined(parts: Sequence[Rows]) -> Rows:
    return np.concatenate([np.empty(0, np.int64), *parts])

"""Parquet files: cut by their footers alone, and read by row groups."""

# Strict, but for values that pyarrow, which has no types, leaves unknown.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spile.core.errors import InputError, first_line
from spile.core.units import Span
from spile.corpus.documents import OVERSIZED, Oversized
from spile.corpus.formats.columns import (
    UNREADABLE,
    columns_holding,
    kept_rows,
    leaf,
    rows_of,
    text_column,
    text_values,
    with_names,
)
from spile.corpus.formats.contract import UnitBuilder
from spile.corpus.formats.parquet_footer import checked_metadata
from spile.corpus.formats.tables import TEXT, TableFormat, TableRow
from spile.objects.paths import AnyPath

# Rows decoded at a time. So few that they fit in this much memory even if every value were as large
# as the whole column in the row group (a dictionary may store a value once for all rows).
_BATCH_BYTES = 512 << 20
_BATCH = range(4, 1025)
_MOST_BYTES = 256  # mean size of a value: columns of longer ones hold no labels
_AHEAD = 4 << 20  # bytes of a column: a row group is read while it is decoded, not at once


@contextmanager
def _opened(path: AnyPath, *, check: bool = False) -> Generator[pq.ParquetFile, None, None]:
    """Open a file; turn any error into a one-line InputError.

    `check` has the footer checked before anything else is read, for use when a corpus is cut.
    """
    try:
        metadata = checked_metadata(path) if check else None
        local = isinstance(path, Path)
        stream = path if local else pa.PythonFile(path.open("rb", buffering=0), mode="r")
        with pq.ParquetFile(
            stream, metadata=metadata, buffer_size=_AHEAD, pre_buffer=False
        ) as file:
            yield file
    except UNREADABLE as error:
        line = first_line(error)
        raise InputError(f"{path}: cannot read Parquet ({line}); is it whole?") from error


def _row_groups(file: pq.ParquetFile, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return (rows, decoded bytes of some columns) of each row group, from the footer alone."""
    groups: list[tuple[int, int]] = []
    for g in range(file.metadata.num_row_groups):
        chunks = _chunks(file, g)
        size = sum(c.total_uncompressed_size for c in chunks if _is_of(c.path_in_schema, names))
        groups.append((file.metadata.row_group(g).num_rows, size))
    return groups


def _chunks(file: pq.ParquetFile, number: int) -> list[Any]:
    """Return the column chunks of a row group."""
    group = file.metadata.row_group(number)
    return [group.column(c) for c in range(group.num_columns)]


def _is_of(leaf: str, names: Sequence[str]) -> bool:
    """Return whether a path belongs to one of these columns, or to a field of them."""
    return any(leaf == name or leaf.startswith(f"{name}.") for name in names)


def _is_oversized(rows: int, size: int, most: int) -> bool:
    """Return whether a column chunk is one value of more than `most` bytes, to be left unread."""
    # (The chunk holds the value, and maybe two more copies as its minimum and maximum.)
    return rows == 1 and size > 3 * most + _AHEAD


def _groups(file: pq.ParquetFile, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the row groups that hold some of the rows, and the range of rows in each."""
    row = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        low, high = max(first - row, 0), min(first + count - row, rows)
        if low < high:
            yield group, low, high
        row += rows


def _batches(
    file: pq.ParquetFile, groups: Sequence[tuple[int, int, int]], columns: list[str]
) -> Iterator[pa.RecordBatch]:
    """Yield only the chosen rows of row groups."""
    sizes = _row_groups(file, columns)
    for group, low, high in groups:
        position = 0
        rows = min(max(_BATCH_BYTES // max(1, sizes[group][1]), _BATCH[0]), _BATCH[-1])
        for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
            start, stop = max(low - position, 0), min(high - position, batch.num_rows)
            position += batch.num_rows
            if start < stop:
                yield batch.slice(start, stop - start)
            if position >= high:
                break


def _bounds(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return the minimum and maximum of columns in a row group, where the footer has them."""
    return {
        chunk.path_in_schema: (chunk.statistics.min, chunk.statistics.max)
        for chunk in _chunks(file, group)
        if chunk.path_in_schema in columns and chunk.statistics and chunk.statistics.has_min_max
    }


class ParquetFormat(TableFormat):
    """Parquet."""

    title = "Parquet"
    suffixes = (".parquet",)

    def schema(self) -> Any:
        with _opened(self.file.path) as file:
            return with_names(file.schema_arrow)

    def groups(self, builder: UnitBuilder | None = None) -> Iterator[tuple[Span, int]]:
        row, wanted = 0, self.options.text_column
        with _opened(self.file.path, check=True) as file:
            self.check(file.schema_arrow, builder)
            own = self.context.own_columns
            names = own or [text_column(self.file.path, file.schema_arrow, wanted)]
            groups = _row_groups(file, names)
        for rows, size in groups:
            yield Span(self.number, row, rows), size
            row += rows

    def texts(self, span: Span) -> Iterator[bytes | Oversized | None]:
        """Yield texts, reading only their row groups; `OVERSIZED` for those over the limit."""
        most = self.options.max_doc_bytes
        with _opened(self.file.path) as file:
            name = text_column(self.file.path, file.schema_arrow, self.options.text_column)
            sizes = _row_groups(file, [name])
            for group, low, high in _groups(file, span.first, span.count):
                if _is_oversized(*sizes[group], most):
                    yield OVERSIZED
                    continue
                for batch in _batches(file, [(group, low, high)], [name]):
                    yield from text_values(leaf(batch, name), most)

    def rows(self, span: Span) -> Iterator[TableRow]:
        """Yield rows; those that the statistics of their row group exclude are not read."""
        path, options, context = self.file.path, self.options, self.context
        with _opened(path) as file:
            found, filter = file.schema_arrow, options.filter
            text = None if context.rows else text_column(path, found, options.text_column)
            asked = columns_holding(path, found, (*context.own_columns, *context.filter_columns))
            kept = [name for name in options.read_besides if name in found.names]
            chosen = [*dict.fromkeys([*asked, *kept])]
            # (A field comes with its column if that is read anyway.)
            extra = [text] if text and not {text, text.split(".")[0]} & {*chosen} else []
            sizes = _row_groups(file, extra)
            for group, low, high in _groups(file, span.first, span.count):
                if filter and not filter.may_match(_bounds(file, group, filter.columns)):
                    yield from [(None, {})] * (high - low)
                    continue
                most = options.max_doc_bytes
                unread = bool(extra and chosen) and _is_oversized(*sizes[group], most)
                read = chosen if unread else [*chosen, *extra]
                for batch in _batches(file, [(group, low, high)], read):
                    rows = rows_of(batch.select(asked), self.arrays)
                    if text:
                        values = [OVERSIZED] if unread else text_values(leaf(batch, text), most)
                        rows = [{**row, TEXT: v} for row, v in zip(rows, values, strict=True)]
                    yield from zip(rows, kept_rows(path, batch, kept), strict=True)

    def scalar_columns(self) -> tuple[str, ...]:
        """Leave out columns of long values, by their mean size in the first non-empty row group."""
        names = super().scalar_columns()
        if not names:
            return ()
        with _opened(self.file.path, check=True) as file:
            rows = [rows for rows, _ in _row_groups(file, ())]
            first = next((g for g, count in enumerate(rows) if count), None)
            chunks = [] if first is None else _chunks(file, first)
            large = {
                chunk.path_in_schema
                for chunk in chunks
                if chunk.total_uncompressed_size > _MOST_BYTES * rows[first or 0]
            }
        return tuple(name for name in names if name not in large)

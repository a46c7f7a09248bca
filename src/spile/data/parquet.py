"""What Arrow reads for us: Parquet footers, the bytes of one column of strings, zstd streams."""

# pyright: standard
# pyarrow ships no types; what comes out of it is given one at this file's edge.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from spile.data.selection import ColumnFilter
from spile.errors import InputError
from spile.objects.files import AnyPath

TEXT = ""  # the text's key, where a row is read by columns

_BATCH = 1024  # rows decoded at a time
_AHEAD = 4 << 20  # of a column in a bucket: a row group is read as it is decoded, not at once


@contextmanager
def _opened(
    path: AnyPath, wanted: str | None, columns: Sequence[str] = ()
) -> Iterator[tuple[pq.ParquetFile, Sequence[str]]]:
    """The file and the columns, or its text column; whatever goes wrong with it is one line."""
    try:
        if isinstance(path, Path):
            file = pq.ParquetFile(path)
        else:
            stream = pa.PythonFile(path.open("rb", buffering=0), mode="r")
            file = pq.ParquetFile(stream, buffer_size=_AHEAD, pre_buffer=False)
        with file:
            yield file, columns or [_text_column(path, file, wanted)]
    except (pa.ArrowException, OSError) as error:
        line = str(error).splitlines()[0]
        raise InputError(f"{path}: cannot read Parquet ({line}); is it whole?") from error


def _text_column(path: AnyPath, file: pq.ParquetFile, wanted: str | None) -> str:
    """The one asked for, `text`, or the only column of strings."""
    strings = [f.name for f in file.schema_arrow if _is_text(f.type)]
    if wanted is None and "text" in strings:
        return "text"
    if wanted is None and len(strings) == 1:
        return strings[0]
    listed = ", ".join(strings) or "none"
    if wanted is None:
        raise InputError(
            f"{path}: which column is the text? Choose one with --text-column "
            f"(columns of strings: {listed})"
        )
    if wanted not in strings:
        raise InputError(
            f"{path}: --text-column {wanted!r} is not a column of strings there "
            f"(those are: {listed})"
        )
    return wanted


def row_groups(
    path: AnyPath, wanted: str | None, columns: Sequence[str] = ()
) -> list[tuple[int, int]]:
    """(rows, decoded bytes of the text column, or of some others) of each row group, from the
    footer alone."""
    with _opened(path, wanted, columns) as (file, names):
        return _row_groups(file, names)


def _row_groups(file: pq.ParquetFile, names: Sequence[str]) -> list[tuple[int, int]]:
    metadata = file.metadata
    groups: list[tuple[int, int]] = []
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        chunks = [group.column(c) for c in range(group.num_columns)]
        size = sum(
            c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in names
        )
        groups.append((group.num_rows, size))
    return groups


def read_texts(path: AnyPath, wanted: str | None, first: int, count: int) -> Iterator[bytes | None]:
    """Texts of `count` rows from row `first` on; only the row groups that hold them are read."""
    with _opened(path, wanted) as (file, names):
        for batch in _batches(file, list(_groups(file, first, count)), [names[0]]):
            yield from _values(batch.column(0))


def read_rows(
    path: AnyPath,
    wanted: str | None,
    columns: Sequence[str],
    first: int,
    count: int,
    *,
    filter: ColumnFilter | None,
    texts: bool,
) -> Iterator[dict[str, Any] | None]:
    """Rows as Python values; with `texts`, the text's bytes under `TEXT`.

    None stands for a row that the filter leaves out by what the footer says of its row group.
    """
    with _opened(path, wanted, columns if not texts else ()) as (file, names):
        text = names[0] if texts else None
        present = {field.name for field in file.schema_arrow}
        for name in columns:
            if name not in present:
                raise InputError(f"{path}: no column {name!r}; it has {', '.join(sorted(present))}")
        chosen = [*dict.fromkeys(columns)]
        if text and text not in chosen:
            chosen.append(text)
        for group, low, high in _groups(file, first, count):
            if filter and not filter.may_match(_bounds(file, group, filter.columns)):
                yield from [None] * (high - low)
                continue
            for batch in _batches(file, [(group, low, high)], chosen):
                rows = batch.select([*dict.fromkeys(columns)]).to_pylist()
                if text:
                    values = _values(batch.column(chosen.index(text)))
                    rows = [{**row, TEXT: v} for row, v in zip(rows, values, strict=True)]
                yield from rows


def _groups(file: pq.ParquetFile, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Row groups that hold some of the rows, and which of each."""
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
    """The chosen rows of row groups, and no other."""
    for group, low, high in groups:
        position = 0
        for batch in file.iter_batches(_BATCH, row_groups=[group], columns=columns):
            start, stop = max(low - position, 0), min(high - position, batch.num_rows)
            position += batch.num_rows
            if start < stop:
                yield batch.slice(start, stop - start)
            if position >= high:
                break


def _bounds(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The least and the greatest value of columns in a row group, where the footer says so."""
    found: dict[str, tuple[Any, Any]] = {}
    chunks = file.metadata.row_group(group)
    for number in range(chunks.num_columns):
        chunk = chunks.column(number)
        if chunk.path_in_schema in columns and chunk.statistics and chunk.statistics.has_min_max:
            found[chunk.path_in_schema] = (chunk.statistics.min, chunk.statistics.max)
    return found


def open_zstd(path: AnyPath) -> BinaryIO:
    """Decompressed bytes; unlike zstandard's reader, a file cut short is an error, not an end."""
    local = isinstance(path, Path)
    stream = pa.OSFile(str(path)) if local else pa.PythonFile(path.open("rb"), mode="r")
    return pa.CompressedInputStream(stream, "zstd")


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    known = (types.is_string, types.is_large_string, types.is_string_view,
             types.is_binary, types.is_large_binary)  # fmt: skip
    return any(is_kind(kind) for is_kind in known)


def _values(column: pa.Array) -> list[bytes | None]:
    # Through binary: Arrow promises that strings are UTF-8, files do not keep that promise.
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    return column.cast(pa.large_binary() if wide else pa.binary()).to_pylist()

"""What Arrow reads for us: Parquet footers, the bytes of one column of strings, zstd streams."""

# pyright: standard
# pyarrow ships no types; what comes out of it is given one at this file's edge.

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from spile.errors import InputError
from spile.objects.files import AnyPath

_BATCH = 1024  # rows decoded at a time
_AHEAD = 4 << 20  # of a column in a bucket: a row group is read as it is decoded, not at once


@contextmanager
def _opened(path: AnyPath, wanted: str | None) -> Iterator[tuple[pq.ParquetFile, str]]:
    """The file and the name of its text column; whatever goes wrong with it is one line."""
    try:
        if isinstance(path, Path):
            file = pq.ParquetFile(path)
        else:
            stream = pa.PythonFile(path.open("rb", buffering=0), mode="r")
            file = pq.ParquetFile(stream, buffer_size=_AHEAD, pre_buffer=False)
        with file:
            yield file, _text_column(path, file, wanted)
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


def row_groups(path: AnyPath, wanted: str | None) -> list[tuple[int, int]]:
    """(rows, decoded bytes of the text column) of each row group, from the footer alone."""
    with _opened(path, wanted) as (file, column):
        return _row_groups(file, column)


def _row_groups(file: pq.ParquetFile, column: str) -> list[tuple[int, int]]:
    metadata = file.metadata
    groups: list[tuple[int, int]] = []
    for g in range(metadata.num_row_groups):
        group = metadata.row_group(g)
        chunks = [group.column(c) for c in range(group.num_columns)]
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema == column)
        groups.append((group.num_rows, size))
    return groups


def read_rows(path: AnyPath, wanted: str | None, first: int, count: int) -> Iterator[bytes | None]:
    """Texts of `count` rows from row `first` on; only the row groups that hold them are read."""
    with _opened(path, wanted) as (file, column):
        groups: list[int] = []
        position = row = 0  # of the first row that will be decoded; of the group in hand
        for group, (rows, _) in enumerate(_row_groups(file, column)):
            if row + rows <= first:
                position = row + rows
            elif row < first + count:
                groups.append(group)
            row += rows
        for batch in file.iter_batches(_BATCH, row_groups=groups, columns=[column]):
            low = max(first - position, 0)
            high = min(first + count - position, batch.num_rows)
            position += batch.num_rows
            if high > low:
                yield from _values(batch.column(0).slice(low, high - low))
            if position >= first + count:
                return


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

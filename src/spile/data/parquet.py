"""What Arrow reads for us: Parquet footers, the bytes of one column of strings, zstd streams."""

# pyright: standard
# pyarrow ships no types; what comes out of it is given one at this file's edge.

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from spile.errors import InputError

_BATCH = 1024  # rows decoded at a time


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        line = str(error).splitlines()[0]
        raise InputError(f"{path}: cannot read Parquet ({line}); is it whole?") from error


def text_column(path: Path, wanted: str | None) -> str:
    """The text column: the one asked for, `text`, or the only column of strings."""
    with _open(path) as file:
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


def row_groups(path: Path, column: str) -> list[tuple[int, int]]:
    """(rows, decoded bytes of the column) of each row group, from the footer alone."""
    with _open(path) as file:
        metadata = file.metadata
        groups: list[tuple[int, int]] = []
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            chunks = [group.column(c) for c in range(group.num_columns)]
            size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema == column)
            groups.append((group.num_rows, size))
        return groups


def read_rows(path: Path, column: str, first: int, count: int) -> Iterator[bytes | None]:
    """Values of `count` rows from row `first` on; only the row groups that hold them are read."""
    groups: list[int] = []
    position = row = 0  # of the first row that will be decoded; of the group in hand
    for group, (rows, _) in enumerate(row_groups(path, column)):
        if row + rows <= first:
            position = row + rows
        elif row < first + count:
            groups.append(group)
        row += rows
    try:
        with _open(path) as file:
            for batch in file.iter_batches(_BATCH, row_groups=groups, columns=[column]):
                low = max(first - position, 0)
                high = min(first + count - position, batch.num_rows)
                position += batch.num_rows
                if high > low:
                    yield from _values(batch.column(0).slice(low, high - low))
                if position >= first + count:
                    return
    except (pa.ArrowException, OSError) as error:
        line = str(error).splitlines()[0]
        raise InputError(f"{path}: cannot read Parquet ({line}); is it whole?") from error


def open_zstd(path: Path) -> BinaryIO:
    """Decompressed bytes; unlike zstandard's reader, a file cut short is an error, not an end."""
    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    known = (types.is_string, types.is_large_string, types.is_string_view,
             types.is_binary, types.is_large_binary)  # fmt: skip
    return any(is_kind(kind) for is_kind in known)


def _values(column: pa.Array) -> list[bytes | None]:
    # Through binary: Arrow promises that strings are UTF-8, files do not keep that promise.
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    return column.cast(pa.large_binary() if wide else pa.binary()).to_pylist()

"""Arrow IPC files in both of their forms: where their record batches lie, and the rows of one.

Either form is a sequence of messages. The one called a file has its name before them and a table
of contents behind, which is not needed. Batches are found by their headers alone; the header of a
batch that is read must be what it was when the corpus was cut. Local files are mapped: whoever
wants a few rows of a large batch does not read the others.

The messages are walked here rather than by `pyarrow.ipc`, whose readers do not say where a batch
lies or what its header hashes to, which the unit table records; they read the bodies of remote
files to find the next header, and trust the sizes and the table of contents of a hostile one. One
message's schema and batch are left to `pyarrow.ipc`, and validated before anything is taken out.
"""

# pyright: standard
# pyarrow ships no types; what comes out of it is given one at this file's edge.

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from spile.core.errors import DataError, InputError
from spile.corpus.formats.columns import (
    UNREADABLE,
    ColumnKinds,
    check_columns,
    columns_holding,
    first_line,
    kept_rows,
    leaf,
    rows_of,
    text_column,
    with_names,
)
from spile.corpus.formats.parquet import TEXT
from spile.objects.paths import AnyPath

_MAGIC = b"ARROW1"
_PREFIX = struct.Struct("<Ii")  # a mark, and the length of the header that follows
_MARK = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MOST_HEADER = 64 << 20
_MOST_ROWS = (1 << 31) - 1  # of a batch; offsets have no more
_ROWS = 1024  # made into Python values at a time


@dataclass(frozen=True)
class RecordBatchPlace:
    """A record batch: its rows, its bytes, and where in the file it is."""

    rows: int
    size: int
    start: int
    stop: int
    digest: str  # of its header


@dataclass(frozen=True)
class _Message:
    kind: int
    rows: int
    start: int
    stop: int
    header: bytes


@contextmanager
def _refusing(path: AnyPath) -> Iterator[None]:
    """Whatever is wrong with a file is one line."""
    try:
        yield
    except UNREADABLE as error:
        line = first_line(error)
        raise InputError(f"{path}: cannot read Arrow IPC ({line}); is it whole?") from error


def schema(path: AnyPath) -> Any:
    """The names and types of its columns."""
    with _refusing(path), path.open("rb") as stream:
        return with_names(_schema(path, next(_messages(stream))))


def batches(
    path: AnyPath,
    wanted: str | None,
    columns: Sequence[str] = (),
    keep: Sequence[str] = (),
    *,
    also: Sequence[str] = (),
    known: ColumnKinds | None = None,
) -> Iterator[RecordBatchPlace]:
    """The record batches of a file that has the text column, or some others; as in Parquet."""
    with _refusing(path), path.open("rb") as stream:
        messages = _messages(stream)
        found = _schema(path, next(messages))
        check_columns(path, found, wanted, columns, keep, also=also, known=known)
        for each in messages:
            if each.kind == _DICTIONARY:
                raise ValueError("it holds dictionaries")
            if each.kind == _BATCH:
                digest = xxhash.xxh3_128_hexdigest(each.header)
                yield RecordBatchPlace(
                    each.rows, each.stop - each.start, each.start, each.stop, digest
                )


def read_rows(
    path: AnyPath,
    wanted: str | None,
    columns: Sequence[str],
    batch: RecordBatchPlace,
    first: int,
    count: int,
    *,
    texts: bool,
    ids: str | None,
    keep: Sequence[str] = (),
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """`count` rows of a batch from its row `first` on, as Python values; and what is kept of each.

    With `texts`, the text's bytes are under `TEXT`; the column `ids` is of arrays.
    """
    with _refusing(path):
        found = schema(path)
        names, text = _chosen(path, found, wanted, columns, texts=texts)
        kept = [name for name in keep if name in found.names]
        data = _bytes(path, batch.start, batch.stop)
        header = data[_PREFIX.size : _PREFIX.size + _PREFIX.unpack(data[: _PREFIX.size])[1]]
        if xxhash.xxh3_128_hexdigest(header) != batch.digest:
            raise DataError(
                f"{path}: changed since the unit table was made (the record batch at byte "
                f"{batch.start}); restore the file or use another --out"
            )
        whole = pa.ipc.read_record_batch(pa.ipc.read_message(data), found)
        whole.validate()  # or else a slice of it may end the process
        for start in range(first, first + count, _ROWS):
            part = whole.slice(start, min(_ROWS, first + count - start))
            others = part.select([*dict.fromkeys([*names, *(k for k in kept if k != text)])])
            others.validate(full=True)  # what it says of itself need not be so
            rows = rows_of(others.select(names), ids)
            if text is not None:
                for row, value in zip(rows, _texts(leaf(part, text)), strict=True):
                    row[TEXT] = value
            yield from zip(rows, kept_rows(path, part, kept), strict=True)


def _messages(stream: BinaryIO) -> Iterator[_Message]:
    """All of them, up to the mark of their end; bodies are passed over."""
    size = stream.seek(0, 2)
    stream.seek(0)
    position = 8 if stream.read(len(_MAGIC)) == _MAGIC else 0
    first = True
    while True:
        stream.seek(position)
        mark, length = _PREFIX.unpack(stream.read(_PREFIX.size))
        if mark != _MARK:
            raise ValueError("a message does not begin as they do")
        if length == 0 and not first:
            return
        if not 0 < length <= min(_MOST_HEADER, size - position):
            raise ValueError("a message is longer than the file")
        header = stream.read(length)
        kind, rows, body = _parsed(header)
        stop = position + _PREFIX.size + length + body
        if stop > size or first is not (kind == _SCHEMA):
            raise ValueError("a message is cut short, or out of place")
        yield _Message(kind, rows, position, stop, header)
        position, first = stop, False


def _parsed(header: bytes) -> tuple[int, int, int]:
    """Kind, rows and bytes of the body, from the flatbuffer that says so."""
    message = _number(header, "<I", 0)
    kind = _field(header, message, 1)
    content = _field(header, message, 2)
    length = _field(header, message, 3)
    if kind is None or content is None:
        raise ValueError("a message says nothing of itself")
    of_kind = _number(header, "<B", kind)
    body = 0 if length is None else _number(header, "<q", length)
    rows = 0
    if of_kind == _BATCH:
        at = _field(header, content + _number(header, "<I", content), 0)
        rows = 0 if at is None else _number(header, "<q", at)
    if body < 0 or not 0 <= rows <= _MOST_ROWS:
        raise ValueError("a message has a size that cannot be")
    return of_kind, rows, body


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer's table is; None: it has its default."""
    names = table - _number(data, "<i", table)
    place = 4 + 2 * number
    if place >= _number(data, "<H", names):
        return None
    offset = _number(data, "<H", names + place)
    return table + offset if offset else None


def _number(data: bytes, form: str, at: int) -> int:
    if at < 0:  # which struct would count from the end
        raise ValueError("a message points out of itself")
    return struct.unpack_from(form, data, at)[0]


def _schema(path: AnyPath, first: _Message) -> pa.Schema:
    data = _PREFIX.pack(_MARK, len(first.header)) + first.header
    found = pa.ipc.read_schema(pa.py_buffer(data))
    for field in found:
        if pa.types.is_dictionary(field.type):
            raise InputError(
                f"{path}: column {field.name!r} is dictionary-encoded, which is not read; write "
                "it plain"
            )
    return found


def _chosen(
    path: AnyPath, found: pa.Schema, wanted: str | None, columns: Sequence[str], *, texts: bool
) -> tuple[list[str], str | None]:
    """Columns that are read, and of them that of the text."""
    names = columns_holding(path, found, columns)
    return names, text_column(path, found, wanted) if texts else None


def _bytes(path: AnyPath, start: int, stop: int) -> pa.Buffer:
    if not isinstance(path, Path):
        return pa.py_buffer(path.read_range(start, stop))
    with pa.memory_map(str(path)) as file:
        file.seek(start)
        data = file.read_buffer(stop - start)
    if data.size < stop - start:
        raise ValueError("it became shorter")
    return data


def _texts(column: pa.Array) -> list[bytes | None]:
    # As bytes: Arrow promises that strings are UTF-8, files do not keep that promise.
    raw = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    column = column.view(raw.get(column.type, column.type))
    column.validate(full=True)
    return column.to_pylist()

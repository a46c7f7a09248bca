"""Arrow IPC files and streams: find their record batches, and read the rows of one.

Both forms are a sequence of messages. A file also has a magic string before them and a table of
contents after them, which is not needed. Batches are found by their headers alone; when a batch is
read, its header must be the same as when the corpus was cut. Local files are memory-mapped, so that
reading a few rows of a large batch does not read the others.

This module walks the messages itself because the readers of `pyarrow.ipc` do not give the place of
a batch or the bytes of its header, which the unit table records. They also read the bodies of
remote files to find the next header, and trust the sizes and the table of contents of a hostile
file. Decoding the schema and one batch is left to `pyarrow.ipc`; both are validated before use.
"""

# Strict, but for values that pyarrow, which has no types, leaves unknown.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from spile.core.errors import DataError, InputError, first_line
from spile.core.units import Span
from spile.corpus.formats.columns import (
    UNREADABLE,
    columns_holding,
    kept_rows,
    leaf,
    rows_of,
    text_column,
    with_names,
)
from spile.corpus.formats.contract import UnitBuilder
from spile.corpus.formats.tables import TEXT, TableFormat, TableRow
from spile.objects.paths import AnyPath

_MAGIC = b"ARROW1"
_PREFIX = struct.Struct("<Ii")  # a marker, and the length of the header that follows
_MARK = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MOST_HEADER = 64 << 20
_MOST_ROWS = (1 << 31) - 1  # most rows in a batch; offsets cannot express more
_ROWS = 1024  # rows converted to Python values at a time


@dataclass(frozen=True)
class _Message:
    kind: int
    rows: int
    start: int
    stop: int
    header: bytes


@contextmanager
def _refusing(path: AnyPath) -> Generator[None, None, None]:
    """Turn any error about a file into a one-line InputError."""
    try:
        yield
    except UNREADABLE as error:
        line = first_line(error)
        raise InputError(f"{path}: cannot read Arrow IPC ({line}); is it whole?") from error


def _messages(stream: BinaryIO) -> Iterator[_Message]:
    """Yield all messages up to the end marker; bodies are skipped."""
    size = stream.seek(0, 2)
    stream.seek(0)
    position = 8 if stream.read(len(_MAGIC)) == _MAGIC else 0
    first = True
    while True:
        stream.seek(position)
        mark, length = _PREFIX.unpack(stream.read(_PREFIX.size))
        if mark != _MARK:
            raise ValueError("a message begins with the wrong bytes")
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
    """Return kind, rows and body size, from the flatbuffer of the header."""
    message = _number(header, "<I", 0)
    kind = _field(header, message, 1)
    content = _field(header, message, 2)
    length = _field(header, message, 3)
    if kind is None or content is None:
        raise ValueError("a message has no header")
    of_kind = _number(header, "<B", kind)
    body = 0 if length is None else _number(header, "<q", length)
    rows = 0
    if of_kind == _BATCH:
        at = _field(header, content + _number(header, "<I", content), 0)
        rows = 0 if at is None else _number(header, "<q", at)
    if body < 0 or not 0 <= rows <= _MOST_ROWS:
        raise ValueError("a message has an impossible size")
    return of_kind, rows, body


def _field(data: bytes, table: int, number: int) -> int | None:
    """Return the offset of a field of a flatbuffer table; None if it has its default."""
    names = table - _number(data, "<i", table)
    place = 4 + 2 * number
    if place >= _number(data, "<H", names):
        return None
    offset = _number(data, "<H", names + place)
    return table + offset if offset else None


def _number(data: bytes, form: str, at: int) -> int:
    if at < 0:  # struct would count from the end
        raise ValueError("a message has an impossible offset")
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
    # As bytes: Arrow requires strings to be UTF-8, but files may violate that.
    raw = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    column = column.view(raw.get(column.type, column.type))
    column.validate(full=True)
    return column.to_pylist()


class ArrowFormat(TableFormat):
    """Arrow IPC files and streams, as the `datasets` library caches them."""

    title = "Arrow"
    suffixes = (".arrow",)

    def schema(self) -> Any:
        path = self.file.path
        with _refusing(path), path.open("rb") as stream:
            return with_names(_schema(path, next(_messages(stream))))

    def groups(self, builder: UnitBuilder | None = None) -> Iterator[tuple[Span, int]]:
        row, path = 0, self.file.path
        with _refusing(path), path.open("rb") as stream:
            messages = _messages(stream)
            self.check(_schema(path, next(messages)), builder)
            for each in messages:
                if each.kind == _DICTIONARY:
                    raise ValueError("it holds dictionaries")
                if each.kind == _BATCH:
                    digest = xxhash.xxh3_128_hexdigest(each.header)
                    span = Span(self.number, row, each.rows, each.start, each.stop, digest)
                    yield span, each.stop - each.start
                    row += each.rows

    def rows(self, span: Span) -> Iterator[TableRow]:
        path, context = self.file.path, self.context
        with _refusing(path):
            found = self.schema()
            names = columns_holding(path, found, (*context.own_columns, *context.filter_columns))
            text = None if context.rows else text_column(path, found, self.options.text_column)
            kept = [name for name in self.options.read_besides if name in found.names]
            whole = self._batch(span, found)
            for start in range(span.before, span.before + span.count, _ROWS):
                part = whole.slice(start, min(_ROWS, span.before + span.count - start))
                others = part.select([*dict.fromkeys([*names, *(k for k in kept if k != text)])])
                others.validate(full=True)  # the file's own metadata may be false
                rows = rows_of(others.select(names), self.arrays)
                if text is not None:
                    for row, value in zip(rows, _texts(leaf(part, text)), strict=True):
                        row[TEXT] = value
                yield from zip(rows, kept_rows(path, part, kept), strict=True)

    def _batch(self, span: Span, schema: pa.Schema) -> pa.RecordBatch:
        """Return the record batch of a span; raise DataError if its header has changed."""
        data = _bytes(self.file.path, span.start, span.stop)
        header = data[_PREFIX.size : _PREFIX.size + _PREFIX.unpack(data[: _PREFIX.size])[1]]
        if xxhash.xxh3_128_hexdigest(header) != span.digest:
            raise DataError(
                f"{self.file.path}: changed since the unit table was made (the record batch at "
                f"byte {span.start}); restore the file or use another --out"
            )
        whole = pa.ipc.read_record_batch(pa.ipc.read_message(data), schema)
        whole.validate()  # otherwise a slice could crash the process
        return whole

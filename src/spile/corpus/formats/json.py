"""JSON: files with one object a line, and files that are one array of objects.

The elements of an array are found without holding the file in memory.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, ClassVar, NamedTuple, cast

import xxhash

from spile.core.errors import InputError
from spile.core.options import listed
from spile.core.threads import cancellation
from spile.core.units import Span
from spile.corpus.chats.messages import is_chat
from spile.corpus.documents import CorpusDocument, Documents, value_at
from spile.corpus.formats import byte_files
from spile.corpus.formats.byte_files import ByteFormat, line_ends, refuse_wide
from spile.corpus.formats.columns import chats_in, json_kind
from spile.corpus.formats.contract import UnitBuilder
from spile.corpus.select import FILTERED, TOO_LARGE

# The next bracket, brace or comma outside of texts; or the quote that opens a text which continues
# in the next chunk. Within an element commas do not matter.
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_MARK = re.compile(rb'(?:[^\[\]{},"]++|' + _TEXT + rb')*+([\[\]{},"])', re.DOTALL)
_BRACKET = re.compile(rb'(?:[^\[\]{}"]++|' + _TEXT + rb')*+([\[\]{}"])', re.DOTALL)
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # inside a text, up to its end
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_BEFORE = 1 << 20  # bytes of white space before the array
_HEAD = 1 << 16  # bytes in which to find the first row
_READ_SIZE = 1 << 22
_KEY_BYTES = 8192  # longest key and the white space after it, more than --filter can name


class JsonPiece(NamedTuple):
    """An element, or a part of one that is too large to hold."""

    start: int  # in the file
    data: bytes
    ends: bool  # whether this completes the element

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


def pieces(where: str, chunks: Iterator[bytes], whole: int) -> Iterator[JsonPiece]:
    """Yield the elements of the single array in a file, in order.

    An element of more than `whole` bytes comes in several pieces; only the last one `ends`.
    """
    buffer, base = b"", 0  # unprocessed bytes, and their offset in the file
    depth, inside = 0, False  # open brackets; whether a text is open
    at = begun = 0  # scanned so far, and where the part not yet yielded begins
    some = solid = False  # whether there was any element, and any part of this one
    for chunk in chunks:
        buffer += chunk
        while at < len(buffer):
            if inside:
                found = _INSIDE.match(buffer, at)
                assert found
                at = found.end()
                if at == len(buffer) or buffer[at] != ord('"'):
                    break  # the text, or an escape, continues in the next chunk
                at, inside = at + 1, False
            mark = (_BRACKET if depth > 1 else _MARK).match(buffer, at)
            if mark is None:
                at = len(buffer)
                break
            token, at = mark[1], mark.end()
            if depth == 0:
                if token != b"[" or buffer[: at - 1].removeprefix(_BOM).strip(_SPACE):
                    raise _no_array_error(where)
                begun, depth = at, 1
            elif token == b'"':
                inside = True
            elif token in b"[{":
                depth += 1
            elif token in b"]}":
                depth -= 1
            ends = depth == 0 and token == b"]"
            if ends or (depth == 1 and token == b","):
                data = buffer[begun : at - 1]
                if solid or data.strip(_SPACE):
                    yield JsonPiece(base + begun, data, ends=True)
                    some = True
                elif not ends or some:
                    raise InputError(f"{where}: an element is missing before byte {base + at}")
                begun, solid = at, False
            if ends:
                if buffer[at:].strip(_SPACE) or any(rest.strip(_SPACE) for rest in chunks):
                    raise InputError(f"{where}: something follows the array")
                return
        if depth == 0:
            if len(buffer) > _BEFORE:
                raise _no_array_error(where)
            continue
        if solid or at - begun > whole:
            data = buffer[begun:at]
            solid = solid or bool(data.strip(_SPACE))
            yield JsonPiece(base + begun, data, ends=False)
            begun = at
        buffer, base, at, begun = buffer[begun:], base + begun, at - begun, 0
    raise InputError(f"{where}: holds no JSON array, or it does not end; is the file whole?")


def _no_array_error(where: str) -> InputError:
    return InputError(f"{where}: holds no JSON array (one row a line is .jsonl)")


class _JsonFormat(ByteFormat):
    """What both formats of JSON share: rows are objects, or texts."""

    row: ClassVar[str]  # what a row is called in messages

    def check_first(self, builder: UnitBuilder, row: bytes) -> None:
        """Check the types in the first row against earlier files; ignore parse errors."""
        try:
            record = json.loads(row or b"null")
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict):
            fields = cast(dict[str, Any], record)
            names = (*self.context.text_or_own_columns, *self.context.filter_columns)
            kinds = {name: json_kind(value_at(fields, name)) for name in names}
            builder.known.check(str(self.file.path), kinds)

    def head(self) -> bytes:
        with self.file.open() as stream:
            return self.file.read(stream, _HEAD).removeprefix(_BOM).lstrip()

    def check_sample(self, sampled: Documents) -> None:
        """Refuse a key that no sampled record has: it is a wrong column, not a corpus of nulls."""
        if sampled.usable or not sampled.skipped["null"]:
            return
        records = [document.columns for document in sampled.every if document.columns]
        keys = sorted({key for record in records for key in record})
        chats = [key for key in keys if any(is_chat(record.get(key)) for record in records)]
        rows = self.context.rows
        for column in self.context.text_or_own_columns:
            if column not in keys and column.partition(".")[0] not in keys:
                flag = rows.flag if rows else "--text-column"
                choose = "" if rows else chats_in(chats, keys)
                raise InputError(
                    f"{self.file.path}: no key {column!r} in its first {self.row}s; they "
                    f"have {listed(keys)}: {choose or f'choose one with {flag}'}"
                )

    def may_have(self, column: str) -> bool:
        """Return whether any object has this key, at any depth; reads the whole file, unparsed."""
        # (Quotes within a text are escaped, so none looks like a key.)
        spellings = {json.dumps(column, ensure_ascii=ascii).encode() for ascii in (True, False)}
        pattern = re.compile(rb"(?:" + b"|".join(map(re.escape, spellings)) + rb")\s*:")
        tail = b""
        with self.file.open() as stream:
            while data := self.file.read(stream, _READ_SIZE):
                cancellation().check()
                data = tail + data
                if pattern.search(data):
                    return True
                tail = data[-_KEY_BYTES:]
        return False

    def documents(self, rows: Iterable[bytes | None], first: int) -> Iterator[CorpusDocument]:
        for number, row in enumerate(rows, first + 1):
            if row is None or len(row) > self.options.max_doc_bytes:
                yield CorpusDocument(skipped=TOO_LARGE)
            elif not row.strip():
                yield CorpusDocument(skipped="empty")
            else:
                yield self._document(f"{self.file.path} {self.row} {number}", row)

    def _document(self, where: str, row: bytes) -> CorpusDocument:
        try:
            # (Files that were joined leave marks; one before a row belongs to no text.)
            record = json.loads(row.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError:
            return CorpusDocument(skipped="not UTF-8")
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}); fix or remove that line") from None
        context = self.context
        if isinstance(record, str) and not (context.own_columns or context.filter_columns):
            return CorpusDocument.of_text(record)
        if not isinstance(record, dict):
            raise InputError(f"{where}: not a JSON object")
        keys = cast(dict[str, Any], record)
        column = self.options.text_column or "text"
        value = None if context.rows else value_at(keys, column)
        if value is not None and not isinstance(value, str):
            other = chats_in([column]) if is_chat(value) else "choose another --text-column"
            raise InputError(f"{where}: {column!r} holds {type(value).__name__}, not text; {other}")
        if context.excludes(keys):
            return CorpusDocument(skipped=FILTERED, columns=keys)
        if context.rows:
            return CorpusDocument(row=(where, keys), columns=keys)
        return CorpusDocument.of_text(value, keys)


class JsonLinesFormat(_JsonFormat):
    """JSON, one object a line."""

    title = "JSONL"
    suffixes = (".jsonl", ".ndjson")
    row = "line"

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        self.check_first(builder, self.head().partition(b"\n")[0])
        self.cut_bytes(builder, self.chunks(), line_ends, first, byte)

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        return self.documents(self.lines(span), span.first)

    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        lines, size = self.sampled_lines()
        return self.documents(lines, 0), size


class JsonArrayFormat(_JsonFormat):
    """JSON, one array of objects."""

    title = "JSON"
    suffixes = (".json",)
    gives_way = 2
    row = "element"

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        """Cut the array from element `first` on, in one pass."""
        self.check_first(builder, self._first_row())
        before, count, start, stop = first, 0, 0, 0  # elements to pass; the span being collected
        digest, begins = xxhash.xxh3_128(), True

        def close() -> None:
            span = Span(self.number, first, count, start, stop, digest.hexdigest())
            builder.add(span, stop - start)

        for piece in self._pieces(self.chunks(), byte_files.CHUNK):
            if before:
                before -= piece.ends
                continue
            if begins and not count:
                start, digest = piece.start, xxhash.xxh3_128()
            elif begins:
                digest.update(b",")
            digest.update(piece.data)
            begins = piece.ends
            if not piece.ends:
                continue
            stop, count = piece.stop, count + 1
            if stop - start >= builder.room or count >= builder.docs_left:
                close()
                first, count = first + count, 0
                if builder.full:
                    return
        if count:
            close()

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        return self.documents(self._elements(span), span.first)

    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        with self.file.open() as stream:
            data = self.file.read(stream, byte_files.SAMPLE_BYTES)
            refuse_wide(self.file.path, data)
            rest = iter(partial(self.file.read, stream, _READ_SIZE), b"")
            pieces = self._pieces(chain([data], rest), _READ_SIZE)
            # (An element in pieces is not representative, and may be the rest of the file.)
            first = islice(pieces, byte_files.SAMPLE_ROWS)
            some = list(takewhile(lambda piece: piece.ends, first))
        rows = [piece.data for piece in some]
        return self.documents(rows, 0), some[-1].stop if some else 0

    def _pieces(self, chunks: Iterator[bytes], whole: int) -> Iterator[JsonPiece]:
        return pieces(str(self.file.path), chunks, whole)

    def _first_row(self) -> bytes:
        """Return the first element, or the part of it in the head; empty if that is no array."""
        try:
            return next((piece.data for piece in self._pieces(iter([self.head()]), _HEAD)), b"")
        except InputError:
            return b""  # whoever reads the whole file refuses it

    def _elements(self, span: Span) -> Iterator[bytes | None]:
        """Yield the elements of a span; None for one over --max-doc-bytes, which is not held."""
        # A span begins and ends with an element.
        data = chain([b"["], self.bytes_of(span), [b"]"])
        begins = True
        for piece in self._pieces(data, self.options.max_doc_bytes):
            if piece.ends:
                yield piece.data if begins else None
            begins = piece.ends

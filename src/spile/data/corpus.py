"""The documents of a range of a file.

A document's ordinal counts every row or line of the corpus, usable or not, so that it can be known
without parsing. Documents that cannot be used (empty, null, not UTF-8) are counted by reason.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, BinaryIO, cast

import xxhash

from spile.config import MAX_DOC_BYTES
from spile.data import parquet
from spile.data.corpus_files import CorpusFile, Span
from spile.data.document import Document
from spile.data.program import Program
from spile.data.reading import Chats, Reading, Roles, Text, Unusable, of_program
from spile.data.selection import FILTERED, ColumnFilter, Selection
from spile.data.source import Range, Source
from spile.errors import DataError, InputError

_READ_SIZE = 1 << 22
_SAMPLE_BYTES = 1 << 18
_SAMPLE_ROWS = 256
TOO_LARGE = "over --max-doc-bytes"
DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Documents:
    """The usable documents of a unit, with their ordinals in the corpus."""

    ordinals: list[int]
    texts: list[str]
    skipped: Counter[str]
    roles: list[Roles] = field(default_factory=list[Roles])  # of each text; empty where it is plain

    def digest(self) -> str:
        """A hash of exactly what was read; stored with the unit."""
        digest = xxhash.xxh3_128()
        for ordinal, text in zip(self.ordinals, self.texts, strict=True):
            data = text.encode()
            digest.update(f"{ordinal} {len(data)}\n".encode() + data)
        return digest.hexdigest()


class CorpusReader:
    """Reads spans of a list of files; keeps a stream open where the next span continues it."""

    def __init__(
        self,
        files: list[CorpusFile],
        text_column: str | None,
        text_documents: str,
        *,
        reading: Reading | None = None,
        filter: ColumnFilter | None = None,
        selection: Selection | None = None,
        max_doc_bytes: int = MAX_DOC_BYTES,
    ) -> None:
        """`reading`: makes documents of rows that are not plain texts."""
        self.files = files
        self._column, self._mode = text_column, text_documents
        self._reading, self._filter = reading, filter
        self._selection = selection or Selection()
        self._max_doc_bytes = max_doc_bytes
        self._stream: tuple[int, int, BinaryIO] | None = None  # file, offset, stream
        self._source: Source | None = None  # of a program, of which a corpus has just one
        if reading or filter:
            flag = "--filter" if not reading else "--messages and --prompt-column"
            for file in files:
                if file.kind == "text":
                    raise InputError(f"{file.path}: plain text has no columns, which {flag} need")

    def close(self) -> None:
        if self._stream:
            self._stream[2].close()
        if self._source:
            self._source.close()
        self._stream = self._source = None

    def read(
        self, spans: tuple[Span, ...], first_ordinal: int, skip: Collection[int] = ()
    ) -> Documents:
        """All usable documents of some spans, in order, but those to skip."""
        found = Documents([], [], Counter())
        ordinal, skipped = first_ordinal, {*skip}
        for span in spans:
            stop = ordinal + span.count
            for document in self._chosen(self._documents(span)):
                again = ordinal in skipped and isinstance(document, Text)
                self._add(found, ordinal, DUPLICATE if again else document)
                ordinal += 1
            if ordinal != stop:
                raise DataError(
                    f"{self.files[span.file].path}: changed since the unit table was made (holds "
                    f"fewer documents); restore the file or use another --out"
                )
        return found

    def _add(self, found: Documents, ordinal: int, document: Text | str) -> None:
        if isinstance(document, str):
            found.skipped[document] += 1
            return
        found.ordinals.append(ordinal)
        found.texts.append(document.text)
        found.roles.append(document.roles)

    def _chosen(self, documents: Iterable[Text | str]) -> Iterator[Text | str]:
        """Documents that are asked for; of others, and of what is none, the reason."""
        for document in documents:
            if isinstance(document, Text):
                if len(document.text) > self._max_doc_bytes // 4 and (
                    len(document.text.encode()) > self._max_doc_bytes
                ):
                    yield TOO_LARGE
                    continue
                yield self._selection.refuses_text(document.text) or document
            else:
                yield document

    def sample(self, file: int) -> tuple[Documents, int]:
        """Documents from a file's head, and the bytes they took in the file's own measure
        (those of the columns in Parquet, of the rows elsewhere).

        What a hash would leave out is in it: it is about size.
        """
        source = self.files[file]
        if source.program:
            documents, size = self.opened(source.program).sample()
            return self._collected([self._of_program(source, d) for d in documents]), size
        if source.kind == "parquet":
            rows = size = 0
            for count, each in parquet.row_groups(source.path, self._column, self._own_columns()):
                taken = min(count, _SAMPLE_ROWS - rows)
                rows, size = rows + taken, size + each * taken // max(1, count)
            return self._collected(list(self._documents(Span(file, 0, rows)))), size
        with source.open() as stream:
            data = source.read(stream, _SAMPLE_BYTES)
            if source.kind == "json":
                first = source.elements(chain([data], _rest(source, stream)))
                some = list(islice(first, _SAMPLE_ROWS))
                rows = [element.data for element in some]
                size = some[-1].stop if some else 0
                return self._collected(list(self._parsed(source, rows, 0))), size
        if len(data) == _SAMPLE_BYTES:
            data = data[: data.rfind(b"\n") + 1]  # a line longer than the sample teaches nothing
        lines = [data] if self._is_whole(source) else data.split(b"\n")[: count_lines(data)]
        found = self._collected(list(self._parsed(source, lines, 0)))
        if source.kind == "jsonl" and not found.texts and found.skipped["null"]:
            self._refuse_without_key(source, data)
        return found, len(data)

    def _collected(self, documents: list[Text | str]) -> Documents:
        found = Documents([], [], Counter())
        for document in documents:
            self._add(found, len(found.ordinals), document)
        return found

    def _own_columns(self) -> tuple[str, ...]:
        """What documents are made of; if nothing is named, the text column, found in each file."""
        return self._reading.columns if self._reading else ()

    def _columns(self) -> tuple[str, ...]:
        """What is read of a row."""
        return (*self._own_columns(), *(self._filter.columns if self._filter else ()))

    def _refuse_without_key(self, source: CorpusFile, data: bytes) -> None:
        """A key that no sampled record has is a wrong column, not a corpus of nulls."""
        columns = self._reading.columns if self._reading else (self._column or "text",)
        lines = data.decode("utf-8", "replace").removeprefix("\ufeff").split("\n")
        records = [json.loads(line) for line in lines if line.strip()]
        keys = sorted({str(key) for record in records for key in record})
        for column in columns:
            if column not in keys:
                flag = self._reading.flag if self._reading else "--text-column"
                raise InputError(
                    f"{source.path}: no key {column!r} in its first {len(records)} lines; they "
                    f"have {', '.join(keys)}: choose one with {flag}"
                )

    def _documents(self, span: Span) -> Iterator[Text | str]:
        source = self.files[span.file]
        if source.program:
            wanted = Range(span.first, span.count, span.stop, span.digest)
            documents = self.opened(source.program).read(wanted)
            return (self._of_program(source, document) for document in documents)
        if source.kind == "parquet":
            return self._of_parquet(source, span)
        if source.kind == "json":
            return self._parsed(source, self._elements(source, span), span.first)
        return self._parsed(source, self._lines(source, span), span.first)

    def _of_parquet(self, source: CorpusFile, span: Span) -> Iterator[Text | str]:
        columns = self._columns()
        if not columns:
            for value in parquet.read_texts(source.path, self._column, span.first, span.count):
                yield "null" if value is None else _decoded(value)
            return
        for number, row in enumerate(
            parquet.read_rows(
                source.path, self._column, columns, span.first, span.count,
                filter=self._filter, texts=not self._reading,
            ),
            span.first,
        ):  # fmt: skip
            yield FILTERED if row is None else self._of_row(f"{source.path} row {number}", row)

    def opened(self, program: Program) -> Source:
        if self._source is None:
            messages = self._reading.columns[0] if isinstance(self._reading, Chats) else None
            self._source = program.open(self._column, messages)
        return self._source

    def _of_program(self, source: CorpusFile, document: Document) -> Text | str:
        if self._filter and not self._filter.matches(document.metadata):
            return FILTERED
        return self._made(str(source.path), lambda: of_program(document, self._reading))

    def _made(self, where: str, make: Callable[[], Text]) -> Text | str:
        """A text that can be read, or why it cannot."""
        try:
            made = make()
            made.text.encode("utf-8")
        except Unusable as reason:
            return str(reason)
        except UnicodeEncodeError:
            return "not UTF-8"
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        return made

    def _of_row(self, where: str, row: Mapping[str, Any]) -> Text | str:
        if self._filter and not self._filter.matches(row):
            return FILTERED
        if self._reading is None:
            value = row[parquet.TEXT]
            return "null" if value is None else _decoded(value)
        return self._made(where, partial(self._reading.document, row))

    # -- rows of bytes -----------------------------------------------------------------------

    def _is_whole(self, source: CorpusFile) -> bool:
        return source.kind == "text" and self._mode == "file"

    def _chunks(self, source: CorpusFile, span: Span) -> Iterator[bytes]:
        """The bytes of a span, which must be those that were there when the table was made."""
        if self._stream and self._stream[0] == span.file and self._stream[1] <= span.start:
            _, offset, stream = self._stream
        else:
            self.close()
            offset, stream = 0, source.open()
        # Should the reading stop midway, the stream is of no more use, but must be closed.
        self._stream = (span.file, 1 << 62, stream)
        if not source.compression:
            offset = stream.seek(span.start)
        while offset < span.start and (
            skipped := source.read(stream, min(_READ_SIZE, span.start - offset))
        ):
            offset += len(skipped)
        digest = xxhash.xxh3_128()
        while offset < span.stop and (
            data := source.read(stream, min(_READ_SIZE, span.stop - offset))
        ):
            offset += len(data)
            digest.update(data)
            yield data
        self._stream = (span.file, offset, stream)
        if digest.hexdigest() != span.digest:
            raise DataError(
                f"{source.path}: changed since the unit table was made (bytes {span.start} to "
                f"{span.stop}); restore the file or use another --out"
            )

    def _lines(self, source: CorpusFile, span: Span) -> Iterator[bytes | None]:
        """Lines; None for one that is too large, which is never held."""
        ends = b"" if self._is_whole(source) else b"\n"
        held, size, made = list[bytes](), 0, 0

        def line() -> bytes | None:
            nonlocal held, size, made
            whole = None if size > self._max_doc_bytes else b"".join(held)
            held, size, made = [], 0, made + 1
            return whole

        for data in self._chunks(source, span):
            *lines, rest = data.split(ends) if ends else [data]
            for piece in lines:
                held.append(piece)
                size += len(piece)
                yield line()
            size += len(rest)
            held = [*held, rest] if size <= self._max_doc_bytes else []
        if made < span.count:
            yield line()

    def _elements(self, source: CorpusFile, span: Span) -> Iterator[bytes]:
        # A span begins with an element and ends with one.
        data = chain([b"["], self._chunks(source, span), [b"]"])
        return (element.data for element in source.elements(data))

    def _parsed(
        self, source: CorpusFile, rows: Iterable[bytes | None], first: int
    ) -> Iterator[Text | str]:
        for number, row in enumerate(rows, first + 1):
            if row is None or len(row) > self._max_doc_bytes:
                yield TOO_LARGE
            elif source.kind == "text":
                yield _decoded(row if self._is_whole(source) else row.removesuffix(b"\r"))
            else:
                yield self._of_json(source, row, number)

    def _of_json(self, source: CorpusFile, row: bytes, number: int) -> Text | str:
        if not row.strip():
            return "empty"
        where = f"{source.path} {'line' if source.kind == 'jsonl' else 'element'} {number}"
        try:
            record = json.loads(row.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError:
            return "not UTF-8"
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}); fix or remove that line") from None
        if isinstance(record, str) and not self._columns():
            return _usable(record)
        if not isinstance(record, dict):
            raise InputError(f"{where}: not a JSON object")
        keys = cast(dict[str, Any], record)
        if self._reading is None:
            column = self._column or "text"
            value = keys.get(column)
            if value is not None and not isinstance(value, str):
                raise InputError(
                    f"{where}: {column!r} holds {type(value).__name__}, not text; "
                    "choose another --text-column"
                )
            if self._filter and not self._filter.matches(keys):
                return FILTERED
            return _usable(value)
        return self._of_row(where, keys)


def count_lines(data: bytes) -> int:
    """Lines in some bytes; the last needs no newline, and nothing after a newline is no line."""
    return data.count(b"\n") + (1 if data and not data.endswith(b"\n") else 0)


def _rest(source: CorpusFile, stream: BinaryIO) -> Iterator[bytes]:
    while data := source.read(stream, _READ_SIZE):
        yield data


def _decoded(data: bytes) -> Text | str:
    try:
        return _usable(data.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError:
        return "not UTF-8"


def _usable(text: str | None) -> Text | str:
    if text is None:
        return "null"
    if not text.strip():
        return "empty"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, as JSON escapes can spell
        return "not UTF-8"
    return Text(text)

"""The documents of a range of a file.

A document's ordinal counts every row or line of the corpus, usable or not, so that it can be known
without parsing. Documents that cannot be used (empty, null, not UTF-8) are counted by reason.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, BinaryIO, cast

import numpy as np
import xxhash

from spile.core.config import MAX_DOC_BYTES
from spile.core.errors import DataError, InputError
from spile.corpus.about import About, Names
from spile.corpus.chats.pool import RenderPool, Row, can_render, made_at
from spile.corpus.chats.rows import (
    Chats,
    Reading,
    Roles,
    Text,
    decoded,
    of_program,
    of_value,
    usable,
)
from spile.corpus.files import CorpusFile, Span
from spile.corpus.formats import arrow, parquet
from spile.corpus.formats.columns import value_at
from spile.corpus.formats.text import Streams
from spile.corpus.formats.token_ids import TokenIds
from spile.corpus.programs.program import Program, ProgramDocument, ProgramSource, Range
from spile.corpus.select import FILTERED, TOO_LARGE, ColumnFilter, Selection

_READ_SIZE = 1 << 22
_SAMPLE_BYTES = 1 << 18
_SAMPLE_ROWS = 256
DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Documents:
    """The usable documents of a unit, with their ordinals in the corpus."""

    ordinals: list[int]
    texts: list[str]
    skipped: Counter[str]
    roles: list[Roles] = field(default_factory=list[Roles])  # of each text; empty where it is plain
    about: About = field(default_factory=About, compare=False)  # of every document, usable or not
    ids: list[np.ndarray] = field(default_factory=list[np.ndarray])  # where they came so: no texts

    def digest(self) -> str:
        """A hash of exactly what was read; stored with the unit."""
        digest = xxhash.xxh3_128()
        for ordinal, data in zip(self.ordinals, self.contents(), strict=True):
            digest.update(f"{ordinal} {len(data)}\n".encode() + data)
        return digest.hexdigest()

    def contents(self) -> Iterator[bytes]:
        """What documents are told apart by: their texts, or their ids."""
        return (i.tobytes() for i in self.ids) if self.ids else (t.encode() for t in self.texts)


class CorpusReader:
    """Reads spans of a list of files."""

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
        keep: tuple[str, ...] = (),
        preview: int = 0,
        processes: int = 0,
    ) -> None:
        """Args:
        reading: makes documents of rows that are not plain texts, with so many `processes`.
        keep: columns, and `preview` characters of the text, that are kept of each document.
        """
        self.files = files
        self._column, self._mode = text_column, text_documents
        self._reading, self._filter = reading, filter
        self._selection = selection or Selection()
        self._max_doc_bytes = max_doc_bytes
        self._keep, self._preview = keep, preview
        self._about = About()  # the documents in hand
        self._streams = Streams(files)
        self._source: ProgramSource | None = None  # of a program, of which a corpus has just one
        self._processes = processes if can_render(reading) else 0
        self._pool: RenderPool | None = None
        if reading or filter:
            flag = "--filter" if filter else reading.flag if reading else ""
            for file in files:
                if file.kind == "text" or (file.kind == "bin" and filter):
                    raise InputError(f"{file.path}: such a file has no columns, as {flag} needs")

    def close(self) -> None:
        self._streams.close()
        if self._source:
            self._source.close()
        if self._pool:
            self._pool.close()
        self._source = self._pool = None

    def read(
        self, spans: tuple[Span, ...], first_ordinal: int, skip: Collection[int] = ()
    ) -> Documents:
        """All usable documents of some spans, in order, but those to skip."""
        about = self._about = About(self._keep, self._preview)
        found = Documents([], [], Counter(), about=about)
        ordinal, skipped = first_ordinal, {*skip}
        for span in spans:
            ordinal = ordinal if span.doc is None else span.doc
            stop = ordinal + span.count
            for document in self._chosen(self._documents(span)):
                if ordinal == stop:
                    about.forget()  # the span was cut short; its bytes are still to be compared
                    continue
                again = ordinal in skipped and isinstance(document, Text)
                document = DUPLICATE if again else document
                about.add(ordinal, document if isinstance(document, str) else None)
                self._add(found, ordinal, document)
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
        if document.ids is not None:
            found.ids.append(document.ids)

    def _chosen(self, documents: Iterable[Text | str]) -> Iterator[Text | str]:
        """Documents that are asked for; of others, and of what is none, the reason."""
        for document in documents:
            if isinstance(document, Text):
                self._about.saw_text(document.text)
                yield self._refusal(document) or document
            else:
                yield document

    def _refusal(self, document: Text) -> str:
        size = len(document.text) if document.ids is None else document.ids.nbytes
        if size > self._max_doc_bytes // 4 and len(document.content) > self._max_doc_bytes:
            return TOO_LARGE
        by_hash = self._selection.by_hash
        return self._selection.refuses_content(document.content) if by_hash else ""

    def sample(self, file: int) -> tuple[Documents, int]:
        """Documents from a file's head, and the bytes they took in the file's own measure
        (those of the columns in Parquet, of the rows elsewhere).

        What a hash would leave out is in it: it is about size.
        """
        source = self.files[file]
        if source.program:
            documents, size = self.opened(source.program).sample()
            return self._collected([self._of_program(source, d) for d in documents]), size
        if source.is_table:
            left, size, documents = _SAMPLE_ROWS, 0, list[Text | str]()
            for group, each in source.groups(file, self._column, self._own_columns()):
                part = group.part(0, min(group.count, left))
                documents += self._documents(part)
                left, size = left - part.count, size + each * part.count // max(1, group.count)
                if not left:
                    break
            return self._collected(documents), size
        with source.open() as stream:
            data = source.read(stream, _SAMPLE_BYTES)
            if source.kind == "json":
                first = source.pieces(chain([data], _rest(source, stream)), _READ_SIZE)
                # (One that comes in pieces teaches nothing, and may be the rest of the file.)
                some = list(takewhile(lambda piece: piece.ends, islice(first, _SAMPLE_ROWS)))
                rows = [piece.data for piece in some]
                size = some[-1].stop if some else 0
                return self._collected(self._rendered(self._parsed(source, rows, 0))), size
        if source.kind == "bin":
            return self._collected(self._of_array(source, [data], 0, 0)), len(data)
        if len(data) == _SAMPLE_BYTES:
            data = data[: data.rfind(b"\n") + 1]  # a line longer than the sample teaches nothing
        lines = [data] if self._is_whole(source) else data.split(b"\n")[: count_lines(data)]
        found = self._collected(self._rendered(self._parsed(source, lines, 0)))
        if source.kind == "jsonl" and not found.texts and found.skipped["null"]:
            self._refuse_without_key(source, data)
        return found, len(data)

    def columns_of(self, file: int) -> list[str]:
        """The columns of a file; where rows have keys, those of its first rows."""
        if self.files[file].is_table:
            return self.files[file].schema().names
        self._about = names = Names()
        self.sample(file)
        return [*names.found]

    def _collected(self, documents: Iterable[Text | str]) -> Documents:
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
            if column not in keys and column.partition(".")[0] not in keys:
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
            return self._about.noted(self._of_program(source, each) for each in documents)
        if source.is_table:
            return self._rendered(self._of_table(source, span))
        if source.kind == "bin":
            return self._rendered(
                self._of_array(source, self._streams.read(span), span.start, span.first)
            )
        most = self._max_doc_bytes
        if source.kind == "json":
            rows = self._streams.elements(span, most)
        else:
            rows = self._streams.lines(span, most, whole=self._is_whole(source))
        return self._rendered(self._parsed(source, rows, span.first))

    def _rendered(self, found: Iterable[Text | str | Row]) -> Iterator[Text | str]:
        """With the documents of rows that are left to other processes, in the same order."""
        if self._reading and self._processes and not self._pool:
            self._pool = RenderPool(self._reading, self._processes)
        found = self._about.noted(found)
        if self._pool:
            return self._pool.documents(found)
        return (self._made(*item) if isinstance(item, tuple) else item for item in found)

    def _of_table(self, source: CorpusFile, span: Span) -> Iterator[Text | str | Row]:
        columns, texts = self._columns(), not self._reading
        ids = self._reading.column if isinstance(self._reading, TokenIds) else None
        if source.kind == "arrow":
            batch = arrow.RecordBatchPlace(span.count, 0, span.start, span.stop, span.digest)
            rows = arrow.read_rows(
                source.path, self._column, columns, batch, span.before, span.count,
                texts=texts, ids=ids, keep=self._keep,
            )  # fmt: skip
        elif not columns and not self._keep:
            for value in parquet.read_texts(
                source.path, self._column, span.first, span.count, self._max_doc_bytes
            ):
                yield of_value(value)
            return
        else:
            rows = parquet.read_rows(
                source.path, self._column, columns, span.first, span.count,
                filter=self._filter, texts=texts, most=self._max_doc_bytes, ids=ids,
                keep=self._keep,
            )  # fmt: skip
        for number, (row, kept) in enumerate(rows, span.first):
            self._about.saw_row(kept)
            yield FILTERED if row is None else self._of_row(f"{source.path} row {number}", row)

    def _of_array(
        self, source: CorpusFile, pieces: Iterable[bytes], start: int, first: int
    ) -> Iterator[Text | str]:
        assert isinstance(self._reading, TokenIds) and self._reading.flat
        whole = self._reading.flat.checked(source.path, pieces)
        documents = self._reading.flat.documents(whole, start, self._max_doc_bytes)
        for number, ids in enumerate(documents, first):
            if ids is None:
                yield TOO_LARGE
                continue
            where = f"{source.path} document {number}"
            yield made_at(where, partial(self._reading.of_ids, ids))

    def opened(self, program: Program) -> ProgramSource:
        if self._source is None:
            messages = self._reading.columns[0] if isinstance(self._reading, Chats) else None
            self._source = program.open(self._column, messages)
        return self._source

    def _of_program(self, source: CorpusFile, document: ProgramDocument) -> Text | str:
        self._about.saw_row(document.metadata)
        if self._filter and not self._filter.matches(document.metadata):
            return FILTERED
        return made_at(str(source.path), lambda: of_program(document, self._reading))

    def _made(self, where: str, row: Mapping[str, Any]) -> Text | str:
        assert self._reading
        return made_at(where, partial(self._reading.document, row))

    def _of_row(self, where: str, row: Mapping[str, Any]) -> Text | str | Row:
        """A row that is to be rendered is left as it is."""
        if self._filter and not self._filter.matches(row):
            return FILTERED
        if self._reading is None:
            return of_value(row[parquet.TEXT])
        return where, row

    # -- rows of bytes -----------------------------------------------------------------------

    def _is_whole(self, source: CorpusFile) -> bool:
        return source.kind == "text" and self._mode == "file"

    def _parsed(
        self, source: CorpusFile, rows: Iterable[bytes | None], first: int
    ) -> Iterator[Text | str | Row]:
        for number, row in enumerate(rows, first + 1):
            if row is None or len(row) > self._max_doc_bytes:
                yield TOO_LARGE
            elif source.kind == "text":
                yield decoded(row if self._is_whole(source) else row.removesuffix(b"\r"))
            else:
                yield self._of_json(source, row, number)

    def _of_json(self, source: CorpusFile, row: bytes, number: int) -> Text | str | Row:
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
            return usable(record)
        if not isinstance(record, dict):
            raise InputError(f"{where}: not a JSON object")
        keys = cast(dict[str, Any], record)
        self._about.saw_row(keys)
        if self._reading is None:
            column = self._column or "text"
            value = value_at(keys, column)
            if value is not None and not isinstance(value, str):
                raise InputError(
                    f"{where}: {column!r} holds {type(value).__name__}, not text; "
                    "choose another --text-column"
                )
            if self._filter and not self._filter.matches(keys):
                return FILTERED
            return usable(value)
        return self._of_row(where, keys)


def count_lines(data: bytes) -> int:
    """Lines in some bytes; the last needs no newline, and nothing after a newline is no line."""
    return data.count(b"\n") + (1 if data and not data.endswith(b"\n") else 0)


def _rest(source: CorpusFile, stream: BinaryIO) -> Iterator[bytes]:
    while data := source.read(stream, _READ_SIZE):
        yield data

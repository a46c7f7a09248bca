"""Read the documents of a range of a file, one record each.

A document's ordinal counts every row or line of the corpus, usable or not, so that it is known
without parsing. Documents that cannot be used (empty, null, not UTF-8) are counted by reason.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, BinaryIO, cast

from spile.core.config import MAX_DOC_BYTES
from spile.core.errors import DataError, InputError
from spile.core.expressions import DocumentFilter
from spile.core.options import listed
from spile.core.units import Span
from spile.corpus.chats.pool import RenderPool, made_at
from spile.corpus.chats.rows import Chats, Pairs, RowReader, of_program, template_of
from spile.corpus.documents import CorpusDocument, Documents
from spile.corpus.files import CorpusFile
from spile.corpus.formats import arrow, parquet
from spile.corpus.formats.columns import chats_in, is_chat, text_column, value_at
from spile.corpus.formats.csv import (
    CsvHeader,
    RecordEnds,
    read_header,
    records,
    refusing,
    typed,
    values,
)
from spile.corpus.formats.text import Streams, count_lines, refuse_wide
from spile.corpus.formats.token_ids import TokenIds
from spile.corpus.programs.program import Program, ProgramDocument, ProgramSource, Range
from spile.corpus.select import FILTERED, TOO_LARGE, Selection
from spile.objects.paths import size_of

_READ_SIZE = 1 << 22
_SAMPLE_BYTES = 1 << 18
_SAMPLE_ROWS = 256
_LINES = ("jsonl", "text")
_LONGEST_LINE = 1 << 20  # longest line to read for a sample, in bytes
DUPLICATE = "duplicate"
MOST_CHARACTERS = 1 << 28  # limit on the kept characters of a unit's documents


@dataclass(frozen=True)
class ReadOptions:
    """What to read of a corpus, and how.

    Attributes:
        text_column: the column of the text; None: try the usual names.
        text_documents: the document of a text file: `line` or `file`.
        keep: columns to keep of each document.
        preview: how many characters of each text to keep.
    """

    text_column: str | None = None
    text_documents: str = "line"
    filter: DocumentFilter | None = None
    selection: Selection = Selection()
    max_doc_bytes: int = MAX_DOC_BYTES
    keep: tuple[str, ...] = ()
    preview: int = 0


class CorpusReader:
    """Reads spans of a list of files."""

    def __init__(
        self,
        files: list[CorpusFile],
        options: ReadOptions | None = None,
        *,
        reading: RowReader | None = None,
        processes: int = 1,
    ) -> None:
        """Args:
        reading: makes documents from rows that are not plain texts.
        processes: number of processes that render chats, besides this one.
        """
        self.files = files
        self.options = options = options or ReadOptions()
        self._reading = reading
        self._streams = Streams(files)
        self._headers: dict[CorpusFile, CsvHeader | None] = {}  # of CSV files
        self._source: ProgramSource | None = None  # the program, if the corpus is one
        template = template_of(reading)
        self._pool = RenderPool(template, processes) if template else None
        if reading or options.filter:
            flag = "--filter" if options.filter else reading.flag if reading else ""
            for file in files:
                if file.kind == "text" or (file.kind == "bin" and options.filter):
                    raise InputError(f"{file.path}: such a file has no columns, as {flag} needs")

    def close(self) -> None:
        self._streams.close()
        if self._source:
            self._source.close()
        if self._pool:
            self._pool.close()
        self._source = None

    def read(
        self, spans: tuple[Span, ...], first_ordinal: int, skip: Collection[int] = ()
    ) -> Documents:
        """Return all documents of some spans, in order; those in `skip` count as duplicates."""
        options, found = self.options, list[CorpusDocument]()
        ordinal, repeated, characters = first_ordinal, {*skip}, 0
        for span in spans:
            ordinal = ordinal if span.doc is None else span.doc
            stop = ordinal + span.count
            for document in self._documents(span):
                if ordinal == stop:
                    continue  # the span was cut short; its remaining bytes must still be hashed
                document.ordinal = ordinal
                document.keep(options.keep, options.preview)
                if document.skipped is None and (reason := self._refusal(document, repeated)):
                    document.skip(reason)
                found.append(document)
                characters += (
                    document.characters if self.options.keep or self.options.preview else 0
                )
                if characters > MOST_CHARACTERS:
                    raise InputError(
                        f"what is kept of documents {found[0].ordinal} to {ordinal} is more than "
                        f"{MOST_CHARACTERS >> 20} million characters, too much for one unit: keep "
                        "fewer columns with --keep, or a shorter --preview"
                    )
                ordinal += 1
            if ordinal != stop:
                raise DataError(
                    f"{self.files[span.file].path}: changed since the unit table was made (holds "
                    f"fewer documents); restore the file or use another --out"
                )
        return Documents(found, options.keep)

    def _refusal(self, document: CorpusDocument, repeated: Collection[int]) -> str:
        """Return why a document is refused by its size or its content; empty if it is not."""
        size = len(document.text) if document.ids is None else document.ids.nbytes
        if (
            size > self.options.max_doc_bytes // 4
            and len(document.content) > self.options.max_doc_bytes
        ):
            return TOO_LARGE
        if self.options.selection.by_hash and (
            reason := self.options.selection.refuses_content(document.content)
        ):
            return reason
        return DUPLICATE if document.ordinal in repeated else ""

    def sample(self, file: int, *, render: bool = True) -> tuple[Documents, int]:
        """Return documents from a file's head, and their size in bytes in the file.

        The size counts the columns in Parquet, and the rows elsewhere. The sample includes
        documents that a hash would exclude, since it serves to estimate sizes. Chats become texts
        only with `render`.
        """
        source = self.files[file]
        if source.program:
            documents, size = self.opened(source.program).sample()
            found = [self._of_program(str(source.path), each) for each in documents]
            return self._collected(self._rendered(found, render)), size
        if source.is_table:
            left, size, documents = _SAMPLE_ROWS, 0, list[CorpusDocument]()
            for group, each in source.groups(file, self.options.text_column, self._own_columns()):
                part = group.part(0, min(group.count, left))
                documents += self._rendered(self._of_table(source, part), render)
                left, size = left - part.count, size + each * part.count // max(1, group.count)
                if not left:
                    break
            return self._collected(documents), size
        with source.open() as stream:
            data = source.read(stream, _SAMPLE_BYTES)
            refuse_wide(source, data)
            if source.is_csv:
                return self._sample_of_csv(source, data, stream, render)
            whole = self._is_whole(source)
            # A first line longer than the sample is read to its end, up to a limit.
            while b"\n" not in data and len(data) < _LONGEST_LINE and not whole:
                more = source.read(stream, _SAMPLE_BYTES) if source.kind in _LINES else b""
                if not more:
                    break
                data += more
            if source.kind == "json":
                first = source.pieces(
                    chain([data], iter(partial(source.read, stream, _READ_SIZE), b"")), _READ_SIZE
                )
                # (An element in pieces is not representative, and may be the rest of the file.)
                some = list(takewhile(lambda piece: piece.ends, islice(first, _SAMPLE_ROWS)))
                rows = [piece.data for piece in some]
                size = some[-1].stop if some else 0
                found = self._collected(self._rendered(self._parsed(source, rows, 0), render))
                self._refuse_without_key(source, found)
                return found, size
        if source.kind == "bin":
            return self._collected(self._of_array(source, [data], 0, 0)), len(data)
        if len(data) >= (_SAMPLE_BYTES if whole or b"\n" in data else _LONGEST_LINE):
            data = data[: data.rfind(b"\n") + 1]  # the rest is a partial line
        lines = [data] if whole else data.split(b"\n")[: count_lines(data)]
        found = self._collected(self._rendered(self._parsed(source, lines, 0), render))
        if source.kind == "jsonl":
            self._refuse_without_key(source, found)
        return found, len(data)

    def _sample_of_csv(
        self, source: CorpusFile, data: bytes, stream: BinaryIO, render: bool
    ) -> tuple[Documents, int]:
        """Return a sample from the first bytes of a file; the stream continues after them."""
        header = self._header(source)
        if header is None:
            return Documents([]), 0
        ends, found = RecordEnds(source.delimiter), list[int]()
        with refusing(source):
            while True:
                found = ends(data[header.stop :], header.stop).tolist()
                if found or len(data) >= _LONGEST_LINE:
                    break
                more = source.read(stream, _SAMPLE_BYTES)
                if not more:
                    found = [len(data)]
                    break
                data += more
                ends = RecordEnds(source.delimiter)
            stop = found[-1] if found else header.stop
            if len(data) < _SAMPLE_BYTES:  # the whole file
                stop = len(data)
            rows = records([data[header.stop : stop]], source.delimiter, len(data), header.stop)
            documents = self._collected(self._rendered(self._of_csv(source, rows, 0), render))
        return documents, stop - header.stop

    def times_longer(self, file: int, taken: int) -> float:
        """Return the ratio of a whole text file, read as one document, to `taken` bytes of it.

        It is 1 if files hold several documents, or if the file is compressed.
        """
        source = self.files[file]
        if not self._is_whole(source) or source.compression or not taken:
            return 1.0
        return max(1.0, size_of(source.path) / taken)

    def columns_of(self, file: int) -> list[str]:
        """Return the columns of a file; if rows have keys, those of its first rows."""
        source = self.files[file]
        if source.is_table:
            return source.schema().names
        if source.is_csv:
            header = self._header(source)
            return [name for name in header.columns if name] if header else []
        documents, _ = self.sample(file, render=False)
        rows = [document.columns or {} for document in documents.every]
        return [*dict.fromkeys(name for row in rows for name in row)]

    def made_of(self, file: int) -> set[str]:
        """Return the columns that documents are made from."""
        source, wanted = self.files[file], self.options.text_column
        if self._reading:
            return {*self._reading.columns}
        if source.is_table:
            return {text_column(source.path, source.schema(), wanted)}
        if source.is_csv:
            header = self._header(source)
            return {header.text_column(source, wanted)} if header else set()
        return {wanted or "text"}

    def _collected(self, documents: Iterable[CorpusDocument]) -> Documents:
        found = [*documents]
        ordinal = 0
        for document in found:
            document.ordinal = ordinal
            ordinal += document.skipped is None
        return Documents(found)

    def _own_columns(self) -> tuple[str, ...]:
        """Return the columns documents are made from; empty for the text column of each file."""
        return self._reading.columns if self._reading else ()

    def _columns(self) -> tuple[str, ...]:
        """Return the columns to read of a row."""
        return (*self._own_columns(), *(self.options.filter.columns if self.options.filter else ()))

    def _refuse_without_key(self, source: CorpusFile, sampled: Documents) -> None:
        """Refuse a key that no sampled record has: it is a wrong column, not a corpus of nulls."""
        if sampled.usable or not sampled.skipped["null"]:
            return
        columns = self._reading.columns if self._reading else (self.options.text_column or "text",)
        records = [document.columns for document in sampled.every if document.columns]
        keys = sorted({key for record in records for key in record})
        chats = [key for key in keys if any(is_chat(record.get(key)) for record in records)]
        for column in columns:
            if column not in keys and column.partition(".")[0] not in keys:
                flag = self._reading.flag if self._reading else "--text-column"
                choose = (
                    f"choose one with {flag}" if self._reading or not chats else chats_in(chats)
                )
                rows = "lines" if source.kind == "jsonl" else "elements"
                raise InputError(
                    f"{source.path}: no key {column!r} in its first {rows}; they "
                    f"have {listed(keys)}: {choose}"
                )

    # -- from a file's rows to documents -----------------------------------------------------

    def _documents(self, span: Span) -> Iterator[CorpusDocument]:
        """Yield documents with all columns of their rows, before selection by content."""
        source = self.files[span.file]
        if source.program:
            wanted = Range(span.first, span.count, span.stop, span.digest)
            documents = self.opened(source.program).read(wanted)
            return self._rendered(
                self._of_program(f"{source.path} document {number}", each)
                for number, each in enumerate(documents, span.first)
            )
        if source.is_table:
            return self._rendered(self._of_table(source, span))
        if source.kind == "bin":
            return self._of_array(source, self._streams.read(span), span.start, span.first)
        most = self.options.max_doc_bytes
        if source.is_csv:
            found = records(self._streams.read(span), source.delimiter, most, span.start)
            return self._rendered(self._of_csv(source, found, span.first))
        if source.kind == "json":
            rows = self._streams.elements(span, most)
        else:
            rows = self._streams.lines(span, most, whole=self._is_whole(source))
        return self._rendered(self._parsed(source, rows, span.first))

    def _rendered(
        self, found: Iterable[CorpusDocument], render: bool = True
    ) -> Iterator[CorpusDocument]:
        """Make texts from rows; chats are rendered by other processes."""
        if self._reading is None:
            return iter(found)
        made = map(self._made, found)
        return self._pool.documents(made) if self._pool and render else made

    def _made(self, document: CorpusDocument) -> CorpusDocument:
        if document.row is None:
            return document
        assert self._reading
        where, row = document.row
        made = made_at(where, partial(self._reading.document, row))
        return made.with_columns(document.columns)

    def _of_table(self, source: CorpusFile, span: Span) -> Iterator[CorpusDocument]:
        options, columns, texts = self.options, self._columns(), not self._reading
        ids = self._reading.column if isinstance(self._reading, TokenIds) else None
        if source.kind == "arrow":
            batch = arrow.RecordBatchPlace(span.count, 0, span.start, span.stop, span.digest)
            rows = arrow.read_rows(
                source.path,
                options.text_column,
                columns,
                batch,
                span.before,
                span.count,
                texts=texts,
                ids=ids,
                keep=options.keep,
            )
        elif not columns and not options.keep:
            yield from map(
                CorpusDocument.of_bytes,
                parquet.read_texts(
                    source.path, options.text_column, span.first, span.count, options.max_doc_bytes
                ),
            )
            return
        else:
            rows = parquet.read_rows(
                source.path,
                options.text_column,
                columns,
                span.first,
                span.count,
                filter=options.filter,
                texts=texts,
                most=options.max_doc_bytes,
                ids=ids,
                keep=options.keep,
            )
        for number, (row, kept) in enumerate(rows, span.first):
            if row is None:
                yield CorpusDocument(skipped=FILTERED)
            else:
                yield self._of_row(f"{source.path} row {number}", row).with_columns(kept)

    def _of_array(
        self, source: CorpusFile, pieces: Iterable[bytes], start: int, first: int
    ) -> Iterator[CorpusDocument]:
        assert isinstance(self._reading, TokenIds) and self._reading.flat
        whole = self._reading.flat.checked(source.path, pieces)
        documents = self._reading.flat.documents(whole, start, self.options.max_doc_bytes)
        for number, ids in enumerate(documents, first):
            if ids is None:
                yield CorpusDocument(skipped=TOO_LARGE)
                continue
            where = f"{source.path} document {number}"
            yield made_at(where, partial(self._reading.of_ids, ids))

    def opened(self, program: Program) -> ProgramSource:
        if self._source is None:
            reading = self._reading
            messages = reading.columns[0] if isinstance(reading, Chats) else None
            pair = reading.columns if isinstance(reading, Pairs) else ()
            self._source = program.open(self.options.text_column, messages, pair)
        return self._source

    def _of_program(self, where: str, given: ProgramDocument) -> CorpusDocument:
        columns = {**given.metadata, **given.pair}
        if self.options.filter and not self.options.filter.matches(columns):
            return CorpusDocument(skipped=FILTERED, columns=columns)
        made = made_at(where, lambda: of_program(given, self._reading))
        return made.with_columns(columns)

    def _header(self, source: CorpusFile) -> CsvHeader | None:
        if source not in self._headers:
            self._headers[source] = read_header(source)
        return self._headers[source]

    def _of_csv(
        self, source: CorpusFile, rows: Iterable[tuple[int, bytes | None]], first: int
    ) -> Iterator[CorpusDocument]:
        """Yield documents from records, each given with its offset in the file."""
        header = self._header(source)
        assert header
        text = None if self._reading else header.text_column(source, self.options.text_column)
        with refusing(source):
            for number, (offset, row) in enumerate(rows, first + 1):
                if row is None or len(row) > self.options.max_doc_bytes:
                    yield CorpusDocument(skipped=TOO_LARGE)
                elif not row.strip():
                    yield CorpusDocument(skipped="empty")
                else:
                    where = f"{source.path} record {number}"
                    yield self._of_record(where, source, header, row, offset, text)

    def _of_record(
        self,
        where: str,
        source: CorpusFile,
        header: CsvHeader,
        row: bytes,
        offset: int,
        text: str | None,
    ) -> CorpusDocument:
        """Make a document from a record; `text` is the text column, if it holds a plain text."""
        try:
            record = row.decode("utf-8")
        except UnicodeDecodeError:
            return CorpusDocument(skipped="not UTF-8")
        found = values(record, header.columns, source.delimiter, offset)
        kept = {name: typed(found.get(name)) for name in self.options.keep or found if name}
        if text is None:
            return self._of_row(where, found, untyped=True).with_columns(kept)
        if self.options.filter and not self.options.filter.matches(found, untyped=True):
            return CorpusDocument(skipped=FILTERED, columns=kept)
        return CorpusDocument.of_text(found[text] or "", kept)

    def _of_row(
        self, where: str, row: Mapping[str, Any], *, untyped: bool = False
    ) -> CorpusDocument:
        """Filter a row, which may still need rendering; `untyped`: all its values are texts."""
        if self.options.filter and not self.options.filter.matches(row, untyped=untyped):
            return CorpusDocument(skipped=FILTERED)
        if self._reading is None:
            return CorpusDocument.of_bytes(row[parquet.TEXT])
        return CorpusDocument(row=(where, row))

    def _is_whole(self, source: CorpusFile) -> bool:
        return source.kind == "text" and self.options.text_documents == "file"

    def _parsed(
        self, source: CorpusFile, rows: Iterable[bytes | None], first: int
    ) -> Iterator[CorpusDocument]:
        """Yield documents from lines, or from the elements of a JSON array."""
        for number, row in enumerate(rows, first + 1):
            if row is None or len(row) > self.options.max_doc_bytes:
                yield CorpusDocument(skipped=TOO_LARGE)
            elif source.kind == "text":
                text = row if self._is_whole(source) else row.removesuffix(b"\r")
                yield CorpusDocument.of_bytes(text, cut_mark=number == 1)
            else:
                yield self._of_json(source, row, number)

    def _of_json(self, source: CorpusFile, row: bytes, number: int) -> CorpusDocument:
        if not row.strip():
            return CorpusDocument(skipped="empty")
        where = f"{source.path} {'line' if source.kind == 'jsonl' else 'element'} {number}"
        try:
            # (Files that were joined leave marks; one before a row belongs to no text.)
            record = json.loads(row.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError:
            return CorpusDocument(skipped="not UTF-8")
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}); fix or remove that line") from None
        if isinstance(record, str) and not self._columns():
            return CorpusDocument.of_text(record)
        if not isinstance(record, dict):
            raise InputError(f"{where}: not a JSON object")
        keys = cast(dict[str, Any], record)
        if self._reading is not None:
            return self._of_row(where, keys).with_columns(keys)
        column = self.options.text_column or "text"
        value = value_at(keys, column)
        if value is not None and not isinstance(value, str):
            other = chats_in([column]) if is_chat(value) else "choose another --text-column"
            raise InputError(f"{where}: {column!r} holds {type(value).__name__}, not text; {other}")
        if self.options.filter and not self.options.filter.matches(keys):
            return CorpusDocument(skipped=FILTERED, columns=keys)
        return CorpusDocument.of_text(value, keys)

"""Read the documents of a range of a file, one record each.

A document's ordinal counts every row or line of the corpus, usable or not, so that it is known
without parsing. Documents that cannot be used (empty, null, not UTF-8) are counted by reason.
"""

from collections.abc import Collection, Iterable, Iterator
from functools import partial

from spile.core.errors import DataError, InputError
from spile.core.units import Span
from spile.corpus.character_spans import NO_SPANS, spans_in
from spile.corpus.chats.pool import RenderPool, made_at
from spile.corpus.chats.rows import RowReader, template_of
from spile.corpus.documents import CorpusDocument, Documents, value_at
from spile.corpus.formats.contract import CorpusFile, CorpusFormat, ReadContext, ReadOptions
from spile.corpus.select import TOO_LARGE

DUPLICATE = "duplicate"
MOST_CHARACTERS = 1 << 28  # limit on the kept characters of a unit's documents


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
        self._context = ReadContext(options, reading)
        self._opened: dict[int, CorpusFormat] = {}
        template = template_of(reading)
        self._pool = RenderPool(template, processes) if template else None
        if reading or options.filter:
            flag = "--filter" if options.filter else reading.flag if reading else ""
            for file in files:
                without = not file.format.has_columns
                if without and (options.filter or not file.format.holds_ids):
                    raise InputError(f"{file.path}: such a file has no columns; {flag} needs some")

    def close(self) -> None:
        self._context.streams.close()
        for each in self._opened.values():
            each.close()
        if self._pool:
            self._pool.close()
        self._opened = {}

    def opened(self, file: int) -> CorpusFormat:
        """Return the object that cuts and reads a file."""
        if file not in self._opened:
            source = self.files[file]
            self._opened[file] = source.format(source, file, self._context)
        return self._opened[file]

    def read(
        self, spans: tuple[Span, ...], first_ordinal: int, skip: Collection[int] = ()
    ) -> Documents:
        """Return all documents of some spans, in order; those in `skip` count as duplicates."""
        options, found = self.options, list[CorpusDocument]()
        ordinal, repeated, characters = first_ordinal, {*skip}, 0
        for span in spans:
            ordinal = ordinal if span.doc is None else span.doc
            stop = ordinal + span.count
            for document in self._rendered(self.opened(span.file).read(span)):
                if ordinal == stop:
                    continue  # the span was cut short; its remaining bytes must still be hashed
                document.ordinal = ordinal
                self._mark_spans(document)
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

    def _mark_spans(self, document: CorpusDocument) -> None:
        """Take the spans of a document from its column; skip it if they cannot be used."""
        column = self.options.spans
        if column is None or document.skipped is not None or document.ids is not None:
            return
        document.spans = spans_in(value_at(document.columns or {}, column), len(document.text))
        if document.spans is None:
            document.skip(NO_SPANS)

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

        The sample includes documents that a hash would exclude, since it serves to estimate sizes.
        Chats become texts only with `render`.
        """
        opened = self.opened(file)
        sampled, size = opened.sample()
        found = [*self._rendered(sampled, render)]
        ordinal = 0
        for document in found:
            document.ordinal = ordinal
            self._mark_spans(document)
            ordinal += document.skipped is None
        documents = Documents(found)
        opened.check_sample(documents)
        return documents, size

    def columns_of(self, file: int) -> list[str]:
        """Return the columns of a file; if rows have keys, those of its first rows."""
        declared = self.opened(file).columns()
        if declared is not None:
            return declared
        documents, _ = self.sample(file, render=False)
        rows = [document.columns or {} for document in documents.every]
        return [*dict.fromkeys(name for row in rows for name in row)]

    def made_of(self, file: int) -> set[str]:
        """Return the columns that documents are made from."""
        rows = self._context.rows
        return {*rows.columns} if rows else self.opened(file).text_columns()

    def _rendered(
        self, found: Iterable[CorpusDocument], render: bool = True
    ) -> Iterator[CorpusDocument]:
        """Make texts from rows; chats are rendered by other processes."""
        if self._context.rows is None:
            return iter(found)
        made = map(self._made, found)
        return self._pool.documents(made) if self._pool and render else made

    def _made(self, document: CorpusDocument) -> CorpusDocument:
        if document.row is None:
            return document
        assert self._context.rows
        where, row = document.row
        made = made_at(where, partial(self._context.rows.document, row))
        return made.with_columns(document.columns)

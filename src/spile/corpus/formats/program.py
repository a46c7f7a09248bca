"""Programs as a format: their documents are cut and read like those of a file."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from spile.core.errors import ConfigError
from spile.core.units import Span
from spile.corpus.chats.pool import made_at
from spile.corpus.chats.rows import Chats, Pairs, of_program
from spile.corpus.documents import CorpusDocument
from spile.corpus.formats.contract import CorpusFile, CorpusFormat, UnitBuilder
from spile.corpus.formats.token_ids import TokenIds
from spile.corpus.programs.program import Program, ProgramDocument, ProgramSource, is_program
from spile.corpus.select import FILTERED


class ProgramFormat(CorpusFormat):
    """A function that returns documents."""

    title = "program"
    keeps_all = True
    in_order = True

    @classmethod
    def recognise(cls, corpus: str) -> CorpusFile | None:
        if not is_program(corpus):
            return None
        program = Program.parse(corpus)
        return CorpusFile(Path(program.name), cls, source=program)

    @cached_property
    def _source(self) -> ProgramSource:
        program, rows = self.file.source, self.context.rows
        assert isinstance(program, Program)
        if isinstance(rows, TokenIds):
            raise ConfigError("--tokens-column is for files; a program gives texts")
        messages = "+".join(rows.columns) if isinstance(rows, Chats) else None
        if messages and "+" in messages:
            raise ConfigError(f"--messages {messages}: a program gives whole chats; name one key")
        pair = rows.columns if isinstance(rows, Pairs) else ()
        return program.open(self.options.text_column, messages, pair)

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        for span in self._source.spans(builder.unit_bytes, builder.max_docs):
            builder.add(replace(span, file=self.number), span.stop)

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        for number, each in enumerate(self._source.read(span), span.first):
            yield self._document(f"{self.file.path} document {number}", each)

    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        documents, size = self._source.sample()
        return (self._document(str(self.file.path), each) for each in documents), size

    def identity(self) -> str:
        return "; ".join(self._source.identity())

    def refuse_shuffle(self) -> None:
        if self._source.length is None:
            raise ConfigError(
                f"--shuffle-docs: {self._source.name} gives its documents one after another; let "
                "it return what has __len__ and __getitem__, or shuffle by itself"
            )

    def shortened(self, span: Span, count: int) -> Span:
        return replace(span, count=count, digest=self._source.part(span.first, count).digest)

    def close(self) -> None:
        if "_source" in vars(self):
            self._source.close()
            del self._source

    def _document(self, where: str, given: ProgramDocument) -> CorpusDocument:
        columns = {**given.metadata, **given.pair}
        if self.context.excludes(columns):
            return CorpusDocument(skipped=FILTERED, columns=columns)
        made = made_at(where, lambda: of_program(given, self.context.rows))
        return made.with_columns(columns)

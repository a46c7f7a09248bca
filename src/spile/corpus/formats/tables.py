"""What Parquet and Arrow files share: they are cut by groups of rows, and declare their columns."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from spile.core.threads import cancellation
from spile.core.units import Span
from spile.corpus.documents import CorpusDocument, Oversized
from spile.corpus.formats.columns import check_columns, scalar_columns, text_column
from spile.corpus.formats.contract import CorpusFormat, UnitBuilder
from spile.corpus.formats.token_ids import TokenIds
from spile.corpus.select import FILTERED

TEXT = ""  # the key of the text in a row of several columns
_SAMPLE_ROWS = 256

TableRow = tuple[Mapping[str, Any] | None, Mapping[str, Any]]


class TableFormat(CorpusFormat):
    """A format of tables: row groups of Parquet, or record batches of Arrow."""

    has_schema: ClassVar[bool] = True

    @abstractmethod
    def schema(self) -> Any:
        """Return the names and types of the columns."""

    @abstractmethod
    def groups(self, builder: UnitBuilder | None = None) -> Iterator[tuple[Span, int]]:
        """Yield a span and its size in bytes for each row group or record batch.

        In Parquet the size counts the text column only, or those that documents are made from.
        With a builder, the columns it keeps must exist, and types must agree with earlier files.
        """

    @abstractmethod
    def rows(self, span: Span) -> Iterator[TableRow]:
        """Yield rows as Python values, each with its kept columns.

        A plain text's bytes are under the key `TEXT`. Token ids are arrays. None stands for a row
        that the filter excludes unread.
        """

    def texts(self, span: Span) -> Iterator[bytes | Oversized | None] | None:
        """Yield the texts of a span, if nothing but their column is needed."""
        return None

    @property
    def arrays(self) -> tuple[str, ...]:
        """The columns whose lists are read as arrays: token ids, and what is said of each."""
        rows = self.context.rows
        return rows.columns if isinstance(rows, TokenIds) else ()

    def check(self, schema: Any, builder: UnitBuilder | None) -> None:
        """Check the columns that are read; with a builder, also those that are named elsewhere."""
        check_columns(
            self.file.path,
            schema,
            self.options.text_column,
            self.context.own_columns,
            builder.keep if builder else (),
            also=self.context.filter_columns if builder else (),
            known=builder.known if builder else None,
        )

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        for group, size in self.groups(builder):
            cancellation().check()
            per_row = max(1, size // max(1, group.count))
            taken = max(0, first - group.first)
            while taken < group.count and not builder.full:
                fit = -(-builder.room // per_row)
                count = min(group.count - taken, fit, builder.docs_left)
                builder.add(group.part(taken, count), count * per_row)
                taken += count
            if builder.full:
                return

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        plain = not (self.context.own_columns or self.context.filter_columns)
        plain = plain and not self.options.read_besides
        if plain and (texts := self.texts(span)) is not None:
            yield from map(CorpusDocument.of_bytes, texts)
            return
        for number, (row, kept) in enumerate(self.rows(span), span.first):
            if row is None:
                yield CorpusDocument(skipped=FILTERED)
            elif self.context.excludes(row):
                yield CorpusDocument(skipped=FILTERED, columns=kept)
            elif self.context.rows:
                where = f"{self.file.path} row {number}"
                yield CorpusDocument(row=(where, row), columns=kept)
            else:
                yield CorpusDocument.of_bytes(row[TEXT]).with_columns(kept)

    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        left, size, documents = _SAMPLE_ROWS, 0, list[CorpusDocument]()
        for group, each in self.groups():
            part = group.part(0, min(group.count, left))
            documents += self.read(part)
            left, size = left - part.count, size + each * part.count // max(1, group.count)
            if not left:
                break
        return documents, size

    def columns(self) -> list[str]:
        return self.schema().names

    def text_columns(self) -> set[str]:
        return {text_column(self.file.path, self.schema(), self.options.text_column)}

    def scalar_columns(self) -> tuple[str, ...]:
        return scalar_columns(self.schema())

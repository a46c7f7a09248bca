"""What every corpus format provides, and what it is given: a file, read options, a unit builder.

A format is a subclass of `CorpusFormat` and a row of the table in `formats/__init__.py`. Code
outside this folder calls these methods, and knows no format by name.
"""

import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import xxhash

from spile.core.config import MAX_DOC_BYTES
from spile.core.errors import DataError, InputError
from spile.core.expressions import DocumentFilter
from spile.core.units import Span, Unit
from spile.corpus.chats.rows import RowReader
from spile.corpus.documents import CorpusDocument, Documents
from spile.corpus.formats.columns import ColumnKinds, open_zstd
from spile.corpus.select import Selection
from spile.objects.paths import AnyPath, size_of

_READ_SIZE = 1 << 22
_NEVER = 1 << 62
_QUICKLY = 64 << 20  # bytes that decompress in about a second


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus.

    Attributes:
        compression: gz, zst or empty.
        identity: what identifies it, if its bytes do not.
        source: what the format reads in place of a file.
    """

    path: AnyPath
    format: "type[CorpusFormat]"
    compression: str = ""
    identity: str = ""
    source: object = None

    @property
    def is_forward(self) -> bool:
        """Whether its units stay together, in their order, since it can only be read forward."""
        return bool(self.compression) and size_of(self.path) > _QUICKLY

    def open(self) -> BinaryIO:
        """Open the file as a stream of decompressed bytes."""
        try:
            if self.compression == "gz":
                source = self.path if isinstance(self.path, Path) else self.path.open("rb")
                return cast(BinaryIO, gzip.open(source, "rb"))
            if self.compression == "zst":
                return open_zstd(self.path)
            return self.path.open("rb")
        except OSError as error:
            raise InputError(f"{self.path}: cannot open ({error.strerror or error})") from error

    def read(self, stream: BinaryIO, size: int) -> bytes:
        """Read from a stream of `open`; raise InputError if the file is damaged."""
        try:
            return stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{self.path}: cannot decompress ({error}); is it whole?") from error


class Streams:
    """Reads the bytes of spans, and keeps a stream open for a span that continues it.

    Bytes are read forward, so that a compressed file is decompressed once, span after span.
    """

    def __init__(self) -> None:
        self._open: tuple[CorpusFile, int, BinaryIO] | None = None  # file, offset, stream

    def close(self) -> None:
        if self._open:
            self._open[2].close()
        self._open = None

    def read(self, file: CorpusFile, span: Span) -> Iterator[bytes]:
        """Yield the bytes of a span; raise DataError if they changed since the table was made."""
        if self._open and self._open[0] is file and self._open[1] <= span.start:
            _, offset, stream = self._open
        else:
            self.close()
            offset, stream = 0, file.open()
        # If reading stops midway, the stream cannot be reused, but must be closed.
        self._open = (file, _NEVER, stream)
        if not file.compression:
            offset = stream.seek(span.start)
        while offset < span.start and (
            skipped := file.read(stream, min(_READ_SIZE, span.start - offset))
        ):
            offset += len(skipped)
        digest = xxhash.xxh3_128()
        while offset < span.stop and (
            data := file.read(stream, min(_READ_SIZE, span.stop - offset))
        ):
            offset += len(data)
            digest.update(data)
            yield data
        self._open = (file, offset, stream)
        if digest.hexdigest() != span.digest:
            raise DataError(
                f"{file.path}: changed since the unit table was made (bytes {span.start} to "
                f"{span.stop}); restore the file or use another --out"
            )


@dataclass(frozen=True)
class ReadOptions:
    """What to read of a corpus, and how.

    Attributes:
        text_column: the column of the text; None: try the usual names.
        text_documents: the document of a text file: `line` or `file`.
        keep: columns to keep of each document.
        preview: how many characters of each text to keep.
        spans: the column that gives spans of characters, for `--pool`.
    """

    text_column: str | None = None
    text_documents: str = "line"
    filter: DocumentFilter | None = None
    selection: Selection = Selection()
    max_doc_bytes: int = MAX_DOC_BYTES
    keep: tuple[str, ...] = ()
    preview: int = 0
    spans: str | None = None

    @property
    def read_besides(self) -> tuple[str, ...]:
        """The columns to read that the text is not made from."""
        return tuple(dict.fromkeys((*self.keep, *([self.spans] if self.spans else []))))


@dataclass(frozen=True)
class ReadContext:
    """What the files of one reader share.

    Attributes:
        rows: makes documents from rows that are not plain texts.
    """

    options: ReadOptions = ReadOptions()
    rows: RowReader | None = None
    streams: Streams = field(default_factory=Streams)

    @property
    def own_columns(self) -> tuple[str, ...]:
        """The columns documents are made from; empty for the text column of each file."""
        return self.rows.columns if self.rows else ()

    @property
    def filter_columns(self) -> tuple[str, ...]:
        return self.options.filter.columns if self.options.filter else ()

    @property
    def text_or_own_columns(self) -> tuple[str, ...]:
        """The columns documents are made from, where a text has the usual name."""
        return self.own_columns or (self.options.text_column or "text",)

    def excludes(self, row: Mapping[str, Any], *, untyped: bool = False) -> bool:
        """Return whether the filter excludes a row; `untyped`: all its values are texts."""
        condition = self.options.filter
        return condition is not None and not condition.matches(row, untyped=untyped)


class UnitBuilder:
    """Collects the spans that formats cut, until a unit has enough bytes.

    Attributes:
        keep: columns that every file must have, since the user named them.
        known: the column types of the files so far, which must agree.
    """

    def __init__(
        self, unit_bytes: int, max_docs: int | None, docs: int = 0, keep: Sequence[str] = ()
    ) -> None:
        """`docs`: documents of an earlier cut, which count towards `max_docs`."""
        self.unit_bytes, self.max_docs = unit_bytes, max_docs
        self.docs, self.keep = docs, keep
        self.known = ColumnKinds()
        self._spans: list[Span] = []
        self._size = 0
        self._done: list[tuple[int, int, int, tuple[Span, ...]]] = []

    @property
    def room(self) -> int:
        """Bytes until the current unit is full."""
        return self.unit_bytes - self._size

    @property
    def docs_left(self) -> int:
        """Documents until --max-docs is reached."""
        return 1 << 62 if self.max_docs is None else self.max_docs - self.docs

    @property
    def full(self) -> bool:
        return self.docs_left <= 0

    def add(self, span: Span, size: int) -> None:
        if span.count:
            self._spans.append(span)
            self._size += size
            self.docs += span.count
        if self.room <= 0:
            self.close()

    @property
    def closed(self) -> int:
        """The number of finished units."""
        return len(self._done)

    def close(self) -> None:
        if self._spans:
            count = sum(span.count for span in self._spans)
            self._done.append((self.docs - count, count, self._size, tuple(self._spans)))
        self._spans, self._size = [], 0

    def finish(self, density: float, first_id: int = 0) -> list[Unit]:
        self.close()
        return [
            Unit(i, first, count, max(1, round(size * density)), spans)
            for i, (first, count, size, spans) in enumerate(self._done, first_id)
        ]


class CorpusFormat(ABC):
    """A format of corpus files. The class describes the format; an instance reads one file.

    Attributes:
        title: its name in help and documentation.
        suffixes: the endings of its files' names, in lower case.
        compressible: whether its files may also end in .gz or .zst.
        gives_way: in a directory, only the files of the formats that give way least are read; the
            others usually describe the corpus, or may hold anything.
        has_columns: whether its documents have columns to filter by and to keep.
        has_schema: whether a file declares all its columns and their types.
        keeps_all: whether all columns are kept by default, and not only labels.
        holds_ids: whether its files hold token ids alone.
        in_order: whether documents may have to be read from the first to the last.
    """

    title: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    compressible: ClassVar[bool] = False
    gives_way: ClassVar[int] = 0
    has_columns: ClassVar[bool] = True
    has_schema: ClassVar[bool] = False
    keeps_all: ClassVar[bool] = False
    holds_ids: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def __init__(self, file: CorpusFile, number: int, context: ReadContext) -> None:
        """`number`: that of the file in the corpus, for its spans."""
        self.file, self.number, self.context = file, number, context
        self.options = context.options

    @classmethod
    def recognise(cls, corpus: str) -> CorpusFile | None:
        """Return the only file of a corpus whose name is of this format and names no file."""
        return None

    @abstractmethod
    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        """Add the spans of all documents from number `first` on, which begins at `byte`."""

    @abstractmethod
    def read(self, span: Span) -> Iterator[CorpusDocument]:
        """Yield the documents of a span, or rows to make them from, with all their columns.

        Raises:
            DataError: if the span's documents have changed since the file was cut.
        """

    @abstractmethod
    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        """Return documents from the file's head, and their size in bytes in the file.

        The size counts the columns that are read in Parquet, and whole rows elsewhere.
        """

    def schema(self) -> Any:
        """Return the Arrow schema of the columns; None unless `has_schema`."""
        return None

    def columns(self) -> list[str] | None:
        """Return the columns that the file declares; None if its rows have keys of their own."""
        return None

    def text_columns(self) -> set[str]:
        """Return the columns that documents are made from if they are plain texts."""
        return {self.options.text_column or "text"}

    def scalar_columns(self) -> tuple[str, ...]:
        """Return the columns to read if labels are looked for; empty if all are read anyway."""
        return ()

    def may_have(self, column: str) -> bool:
        """Return whether rows beyond the first ones may have a column."""
        return False

    def check_sample(self, sampled: Documents) -> None:  # noqa: B027
        """Refuse a file whose sample shows that a column is wrong."""

    def times_longer(self, taken: int) -> float:
        """Return the ratio of a whole document to the `taken` bytes of it that were sampled."""
        return 1.0

    def identity(self) -> str:
        """Return what identifies the file; empty if its bytes do."""
        return self.file.identity

    def refuse_shuffle(self) -> None:  # noqa: B027
        """Refuse to permute units if documents can only be read in order."""

    def shortened(self, span: Span, count: int) -> Span:
        """Return the span of the first documents of another one."""
        return replace(span, count=count)

    def close(self) -> None:  # noqa: B027
        """Free what the instance holds."""

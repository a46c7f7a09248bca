"""CSV and TSV: find where records begin and end, in one pass, and parse their values.

Quoting follows RFC 4180: a field that begins with a quote ends with one, may contain delimiters and
line ends, and doubles its own quotes. A quote anywhere else is an ordinary character. Whether a
byte lies within quotes depends on everything before it, so a file is scanned from its start when it
is cut into units. The unit table then records where records begin, and each unit can be read by
itself.

Neither library does this: `csv.reader` takes lines of text, does not say where a record begins, and
has one field limit for the whole process; `pyarrow.csv` guesses types from the first block, and
refuses a record that is longer than a block. (Tests compare the values with `csv.reader`'s.)
"""

import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import ClassVar

import numpy as np

from spile.core.errors import InputError
from spile.core.options import listed, shown
from spile.core.units import Span
from spile.corpus.documents import CorpusDocument
from spile.corpus.formats.byte_files import (
    LONGEST_LINE,
    SAMPLE_BYTES,
    ByteFormat,
    documents_in,
    refuse_wide,
)
from spile.corpus.formats.columns import chats_in, refuse_missing
from spile.corpus.formats.contract import CorpusFile, UnitBuilder
from spile.corpus.select import FILTERED, TOO_LARGE

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_INSIDE = re.compile(rb'[^"]*+(?:""[^"]*+)*+')  # inside quotes, up to the closing quote
_QUOTED = re.compile(r'"([^"]*+(?:""[^"]*+)*+)"')
_BOM = b"\xef\xbb\xbf"
_READ_SIZE = 1 << 16
_MOST_HEADER = 1 << 20  # bytes of the first record
_MOST_COLUMNS = 1 << 14  # as many as Excel has
_CHUNK = 1 << 22
_OTHERS = ";|\t,"  # other common separators of columns
# A number, and not merely a text of digits: `007` is not a number.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_DECIMAL = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")
_INT64 = 1 << 63


class CsvError(ValueError):
    """A record is invalid; `offset` is the byte of the file where that shows."""

    def __init__(self, offset: int, reason: str) -> None:
        self.offset = offset
        super().__init__(reason)


class RecordEnds:
    """Finds the ends of records in consecutive pieces of any size.

    The first piece must begin with a record.
    """

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter[0]
        self._opening = re.compile(b'[%s\n]"' % re.escape(delimiter))
        self._quoted = self._closing = False  # within quotes; after a quote that may close them
        self._begins = True  # whether a field begins with the next byte
        self._opened = 0  # where the last quotes opened

    def __call__(self, data: bytes, position: int) -> np.ndarray:
        """Return the offsets of record ends in the file; the piece begins at `position`.

        Raises:
            CsvError: if a closing quote is not followed by the end of its field.
        """
        whole = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(whole == _NEWLINE)
        if (inside := self._by_parity(whole, ends, position)) is not None:
            return position + 1 + ends[~inside]
        # (Without a list of tuples: there may be millions.)
        places = np.fromiter(chain.from_iterable(self._fields(data, position)), np.int64)
        if len(places) and len(ends):
            starts, stops = places[::2], places[1::2]
            before = np.searchsorted(starts, ends, side="right") - 1
            ends = ends[(before < 0) | (ends >= stops[before])]
        return position + 1 + ends

    def _by_parity(self, data: np.ndarray, ends: np.ndarray, position: int) -> np.ndarray | None:
        """Return which line ends lie within quotes, by the parity of the quotes before them.

        Parity works only if no unquoted field contains a quote: each opening quote must stand at
        the start of a field or right after a closing one, and each closing quote must be followed
        by the end of the field or by another quote. Otherwise return None.
        """
        follows = (self._delimiter, _NEWLINE, _RETURN, _QUOTE)  # may follow a closing quote
        if not len(data) or (self._closing and int(data[0]) not in follows):
            return None
        quotes = np.flatnonzero(data == _QUOTE)
        first = int(self._quoted and not self._closing)  # index of the first closing quote
        opening, closing = quotes[first::2], quotes[1 - first :: 2]
        before = data[opening - 1]
        doubled = before == _QUOTE
        begins = doubled | (before == self._delimiter) | (before == _NEWLINE)
        if len(opening) and opening[0] == 0:
            doubled[0], begins[0] = self._closing, self._closing or self._begins
        after = data[np.minimum(closing + 1, len(data) - 1)]
        stops = np.isin(after, follows) | (closing == len(data) - 1)
        if not (begins.all() and stops.all()):
            return None
        if len(fresh := opening[~doubled]):
            self._opened = position + int(fresh[-1])
        self._closing = bool(len(closing)) and int(closing[-1]) == len(data) - 1
        self._quoted = (len(quotes) + first) % 2 == 1 or self._closing
        if not self._quoted:
            self._begins = int(data[-1]) in (self._delimiter, _NEWLINE)
        return (np.searchsorted(quotes, ends) + first) % 2 == 1

    def _fields(self, data: bytes, position: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end of quoted fields within a piece."""
        at = start = 0
        while at < len(data):
            if self._closing:
                self._closing = False
                if data[at] == _QUOTE:  # the second of two: a literal quote
                    at += 1
                    continue
                if data[at] not in (self._delimiter, _NEWLINE, _RETURN):
                    raise CsvError(position + at, "something follows a closing quote")
                yield start, at
                self._quoted = self._begins = False
            elif self._quoted:
                found = _INSIDE.match(data, at)
                assert found
                at = found.end() + 1
                self._closing = at <= len(data)
            else:
                if self._begins and data[at] == _QUOTE:
                    start = at
                elif opening := self._opening.search(data, at):
                    start = opening.end() - 1
                else:
                    break
                at, self._quoted, self._opened = start + 1, True, position + start
        if self._quoted:
            yield start, len(data)
        elif data:
            self._begins = data[-1] in (self._delimiter, _NEWLINE)

    def finish(self) -> None:
        """Refuse a file that ends within quotes."""
        if self._quoted and not self._closing:
            raise CsvError(self._opened, "a quote opens a field, and none closes it")


@dataclass(frozen=True)
class CsvHeader:
    """The first record of a file, and where it ends."""

    columns: tuple[str, ...]
    stop: int

    def text_column(self, file: CorpusFile, wanted: str | None) -> str:
        """Return the requested column, `text`, or the only one."""
        if wanted is not None:
            refuse_missing(file.path, self.columns, [wanted], ", which --text-column names")
            return wanted
        if "text" in self.columns:
            return "text"
        named = [name for name in self.columns if name]
        if len(named) != 1:
            pairs = chats_in((), named)
            raise InputError(
                f"{file.path}: which column is the text? Choose one with --text-column "
                f"({listed(named)})" + (f"; {pairs}" if pairs else "")
            )
        return named[0]


def read_header(file: CorpusFile, delimiter: bytes) -> CsvHeader | None:
    """Return the columns that the first record names; None if the file is empty."""
    data, found = b"", np.empty(0, np.int64)
    ends = RecordEnds(delimiter)
    with file.open() as stream, refusing(file):
        while not len(found) and len(data) < _MOST_HEADER:
            more = file.read(stream, _READ_SIZE)
            if not more:
                ends.finish()
                found = np.array([len(data)])
                break
            if not data:
                refuse_wide(file.path, more)
            cut = len(_BOM) if not data and more.startswith(_BOM) else 0
            found = ends(more[cut:], len(data) + cut)
            data += more
    if not data.removeprefix(_BOM):
        return None
    if not len(found):
        raise _no_header_error(file, f"its first line is longer than {_MOST_HEADER} bytes")
    return _parsed_header(file, data, int(found[0]), delimiter)


def _parsed_header(file: CorpusFile, data: bytes, stop: int, delimiter: bytes) -> CsvHeader:
    try:
        text = _line(data[:stop].removeprefix(_BOM)).decode()
        columns = fields(text, delimiter.decode(), _MOST_COLUMNS)
    except UnicodeDecodeError:
        raise _no_header_error(file, "its first line is not UTF-8") from None
    except CsvError as error:
        raise InputError(f"{file.path} line 1: {error}; fix or remove that line") from None
    if len(columns) > _MOST_COLUMNS:
        raise _no_header_error(file, f"its first line has more than {_MOST_COLUMNS} fields")
    named = [name for name in columns if name]  # (pandas leaves the name of its index empty)
    if not named:
        raise _no_header_error(file, "its first line names none")
    [(name, count)] = Counter(named).most_common(1)
    if count > 1:
        raise InputError(f"{file.path}: {count} columns are called {shown(name)}; rename some")
    if "\r" in text:
        raise InputError(
            f"{file.path}: its lines end in CR alone; convert it first: tr '\\r' '\\n' < OLD > NEW"
        )
    separators = [mark for mark in _OTHERS if mark in columns[0]]
    if len(columns) == 1 and separators:
        raise InputError(
            f"{file.path}: its columns seem to be separated by {separators[0]!r}; .csv is read "
            "with commas, .tsv with tabs: convert or rename it"
        )
    return CsvHeader(tuple(columns), stop)


def _no_header_error(file: CorpusFile, why: str) -> InputError:
    return InputError(f"{file.path}: the first line must name the columns; {why}")


@contextmanager
def refusing(file: CorpusFile) -> Generator[None]:
    """Turn an error in a record into a one-line InputError with the file and the line."""
    try:
        yield
    except CsvError as error:
        line = _line_at(file, error.offset)
        raise InputError(f"{file.path} line {line}: {error}; fix or remove that line") from None


def _line_at(file: CorpusFile, offset: int) -> int:
    """Return the number of the line that contains a byte; the file is read up to it."""
    lines = 1
    with file.open() as stream:
        while offset > 0 and (data := file.read(stream, min(_CHUNK, offset))):
            lines += data.count(b"\n")
            offset -= len(data)
    return lines


def records(
    pieces: Iterable[bytes], delimiter: bytes, most: int, start: int
) -> Iterator[tuple[int, bytes | None]]:
    """Yield the offset of each record, and its bytes without the line end; see `documents_in`."""
    ends = RecordEnds(delimiter)

    def closed() -> Iterator[bytes]:
        yield from pieces
        ends.finish()

    for offset, record in documents_in(closed(), ends, most, start):
        yield offset, None if record is None else _line(record)


def _line(record: bytes) -> bytes:
    return record.removesuffix(b"\n").removesuffix(b"\r")


def fields(record: str, delimiter: str, most: int, offset: int = 0) -> list[str]:
    """Return the values of a record, at most `most` + 1 of them.

    Raises:
        CsvError: if a quoted field does not end properly; `offset` is that of the record.
    """
    if '"' not in record:
        return record.split(delimiter, most)
    found: list[str] = []
    at = 0
    while len(found) <= most:
        if record.startswith('"', at):
            quoted = _QUOTED.match(record, at)
            if not quoted:
                raise CsvError(offset, "a quote opens a field, and none closes it")
            found.append(quoted[1].replace('""', '"'))
            stop = quoted.end()
            if stop < len(record) and record[stop] != delimiter:
                raise CsvError(offset, "something follows a closing quote")
        else:
            stop = record.find(delimiter, at)
            stop = len(record) if stop < 0 else stop
            found.append(record[at:stop])
        if stop == len(record):
            break
        at = stop + 1
    return found


def values(
    record: str, columns: Sequence[str], delimiter: bytes, offset: int
) -> dict[str, str | None]:
    """Return the values of a record by column; an empty field is a missing value.

    Raises:
        CsvError: if the number of fields is not the number of columns.
    """
    found = fields(record, delimiter.decode(), len(columns), offset)
    if len(found) != len(columns):
        count = len(found) if len(found) < len(columns) else f"more than {len(columns)}"
        raise CsvError(
            offset, f"its number of fields is {count}, and the first line names {len(columns)}"
        )
    return dict(zip(columns, (value or None for value in found), strict=True))


def typed(value: str | None) -> int | float | str | None:
    """Convert a value for storage: a text becomes a number if it is that number's usual spelling.

    Other values (`007`, `1.50`) stay texts, so that every value can be restored exactly.
    """
    if value is None or len(value) > 32 or not _DECIMAL.fullmatch(value):
        return value
    if _INTEGER.fullmatch(value):
        number = int(value)
        return number if -_INT64 <= number < _INT64 else value
    return float(value) if repr(float(value)) == value else value


class CsvFormat(ByteFormat):
    """CSV whose first line names the columns."""

    title = "CSV"
    suffixes = (".csv",)
    gives_way = 3
    delimiter: ClassVar[bytes] = b","

    @cached_property
    def _header(self) -> CsvHeader | None:
        return read_header(self.file, self.delimiter)

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        """Cut the records after the header, in one pass."""
        path, header, context = self.file.path, self._header, self.context
        if header is None:
            return
        refuse_missing(path, header.columns, context.own_columns)
        refuse_missing(path, header.columns, context.filter_columns, ", which --filter names")
        refuse_missing(path, header.columns, builder.keep, ", which --keep or --by names")
        if not context.own_columns:
            header.text_column(self.file, self.options.text_column)
        ends = RecordEnds(self.delimiter)
        with refusing(self.file):
            self.cut_bytes(builder, self.chunks(), ends, first, max(byte, header.stop))
            if not builder.full:
                ends.finish()

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        most = self.options.max_doc_bytes
        found = records(self.bytes_of(span), self.delimiter, most, span.start)
        return self._documents(found, span.first)

    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        with self.file.open() as stream:
            data = self.file.read(stream, SAMPLE_BYTES)
            refuse_wide(self.file.path, data)
            header = self._header
            if header is None:
                return [], 0
            with refusing(self.file):
                while True:
                    ends = RecordEnds(self.delimiter)
                    found = ends(data[header.stop :], header.stop).tolist()
                    if found or len(data) >= LONGEST_LINE:
                        break
                    more = self.file.read(stream, SAMPLE_BYTES)
                    if not more:
                        found = [len(data)]
                        break
                    data += more
        stop = found[-1] if found else header.stop
        if len(data) < SAMPLE_BYTES:  # the whole file
            stop = len(data)
        rows = records([data[header.stop : stop]], self.delimiter, len(data), header.stop)
        return self._documents(rows, 0), stop - header.stop

    def columns(self) -> list[str]:
        return [name for name in self._header.columns if name] if self._header else []

    def text_columns(self) -> set[str]:
        header = self._header
        return {header.text_column(self.file, self.options.text_column)} if header else set()

    def may_have(self, column: str) -> bool:
        return self._header is not None and column in self._header.columns

    def _documents(
        self, rows: Iterable[tuple[int, bytes | None]], first: int
    ) -> Iterator[CorpusDocument]:
        """Yield documents from records, each given with its offset in the file."""
        header = self._header
        assert header
        plain = self.context.rows is None
        text = header.text_column(self.file, self.options.text_column) if plain else None
        with refusing(self.file):
            for number, (offset, row) in enumerate(rows, first + 1):
                if row is None or len(row) > self.options.max_doc_bytes:
                    yield CorpusDocument(skipped=TOO_LARGE)
                elif not row.strip():
                    yield CorpusDocument(skipped="empty")
                else:
                    try:
                        record = row.decode("utf-8")
                    except UnicodeDecodeError:
                        yield CorpusDocument(skipped="not UTF-8")
                        continue
                    found = values(record, header.columns, self.delimiter, offset)
                    yield self._document(f"{self.file.path} record {number}", found, text)

    def _document(
        self, where: str, found: dict[str, str | None], text: str | None
    ) -> CorpusDocument:
        """Make a document from a record; `text` is the text column, if it holds a plain text."""
        kept = {name: typed(found.get(name)) for name in self.options.read_besides or found if name}
        if self.context.excludes(found, untyped=True):
            return CorpusDocument(skipped=FILTERED, columns=kept)
        if text is None:
            return CorpusDocument(row=(where, found), columns=kept)
        return CorpusDocument.of_text(found[text] or "", kept)


class TsvFormat(CsvFormat):
    """CSV with tabs for commas."""

    title = "TSV"
    suffixes = (".tsv",)
    delimiter = b"\t"

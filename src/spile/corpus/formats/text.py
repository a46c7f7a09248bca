"""Lines of text files, and the bytes of the spans they lie in. Other encodings are refused.

Bytes are read forward, so that a compressed file is decompressed once, span after span.
"""

import codecs
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

import xxhash

from spile.core.errors import DataError, InputError
from spile.core.units import Span
from spile.corpus.files import CorpusFile

_READ_SIZE = 1 << 22
_NEVER = 1 << 62
# Encodings of two and four bytes by their byte-order marks, the longer ones first.
_WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_HEAD = 4096  # bytes to detect an encoding from if there is no mark
_FEWEST = 16


class Streams:
    """Keeps a stream open for a span that continues it."""

    def __init__(self, files: list[CorpusFile]) -> None:
        self._files = files
        self._open: tuple[int, int, BinaryIO] | None = None  # file, offset, stream

    def close(self) -> None:
        if self._open:
            self._open[2].close()
        self._open = None

    def read(self, span: Span) -> Iterator[bytes]:
        """Yield the bytes of a span; raise DataError if they changed since the table was made."""
        source = self._files[span.file]
        if self._open and self._open[0] == span.file and self._open[1] <= span.start:
            _, offset, stream = self._open
        else:
            self.close()
            offset, stream = 0, source.open()
        # If reading stops midway, the stream cannot be reused, but must be closed.
        self._open = (span.file, _NEVER, stream)
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
        self._open = (span.file, offset, stream)
        if digest.hexdigest() != span.digest:
            raise DataError(
                f"{source.path}: changed since the unit table was made (bytes {span.start} to "
                f"{span.stop}); restore the file or use another --out"
            )

    def lines(self, span: Span, most: int, *, whole: bool) -> Iterator[bytes | None]:
        """Yield lines, or the whole span as one; None, not held, for one over `most` bytes."""
        ends = b"" if whole else b"\n"
        held, size, made = list[bytes](), 0, 0

        def line() -> bytes | None:
            nonlocal held, size, made
            found = None if size > most else b"".join(held)
            held, size, made = [], 0, made + 1
            return found

        for data in self.read(span):
            *lines, rest = data.split(ends) if ends else [data]
            for piece in lines:
                held.append(piece)
                size += len(piece)
                yield line()
            size += len(rest)
            held = [*held, rest] if size <= most else []
        if made < span.count:
            yield line()

    def elements(self, span: Span, most: int) -> Iterator[bytes | None]:
        """Yield the elements of a JSON array; None for one over `most` bytes, which is not held."""
        # A span begins and ends with an element.
        data = chain([b"["], self.read(span), [b"]"])
        begins = True
        for piece in self._files[span.file].pieces(data, most):
            if piece.ends:
                yield piece.data if begins else None
            begins = piece.ends


def refuse_wide(file: CorpusFile, head: bytes) -> None:
    """Refuse text with two or four bytes per character, by the first bytes of its file.

    It is not valid UTF-8 in general, but ASCII in it would read as text with a NUL beside each
    character.
    """
    if file.kind not in ("text", "jsonl", "json") and not file.is_csv:
        return
    marked = next((name for mark, name in _WIDE_MARKS.items() if head.startswith(mark)), None)
    found = marked or _unmarked_wide(head[:_HEAD])
    if found:
        why = "by its byte-order mark" if marked else "by the zeros beside its characters"
        raise InputError(
            f"{file.path}: holds {found} text ({why}), and only UTF-8 is read; convert it first: "
            f"iconv -f {found} -t UTF-8 OLD > NEW"
        )


def _unmarked_wide(head: bytes) -> str | None:
    """Detect the encoding of mostly ASCII text: all but one byte of each character are zero."""
    for name, width in (("UTF-32", 4), ("UTF-16", 2)):
        count = len(head) // width
        columns = [head[place : count * width : width] for place in range(width)]
        zeros = [column.count(0) / max(1, count) for column in columns]
        for filled, order in ((0, "LE"), (width - 1, "BE")):
            others = min(share for place, share in enumerate(zeros) if place != filled)
            if len(head) >= _FEWEST and zeros[filled] < 0.05 and others > 0.5:
                return name + order
    return None


def count_lines(data: bytes) -> int:
    """Lines in some bytes; the last needs no newline, and a trailing one does not start another."""
    return data.count(b"\n") + (1 if data and not data.endswith(b"\n") else 0)

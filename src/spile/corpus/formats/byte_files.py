"""Files that are cut by bytes: documents lie one after another, and units are ranges of bytes.

Cutting takes one streaming pass that finds the ends of documents and hashes each unit's bytes. The
unit table records both, so that no other machine repeats the pass and every later reading can be
checked.
"""

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import numpy as np
import xxhash

from spile.core.errors import InputError
from spile.core.threads import cancellation
from spile.core.units import Span
from spile.corpus.formats.contract import CorpusFormat, UnitBuilder
from spile.objects.paths import AnyPath

CHUNK = 1 << 23  # bytes read at once while a file is cut
SAMPLE_BYTES = 1 << 18
SAMPLE_ROWS = 256
LONGEST_LINE = 1 << 20  # longest line to read for a sample, in bytes
# Encodings of two and four bytes by their byte-order marks, the longer ones first.
_WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_HEAD = 4096  # bytes to detect an encoding from if there is no mark
_FEWEST = 16

EndsIn = Callable[[bytes, int], np.ndarray]


class ByteFormat(CorpusFormat):
    """A format whose files are cut by bytes."""

    compressible: ClassVar[bool] = True
    is_text: ClassVar[bool] = True  # in UTF-8; files in other encodings are refused

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes of the file."""
        with self.file.open() as stream:
            first = True
            while data := self.file.read(stream, CHUNK):
                if first and self.is_text:
                    refuse_wide(self.file.path, data)
                first = False
                cancellation().check()
                yield data

    def bytes_of(self, span: Span) -> Iterator[bytes]:
        return self.context.streams.read(self.file, span)

    def cut_bytes(
        self, builder: UnitBuilder, chunks: Iterable[bytes], ends_in: EndsIn, first: int, byte: int
    ) -> None:
        """Cut a file in one pass; `ends_in` finds the ends of documents in a piece at an offset."""
        # Start of the collected span; byte reached; last document end.
        start = position = ended = byte
        documents, digest = 0, xxhash.xxh3_128()

        def close(stop: int, count: int) -> None:
            nonlocal start, first, documents, digest
            span = Span(self.number, first, count, start, stop, digest.hexdigest())
            builder.add(span, stop - start)
            start, first, documents, digest = stop, first + count, 0, xxhash.xxh3_128()

        for data in _after(chunks, byte):
            ends = ends_in(data, position)
            ended = int(ends[-1]) if len(ends) else ended
            used, taken = 0, 0  # bytes hashed and ends passed in this chunk
            while taken < len(ends) and not builder.full:
                by_size = int(np.searchsorted(ends, start + builder.room, side="left")) + 1
                by_docs = taken + builder.docs_left - documents
                cut = min(by_size, by_docs)
                if cut > len(ends):
                    documents += len(ends) - taken
                    taken = len(ends)
                    break
                cut = max(cut, taken + 1)
                stop = int(ends[cut - 1])
                digest.update(data[used : stop - position])
                used = stop - position
                documents += cut - taken
                taken = cut
                close(stop, documents)
            if builder.full:
                return
            digest.update(data[used:])
            position += len(data)
        if position > start:
            close(position, documents + (position > ended))

    def lines(self, span: Span, *, whole: bool = False) -> Iterator[bytes | None]:
        """Yield lines, or the `whole` span as one.

        None may stand for a line over --max-doc-bytes, which is not held.
        """
        ends, most = no_ends if whole else line_ends, self.options.max_doc_bytes + 1
        for _, line in documents_in(self.bytes_of(span), ends, most, span.start):
            yield line if whole or line is None else line.removesuffix(b"\n")

    def sampled_lines(self, *, whole: bool = False) -> tuple[list[bytes], int]:
        """Return the first lines of a file, or the beginning of the `whole`, and their size."""
        with self.file.open() as stream:
            data = self.file.read(stream, SAMPLE_BYTES)
            refuse_wide(self.file.path, data)
            # A first line longer than the sample is read to its end, up to a limit.
            while b"\n" not in data and len(data) < LONGEST_LINE and not whole:
                more = self.file.read(stream, SAMPLE_BYTES)
                if not more:
                    break
                data += more
        if len(data) >= (SAMPLE_BYTES if whole or b"\n" in data else LONGEST_LINE):
            data = data[: data.rfind(b"\n") + 1]  # the rest is a partial line
        return [data] if whole else data.split(b"\n")[: _count_lines(data)], len(data)


def line_ends(data: bytes, position: int) -> np.ndarray:
    return position + 1 + np.flatnonzero(np.frombuffer(data, np.uint8) == 10)


def no_ends(data: bytes, position: int) -> np.ndarray:
    return np.empty(0, np.int64)


def documents_in(
    pieces: Iterable[bytes], ends_in: EndsIn, most: int, start: int
) -> Iterator[tuple[int, bytes | None]]:
    """Yield the offset of each document in a run of bytes, and its bytes up to its end.

    A document of more than `most` bytes is not held; None stands in its place.

    Args:
        pieces: bytes of whole documents.
        start: their offset in the file.
    """
    held, size, begun, position = list[bytes](), 0, start, start

    def whole() -> tuple[int, bytes | None]:
        nonlocal held, size, begun
        found = begun, None if size > most else b"".join(held)
        begun, held, size = begun + size, [], 0
        return found

    for data in pieces:
        at = 0
        for stop in (ends_in(data, position) - position).tolist():
            size += stop - at
            held.append(data[at:stop])
            yield whole()
            at = stop
        size += len(data) - at
        held = [*held, data[at:]] if size <= most else []
        position += len(data)
    if size:
        yield whole()


def _after(chunks: Iterable[bytes], start: int) -> Iterator[bytes]:
    """Yield the bytes from an offset on."""
    for data in chunks:
        if start < len(data):
            yield data[start:]
        start = max(0, start - len(data))


def _count_lines(data: bytes) -> int:
    """Count the lines; the last needs no newline, and a trailing one does not start another."""
    return data.count(b"\n") + (1 if data and not data.endswith(b"\n") else 0)


def refuse_wide(path: AnyPath, head: bytes) -> None:
    """Refuse text with two or four bytes per character, by the first bytes of its file.

    It is not valid UTF-8 in general, but ASCII in it would read as text with a NUL beside each
    character.
    """
    marked = next((name for mark, name in _WIDE_MARKS.items() if head.startswith(mark)), None)
    found = marked or _unmarked_wide(head[:_HEAD])
    if found:
        why = "by its byte-order mark" if marked else "by the zeros beside its characters"
        raise InputError(
            f"{path}: holds {found} text ({why}), and only UTF-8 is read; convert it first: "
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

"""The corpus cut into units: made once, stored, and read by everyone afterwards.

Parquet files are cut from their footers alone. Line files (JSONL, text) take one streaming pass
that finds line ends and hashes each unit's bytes; the table records both, so that no other
machine repeats the pass and every later reading can be checked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import xxhash

from spile.data import parquet
from spile.data.corpus import CorpusReader
from spile.data.corpus_files import CorpusFile, Span
from spile.data.source import Source
from spile.errors import DataError, InputError

_CHUNK = 1 << 23
_SAMPLED_FILES = 4
_TOKENS_PER_BYTE = 0.25  # where a sample teaches nothing


@dataclass(frozen=True)
class Unit:
    """A fixed range of the corpus: the atom of work. May span several small files."""

    id: int
    first_doc: int
    num_docs: int
    tokens: int  # an estimate; the exact count is settled by tokenizing the unit
    spans: tuple[Span, ...]
    skip: tuple[int, ...] = ()  # documents whose text came before

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Unit":
        try:
            parts: dict[str, Any] = {**value}
            parts["spans"] = tuple(Span(**span) for span in parts["spans"])
            parts["skip"] = tuple(parts.get("skip", ()))
            return cls(**parts)
        except (TypeError, KeyError) as error:
            raise DataError(f"the unit table holds what is no unit ({error})") from error


def tokens_per_byte(reader: CorpusReader, count_tokens: Callable[[list[str]], int]) -> float:
    """Estimated from the heads of a few files, spread evenly over the corpus."""
    last = len(reader.files) - 1
    chosen = sorted({round(i * last / (_SAMPLED_FILES - 1)) for i in range(_SAMPLED_FILES)})
    texts: list[str] = []
    size = 0
    unreadable = 0
    for file in chosen:
        documents, taken = reader.sample(file)
        texts += documents.texts
        size += taken
        unreadable += documents.skipped["not UTF-8"]
    if unreadable > 9 * len(texts):
        raise InputError(
            f"{reader.files[0].path}: the first {unreadable} documents are not UTF-8 text; "
            "is this a text corpus?"
        )
    tokens = count_tokens(texts) if texts else 0
    return tokens / size if tokens and size else _TOKENS_PER_BYTE


def make_units(
    files: list[CorpusFile],
    *,
    text_column: str | None,
    text_documents: str,
    columns: Sequence[str] = (),
    unit_tokens: int,
    density: float,
    max_docs: int | None,
    max_tokens: int | None,
    heed: Callable[[], None] = lambda: None,
    program: Source | None = None,
) -> list[Unit]:
    """Cut the corpus; `density` is tokens per byte. Deterministic in its arguments.

    `heed` is called for every file and every few megabytes, and may raise to stop the pass.
    `program`: opened, where the corpus is one.
    """
    builder = _Builder(unit_bytes=max(1, int(unit_tokens / density)), max_docs=max_docs)
    for number, file in enumerate(files):
        heed()
        if program:
            for part in program.ranges(builder.unit_bytes, max_docs, heed):
                builder.add(
                    Span(number, part.first, part.count, 0, part.size, part.digest), part.size
                )
        elif file.kind == "parquet":
            _cut_parquet(builder, number, file, text_column, columns)
        elif file.kind == "json":
            _cut_elements(builder, number, file, heed)
        else:
            whole = file.kind == "text" and text_documents == "file"
            _cut_lines(builder, number, file, heed, whole=whole)
        if builder.full:
            break
    units = builder.finish(density)
    if not units:
        names = ", ".join(str(f.path) for f in files[:3])
        raise InputError(f"the corpus is empty: no document in {len(files)} files ({names})")
    if max_tokens is not None:
        totals = np.cumsum([unit.tokens for unit in units])
        units = units[: int(np.searchsorted(totals, max_tokens)) + 1]
    return units


def without_duplicates(
    units: list[Unit], reader: CorpusReader, heed: Callable[[], None] = lambda: None
) -> list[Unit]:
    """Units that know which of their documents have a text that came before."""
    hashes: list[np.ndarray] = []
    ordinals: list[np.ndarray] = []
    for unit in units:
        heed()
        found = reader.read(unit.spans, unit.first_doc)
        digests = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in found.texts)
        hashes.append(np.frombuffer(digests, np.uint64).reshape(-1, 2))
        ordinals.append(np.array(found.ordinals, np.int64))
    every, docs = np.concatenate(hashes), np.concatenate(ordinals)
    order = np.lexsort((docs, every[:, 1], every[:, 0]))
    again = np.zeros(len(docs), np.bool_)
    again[order[1:]] = (every[order[1:]] == every[order[:-1]]).all(axis=1)
    repeated = np.sort(docs[again])
    return [
        replace(
            unit,
            skip=tuple(
                repeated[
                    slice(
                        *np.searchsorted(repeated, [unit.first_doc, unit.first_doc + unit.num_docs])
                    )
                ].tolist()
            ),
        )
        for unit in units
    ]


class _Builder:
    """Collects spans until a unit's bytes are reached."""

    def __init__(self, unit_bytes: int, max_docs: int | None) -> None:
        self.unit_bytes, self.max_docs = unit_bytes, max_docs
        self.docs = 0
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
            self._close()

    def _close(self) -> None:
        if self._spans:
            count = sum(span.count for span in self._spans)
            self._done.append((self.docs - count, count, self._size, tuple(self._spans)))
        self._spans, self._size = [], 0

    def finish(self, density: float) -> list[Unit]:
        self._close()
        return [
            Unit(i, first, count, max(1, round(size * density)), spans)
            for i, (first, count, size, spans) in enumerate(self._done)
        ]


def _cut_parquet(
    builder: _Builder, number: int, file: CorpusFile, column: str | None, columns: Sequence[str]
) -> None:
    row = 0
    for rows, size in parquet.row_groups(file.path, column, columns):
        end = row + rows
        per_row = max(1, size // max(1, rows))
        while row < end and not builder.full:
            fit = -(-builder.room // per_row)
            count = min(end - row, fit, builder.docs_left)
            builder.add(Span(number, row, count), count * per_row)
            row += count


def _cut_lines(
    builder: _Builder, number: int, file: CorpusFile, heed: Callable[[], None], *, whole: bool
) -> None:
    """One pass over the file. With `whole`, it is a single document."""
    start = position = first = 0  # of the span being collected: byte, byte reached, document
    lines = 0
    digest = xxhash.xxh3_128()
    last_byte = b""

    def close(stop: int, count: int) -> None:
        nonlocal start, first, lines, digest
        builder.add(Span(number, first, count, start, stop, digest.hexdigest()), stop - start)
        start, first, lines, digest = stop, first + count, 0, xxhash.xxh3_128()

    for data in _chunks(file, heed):
        last_byte = data[-1:]
        ends = position + 1 + np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
        if whole:
            ends = ends[:0]
        used, taken = 0, 0  # of this chunk: bytes hashed, line ends passed
        while taken < len(ends) and not builder.full:
            by_size = int(np.searchsorted(ends, start + builder.room, side="left")) + 1
            by_docs = taken + builder.docs_left - lines
            cut = min(by_size, by_docs)
            if cut > len(ends):
                lines += len(ends) - taken
                taken = len(ends)
                break
            cut = max(cut, taken + 1)
            stop = int(ends[cut - 1])
            digest.update(data[used : stop - position])
            used = stop - position
            lines += cut - taken
            taken = cut
            close(stop, lines)
        if builder.full:
            return
        digest.update(data[used:])
        position += len(data)
    if position > start:
        close(position, 1 if whole else lines + (last_byte != b"\n"))


def _cut_elements(
    builder: _Builder, number: int, file: CorpusFile, heed: Callable[[], None]
) -> None:
    """One pass over a JSON array."""
    first = count = start = stop = 0  # of the span being collected
    digest = xxhash.xxh3_128()
    for element in file.elements(_chunks(file, heed)):
        if not count:
            start, digest = element.start, xxhash.xxh3_128()
        else:
            digest.update(element.between)
        digest.update(element.data)
        stop, count = element.stop, count + 1
        if stop - start >= builder.room or count >= builder.docs_left:
            builder.add(Span(number, first, count, start, stop, digest.hexdigest()), stop - start)
            first, count = first + count, 0
            if builder.full:
                return
    if count:
        builder.add(Span(number, first, count, start, stop, digest.hexdigest()), stop - start)


def _chunks(file: CorpusFile, heed: Callable[[], None]) -> Iterator[bytes]:
    with file.open() as stream:
        while data := file.read(stream, _CHUNK):
            heed()
            yield data

"""The corpus cut into units: the table is made once, stored, and then read by every worker.

Parquet files are cut by their footers alone, and Arrow files by the headers of their record
batches. Line files (JSONL, CSV, text) and flat arrays of token ids take one streaming pass that
finds the ends of documents and hashes each unit's bytes. The table records both, so that no other
machine repeats the pass and every later reading can be checked.

Units keep the corpus's order, or are permuted by a seed. The permutation moves whole units: each
keeps its documents and their ordinals, and the first few units are a sample of the corpus.
Compressed files can only be read forward, so the units of a large one stay together: a worker that
takes them in order decompresses the file once.

A corpus that has grown is cut from where the earlier cut ended (`CutSoFar`): its units follow, and
none that was there changes.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import xxhash

from spile.core.errors import ConfigError, InputError
from spile.core.threads import cancellation
from spile.core.units import Span, Unit
from spile.corpus.files import CorpusFile
from spile.corpus.formats.columns import ColumnKinds, json_kind, refuse_missing, value_at
from spile.corpus.formats.csv import RecordEnds, read_header, refusing
from spile.corpus.formats.text import refuse_wide
from spile.corpus.formats.token_ids import FlatArray
from spile.corpus.programs.program import ProgramSource
from spile.corpus.reader import CorpusReader
from spile.objects.paths import size_of

_CHUNK = 1 << 23
_HEAD = 1 << 16
_SAMPLED_FILES = 4
_TOKENS_PER_BYTE = 0.25  # if a sample teaches nothing
_QUICKLY = 64 << 20  # bytes that decompress in about a second


def tokens_per_byte(
    reader: CorpusReader, count_tokens: Callable[[list[str]], int], first: int = 0
) -> float:
    """Estimate from the heads of a few files, spread evenly over the corpus from `first` on."""
    texts: list[str] = []
    size = tokens = 0
    unreadable = 0
    for file in sampled_files(reader, first):
        documents, taken = reader.sample(file)
        texts += [document.text for document in documents.usable if document.ids is None]
        tokens += sum(len(d.ids) for d in documents.usable if d.ids is not None)
        size += taken
        unreadable += documents.skipped["not UTF-8"]
    if unreadable > 9 * len(texts):
        raise InputError(
            f"{reader.files[0].path}: the first {unreadable} documents are not UTF-8 text; "
            "is this a text corpus?"
        )
    tokens += count_tokens(texts) if texts else 0
    return tokens / size if tokens and size else _TOKENS_PER_BYTE


def sampled_files(reader: CorpusReader, first: int = 0) -> list[int]:
    """Return the files to sample: a few, spread evenly over the corpus from `first` on."""
    last = len(reader.files) - 1 - first
    return sorted({first + round(i * last / (_SAMPLED_FILES - 1)) for i in range(_SAMPLED_FILES)})


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """How to cut a corpus into units.

    Attributes:
        unit_tokens: approximate tokens in a unit.
        density: tokens per byte.
        read: the share of tokens that the model reads; the others are truncated, or belong to
            documents that are too short or too long. Units do not grow with it, since their texts
            are held whole.
        text_column: the column of texts; None: the one that can be nothing else.
        text_documents: whether a document of a text file is a `line` or the whole `file`.
        columns: the columns documents are made from, if they are not plain texts.
        filtered: other columns that the filter reads.
        keep: other columns that must exist, to be kept.
        flat: the layout of token ids in .bin files.
        max_docs: the most documents to cut.
        max_tokens: approximate limit on tokens; the last unit is whole.
        shuffle: a seed. The whole corpus is then cut before anything is chosen.
    """

    unit_tokens: int
    density: float
    read: float = 1.0
    text_column: str | None = None
    text_documents: str = "line"
    columns: Sequence[str] = ()
    filtered: Sequence[str] = ()
    keep: Sequence[str] = ()
    flat: FlatArray | None = None
    max_docs: int | None = None
    max_tokens: int | None = None
    shuffle: int | None = None


@dataclass(frozen=True)
class CutSoFar:
    """Where an earlier cut of a corpus ended, and what it holds.

    Attributes:
        file: the file to go on with.
        first: documents of that file that were cut.
        byte: where the next one begins, in files that are cut by bytes.
    """

    file: int = 0
    first: int = 0
    byte: int = 0
    docs: int = 0
    units: int = 0
    tokens: int = 0


def make_units(
    files: list[CorpusFile],
    options: CutOptions,
    program: ProgramSource | None = None,
    so_far: CutSoFar | None = None,
) -> list[Unit]:
    """Cut the corpus. The result depends on the files and the options alone.

    Args:
        program: the opened program, if the corpus is one.
        so_far: what was cut before, for the units that follow; there may be none. The limits of
            the options count all units together.
    """
    before = so_far or CutSoFar()
    seed = options.shuffle
    if seed is not None:
        refuse_iterator(program)
    forward = [seed is not None and is_forward(file) for file in files]
    builder = _Builder(
        unit_bytes=max(1, int(options.unit_tokens / options.density)),
        max_docs=options.max_docs if seed is None else None,
        docs=before.docs,
    )
    known = ColumnKinds()
    for number, file in enumerate(files):
        if number < before.file or builder.full:
            continue
        cancellation().check()
        closed = builder.closed
        if program:
            for part in program.ranges(builder.unit_bytes, builder.max_docs):
                span = Span(number, part.first, part.count, 0, part.size, part.digest)
                builder.add(span, part.size)
        else:
            done = before if number == before.file else CutSoFar()
            _cut_file(builder, number, file, options, known, done)
        if forward[number] and builder.closed > closed and not builder.full:
            builder.close()  # otherwise its last unit would tie the next file to it
    units = builder.finish(options.density * options.read, before.units)
    if seed is not None:
        chosen = first_documents(shuffled(units, seed, forward), options.max_docs, program)
        units = [replace(unit, id=number) for number, unit in enumerate(chosen, before.units)]
    if not units and so_far is None:
        names = ", ".join(str(f.path) for f in files[:3])
        raise InputError(f"the corpus is empty: no document in {len(files)} files ({names})")
    if options.max_tokens is not None:
        # (Of those before, the last one may have sufficed.)
        totals = np.cumsum([before.tokens, *(unit.tokens for unit in units)])
        units = units[: int(np.searchsorted(totals, options.max_tokens))]
    return units


def without_duplicates(units: list[Unit], reader: CorpusReader) -> list[Unit]:
    """Return units that list the documents whose text occurred before."""
    hashes: list[np.ndarray] = []
    ordinals: list[list[int]] = []
    for unit in units:
        cancellation().check()
        found = reader.read(unit.spans, unit.first_doc)
        digests = b"".join(xxhash.xxh3_128_digest(document.content) for document in found.usable)
        hashes.append(np.frombuffer(digests, np.uint64).reshape(-1, 2))
        ordinals.append(found.ordinals)
    every = np.concatenate(hashes)
    order = np.lexsort((np.arange(len(every)), every[:, 1], every[:, 0]))
    again = np.zeros(len(every), np.bool_)
    again[order[1:]] = (every[order[1:]] == every[order[:-1]]).all(axis=1)
    of_units = np.split(again, np.cumsum([len(docs) for docs in ordinals])[:-1])
    return [
        replace(unit, skip=tuple(itertools.compress(docs, repeated)))
        for unit, docs, repeated in zip(units, ordinals, of_units, strict=True)
    ]


class _Builder:
    """Collects spans until a unit has enough bytes."""

    def __init__(self, unit_bytes: int, max_docs: int | None, docs: int = 0) -> None:
        self.unit_bytes, self.max_docs = unit_bytes, max_docs
        self.docs = docs  # so far, those of an earlier cut too
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


def _cut_file(
    builder: _Builder,
    number: int,
    file: CorpusFile,
    options: CutOptions,
    known: ColumnKinds,
    done: CutSoFar,
) -> None:
    column, columns, filtered = options.text_column, options.columns, options.filtered
    if file.is_table:
        groups = file.groups(number, column, columns, options.keep, also=filtered, known=known)
        _cut_table(builder, groups, done.first)
    elif file.kind == "bin":
        flat, docs = options.flat, builder.docs
        assert flat
        chunks = flat.checked(file.path, _chunks(file))
        _cut_bytes(builder, number, chunks, flat.ends, done)
        flat.refuse_endless(file.path, builder.docs - docs)
    elif file.is_csv:
        _cut_csv(builder, number, file, options, done)
    elif file.kind == "text":
        ends = _no_ends if options.text_documents == "file" else _line_ends
        _cut_bytes(builder, number, _chunks(file), ends, done)
    else:
        _check_head(file, [*(columns or [column or "text"]), *filtered], known)
        if file.kind == "json":
            _cut_elements(builder, number, file, done.first)
        else:
            _cut_bytes(builder, number, _chunks(file), _line_ends, done)


def _cut_table(builder: _Builder, groups: Iterator[tuple[Span, int]], first: int) -> None:
    for group, size in groups:
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


def _check_head(file: CorpusFile, columns: Sequence[str], known: ColumnKinds) -> None:
    """Check the types in the first row of JSON against earlier files; ignore parse errors."""
    with file.open() as stream:
        data = file.read(stream, _HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
    try:
        if file.kind == "json":
            row = next(file.pieces(iter([data]), _HEAD)).data
        else:
            row = data.partition(b"\n")[0]
        record = json.loads(row or b"null")
    except (ValueError, RecursionError, InputError, StopIteration):
        return
    if isinstance(record, dict):
        fields = cast(dict[str, Any], record)
        known.check(str(file.path), {name: json_kind(value_at(fields, name)) for name in columns})


def _cut_csv(
    builder: _Builder,
    number: int,
    file: CorpusFile,
    options: CutOptions,
    done: CutSoFar,
) -> None:
    """Cut the records after the header, in one pass."""
    header = read_header(file)
    if header is None:
        return
    refuse_missing(file.path, header.columns, options.columns)
    refuse_missing(file.path, header.columns, options.filtered, ", which --filter names")
    refuse_missing(file.path, header.columns, options.keep, ", which --keep names")
    if not options.columns:
        header.text_column(file, options.text_column)
    ends = RecordEnds(file.delimiter)
    with refusing(file):
        done = replace(done, byte=max(done.byte, header.stop))
        _cut_bytes(builder, number, _chunks(file), ends, done)
        if not builder.full:
            ends.finish()


def _after(chunks: Iterable[bytes], start: int) -> Iterator[bytes]:
    """Yield the bytes from an offset on."""
    for data in chunks:
        if start < len(data):
            yield data[start:]
        start = max(0, start - len(data))


def _line_ends(data: bytes, position: int) -> np.ndarray:
    return position + 1 + np.flatnonzero(np.frombuffer(data, np.uint8) == 10)


def _no_ends(data: bytes, position: int) -> np.ndarray:
    return np.empty(0, np.int64)


def _cut_bytes(
    builder: _Builder,
    number: int,
    chunks: Iterable[bytes],
    ends_in: Callable[[bytes, int], np.ndarray],
    done: CutSoFar,
) -> None:
    """Cut a file in one pass; `ends_in` finds the ends of documents in a piece at an offset."""
    # Start of the collected span; byte reached; last document end.
    start = position = ended = done.byte
    first, documents = done.first, 0
    digest = xxhash.xxh3_128()

    def close(stop: int, count: int) -> None:
        nonlocal start, first, documents, digest
        builder.add(Span(number, first, count, start, stop, digest.hexdigest()), stop - start)
        start, first, documents, digest = stop, first + count, 0, xxhash.xxh3_128()

    for data in _after(chunks, done.byte):
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


def _cut_elements(builder: _Builder, number: int, file: CorpusFile, first: int) -> None:
    """Cut a JSON array from element `first` on, in one pass."""
    before, count, start, stop = first, 0, 0, 0  # elements to pass; the span being collected
    digest, begins = xxhash.xxh3_128(), True
    for piece in file.pieces(_chunks(file), _CHUNK):
        if before:
            before -= piece.ends
            continue
        if begins and not count:
            start, digest = piece.start, xxhash.xxh3_128()
        elif begins:
            digest.update(b",")
        digest.update(piece.data)
        begins = piece.ends
        if not piece.ends:
            continue
        stop, count = piece.stop, count + 1
        if stop - start >= builder.room or count >= builder.docs_left:
            builder.add(Span(number, first, count, start, stop, digest.hexdigest()), stop - start)
            first, count = first + count, 0
            if builder.full:
                return
    if count:
        builder.add(Span(number, first, count, start, stop, digest.hexdigest()), stop - start)


def _chunks(file: CorpusFile) -> Iterator[bytes]:
    with file.open() as stream:
        first = True
        while data := file.read(stream, _CHUNK):
            if first:
                refuse_wide(file, data)
            first = False
            cancellation().check()
            yield data


def is_forward(file: CorpusFile) -> bool:
    """Return whether a file's units stay together, in their order."""
    return bool(file.compression) and size_of(file.path) > _QUICKLY


def refuse_iterator(program: ProgramSource | None) -> None:
    if program and program.length is None:
        raise ConfigError(
            f"--shuffle-docs: {program.name} gives its documents one after another; let it return "
            "what has __len__ and __getitem__, or shuffle by itself"
        )


def shuffled(units: Sequence[Unit], seed: int, forward: Sequence[bool]) -> list[Unit]:
    """Return the units, permuted by the seed; `forward` says which files' units stay together."""
    groups: list[list[Unit]] = [[unit] for unit in units[:1]]
    for before, unit in pairwise(units):
        if before.spans[-1].file == unit.spans[0].file and forward[unit.spans[0].file]:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    if len(groups) == 1 < len(units):
        raise InputError(
            "--shuffle-docs: the corpus is one large compressed file, which is read forward; "
            "decompress it, or cut it into several"
        )

    # By hashes alone: the same for every version of Python and its `random`.
    def drawn(group: list[Unit]) -> tuple[int, int]:
        first = group[0].first_doc
        return xxhash.xxh3_64_intdigest(f"{seed} {first}".encode()), first

    return [unit for group in sorted(groups, key=drawn) for unit in group]


def first_documents(
    units: Sequence[Unit], count: int | None, program: ProgramSource | None
) -> Iterator[Unit]:
    """Yield units until there are `count` documents; the last unit may be cut short."""
    for unit in units:
        if count is not None and unit.num_docs > count:
            if count:
                yield _shortened(unit, count, program)
            return
        yield unit
        count = None if count is None else count - unit.num_docs


def _shortened(unit: Unit, count: int, program: ProgramSource | None) -> Unit:
    spans, left = list(unit.spans[:0]), count
    for span in unit.spans:
        taken = min(span.count, left)
        left -= taken
        if taken < span.count and program:
            span = replace(span, digest=program.part(span.first, taken).digest)
        spans += [replace(span, count=taken)] if taken else []
    tokens = max(1, unit.tokens * count // unit.num_docs)
    return replace(unit, num_docs=count, tokens=tokens, spans=tuple(spans))

"""Files of documents: which files a corpus is, and the documents of a range of one of them.

A document's ordinal counts every row or line of the corpus, usable or not, so that it can be known
without parsing. Documents that cannot be used (empty, null, not UTF-8) are counted by reason.
"""

import gzip
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from spile.data import parquet
from spile.errors import DataError, InputError
from spile.objects.files import AnyPath, files_below, files_matching, path_of

_log = logging.getLogger("spile")

_KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
}
_READ_SIZE = 1 << 22
_SAMPLE_BYTES = 1 << 18
_SAMPLE_ROWS = 256
DEMO = Path(__file__).parent / "demo" / "sotu.jsonl.gz"


@dataclass(frozen=True)
class CorpusFile:
    """One file; `kind` is parquet, jsonl or text, `compression` gz, zst or empty."""

    path: AnyPath
    kind: str
    compression: str = ""

    def open(self) -> BinaryIO:
        """The decompressed bytes, as a stream."""
        try:
            if self.compression == "gz":
                source = self.path if isinstance(self.path, Path) else self.path.open("rb")
                return cast(BinaryIO, gzip.open(source, "rb"))
            if self.compression == "zst":
                return parquet.open_zstd(self.path)
            return self.path.open("rb")
        except OSError as error:
            raise InputError(f"{self.path}: cannot open ({error.strerror or error})") from error

    def read(self, stream: BinaryIO, size: int) -> bytes:
        """Read from a stream of `open`; a damaged file is one clear line."""
        try:
            return stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{self.path}: cannot decompress ({error}); is it whole?") from error


@dataclass(frozen=True)
class Span:
    """Consecutive documents of one file.

    For line files `start` and `stop` are offsets into the decompressed bytes, and `digest` is
    their hash, taken when the unit table was made and checked at every reading.
    """

    file: int
    first: int
    count: int
    start: int = 0
    stop: int = 0
    digest: str = ""


def find_files(corpus: str) -> list[CorpusFile]:
    """The files a corpus name stands for, sorted by path."""
    if corpus == "demo":
        return [CorpusFile(DEMO, "jsonl", "gz")]
    path = path_of(corpus)
    if path.is_file():
        return [_classify(path)]
    if path.is_dir():
        candidates = files_below(path)
    else:
        candidates = files_matching(corpus)
        if not candidates:
            raise InputError(f"--corpus {corpus}: no such file, directory, or match for a glob")
    known = [p for p in candidates if _suffixes(p)[0] in _KINDS]
    if not known:
        raise InputError(f"--corpus {corpus}: holds no {', '.join(_KINDS)} file (or .gz, .zst)")
    if len(known) < len(candidates):
        _log.warning(
            "--corpus %s: %d other files left aside (first: %s)",
            corpus,
            len(candidates) - len(known),
            next(p for p in candidates if p not in known),
        )
    return [_classify(p) for p in known]


def _suffixes(path: AnyPath) -> tuple[str, str]:
    suffixes = [s.lower() for s in path.suffixes]
    compression = suffixes.pop()[1:] if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    return (suffixes[-1] if suffixes else ""), compression


def _classify(path: AnyPath) -> CorpusFile:
    suffix, compression = _suffixes(path)
    kind = _KINDS.get(suffix)
    if kind is None or (kind == "parquet" and compression):
        raise InputError(
            f"--corpus {path}: its name does not say what it holds; use {', '.join(_KINDS)} "
            "(the last four may end in .gz or .zst)"
        )
    return CorpusFile(path, kind, compression)


@dataclass(frozen=True)
class Documents:
    """The usable documents of a unit, with their ordinals in the corpus."""

    ordinals: list[int]
    texts: list[str]
    skipped: Counter[str]

    def digest(self) -> str:
        """A hash of exactly what was read; stored with the unit."""
        digest = xxhash.xxh3_128()
        for ordinal, text in zip(self.ordinals, self.texts, strict=True):
            data = text.encode()
            digest.update(f"{ordinal} {len(data)}\n".encode() + data)
        return digest.hexdigest()


class CorpusReader:
    """Reads spans of a list of files; keeps a stream open where the next span continues it."""

    def __init__(
        self, files: list[CorpusFile], text_column: str | None, text_documents: str
    ) -> None:
        self.files = files
        self._column, self._mode = text_column, text_documents
        self._stream: tuple[int, int, BinaryIO] | None = None  # file, offset, stream

    def close(self) -> None:
        if self._stream:
            self._stream[2].close()
        self._stream = None

    def read(self, spans: tuple[Span, ...], first_ordinal: int) -> Documents:
        """All usable documents of some spans, in order."""
        ordinals: list[int] = []
        texts: list[str] = []
        skipped: Counter[str] = Counter()
        ordinal = first_ordinal
        for span in spans:
            stop = ordinal + span.count
            for text, reason in self._texts(span):
                if text is None:
                    skipped[reason] += 1
                else:
                    ordinals.append(ordinal)
                    texts.append(text)
                ordinal += 1
            if ordinal != stop:
                raise DataError(
                    f"{self.files[span.file].path}: changed since the unit table was made (holds "
                    f"fewer documents); restore the file or use another --out"
                )
        return Documents(ordinals, texts, skipped)

    def sample(self, file: int) -> tuple[Documents, int]:
        """Documents from a file's head, and the bytes they took in the file's own measure
        (those of the text column in Parquet, of the lines elsewhere)."""
        source = self.files[file]
        if source.kind == "parquet":
            rows = sum(count for count, _ in parquet.row_groups(source.path, self._column))
            documents = self.read((Span(file, 0, min(rows, _SAMPLE_ROWS)),), 0)
            return documents, sum(len(text.encode()) for text in documents.texts)
        with source.open() as stream:
            data = source.read(stream, _SAMPLE_BYTES)
        if len(data) == _SAMPLE_BYTES:
            data = data[: data.rfind(b"\n") + 1]  # a line longer than the sample teaches nothing
        pairs = list(self._parse(source, data, count_lines(data), 0))
        texts = [text for text, _ in pairs if text is not None]
        skipped = Counter(reason for text, reason in pairs if text is None)
        if source.kind == "jsonl" and not texts and skipped["null"]:
            self._refuse_without_key(source, data)
        return Documents(list(range(len(texts))), texts, skipped), len(data)

    def _refuse_without_key(self, source: CorpusFile, data: bytes) -> None:
        """A key that no sampled record has is a wrong --text-column, not a corpus of nulls."""
        column = self._column or "text"
        lines = data.decode("utf-8", "replace").removeprefix("\ufeff").split("\n")
        records = [json.loads(line) for line in lines if line.strip()]
        keys = sorted({str(key) for record in records for key in record})
        if column not in keys:
            raise InputError(
                f"{source.path}: no key {column!r} in its first {len(records)} lines; they have "
                f"{', '.join(keys)}: choose one with --text-column"
            )

    def _texts(self, span: Span) -> Iterator[tuple[str | None, str]]:
        source = self.files[span.file]
        if source.kind == "parquet":
            values = parquet.read_rows(source.path, self._column, span.first, span.count)
            return ((None, "null") if value is None else _decode(value) for value in values)
        return self._parse(source, self._bytes(source, span), span.count, span.first)

    def _bytes(self, source: CorpusFile, span: Span) -> bytes:
        if self._stream and self._stream[0] == span.file and self._stream[1] <= span.start:
            _, offset, stream = self._stream
        else:
            self.close()
            offset, stream = 0, source.open()
        if not source.compression:
            offset = stream.seek(span.start)
        while offset < span.start:
            skipped = source.read(stream, min(_READ_SIZE, span.start - offset))
            if not skipped:
                break
            offset += len(skipped)
        data = source.read(stream, span.stop - span.start)
        self._stream = (span.file, offset + len(data), stream)
        if xxhash.xxh3_128_hexdigest(data) != span.digest:
            raise DataError(
                f"{source.path}: changed since the unit table was made (bytes {span.start} to "
                f"{span.stop}); restore the file or use another --out"
            )
        return data

    def _parse(
        self, source: CorpusFile, data: bytes, count: int, first: int
    ) -> Iterator[tuple[str | None, str]]:
        if source.kind == "text" and self._mode == "file":
            yield _decode(data)
            return
        lines = data.split(b"\n")[:count]
        for number, line in enumerate(lines, first + 1):
            if source.kind == "text":
                yield _decode(line.removesuffix(b"\r"))
            else:
                yield self._parse_json(source, line, number)

    def _parse_json(self, source: CorpusFile, line: bytes, number: int) -> tuple[str | None, str]:
        if not line.strip():
            return None, "empty"
        try:
            record = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError:
            return None, "not UTF-8"
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{source.path} line {number}: not JSON ({error}); fix or remove that line"
            ) from None
        column = self._column or "text"
        if isinstance(record, str):
            return _usable(record)
        if not isinstance(record, dict):
            raise InputError(f"{source.path} line {number}: not a JSON object")
        keys = cast(dict[str, Any], record)
        value = keys.get(column)
        if value is not None and not isinstance(value, str):
            raise InputError(
                f"{source.path} line {number}: {column!r} holds {type(value).__name__}, not text; "
                "choose another --text-column"
            )
        return _usable(value)


def count_lines(data: bytes) -> int:
    """Lines in some bytes; the last needs no newline, and nothing after a newline is no line."""
    return data.count(b"\n") + (1 if data and not data.endswith(b"\n") else 0)


def _decode(data: bytes) -> tuple[str | None, str]:
    try:
        return _usable(data.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError:
        return None, "not UTF-8"


def _usable(text: str | None) -> tuple[str | None, str]:
    if text is None:
        return None, "null"
    if not text.strip():
        return None, "empty"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, as JSON escapes can spell
        return None, "not UTF-8"
    return text, ""

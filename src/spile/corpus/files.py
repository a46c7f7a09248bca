"""Find the files of a corpus, and open them."""

import gzip
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from spile.core.errors import InputError
from spile.core.units import Span
from spile.corpus.formats import arrow, parquet
from spile.corpus.formats.columns import ColumnKinds
from spile.corpus.formats.datasets_library import build, is_built
from spile.corpus.formats.json import JsonPiece, pieces
from spile.corpus.programs.program import Program, is_program
from spile.objects.hub.names import BUILT, hub_name
from spile.objects.paths import AnyPath, files_below, files_matching, path_of

_log = logging.getLogger("spile.corpus")

_KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".bin": "bin",
}
_DELIMITERS = {"csv": b",", "tsv": b"\t"}
_LINES = ("jsonl", "json", "text", *_DELIMITERS)  # only these are read through gzip and zstd
_ASIDE = ((".csv", ".tsv"), (".json",), (".bin",))  # ignored in a directory that holds other kinds
_COMPUTED = r"cache-.*\.arrow"
DEMO = Path(__file__).parent / "demo" / "sotu.jsonl.gz"


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus.

    `kind` is parquet, arrow, jsonl, json, csv, tsv, text, bin (a flat array of token ids) or
    program; `compression` is gz, zst or empty.
    """

    path: AnyPath
    kind: str
    compression: str = ""
    program: Program | None = None  # in place of a file
    identity: str = ""  # if it is not identified by its bytes

    @property
    def is_table(self) -> bool:
        return self.kind in ("parquet", "arrow")

    @property
    def is_csv(self) -> bool:
        return self.kind in _DELIMITERS

    @property
    def delimiter(self) -> bytes:
        """The byte that separates the fields of CSV or TSV."""
        return _DELIMITERS[self.kind]

    def schema(self) -> Any:
        """Return the names and types of a table's columns."""
        return (arrow if self.kind == "arrow" else parquet).schema(self.path)

    def groups(
        self,
        number: int,
        column: str | None,
        columns: Sequence[str],
        keep: Sequence[str] = (),
        *,
        also: Sequence[str] = (),
        known: ColumnKinds | None = None,
    ) -> Iterator[tuple[Span, int]]:
        """Yield a span and its size in bytes for each row group of Parquet or batch of Arrow.

        In Parquet the size counts the text column only, or some others. The columns in `keep` and
        `also` must exist. `known` holds the types of these columns in other files, which must be
        the same.
        """
        row = 0
        if self.kind == "arrow":
            for b in arrow.batches(self.path, column, columns, keep, also=also, known=known):
                yield Span(number, row, b.rows, b.start, b.stop, b.digest), b.size
                row += b.rows
            return
        groups = parquet.row_groups(self.path, column, columns, keep, also=also, known=known)
        for rows, size in groups:
            yield Span(number, row, rows), size
            row += rows

    def open(self) -> BinaryIO:
        """Open the file as a stream of decompressed bytes."""
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
        """Read from a stream of `open`; raise InputError if the file is damaged."""
        try:
            return stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{self.path}: cannot decompress ({error}); is it whole?") from error

    def pieces(self, chunks: Iterator[bytes], whole: int) -> Iterator[JsonPiece]:
        """Yield the elements of a JSON array; those of more than `whole` bytes come in pieces."""
        return pieces(str(self.path), chunks, whole)


def find_files(corpus: str, cache: str | None = None) -> list[CorpusFile]:
    """Return the files a corpus name stands for, sorted by path.

    `cache` as in `formats/datasets_library.py`.
    """
    if corpus == "demo":
        return [CorpusFile(DEMO, "jsonl", "gz")]
    if is_built(corpus):
        found = build(corpus, cache)
        return [CorpusFile(found.path, "parquet", identity=found.identity)]
    if is_program(corpus):
        program = Program.parse(corpus)
        return [CorpusFile(Path(program.name), "program", program=program)]
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
    if path.is_dir():
        # Beside files of other kinds, CSV and JSON files usually describe the corpus, and a .bin
        # file may hold anything.
        for suffixes in _ASIDE:
            known = [p for p in known if _suffixes(p)[0] not in suffixes] or known
        # `datasets` stores computed results beside a corpus; they would double it.
        known = [p for p in known if not re.fullmatch(_COMPUTED, p.name)] or known
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
    if kind is None or (kind not in _LINES and compression):
        raise InputError(
            f"--corpus {path}: its name does not say what it holds; use {', '.join(_KINDS)} "
            "(JSON, CSV and text may end in .gz or .zst)"
        )
    return CorpusFile(path, kind, compression)


def lasting(source: str) -> str:
    """Return a name of a corpus or model that is valid in any directory, for a later resume."""
    if source.startswith(("https://", "http://")):
        return source.partition("?")[0]  # the rest may be a signature, which is secret
    if is_program(source):
        return str(Program.parse(source))
    if is_built(source):
        return (
            source if hub_name(source, "dataset") else BUILT + os.path.abspath(source[len(BUILT) :])
        )
    named = source in ("demo", "none") or "://" in source
    return source if named else os.path.abspath(source)

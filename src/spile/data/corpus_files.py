"""Which files a corpus is, and how each is opened."""

import gzip
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from spile.data import parquet
from spile.data.json_array import Element, elements
from spile.data.program import Program, is_program
from spile.errors import InputError
from spile.objects.files import AnyPath, files_below, files_matching, path_of

_log = logging.getLogger("spile")

_KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
}
DEMO = Path(__file__).parent / "demo" / "sotu.jsonl.gz"


@dataclass(frozen=True)
class CorpusFile:
    """One file; `kind` is parquet, jsonl, json, text or program, `compression` gz, zst or empty."""

    path: AnyPath
    kind: str
    compression: str = ""
    program: Program | None = None  # where that takes the place of a file

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

    def elements(self, chunks: Iterator[bytes]) -> Iterator[Element]:
        """Of a JSON array."""
        return elements(str(self.path), chunks)


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
        # Beside other kinds, JSON files say something about the corpus.
        known = [p for p in known if _suffixes(p)[0] != ".json"] or known
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
            "(all but Parquet may end in .gz or .zst)"
        )
    return CorpusFile(path, kind, compression)

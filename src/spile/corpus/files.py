"""Find the files that a corpus name stands for, and tell their formats."""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from spile.core.errors import InputError
from spile.corpus import formats
from spile.corpus.formats.contract import CorpusFile, CorpusFormat
from spile.corpus.formats.datasets_library import build, is_built
from spile.corpus.programs.program import Program, is_program
from spile.corpus.rollout_columns import DATA, RECORD
from spile.objects.hub.names import BUILT, hub_name
from spile.objects.paths import AnyPath, files_below, files_matching, path_of

_log = logging.getLogger("spile.corpus")

_COMPUTED = r"cache-.*\.arrow"
DEMO = Path(__file__).parent / "demo" / "sotu.jsonl.gz"


def find_files(corpus: str, cache: str | None = None) -> list[CorpusFile]:
    """Return the files a corpus name stands for, sorted by path.

    `cache` as in `formats/datasets_library.py`.
    """
    if corpus == "demo":
        return [_classify(DEMO)]
    if is_built(corpus):
        found = build(corpus, cache)
        return [replace(_classify(found.path), identity=found.identity)]
    for each in formats.FORMATS:
        if file := each.recognise(corpus):
            return [file]
    path = path_of(corpus)
    if path.is_file():
        return [_classify(path)]
    if path.is_dir():
        made = (path / RECORD).is_file()  # what else a directory of rollouts holds is no corpus
        candidates = files_below(path / DATA.rstrip("/") if made else path)
    else:
        candidates = files_matching(corpus)
        if not candidates:
            raise InputError(f"--corpus {corpus}: no such file, directory, or match for a glob")
    by_suffix = _by_suffix()
    known = [p for p in candidates if _suffixes(p)[0] in by_suffix]
    if path.is_dir():
        ranks = [by_suffix[_suffixes(p)[0]].gives_way for p in known]
        known = [p for p, rank in zip(known, ranks, strict=True) if rank == min(ranks)]
        # `datasets` stores computed results beside a corpus; they would double it.
        known = [p for p in known if not re.fullmatch(_COMPUTED, p.name)] or known
    if not known:
        raise InputError(f"--corpus {corpus}: holds no {', '.join(by_suffix)} file (or .gz, .zst)")
    if len(known) < len(candidates):
        _log.warning(
            "--corpus %s: %d other files skipped (first: %s)",
            corpus,
            len(candidates) - len(known),
            next(p for p in candidates if p not in known),
        )
    return [_classify(p) for p in known]


def _by_suffix() -> dict[str, type[CorpusFormat]]:
    return {suffix: each for each in formats.FORMATS for suffix in each.suffixes}


def _suffixes(path: AnyPath) -> tuple[str, str]:
    suffixes = [s.lower() for s in path.suffixes]
    compression = suffixes.pop()[1:] if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    return (suffixes[-1] if suffixes else ""), compression


def _classify(path: AnyPath) -> CorpusFile:
    by_suffix = _by_suffix()
    suffix, compression = _suffixes(path)
    found = by_suffix.get(suffix)
    if found is None or (compression and not found.compressible):
        compressed = [each.title for each in formats.FORMATS if each.compressible]
        raise InputError(
            f"--corpus {path}: its name does not say what it holds; use {', '.join(by_suffix)} "
            f"({', '.join(compressed)} may end in .gz or .zst)"
        )
    return CorpusFile(path, found, compression)


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

"""The order of units: that of the corpus, or one drawn from the whole of it by a seed.

A drawn order moves whole units: each keeps its documents and their ordinals, and the first few are
a sample of the corpus. Compressed files can only be read forward; one that is large goes as a
whole, so that whoever takes its units one after another decompresses it once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import xxhash

from spile.core.errors import ConfigError, InputError
from spile.corpus.files import CorpusFile
from spile.corpus.programs.source import Source
from spile.corpus.unit import Unit
from spile.objects.paths import size_of

_QUICKLY = 64 << 20  # bytes that are decompressed in about a second


def is_forward(file: CorpusFile) -> bool:
    """Whether a file's units stay together, in their order."""
    return bool(file.compression) and size_of(file.path) > _QUICKLY


def refuse_iterator(program: Source | None) -> None:
    if program and program.length is None:
        raise ConfigError(
            f"--shuffle-docs: {program.name} gives its documents one after another; let it return "
            "what has __len__ and __getitem__, or shuffle by itself"
        )


def shuffled(units: Sequence[Unit], seed: int, forward: Sequence[bool]) -> list[Unit]:
    """In an order that is the seed's; `forward`: of each file, whether its units stay together."""
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

    # By hashes alone: the same for every version of Python and of its random numbers.
    def drawn(group: list[Unit]) -> tuple[int, int]:
        first = group[0].first_doc
        return xxhash.xxh3_64_intdigest(f"{seed} {first}".encode()), first

    return [unit for group in sorted(groups, key=drawn) for unit in group]


def first_documents(
    units: Sequence[Unit], count: int | None, program: Source | None
) -> Iterator[Unit]:
    """Units until there are so many documents; the last may be cut short."""
    for unit in units:
        if count is not None and unit.num_docs > count:
            if count:
                yield _shortened(unit, count, program)
            return
        yield unit
        count = None if count is None else count - unit.num_docs


def _shortened(unit: Unit, count: int, program: Source | None) -> Unit:
    spans, left = list(unit.spans[:0]), count
    for span in unit.spans:
        taken = min(span.count, left)
        left -= taken
        if taken < span.count and program:
            span = replace(span, digest=program.part(span.first, taken).digest)
        spans += [replace(span, count=taken)] if taken else []
    tokens = max(1, unit.tokens * count // unit.num_docs)
    return replace(unit, num_docs=count, tokens=tokens, spans=tuple(spans))

"""The corpus cut into units: the table is made once, stored, and then read by every worker.

Units keep the corpus's order, or are permuted by a seed. The permutation moves whole units: each
keeps its documents and their ordinals, and the first few units are a sample of the corpus.
Compressed files can only be read forward, so the units of a large one stay together: a worker that
takes them in order decompresses the file once.

A corpus that has grown is cut from where the earlier cut ended (`CutSoFar`): its units follow, and
none that was there changes.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import xxhash

from spile.core.errors import InputError
from spile.core.humanize import plural
from spile.core.threads import cancellation
from spile.core.units import Unit
from spile.corpus.documents import CorpusDocument
from spile.corpus.formats.contract import UnitBuilder
from spile.corpus.reader import CorpusReader

_log = logging.getLogger("spile.corpus")

_SAMPLED_FILES = 4
_TOKENS_PER_BYTE = 0.25  # if a sample teaches nothing


def tokens_per_byte(
    reader: CorpusReader, count_tokens: Callable[[list[str]], int], first: int = 0
) -> float:
    """Estimate from the heads of a few files, spread evenly over the corpus from `first` on."""
    texts: list[str] = []
    size = tokens = 0
    unreadable = 0
    refused, hidden = list[CorpusDocument](), list[CorpusDocument]()
    for file in sampled_files(reader, first):
        documents, taken = reader.sample(file)
        refused += [document for document in documents.every if document.refusal]
        hidden += [document for document in documents.usable if document.unshown]
        texts += [document.text for document in documents.usable if document.ids is None]
        tokens += sum(len(d.ids) for d in documents.usable if d.ids is not None)
        size += taken
        unreadable += documents.skipped["not UTF-8"]
    if unreadable > 9 * len(texts):
        raise InputError(
            f"{reader.files[0].path}: the first {unreadable} documents are not UTF-8 text; "
            "is this a text corpus?"
        )
    if refused and not texts:
        raise InputError(
            f"{refused[0].where}: the chat template refuses each of the first "
            f"{plural(len(refused), 'chat')}: {refused[0].refusal}; convert the corpus, or give "
            "another template with --template"
        )
    if hidden:
        _log.warning(
            "%s: the chat template does not show the tool %r; give one that does with --template, "
            "or the model will not read its description and calls",
            hidden[0].where,
            hidden[0].unshown,
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
        keep: columns that must exist, to be kept.
        max_docs: the most documents to cut.
        max_tokens: approximate limit on tokens; the last unit is whole.
        shuffle: a seed. The whole corpus is then cut before anything is chosen.
    """

    unit_tokens: int
    density: float
    read: float = 1.0
    keep: Sequence[str] = ()
    max_docs: int | None = None
    max_tokens: int | None = None
    shuffle: int | None = None


@dataclass(frozen=True)
class CutSoFar:
    """Where an earlier cut of a corpus ended, and what it holds.

    Attributes:
        file: the file to continue with.
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
    reader: CorpusReader, options: CutOptions, so_far: CutSoFar | None = None
) -> list[Unit]:
    """Cut the corpus. The result depends on the files, how they are read, and the options alone.

    Args:
        so_far: what was cut before, for the units that follow; there may be none. The limits of
            the options count all units together.
    """
    files, before, seed = reader.files, so_far or CutSoFar(), options.shuffle
    if seed is not None:
        for number in range(len(files)):
            reader.opened(number).refuse_shuffle()
    forward = [seed is not None and file.is_forward for file in files]
    builder = UnitBuilder(
        max(1, int(options.unit_tokens / options.density)),
        options.max_docs if seed is None else None,
        before.docs,
        options.keep,
    )
    for number in range(before.file, len(files)):
        if builder.full:
            break
        cancellation().check()
        closed = builder.closed
        done = before if number == before.file else CutSoFar()
        reader.opened(number).cut(builder, done.first, done.byte)
        if forward[number] and builder.closed > closed and not builder.full:
            builder.close()  # otherwise its last unit would tie the next file to it
    units = builder.finish(options.density * options.read, before.units)
    if seed is not None:
        chosen = first_documents(shuffled(units, seed, forward), options.max_docs, reader)
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
    units: Sequence[Unit], count: int | None, reader: CorpusReader
) -> Iterator[Unit]:
    """Yield units until there are `count` documents; the last unit may be cut short."""
    for unit in units:
        if count is not None and unit.num_docs > count:
            if count:
                yield _shortened(unit, count, reader)
            return
        yield unit
        count = None if count is None else count - unit.num_docs


def _shortened(unit: Unit, count: int, reader: CorpusReader) -> Unit:
    spans, left = list(unit.spans[:0]), count
    for span in unit.spans:
        taken = min(span.count, left)
        left -= taken
        if 0 < taken < span.count:
            span = reader.opened(span.file).shortened(span, taken)
        spans += [span] if taken else []
    tokens = max(1, unit.tokens * count // unit.num_docs)
    return replace(unit, num_docs=count, tokens=tokens, spans=tuple(spans))

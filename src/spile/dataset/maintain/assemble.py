"""New datasets from units of others: some taps or units of one dataset, or all units of several.

Files with rows are copied unchanged. Three kinds of files are rewritten: the records; the
statistics, if taps are left out; and the index and documents of a merged dataset that is not the
first, because its documents get new ordinals. The table comes last, and names the source units.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from spile.core.errors import ConfigError
from spile.core.expressions import RowFilter
from spile.core.options import flag_of
from spile.core.threads import OnProgress
from spile.dataset import format as fmt
from spile.dataset.codec.shard import read_tensors, statistics_tensors
from spile.dataset.format import Done, Shard
from spile.dataset.maintain.copy import (
    FileCopier,
    NewDataset,
    UnitCopy,
    copy_units,
    refuse_if_too_large,
    refuse_nested,
)
from spile.dataset.maintain.finished import FinishedRecords, open_finished, summarize
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import Objects, check_creates_once

COPIED_FROM = "copied"  # key of the origin in `made_by`
_OF_ALL = ("corpus", "max_docs", "max_tokens")  # what a merge makes of those of all datasets


@dataclass(frozen=True)
class Assembled:
    """The new dataset."""

    dest: str
    taps: tuple[str, ...]
    units: int
    units_there: int  # before
    rows: int  # of each tap
    bytes: int


@dataclass(frozen=True)
class _Source:
    """A source dataset, and the units to copy from it."""

    objects: Objects
    table: Table
    records: FinishedRecords
    units: Sequence[int]
    first_doc: int = 0  # offset of its documents' ordinals

    @property
    def runs(self) -> list[list[int]]:
        """The units as runs: the first and the last unit of each."""
        numbered = enumerate(self.units)
        runs = itertools.groupby(numbered, lambda pair: pair[1] - pair[0])
        return [[run[0][1], run[-1][1]] for run in (list(found) for _, found in runs)]

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.objects.url,
            "fingerprint": self.records.fingerprint,
            "units": self.runs,
            "first_doc": self.first_doc,
        }


# -- a part of one dataset -----------------------------------------------------------------------


def parse_units(text: str, count: int) -> list[int]:
    """Parse units such as `0-99,150`; return them in ascending order.

    Args:
        count: the number of units that there are. Of larger numbers, this one is returned.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,8})(?:-(\d{1,8}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"--units {text!r}: {part!r} is not a unit (5) or a range (0-27)")
        first, last = (min(int(number), count) for number in (match[1], match[2] or match[1]))
        found.update(range(first, last + 1))
    return sorted(found)


def copy_part(
    source: Objects,
    dest: Objects,
    *,
    taps: str | Sequence[str] | None = None,
    units: str | Sequence[int] | None = None,
    progress: OnProgress | None = None,
) -> Assembled:
    """Copy some taps or units of a finished dataset as a new dataset, or continue such a copy.

    Rows get new numbers; documents keep their ordinals.

    Args:
        taps: by default, all complete taps; as for `export`.
        units: as `parse_units` reads them, or in ascending order; by default, all.
    """
    refuse_nested(source, dest)
    table, records = open_finished(source, taps)
    count = len(table.units)
    chosen = parse_units(units, count) if isinstance(units, str) else units
    chosen = range(count) if chosen is None else chosen
    if not chosen or chosen[-1] >= count:
        raise ConfigError(f"--units: {source.url} has {count} units, 0 to {count - 1}")
    if table.shuffled and len(chosen) < count:
        raise ConfigError(
            f"--units: {source.url} was shuffled, so each unit holds rows of all documents; "
            "copy units of the dataset that it was made from"
        )
    part = _Source(source, table, records, chosen)
    runs = [table.units.part(first, last + 1) for first, last in part.runs]
    new = replace(table, units=UnitColumns.joined(runs), made_of=(part.to_json(),))
    return _assemble([part], dest, new, progress)


# -- several datasets ----------------------------------------------------------------------------


def merge(
    sources: Sequence[Objects], dest: Objects, *, progress: OnProgress | None = None
) -> Assembled:
    """Join finished datasets of one recipe over different documents, or continue such a merge.

    Units and documents are numbered on from dataset to dataset, and keep their order.

    Raises:
        ConfigError: if anything but the corpus differs; the message names it.
    """
    if len(sources) < 2:
        raise ConfigError("merge needs at least two datasets, and a place for the new one")
    parts: list[_Source] = []
    for objects in sources:
        refuse_nested(objects, dest)
        table, records = open_finished(objects)
        before = parts[-1] if parts else None
        first = before.first_doc + _documents(before.table) if before else 0
        parts.append(_Source(objects, table, records, range(len(table.units)), first))
    _refuse_shared_files(parts)
    for part in parts[1:]:
        _refuse_different(parts[0], part)
    first = parts[0].table
    recipe = replace(
        first.recipe,
        corpus=tuple(itertools.chain(*(part.table.recipe.corpus for part in parts))),
        **_limits_of_all(parts),
    )
    files = 0
    units = list[UnitColumns]()
    for part in parts:
        units.append(part.table.units.moved(part.first_doc, files))
        files += len(part.table.files)
    tokens = [int(part.table.units.tokens.sum()) for part in parts]
    kept = sum(n * part.table.kept for n, part in zip(tokens, parts, strict=True))
    places = itertools.chain(*(part.table.sources for part in parts))
    new = replace(
        first,
        recipe=recipe,
        fingerprint=recipe.fingerprint(),
        files=tuple(itertools.chain(*(part.table.files for part in parts))),
        units=UnitColumns.joined(units),
        kept=kept / sum(tokens) if sum(tokens) else first.kept,
        more_sources=tuple(dict.fromkeys(places))[1:],
        made_of=tuple(part.to_json() for part in parts),
    )
    return _assemble(parts, dest, new, progress)


def _documents(table: Table) -> int:
    """Return the number of documents in a corpus, read or skipped."""
    _, first, count = table.units.doc_runs
    return int((first + count).max(initial=0))


def _refuse_different(one: _Source, other: _Source) -> None:
    """Refuse datasets that differ in more than their corpus."""
    for part in (one, other):
        if part.table.shuffled:
            raise ConfigError(
                f"merge: {part.objects.url} was shuffled; merge the dataset that it was made from, "
                "and shuffle the result"
            )
    mine, theirs = (part.table.recipe.identity() for part in (one, other))
    named = f"merge: {one.objects.url} and {other.objects.url}"
    for name in sorted(mine):
        if name not in _OF_ALL and mine[name] != theirs[name]:
            raise ConfigError(
                f"{named} differ in {name.replace('_', '-')}: {fmt.shown(mine[name])} and "
                f"{fmt.shown(theirs[name])}; extract both by one recipe"
            )
    if one.table.taps != other.table.taps:
        raise ConfigError(f"{named} store their taps differently; extract both by one recipe")
    recipe, together = one.table.recipe, "extract both corpora as one dataset, or --add-corpus one"
    if recipe.where is not None and RowFilter(recipe.where, None).by_document:
        raise ConfigError(
            f"{named} were made with --where {recipe.where!r}, and a merge changes the numbers of "
            f"documents (doc); {together}"
        )
    if recipe.dedupe:
        raise ConfigError(
            f"{named} were made with --dedupe, and nothing tells whether they share documents; "
            f"{together}"
        )
    scales = [part.records.scales() for part in (one, other)]
    for tap in scales[0]:
        if not np.array_equal(scales[0][tap], scales[1].get(tap, ())):
            raise ConfigError(
                f"{named} have different int8 scales for {tap}, so they cannot be merged"
            )
    if one.records.weights() != other.records.weights():
        raise ConfigError(f"{named} were made with different weights ({fmt.MODEL} differs)")


def _refuse_shared_files(parts: Sequence[_Source]) -> None:
    """Refuse a corpus file that two of the datasets have: its documents would come twice."""
    holders: dict[str, _Source] = {}
    for part in parts:
        for file in part.table.files:
            other = holders.setdefault(file["identity"], part)
            if other is not part:
                raise ConfigError(
                    f"merge: {other.objects.url} and {part.objects.url} both hold the documents of "
                    f"{fmt.shown(file['path'])}; leave one of the two out"
                )


def _limits_of_all(parts: Sequence[_Source]) -> dict[str, int | None]:
    """Return the limits on documents that are true of the merged dataset.

    A limit that left nothing out is dropped. One that ended the last dataset becomes the sum of
    all.

    Raises:
        ConfigError: if an earlier dataset was cut short: no limit describes what the whole lacks.
    """
    return {
        "max_docs": _limit_of_all(parts, "max_docs", "num_docs"),
        "max_tokens": _limit_of_all(parts, "max_tokens", "tokens"),
    }


def _limit_of_all(parts: Sequence[_Source], name: str, column: str) -> int | None:
    counts = [int(getattr(part.table.units, column).sum()) for part in parts]
    cut = list[_Source]()
    for part, count in zip(parts, counts, strict=True):
        limit = getattr(part.table.recipe, name)
        # (A copy may lack units, so its own sum does not show it.)
        if limit is not None and (count >= limit or part.table.made_of):
            cut.append(part)
    if not cut:
        return None
    url, flag = cut[0].objects.url, flag_of(name)
    if cut[0].table.recipe.shuffle_docs is not None:
        raise ConfigError(
            f"merge: {url} is a sample of its corpus (--shuffle-docs with {flag}), and several "
            "samples are not one of all; extract the corpora as one dataset"
        )
    if cut[0] is not parts[-1]:
        raise ConfigError(
            f"merge: {url} ends at its {flag}, and the documents after that would be missing in "
            "between; merge it last, or add them first with --more and a larger limit"
        )
    return sum(counts)


# -- both ------------------------------------------------------------------------------------------


def _assemble(
    parts: Sequence[_Source], dest: Objects, table: Table, progress: OnProgress | None
) -> Assembled:
    new = NewDataset(Ledger(dest), table, COPIED_FROM, "other units or taps of this one")
    there = new.units_there()
    rows = sum(int(part.records.catalog.rows[np.asarray(part.units)].sum()) for part in parts)
    if not there:
        refuse_if_too_large(dest, table, rows)
        check_creates_once(dest)
    new.begin(parts[0].objects, parts[0].records)
    size, copier = 0, FileCopier(dest)
    units = _units(parts, new, there, copier)
    for done in copy_units(units, dest, *(part.objects for part in parts)):
        size += sum(file.bytes for file in done.files())
        if progress:
            progress(done.unit + 1, len(table.units))
    new.finish()
    copier.clean()
    taps = table.recipe.stored_taps
    return Assembled(dest.url, taps, len(table.units), len(there), rows, size)


def _units(
    parts: Sequence[_Source], new: NewDataset, there: set[int], copier: FileCopier
) -> Iterator[UnitCopy[Done]]:
    """Yield the units in order, with the files to copy: none for those that are there."""
    numbers = itertools.count()
    for part in parts:
        for done in part.records.of(part.units):
            number = next(numbers)
            files = () if number in there else _files(part, done, number, new, copier)
            yield UnitCopy([*files], partial(_commit, new, number, done))


def _commit(new: NewDataset, number: int, source: Done, files: Sequence[Shard]) -> Done:
    """Create the record of a unit and return it, or return the existing one.

    Args:
        files: the copied files; empty if the unit is there already.
    """
    # The origin is equal only for the same unit of the same dataset.
    origin = {"unit": source.unit, "record": summarize([source]).digest}
    if files:
        *shards, index, statistics, documents = files
        made = replace(
            source,
            unit=number,
            attempt=_attempt(new, number, source),
            fingerprint=new.table.fingerprint,
            made_from=new.made_from(number),
            shards=tuple(shards),
            index=index,
            statistics=statistics,
            documents_table=documents,
            made_by={**source.made_by, COPIED_FROM: origin},
        )
        if new.ledger.commit(made):
            return made
    return new.ours(number, origin)


def _attempt(new: NewDataset, number: int, source: Done) -> str:
    """Return the attempt under which a unit's files are copied.

    It follows from the content of the files, some of which are changed. So a second call continues,
    and a key never gets other content: readers keep what they have read from a bucket.
    """
    return xxhash.xxh3_64_hexdigest(f"{source.attempt} {new.made_from(number)}".encode())


def _files(
    part: _Source, done: Done, number: int, new: NewDataset, copier: FileCopier
) -> Iterator[Callable[[], Shard]]:
    """Yield a function that makes each file of a unit: shards, then the files beside them."""
    table = new.table
    prefix = table.layout.attempt_prefix(number, _attempt(new, number, done))

    def key(file: Shard) -> str:
        return prefix + file.key.rpartition("/")[2]

    def copied(file: Shard) -> Callable[[], Shard]:
        return partial(copier.copy, part.objects, file, key(file))

    for shard in done.shards:
        yield copied(shard)

    def rewritten(file: Shard, change: Callable[[], Mapping[str, np.ndarray]]) -> Shard:
        return copier.write(change(), file, key(file))

    def with_docs(file: Shard) -> dict[str, np.ndarray]:
        CheckedFile(part.objects, file).check()
        tensors = read_tensors(part.objects, file.key)
        return {**tensors, "doc": tensors["doc"] + part.first_doc}

    def statistics() -> dict[str, np.ndarray]:
        found = part.records.statistics(done.unit)
        return statistics_tensors({tap: found[tap] for tap in table.taps})

    moved, other = part.first_doc > 0, part.records.rewrites_statistics
    index, told = done.index, done.documents_table
    yield partial(rewritten, index, partial(with_docs, index)) if moved else copied(index)
    yield partial(rewritten, done.statistics, statistics) if other else copied(done.statistics)
    yield partial(rewritten, told, partial(with_docs, told)) if moved else copied(told)

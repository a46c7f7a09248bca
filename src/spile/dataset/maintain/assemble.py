"""New datasets made of units of others: some taps or units of one, or all units of several.

Rows are copied as they are, file by file; only what names units, taps or documents is written anew:
the records, the statistics where taps are left out, and index and documents where a corpus follows
another one, whose documents come first. The `made_by` of a done record says what the unit was made
from; with it, the same command continues after a kill, and any other is refused. The table comes
last, and says of which units the dataset was made.
"""

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.threads import mapped
from spile.dataset.codec.shard import read_tensors, statistics_tensors
from spile.dataset.maintain.copy import (
    FileCopier,
    as_stored,
    copy_records,
    refuse_if_too_large,
    refuse_missing,
    refuse_nested,
    refuse_strangers,
)
from spile.dataset.maintain.finished import FinishedRecords, Sizes, open_finished, summarize
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.records import format as fmt
from spile.dataset.records.format import Done, Shard
from spile.dataset.records.ledger import Ledger, Table
from spile.objects import Objects, check_creates_once

COPIED_FROM = "copied"  # key in `made_by`: what the unit was made from

Progress = Callable[[int, int], None]


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
    """A dataset, and the units that are taken from it."""

    objects: Objects
    table: Table
    records: FinishedRecords
    units: Sequence[int]
    first_doc: int = 0  # added to the ordinals of its documents

    @property
    def runs(self) -> list[list[int]]:
        """The units as runs: the first and the last of each."""
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


def parse_units(text: str) -> list[int]:
    """Return the units that a text such as `0-99,150` names, ascending."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,8})(?:-(\d{1,8}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"--units {text!r}: {part!r} is not a unit (5) or a range (0-27)")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


def copy_part(
    source: Objects,
    dest: Objects,
    *,
    taps: str | Sequence[str] | None = None,
    units: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Assembled:
    """Copy some taps or units of a finished dataset, as a dataset of its own; or continue.

    Rows are counted anew; documents keep their ordinals.

    Args:
        taps: all that are complete, if not given; as for `export`.
        units: all if not given; ascending.
    """
    refuse_nested(source, dest)
    table, records = open_finished(source, taps)
    chosen = range(len(table.units)) if units is None else units
    if not chosen or chosen[-1] >= len(table.units):
        raise ConfigError(
            f"--units: {source.url} has {len(table.units)} units, 0 to {len(table.units) - 1}"
        )
    if table.shuffled and len(chosen) < len(table.units):
        raise ConfigError(
            f"--units: {source.url} was shuffled, so the rows of its documents lie all over it; "
            "copy units of the dataset that it was made from"
        )
    part = _Source(source, table, records, chosen)
    runs = [table.units.part(first, last + 1) for first, last in part.runs]
    new = replace(table, units=_joined_units(runs), made_of=(part.to_json(),))
    return _assemble([part], dest, new, progress)


# -- several datasets ----------------------------------------------------------------------------


def merge(
    sources: Sequence[Objects], dest: Objects, *, progress: Progress | None = None
) -> Assembled:
    """Join finished datasets of one recipe over different documents; or continue.

    Units keep their order, dataset by dataset. Documents of each follow those of the one before, in
    number and in order.

    Raises:
        ConfigError: if anything but the corpus differs; the message says what.
    """
    if len(sources) < 2:
        raise ConfigError("merge takes two datasets or more, and a place for the new one")
    parts: list[_Source] = []
    for objects in sources:
        refuse_nested(objects, dest)
        table, records = open_finished(objects)
        before = parts[-1] if parts else None
        first = before.first_doc + _documents(before.table) if before else 0
        parts.append(_Source(objects, table, records, range(len(table.units)), first))
    for part in parts[1:]:
        _refuse_different(parts[0], part)
    first = parts[0].table
    recipe = replace(
        first.recipe,
        corpus=tuple(itertools.chain(*(part.table.recipe.corpus for part in parts))),
    )
    files = 0
    units = list[Any]()
    for part in parts:
        units.append(part.table.units.moved(part.first_doc, files))
        files += len(part.table.files)
    tokens = [int(part.table.units.tokens.sum()) for part in parts]
    kept = sum(n * part.table.kept for n, part in zip(tokens, parts, strict=True))
    new = replace(
        first,
        recipe=recipe,
        fingerprint=recipe.fingerprint(),
        files=tuple(itertools.chain(*(part.table.files for part in parts))),
        units=_joined_units(units),
        kept=kept / sum(tokens) if sum(tokens) else first.kept,
        more_sources=tuple(itertools.chain(*(part.table.sources for part in parts)))[1:],
        made_of=tuple(part.to_json() for part in parts),
    )
    return _assemble(parts, dest, new, progress)


def _documents(table: Table) -> int:
    """Return the number of documents of a corpus, read or not."""
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
        if name != "corpus" and mine[name] != theirs[name]:
            raise ConfigError(
                f"{named} differ in {name.replace('_', '-')}: {fmt.shown(mine[name])} and "
                f"{fmt.shown(theirs[name])}; extract both by one recipe"
            )
    if one.table.taps != other.table.taps:
        raise ConfigError(f"{named} store their taps differently; extract both by one recipe")
    both = {*one.table.recipe.corpus} & {*other.table.recipe.corpus}
    if both:
        raise ConfigError(f"{named} both hold the documents of {fmt.shown(min(both))}")
    scales = [part.records.scales() for part in (one, other)]
    for tap in scales[0]:
        if not np.array_equal(scales[0][tap], scales[1].get(tap, ())):
            raise ConfigError(
                f"{named} have other int8 scales for {tap}, so their rows cannot share one dataset"
            )
    if one.records.weights() != other.records.weights():
        raise ConfigError(f"{named} were made by other weights ({fmt.MODEL} differs)")


# -- both ------------------------------------------------------------------------------------------


def _joined_units(parts: Sequence[Any]) -> Any:
    units = parts[0]
    for part in parts[1:]:
        units = units.followed_by(part)
    return units


def _assemble(
    parts: Sequence[_Source], dest: Objects, table: Table, progress: Progress | None
) -> Assembled:
    ledger = Ledger(dest)
    found = ledger.read_table()
    if found is not None and _identity(found) != _identity(table):
        raise _other_dataset_error(dest)
    if found is None:
        refuse_strangers(dest, [fmt.SCRATCH])
    there = ledger.done_units()
    if not there.issubset(range(len(table.units))):
        raise _other_dataset_error(dest)
    rows = sum(int(part.records.catalog.rows[np.asarray(part.units)].sum()) for part in parts)
    if not there:
        refuse_if_too_large(dest, table.taps, rows)
        check_creates_once(dest)
    if not copy_records(parts[0].objects, parts[0].records, dest):
        raise _other_dataset_error(dest)
    sizes, units_there, copier = Sizes(), 0, FileCopier(dest)
    for done, was_there in _units(parts, ledger, table, there, copier):
        sizes.add(done)
        units_there += was_there
        if progress:
            progress(done.unit + 1, len(table.units))
    ledger.complete(table)
    if _identity(ledger.create_table(table)) != _identity(table):
        raise _other_dataset_error(dest)
    copier.clean()
    taps = table.recipe.stored_taps
    return Assembled(dest.url, taps, len(table.units), units_there, rows, sizes.bytes)


def _identity(table: Table) -> bytes:
    """Return a table's bytes without the places where its sources were found."""
    told = tuple({**source, "url": ""} for source in table.made_of)
    return as_stored(replace(table, made_of=told))


def _other_dataset_error(dest: Objects) -> ConfigError:
    return ConfigError(
        f"{dest.url} holds another dataset, or other units or taps of this one; choose an empty "
        "place"
    )


def _units(
    parts: Sequence[_Source], ledger: Ledger, table: Table, there: set[int], copier: FileCopier
) -> Iterator[tuple[Done, bool]]:
    """Copy the units that are missing; yield each, and whether it was there.

    Files of several units are copied at once, and records are created in order.
    """
    waiting = deque[tuple[int, _Source, Done, int]]()  # whose files are on their way, and how many

    def jobs() -> Iterator[Callable[[], Any]]:
        number = 0
        for part in parts:
            for done in part.records.of(part.units):
                makes: list[Callable[[], Any]] = [partial(_ours, ledger, number, part, done)]
                if number not in there:
                    makes = list(_files(part, done, number, table, copier))
                waiting.append((number, part, done, len(makes)))
                yield from makes
                number += 1

    parallel = max(ledger.objects.parallel, *(part.objects.parallel for part in parts))
    results = mapped(lambda job: job(), jobs(), parallel)
    for first in results:
        number, part, done, count = waiting.popleft()
        if number in there:
            yield first, True
            continue
        files: list[Shard] = [first, *itertools.islice(results, count - 1)]
        *shards, index, statistics, documents = files
        made = replace(
            done,
            unit=number,
            fingerprint=table.fingerprint,
            shards=tuple(shards),
            index=index,
            statistics=statistics,
            documents_table=documents,
            made_by={**done.made_by, COPIED_FROM: _origin(part, done)},
        )
        if ledger.commit(made):
            yield made, False
        else:
            yield _ours(ledger, number, part, done), True


def _origin(part: _Source, done: Done) -> dict[str, Any]:
    """Return what a unit is made from; it is equal only for the same unit of the same dataset."""
    return {"unit": done.unit, "record": summarize([done]).digest}


def _ours(ledger: Ledger, number: int, part: _Source, done: Done) -> Done:
    found = ledger.read_done(number)
    if found is None or found.made_by.get(COPIED_FROM) != _origin(part, done):
        raise _other_dataset_error(ledger.objects)
    refuse_missing(ledger, found)
    return found


def _files(
    part: _Source, done: Done, number: int, table: Table, copier: FileCopier
) -> Iterator[Callable[[], Shard]]:
    """Yield what makes each file of a unit: the shards of its taps, then the files beside them."""
    prefix = table.layout.attempt_prefix(number, done.attempt)

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

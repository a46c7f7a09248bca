"""Compaction: the same rows in the same order, in few large shards, as a new dataset.

Consecutive units are merged up to a size, and their rows are cut into new shards.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.dataset.codec.columns import Ints, ints, run_of
from spile.dataset.codec.documents import merge_documents, read_documents
from spile.dataset.format import Done
from spile.dataset.maintain.copy import (
    SHARD_BYTES,
    NewDataset,
    as_stored,
    copy_check,
    read_index,
    read_rows,
    refuse_if_too_large,
    refuse_nested,
)
from spile.dataset.maintain.finished import (
    FinishedRecords,
    RecordsSummary,
    Sizes,
    open_finished,
)
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.objects import Objects, check_creates_once

UNIT_BYTES = 64 << 30
COMPACTED = "compacted"  # key of the origin in `made_by`

# Limits for a merged unit: its index and documents are held in memory, as in extract.
_INDEX_BYTES = 128 << 20
_DOCUMENTS_BYTES = 128 << 20

_log = logging.getLogger("spile.dataset")


@dataclass(frozen=True)
class Compacted:
    """The sizes of a compaction, before and after."""

    dest: str
    rows: int  # in each tap
    units: int
    units_before: int
    shards: int
    shards_before: int
    bytes: int
    bytes_before: int


@dataclass(frozen=True)
class _Source:
    """A finished dataset, and how its units are merged.

    Each record is read once, when its merged unit is made or checked. It is compared with the
    manifest, which then provides the files.
    """

    objects: Objects
    table: Table
    records: FinishedRecords
    ends: Ints  # for each merged unit, the end of its run of units

    def __len__(self) -> int:
        return len(self.ends)

    def units(self, number: int) -> range:
        """Return the source units of a merged unit."""
        merged = run_of(self.ends, number)
        return range(merged.start, merged.stop)

    def rows(self, number: int) -> int:
        units, starts = self.units(number), self.records.catalog.starts
        return int(starts[units.stop] - starts[units.start])

    def described(self, number: int) -> Iterator[Done]:
        """Yield the source units of a merged unit, without `made_by`."""
        return map(self.records.catalog.__getitem__, self.units(number))

    def summary(self, number: int) -> RecordsSummary:
        """Read and summarize the records of a merged unit's source units."""
        return self.records.summary(self.units(number))

    def origin(self, number: int, summary: RecordsSummary) -> dict[str, Any]:
        """Return the origin of a merged unit, which is equal only for the same source and cut."""
        units = self.units(number)
        return {"units": [units[0], units[-1]], "records": summary.digest}

    def merged(self, ledger: Ledger) -> NewDataset:
        """Return the new dataset."""
        table = replace(self.table, units=self.table.units.merged(self.ends))
        other = "this one compacted with another --unit-bytes"
        return NewDataset(ledger, table, COMPACTED, other)


def compact(
    source: Objects,
    dest: Objects,
    *,
    unit_bytes: int = UNIT_BYTES,
    shard_bytes: int = SHARD_BYTES,
    compress: bool = False,
    taps: str | Sequence[str] | None = None,
) -> Compacted:
    """Write a compacted copy of a finished dataset, or continue one.

    Args:
        taps: by default, all complete taps; as for `export`.
        unit_bytes: limit on the stored files of a merged unit.
        shard_bytes: limit on a shard; lower if the store holds a stream in memory.
        compress: whether to write byte planes and zstd, whatever the source has.
    """
    refuse_nested(source, dest)
    table, records = open_finished(source, taps)
    merging = _Source(source, table, records, _ends(table, records, unit_bytes))
    new = merging.merged(Ledger(dest))
    there = new.units_there()
    missing = [number for number in range(len(merging)) if number not in there]
    if not compress:
        refuse_if_too_large(dest, table, sum(map(merging.rows, missing)))
    if missing:
        check_creates_once(dest)
    new.begin(source, records)
    copy_check(source, dest)
    shard_bytes = table.shard_limit(dest, shard_bytes)
    before, after = Sizes(), Sizes()
    for number in (*sorted(there), *missing):
        summary = merging.summary(number)
        if number in there:
            made = new.ours(number, merging.origin(number, summary))
        else:
            made = _write(new, merging, number, summary, shard_bytes, compress)
            _log.info("unit %d of %d: %d rows", number + 1, len(merging), made.rows)
        before.add_sizes(summary.sizes)
        after.add(made)
    new.finish()
    return Compacted(
        dest=dest.url,
        rows=after.rows,
        units=len(merging),
        units_before=len(records),
        shards=after.shards,
        shards_before=before.shards,
        bytes=after.bytes,
        bytes_before=before.bytes,
    )


def recopy(source: Objects, ledger: Ledger, units: Sequence[int], *, compress: bool) -> None:
    """Write some units of a compacted dataset again, from its source.

    Args:
        ledger: of the compacted dataset; in it these units are not done.
    """
    stored = ledger.table()
    table, records = open_finished(source, stored.recipe.stored_taps)
    merging = _Source(source, table, records, _ends_of(table, stored))
    new = merging.merged(ledger)
    if as_stored(new.table) != as_stored(stored):
        raise _other_source_error(source, ledger)
    for unit in sorted(ledger.done_units()):
        done, origin = ledger.read_done(unit), merging.origin(unit, merging.summary(unit))
        if done is None or done.made_by.get(COMPACTED, origin) != origin:  # (or made again)
            raise _other_source_error(source, ledger)
    shard_bytes = table.shard_limit(ledger.objects, SHARD_BYTES)
    for unit in units:
        _write(new, merging, unit, merging.summary(unit), shard_bytes, compress)


def _other_source_error(source: Objects, ledger: Ledger) -> ConfigError:
    return ConfigError(f"{source.url} is not the dataset that {ledger.objects.url} was made from")


# -- the source ------------------------------------------------------------------------------


def _ends(table: Table, records: FinishedRecords, unit_bytes: int) -> Ints:
    """Return where merged units end, given their size limit; a unit is never split."""
    ends: list[int] = []
    begun = size = rows = about = 0
    sizes = zip(records.bytes_of_units(), records.catalog.rows, strict=True)
    for number, ((more, documents), more_rows) in enumerate(sizes):
        too_many = (rows + int(more_rows)) * table.index_dtype.itemsize > _INDEX_BYTES
        too_many |= about + documents > _DOCUMENTS_BYTES
        if number > begun and (size + more > unit_bytes or too_many):
            ends.append(number)
            begun, size, rows, about = number, 0, 0, 0
        size, rows, about = size + more, rows + int(more_rows), about + documents
    return ints([*ends, len(records)])


def _ends_of(table: Table, stored: Table) -> Ints:
    """Return where the merged units of an existing compacted dataset end."""
    ends: list[int] = []
    number, docs = 0, table.units.num_docs
    for missing in stored.units.num_docs.tolist():
        begun = number
        while missing > 0 and number < len(docs):
            missing -= int(docs[number])
            number += 1
        if number > begun:
            ends.append(number)
    return ints(ends)


def _read_index(source: _Source, number: int) -> np.ndarray:
    index = np.empty(source.rows(number), source.table.index_dtype)
    reached = 0
    for done in source.described(number):
        index[reached : reached + done.rows] = read_index(source.objects, source.table, done)
        reached += done.rows
    return index


def _read_documents(source: _Source, number: int, index: np.ndarray) -> dict[str, np.ndarray]:
    keep = source.table.recipe.table_columns

    def read(done: Done) -> Any:
        CheckedFile(source.objects, done.documents_table).check()
        return read_documents(source.objects, done.documents_table, keep)

    tables = map(read, source.described(number))
    return merge_documents(tables, None if source.table.shuffled else index)


def _write(
    new: NewDataset,
    source: _Source,
    number: int,
    summary: RecordsSummary,
    shard_bytes: int,
    compress: bool,
) -> Done:
    """Write one merged unit, a window of rows at a time."""
    table, index = source.table, _read_index(source, number)
    writer = UnitWriter(
        new.objects,
        number,
        index,
        table.taps,
        shard_bytes,
        layout=new.ledger.layout,
        compress=compress,
    )
    with Attempt(new.ledger, writer) as attempt:
        for tap, info in table.taps.items():
            for done in source.described(number):
                for shard in done.shards:
                    if shard.tap == tap:
                        for rows, scales in read_rows(source.objects, shard, info):
                            writer.write(tap, rows, scales)
        for unit in source.units(number):
            for tap, stats in source.records.statistics(unit).items():
                writer.stats[tap].merge(stats)
        return new.commit(
            attempt,
            summary,
            documents=_read_documents(source, number, index),
            made_from=source.origin(number, summary),
            makers=summary.makers,
        )

"""Compaction: the same rows in the same order, in few large shards, as a new dataset.

Consecutive units are merged up to a size, and shards are cut anew. The `made_by` of a done record
says what the unit was made from; with it, the same command continues after a kill, and any other is
refused.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import xxhash

from spile.core.errors import ConfigError
from spile.core.index import INDEX_DTYPE
from spile.dataset import format as fmt
from spile.dataset.format import Done
from spile.dataset.ledger import Attempt, Ledger, Table
from spile.dataset.maintain.copy import (
    SHARD_BYTES,
    as_stored,
    copy_check,
    copy_records,
    makers_of,
    read_index,
    read_rows,
    records_digest,
    refuse_if_too_large,
    refuse_missing,
    refuse_nested,
    refuse_strangers,
    stored_bytes,
)
from spile.dataset.maintain.finished import FinishedRecords, read_finished
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.unit_table import UnitColumns
from spile.dataset.write.documents import merge_documents, read_documents
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import Objects, check_creates_once

UNIT_BYTES = 64 << 30
COMPACTED = "compacted"  # key in `made_by`: what the unit was made from

# Limits for a merged unit: its index and its documents are held whole, as in extract.
_INDEX_BYTES = 128 << 20
_DOCUMENTS_BYTES = 128 << 20

_log = logging.getLogger("spile")


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
class _Group:
    """Consecutive units that are merged into one."""

    unit: Mapping[str, Any]  # its entry in the new table
    records: tuple[Done, ...]
    version: int  # of the source

    @property
    def rows(self) -> int:
        return sum(done.rows for done in self.records)

    def origin(self) -> dict[str, Any]:
        """Return what the new unit is made from; it is equal only for the same source and cut."""
        return {
            "units": [self.records[0].unit, self.records[-1].unit],
            "records": records_digest(self.records, self.version),
        }


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
        taps: all that are complete, if not given; as for `export`.
        unit_bytes: limit on the stored files of a merged unit.
        shard_bytes: limit on a shard; lower if the store holds a stream in memory.
        compress: whether to write byte planes and zstd, whatever the source has.
    """
    refuse_nested(source, dest)
    table, records = read_finished(source, taps)
    groups = list(_groups(table, records, unit_bytes))
    ledger = Ledger(dest)
    merged = _merged(table, groups, ledger)
    made = _resumed(ledger, merged, groups)
    if not compress:
        missing = sum(group.rows for group in groups if group.unit["id"] not in made)
        refuse_if_too_large(dest, table.taps, missing)
    if len(made) < len(groups):
        check_creates_once(dest)
    if not copy_records(source, records, dest, merged.version):
        raise _other_dataset_error(dest)
    copy_check(source, dest)
    shard_bytes = table.shard_limit(dest, shard_bytes)
    for number, group in enumerate(groups):
        if number not in made:
            made[number] = _write(source, ledger, table, records, group, shard_bytes, compress)
            _log.info("unit %d of %d: %d rows", number + 1, len(groups), group.rows)
    ledger.complete(merged)
    if as_stored(ledger.create_table(merged)) != as_stored(merged):
        raise _other_dataset_error(dest)
    done = list(made.values())
    return Compacted(
        dest=dest.url,
        rows=sum(each.rows for each in done),
        units=len(done),
        units_before=len(records),
        shards=sum(len(each.shards) for each in done),
        shards_before=sum(len(each.shards) for each in records),
        bytes=stored_bytes(done),
        bytes_before=stored_bytes(records),
    )


def recopy(source: Objects, ledger: Ledger, units: Sequence[int], *, compress: bool) -> None:
    """Write some units of a compacted dataset again, from its source.

    Args:
        ledger: that of the compacted dataset, for which the units are not done.
    """
    stored = ledger.table()
    table, records = read_finished(source, stored.recipe.stored_taps)
    groups = list(_groups_of(table, records, stored))
    merged = _merged(table, groups, ledger)
    if as_stored(merged) != as_stored(stored):
        raise _other_source_error(source, ledger)
    for unit in sorted(ledger.done_units()):
        done = ledger.read_done(unit)
        if done is None or done.made_by.get(COMPACTED) != groups[unit].origin():
            raise _other_source_error(source, ledger)
    shard_bytes = table.shard_limit(ledger.objects, SHARD_BYTES)
    for unit in units:
        _write(source, ledger, table, records, groups[unit], shard_bytes, compress)


def _merged(table: Table, groups: Sequence[_Group], ledger: Ledger) -> Table:
    units = UnitColumns.of([group.unit for group in groups])
    return replace(table, units=units, version=ledger.layout.version)


def _other_source_error(source: Objects, ledger: Ledger) -> ConfigError:
    return ConfigError(f"{source.url} is not the dataset that {ledger.objects.url} was made of")


# -- the source ------------------------------------------------------------------------------


def _groups(table: Table, records: Sequence[Done], unit_bytes: int) -> Iterator[_Group]:
    """Group units up to a size; a unit is never split, however large."""
    held: list[int] = []
    size = rows = about = made = 0
    for number, record in enumerate(records):
        more = stored_bytes([record])
        too_many = (rows + record.rows) * INDEX_DTYPE.itemsize > _INDEX_BYTES
        too_many |= about + record.documents_table.bytes > _DOCUMENTS_BYTES
        if held and (size + more > unit_bytes or too_many):
            yield _group(made, table, records, held)
            held, size, rows, about, made = [], 0, 0, 0, made + 1
        held.append(number)
        size, rows = size + more, rows + record.rows
        about += record.documents_table.bytes
    if held:
        yield _group(made, table, records, held)


def _groups_of(table: Table, records: Sequence[Done], stored: Table) -> Iterator[_Group]:
    """Group units as in the table of a compacted dataset, whatever size that was for."""
    number = 0
    for made, unit in enumerate(stored.units):
        held: list[int] = []
        missing = unit["num_docs"]
        while missing > 0 and number < len(table.units):
            held.append(number)
            missing -= table.units[number]["num_docs"]
            number += 1
        if held:
            yield _group(made, table, records, held)


def _group(unit: int, table: Table, records: Sequence[Done], numbers: Sequence[int]) -> _Group:
    units = [table.units[number] for number in numbers]
    reached = units[0]["first_doc"]
    spans: list[dict[str, Any]] = []
    for each in units:
        mine = [dict(span) for span in each["spans"]]
        if mine and each["first_doc"] != reached:  # in a permuted corpus
            mine[0]["doc"] = each["first_doc"]
        spans += mine
        ((first, count), *_) = reversed(fmt.doc_runs(each))
        reached = first + count
    merged = {
        **units[0],
        "id": unit,
        "num_docs": sum(unit["num_docs"] for unit in units),
        "tokens": sum(unit["tokens"] for unit in units),
        "spans": spans,
        "skip": [doc for unit in units for doc in unit.get("skip", ())],
    }
    return _Group(merged, tuple(records[number] for number in numbers), table.version)


def _read_index(source: Objects, group: _Group) -> np.ndarray:
    index = np.empty(group.rows, INDEX_DTYPE)
    reached = 0
    for done in group.records:
        index[reached : reached + done.rows] = read_index(source, done)
        reached += done.rows
    return index


def _read_documents(
    source: Objects, table: Table, group: _Group, index: np.ndarray
) -> dict[str, np.ndarray]:
    tables: list[Any] = []
    for done in group.records:
        CheckedFile(source, done.documents_table).check()
        tables.append(read_documents(source, done.documents_table, table.recipe.keep))
    return merge_documents(tables, None if table.shuffled else index)


# -- the destination -------------------------------------------------------------------------


def _other_dataset_error(dest: Objects) -> ConfigError:
    return ConfigError(
        f"{dest.url} holds another dataset, or this one compacted with another --unit-bytes; "
        "choose an empty place"
    )


def _resumed(ledger: Ledger, table: Table, groups: Sequence[_Group]) -> dict[int, Done]:
    """Return the units that are already done; refuse a place that holds anything else."""
    found = ledger.read_table()
    if found is not None and as_stored(found) != as_stored(table):
        raise _other_dataset_error(ledger.objects)
    refuse_strangers(ledger.objects)
    units = sorted(ledger.done_units())
    if units and units[-1] >= len(groups):
        raise _other_dataset_error(ledger.objects)
    return {unit: _ours(ledger, unit, groups[unit]) for unit in units}


def _ours(ledger: Ledger, unit: int, group: _Group) -> Done:
    done = ledger.read_done(unit)
    if done is None or done.made_by.get(COMPACTED) != group.origin():
        raise _other_dataset_error(ledger.objects)
    refuse_missing(ledger, done)
    return done


def _write(
    source: Objects,
    ledger: Ledger,
    table: Table,
    records: FinishedRecords,
    group: _Group,
    shard_bytes: int,
    compress: bool,
) -> Done:
    """Write one merged unit, a window of rows at a time."""
    number, index = int(group.unit["id"]), _read_index(source, group)
    writer = UnitWriter(
        ledger.objects,
        number,
        index,
        table.taps,
        shard_bytes,
        layout=ledger.layout,
        compress=compress,
    )
    with Attempt(ledger, writer) as attempt:
        for tap, info in table.taps.items():
            for done in group.records:
                for shard in done.shards:
                    if shard.tap == tap:
                        for rows, scales in read_rows(source, shard, info):
                            writer.write(tap, rows, scales)
        for done in group.records:
            for tap, stats in records.statistics(done.unit).items():
                writer.stats[tap].merge(stats)
        documents = _read_documents(source, table, group, index)
        made = writer.finish(table=documents, **_described(table, group))
        if attempt.commit(made):
            return made
    return _ours(ledger, number, group)


def _described(table: Table, group: _Group) -> dict[str, Any]:
    """Return the record's counts, summed, and the original makers of the rows."""
    skipped: dict[str, int] = {}
    text = xxhash.xxh3_128()
    for done in group.records:
        for reason, count in done.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
        text.update(done.text_digest.encode())
    return {
        "fingerprint": table.fingerprint,
        "tokens": sum(done.tokens for done in group.records),
        "documents": sum(done.documents for done in group.records),
        "contexts": sum(done.contexts for done in group.records),
        "skipped": skipped,
        "text_digest": text.hexdigest(),
        "made_by": {
            "spile": version("spile"),
            COMPACTED: group.origin(),
            "rows_by": makers_of(group.records),
        },
    }

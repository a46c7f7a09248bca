"""Compaction: the same rows in the same order, in few large shards, as a new dataset.

Consecutive units become one, up to a size; shards are cut anew. Every source file is hashed as it
is read and held against its record before anything that came from it is committed, so a damaged
source is refused, not copied under a fresh checksum.

The unit table is written last: until all is there, nothing at DEST opens as a dataset, and no
`spile extract` takes it for one to continue. What a done record was made from is in its
`made_by`: by that, the same command continues after a kill, and any other is refused.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import xxhash

from spile.errors import ConfigError, CorruptError
from spile.index import INDEX_DTYPE
from spile.objects import PROBES, Objects, check_creates_once
from spile.store import format as fmt
from spile.store.checked import WINDOW_BYTES, CheckedFile, read_finished
from spile.store.format import Done, Shard, TapInfo
from spile.store.ledger import Ledger, Table
from spile.store.stats import TapStats
from spile.store.writer import UnitWriter

UNIT_BYTES = 64 << 30
SHARD_BYTES = 1 << 30

_INDEX_BYTES = 128 << 20  # of a merged unit: its index is held whole, as extract holds it
_COPIED = {fmt.MODEL: "model", fmt.SCALES: "scales", fmt.CHECK: "check"}
_COMPACTED = "compacted"

_log = logging.getLogger("spile")


@dataclass(frozen=True)
class Compacted:
    """What was made of what."""

    dest: str
    rows: int  # of each tap
    units: int
    units_before: int
    shards: int
    shards_before: int
    bytes: int
    bytes_before: int


@dataclass(frozen=True)
class _Group:
    """Consecutive units that become one."""

    unit: Mapping[str, Any]  # its entry in the new table
    records: tuple[Done, ...]

    @property
    def rows(self) -> int:
        return sum(done.rows for done in self.records)

    def origin(self) -> dict[str, Any]:
        """What the new unit is made from: the same for the same source and cut alone."""
        digest = xxhash.xxh3_128()
        for done in self.records:
            digest.update(fmt.encode_record("done", done.to_json()))
        return {
            "units": [self.records[0].unit, self.records[-1].unit],
            "records": digest.hexdigest(),
        }


def compact(
    source: Objects,
    dest: Objects,
    *,
    unit_bytes: int = UNIT_BYTES,
    shard_bytes: int = SHARD_BYTES,
    compress: bool = False,
) -> Compacted:
    """Write a finished dataset anew, or continue to.

    Args:
        unit_bytes: of stored files, that merged units may reach.
        shard_bytes: of a shard; where the store holds a stream in memory, less.
        compress: byte planes and zstd, whatever the source has.
    """
    _refuse_nested(source, dest)
    table, records = read_finished(source)
    groups = list(_groups(table, records, unit_bytes))
    merged = replace(table, units=tuple(group.unit for group in groups))
    ledger = Ledger(dest)
    made = _resumed(ledger, merged, groups)
    if not compress:
        _refuse_if_too_large(dest, table.taps, [g for g in groups if g.unit["id"] not in made])
    if len(made) < len(groups):
        check_creates_once(dest)
    _copy_records(source, dest)
    shard_bytes = min(shard_bytes, dest.most_streamed or shard_bytes)
    for number, group in enumerate(groups):
        if number not in made:
            made[number] = _write(source, ledger, table, group, shard_bytes, compress)
            _log.info("unit %d of %d: %d rows", number + 1, len(groups), group.rows)
    ledger.complete(merged)
    if _stored(ledger.create_table(merged)) != _stored(merged):
        raise _other(dest)
    done = list(made.values())
    return Compacted(
        dest=dest.url,
        rows=sum(each.rows for each in done),
        units=len(done),
        units_before=len(records),
        shards=sum(len(each.shards) for each in done),
        shards_before=sum(len(each.shards) for each in records),
        bytes=_bytes(done),
        bytes_before=_bytes(records),
    )


def _bytes(records: Sequence[Done]) -> int:
    return sum(file.bytes for done in records for file in done.files())


# -- the source ------------------------------------------------------------------------------


def _groups(table: Table, records: Sequence[Done], unit_bytes: int) -> Iterator[_Group]:
    """Cut between units only: what was one stays together, however large."""
    held: list[int] = []
    size = rows = made = 0
    for number, record in enumerate(records):
        more = _bytes([record])
        too_many = (rows + record.rows) * INDEX_DTYPE.itemsize > _INDEX_BYTES
        if held and (size + more > unit_bytes or too_many):
            yield _group(made, table, records, held)
            held, size, rows, made = [], 0, 0, made + 1
        held.append(number)
        size, rows = size + more, rows + record.rows
    if held:
        yield _group(made, table, records, held)


def _group(unit: int, table: Table, records: Sequence[Done], numbers: Sequence[int]) -> _Group:
    units = [table.units[number] for number in numbers]
    merged = {
        **units[0],
        "id": unit,
        "num_docs": sum(unit["num_docs"] for unit in units),
        "tokens": sum(unit["tokens"] for unit in units),
        "spans": [span for unit in units for span in unit["spans"]],
        "skip": [doc for unit in units for doc in unit.get("skip", ())],
    }
    return _Group(merged, tuple(records[number] for number in numbers))


def _read_index(source: Objects, group: _Group) -> np.ndarray:
    index = np.empty(group.rows, INDEX_DTYPE)
    reached = 0
    for done in group.records:
        file = CheckedFile(source, done.index)
        for name in INDEX_DTYPE.names or ():
            info = file.header.get(name)
            if info is None or (info.dtype, info.shape) != (INDEX_DTYPE[name], (done.rows,)):
                raise CorruptError(done.index.key, f"is not an index of {done.rows} rows")
            index[name][reached : reached + done.rows] = file.rows(name)
        file.check()
        reached += done.rows
    return index


def _merge_statistics(source: Objects, done: Done, writer: UnitWriter) -> None:
    file = CheckedFile(source, done.statistics)
    tensors = {name: file.rows(name) for name in file.header}
    file.check()
    for tap, stats in writer.stats.items():
        stats.merge(TapStats.from_tensors(tap, tensors))


# -- the destination -------------------------------------------------------------------------


def _refuse_nested(source: Objects, dest: Objects) -> None:
    here, there = _place(source), _place(dest)
    if f"{there}/".startswith(f"{here}/") or f"{here}/".startswith(f"{there}/"):
        raise ConfigError(
            f"{dest.url} and {source.url} lie one inside the other; choose a place outside of it"
        )


def _place(objects: Objects) -> str:
    path = objects.local_path(fmt.UNITS)
    return objects.url.rstrip("/") if path is None else str(path.parent.resolve())


def _other(dest: Objects) -> ConfigError:
    return ConfigError(
        f"{dest.url} holds another dataset, or this one compacted with another --unit-bytes; "
        "choose an empty place"
    )


def _stored(table: Table) -> bytes:
    """As it lies there."""
    return fmt.encode_record("units", table.to_json())


def _resumed(ledger: Ledger, table: Table, groups: Sequence[_Group]) -> dict[int, Done]:
    """The units that are done already. Whatever else is there is not ours to add to."""
    found = ledger.read_table()
    if found is not None and _stored(found) != _stored(table):
        raise _other(ledger.objects)
    for key in ledger.objects.list():
        name = ledger.objects.leftover_of(key) or key
        known = name in (fmt.UNITS, fmt.MANIFEST, *_COPIED)
        if not known and not name.startswith((fmt.DONE, fmt.ATTEMPTS, fmt.WORKERS, PROBES)):
            raise ConfigError(
                f"{ledger.objects.url} holds {key}, which is not of a dataset; "
                "choose an empty place"
            )
    units = sorted(ledger.done_units())
    if units and units[-1] >= len(groups):
        raise _other(ledger.objects)
    return {unit: _ours(ledger, unit, groups[unit]) for unit in units}


def _ours(ledger: Ledger, unit: int, group: _Group) -> Done:
    done = ledger.read_done(unit)
    if done is None or done.made_by.get(_COMPACTED) != group.origin():
        raise _other(ledger.objects)
    return done


def _refuse_if_too_large(
    dest: Objects, taps: Mapping[str, TapInfo], groups: Sequence[_Group]
) -> None:
    each = INDEX_DTYPE.itemsize + sum(info.row_bytes for info in taps.values())
    needed, free = each * sum(group.rows for group in groups), dest.free_bytes()
    if free is not None and needed > free:
        raise ConfigError(
            f"{dest.url}: {needed / 1e9:.2f} GB would be written, {free / 1e9:.2f} GB are free"
        )


def _copy_records(source: Objects, dest: Objects) -> None:
    """What stands beside the units and is as true of the copy."""
    for key, kind in _COPIED.items():
        try:
            data = source.get(key)
        except FileNotFoundError:
            continue  # as `verify` says, where it must not be
        fmt.decode_record(key, data, kind)
        if not dest.create(key, data) and key != fmt.CHECK and dest.get(key) != data:
            raise _other(dest)


def _write(
    source: Objects, ledger: Ledger, table: Table, group: _Group, shard_bytes: int, compress: bool
) -> Done:
    """One merged unit, a window of rows at a time."""
    number, index = int(group.unit["id"]), _read_index(source, group)
    writer = UnitWriter(ledger.objects, number, index, table.taps, shard_bytes, compress=compress)
    try:
        for tap, info in table.taps.items():
            for done in group.records:
                for shard in done.shards:
                    if shard.tap == tap:
                        _copy_rows(source, shard, info, writer)
        for done in group.records:
            _merge_statistics(source, done, writer)
        made = writer.finish(**_described(table, group))
        committed = ledger.commit(made)
    except BaseException:
        writer.discard()
        raise
    if not committed:
        writer.discard()
        return _ours(ledger, number, group)
    return made


def _copy_rows(source: Objects, shard: Shard, info: TapInfo, writer: UnitWriter) -> None:
    file = CheckedFile(source, shard)
    wanted = {shard.tap: (info.storage, (shard.count, *info.shape))}
    name = fmt.scale_name(shard.tap)
    if info.scaled_by == "row":
        wanted[name] = (fmt.SCALE_DTYPE, (shard.count,))
    if {n: (i.dtype, i.shape) for n, i in file.header.items()} != wanted:
        raise CorruptError(shard.key, f"does not hold {shard.count} rows of {shard.tap}")
    scales = file.rows(name) if info.scaled_by == "row" else None
    step = max(1, WINDOW_BYTES // info.row_bytes)
    for first in range(0, shard.count, step):
        last = min(first + step, shard.count)
        rows = file.rows(shard.tap, first, last)
        writer.write(shard.tap, rows, None if scales is None else scales[first:last])
    file.check()


def _described(table: Table, group: _Group) -> dict[str, Any]:
    """The record's counts, summed; and who made the rows in the first place."""
    skipped: dict[str, int] = {}
    makers: list[Mapping[str, Any]] = []
    text = xxhash.xxh3_128()
    for done in group.records:
        for reason, count in done.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
        if done.made_by not in makers:
            makers.append(done.made_by)
        text.update(done.text_digest.encode())
    return {
        "fingerprint": table.fingerprint,
        "tokens": sum(done.tokens for done in group.records),
        "documents": sum(done.documents for done in group.records),
        "contexts": sum(done.contexts for done in group.records),
        "skipped": skipped,
        "text_digest": text.hexdigest(),
        "made_by": {"spile": version("spile"), _COMPACTED: group.origin(), "rows_by": makers},
    }

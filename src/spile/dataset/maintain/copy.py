"""Copying a dataset: functions shared by compaction, shuffling and publishing.

A copy gets its own checksums, so damage in the source would become undetectable. Every file of the
source is therefore hashed as it is read and compared with its record. A copy is invisible until
that has passed: the unit table of the new dataset is written last, and before that nothing opens it
as a dataset, and no `spile extract` continues it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.index import INDEX_DTYPE
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.columns import named_by_content
from spile.dataset.format import Done, Shard, TapInfo
from spile.dataset.ledger import Ledger, Table
from spile.dataset.read.checked_file import WINDOW_BYTES, CheckedFile
from spile.dataset.write.shard import (
    contains_exactly,
    index_tensors,
    tap_tensors,
)
from spile.objects import PROBES, Objects

SHARD_BYTES = 1 << 30

COPIED = {fmt.MODEL: "model", fmt.SCALES: "scales", fmt.CHECK: "check"}


# -- the source ------------------------------------------------------------------------------


def read_finished(source: Objects) -> tuple[Table, list[Done]]:
    """Return the table and every record of a dataset, which must be finished.

    The units of all generations are those of one table: what is made from it is a whole.
    """
    ledger = Ledger(source)
    table = ledger.table()
    if table.fingerprint != table.recipe.fingerprint():
        raise CorruptError(fmt.UNITS, "fingerprint does not match its recipe")
    done = mapped(ledger.read_done, range(len(table.units)), source.parallel)
    records = [record for record in done if record is not None]
    if len(records) < len(table.units):
        raise StoreError(
            f"{source.url}: {len(records)} of {len(table.units)} units are done; finish with the "
            "same `spile extract` first"
        )
    for record in records:
        if record.fingerprint != table.fingerprint:
            raise CorruptError(table.layout.done_key(record.unit), "belongs to another recipe")
        if record.rows and {shard.tap for shard in record.shards} != set(table.taps):
            key = table.layout.done_key(record.unit)
            raise CorruptError(key, "does not hold the recipe's taps")
    manifest = ledger.read_manifest()
    if manifest is None and not any(record.rows for record in records):
        raise StoreError(f"{source.url}: holds no rows; there is nothing to copy")
    if manifest is None:  # the last unit was committed just now
        raise StoreError(
            f"{source.url}: every unit is done, but there is no {table.layout.manifest_key} yet; "
            "finish with the same `spile extract` first"
        )
    if not ledger.follows(table, manifest, records):
        raise CorruptError(
            table.layout.manifest_key, "does not follow from the done records; see `spile verify`"
        )
    return table.flattened(), records


def read_index(source: Objects, done: Done, first: int = 0, last: int | None = None) -> np.ndarray:
    """Read entries first..last of a unit's index; all by default."""
    last = done.rows if last is None else last
    index = np.empty(last - first, INDEX_DTYPE)
    file = CheckedFile(source, done.index)
    if not contains_exactly(file.header, index_tensors(done.rows)):
        raise CorruptError(done.index.key, f"is not an index of {done.rows} rows")
    for name in INDEX_DTYPE.names or ():
        index[name] = file.rows(name, first, last)
    file.check()
    return index


def read_rows(
    source: Objects, shard: Shard, info: TapInfo, first: int = 0, last: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield rows first..last of a shard, a window at a time, with their scales if they have them.

    The file is compared with its record after the last of them.
    """
    last = shard.count if last is None else last
    file = CheckedFile(source, shard)
    if not contains_exactly(file.header, tap_tensors(shard.tap, shard.count, info)):
        raise CorruptError(shard.key, f"does not hold {shard.count} rows of {shard.tap}")
    scales = None
    if info.scaled_by == "row":
        scales = file.rows(fmt.scale_name(shard.tap), first, last)
    step = max(1, WINDOW_BYTES // info.row_bytes)
    for low in range(first, last, step):
        high = min(low + step, last)
        rows = file.rows(shard.tap, low, high)
        yield rows, None if scales is None else scales[low - first : high - first]
    file.check()


# -- the destination -------------------------------------------------------------------------


def refuse_nested(source: Objects, dest: Objects) -> None:
    here, there = _place(source), _place(dest)
    if f"{there}/".startswith(f"{here}/") or f"{here}/".startswith(f"{there}/"):
        raise ConfigError(
            f"{dest.url} and {source.url} must not contain one another; choose another destination"
        )


def _place(objects: Objects) -> str:
    path = objects.local_path(fmt.UNITS)
    return objects.url.rstrip("/") if path is None else str(path.parent.resolve())


def refuse_strangers(objects: Objects, also: Collection[str] = ()) -> None:
    """Refuse a place that holds files of no dataset; `also` gives more prefixes to accept."""
    ours = (fmt.DONE, fmt.ATTEMPTS, fmt.WORKERS, PROBES, *fmt.DERIVED, *also)
    for key in objects.list():
        name = objects.leftover_of(key) or key
        records = (fmt.UNITS, fmt.MANIFEST, *fmt.SIGNATURES, *COPIED)
        if name not in records and not name.startswith(ours):
            raise ConfigError(
                f"{objects.url} holds {key}, which is not of a dataset; choose an empty place"
            )


def refuse_missing(ledger: Ledger, done: Done) -> None:
    """Check that the files of a unit from an earlier run exist; it is not made again."""
    missing = ledger.missing_files(done)
    if missing:
        raise CorruptError(
            missing[0],
            f"is not what {ledger.layout.done_key(done.unit)} says: missing, or cut short; remove "
            f"{ledger.objects.url} and run the command again",
        )


def refuse_if_too_large(dest: Objects, taps: Mapping[str, TapInfo], rows: int) -> None:
    each = INDEX_DTYPE.itemsize + sum(info.row_bytes for info in taps.values())
    needed, free = each * rows, dest.free_bytes()
    if free is not None and needed > free:
        raise ConfigError(
            f"{dest.url}: {needed / 1e9:.2f} GB would be written, {free / 1e9:.2f} GB are free"
        )


def copy_records(source: Objects, dest: Objects) -> bool:
    """Copy the records and the tokenizer, which also hold for the copy.

    Returns:
        False if other records exist there.
    """
    for key, kind in COPIED.items():
        try:
            data = source.get(key)
        except FileNotFoundError:
            continue  # `verify` reports it if it is required
        fmt.decode_record(key, data, kind)
        if not dest.create(key, data) and key != fmt.CHECK and dest.get(key) != data:
            return False
    ledger = Ledger(source)
    table = ledger.table()
    for name, data in ledger.read_tokenizer(table).items():
        dest.create(table.tokenizer[name].key, data)
    return True


def makers_of(records: Sequence[Done]) -> list[Mapping[str, object]]:
    """Return the original makers of the rows."""
    makers: list[Mapping[str, object]] = []
    for done in records:
        maker = {k: v for k, v in done.made_by.items() if k not in fmt.MADE_WHEN}
        if maker not in makers:
            makers.append(maker)
    return makers


# -- records ---------------------------------------------------------------------------------


def stored_bytes(records: Iterable[Done]) -> int:
    """Return the total bytes of all files that records name."""
    return sum(file.bytes for done in records for file in done.files())


def as_stored(table: Table) -> bytes:
    """Return the bytes of a table's record, whatever version it is stored in."""
    units, _ = named_by_content(fmt.UNIT_COLUMNS, table.units.columns)
    return fmt.encode_record("units", table.to_json(units))


def records_digest(records: Iterable[Done], version: int) -> str:
    """Return a digest that is equal only for exactly the same files.

    Args:
        version: that of the dataset whose records they are.
    """
    digest = xxhash.xxh3_128()
    for done in records:
        digest.update(fmt.encode_record("done", done.to_json(), version))
    return digest.hexdigest()

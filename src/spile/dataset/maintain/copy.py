"""Copying a dataset: functions shared by copies, merges, compaction, shuffling and publishing.

A copy gets its own checksums, so damage in the source would become undetectable. Every file of the
source is therefore hashed as it is read and compared with its record. A copy is invisible until
that has passed: the unit table of the new dataset is written last, and before that nothing opens it
as a dataset, and no `spile extract` continues it.

Files that are copied as they are get keys that follow from the source's, so that a second call
continues. On a disk such a file is written in `scratch/` and moved to its key when it is durable;
in a bucket a put is atomic. So a file under its key is whole, whoever was killed, and two copies at
once do no harm.
"""

import contextlib
import threading
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import replace

import numpy as np

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.index import INDEX_DTYPE
from spile.core.system import system
from spile.dataset.codec.quantization import scales_to_json
from spile.dataset.codec.shard import (
    ShardWriter,
    contains_exactly,
    index_tensors,
    specs_of,
    tap_tensors,
)
from spile.dataset.maintain.finished import FinishedRecords
from spile.dataset.read.checked_file import WINDOW_BYTES, CheckedFile
from spile.dataset.records import format as fmt
from spile.dataset.records.columns import named_by_content
from spile.dataset.records.format import Done, Shard, TapInfo
from spile.dataset.records.ledger import Ledger, Table
from spile.objects import PROBES, Objects

SHARD_BYTES = 1 << 30
_ROOM = 1 << 30  # bytes of files on their way to a bucket, which holds each until it is put
_HELD_WINDOW = 65 << 20  # bytes of most shards, with a header

COPIED = (fmt.MODEL, fmt.SCALES, fmt.CHECK)  # what `copy_records` and `copy_check` make


# -- the source ------------------------------------------------------------------------------


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


# -- files as they are -----------------------------------------------------------------------


class FileCopier:
    """Copies files from one store to another, several at once, in bounded memory."""

    def __init__(self, dest: Objects) -> None:
        self._dest = dest
        self._free, self._changed = _ROOM, threading.Condition()
        # A bucket holds a file until it is put: to read it in one request takes no more memory.
        self._window = WINDOW_BYTES if dest.most_streamed is None else _HELD_WINDOW

    def copy(self, source: Objects, file: Shard, key: str) -> Shard:
        """Copy a file, compared with its record on the way; return the record of the copy.

        Args:
            key: that of the copy.
        """
        with self._room(file.bytes), self._placing(key) as place:
            stream = self._dest.stream(place)
            try:
                checked = CheckedFile(source, file, ask_size=False)
                for piece in checked.pieces(self._window):
                    stream.write(piece)
                etag = stream.close()
            except BaseException:
                stream.abandon()
                raise
        return replace(file, key=key, etag=etag)

    def write(self, tensors: Mapping[str, np.ndarray], file: Shard, key: str) -> Shard:
        """Write other tensors in the place of a file; return their record."""
        with self._placing(key) as place:
            writer = ShardWriter(self._dest, place, specs_of(tensors))
            try:
                for array in tensors.values():
                    writer.write(array)
                size, digest, etag = writer.close()
            except BaseException:
                writer.abandon()
                raise
        return replace(file, key=key, bytes=size, digest=digest, etag=etag)

    @contextlib.contextmanager
    def _placing(self, key: str) -> Generator[str, None, None]:
        """Yield the key to write under, from which a whole file gets its own."""
        if self._dest.local_path(key) is None:
            yield key
            return
        place = f"{fmt.SCRATCH}{system().token(8)}"
        yield place
        try:
            self._dest.move(place, key)
        except FileNotFoundError:
            raise StoreError(
                f"{self._dest.url}/{place}: vanished; another process has finished the same copy, "
                "or `gc` ran: run the same command again"
            ) from None

    def clean(self) -> None:
        """Remove what killed processes left on their way, when the copy is whole."""
        for key in list(self._dest.list(fmt.SCRATCH)):
            self._dest.delete(key)

    @contextlib.contextmanager
    def _room(self, size: int) -> Generator[None, None, None]:
        """Wait until a file fits beside the others on their way; a larger one goes alone."""
        size = min(size, _ROOM) if self._dest.most_streamed is not None else 0
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


# -- the destination -------------------------------------------------------------------------


def refuse_nested(source: Objects, dest: Objects) -> None:
    here, there = _place(source), _place(dest)
    if source.endpoint != dest.endpoint:  # names of buckets are unique within a cloud only
        return
    if f"{there}/".startswith(f"{here}/") or f"{here}/".startswith(f"{there}/"):
        raise ConfigError(
            f"{dest.url} and {source.url} must not contain one another; choose another destination"
        )


def _place(objects: Objects) -> str:
    path = objects.local_path(fmt.UNITS)
    return objects.url.rstrip("/") if path is None else str(path.parent.resolve())


def refuse_strangers(objects: Objects, also: Collection[str] = ()) -> None:
    """Refuse a place that holds files of no dataset; `also` gives more prefixes to accept."""
    ours = (*fmt.FOLDERS, fmt.WORKERS, PROBES, *also)
    for key in objects.list():
        name = objects.leftover_of(key) or key
        if name not in fmt.RECORDS and not name.startswith(ours):
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


def copy_records(source: Objects, records: FinishedRecords, dest: Objects) -> bool:
    """Copy the records and the tokenizer, which also hold for the copy.

    Args:
        records: those of the source.

    Returns:
        False if other records exist there.
    """
    weights, scales = records.weights(), records.scales()
    found = {} if weights is None else {fmt.MODEL: ("model", {"tensors": weights})}
    found |= {fmt.SCALES: ("scales", scales_to_json(scales))} if scales else {}
    for key, (kind, body) in found.items():
        data = fmt.encode_record(kind, body)
        if not dest.create(key, data) and dest.get(key) != data:
            return False
    ledger = Ledger(source)
    table = ledger.table()
    for name, data in ledger.read_tokenizer(table).items():
        dest.create(table.tokenizer[name].key, data)
    return True


def copy_check(source: Objects, dest: Objects) -> None:
    """Copy the result of `spile check`, which holds for a copy with the same rows."""
    with contextlib.suppress(FileNotFoundError):
        data = source.get(fmt.CHECK)
        fmt.decode_record(fmt.CHECK, data, "check")
        dest.create(fmt.CHECK, data)


def as_stored(table: Table) -> bytes:
    """Return the bytes of a table's record."""
    units, _ = named_by_content(fmt.UNIT_COLUMNS, table.units.columns)
    return fmt.encode_record("units", table.to_json(units))

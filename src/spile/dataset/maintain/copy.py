"""One engine for copies, merges, compaction and shuffling: read units in an order, write units.

A copy gets its own checksums, so damage in the source would become undetectable. Every file of the
source is therefore hashed as it is read and compared with its record. A copy is invisible until
that has passed: the unit table of the new dataset is written last, and before that nothing opens it
as a dataset, and no `spile extract` continues it.

Files that are copied as they are get keys that follow from the source's, so that a second call
continues. On a disk such a file is written in `scratch/` and moved to its key when it is durable;
in a bucket a put is atomic. So a file under its key is whole, even if a process was killed, and two
copies at once do no harm.

Units that are written anew name in `made_by` what they were made from. With that, the same command
continues after a kill, and any other is refused (`NewDataset`).
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import numpy as np

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.system import system
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.columns import named_by_content
from spile.dataset.codec.quantization import scales_to_json
from spile.dataset.codec.shard import (
    ShardWriter,
    contains_exactly,
    index_tensors,
    specs_of,
    tap_tensors,
)
from spile.dataset.format import Done, Shard, TapInfo
from spile.dataset.maintain.finished import FinishedRecords, RecordsSummary
from spile.dataset.read.checked_file import WINDOW_BYTES, CheckedFile
from spile.dataset.records.features import live_sets
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table, create_table, read_tokenizer
from spile.dataset.write.unit_writer import Attempt
from spile.objects import PROBES, Objects

_log = logging.getLogger("spile.dataset")
T = TypeVar("T")

SHARD_BYTES = 1 << 30
_ROOM = 1 << 30  # most bytes of files in memory: a bucket holds each until it is put
_HELD_WINDOW = 65 << 20  # bytes of most shards, with a header

COPIED = (fmt.MODEL, fmt.SCALES, fmt.CHECK)  # records that `copy_records` and `copy_check` write


# -- the source ------------------------------------------------------------------------------


def read_index(
    source: Objects, table: Table, done: Done, first: int = 0, last: int | None = None
) -> np.ndarray:
    """Return entries first..last of a unit's index; all by default."""
    last = done.rows if last is None else last
    index = np.empty(last - first, table.index_dtype)
    file = CheckedFile(source, done.index)
    if not contains_exactly(file.header, index_tensors(done.rows, table.index_dtype)):
        raise CorruptError(done.index.key, f"is not an index of {done.rows} rows")
    for name in index.dtype.names or ():
        index[name] = file.rows(name, first, last)
    file.check()
    return index


def read_rows(
    source: Objects, shard: Shard, info: TapInfo, first: int = 0, last: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield rows first..last of a shard, a window at a time, with their scales if they have them.

    After the last row, the file is compared with its record.
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
        """Copy a file, compare it with its record, and return the record of the copy.

        Args:
            key: the key of the copy.
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
        """Write tensors instead of copying a file; return their record."""
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
        """Yield the key to write under; a whole file is then moved to `key`."""
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
        """Remove partial files of killed processes, once the copy is whole."""
        for key in list(self._dest.list(fmt.SCRATCH)):
            self._dest.delete(key)

    @contextlib.contextmanager
    def _room(self, size: int) -> Generator[None, None, None]:
        """Wait until a file fits into memory beside others; one larger than that goes alone."""
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


class UnitCopy(Generic[T]):
    """A unit whose files are made in any order; its record follows the last of them."""

    def __init__(
        self, makes: Sequence[Callable[[], Shard]], finish: Callable[[list[Shard]], T]
    ) -> None:
        """Args:
        makes: each makes a file.
        finish: is called with the files when all are whole.
        """
        self._makes, self._finish = makes, finish
        self._files: dict[int, Shard] = {}
        self._lock = system().lock()

    def jobs(self) -> "Iterator[Callable[[], tuple[T] | None]]":
        """Yield what makes each file; the job that ends last also finishes the unit."""
        return (partial(self._run, at) for at in range(max(1, len(self._makes))))

    def _run(self, at: int) -> tuple[T] | None:
        if self._makes:
            file = self._makes[at]()
            with self._lock:
                self._files[at] = file
                if len(self._files) < len(self._makes):
                    return None
        return (self._finish([self._files[number] for number in sorted(self._files)]),)


def copy_units(units: Iterable[UnitCopy[T]], *stores: Objects) -> Iterator[T]:
    """Copy units, several files at once; yield the result of each unit, in order."""
    parallel = max(store.parallel for store in stores)
    jobs = (job for unit in units for job in unit.jobs())
    # Most files of a unit are small: they should not keep the large ones of the next units waiting.
    for finished in mapped(lambda job: job(), jobs, parallel, ahead=4 * parallel):
        if finished is not None:
            yield finished[0]


# -- the destination -------------------------------------------------------------------------


class NewDataset:
    """A dataset that is made from units of others, and may have been begun before.

    `made_by` of a done record says what the unit was made from: its origin.
    """

    def __init__(self, ledger: Ledger, table: Table, key: str, other: str) -> None:
        """Args:
        key: that of the origin in `made_by`.
        other: what the place may hold instead, for the message.
        """
        self.objects, self.ledger = ledger.objects, ledger
        self.table = replace(table, units=table.units.stored())
        self._key, self._other = key, other

    def is_there(self) -> bool:
        """Return whether the table is there, so that all is; refuse another's."""
        found = self.ledger.read_table()
        if found is not None and _identity(found) != _identity(self.table):
            raise self.other_dataset_error()
        return found is not None

    def units_there(self) -> set[int]:
        """Return the units that are done; refuse a place that holds anything else."""
        self.is_there()
        refuse_strangers(self.objects, [fmt.SCRATCH])
        units = self.ledger.done_units()
        if not units.issubset(range(len(self.table.units))):
            raise self.other_dataset_error()
        return units

    def begin(self, source: Objects, records: FinishedRecords, *, scales: bool = True) -> None:
        """Copy the records beside the units, and the tokenizer.

        Args:
            scales: whether the rows are stored with the source's scales.
        """
        if not copy_records(source, records, self.objects, scales=scales):
            raise self.other_dataset_error()

    def made_from(self, unit: int) -> str:
        """Return the digest of what a unit is made from, for its done record."""
        return self.ledger.must_be_made_from(self.table, unit)

    def ours(self, unit: int, origin: Mapping[str, Any]) -> Done:
        """Return a unit that is done; refuse one that was made from anything else."""
        done = self.ledger.read_done(unit)
        if done is None:
            key = self.ledger.layout.done_key(unit)
            raise CorruptError(key, f"is missing from {self.objects.url}")
        same = _origin(done.made_by.get(self._key, {})) == origin
        if done.made_from:  # (runs of a shuffle have none)
            same = same and done.made_from == self.made_from(unit)
        if not same:
            raise self.other_dataset_error()
        refuse_missing(self.ledger, done)
        return done

    def commit(
        self,
        attempt: Attempt,
        summary: Done | RecordsSummary,
        *,
        documents: Mapping[str, np.ndarray],
        made_from: Mapping[str, Any],
        makers: Sequence[Mapping[str, object]],
    ) -> Done:
        """Finish and commit a unit whose rows are written; return it, or the one that came first.

        Args:
            summary: counts and digest of the documents that it has.
            makers: the original makers of its rows.
        """
        made = attempt.writer.finish(
            table=documents,
            fingerprint=self.table.fingerprint,
            made_from=self.made_from(attempt.writer.unit),
            **{name: getattr(summary, name) for name in _SUMMARY},
            made_by={"spile": version("spile"), self._key: made_from, "rows_by": makers},
        )
        return made if attempt.commit(made) else self.ours(made.unit, _origin(made_from))

    def finish(self, **changes: Any) -> None:
        """Create the table, which makes it a dataset; `changes` are fields that differ in it."""
        table = replace(self.table, **changes)
        self.ledger.complete(table)
        create_table(self.objects, table)
        if _identity(self.ledger.table()) != _identity(table):
            raise self.other_dataset_error()

    def other_dataset_error(self) -> ConfigError:
        return ConfigError(
            f"{self.objects.url} holds another dataset, or {self._other}; choose an empty place"
        )


_SUMMARY = ("tokens", "documents", "contexts", "skipped", "text_digest")


def _origin(made_from: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a unit was made from, without the sums that a shuffle stores beside it."""
    return made_from.get("origin", made_from)


def _identity(table: Table) -> bytes:
    """Return a table's bytes without the places of its sources and the sums of a shuffle."""
    made_of = tuple({**source, "url": ""} for source in table.made_of)
    shuffled = table.shuffled and {"drawn": table.shuffled["drawn"]}
    return as_stored(replace(table, made_of=made_of, shuffled=shuffled))


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
    """Refuse a place with files that belong to no dataset; `also`: more prefixes to accept."""
    ours = (*fmt.FOLDERS, fmt.WORKERS, PROBES, *also)
    for key in objects.list():
        name = objects.leftover_of(key) or key
        if name not in fmt.RECORDS and not name.startswith(ours):
            raise ConfigError(
                f"{objects.url} holds {key}, which belongs to no dataset; choose an empty place"
            )


def refuse_missing(ledger: Ledger, done: Done) -> None:
    """Check that the files of a unit from an earlier run exist: it is not made again."""
    missing = ledger.missing_files(done)
    if missing:
        raise CorruptError(
            missing[0],
            f"is not what {ledger.layout.done_key(done.unit)} says: missing, or cut short; remove "
            f"{ledger.objects.url} and run the command again",
        )


def refuse_if_too_large(dest: Objects, table: Table, rows: int) -> None:
    needed, free = table.row_bytes * rows, dest.free_bytes()
    if free is not None and needed > free:
        raise ConfigError(
            f"{dest.url}: {needed / 1e9:.2f} GB would be written, but only "
            f"{free / 1e9:.2f} GB are free"
        )


def copy_records(
    source: Objects, records: FinishedRecords, dest: Objects, *, scales: bool = True
) -> bool:
    """Copy the tokenizer and the records beside the units, which also hold for the copy.

    Args:
        records: the done records of the source.
        scales: whether to copy those of channels.

    Returns:
        False if other records exist there.
    """
    weights, of_channels = records.weights(), records.scales() if scales else {}
    found = {} if weights is None else {fmt.MODEL: ("model", {"tensors": weights})}
    found |= {fmt.SCALES: ("scales", scales_to_json(of_channels))} if of_channels else {}
    for key, (kind, body) in found.items():
        data = fmt.encode_record(kind, body)
        if not dest.create(key, data) and dest.get(key) != data:
            return False
    ledger = Ledger(source)
    table = ledger.table()
    for _, spec in live_sets(ledger):
        _log.info(
            "%s: features of %s are not taken along; `spile features %s` makes them again",
            source.url, spec.tap, dest.url,
        )  # fmt: skip
    for name, data in read_tokenizer(source, table).items():
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

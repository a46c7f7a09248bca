"""One attempt at one unit: rows stream into shards under keys nobody else uses.

Nothing exists until `finish` has made every file durable and the ledger has created the done record
that it returns. An attempt that fails or loses leaves only files that no record names.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from spile.core.errors import NotCreatedError, StoreError
from spile.core.index import INDEX_DTYPE
from spile.core.system import system
from spile.core.tensors import build_header
from spile.dataset.codec.shard import (
    ShardWriter,
    TensorSpec,
    index_tensors,
    read_tensors,
    specs_of,
    statistics_tensors,
    tap_tensors,
)
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import (
    CURRENT,
    SCALE_DTYPE,
    Done,
    KeyLayout,
    Shard,
    TapInfo,
)
from spile.dataset.records.ledger import Ledger
from spile.objects import Objects

_STATISTICS = "statistics"


class UnitWriter:
    """Writes the shards of a unit, or of one part of it; the number of rows is known in advance."""

    def __init__(
        self,
        objects: Objects,
        unit: int,
        index: np.ndarray,
        taps: Mapping[str, TapInfo],
        shard_bytes: int,
        *,
        layout: KeyLayout = CURRENT,
        compress: bool = False,
        attempt: str | None = None,
        part: int = 0,
        run: tuple[int, int] | None = None,
        durable: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Args:
        attempt: the attempt that other processes write their parts under, too.
        run: the first row of this part within the unit, and its number of rows.
        durable: called with the size of every file that has become durable.
        """
        self.unit = unit
        self.attempt = attempt or system().token(8)
        self._layout, self._prefix = layout, layout.attempt_prefix(unit, self.attempt)
        self.first, self.rows = run or (0, len(index))
        self.stats = {tap: TapStats.empty(info.channels) for tap, info in taps.items()}
        self._objects, self._index, self._compress = objects, index, compress
        self._part, self._durable = part, durable
        self._open: set[ShardWriter] = set()
        self._closing = system().pool(objects.parallel, "close")
        self._room = system().semaphore(objects.most_closing)
        self._failed: BaseException | None = None  # the error of the first shard that failed
        self._taps = {
            tap: _TapWriter(self, tap, info, max(1, shard_bytes // info.row_bytes))
            for tap, info in taps.items()
        }

    def write(self, tap: str, rows: np.ndarray, scales: np.ndarray | None = None) -> None:
        """Write the next rows of a tap, in stored order, with their scales if they have them.

        If an earlier shard could not be made durable, its error is raised.
        """
        if self._failed is not None:
            raise self._failed
        self._taps[tap].write(rows, scales)

    def finish_part(self) -> list[Shard]:
        """Make this part's files durable: its shards, and the statistics of its rows."""
        statistics = self._write_statistics(f"{_STATISTICS}.{self._part}.safetensors")
        return [*self._finish_shards(), statistics]

    def finish(
        self,
        parts: Sequence[Sequence[Shard]] = (),
        *,
        table: Mapping[str, np.ndarray],
        **described: Any,
    ) -> Done:
        """Make every file durable; return the record that would commit them.

        Args:
            parts: the results of `finish_part` in the other processes, in order.
            table: the table of the unit's documents, as `encode_documents` makes it.
        """
        prefix = self._prefix
        columns = {name: self._index[name] for name in self._index.dtype.names or ()}
        whole = 0, len(self._index)
        index = self._write_file("index", prefix + "index.safetensors", columns, whole)
        of_all = 0, len(table["doc"])
        documents = self._write_file("documents", prefix + "documents.safetensors", table, of_all)
        merged = [file for part in parts for file in part if file.tap == _STATISTICS]
        for file in merged:
            self._merge(file.key)
        statistics = self._write_statistics(f"{_STATISTICS}.safetensors", whole)
        for file in merged:
            self._objects.delete(file.key)
        shards = self._finish_shards()
        others = [file for part in parts for file in part if file.tap in self._taps]
        order = {tap: number for number, tap in enumerate(self._taps)}
        self._closing.shutdown()
        return Done(
            unit=self.unit,
            attempt=self.attempt,
            rows=len(self._index),
            shards=tuple(sorted([*shards, *others], key=lambda s: (order[s.tap], s.first))),
            index=index,
            statistics=statistics,
            documents_table=documents,
            **described,
        )

    def _finish_shards(self) -> list[Shard]:
        return [shard for tap in self._taps.values() for shard in tap.finish()]

    def _write_statistics(self, name: str, run: tuple[int, int] | None = None) -> Shard:
        tensors = statistics_tensors(self.stats)
        run = run or (self.first, self.rows)
        return self._write_file(_STATISTICS, self._prefix + name, tensors, run)

    def _merge(self, key: str) -> None:
        """Merge the statistics of the rows that follow."""
        tensors = read_tensors(self._objects, key)
        for tap, stats in self.stats.items():
            stats.merge(TapStats.from_tensors(tap, tensors, len(stats.mean)))

    def discard(self) -> None:
        """Remove the written files; called only when no record names them."""
        self._closing.shutdown(cancel_futures=True)
        for writer in list(self._open):
            writer.abandon()
        for key in list(self._objects.list(self._prefix)):
            self._objects.delete(key)

    def start_shard(self, tap: str, number: int, rows: int, info: TapInfo) -> ShardWriter:
        key = self._layout.shard_key(
            self.unit, self.attempt, tap, number, part=self._part, compressed=self._compress
        )
        writer = ShardWriter(self._objects, key, tap_tensors(tap, rows, info))
        self._open.add(writer)
        return writer

    def close_shard(self, writer: ShardWriter) -> "Future[tuple[int, str, str]]":
        """Make a shard durable while others are written; the result is its size, digest and etag.

        The number of concurrent calls is limited: if a shard goes over a network, it is held in
        memory meanwhile.
        """
        self._room.acquire()
        closed = self._closing.submit(writer.close)

        def note(_: "Future[tuple[int, str, str]]") -> None:
            # A shard that could not be closed stays open, and is abandoned with the unit.
            if not closed.cancelled():
                error = closed.exception()
                self._failed = self._failed or error
                if error is None:
                    self._open.discard(writer)
                    self._durable(closed.result()[0])
            self._room.release()

        closed.add_done_callback(note)
        return closed

    def _write_file(
        self, name: str, key: str, tensors: Mapping[str, np.ndarray], run: tuple[int, int]
    ) -> Shard:
        writer = ShardWriter(self._objects, key, specs_of(tensors))
        self._open.add(writer)
        for array in tensors.values():
            writer.write(array)
        return Shard(name, key, *run, *self.close_shard(writer).result())


class Attempt:
    """The files of one attempt at a unit: removed, unless a record may name them.

    A commit that fails or is interrupted may still have created its record, or its request may
    still be on its way to a bucket. Removing the files then would lose a unit that exists. Files
    are therefore removed only in three cases: before the commit begins; when the record has been
    read back and names another attempt; or when it certainly was not created (`NotCreatedError`: a
    full disk). `gc` deletes any remaining files once the unit has a record; before that,
    `gc --abandoned` does. Nobody else calls `Ledger.commit` or `UnitWriter.discard`.

    with Attempt(ledger, writer) as attempt:
        writer.write(...)
        committed = attempt.commit(writer.finish(...))
    """

    def __init__(self, ledger: Ledger, writer: UnitWriter) -> None:
        self.writer, self._ledger = writer, ledger
        self._removable = True

    def commit(self, done: Done) -> bool:
        """Create the done record; if another came first, remove the files and return False."""
        self.release()
        try:
            if self._ledger.commit(done):
                return True
        except NotCreatedError:
            self._remove()
            raise
        self._remove()
        return False

    def release(self) -> None:
        """Keep the files from now on: a record may name them, whoever creates it."""
        self._removable = False

    def discard(self) -> None:
        """Remove the files, unless a record may name them."""
        if self._removable:
            self._removable = False
            self._remove()

    def _remove(self) -> None:
        # Cleaning up must not hide why an attempt ended.
        with contextlib.suppress(OSError, StoreError):
            self.writer.discard()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class _TapWriter:
    """Cuts one tap's rows into shards of at most `rows_per_shard`."""

    def __init__(self, unit: UnitWriter, tap: str, info: TapInfo, rows_per_shard: int) -> None:
        self._unit, self._tap, self._info = unit, tap, info
        self._rows_per_shard = rows_per_shard
        self._writer: ShardWriter | None = None
        self._first = self._count = 0  # rows before the open shard, and in it
        self._scales: list[np.ndarray] = []  # scales of its rows; written after all of those
        self._closed: list[tuple[str, int, int, Future[tuple[int, str, str]]]] = []

    def write(self, rows: np.ndarray, scales: np.ndarray | None) -> None:
        if rows.dtype != self._info.storage or rows.shape[1:] != self._info.shape:
            raise AssertionError(f"{self._tap}: {rows.dtype} rows of {rows.shape[1:]}")
        if (scales is None) is (self._info.scaled_by == "row"):
            raise AssertionError(f"{self._tap}: scaled by {self._info.scaled_by}")
        if scales is not None and scales.shape != (len(rows),):
            raise AssertionError(f"{self._tap}: scales of {scales.shape} for {len(rows)} rows")
        if self._first + self._count + len(rows) > self._unit.rows:
            raise AssertionError(f"{self._tap}: more than {self._unit.rows} rows")
        while len(rows):
            size = min(self._rows_per_shard, self._unit.rows - self._first)
            if self._writer is None:
                number = len(self._closed)
                self._writer = self._unit.start_shard(self._tap, number, size, self._info)
            taken = rows[: size - self._count]
            self._writer.write(taken)
            if scales is not None:
                self._scales.append(scales[: len(taken)].astype(SCALE_DTYPE))  # a copy
                scales = scales[len(taken) :]
            self._count += len(taken)
            rows = rows[len(taken) :]
            if self._count == size:
                self._close(self._writer)

    def _close(self, writer: ShardWriter) -> None:
        for scales in self._scales:
            writer.write(scales)
        self._scales.clear()
        closed = self._unit.close_shard(writer)
        self._closed.append((writer.key, self._first, self._count, closed))
        self._first, self._count, self._writer = self._first + self._count, 0, None

    def finish(self) -> list[Shard]:
        if self._first != self._unit.rows:
            raise AssertionError(f"{self._tap}: {self._first} of {self._unit.rows} rows written")
        return [
            Shard(self._tap, key, self._unit.first + first, count, *closed.result())
            for key, first, count, closed in self._closed
        ]


def unit_bytes(
    taps: Mapping[str, TapInfo],
    parts: Sequence[int],
    documents: Mapping[str, np.ndarray],
    shard_bytes: int,
    index_dtype: np.dtype[Any] = INDEX_DTYPE,
) -> int:
    """Return the bytes that all files of a unit take, unless they are compressed.

    They are known before any file is written: sizes follow from counts.

    Args:
        parts: the number of rows that each process of the slice writes.
        documents: the documents table, as `encode_documents` makes it.
    """
    statistics = statistics_tensors({t: TapStats.empty(i.channels) for t, i in taps.items()})
    shards = sum(_shard_bytes(tap, info, parts, shard_bytes) for tap, info in taps.items())
    index = index_tensors(sum(parts), index_dtype)
    return shards + sum(map(_file_bytes, (index, specs_of(statistics), specs_of(documents))))


def _shard_bytes(tap: str, info: TapInfo, parts: Sequence[int], shard_bytes: int) -> int:
    each = max(1, shard_bytes // info.row_bytes)
    return sum(
        count * _file_bytes(tap_tensors(tap, rows, info))
        for part in parts
        for count, rows in ((part // each, each), (1, part % each))
        if count and rows
    )


def _file_bytes(specs: Sequence[TensorSpec]) -> int:
    tensors = (np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape in specs)
    return len(build_header(specs)) + sum(tensors)

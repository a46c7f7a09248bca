"""Windows of rows in memory, and the batches that are taken from them.

A `View` describes the output: which taps, in which dtype, normalized or not. `ReadAhead` holds a
window while threads read the next one. A `BatchBuilder` copies rows from windows into a batch, in
reused memory.
"""

import math
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from spile.core.errors import ConfigError
from spile.dataset.codec.quantization import DECODED, decode
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import SCALE_DTYPE, TapInfo
from spile.dataset.read.dtypes import STORED, convert, given_dtype
from spile.dataset.read.order import BatchOptions, EpochSchedule, Normalize, WindowPlace
from spile.dataset.read.rows import Bytes, ReadJob, Rows, StoredRows, runs

RowBatch = dict[str, Any]  # arrays by name; `Encoded` if requested

_TAKERS = 4  # threads
_WORTH_A_THREAD = 1 << 20  # bytes: a tenth of a millisecond
_SCRATCH_BYTES = 128 << 10  # rows that a thread converts at a time: they stay in its cache
_LONG_RUN = 16  # rows on average: with fewer, read-ahead costs more than it gains
_MAJOR_FAULTS = 16  # some always occur
_KEPT = 4  # buffers to keep of each kind: as many as batches are usually held


class Encoded(NamedTuple):
    """Eight-bit values as stored, and their scale."""

    codes: np.ndarray
    scale: np.ndarray  # one for each row, or in the shape of a row

    def decode(self) -> np.ndarray:
        """Return the decoded values."""
        return decode(self.codes, self.scale)


@dataclass(frozen=True)
class Affine:
    """The normalization of a tap: (values - shift) * factor."""

    shift: np.ndarray | None  # in the shape of a row
    factor: np.ndarray | float | None


@dataclass(frozen=True)
class Conversion:
    """What turns stored rows of a tap into those to give: all of it, while rows are copied."""

    info: TapInfo
    scale: np.ndarray | None  # of each channel
    affine: Affine | None

    def take(self, table: Bytes, numbers: Rows, out: np.ndarray, scales: np.ndarray | None) -> None:
        """Convert rows of a table, by their numbers.

        Args:
            out: [rows, width]
            scales: of each row, if rows have them.
        """
        step = max(1, _SCRATCH_BYTES // table.shape[1])
        scratch = np.empty((min(step, len(out)), table.shape[1]), np.uint8)
        for low in range(0, len(out), step):
            part = slice(low, low + step)
            given = out[part].reshape(-1, *self.info.shape)
            taken = scratch[: len(given)]
            _take(table, numbers[part], taken)
            stored = taken.view(self.info.storage).reshape(given.shape)
            self._convert(stored, given, self.scale if scales is None else scales[part])

    def _convert(self, stored: np.ndarray, out: np.ndarray, scale: np.ndarray | None) -> None:
        if self.affine is None:
            convert(stored, out, scale)
            return
        # Computed in float32 and rounded once.
        wide = out if out.dtype == DECODED else np.empty(out.shape, DECODED)
        convert(stored, wide, scale)
        if self.affine.shift is not None:
            wide -= self.affine.shift
        if self.affine.factor is not None:
            wide *= self.affine.factor
        if wide is not out:
            out[...] = wide


class WindowBuffer:
    """Memory for rows as stored: bytes of taps, and scales if rows have them."""

    def __init__(
        self,
        taps: Mapping[str, TapInfo],
        held: set[str],
        index: np.dtype[Any] | None,
        rows: int,
    ) -> None:
        """`index`: the columns of the index, if it is held, too."""
        self.taps: dict[str, Bytes] = {
            tap: np.empty((rows, taps[tap].width * taps[tap].storage.itemsize), np.uint8)
            for tap in taps
            if tap in held
        }
        self.scales = {
            tap: np.empty(rows, SCALE_DTYPE) for tap, i in taps.items() if i.scaled_by == "row"
        }
        self.index = None if index is None else np.empty(rows, index)


@dataclass(frozen=True)
class Window:
    """Rows to return: for each tap a table that holds them, and their numbers in it, in order."""

    place: tuple[int, int]
    buffer: WindowBuffer
    tables: Mapping[str, tuple[Bytes, Rows]]
    # Small values of each row, already in the order in which rows are returned: the thread that
    # reads ahead gathers them, so that the one that returns rows only copies.
    scales: Mapping[str, np.ndarray]
    index: np.ndarray | None
    begins: Mapping[int, int]  # epoch's row at which a stretch begins -> its first position

    @classmethod
    def of(
        cls,
        place: tuple[int, int],
        buffer: WindowBuffer,
        tables: Mapping[str, tuple[Bytes, Rows]],
        places: Rows,
        begins: Mapping[int, int],
    ) -> "Window":
        """A window of the rows at these places of a buffer."""
        scales = {tap: held[places] for tap, held in buffer.scales.items()}
        index = None if buffer.index is None else np.take(buffer.index, places, mode="clip")
        return cls(place, buffer, tables, scales, index, begins)


class View:
    """The requested taps, by the requested names."""

    def __init__(
        self,
        stored: StoredRows,
        names: Mapping[str, str],
        options: BatchOptions,
        statistics: Callable[[str], TapStats],
        made_by: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        names: the tap of each requested name.
        statistics: returns those of a tap.
        made_by: the fingerprint of the recipe of each requested name.
        """
        if "index" in names:
            raise ConfigError("the index is no tap; it is given unless index=False")
        self.stored, self.names, self.made_by = stored, names, made_by or {}
        self.entries = stored.table.index_dtype if options.index else None  # those of batches
        self.encoded = options.encoded
        self.taps = {tap: stored.table.taps[tap] for tap in names.values()}
        self._dtype, normalize = options.dtype, options.normalize
        self.affines = {
            tap: _affine(normalize, statistics(tap), info)
            for tap, info in self.taps.items()
            if normalize
        }
        for tap in self.taps:
            self.given(tap)  # raises if no such dtype can be given
        self.pool, self.takers = _Pool(), _Takers()

    @property
    def row_bytes(self) -> int:
        """Bytes held of each row."""
        index = 0 if self.entries is None else self.entries.itemsize
        return index + sum(info.row_bytes for info in self.taps.values())

    @property
    def is_mapped(self) -> bool:
        """Whether no tap's rows need to be copied into a window."""
        return all(self.stored.mapped(tap) is not None for tap in self.taps)

    def buffer(self, rows: int) -> WindowBuffer:
        """Allocate memory for a window; taps whose files are mapped need none."""
        held = {tap for tap in self.taps if self.stored.mapped(tap) is None}
        return WindowBuffer(self.taps, held, self.entries, rows)

    def affine(self, name: str) -> Affine | None:
        """Return the normalization of a tap; it is not yet applied to an encoded one."""
        return self.affines.get(self.names[name])

    def scaled_by(self, name: str) -> Literal["row", "channel"] | None:
        """Return the kind of scale for the encoded values of a tap."""
        return self.taps[self.names[name]].scaled_by

    def begin(self, rows: int, *, unconverted: bool = False) -> "BatchBuilder":
        """Begin a batch; `unconverted`: for a loader (see `Batches.unconverted`)."""
        return BatchBuilder(self, rows, unconverted)

    def given(self, tap: str, *, unconverted: bool = False) -> np.dtype[Any]:
        """Return the dtype of a tap's rows in batches."""
        info = self.taps[tap]
        if self.encoded and info.scaled_by:
            return info.storage
        dtype = STORED if unconverted and self._dtype is None else self._dtype
        return given_dtype(info, dtype, normalized=tap in self.affines)

    def conversion(self, tap: str, given: np.dtype[Any]) -> Conversion | None:
        """Return what makes rows of this dtype; None if they are given as files hold them."""
        info, affine = self.taps[tap], self.affines.get(tap)
        if self.encoded and info.scaled_by:
            return None
        if not info.scaled_by and affine is None and given == info.storage:
            return None
        return Conversion(info, self.stored.scales.get(tap), affine)


class BatchBuilder:
    """A batch that is being filled."""

    def __init__(self, view: View, rows: int, unconverted: bool) -> None:
        self._view, self._rows, self._filled = view, rows, 0
        self._conversions: dict[str, Conversion | None] = {}
        self._values: dict[str, np.ndarray] = {}  # [rows, width]
        self._scales: dict[str, np.ndarray] = {}
        for tap, info in view.taps.items():
            dtype = view.given(tap, unconverted=unconverted)
            self._conversions[tap] = view.conversion(tap, dtype)
            self._values[tap] = view.pool.array(f"{tap} {dtype}", rows, (info.width,), dtype)
            if view.encoded and info.scaled_by == "row":
                self._scales[tap] = view.pool.array(f"{tap} scales", rows, (), SCALE_DTYPE)
        self._entries = None
        if view.entries is not None:
            self._entries = view.pool.array("index", rows, (), view.entries)

    def take(self, window: Window, first: int, count: int) -> None:
        """Copy the next `count` rows, from position `first` of the window on."""
        part, places = slice(self._filled, self._filled + count), slice(first, first + count)
        for tap, values in self._values.items():
            table, numbers = window.tables[tap]
            scales = window.scales[tap][places] if tap in window.scales else None
            takes = self._conversions[tap]
            self._view.takers.take(table, numbers[places], values[part], takes, scales)
            if scales is not None and tap in self._scales:
                self._scales[tap][part] = scales
        if self._entries is not None and window.index is not None:
            # As bytes: numpy copies records field by field, twenty times slower.
            self._entries[part].view(np.uint8)[:] = window.index[places].view(np.uint8)
        self._filled += count

    def shortened(self) -> "BatchBuilder":
        """Truncate the batch to the rows filled so far."""
        self._rows = self._filled
        self._values = {tap: values[: self._rows] for tap, values in self._values.items()}
        self._scales = {tap: scales[: self._rows] for tap, scales in self._scales.items()}
        self._entries = None if self._entries is None else self._entries[: self._rows]
        return self

    def finish(self) -> RowBatch:
        assert self._filled == self._rows
        made = {tap: self._made(tap) for tap in self._values}
        batch: RowBatch = {name: made[tap] for name, tap in self._view.names.items()}
        if self._entries is not None:
            batch["index"] = self._entries
        return batch

    def _made(self, tap: str) -> Any:
        view, info = self._view, self._view.taps[tap]
        values = self._values[tap].reshape(self._rows, *info.shape)
        if view.encoded and info.scaled_by:
            by_row = info.scaled_by == "row"
            return Encoded(values, self._scales[tap] if by_row else view.stored.scales[tap])
        return values


# -- windows that are read ahead ---------------------------------------------------------------


class ReadAhead:
    """Windows in turn, with memory for two: the current one and the next.

    Several views may show the same rows, of aligned datasets: each has a window of its own.
    """

    def __init__(self, views: Sequence[View], schedule: EpochSchedule) -> None:
        self._views, self._order, self._schedule = views, schedule.order, schedule
        self._loading = ThreadPoolExecutor(1, "spile-window")
        copied = [view for view in views if not view.is_mapped]
        threads = max((view.stored.objects.parallel for view in copied), default=0)
        self._reading = ThreadPoolExecutor(threads, "spile-read") if copied else None
        self._cold, self._faults = False, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._free: list[list[WindowBuffer]] = []
        self._current: list[Window] | None = None
        self._next: tuple[WindowPlace, Future[list[Window]]] | None = None

    def windows(self, place: WindowPlace) -> list[Window]:
        """Return the windows of all views; their memory is reused when others are requested."""
        if self._current is None or self._current[0].place != place:
            if self._current is not None:
                self._free.append([window.buffer for window in self._current])
                self._current = None
            if self._next is None or self._next[0] != place:
                self.close()
                self._next = place, self._loading.submit(self._load, place)
            try:
                self._current = self._next[1].result()
            except Exception:
                self._next = None  # the next request reads it again
                raise
            after = self._schedule.following(place)
            self._next = after and (after, self._loading.submit(self._load, after))
        return self._current

    def close(self) -> None:
        """Wait for the windows being read, and drop them."""
        if self._next is not None:
            future, self._next = self._next[1], None
            if future.exception() is None:
                self._free.append([window.buffer for window in future.result()])

    def _load(self, place: WindowPlace) -> list[Window]:
        rows, places = self._order.window(place)
        ends = self._order.ends(place[0])
        begin = int(ends[place[1]]) - len(rows)
        begins: dict[int, int] = {}
        mine: list[Rows] = [places[:0]]
        given = 0
        for low, high in self._schedule.parts(place):
            begins[low] = given
            given += high - low
            mine.append(places[low - begin : high - begin])
        if given < len(places):  # other ranks or workers have the rest
            places = np.concatenate(mine)
            used = np.unique(places)
            rows, places = rows[used], np.searchsorted(used, places)
        capacity = self._order.capacity
        buffers = self._free.pop() if self._free else [v.buffer(capacity) for v in self._views]
        both = [*zip(self._views, buffers, strict=True)]
        tables = [self._tables(view, buffer, rows, places) for view, buffer in both]
        self._run(job for view, buffer in both for job in _jobs(view, rows, buffer))
        return [
            Window.of(place, buffer, found, places, begins)
            for buffer, found in zip(buffers, tables, strict=True)
        ]

    def _tables(
        self, view: View, buffer: WindowBuffer, rows: Rows, places: Rows
    ) -> dict[str, tuple[Bytes, Rows]]:
        """Return the table that holds each tap's rows, and their numbers in it."""
        tables = {tap: (held, places) for tap, held in buffer.taps.items()}
        for tap in view.taps.keys() - buffer.taps.keys() if len(rows) else ():
            tables[tap] = self._mapped(view.stored, tap, rows, places)
        return tables

    def _mapped(self, stored: StoredRows, tap: str, rows: Rows, places: Rows) -> tuple[Bytes, Rows]:
        """Return the table of mapped rows, and the row numbers in it; read ahead if cold."""
        mapped = stored.mapped(tap)
        assert mapped is not None
        numbers = mapped.numbers(rows)
        if self._is_cold():
            bounds = runs(numbers)
            if len(numbers) >= _LONG_RUN * (len(bounds) - 1):
                mapped.expect(numbers, bounds)
        return mapped.table, numbers[places]

    def _is_cold(self) -> bool:
        """Return whether a disk had to be waited for. (Needless read-ahead is costly.)"""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._cold |= faults > self._faults + _MAJOR_FAULTS
        return self._cold

    def _run(self, jobs: Iterable[ReadJob]) -> None:
        """Run all jobs; raise the error of one after all have ended."""
        if self._reading is None:  # the jobs are short: threads would only take turns
            for job in jobs:
                job()
            return
        futures = [self._reading.submit(job) for job in jobs]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]


def _jobs(view: View, rows: Rows, buffer: WindowBuffer) -> Iterable[ReadJob]:
    if not len(rows):
        return
    for tap in view.taps:
        held, scales = buffer.taps.get(tap), buffer.scales.get(tap)
        if held is not None:
            yield from view.stored.jobs(tap, rows, held[: len(rows)])
        if scales is not None:
            yield from view.stored.scale_jobs(tap, rows, scales[: len(rows)])
    if buffer.index is not None:
        yield from view.stored.index_jobs(rows, buffer.index[: len(rows)])


# -- memory and threads ---------------------------------------------------------------------------


class _Takers:
    """np.take by a few threads: one core does not saturate the memory bandwidth."""

    def __init__(self) -> None:
        self._threads = min(_TAKERS, os.cpu_count() or 1)
        self._others = ThreadPoolExecutor(max(1, self._threads - 1), "spile-take")

    def take(
        self,
        table: Bytes,
        numbers: Rows,
        out: np.ndarray,
        conversion: Conversion | None = None,
        scales: np.ndarray | None = None,
    ) -> None:
        """Copy rows of a table by their numbers, as bytes or converted."""
        parts = min(self._threads, 1 + out.nbytes // _WORTH_A_THREAD)
        cuts = [len(out) * part // parts for part in range(parts + 1)]

        def taken(low: int, high: int) -> None:
            if conversion is None:
                _take(table, numbers[low:high], out[low:high].view(np.uint8))
            else:
                of_rows = None if scales is None else scales[low:high]
                conversion.take(table, numbers[low:high], out[low:high], of_rows)

        others = [
            self._others.submit(taken, low, high)
            for low, high in zip(cuts[1:], cuts[2:], strict=False)
        ]
        try:
            taken(0, cuts[1])
        finally:
            wait(others)  # no thread may still write to memory that is handed out
        for other in others:
            other.result()


def _take(table: Bytes, numbers: Rows, out: Bytes) -> None:
    np.take(table, numbers, axis=0, out=out, mode="clip")  # with a mode, `out` is not buffered


class _Pool:
    """Arrays that are reused as soon as nobody holds them or a view of them.

    Touching new memory for the first time costs more than copying rows.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[np.ndarray]] = {}

    def array(
        self, kind: str, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray:
        kept = self._kept.setdefault(kind, [])
        # A short batch, the last of an epoch, must not evict long arrays.
        for at in range(len(kept)):
            if _references(kept, at) == _UNHELD and len(kept[at]) >= rows:
                return kept[at][:rows]
        kept[:] = [kept[at] for at in range(len(kept)) if len(kept[at]) >= rows][-_KEPT + 1 :]
        kept.append(np.empty((rows, *shape), dtype))
        return kept[-1][:]


def _references(held: list[Any], at: int) -> int:
    return sys.getrefcount(held[at])


_UNHELD = _references([np.empty(0)], 0)  # counted in the same way


def _affine(normalize: Normalize, stats: TapStats, info: TapInfo) -> Affine:
    """Return the normalization; statistics are per channel, whatever axes a row has."""
    if info.covariance_of is not None:
        raise ConfigError("it holds sums by label, which have no scale; leave out normalize")
    if normalize == "norm":
        norm = stats.mean_norm
        return Affine(None, math.sqrt(info.width) / norm if norm > 0 else 1.0)
    shift = stats.mean.reshape(info.shape).astype(DECODED)
    if normalize == "mean":
        return Affine(shift, None)
    deviation = np.sqrt(stats.variance).reshape(info.shape)
    factor = np.divide(1, deviation, out=np.ones_like(deviation), where=deviation > 0)
    return Affine(shift, factor.astype(DECODED))

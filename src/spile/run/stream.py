"""Batches straight from the model, to train while it runs: no disk.

The units of the corpus come in a random order, and their rows in stored order. Each `window` of
rows is filled, and then its rows come out in a random order. So the order depends only on the
recipe, the seed and the window. A state names the unit and the row at which its window begins; a
stream that continues from it computes from there on.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, InputError, Interrupted
from spile.core.expressions import RowFilter
from spile.core.threads import cancellation, cancelled_by
from spile.core.units import Unit
from spile.dataset.read.order import BatchOptions, EpochCursor, drawn, drawn_digest
from spile.dataset.read.rows import StoredRows
from spile.dataset.read.window import RowBatch, View, Window, WindowBuffer
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.segments import Catalog
from spile.metrics import Counters
from spile.objects import MemoryObjects
from spile.plan.job import PreparedUnit
from spile.run.assembly import Assembly
from spile.run.pipeline.display import waiting
from spile.run.pipeline.merging import PartMerger, mergers
from spile.run.pipeline.nonfinite import FiniteTaps
from spile.run.step.output import StepOutput
from spile.run.world.devices import prepared_device
from spile.run.world.rank import find_rank
from spile.run.world.world import RunContext, SingleWorld

_POLL = 0.1  # seconds between looks at the stop flag while blocked
_BUFFERS = 2  # one window is read while the next one is filled


def stream(
    recipe: Recipe,
    runtime: Runtime | None = None,
    *,
    taps: str | Sequence[str] | None = None,
    batch_size: int = 4096,
    index: bool = True,
    seed: int = 0,
    shuffle: Literal["window"] | bool | None = "window",
    window: int | str = 1 << 16,
    epochs: int | None = 1,
    where: str | None = None,
    dtype: npt.DTypeLike | None = None,
    encoded: bool = False,
    drop_last: bool = False,
    counters: Counters | None = None,
) -> "ActivationStream":
    """Iterate over batches as `Dataset.batches` does, but straight from the model.

    A batch is `{tap: rows, "index": entries}`.

    The model is loaded at once. It computes from the first batch until `close`, the end of a `with`
    block, or the last batch. Options are those of `Dataset.batches`.

    Args:
        taps: some of the recipe's; all if not given.
        shuffle: True or "window": units in random order, and rows within each window; False or
            None: stored order.
        window: rows held (and as many computed ahead), or bytes of them, as in "512MiB".
        counters: the counters of the stages, for those who watch.
    """
    runtime = runtime or Runtime()
    if find_rank(runtime, os.environ):
        raise ConfigError("spile.stream runs in one process, on all of its devices")
    if shuffle not in ("window", True, False, None):
        raise ConfigError(f"shuffle is True, False or 'window', not {shuffle!r}")
    options = BatchOptions(
        batch_size,
        index=index,
        seed=seed,
        shuffle=shuffle,
        window=window,
        epochs=epochs,
        where=where,
        dtype=dtype,
        encoded=encoded,
        drop_last=drop_last,
    )
    if where is not None:
        RowFilter(where, None)  # raises if it is invalid
    ledger = Ledger(MemoryObjects("spile.stream"))
    presence = Presence(ledger.objects, runtime.stale_after)
    context = RunContext(ledger, runtime, SingleWorld(), presence, counters or Counters())
    parts = Assembly.of(context, recipe, prepared_device()).stored()
    # (A stream keeps no documents, so nothing is compared.)
    parts = replace(parts, job=replace(parts.job, compares=False))
    job, step = parts.job, parts.load()
    aliases = {alias: tap for tap, info in job.table.taps.items() for alias in info.aliases}
    names = list(job.table.taps) if taps is None else [taps] if isinstance(taps, str) else taps
    for name in names:
        if aliases.get(name, name) not in job.table.taps:
            known = ", ".join(job.table.taps)
            raise ConfigError(f"no tap {name!r} in the recipe; it has {known}")
    none = Catalog.of(ledger.objects, ledger.layout, ())
    stored = StoredRows(ledger.objects, job.table, none, ledger.read_scales(job.table) or {})
    by_name = {name: aliases.get(name, name) for name in names}
    view = View(stored, by_name, options, _no_statistics)
    order = StreamOrder(
        job.table.fingerprint, job.units, options, options.window_rows(view.row_bytes)
    )

    def work(rows: WindowQueue, start: WindowStart) -> None:
        parts.worker(step, UnitsInTurn(order, start), sink=rows).run()

    finite = FiniteTaps.of(job, allow=runtime.allow_nonfinite)
    given = {name: tap for name, tap in finite.taps.items() if name in view.taps}
    return ActivationStream(view, order, work, replace(finite, taps=given))


def _no_statistics(tap: str) -> Any:
    raise AssertionError(tap)


# -- batches ----------------------------------------------------------------------------------


Work = Callable[["WindowQueue", "WindowStart"], None]


class ActivationStream:
    """An iterator over batches; `state_dict` may be taken between any two of them."""

    def __init__(self, view: View, order: "StreamOrder", work: Work, finite: FiniteTaps) -> None:
        """`work`: runs a worker whose rows go into a queue."""
        self.view, self._order, self._work, self._finite = view, order, work, finite
        self._options = order.options
        self._cursor = EpochCursor(order.identity, order.options.epochs, "stream")
        self._start = WindowStart()  # of the window that holds the cursor
        self._window: tuple[FilledWindow, Window | None] | None = None
        self._queue: WindowQueue | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration, as JSON."""
        start = self._start
        begin = [start.position, start.number, start.unit, start.row]
        return {**self._cursor.state_dict(), "begin": begin}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream of the same recipe stood."""
        cursor = EpochCursor(self._order.identity, self._options.epochs, "stream")
        cursor.load_state_dict(state)
        start = self._parse_start(cursor, state.get("begin"))
        self.close()
        self._cursor, self._start = cursor, start

    def _parse_start(self, cursor: EpochCursor, begin: Any) -> "WindowStart":
        numbers = [*cast(Sequence[Any], begin)] if isinstance(begin, list | tuple) else []
        if len(numbers) == 4 and all(type(n) is int and n >= 0 for n in numbers):
            start = WindowStart(cursor.epoch, *numbers)
            taken = cursor.position - start.position
            if 0 <= taken <= self._order.window and start.unit <= len(self._order.units):
                return start
        raise ConfigError(
            f"no state of this stream: position {cursor.position}, window begun at {begin!r}"
        )

    def __repr__(self) -> str:
        options, names = self._options, ", ".join(self.view.names)
        told = f"shuffle={options.shuffle!r}, seed={options.seed}"
        return (
            f"<spile stream of {options.batch_size:,} rows ({names}): {told}; at row "
            f"{self._cursor.position:,} of epoch {self._cursor.epoch} of "
            f"{options.epochs or 'no end'}>"
        )

    def __enter__(self) -> "ActivationStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Stop computing; the next batch continues from here."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = self._queue = self._window = None

    def __iter__(self) -> Iterator[RowBatch]:
        return self

    def __next__(self) -> RowBatch:
        while not self._cursor.ended:
            batch = self._next_of_epoch()
            if batch is not None:
                return batch
        self.close()
        raise StopIteration

    def _next_of_epoch(self) -> RowBatch | None:
        """Return a batch of the current epoch; at its end move to the next one and return None."""
        batch_size, drop_last = self._options.batch_size, self._options.drop_last
        made, missing = self.view.begin(batch_size), batch_size
        start, position, ended = self._start, self._cursor.position, False
        while missing and not ended:
            filled, window = self._window or self._next_window()
            start = filled.start
            taken = position - start.position
            count = min(missing, filled.count - taken)
            if window is not None:
                made.take(window, taken, count)
            position, missing = position + count, missing - count
            if taken + count == filled.count:
                self._give_back()
                ended = filled.ends
        given = batch_size - missing
        self._cursor.advance(given, ends=ended)
        self._start = WindowStart(self._cursor.epoch) if ended else start
        if given and not (missing and drop_last):
            return made.finish() if not missing else made.shortened().finish()
        if position < (batch_size if drop_last else 1):
            self._refuse_empty(position)
        return None

    def _next_window(self) -> "tuple[FilledWindow, Window | None]":
        try:
            with waiting("computing rows", late=True):
                filled = self._running().next()
        except BaseException:
            self.close()
            raise
        window = None
        if filled.buffer is not None:
            places = self._order.places(filled.start, filled.count)
            tables = {tap: (held, places) for tap, held in filled.buffer.taps.items()}
            place = filled.start.epoch, filled.start.number
            window = Window.of(place, filled.buffer, tables, places, {})
        self._window = filled, window
        return self._window

    def _give_back(self) -> None:
        """Release the window's memory, once all its rows have been given."""
        assert self._window and self._queue
        filled, self._window = self._window[0], None
        if filled.buffer is not None:
            self._queue.release(filled.buffer)

    def _refuse_empty(self, rows: int) -> None:
        """Raise for an epoch without any batch: it would be followed by others without end."""
        if not rows:
            self.close()
            raise InputError("the corpus has no rows: no document is usable, or `where` keeps none")
        if self._options.epochs is None:
            self.close()
            size = self._options.batch_size
            raise ConfigError(f"an epoch has {rows} rows, fewer than batch_size {size}")

    def _running(self) -> "WindowQueue":
        if self._queue is None:
            stop = self._stop = threading.Event()
            rows = WindowQueue(self.view, self._order, self._start, self._finite)
            arguments = (self._work, rows, self._start, stop)
            self._thread = threading.Thread(
                target=_run, args=arguments, name="spile-stream", daemon=True
            )
            self._thread.start()
            self._queue = rows
        return self._queue


def _run(work: Work, rows: "WindowQueue", start: "WindowStart", stop: threading.Event) -> None:
    """Run the worker. (The thread holds no reference to its stream: a forgotten stream stops.)"""
    try:
        with cancelled_by(stop):
            work(rows, start)
    except BaseException as error:
        rows.fail(error)
    else:
        rows.fail(Interrupted())  # a reader that still waits must not wait for ever


# -- where rows wait: one window is filled by a worker while another is read ---------------------


@dataclass(frozen=True)
class WindowStart:
    """Where a window begins."""

    epoch: int = 0
    position: int = 0  # rows of the epoch before it
    number: int = 0  # index of the window in the epoch
    unit: int = 0  # units of the epoch, in its order, that are no longer needed
    row: int = 0  # of the next unit, in stored order


@dataclass(frozen=True)
class FilledWindow:
    """A window of rows, or the end of an epoch (without rows)."""

    start: WindowStart
    buffer: WindowBuffer | None
    count: int
    ends: bool  # whether the epoch ends with it


@dataclass(frozen=True)
class StreamOrder:
    """The order of units and rows.

    Attributes:
        window: rows per window.
    """

    fingerprint: str
    units: Sequence[Unit]
    options: BatchOptions
    window: int

    @property
    def identity(self) -> dict[str, Any]:
        """The values that determine the order, as JSON."""
        return {
            "recipe": self.fingerprint,
            "seed": self.options.seed,
            "shuffle": self.options.shuffle,
            "window": self.window,
            "where": self.options.where,
            "drawn": drawn_digest(self.options.seed),
        }

    def units_from(self, start: WindowStart) -> Iterator[Unit]:
        """The units of all epochs, starting with the one in which a window begins."""
        epoch, first, options = start.epoch, start.unit, self.options
        while options.epochs is None or epoch < options.epochs:
            count = len(self.units)
            order = drawn(count, options.seed, epoch, 0) if options.shuffle else np.arange(count)
            for number in order[first:]:
                yield self.units[number]
            epoch, first = epoch + 1, 0

    def places(self, start: WindowStart, count: int) -> np.ndarray:
        """Return the order in which a window's rows are given."""
        if not self.options.shuffle:
            return np.arange(count)
        return drawn(count, self.options.seed, start.epoch, 1, start.number)


class UnitsInTurn:
    """Picks units in the order of the stream."""

    def __init__(self, order: StreamOrder, start: WindowStart) -> None:
        self._units = order.units_from(start)

    def take(self) -> tuple[Unit | None, bool]:
        unit = next(self._units, None)
        return unit, unit is not None

    def done(self, unit: int) -> None:
        pass


class WindowQueue:
    """The sink of a worker: hands on rows one window at a time, with memory for two windows."""

    def __init__(
        self,
        view: View,
        order: StreamOrder,
        start: WindowStart,
        finite: FiniteTaps,
    ) -> None:
        self._view, self._order, self._finite = view, order, finite
        where = order.options.where
        self._filter = RowFilter(where, None) if where else None
        self._free: queue.Queue[WindowBuffer] = queue.Queue()
        for _ in range(_BUFFERS):
            self._free.put(WindowBuffer(view.taps, {*view.taps}, view.entries, order.window))
        self._ready: queue.Queue[FilledWindow | BaseException] = queue.Queue()
        self._start: WindowStart = start
        self._count, self._buffer = 0, None
        self._unit, self._row = start.unit, 0  # the current unit, and its next row
        self._skip = start.row
        self._current: PreparedUnit | None = None
        self._mergers: dict[str, PartMerger] = {}  # of the current unit, if values are pooled
        self._parts = 0  # that have arrived of it

    # -- the worker's side ---------------------------------------------------------------------

    def begin(self, prepared: PreparedUnit) -> None:
        self._current, self._row, self._parts = prepared, 0, 0
        self._mergers = mergers(self._view.stored.table, prepared)

    def put(self, output: StepOutput) -> None:
        assert self._current
        self._finite.check(output, self._current, self._parts)
        self._parts += output.num_rows
        merged = self._mergers
        sources = {tap: merged[tap].source if merged else tap for tap in self._view.taps}
        rows: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray | None]]]
        if merged:
            found = {
                tap: [
                    (merged[tap].add(each.parts_of(source), each.products_of(source))[0], None)
                    for each in output.batches
                ]
                for tap, source in sources.items()
            }
            rows, count = found, sum(len(part) for part, _ in next(iter(found.values())))
        else:
            rows, count = {tap: list(output.pieces_of(tap)) for tap in sources}, output.num_rows
        entries = self._current.packed.index[self._row : self._row + count]
        keep = np.ones(len(entries), np.bool_) if not self._filter else self._filter.mask(entries)
        keep[: max(0, self._skip - self._row)] = False
        chosen = np.flatnonzero(keep)
        while len(chosen):
            if self._buffer is None:
                self._buffer = self._wait()
                if self._buffer is None:
                    return
            part = chosen[: self._order.window - self._count]
            _copy(rows, part, self._buffer, self._count)
            if self._buffer.index is not None:
                self._buffer.index[self._count : self._count + len(part)] = entries[part]
            self._count, chosen = self._count + len(part), chosen[len(part) :]
            if self._count == self._order.window:
                self._give(row=self._row + int(part[-1]) + 1)
        self._row += len(entries)

    def end(self, seconds: float) -> None:
        self._unit, self._row, self._skip = self._unit + 1, 0, 0
        if self._unit == len(self._order.units):
            self._give(ends=True)

    @property
    def waiting(self) -> tuple[int, int]:
        return self._ready.qsize(), 0

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    abandon = close

    def fail(self, error: BaseException) -> None:
        self._ready.put(error)

    def _give(self, *, row: int = 0, ends: bool = False) -> None:
        """Hand on a window that is full, or that ends the epoch."""
        start = self._start
        self._ready.put(FilledWindow(start, self._buffer, self._count, ends))
        if ends:
            self._start, self._unit = WindowStart(start.epoch + 1), 0
        else:
            self._start = replace(
                start,
                position=start.position + self._count,
                number=start.number + 1,
                unit=self._unit,
                row=row,
            )
        self._buffer, self._count = None, 0

    def _wait(self) -> WindowBuffer | None:
        while not cancellation().is_set():
            try:
                return self._free.get(timeout=_POLL)
            except queue.Empty:
                continue
        return None

    # -- the reader's side ---------------------------------------------------------------------

    def next(self) -> FilledWindow:
        """Return the next window; raise the worker's error if it has failed."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, buffer: WindowBuffer) -> None:
        self._free.put(buffer)


def _copy(
    rows: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray | None]]],
    chosen: np.ndarray,
    buffer: WindowBuffer,
    at: int,
) -> None:
    """Copy chosen rows of a step, ascending, into a buffer, as bytes."""
    for tap, pieces in rows.items():
        before, filled = 0, at
        for values, scales in pieces:
            low, high = np.searchsorted(chosen, [before, before + len(values)])
            mine = chosen[low:high] - before
            part = slice(filled, filled + len(mine))
            flat = np.ascontiguousarray(values[mine]).reshape(len(mine), -1)
            if len(mine):
                buffer.taps[tap][part] = flat.view(np.uint8)
            if scales is not None:
                buffer.scales[tap][part] = scales[mine]
            before, filled = before + len(values), filled + len(mine)

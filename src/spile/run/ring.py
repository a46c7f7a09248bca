"""Where a stream's rows wait: windows of them, filled by a worker while another one is given."""

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spile.core.expressions import RowFilter
from spile.corpus.units import Unit
from spile.dataset.read.order import drawn, drawn_digest
from spile.dataset.read.view import Room, View
from spile.models.taps import Tap
from spile.run.nonfinite import nonfinite_error
from spile.run.sink import Prepared
from spile.run.step import StepOutput

_POLL = 0.1  # seconds between looks at the stop flag while blocked
_ROOMS = 2  # a window is given while the next one is filled


@dataclass(frozen=True)
class Begin:
    """Where a window begins."""

    epoch: int = 0
    position: int = 0  # rows of the epoch that have come before it
    number: int = 0  # of the window in the epoch
    unit: int = 0  # units of the epoch, in its order, of which nothing is needed any more
    row: int = 0  # of the next one, in stored order


@dataclass(frozen=True)
class Filled:
    """A window of rows, or an epoch's end (which has none)."""

    begin: Begin
    room: Room | None
    count: int
    ends: bool  # the epoch


@dataclass(frozen=True)
class Order:
    """Which unit and which row come when."""

    fingerprint: str
    units: tuple[Unit, ...]
    seed: int
    shuffle: str | None
    window: int
    where: str | None
    epochs: int | None

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "recipe": self.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "window": self.window,
            "where": self.where,
            "drawn": drawn_digest(self.seed),
        }

    def units_from(self, begin: Begin) -> Iterator[Unit]:
        epoch, first = begin.epoch, begin.unit
        while self.epochs is None or epoch < self.epochs:
            count = len(self.units)
            order = drawn(count, self.seed, epoch, 0) if self.shuffle else np.arange(count)
            for number in order[first:]:
                yield self.units[number]
            epoch, first = epoch + 1, 0

    def places(self, begin: Begin, count: int) -> np.ndarray:
        """Of a window's rows, the order in which they are given."""
        if not self.shuffle:
            return np.arange(count)
        return drawn(count, self.seed, begin.epoch, 1, begin.number)


class InTurn:
    """Units one after another."""

    def __init__(self, order: Order, begin: Begin) -> None:
        self._units = order.units_from(begin)

    def take(self) -> tuple[Unit | None, bool]:
        unit = next(self._units, None)
        return unit, unit is not None

    def done(self, unit: int) -> None:
        pass


class Ring:
    """Takes a worker's rows, and gives them a window at a time: memory for two of them."""

    def __init__(
        self,
        view: View,
        order: Order,
        begin: Begin,
        stop: threading.Event,
        watched: Mapping[str, Tap],
    ) -> None:
        """`watched`: taps of which no NaN may be given, by their stored names."""
        self._view, self._order, self._stop, self._watched = view, order, stop, watched
        self._filter = RowFilter(order.where, None) if order.where else None
        self._free: queue.Queue[Room] = queue.Queue()
        for _ in range(_ROOMS):
            self._free.put(Room(view.taps, {*view.taps}, view.index, order.window))
        self._ready: queue.Queue[Filled | BaseException] = queue.Queue()
        self._begin, self._count, self._room = begin, 0, None
        self._unit, self._row = begin.unit, 0  # the unit in hand, and its next row
        self._skip = begin.row
        self._current: Prepared | None = None

    # -- the worker's side ---------------------------------------------------------------------

    def begin(self, prepared: Prepared) -> None:
        self._current, self._row = prepared, 0

    def put(self, output: StepOutput) -> None:
        assert self._current
        entries = self._current.packed.index[self._row : self._row + int(output.runs.counts.sum())]
        self._refuse_nonfinite(output)
        keep = np.ones(len(entries), np.bool_) if not self._filter else self._filter.mask(entries)
        keep[: max(0, self._skip - self._row)] = False
        chosen = np.flatnonzero(keep)
        taken = _Taken(self._view, output, entries)
        while len(chosen):
            if self._room is None:
                self._room = self._wait()
                if self._room is None:
                    return
            part = chosen[: self._order.window - self._count]
            taken.copy(part, self._room, self._count)
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
        """A window is full, or the epoch has ended."""
        begin = self._begin
        self._ready.put(Filled(begin, self._room, self._count, ends))
        if ends:
            self._begin, self._unit = Begin(begin.epoch + 1), 0
        else:
            self._begin = replace(
                begin, position=begin.position + self._count, number=begin.number + 1,
                unit=self._unit, row=row,
            )  # fmt: skip
        self._room, self._count = None, 0

    def _wait(self) -> Room | None:
        while not self._stop.is_set():
            try:
                return self._free.get(timeout=_POLL)
            except queue.Empty:
                continue
        return None

    def _refuse_nonfinite(self, output: StepOutput) -> None:
        assert self._current
        found = [n for n in self._watched if any(s.nonfinite for s in output.stats_of(n))]
        if found:
            raise nonfinite_error(
                output,
                {name: self._watched[name] for name in found},
                unit=self._current.unit.id,
                packed=self._current.packed,
                table=self._current.table,
                first=self._row,
                int8={tap for tap, info in self._view.taps.items() if info.dtype == "int8"},
            )

    # -- the reader's side ---------------------------------------------------------------------

    def next(self) -> Filled:
        """The next window; raises what the worker failed with."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, room: Room) -> None:
        self._free.put(room)


class _Taken:
    """A step's rows, as bytes."""

    def __init__(self, view: View, output: StepOutput, entries: np.ndarray) -> None:
        self._entries = entries
        self._rows: dict[str, list[tuple[np.ndarray, np.ndarray | None]]] = {
            tap: list(output.pieces_of(tap)) for tap in view.taps
        }

    def copy(self, chosen: np.ndarray, room: Room, at: int) -> None:
        """Chosen rows, ascending, into a room."""
        to = slice(at, at + len(chosen))
        for tap, pieces in self._rows.items():
            before, filled = 0, at
            for rows, scales in pieces:
                low, high = np.searchsorted(chosen, [before, before + len(rows)])
                mine = chosen[low:high] - before
                part = slice(filled, filled + len(mine))
                flat = np.ascontiguousarray(rows[mine]).reshape(len(mine), -1)
                if len(mine):
                    room.taps[tap][part] = flat.view(np.uint8)
                if scales is not None:
                    room.scales[tap][part] = scales[mine]
                before, filled = before + len(rows), filled + len(mine)
        if room.index is not None:
            room.index[to] = self._entries[chosen]

"""A window of rows in memory, and the next one that is read meanwhile by threads."""

import resource
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from spile.dataset.read.order import Place, Schedule
from spile.dataset.read.rows import Bytes, Job, Rows, runs
from spile.dataset.read.view import Room, View, Window

_LONG_RUN = 16  # rows on average: fewer, and asking the disk ahead costs more than it gives
_MAJOR_FAULTS = 16  # some come of anything


class ReadAhead:
    """Windows in turn, in memory for two: the one in hand and the next."""

    def __init__(self, view: View, schedule: Schedule) -> None:
        self._view, self._stored = view, view.stored
        self._order, self._schedule = schedule.order, schedule
        self._loading = ThreadPoolExecutor(1, "spile-window")
        threads = view.stored.objects.parallel
        self._reading = None if view.is_mapped else ThreadPoolExecutor(threads, "spile-read")
        self._cold, self._faults = False, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._free: list[Room] = []
        self._current: Window | None = None
        self._next: tuple[Place, Future[Window]] | None = None

    def window(self, place: Place) -> Window:
        """A window, whose memory is used again when another one is asked for."""
        if self._current is None or self._current.place != place:
            if self._current is not None:
                self._free.append(self._current.room)
                self._current = None
            if self._next is None or self._next[0] != place:
                self.close()
                self._next = place, self._loading.submit(self._load, place)
            try:
                self._current = self._next[1].result()
            except Exception:
                self._next = None  # it is read again when it is asked for again
                raise
            after = self._schedule.following(place)
            self._next = after and (after, self._loading.submit(self._load, after))
        return self._current

    def close(self) -> None:
        """Wait for what is being read, and forget it."""
        if self._next is not None:
            future, self._next = self._next[1], None
            if future.exception() is None:
                self._free.append(future.result().room)

    def _load(self, place: Place) -> Window:
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
        if given < len(places):  # others have the rest
            places = np.concatenate(mine)
            used = np.unique(places)
            rows, places = rows[used], np.searchsorted(used, places)
        room = self._free.pop() if self._free else self._view.room(self._order.capacity)
        tables = {tap: (held, places) for tap, held in room.taps.items()}
        for tap in self._view.taps.keys() - room.taps.keys() if len(rows) else ():
            tables[tap] = self._mapped(tap, rows, places)
        self._run(self._jobs(rows, room))
        return Window(place, room, tables, places, begins)

    def _mapped(self, tap: str, rows: Rows, places: Rows) -> tuple[Bytes, Rows]:
        """Nothing is copied but for those who ask; the disk may begin, where it has to."""
        mapped = self._stored.mapped(tap)
        assert mapped is not None
        numbers = mapped.numbers(rows)
        if self._is_cold():
            bounds = runs(numbers)
            if len(numbers) >= _LONG_RUN * (len(bounds) - 1):
                mapped.expect(numbers, bounds)
        return mapped.table, numbers[places]

    def _is_cold(self) -> bool:
        """Whether a disk has been waited for. (Asking it ahead for what it need not read costs.)"""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._cold |= faults > self._faults + _MAJOR_FAULTS
        return self._cold

    def _jobs(self, rows: Rows, room: Room) -> Iterable[Job]:
        if not len(rows):
            return
        for tap in self._view.taps:
            held, scales = room.taps.get(tap), room.scales.get(tap)
            if held is not None:
                yield from self._stored.jobs(tap, rows, held[: len(rows)])
            if scales is not None:
                yield from self._stored.scale_jobs(tap, rows, scales[: len(rows)])
        if room.index is not None:
            yield from self._stored.index_jobs(rows, room.index[: len(rows)])

    def _run(self, jobs: Iterable[Job]) -> None:
        """All of them, or the error of one, when none runs any more."""
        if self._reading is None:  # they are short: threads would only take turns
            for job in jobs:
                job()
            return
        futures = [self._reading.submit(job) for job in jobs]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

"""The progress of a run: its status, read repeatedly, and its rate over time.

Rates come from the times in done records, if they have any, and from successive readings.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.core.errors import SpileError
from spile.dataset.records.heartbeat import HeartbeatObserver
from spile.dataset.records.ledger import Ledger
from spile.objects import Objects
from spile.status.status import Status, read_status

_SECONDS = 2.0  # between readings; at least `_PATIENCE` times as long as a reading takes
_PATIENCE = 10
_MOST_SAMPLES = 720
_WINDOW = 120.0  # seconds over which the current rate is averaged
_COUNTED = ("tokens", "rows", "documents", "bytes", "units_done")

_log = logging.getLogger("spile.serve")


@dataclass(frozen=True)
class TotalsSeen:
    """Totals, and the time of reading by this machine's clocks."""

    at: float  # since the epoch, to show
    clock: float  # monotonic, to subtract
    totals: dict[str, int]


class RunHistory:
    """Reads a store's status repeatedly until it is closed."""

    def __init__(self, objects: Objects, grown: Callable[[], None]) -> None:
        """`grown` is called when units were finished since the last reading."""
        self._objects, self._grown = objects, grown
        self._lock = threading.Lock()
        self._samples: list[TotalsSeen] = []
        self._every = 1  # keep one reading out of this many
        self._looks = 0
        self._observer = HeartbeatObserver()
        self._made: dict[int, np.ndarray] = {}  # by group: when each unit was done, and its tokens
        self._curve: list[dict[str, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looking", daemon=True)
        self.error: str | None = None
        self._status = read_status(objects)
        self._note(self._status)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def status(self) -> Status:
        return self._status

    def told(self) -> dict[str, Any]:
        """Return everything that the page shows about the run."""
        with self._lock:
            status, samples, curve = self._status, list(self._samples), self._curve
            silence = {w["name"]: self._observer.silence(w["name"]) for w in _workers(status)}
        told = status.to_json()
        for worker in [*told["workers"], *(w for each in told["passes"] for w in each["workers"])]:
            seconds = silence[worker["name"]]
            worker["silent"] = None if seconds is None else round(seconds, 1)
        # Use the rate that workers report; without one, derive it from the finished units.
        rate = told.get("rate") or _present_rate(samples)
        left = max(0, status.tokens_estimated - status.tokens)
        return {
            **told,
            "rate": rate,
            "eta": left / rate if rate and not status.done else None,
            "seen": [{"at": round(each.at * 1000), **each.totals} for each in samples],
            "made": curve,
            "error": self.error,
        }

    def _run(self) -> None:
        wait = _SECONDS
        while not self._stop.wait(wait):
            began = time.monotonic()
            try:
                self._look()
                self.error = None
            except SpileError as error:
                self.error = str(error)
                _log.warning("%s", error)
            wait = max(_SECONDS, _PATIENCE * (time.monotonic() - began))

    def _look(self) -> None:
        status = read_status(self._objects)
        more = _reached(status) != _reached(self._status)
        self._note(status)
        if more:
            self._grown()

    def _note(self, status: Status) -> None:
        told = vars(status)
        seen = TotalsSeen(time.time(), time.monotonic(), {name: told[name] for name in _COUNTED})
        curve = self._curve
        if status.units_done != sum(map(len, self._made.values())):
            self._find_made()
            curve = _cumulative(self._made)
        with self._lock:
            self._status, self._curve = status, curve
            for worker in _workers(status):
                if "counter" in worker:
                    self._observer.note(worker["name"], worker["counter"])
            self._looks += 1
            if self._looks % self._every == 0 or not self._samples:
                self._samples.append(seen)
            if len(self._samples) > _MOST_SAMPLES:
                self._samples, self._every = self._samples[::2], self._every * 2

    def _find_made(self) -> None:
        """Read when units were finished; groups that were complete before are not read again."""
        ledger = Ledger(self._objects)
        table = ledger.table()

        def size(group: int) -> int:
            return len(table.layout.units_of(group, len(table.units)))

        whole = {group for group, made in self._made.items() if len(made) == size(group)}
        for _, segment in ledger.segments_so_far(table, besides=whole):
            if len(segment):
                group = table.layout.group(int(segment.units[0]))
                self._made[group] = np.stack([segment.finished, segment.tokens], axis=1)


def _workers(status: Status) -> list[dict[str, Any]]:
    """Return the workers of a dataset, including those that add taps."""
    return [worker for each in (status, *status.passes) for worker in each.workers]


def _reached(status: Status) -> list[tuple[Any, ...]]:
    """Return a key that changes when units are finished, or taps are added or dropped."""
    return [(*each.taps, each.state, each.units_done) for each in (status, *status.passes)]


def _present_rate(samples: list[TotalsSeen]) -> float | None:
    """Return the tokens per second over the last minutes."""
    if len(samples) < 2:
        return None
    last = samples[-1]
    recent = [each for each in samples if last.clock - each.clock <= _WINDOW]
    first = recent[0] if len(recent) > 1 else samples[-2]
    seconds = last.clock - first.clock
    return (last.totals["tokens"] - first.totals["tokens"]) / seconds if seconds > 0 else None


def _cumulative(made: dict[int, np.ndarray]) -> list[dict[str, int]]:
    """Return the finished tokens over time (milliseconds, as in browsers), some hundred points."""
    found = np.concatenate([np.empty((0, 2)), *made.values()])
    found = found[~np.isnan(found[:, 0])]
    found = found[np.argsort(found[:, 0], kind="stable")]
    totals = np.cumsum(found[:, 1])
    step = max(1, len(found) // _MOST_SAMPLES)
    shown = np.arange(0, len(found), step)
    if step > 1:
        shown = np.append(shown, len(found) - 1)
    points = zip(found[shown, 0].tolist(), totals[shown].tolist(), strict=True)
    return [{"at": round(at * 1000), "tokens": int(tokens)} for at, tokens in points]

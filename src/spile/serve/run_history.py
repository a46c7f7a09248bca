"""The progress of a run: its status, read repeatedly, and its rate over time.

Rates come from the times in done records, if they have any, and from successive readings.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spile.core.errors import SpileError
from spile.core.threads import mapped
from spile.dataset.format import is_amount
from spile.dataset.heartbeat import HeartbeatObserver
from spile.dataset.ledger import Ledger
from spile.objects import Objects
from spile.status.status import Status, read_status

_SECONDS = 2.0  # between looks; at least `_PATIENCE` times as long as a look takes
_PATIENCE = 10
_MOST_SAMPLES = 720
_WINDOW = 120.0  # seconds over which the current rate is taken
_COUNTED = ("tokens", "rows", "documents", "bytes", "units_done")

_log = logging.getLogger("spile")


@dataclass(frozen=True)
class TotalsSeen:
    """Totals, and when they were read by this machine's clocks."""

    at: float  # since the epoch, to show
    clock: float  # monotonic, to subtract
    totals: dict[str, int]


class RunHistory:
    """Looks at a store until it is closed."""

    def __init__(self, objects: Objects, grown: Callable[[], None]) -> None:
        """`grown` is called when units have been done since the last look."""
        self._objects, self._grown = objects, grown
        self._lock = threading.Lock()
        self._samples: list[TotalsSeen] = []
        self._every = 1  # keep one look out of this many
        self._looks = 0
        self._observer = HeartbeatObserver()
        self._made: dict[int, tuple[float, int] | None] = {}  # unit -> when it was done, tokens
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
        """Everything that the page shows about the run."""
        with self._lock:
            status, samples = self._status, list(self._samples)
            made = sorted(each for each in self._made.values() if each is not None)
            silence = {w["name"]: self._observer.silence(w["name"]) for w in status.workers}
        told = status.to_json()
        for worker in told["workers"]:
            seconds = silence[worker["name"]]
            worker["silent"] = None if seconds is None else round(seconds, 1)
        # Workers may report their rate; otherwise it follows from the units done.
        rate = told.get("rate") or _present_rate(samples)
        left = max(0, status.tokens_estimated - status.tokens)
        return {
            **told,
            "rate": rate,
            "eta": left / rate if rate and not status.over else None,
            "seen": [{"at": round(each.at * 1000), **each.totals} for each in samples],
            "made": _cumulative(made),
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
        more = status.units_done != self._status.units_done
        more |= status.state != self._status.state
        self._note(status)
        if more:
            self._grown()

    def _note(self, status: Status) -> None:
        told = vars(status)
        seen = TotalsSeen(time.time(), time.monotonic(), {name: told[name] for name in _COUNTED})
        made = self._newly_made() if status.units_done != len(self._made) else {}
        with self._lock:
            self._status = status
            self._made |= made
            for worker in status.workers:
                if "counter" in worker:
                    self._observer.note(worker["name"], worker["counter"])
            self._looks += 1
            if self._looks % self._every == 0 or not self._samples:
                self._samples.append(seen)
            if len(self._samples) > _MOST_SAMPLES:
                self._samples, self._every = self._samples[::2], self._every * 2

    def _newly_made(self) -> dict[int, tuple[float, int] | None]:
        """Units newly found done; a record is read once, as it never changes."""
        ledger = Ledger(self._objects)
        new = sorted(ledger.done_units() - self._made.keys())
        made: dict[int, tuple[float, int] | None] = {}
        for unit, done in zip(
            new, mapped(ledger.read_done, new, self._objects.parallel), strict=True
        ):
            if done is not None:
                at = _moment(done.made_by.get("finished_at"))
                made[unit] = None if at is None else (at, done.tokens)
        return made


def _present_rate(samples: list[TotalsSeen]) -> float | None:
    """Tokens per second over the last minutes."""
    if len(samples) < 2:
        return None
    last = samples[-1]
    recent = [each for each in samples if last.clock - each.clock <= _WINDOW]
    first = recent[0] if len(recent) > 1 else samples[-2]
    seconds = last.clock - first.clock
    return (last.totals["tokens"] - first.totals["tokens"]) / seconds if seconds > 0 else None


def _cumulative(made: list[tuple[float, int]]) -> list[dict[str, int]]:
    """Tokens done by each time, in milliseconds as in browsers; some hundred points."""
    total = 0
    points: list[dict[str, int]] = []
    for at, tokens in made:
        total += tokens
        points.append({"at": round(at * 1000), "tokens": total})
    step = max(1, len(points) // _MOST_SAMPLES)
    return [*points[::step], *(points[-1:] if step > 1 else [])]


def _moment(value: object) -> float | None:
    """Seconds since the epoch, from a number or an ISO date."""
    if isinstance(value, int | float) and is_amount(value):
        return float(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, OverflowError):
            return datetime.fromisoformat(value).timestamp()
    return None

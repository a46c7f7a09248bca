"""A run's progress, speed and remaining time, from its counters. No jax."""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.prediction import Prediction, create_prediction, read_prediction
from spile.metrics import Counters
from spile.objects import Objects

if TYPE_CHECKING:
    from spile.plan.estimate import Estimate  # many commands show progress; few need a plan

_WINDOW = 10.0  # seconds for current rates: a step may take that long, and steps come in bursts
_NAMES = ("tokens", "device_idle", "device_busy")
# The first steps predict the rate: at least this many, over these seconds or this share of tokens.
_STEPS = 4
_SECONDS = 5.0
_SHARE = 0.1


@dataclass(frozen=True)
class MeterReading:
    """Progress so far. Counts are of this process; rates are tokens per second."""

    tokens: int
    documents: int
    units: int
    bytes: int  # handed to the writers
    durable: int  # bytes of complete files in their final place: on the disk or in the bucket
    rate: float | None  # current
    average: float | None  # since the first step
    idle: float | None  # current share of the time in which the device waits


class Meter:
    """Computes rates from repeated readings of the counters."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._started = time.time()
        self._seen: deque[tuple[float, ...]] = deque()
        self._first: tuple[float, float] | None = None  # when tokens were first seen, and how many

    def look(self) -> MeterReading:
        counters, now = self._counters, time.monotonic()
        found = (now, *(counters[name] for name in _NAMES))
        # Time before the first tokens (loading, compiling) does not count.
        if found[1]:
            self._first = self._first or (now, found[1])
            self._seen.append(found)
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW:
            self._seen.popleft()
        rate = idle = average = None
        if self._seen and now > self._seen[0][0]:
            seconds, tokens, waited, worked = (
                b - a for a, b in zip(self._seen[0], found, strict=True)
            )
            rate = tokens / seconds
            idle = waited / (waited + worked) if waited + worked else None
        if self._first and now > self._first[0]:
            average = (found[1] - self._first[1]) / (now - self._first[0])
        whole = ("tokens", "documents", "units", "bytes", "durable")
        return MeterReading(
            **{name: int(counters[name]) for name in whole}, rate=rate, average=average, idle=idle
        )

    def beat(self) -> dict[str, Any]:
        """The progress for a heartbeat; its times are this machine's: show them, never compare."""
        told = {name: value for name, value in asdict(self.look()).items() if value is not None}
        return {**told, "started": round(self._started, 3), "updated": round(time.time(), 3)}


@contextmanager
def reporting(
    presence: Presence, counters: Counters, cost: "Estimate", predicts_for: str | None
) -> Generator[None, None, None]:
    """Report a run's progress in its heartbeats.

    `predicts_for`: the device, in the process that makes the prediction; None in others.
    """
    meter = Meter(counters)
    forecast = Forecast(presence.objects, cost, counters, predicts_for) if predicts_for else None

    def progress() -> dict[str, Any]:
        if forecast:
            forecast.look()
        return meter.beat()

    presence.report(progress)
    presence.start()
    yield
    if forecast:
        forecast.close()


class Forecast:
    """A prediction of the run's cost, from its plan and its first steps.

    It is stored once, by the first process to make it.
    """

    def __init__(self, objects: Objects, cost: "Estimate", counters: Counters, device: str) -> None:
        self._objects, self._cost, self._counters, self._device = objects, cost, counters, device
        self._made = read_prediction(objects) is not None

    def look(self) -> None:
        """Make the prediction, once enough steps have been timed."""
        counters, rate = self._counters, self._counters.pace()
        if self._made or not rate or counters["steps"] < _STEPS:
            return
        seconds = counters["clocked"] / rate
        if seconds >= _SECONDS or counters["clocked"] >= _SHARE * self._cost.tokens:
            self._make(self._cost.tokens / rate)

    def close(self) -> None:
        """Make the prediction without a time, if the run ended before it could be timed."""
        if not self._made:
            self._make(None)

    def _make(self, seconds: float | None) -> None:
        self._made = True
        cost = self._cost
        create_prediction(
            self._objects,
            Prediction(cost.tokens, cost.rows, cost.total_bytes, seconds, self._device, cost.mesh),
        )

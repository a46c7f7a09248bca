"""How far a run is and how fast it goes, from its counters. No jax."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from spile.metrics import Counters

_WINDOW = 10.0  # seconds that count as now: steps may take that long, and come in bursts
_NAMES = ("tokens", "device_idle", "device_busy")


@dataclass(frozen=True)
class Reading:
    """Counts are of this process; rates are tokens a second."""

    tokens: int
    documents: int
    units: int
    bytes: int  # handed to the writers
    durable: int  # of files that are whole where they belong: on the disk, in the bucket
    rate: float | None  # now
    average: float | None  # since the first step
    idle: float | None  # share of the time, now, in which the device waited


class Meter:
    """Looks at the counters from time to time."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._started = time.time()
        self._seen: deque[tuple[float, ...]] = deque()
        self._first: tuple[float, float] | None = None  # when tokens were first seen, and how many

    def look(self) -> Reading:
        counters, now = self._counters, time.monotonic()
        found = (now, *(counters[name] for name in _NAMES))
        # The first tokens come after loading and compiling, of which they say nothing.
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
        return Reading(
            **{name: int(counters[name]) for name in whole}, rate=rate, average=average, idle=idle
        )

    def beat(self) -> dict[str, Any]:
        """What a sign of life says; its times are this machine's, to be shown and not compared."""
        told = {name: value for name, value in asdict(self.look()).items() if value is not None}
        return {**told, "started": round(self._started, 3), "updated": round(time.time(), 3)}

"""Counters and gauges of a run: updated by any stage, read by the reporter."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_MOST_SAMPLES = 4096


class Counters:
    """Named sums and gauges, safe to change from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()
        self._largest: dict[str, float] = {}
        self._samples: dict[str, deque[float]] = {}
        # Marks a stage in a profiler's trace, while there is one (`run/pipeline/profile.py`).
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount  # type: ignore[assignment]

    def set(self, **values: float) -> None:
        """Set gauges: the depth of a queue, memory in use."""
        with self._lock:
            for name, value in values.items():
                self._values[name] = value  # type: ignore[assignment]

    def met(self, **values: float) -> None:
        """Record values; only the largest of each name is kept, until it is taken."""
        with self._lock:
            for name, value in values.items():
                self._largest[name] = max(value, self._largest.get(name, value))

    def take_largest(self) -> dict[str, float]:
        """Return the largest values since the last call; it has one caller."""
        with self._lock:
            taken, self._largest = self._largest, {}
        return taken

    def sample(self, **values: float) -> None:
        """Record values; the last few thousand of each name are kept, until they are taken."""
        with self._lock:
            for name, value in values.items():
                self._samples.setdefault(name, deque(maxlen=_MOST_SAMPLES)).append(value)

    def take_samples(self) -> dict[str, list[float]]:
        """Return all values since the last call; it has one caller."""
        with self._lock:
            taken, self._samples = self._samples, {}
        return {name: [*values] for name, values in taken.items()}

    def snapshot(self) -> dict[str, float]:
        """Return all sums and gauges at one moment."""
        with self._lock:
            return dict(self._values)

    @contextmanager
    def timed(self, name: str) -> Generator[None, None, None]:
        """Add the seconds that pass inside the context."""
        begin = time.perf_counter()
        try:
            with self.annotate(name):
                yield
        finally:
            self.add(**{name: time.perf_counter() - begin})

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def pace(self) -> float | None:
        """Return tokens a second from the first step's end to the last's; None before two steps."""
        span = self["device_busy"] + self["device_idle"]
        return self["clocked"] / span if span and self["clocked"] else None

    def rates(self) -> dict[str, float | None]:
        """Return the rate of text preparation and how the device spent its time.

        `text_rate` is in tokens a second. The shares are fractions of the time from the first step
        to the last in which the device computed, or was idle for lack of text.
        """
        span = self["device_busy"] + self["device_idle"]
        spent = self["reading"] + self["preparing"]
        return {
            "text_rate": self["prepared"] / spent if spent else None,
            "device_seconds": span,
            "computed_share": self["device_busy"] / span if span else None,
            # (The feeding thread may wait for text while the device still has steps to compute.)
            "waited_for_text_share": min(self["device_idle"], self["waited_for_text"]) / span
            if span
            else None,
        }

"""Counters and gauges of a run: told by any stage, read by whoever reports."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_MOST_SAMPLES = 4096


class Counters:
    """Named sums, and values as they are now, safe to change from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()
        self._largest: dict[str, float] = {}
        self._samples: dict[str, deque[float]] = {}
        # What shows a stage in a profiler's trace, while there is one (`run/profile.py`).
        self.annotate: Callable[[str], AbstractContextManager[object]] = nullcontext

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount  # type: ignore[assignment]

    def set(self, **values: float) -> None:
        """What is so now: the depth of a queue, memory in use."""
        with self._lock:
            for name, value in values.items():
                self._values[name] = value  # type: ignore[assignment]

    def met(self, **values: float) -> None:
        """Of these only the largest is kept, until it is taken."""
        with self._lock:
            for name, value in values.items():
                self._largest[name] = max(value, self._largest.get(name, value))

    def take_largest(self) -> dict[str, float]:
        """The largest values since this was last called; it has one caller."""
        with self._lock:
            taken, self._largest = self._largest, {}
        return taken

    def sample(self, **values: float) -> None:
        """Of these every value is kept, the last few thousand, until they are taken."""
        with self._lock:
            for name, value in values.items():
                self._samples.setdefault(name, deque(maxlen=_MOST_SAMPLES)).append(value)

    def take_samples(self) -> dict[str, list[float]]:
        """All values since this was last called; it has one caller."""
        with self._lock:
            taken, self._samples = self._samples, {}
        return {name: [*values] for name, values in taken.items()}

    def snapshot(self) -> dict[str, float]:
        """All sums and values, of one moment."""
        with self._lock:
            return dict(self._values)

    @contextmanager
    def timed(self, name: str) -> Generator[None, None, None]:
        """Adds the seconds that pass inside."""
        begin = time.perf_counter()
        try:
            with self.annotate(name):
                yield
        finally:
            self.add(**{name: time.perf_counter() - begin})

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def pace(self) -> float | None:
        """Tokens a second, from the first step's end to the last's; None before there are two."""
        span = self["device_busy"] + self["device_idle"]
        return self["clocked"] / span if span and self["clocked"] else None

    def rates(self) -> dict[str, float | None]:
        """How fast text was made ready, tokens a second; and of the time from the first step to the
        last, the shares in which the device computed, and stood idle for want of text."""
        span = self["device_busy"] + self["device_idle"]
        spent = self["reading"] + self["preparing"]
        return {
            "text_rate": self["prepared"] / spent if spent else None,
            "device_seconds": span,
            "computed_share": self["device_busy"] / span if span else None,
            # (Whoever feeds the device may wait for text while it has steps to compute still.)
            "waited_for_text_share": min(self["device_idle"], self["waited_for_text"]) / span
            if span
            else None,
        }

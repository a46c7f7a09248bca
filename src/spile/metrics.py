"""Counters of a run: added to by any stage, read by whoever reports."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Counters:
    """Named sums, safe to add to from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount  # type: ignore[assignment]

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that pass inside."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - begin})

    def __getitem__(self, name: str) -> float:
        return self._values[name]

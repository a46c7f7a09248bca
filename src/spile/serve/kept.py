"""What takes a while: made in the background, kept, and made anew when it is out of date."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_MOST = 64

_log = logging.getLogger("spile")


@dataclass
class _Entry:
    version: Hashable = None  # of `value`
    value: Any = None
    error: str | None = None
    making: bool = False


class Kept:
    """Values by key; one is made at a time."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "making")

    def ask(self, key: Hashable, version: Hashable, make: Callable[[], Any]) -> dict[str, Any]:
        """What there is now: the value, maybe of an older version, and whether one is being made.

        A version that could not be made is not tried again: its error is given.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if entry.version != version and not entry.making:
                entry.making = True
                self._pool.submit(self._make, entry, version, make)
            while len(self._entries) > _MOST:
                self._entries.popitem(last=False)
            return {"value": entry.value, "making": entry.making, "error": entry.error}

    def _make(self, entry: _Entry, version: Hashable, make: Callable[[], Any]) -> None:
        value, error = entry.value, None
        try:
            value = make()
        except Exception as failure:
            _log.exception("making what was asked for")
            error = str(failure) or type(failure).__name__
        with self._lock:
            entry.version, entry.value, entry.error = version, value, error
            entry.making = False

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Bounded:
    """Values by key, made by whoever asks first; what was used longest ago makes room."""

    def __init__(self, most: int) -> None:
        """`most`: of their sizes, together."""
        self._most, self._held = most, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
        """`make` gives the value and its size."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = (value, size)
                self._held += size
            while self._held > self._most and len(self._values) > 1:
                self._held -= self._values.popitem(last=False)[1][1]
        return value

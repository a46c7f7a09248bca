"""SIGINT and SIGTERM, as a run takes them."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ECHO_SECONDS = 1.0  # within which a signal is the same one again


@contextmanager
def stop_on_signal(stop: threading.Event) -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask the run to stop; a second one no longer waits for units in hand.

    (Not one that comes at once: a launcher may signal this process and its parent, which passes
    it on.)

    They set a flag and raise nothing: an exception raised by a handler may land in a callback
    of some library, which swallows it.
    """
    previous: dict[int, Any] = {}
    first: dict[int, float] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        if time.monotonic() - first.setdefault(number, time.monotonic()) < _ECHO_SECONDS:
            return
        last = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, last)
        signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        previous = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

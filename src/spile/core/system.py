"""What the protocol asks of the machine: time, pauses, chance and threads.

Whatever takes part in a commit (requests and their retries, the ledger, heartbeats, the picker, the
stages of a run) asks here, and for nothing else of this kind. So a simulator can put its own
`System` in place and run the shipped code in simulated time, with every interleaving drawn from a
seed (`tests/simulator`).
"""

import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class System:
    """The machine itself."""

    def time(self) -> float:
        """Seconds since 1970, for people alone: no two clocks are ever compared."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def uniform(self, low: float, high: float) -> float:
        """A number drawn from low..high."""
        return random.uniform(low, high)

    def token(self, size: int) -> str:
        """A name that nobody else has: so many random bytes, in hexadecimal digits."""
        return secrets.token_hex(size)

    def lock(self) -> AbstractContextManager[Any]:
        return threading.Lock()

    def event(self) -> threading.Event:
        return threading.Event()

    def semaphore(self, count: int) -> threading.Semaphore:
        return threading.Semaphore(count)

    def queue(self, depth: int) -> "queue.Queue[Any]":
        """A queue that holds at most so many items."""
        return queue.Queue(depth)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A thread that is not started yet, and does not keep the process alive."""
        return threading.Thread(target=target, name=name, daemon=True)

    def pool(self, threads: int, name: str = "") -> ThreadPoolExecutor:
        return ThreadPoolExecutor(threads, name)


_used = [System()]


def system() -> System:
    """The system in use."""
    return _used[-1]


@contextmanager
def using(other: System) -> Generator[None, None, None]:
    """Put another system in place, for everything in this process."""
    _used.append(other)
    try:
        yield
    finally:
        _used.remove(other)

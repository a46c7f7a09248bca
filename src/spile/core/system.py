"""The machine as the commit protocol uses it: time, pauses, random numbers and threads.

Everything that takes part in a commit (requests and their retries, the ledger, heartbeats, the
picker, the stages of a run) gets these from here only. A simulator can therefore install its own
`System` and run the shipped code in simulated time, with every interleaving drawn from a seed
(`tests/simulator`).
"""

import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any


class System:
    """The real machine."""

    def time(self) -> float:
        """Return seconds since 1970, for display only: two machines' clocks are never compared."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def uniform(self, low: float, high: float) -> float:
        """Return a random number from low..high."""
        return random.uniform(low, high)

    def token(self, size: int) -> str:
        """Return a unique name: `size` random bytes in hexadecimal."""
        return secrets.token_hex(size)

    def lock(self) -> AbstractContextManager[Any]:
        return threading.Lock()

    def event(self) -> threading.Event:
        return threading.Event()

    def semaphore(self, count: int) -> threading.Semaphore:
        return threading.Semaphore(count)

    def queue(self, depth: int) -> "queue.Queue[Any]":
        """Return a queue that holds at most `depth` items."""
        return queue.Queue(depth)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread, not yet started."""
        return threading.Thread(target=target, name=name, daemon=True)

    def pool(self, threads: int, name: str = "") -> ThreadPoolExecutor:
        return ThreadPoolExecutor(threads, name)


_used = [System()]


def system() -> System:
    """Return the system in use."""
    return _used[-1]


@contextmanager
def using(other: System) -> Generator[None, None, None]:
    """Use another system for everything in this process."""
    _used.append(other)
    try:
        yield
    finally:
        _used.remove(other)


def available_memory() -> int | None:
    """Return the bytes of memory that this machine has available; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    known = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(known[0]) if known else None

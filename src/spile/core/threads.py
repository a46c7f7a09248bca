"""Overlapping stages (threads joined by bounded queues), and the flags that stop their work.

A stage that fails stops the run with its own error; a stage whose consumer has gone stops by
itself. Nothing waits forever: every blocking call wakes regularly to check the stop flag.

Slow work anywhere below calls `cancellation().check()` now and then. Which flags that looks at
depends on the caller (`cancelled_by`), so two runs in one process do not stop each other. A
`Producer`'s thread inherits the flags of the thread that made it; an object that works in other
threads keeps the cancellation of the thread that made it.
"""

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

from spile.core.errors import Interrupted
from spile.core.system import system

T = TypeVar("T")
R = TypeVar("R")
OnProgress = Callable[[int, int], None]  # called with the number of things done, and of all

_POLL = 0.1  # seconds between checks of the stop flag while blocked


@dataclass(frozen=True)
class Cancellation:
    """Tells work whether to stop: it should once any of the flags is set."""

    flags: tuple[threading.Event, ...] = ()

    def is_set(self) -> bool:
        return any(flag.is_set() for flag in self.flags)

    def check(self) -> None:
        """Raise `Interrupted` if the work should stop."""
        if self.is_set():
            raise Interrupted


NEVER = Cancellation()
_cancellation: ContextVar[Cancellation] = ContextVar("cancellation", default=NEVER)


def cancellation() -> Cancellation:
    """Return the cancellation of the work that this thread does; without flags, by default."""
    return _cancellation.get()


@contextlib.contextmanager
def cancelled_by(*flags: threading.Event) -> Generator[None, None, None]:
    """Let these flags, too, stop what this thread does inside the `with` block."""
    token = _cancellation.set(Cancellation((*cancellation().flags, *flags)))
    try:
        yield
    finally:
        _cancellation.reset(token)


class Stopped(Exception):
    """Raised inside a stage whose consumer has gone; never leaves this module's users."""


def mapped(
    function: Callable[[T], R], items: Iterable[T], threads: int, *, ahead: int | None = None
) -> Iterator[R]:
    """Yield `function(item)` for each item, in order, computed by threads a few items ahead.

    Args:
        ahead: how many items may be started before the next one is yielded; by default, the
            number of threads. A larger number keeps all threads busy while one item takes long.
    """
    most = threads if ahead is None else ahead
    rest = iter(items)
    first = list(itertools.islice(rest, 2))
    if len(first) < 2:  # not worth a thread
        yield from map(function, first)
        return
    pool = system().pool(threads)
    begun: deque[Future[R]] = deque()
    try:
        for item in itertools.chain(first, rest):
            begun.append(pool.submit(function, item))
            if len(begun) > most:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Producer(Generic[T]):
    """Runs a generator in a thread, at most `depth` items ahead of the consumer.

    The generator's exception is raised in the consumer, after the items made before it. `close`
    cancels the generator's work.
    """

    def __init__(self, source: Generator[T, None, None], depth: int, name: str) -> None:
        self._queue: queue.Queue[tuple[T] | BaseException | None] = system().queue(depth)
        self._stop = system().event()
        flags = (*cancellation().flags, self._stop)
        self._thread = system().thread(lambda: self._run(source, flags), name)
        self._thread.start()

    def _run(self, source: Generator[T, None, None], flags: tuple[threading.Event, ...]) -> None:
        try:
            with cancelled_by(*flags), contextlib.closing(source):
                for item in source:
                    self._put((item,))
            self._put(None)
        except Stopped:
            pass
        except BaseException as error:
            self._put_last(error)

    def _put(self, item: tuple[T] | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=_POLL)
            except queue.Full:
                continue
        raise Stopped

    def _put_last(self, error: BaseException) -> None:
        # A consumer that has gone reports its own error.
        with contextlib.suppress(Stopped):
            self._put(error)

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                item = self._queue.get(timeout=_POLL)
            except queue.Empty:
                if self._thread.is_alive() or self._queue.qsize():
                    continue
                return
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item[0]

    @property
    def waiting(self) -> int:
        """The number of items that were produced but not yet taken."""
        return self._queue.qsize()

    def close(self) -> None:
        """Stop the thread and drop the items not yet taken."""
        self._stop.set()
        self._thread.join()


class Consumer(Generic[T]):
    """Feeds items to `handle` in a thread, in order; `put` blocks when `depth` are waiting.

    After `handle` fails, every later `put` and the final `close` raise its error.
    """

    def __init__(self, handle: Callable[[T], None], depth: int, name: str) -> None:
        self._handle = handle
        self._queue: queue.Queue[tuple[T] | None] = system().queue(depth)
        self._error: BaseException | None = None
        self._abandoned = system().event()
        self._ending = False
        self._thread = system().thread(self._run, name)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is None and not self._abandoned.is_set():
                try:
                    self._handle(item[0])
                except BaseException as error:
                    self._error = error

    def put(self, item: T) -> None:
        self.check()
        self._queue.put((item,))

    @property
    def waiting(self) -> int:
        """The number of items that were put but not yet taken."""
        return self._queue.qsize()

    def check(self) -> None:
        """Raise the handler's error, if it has failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Handle the waiting items, end the thread, and raise the handler's error if it failed."""
        self._end()
        self.check()

    def abandon(self) -> None:
        """Drop the waiting items and end the thread; for use when another error is being raised."""
        self._abandoned.set()
        self._end()

    def _end(self) -> None:
        if not self._ending:
            self._queue.put(None)
            # Set afterwards, so that an interrupted put is retried; a second None is harmless.
            self._ending = True
        self._thread.join()

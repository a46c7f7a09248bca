"""Simulated time: tasks of which one runs at a time, in an order that a seed draws.

A task is a greenlet: it runs until it waits for something, and then the next event is taken from
one heap, where time passes. What the shipped code asks of the machine (`spile.core.system`) is
answered here, so that its threads are tasks and its pauses cost nothing. Nothing is taken from the
real clock, from real chance or from real threads: the same seed gives the same run.

Each step costs a heap operation, whatever the number of tasks.
"""

import heapq
import random
import sys
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import Empty, Full
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from spile.core.system import System

_EPOCH = 1_700_000_000.0


class Task:
    """Something that runs, and waits."""

    def __init__(self, scheduler: "Scheduler", process: "Process", run: Callable[[], None]) -> None:
        self.process, self._scheduler, self._run = process, scheduler, run
        self.ticket = 0  # of what it waits for: what woke it before is void
        self.thrown: BaseException | None = None
        self.ended = False
        self.waiting: list[Task] = []  # for its end
        self.greenlet = greenlet(self._begin, scheduler.hub)

    def _begin(self, *_: object) -> None:
        try:
            self._run()
        except GreenletExit:
            pass
        except BaseException as error:
            self._scheduler.failed(self.process, error)
        finally:
            self.ended = True
            self._scheduler.unended.pop(self, None)
            for task in self.waiting:
                self._scheduler.wake(task)

    def resume(self, ticket: int, woken: bool) -> None:
        if self.ended or ticket != self.ticket or not self.process.alive:
            return
        if self.process.paused_until > self._scheduler.now:
            pause = self.process.paused_until - self._scheduler.now
            self._scheduler.at(pause, partial(self.resume, ticket, woken))
            return
        self.ticket += 1
        self._scheduler.task = self
        self.greenlet.switch(woken)


class Process:
    """Tasks that live and die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        self.main: Task | None = None


class Scheduler(System):
    """A machine whose time passes from event to event."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.steps = 0.0, 0
        self.hub = getcurrent()
        self.task: Task | None = None
        self.unended: dict[Task, None] = {}
        self.errors: list[tuple[str, BaseException]] = []
        self._events: list[tuple[float, float, int, Callable[[], object]]] = []
        self._count = 0
        self.over = False

    # -- events ------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], object]) -> None:
        """Let something happen; what happens at the same time does so in a drawn order."""
        self._count += 1
        event = (self.now + delay, self.random.random(), self._count, action)
        heapq.heappush(self._events, event)

    def run(self, until: float = float("inf")) -> None:
        """Let everything happen that is to, up to a time."""
        while self._events and self._events[0][0] <= until and not self.errors:
            when, _, _, action = heapq.heappop(self._events)
            self.now = max(self.now, when)
            self.steps += 1
            action()
        if self.errors:
            name, error = self.errors[0]
            error.add_note(f"in {name}, at {self.now:.3f} s")
            raise error

    def spawn(self, process: Process, run: Callable[[], None]) -> Task:
        task = Task(self, process, run)
        self.unended[task] = None
        self.at(0.0, partial(task.resume, task.ticket, True))
        return task

    def start(self, name: str, run: Callable[[], None]) -> Process:
        process = Process(name)
        process.main = self.spawn(process, run)
        return process

    def failed(self, process: Process, error: BaseException) -> None:
        """What nobody caught ends the simulation."""
        self.errors.append((process.name, error))

    def interrupt(self, process: Process, error: BaseException) -> None:
        """Raise something in a process, wherever it waits: as a signal's handler does."""
        task = process.main
        if task and not task.ended:
            task.thrown = error
            self.at(0.0, partial(task.resume, task.ticket, True))

    def close(self) -> None:
        """Unwind what was killed or never ended; nothing it does then has any effect."""
        self.over = True
        with _unraised():
            for task in list(self.unended):
                for _ in range(100):
                    if task.greenlet.dead or not task.greenlet:
                        break
                    self.task = task
                    task.greenlet.throw(GreenletExit)
                self.unended.pop(task, None)

    # -- waiting -----------------------------------------------------------------------------

    def block(self, timeout: float | None = None) -> bool:
        """Wait until woken (True), or for so long (False)."""
        if self.over:
            raise GreenletExit
        task = self.task
        assert task is not None
        assert getcurrent() is task.greenlet, "only what is simulated can wait"
        task.ticket += 1
        if timeout is not None:
            self.at(timeout, partial(task.resume, task.ticket, False))
        woken = self.hub.switch()
        if task.thrown is not None:
            error, task.thrown = task.thrown, None
            raise error
        return bool(woken)

    def wake(self, task: Task) -> None:
        self.at(0.0, partial(task.resume, task.ticket, True))

    def wait_for(self, ready: Callable[[], bool], line: list[Task], timeout: float | None) -> bool:
        """Wait in a line until something holds; whoever changes it wakes the line."""
        limit = None if timeout is None else self.now + timeout
        while not ready():
            left = None if limit is None else limit - self.now
            if left is not None and left <= 0:
                return False
            task = self.task
            assert task is not None
            line.append(task)
            try:
                self.block(left)
            finally:
                if task in line:
                    line.remove(task)
        return True

    def wake_all(self, line: list[Task]) -> None:
        for task in line:
            self.wake(task)
        line.clear()

    # -- System ------------------------------------------------------------------------------

    def time(self) -> float:
        return _EPOCH + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.block(seconds)

    def uniform(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def token(self, size: int) -> str:
        return self.random.randbytes(size).hex()

    def lock(self) -> Any:
        return _Semaphore(self, 1)

    def event(self) -> Any:
        return _Event(self)

    def semaphore(self, count: int) -> Any:
        return _Semaphore(self, count)

    def queue(self, depth: int) -> Any:
        return _Queue(self, depth)

    def thread(self, target: Callable[[], None], name: str) -> Any:
        return _Thread(self, target, name)

    def pool(self, threads: int, name: str = "") -> Any:
        return _Pool(self, threads)


@contextmanager
def _unraised() -> Generator[None, None, None]:
    """Let a greenlet end where nothing can be raised: in a generator that nobody holds any more."""
    hook = sys.unraisablehook

    def ended(told: Any) -> None:
        if told.exc_type is not GreenletExit:
            hook(told)

    sys.unraisablehook = ended
    try:
        yield
    finally:
        sys.unraisablehook = hook


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set, self._line = scheduler, False, list[Task]()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._scheduler.wake_all(self._line)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait_for(self.is_set, self._line, timeout)


class _Semaphore:
    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self._scheduler, self._count, self._line = scheduler, count, list[Task]()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        timeout = timeout if blocking else 0.0
        if not self._scheduler.wait_for(lambda: self._count > 0, self._line, timeout):
            return False
        self._count -= 1
        return True

    def release(self) -> None:
        self._count += 1
        self._scheduler.wake_all(self._line)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Queue:
    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self._scheduler, self._depth = scheduler, depth
        self._items, self._line = deque[Any](), list[Task]()

    def qsize(self) -> int:
        return len(self._items)

    def put(self, item: Any, timeout: float | None = None) -> None:
        def room() -> bool:
            return self._depth <= 0 or len(self._items) < self._depth

        if not self._scheduler.wait_for(room, self._line, timeout):
            raise Full
        self._items.append(item)
        self._scheduler.wake_all(self._line)

    def get(self, timeout: float | None = None) -> Any:
        if not self._scheduler.wait_for(lambda: bool(self._items), self._line, timeout):
            raise Empty
        self._scheduler.wake_all(self._line)
        return self._items.popleft()


class _Thread:
    def __init__(self, scheduler: Scheduler, target: Callable[[], None], name: str) -> None:
        self._scheduler, self._target, self.name = scheduler, target, name
        self._task: Task | None = None

    def start(self) -> None:
        assert self._scheduler.task
        self._task = self._scheduler.spawn(self._scheduler.task.process, self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task:
            self._scheduler.wait_for(lambda: task.ended, task.waiting, timeout)


class _Future(Future[Any]):
    """Whose result is waited for in simulated time."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler, self._line = scheduler, list[Task]()
        self.add_done_callback(lambda _: scheduler.wake_all(self._line))

    def result(self, timeout: float | None = None) -> Any:
        self._scheduler.wait_for(self.done, self._line, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._scheduler.wait_for(self.done, self._line, timeout)
        return super().exception(0)


class _Pool:
    def __init__(self, scheduler: Scheduler, threads: int) -> None:
        self._scheduler, self._threads = scheduler, threads
        self._waiting, self._running = deque[tuple[_Future, Callable[[], Any]]](), 0
        self._line: list[Task] = []

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _Future:
        future = _Future(self._scheduler)
        self._waiting.append((future, partial(function, *arguments)))
        if self._running < self._threads:
            self._running += 1
            assert self._scheduler.task
            self._scheduler.spawn(self._scheduler.task.process, self._work)
        return future

    def _work(self) -> None:
        try:
            while self._waiting:
                future, call = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    found = call()
                except GreenletExit:
                    raise
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(found)
        finally:
            self._running -= 1
            self._scheduler.wake_all(self._line)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and self._waiting:
            future, _ = self._waiting.popleft()
            future.cancel()
            future.set_running_or_notify_cancel()
        if wait and not self._scheduler.over:  # (then whoever is left does not wait)
            self._scheduler.wait_for(lambda: not self._running, self._line, None)

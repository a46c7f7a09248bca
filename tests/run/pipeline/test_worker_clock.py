"""All time is counted once, as the device's or as lost."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import pytest

from spile.metrics import Counters
from spile.run.pipeline import worker as pipeline
from spile.run.pipeline.worker import DeviceClock
from spile.run.step.output import StepOutput

TOKENS = 12
PAUSE = 0.25


Start = Callable[[], StepOutput]


@pytest.fixture(scope="module")
def start() -> Start:
    """A step that takes the device some hundredths of a second."""
    matrix = jnp.eye(256, dtype=jnp.float32)

    def work(matrix: jax.Array, products: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, products, lambda _, found: found @ matrix, matrix).sum()

    compiled = jax.jit(work).lower(matrix, jnp.int32(1)).compile()

    def start() -> StepOutput:
        begin = time.perf_counter()
        return StepOutput(TOKENS, (), begin, compiled(matrix, jnp.int32(60)))

    start().finished.block_until_ready()
    return start


class Held:
    """The end of a step, which comes only when a test releases it."""

    def __init__(self, step: StepOutput) -> None:
        self._finished, self._gone = step.finished, threading.Event()
        seen = SimpleNamespace(started=step.started, finished=self, tokens=step.tokens)
        self.step = cast(StepOutput, seen)  # (its own fields are checked to be arrays)

    def let_go(self) -> None:
        self._gone.set()

    def block_until_ready(self) -> None:
        assert self._gone.wait(60)
        self._finished.block_until_ready()


@dataclasses.dataclass
class Watched:
    clock: DeviceClock
    counters: Counters
    finished: list[float]  # when the clock saw each step finish

    def wait(self, steps: int) -> None:
        self.reach(steps)
        self.clock.close()  # values that are counted after the tokens are counted now

    def reach(self, steps: int) -> None:
        deadline = time.monotonic() + 30
        while self.counters["computed"] < steps * TOKENS:
            assert time.monotonic() < deadline
            time.sleep(0.002)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    finished: list[float] = []

    def now() -> float:
        found = time.perf_counter()
        if threading.current_thread().name == "device-clock":
            finished.append(found)
        return found

    monkeypatch.setattr(pipeline, "time", SimpleNamespace(perf_counter=now))
    counters = Counters()
    device = DeviceClock(counters, 8)
    try:
        yield Watched(device, counters, finished)
    finally:
        device.close()


def test_busy_and_idle_time_add_up_to_the_time_between_finishes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as seen:
        for number in range(6):
            seen.clock.started(start())
            if number in (1, 4):
                seen.reach(number + 1)
                time.sleep(PAUSE)
        seen.wait(6)
    busy, idle = seen.counters["device_busy"], seen.counters["device_idle"]
    assert len(seen.finished) == 6
    assert busy + idle == pytest.approx(seen.finished[-1] - seen.finished[0], abs=1e-9)
    assert busy > 0 and idle > 0
    assert seen.counters["computed"] == 6 * TOKENS, "the first one's, too"


def test_a_pause_between_steps_is_idle(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []
    with watched(monkeypatch) as seen:
        for number in range(3):
            step = start()
            began.append(step.started)
            seen.clock.started(step)
            seen.reach(number + 1)
            time.sleep(PAUSE)
        seen.wait(3)
    pauses = [begin - end for begin, end in zip(began[1:], seen.finished, strict=False)]
    assert min(pauses) >= PAUSE
    assert seen.counters["device_idle"] == pytest.approx(sum(pauses), abs=1e-9), (
        "not the one after the last"
    )
    steps = [end - begin for begin, end in zip(began[1:], seen.finished[1:], strict=True)]
    assert seen.counters["device_busy"] == pytest.approx(sum(steps), abs=1e-9), "but the first"


def test_steps_started_ahead_leave_nothing_idle(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as seen:
        first = Held(start())
        seen.clock.started(first.step)
        for _ in range(4):
            seen.clock.started(start())
        first.let_go()
        seen.wait(5)
    assert seen.counters["device_idle"] == 0
    busy = seen.counters["device_busy"]
    assert busy == pytest.approx(seen.finished[-1] - seen.finished[0], abs=1e-9)
    assert busy > 0


def test_a_steps_time_starts_when_the_device_got_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as seen:
        first, second = Held(start()), start()
        seen.clock.started(first.step)
        first.let_go()
        second.finished.block_until_ready()
        time.sleep(PAUSE)
        seen.clock.started(second)
        seen.wait(2)
    assert seen.counters["device_idle"] == 0


def test_a_single_step_only_starts_the_clock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen:
        time.sleep(0.05)
        seen.clock.started(start())
        seen.wait(1)
    found = {name: seen.counters[name] for name in ("device_busy", "device_idle", "computed")}
    assert found == {"device_busy": 0, "device_idle": 0, "computed": TOKENS}

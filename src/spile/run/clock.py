"""How long the device worked and how long it waited, seen from the host."""

import time

import jax

from spile.core.threads import Consumer
from spile.metrics import Counters
from spile.run.step import StepOutput


class DeviceClock:
    """Adds to the counters `device_busy` and `device_idle`, in seconds, and `computed`, in tokens;
    `clocked` are those of them that were computed in that time.

    A step runs from when it was started, or the one before it finished, to when it finishes. The
    first one, before which there is nothing to wait for, only starts the clock.
    """

    def __init__(self, counters: Counters, depth: int) -> None:
        self._counters = counters
        self._last: float | None = None
        self._watcher: Consumer[tuple[float, jax.Array, int]] = Consumer(
            self._watch, depth, "device-clock"
        )

    def started(self, step: StepOutput) -> None:
        """A step was started."""
        self._watcher.put((step.started, step.finished, step.tokens))

    @property
    def waiting(self) -> int:
        """Steps that were started and not seen to finish."""
        return self._watcher.waiting

    def _watch(self, started: tuple[float, jax.Array, int]) -> None:
        begin, finished, tokens = started
        finished.block_until_ready()
        end = time.perf_counter()
        self._counters.add(computed=tokens)
        if self._last is not None:
            idle = max(0.0, begin - self._last)
            self._counters.add(
                device_idle=idle, device_busy=end - self._last - idle, clocked=tokens, steps=1
            )
        self._last = end

    def close(self) -> None:
        self._watcher.abandon()

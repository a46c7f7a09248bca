"""One process at work: read-tokenize-pack, the device, and encode-hash-write, overlapped.

Units flow through three stages joined by bounded queues: while one computes, the next is read and
packed and the previous one's shards become durable. A picker chooses the next unit (`pickers.py`);
if two workers do the same one, the first commit wins and the other's files are removed.
In a world of several processes the leader takes units, and all of them do each one together.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import jax

from spile.core.errors import Interrupted
from spile.core.system import system
from spile.core.threads import Consumer, Producer, cancellation
from spile.core.units import Unit
from spile.corpus.chats.pool import processes_for
from spile.corpus.pack import Batch, PackedUnit
from spile.metrics import Counters
from spile.plan.job import ExtractionJob, PreparedUnit, prepare_unit
from spile.run.pipeline.nonfinite import NonfiniteError
from spile.run.pipeline.overflow import find_overflow
from spile.run.pipeline.pickers import Picker
from spile.run.pipeline.sink import Sink, Taker
from spile.run.step.output import StepOutput
from spile.run.step.step import Step
from spile.run.world.devices import local_devices
from spile.run.world.world import RunContext

_log = logging.getLogger("spile.run")
_POLL_SECONDS = 0.5
_LOOK_SECONDS = 0.1  # between checks of the stop flag, while a step runs
# The unit that computes and the next one. Holding more would only keep them from other workers.
_UNITS_HELD = 2


class DeviceClock:
    """Times a device's steps: adds to the counters `device_busy` and `device_idle`, in seconds, and
    `computed`, in tokens; `clocked` counts the tokens computed in that time.

    A step runs from when it was started, or the one before it finished, to when it finishes. The
    first step has none before it, and only starts the clock.
    """

    def __init__(self, counters: Counters, depth: int) -> None:
        self._counters = counters
        self._last: float | None = None
        self._lock, self._running = system().lock(), 0
        self._idle = system().event()
        self._idle.set()
        self._watcher: Consumer[tuple[float, jax.Array, int]] = Consumer(
            self._watch, depth, "device-clock"
        )

    def started(self, step: StepOutput) -> None:
        """Record that a step was started."""
        with self._lock:
            self._running += 1
            self._idle.clear()
        self._watcher.put((step.started, step.finished, step.tokens))

    def is_idle(self, seconds: float) -> bool:
        """Wait up to `seconds` for every step to finish; return whether all have."""
        return self._idle.wait(seconds)

    @property
    def waiting(self) -> int:
        """Number of steps that were started and not yet seen to finish."""
        return self._watcher.waiting

    def _watch(self, started: tuple[float, jax.Array, int]) -> None:
        begin, finished, tokens = started
        try:
            finished.block_until_ready()
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._idle.set()
        end = time.perf_counter()
        self._counters.add(computed=tokens)
        if self._last is not None:
            idle = max(0.0, begin - self._last)
            busy = end - self._last - idle
            self._counters.add(device_idle=idle, device_busy=busy, clocked=tokens, steps=1)
            self._counters.sample(step_seconds=busy)
        self._last = end

    def close(self) -> None:
        self._watcher.abandon()


class Worker:
    """Does units until all are done or it is told to stop."""

    def __init__(
        self,
        context: RunContext,
        job: ExtractionJob,
        step: Step,
        batches: Callable[[PackedUnit], Iterator[Batch]],
        picker: Picker,
        *,
        made_by: Mapping[str, Any] | None = None,
        sink: Taker | None = None,
    ) -> None:
        """Args:
        batches: cuts a packed unit into steps.
        made_by: provenance, kept in the record of every unit that is done.
        sink: takes the rows, instead of the store.
        """
        self._context, self._job, self._step = context, job, step
        self._batches, self._picker = batches, picker
        self._made_by, self._sink = made_by or {}, sink
        self._runtime, self._world = context.runtime, context.world
        self._counters = context.counters
        self._room = system().semaphore(_UNITS_HELD)
        self._since: float | None = None  # when the last unit was computed
        self._queues = jax.default_backend() != "cpu"  # whether steps queue on the device

    def run(self) -> None:
        """Work until there is nothing left to pick.

        Raises:
            Interrupted: if told to stop first; units fully computed are committed, the one in
                hand is abandoned.
        """
        self._context.presence.tell(state="running")
        sink = self._sink or Sink(self._context, self._job, self._made_by, self._picker.done)
        feed = Producer(self._prepare(sink), 1, "read-tokenize-pack")
        clock = DeviceClock(self._counters, self._runtime.queue_depth)
        try:
            for prepared in self._timed(feed):
                self._compute(prepared, sink, clock, feed)
                if cancellation().is_set():
                    break
                self._room.release()
            sink.close()  # commits fully computed units
            self._counters.set(queue_text=0, queue_device=0, queue_write=0, queue_commit=0)
            cancellation().check()
        except Exception as error:
            try:
                sink.close()
            except Exception as second:
                if second is not error:
                    _log.error("and while ending: %s", second)
            if isinstance(error, NonfiniteError) and self._world.processes == 1:
                raise error.traced(
                    self._step,
                    self._batches(error.found.prepared.packed),
                    partial(find_overflow, self._job, device=local_devices()[0]),
                ) from error
            raise
        except BaseException:
            sink.abandon()
            raise
        finally:
            feed.close()
            clock.close()

    def _timed(self, feed: Producer[PreparedUnit]) -> Iterator[PreparedUnit]:
        units = iter(feed)
        waiting = "waited_at_first"  # nothing computes yet while it waits
        while True:
            with self._counters.timed(waiting):
                prepared = next(units, None)
            if prepared is None:
                return
            waiting = "waited_for_text"
            yield prepared

    def _compute(
        self, prepared: PreparedUnit, sink: Taker, clock: DeviceClock, feed: Producer[PreparedUnit]
    ) -> None:
        if self._since is None:
            with self._counters.timed("waited_for_model"):
                while not self._step.loaded(_LOOK_SECONDS):
                    cancellation().check()
        began, tokens = self._since or system().monotonic(), 0
        sink.begin(prepared)
        for batch in self._batches(prepared.packed):
            output = self._step_of(batch) if self._may_step(clock) else None
            if output is None:
                _log.info(
                    "stopping: finishing the step in hand; %s tokens of an unfinished unit will be "
                    "redone",
                    f"{tokens:,}",
                )
                return
            tokens += output.tokens
            self._counters.add(stepped=output.tokens, positions=batch.tokens.size)
            clock.started(output)
            with self._counters.timed("waited_for_writing"):
                sink.put(output)
            to_write, to_commit = sink.waiting
            self._counters.set(
                queue_text=feed.waiting,
                queue_device=clock.waiting,
                queue_write=to_write,
                queue_commit=to_commit,
            )
        self._step.check()  # (of some units no token is kept, and no step was run)
        self._since = system().monotonic()
        sink.end(self._since - began)

    def _step_of(self, batch: Batch) -> StepOutput | None:
        """Start a step; None if it was told to stop inside a long one."""
        try:
            return self._step(batch)
        except Interrupted:
            return None

    def _may_step(self, clock: DeviceClock) -> bool:
        """Whether to start another step; False once the run should stop.

        A queued step cannot be taken back. An accelerator needs some queued to stay busy. A CPU
        starts the next step at once, and its steps are long, so each one is waited for.
        """
        while not cancellation().is_set():
            if self._queues or clock.is_idle(_LOOK_SECONDS):
                return True
        return False

    # -- first stage: text to packed units ---------------------------------------------------

    def _prepare(self, sink: Taker) -> Generator[PreparedUnit, None, None]:
        processes = processes_for(self._runtime.render_processes)
        with closing(self._job.reader(processes)) as reader:
            for unit, attempt in self._world.units(self._units(sink), self._job.units):
                prepared = prepare_unit(
                    self._job,
                    reader,
                    unit,
                    attempt,
                    with_table=self._world.leads,
                    timed=self._counters.timed,
                )
                self._counters.add(prepared=prepared.packed.num_tokens)
                with self._counters.timed("compiling"):
                    for batch in self._batches(prepared.packed):
                        self._step.compile(batch)  # while the unit before it computes
                yield prepared

    def _units(self, sink: Taker) -> Iterator[Unit]:
        """Units to do, as long as the picker has any."""
        while not cancellation().is_set():
            sink.check()  # a failed writer also ends the wait for other workers
            if not self._room.acquire(timeout=_POLL_SECONDS):
                continue
            with self._counters.timed("picking"):
                unit, more = self._picker.take()
            if unit is not None:
                yield unit
                continue
            self._room.release()
            if not more:
                return

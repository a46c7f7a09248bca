"""One process at work: read-tokenize-pack, the device, and encode-hash-write, overlapped.

Units flow through three stages joined by bounded queues: while one computes, the next is read and
packed and the last one's shards become durable. A unit is taken when nobody who seems alive holds
it; should two workers do the same one, the first commit wins and the other's files are removed.
In a world of several processes the leader takes units, and all of them do each one together.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from spile.background import Producer
from spile.config import Runtime
from spile.data.pack import Batch, PackedUnit
from spile.data.units import Unit
from spile.engine.budget import Budget
from spile.engine.clock import DeviceClock
from spile.engine.resolve import Job
from spile.engine.sink import Prepared, Sink
from spile.engine.step import Step
from spile.engine.world import Alone
from spile.errors import Interrupted
from spile.metrics import Counters
from spile.store.ledger import Ledger
from spile.store.presence import Presence

_log = logging.getLogger("spile")
_RETRY_SECONDS = 0.5  # between looks for a unit that others hold
# The one that computes and the one after it. More would only be kept from other workers.
_UNITS_HELD = 2


class Worker:
    """Does units until all are done or it is told to stop."""

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        step: Step,
        runtime: Runtime,
        *,
        batches: Callable[[PackedUnit], Iterator[Batch]],
        made_by: Mapping[str, Any],
        presence: Presence,
        world: Alone,
        counters: Counters,
        budget: Budget,
        stop: threading.Event,
    ) -> None:
        """`batches`: cuts a packed unit into steps."""
        self._job, self._ledger, self._step, self._runtime = job, ledger, step, runtime
        self._batches, self._made_by = batches, made_by
        self._presence, self._world = presence, world
        self._counters, self._budget, self._stop = counters, budget, stop
        self._mine: set[int] = set()
        self._room = threading.Semaphore(_UNITS_HELD)

    def run(self) -> None:
        """Work until every unit is done, or the budget is spent.

        Raises:
            Interrupted: if told to stop first; units fully computed are committed, the one in
                hand is abandoned.
        """
        self._presence.tell(state="running")
        self._run_stages()

    def _run_stages(self) -> None:
        sink = Sink(
            self._job, self._ledger, self._presence, self._runtime, self._counters, self._made_by,
            self._world,
        )  # fmt: skip
        feed = Producer(self._prepare(sink), 1, "read-tokenize-pack")
        clock = DeviceClock(self._counters, self._runtime.queue_depth)
        try:
            for prepared in self._timed(feed):
                self._compute(prepared, sink, clock)
                if self._stop.is_set():
                    break
                self._room.release()
            sink.close()  # commits what is fully computed
            if self._stop.is_set():
                raise Interrupted
        except Exception as error:
            try:
                sink.close()
            except Exception as second:
                if second is not error:
                    _log.error("and while ending: %s", second)
            raise
        except BaseException:
            sink.abandon()
            raise
        finally:
            feed.close()
            clock.close()

    def _timed(self, feed: Producer[Prepared]) -> Iterator[Prepared]:
        units = iter(feed)
        while True:
            with self._counters.timed("waited_for_text"):
                prepared = next(units, None)
            if prepared is None:
                return
            yield prepared

    def _compute(self, prepared: Prepared, sink: Sink, clock: DeviceClock) -> None:
        sink.begin(prepared)
        for batch in self._batches(prepared.packed):
            if self._stop.is_set():
                return
            output = self._step(batch)
            clock.started(output)
            with self._counters.timed("waited_for_writing"):
                sink.put(output)
        sink.end()

    # -- first stage: text to packed units ---------------------------------------------------

    def _prepare(self, sink: Sink) -> Generator[Prepared, None, None]:
        with closing(self._job.reader()) as reader:
            known = {unit.id: unit for unit in self._job.units}
            for unit, attempt in self._world.units(self._units(sink), known):
                documents = reader.read(unit.spans, unit.first_doc, unit.skip)
                with self._counters.timed("preparing"):
                    packed, skipped = self._job.pack(documents)
                for batch in self._batches(packed):
                    self._step.compile(batch)  # beside the unit that computes, not in its way
                yield Prepared(unit, attempt, packed, skipped, documents.digest())

    def _units(self, sink: Sink) -> Iterator[Unit]:
        """Units to do, in order, as long as there are any that nobody else is doing."""
        waiting = False
        while not self._stop.is_set():
            sink.check()  # a writer that failed ends the waiting for others, too
            if not self._room.acquire(timeout=_RETRY_SECONDS):
                continue
            unit, left = self._next_unit()
            if unit is not None:
                waiting = False
                yield unit
                continue
            self._room.release()
            if not left or self._budget.spent:
                return
            if not waiting:
                _log.info("waiting for %d units that other workers hold", left)
            waiting = True
            self._stop.wait(_RETRY_SECONDS)

    def _next_unit(self) -> tuple[Unit | None, int]:
        """A unit that is nobody's, taken; and how many there are left."""
        done = self._ledger.done_units()
        left = [u for u in self._job.units if u.id not in done and u.id not in self._mine]
        held = self._presence.held_by_others() if left else set[int]()
        unit = next((u for u in left if u.id not in held), None)
        if unit and not self._budget.allows(unit, done, held | self._mine):
            unit = None
        if unit is not None:
            self._mine.add(unit.id)
            self._presence.hold(unit.id)
        return unit, len(left)

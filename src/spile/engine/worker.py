"""One process at work: read-tokenize-pack, the device, and encode-hash-write, overlapped.

Units flow through three stages joined by bounded queues, the next unit computing while the last
one's shards become durable. A unit is taken when nobody who seems alive holds it; should two
workers do the same one, the first commit wins and the other's files are removed.
"""

import logging
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.background import Consumer, Producer
from spile.config import Runtime
from spile.data.corpus import Documents
from spile.data.pack import Batch, PackedUnit
from spile.data.units import Unit
from spile.engine.clock import DeviceClock
from spile.engine.resolve import Job
from spile.engine.step import Step, StepOutput
from spile.errors import DataError, Interrupted, StoreError
from spile.metrics import Counters
from spile.store.ledger import Ledger
from spile.store.presence import Presence
from spile.store.writer import UnitWriter

_log = logging.getLogger("spile")
_RETRY_SECONDS = 0.5  # between looks for a unit that others hold


@dataclass(frozen=True)
class _Begin:
    """A unit enters; its batches follow, then `_End`."""

    unit: Unit
    packed: PackedUnit
    skipped: Counter[str]
    text_digest: str


@dataclass(frozen=True)
class _End:
    pass


class Worker:
    """Does units until all are done or it is told to stop."""

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        step: Step,
        runtime: Runtime,
        *,
        batch_rows: int,
        made_by: Mapping[str, Any],
        counters: Counters,
        stop: threading.Event,
    ) -> None:
        self._job, self._ledger, self._step, self._runtime = job, ledger, step, runtime
        self._batch_rows, self._made_by = batch_rows, made_by
        self._counters, self._stop = counters, stop
        self._presence = Presence(ledger.objects, runtime.stale_after)
        self._lanes = ThreadPoolExecutor(runtime.write_threads, "write")
        self._mine: set[int] = set()
        self._current: tuple[_Begin, UnitWriter] | None = None  # owned by the writing stage

    def run(self) -> None:
        """Work until every unit is done.

        Raises:
            Interrupted: if told to stop first; units fully computed are committed, the one in
                hand is abandoned.
        """
        self._presence.start()
        self._presence.tell(state="running")
        try:
            self._run_stages()
        except BaseException as error:
            state = "stopped" if isinstance(error, Interrupted) else "failed"
            self._presence.close(state, error=f"{type(error).__name__}: {error}")
            raise
        self._presence.close("done")

    def _run_stages(self) -> None:
        depth = self._runtime.queue_depth
        sink = Consumer(self._write, depth, "encode-hash-write")
        feed = Producer(self._feed(sink), depth, "read-tokenize-pack")
        clock = DeviceClock(self._counters, depth)
        try:
            for item in feed:
                if self._stop.is_set():
                    break
                if isinstance(item, Batch):
                    output = self._step(item)
                    clock.started(output.finished)
                    sink.put(output)
                else:
                    sink.put(item)
            if self._stop.is_set():
                sink.close()  # commits what is fully computed
                raise Interrupted
            sink.close()
        except Exception as error:
            try:
                sink.close()  # units fully computed before the failure are kept
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
            self._lanes.shutdown()
            if self._current:
                # Tidying up never hides why the run ended.
                with suppress(OSError, StoreError):
                    self._current[1].discard()

    # -- first stage: text to batches --------------------------------------------------------

    def _feed(self, sink: Consumer[Any]) -> Generator[_Begin | Batch | _End, None, None]:
        with closing(self._job.reader()) as reader:
            for unit in self._units(sink):
                yield from self._feed_unit(unit, reader.read(unit.spans, unit.first_doc))

    def _feed_unit(self, unit: Unit, documents: Documents) -> Iterator[_Begin | Batch | _End]:
        packed, skipped = self._job.pack(documents)
        yield _Begin(unit, packed, skipped, documents.digest())
        for batch in packed.batches(self._batch_rows):
            if self._stop.is_set():
                return
            yield batch
        yield _End()

    def _units(self, sink: Consumer[Any]) -> Iterator[Unit]:
        """Units to do, in order, as long as there are any that nobody else is doing."""
        waiting = False
        while not self._stop.is_set():
            sink.check()  # a writer that failed ends the waiting for others, too
            done = self._ledger.done_units()
            open_units = [u for u in self._job.units if u.id not in done and u.id not in self._mine]
            if not open_units:
                return
            held = self._presence.held_by_others()
            unit = next((u for u in open_units if u.id not in held), None)
            if unit is None:
                if not waiting:
                    _log.info("waiting for %d units that other workers hold", len(open_units))
                waiting = True
                self._stop.wait(_RETRY_SECONDS)
                continue
            waiting = False
            self._mine.add(unit.id)
            self._presence.hold(unit.id)
            yield unit

    # -- last stage: rows to durable shards --------------------------------------------------

    def _write(self, item: _Begin | StepOutput | _End) -> None:
        if isinstance(item, _Begin):
            writer = UnitWriter(
                self._ledger.objects,
                item.unit.id,
                item.packed.index,
                self._job.table.taps,
                self._runtime.shard_bytes,
                compress=self._runtime.compress,
            )
            self._current = (item, writer)
        elif isinstance(item, StepOutput):
            self._write_rows(item)
        else:
            self._commit()

    def _write_rows(self, output: StepOutput) -> None:
        assert self._current
        begin, writer = self._current

        def write(tap: str) -> int:
            rows = output.rows_of(tap)
            unfit = rows.dtype == np.int8  # it has no NaN
            for stats in output.stats_of(tap):
                if stats.nonfinite and (unfit or not self._runtime.allow_nonfinite):
                    raise DataError(self._nonfinite(tap, stats.nonfinite, begin))
                writer.stats[tap].merge(stats)
            writer.write(tap, rows, output.scales_of(tap))
            return len(rows) * self._job.table.taps[tap].row_bytes

        # Taps are files of their own, so they may be written side by side.
        lanes = [self._lanes.submit(write, tap) for tap in self._job.table.taps]
        wait(lanes)  # all of them, before an error of one is raised: none may write on after that
        self._counters.add(bytes=sum(lane.result() for lane in lanes))
        self._counters.add(tokens=int(output.lengths.sum()))
        self._presence.tell(tokens=int(self._counters["tokens"]))

    def _commit(self) -> None:
        assert self._current
        begin, writer = self._current
        done = writer.finish(
            fingerprint=self._job.table.fingerprint,
            tokens=begin.packed.num_tokens,
            documents=begin.packed.num_docs,
            contexts=begin.packed.num_contexts,
            skipped=dict(sorted(begin.skipped.items())),
            text_digest=begin.text_digest,
            made_by=self._made_by,
        )
        # From here on a record may name these files, even if `commit` itself raises.
        self._current = None
        won = self._ledger.commit(done)
        if not won:
            writer.discard()
            _log.info("unit %d was done by another worker first", begin.unit.id)
        # Packed rows of which nothing is kept are read, and never run.
        unrun = begin.packed.num_tokens - int(begin.packed.lengths.sum())
        self._counters.add(units=1, tokens=unrun)
        self._presence.release(begin.unit.id)
        counted = {name: int(self._counters[name]) for name in ("units", "tokens")}
        self._presence.tell(units_done=counted["units"], tokens=counted["tokens"])

    def _nonfinite(self, tap: str, count: int, begin: _Begin) -> str:
        unit, dtype = begin.unit, self._job.table.taps[tap].dtype
        keep = "which int8 cannot hold" if dtype == "int8" else "or keep them: --allow-nonfinite"
        return (
            f"{tap}: NaN or infinity in unit {unit.id} (documents {unit.first_doc} to "
            f"{unit.first_doc + unit.num_docs - 1}, {count} values of a packed row); check the "
            f"weights and the dtypes, {keep}"
        )

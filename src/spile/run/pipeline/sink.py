"""The last stage: write rows into shards, make shards durable, commit units.

A few threads write rows in parallel. Another thread makes a completely written unit durable and
commits it, while the next one's rows arrive.
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from spile.core.errors import DataError
from spile.core.index import FLAGS
from spile.core.system import system
from spile.core.threads import Consumer
from spile.dataset.codec.documents import with_columns
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Shard
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.metrics.values import disagreement_counts, next_token_counts, tap_counts
from spile.plan.job import ExtractionJob, PreparedUnit
from spile.run.pipeline.disagreement import DisagreementWatch, DocumentGaps
from spile.run.pipeline.merging import PartMerger, mergers
from spile.run.pipeline.nonfinite import FiniteTaps
from spile.run.step.output import StepOutput
from spile.run.world.world import RunContext

_log = logging.getLogger("spile.run")


@dataclass
class _Writing:
    """A unit whose rows are being written."""

    prepared: PreparedUnit
    attempt: Attempt
    number: int  # in the order of `begin`
    rows: int = 0  # that have arrived, in this process's part
    seconds: float = 0.0  # it took to compute
    dropped: bool = False  # the run stopped before its end
    mergers: Mapping[str, PartMerger] = field(default_factory=dict[str, PartMerger])  # by tap
    gaps: DocumentGaps | None = None  # if an engine's log-probabilities are compared


class _Shared:
    """An item that every lane handles; `last` is true only in the lane that finishes last."""

    def __init__(self, unit: _Writing, output: StepOutput | None, lanes: int) -> None:
        self.unit, self.output = unit, output  # output None: the unit's end
        self.first = unit.attempt.writer.first + unit.rows  # index of its first row within the unit
        self._left = itertools.count(lanes - 1, -1)

    def last(self) -> bool:
        return next(self._left) == 0


class Taker(Protocol):
    """Takes a worker's rows: a unit's beginning, its steps in order, its end."""

    def begin(self, prepared: PreparedUnit) -> None: ...

    def put(self, output: StepOutput) -> None: ...

    def end(self, seconds: float) -> None: ...

    @property
    def waiting(self) -> tuple[int, int]:
        """Number of steps waiting to be taken, and of units waiting to be committed."""
        ...

    def check(self) -> None:
        """Raise the error of a background thread, if one has failed."""
        ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Sink:
    """Takes a unit's beginning, its steps in order, and its end; commits it in the background.

    A later call raises an error that happens there. Units that ended before the error are still
    committed.
    """

    def __init__(
        self,
        context: RunContext,
        job: ExtractionJob,
        made_by: Mapping[str, Any],
        done: Callable[[int], None],
    ) -> None:
        """`done`: called with the id of every committed unit."""
        self._job, self._made_by, self._done = job, made_by, done
        self._ledger, self._presence = context.ledger, context.presence
        self._runtime, self._counters = context.runtime, context.counters
        self._world = context.world
        self._uncommitted: dict[Attempt, None] = {}  # in the order of `begin`
        self._current: _Writing | None = None
        self._begun = itertools.count()
        self._failed: Exception | None = None  # the first error of a lane
        self._failed_in = 0  # number of the unit that failed; earlier ones may still be complete
        taps, runtime = list(job.table.taps), context.runtime
        self._first_tap = taps[0]
        self._watched = DisagreementWatch(runtime.max_disagreement)
        count = min(runtime.write_threads, len(taps))
        # Each tap has its own files, so each lane writes some taps and waits for no other lane.
        self._lanes = [
            Consumer[_Shared](
                partial(self._handle, taps[lane::count]), runtime.queue_depth, f"write-{lane}"
            )
            for lane in range(count)
        ]
        self._commits: Consumer[_Writing] = Consumer(self._timed_commit, 1, "commit")

    def begin(self, prepared: PreparedUnit) -> None:
        objects = self._ledger.objects
        writer = UnitWriter(
            objects,
            prepared.unit,
            prepared.packed.index,
            self._job.table.taps,
            self._job.table.shard_limit(objects, self._runtime.shard_bytes),
            layout=self._ledger.layout,
            compress=self._runtime.compress,
            attempt=prepared.attempt,
            part=self._world.process,
            run=prepared.packed.run_of(self._world.process, self._world.processes),
            durable=lambda size: self._counters.add(durable=size),
        )
        attempt = Attempt(self._ledger, writer)
        self._uncommitted[attempt] = None
        compares = self._job.compares and self._world.leads
        self._current = _Writing(
            prepared,
            attempt,
            next(self._begun),
            mergers=mergers(self._job.table, prepared),
            gaps=DocumentGaps(prepared.documents["doc"]) if compares else None,
        )

    def put(self, output: StepOutput) -> None:
        self._share(output)

    def end(self, seconds: float) -> None:
        """`seconds`: how long the unit took."""
        assert self._current
        self._current.seconds = seconds
        self._share(None)
        self._current = None

    @property
    def waiting(self) -> tuple[int, int]:
        """Steps that the slowest lane has yet to write, and units to commit."""
        return max(lane.waiting for lane in self._lanes), self._commits.waiting

    def _share(self, output: StepOutput | None) -> None:
        assert self._current
        self.check()
        shared = _Shared(self._current, output, len(self._lanes))
        if output is not None:
            self._current.rows += output.num_rows
        for lane in self._lanes:
            lane.put(shared)

    def check(self) -> None:
        """Raise the error of a background thread, if one has failed."""
        for stage in (*self._lanes, self._commits):
            stage.check()

    def close(self) -> None:
        """Commit the units that were ended, and remove the files of the others."""
        errors: list[Exception] = []
        if self._current is not None:
            self._current.dropped = True  # its queued steps need not be computed or written
        for stage in (*self._lanes, self._commits):
            try:
                stage.close()
            except Exception as error:
                if error not in errors:
                    errors.append(error)
        self._tidy()
        self._watched.tell()
        for second in errors[1:]:
            if type(second) is not type(errors[0]):
                _log.error("and while ending: %s", second)
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Finish the items in hand and drop the rest; for use while another error is raised."""
        for stage in (*self._lanes, self._commits):
            stage.abandon()
        self._tidy()

    def _tidy(self) -> None:
        for attempt in list(self._uncommitted):
            attempt.discard()
        self._uncommitted.clear()

    # -- the writing threads -----------------------------------------------------------------

    def _handle(self, taps: list[str], item: _Shared) -> None:
        """Write an item's taps. If one lane has failed, the others stop with the same error.

        A lane that is behind first writes the units before the failed one: those were ended.
        """
        if item.unit.dropped:
            return
        if self._failed is not None and item.unit.number >= self._failed_in:
            raise self._failed
        try:
            self._write(taps, item)
        except Exception as error:
            if self._failed is None:
                self._failed_in, self._failed = item.unit.number, error
            elif type(error) is not type(self._failed):
                _log.error("and in another lane: %s", error)
            raise self._failed from self._failed.__cause__

    def _write(self, taps: list[str], item: _Shared) -> None:
        output, writer = item.output, item.unit.attempt.writer
        if output is None:
            if item.last():
                self._commits.put(item.unit)
            return
        if item.unit.gaps and taps[0] == self._first_tap:
            item.unit.gaps.add(*output.gaps)
        for tap in taps:
            with self._counters.timed("copying"):  # waits for the step, and for its rows to arrive
                merger = item.unit.mergers.get(tap)
                found = [] if merger else output.stats_of(tap)
                source = merger.source if merger else tap
                pieces = [] if merger else [*output.pieces_of(source)]
                parts = [each.parts_of(source) for each in output.batches] if merger else []
            if merger:
                if not all(np.isfinite(each).all() for each in parts):
                    self._refuse_nonfinite(item, output)
                if not self._world.leads:  # which writes all pooled rows
                    continue
                for batch, arrived in zip(output.batches, parts, strict=True):
                    rows, stats = merger.add(arrived, batch.products_of(source))
                    pieces.append((rows, None))
                    found += stats
            self._watch(tap, found)
            if tap == "logprob" and not merger:
                self._watch_predictions(item, found)
            if any(stats.nonfinite for stats in found):
                self._refuse_nonfinite(item, output)
                if merger and not self._runtime.allow_nonfinite:
                    raise DataError(
                        f"{tap}: a pooled value in unit {item.unit.prepared.unit} is too large for "
                        f"{self._job.table.taps[tap].dtype}; give --store-dtype float32 (or "
                        "bfloat16) and another --out"
                    )
            for stats in found:
                writer.stats[tap].merge(stats)
            for rows, scales in pieces:
                with self._counters.timed("writing"):
                    writer.write(tap, rows, scales)
                self._counters.add(bytes=len(rows) * self._job.table.taps[tap].row_bytes)
            if source == tap and (copied := output.copied_of(tap)):
                self._counters.add(copied=copied)
        if item.last():
            self._counters.add(tokens=output.tokens)
            self._tell()

    def _refuse_nonfinite(self, item: _Shared, output: StepOutput) -> None:
        """Raise if a step holds values that must not be stored."""
        finite = FiniteTaps.of(self._job, allow=self._runtime.allow_nonfinite)
        finite.check(output, item.unit.prepared, item.first)

    def _watch(self, tap: str, found: list[TapStats]) -> None:
        """Add to a tap's health metrics, which are shown during the run."""
        if not found:
            return
        rows, norms = sum(s.count for s in found), sum(s.norm_sum for s in found)
        self._counters.add(**tap_counts(tap, rows, norms, sum(s.nonfinite for s in found)))
        self._counters.met(**{f"tap/max_abs/{tap}": max(s.max_abs for s in found)})

    def _watch_predictions(self, item: _Shared, found: list[TapStats]) -> None:
        """Count the model's loss over tokens that have a next token in their context."""
        rows = sum(stats.count for stats in found)
        flags = item.unit.prepared.packed.index["flags"][item.first : item.first + rows]
        known = int(np.count_nonzero(flags & FLAGS["last"] == 0))
        # (Log-probabilities are never positive, so the norm is the negative. A last token's is 0.)
        self._counters.add(**next_token_counts(known, -sum(s.norm_sum for s in found)))

    # -- the committing thread ---------------------------------------------------------------

    def _timed_commit(self, written: _Writing) -> None:
        with self._counters.timed("committing"):
            self._commit(written)

    def _commit(self, written: _Writing) -> None:
        prepared, packed = written.prepared, written.prepared.packed
        if self._world.leads:
            self._record(written)
        else:
            files = [asdict(file) for file in written.attempt.writer.finish_part()]
            written.attempt.release()  # from now on the leader's record may name them
            self._world.gather(f"part/{written.number}", files)
        # Packed rows without kept tokens are read, but never run.
        unrun = packed.num_tokens - int(packed.lengths.sum())
        self._counters.add(
            units=1, tokens=unrun, documents=packed.num_docs, unit_seconds=written.seconds
        )
        self._uncommitted.pop(written.attempt, None)
        self._done(prepared.unit)
        self._tell()

    def _tell(self) -> None:
        """Report the progress, in the leader only: all processes of a world count the same."""
        if self._world.leads:
            units, tokens = (int(self._counters[name]) for name in ("units", "tokens"))
            self._presence.tell(units_done=units, tokens=tokens)

    def _record(self, written: _Writing) -> None:
        """Write the unit's record; from then on the unit exists."""
        prepared, attempt, packed = written.prepared, written.attempt, written.prepared.packed
        parts = self._world.gather(f"part/{written.number}", []) or []
        done = attempt.writer.finish(
            [[Shard(**file) for file in part] for part in parts[1:]],
            table=self._documents_of(written),
            fingerprint=self._job.table.fingerprint,
            made_from=self._ledger.must_be_made_from(self._job.table, prepared.unit),
            tokens=packed.num_tokens,
            documents=packed.num_docs,
            contexts=packed.num_contexts,
            skipped=dict(sorted(prepared.skipped.items())),
            text_digest=prepared.digest,
            made_by={
                **self._made_by,
                # (For people and charts: clocks are never compared.)
                "finished_at": round(system().time(), 3),
                "seconds": round(written.seconds, 3),
            },
        )
        if written.gaps:
            self._watched.add(written.gaps)
        if not attempt.commit(done):
            _log.info("unit %d was done by another worker first", prepared.unit)

    def _documents_of(self, written: _Writing) -> Mapping[str, np.ndarray]:
        """Return the table of a unit's documents."""
        table, gaps = written.prepared.documents, written.gaps
        if gaps is None:
            return table
        self._counters.add(**disagreement_counts(int(gaps.tokens.sum()), float(gaps.total.sum())))
        return with_columns(table, gaps.columns())

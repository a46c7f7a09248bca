"""The last stage: rows into shards, shards made durable, units committed.

Rows are written by one thread (with others beside it, one for each tap), and a unit that is
wholly written is made durable and committed by another, while the next one's rows arrive.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.background import Consumer
from spile.config import Runtime
from spile.data.pack import PackedUnit
from spile.data.units import Unit
from spile.engine.resolve import Job
from spile.engine.step import StepOutput
from spile.errors import DataError, StoreError
from spile.metrics import Counters
from spile.store.ledger import Ledger
from spile.store.presence import Presence
from spile.store.writer import UnitWriter

_log = logging.getLogger("spile")


@dataclass(frozen=True)
class Prepared:
    """A unit as the model will read it."""

    unit: Unit
    packed: PackedUnit
    skipped: Counter[str]
    text_digest: str


class Sink:
    """Takes a unit's beginning, its steps in order, and its end; commits it in the background.

    What fails there is raised by the next call. Units that were ended before are committed still.
    """

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        presence: Presence,
        runtime: Runtime,
        counters: Counters,
        made_by: Mapping[str, Any],
    ) -> None:
        self._job, self._ledger, self._presence = job, ledger, presence
        self._runtime, self._counters, self._made_by = runtime, counters, made_by
        self._lanes = ThreadPoolExecutor(runtime.write_threads, "write")
        self._uncommitted: set[UnitWriter] = set()
        self._current: tuple[Prepared, UnitWriter] | None = None  # owned by the writing thread
        self._rows: Consumer[Prepared | StepOutput | None] = Consumer(
            self._write, runtime.queue_depth, "write"
        )
        self._commits: Consumer[tuple[Prepared, UnitWriter]] = Consumer(self._commit, 1, "commit")

    def begin(self, prepared: Prepared) -> None:
        self._rows.put(prepared)

    def put(self, output: StepOutput) -> None:
        self._rows.put(output)

    def end(self) -> None:
        self._rows.put(None)

    def check(self) -> None:
        """Raise what has failed, if anything has."""
        self._rows.check()
        self._commits.check()

    def close(self) -> None:
        """Commit the units that were ended; what is left of others is removed."""
        errors: list[Exception] = []
        for stage in (self._rows, self._commits):
            try:
                stage.close()
            except Exception as error:
                errors.append(error)
        self._tidy()
        for second in errors[1:]:
            if second is not errors[0]:
                _log.error("and while ending: %s", second)
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Finish what is in hand, and nothing else; for use when another error is being raised."""
        self._rows.abandon()
        self._commits.abandon()
        self._tidy()

    def _tidy(self) -> None:
        self._lanes.shutdown()
        for writer in list(self._uncommitted):
            # Tidying up never hides why the run ended.
            with suppress(OSError, StoreError):
                writer.discard()
        self._uncommitted.clear()

    # -- the writing thread ------------------------------------------------------------------

    def _write(self, item: Prepared | StepOutput | None) -> None:
        if isinstance(item, Prepared):
            writer = UnitWriter(
                self._ledger.objects,
                item.unit.id,
                item.packed.index,
                self._job.table.taps,
                self._runtime.shard_bytes,
                compress=self._runtime.compress,
            )
            self._uncommitted.add(writer)
            self._current = (item, writer)
        elif item is not None:
            self._write_rows(item)
        else:
            assert self._current
            self._commits.put(self._current)
            self._current = None

    def _write_rows(self, output: StepOutput) -> None:
        assert self._current
        prepared, writer = self._current

        def write(tap: str) -> int:
            rows = output.rows_of(tap)
            unfit = rows.dtype == np.int8  # it has no NaN
            for stats in output.stats_of(tap):
                if stats.nonfinite and (unfit or not self._runtime.allow_nonfinite):
                    raise DataError(self._nonfinite(tap, stats.nonfinite, prepared.unit))
                writer.stats[tap].merge(stats)
            writer.write(tap, rows, output.scales_of(tap))
            return len(rows) * self._job.table.taps[tap].row_bytes

        # Taps are files of their own, so they may be written side by side.
        lanes = [self._lanes.submit(write, tap) for tap in self._job.table.taps]
        wait(lanes)  # all of them, before an error of one is raised: none may write on after that
        self._counters.add(bytes=sum(lane.result() for lane in lanes))
        self._counters.add(tokens=int(output.lengths.sum()))
        self._presence.tell(tokens=int(self._counters["tokens"]))

    def _nonfinite(self, tap: str, count: int, unit: Unit) -> str:
        dtype = self._job.table.taps[tap].dtype
        keep = (
            "which int8 cannot hold" if dtype == "int8" else "or keep them with --allow-nonfinite"
        )
        return (
            f"{tap}: NaN or infinity in unit {unit.id} (documents {unit.first_doc} to "
            f"{unit.first_doc + unit.num_docs - 1}, {count} values of a packed row); check the "
            f"weights and the dtypes, {keep}"
        )

    # -- the committing thread ---------------------------------------------------------------

    def _commit(self, written: tuple[Prepared, UnitWriter]) -> None:
        prepared, writer = written
        packed = prepared.packed
        done = writer.finish(
            fingerprint=self._job.table.fingerprint,
            tokens=packed.num_tokens,
            documents=packed.num_docs,
            contexts=packed.num_contexts,
            skipped=dict(sorted(prepared.skipped.items())),
            text_digest=prepared.text_digest,
            made_by=self._made_by,
        )
        # From here on a record may name these files, even if `commit` itself raises.
        self._uncommitted.discard(writer)
        won = self._ledger.commit(done)
        if not won:
            writer.discard()
            _log.info("unit %d was done by another worker first", prepared.unit.id)
        # Packed rows of which nothing is kept are read, and never run.
        unrun = packed.num_tokens - int(packed.lengths.sum())
        self._counters.add(units=1, tokens=unrun)
        self._presence.release(prepared.unit.id)
        counted = {name: int(self._counters[name]) for name in ("units", "tokens")}
        self._presence.tell(units_done=counted["units"], tokens=counted["tokens"])

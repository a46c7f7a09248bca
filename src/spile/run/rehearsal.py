"""Measure the speed of a run here: run it for a few seconds, into a directory that is then removed.

Nothing is simulated: it uses the real weights, the compiled step and batches of the corpus. If
there is a disk to try, rows are hashed, written and made durable.
"""

import os
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from spile.core.config import Runtime
from spile.core.errors import Interrupted, StoreError
from spile.core.threads import cancelled_by
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.metrics import Counters
from spile.models.layout import Cuts
from spile.objects import open_objects
from spile.plan.estimate import Estimate
from spile.plan.job import ExtractionJob
from spile.plan.resolve import store_table
from spile.run.assembly import Assembly
from spile.run.extract import Extraction
from spile.run.world.devices import memory_limit, prepared_device
from spile.run.world.world import SingleWorld

_POLL_SECONDS = 0.02
_PREFIX = ".spile-rehearsal-"


@dataclass(frozen=True)
class Rehearsal:
    """Measured times in seconds, and the rate in tokens per second."""

    rate: float
    compiling: float
    starting: float  # until the first step: loading, reading the first unit, compiling
    processor: float  # CPU seconds per token, over all cores


def why_not(job: ExtractionJob, cost: Estimate) -> str | None:
    """Why nothing can be measured here; None if it can."""
    if not isinstance(job.checkpoint.directory, Path):
        return "the weights are not on this machine: `spile fetch` downloads them"
    limit = memory_limit(prepared_device()) or os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    if cost.device_bytes > limit:
        return "the model does not fit on the devices here"
    return None


def rehearse(
    job: ExtractionJob,
    runtime: Runtime,
    cost: Estimate,
    cuts: Cuts,
    seconds: float,
    near: Path | None,
) -> Rehearsal | None:
    """Run for `seconds` after the first step; None if there are too few steps to time.

    `near`: where the dataset goes, if that is a disk.
    """
    counters, stop = Counters(), threading.Event()
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix=_PREFIX, dir=_existing(near), ignore_cleanup_errors=True
            )
        )
        ledger = Ledger(open_objects(folder))
        runtime = replace(
            runtime, max_bytes=None, share=None, spool=None, metrics=None, profile=None
        )
        presence = Presence(ledger.objects, runtime.stale_after)
        stack.callback(presence.close, "done")
        timer = _Timer(counters, stop, seconds)
        stack.callback(timer.close)
        run = Extraction(ledger, runtime, SingleWorld(), presence, counters, stop)
        try:
            stored = store_table(job, ledger)
            with cancelled_by(stop):
                run.work(Assembly(run, stored, prepared_device(), cuts, cost))
        except Interrupted:
            pass
        except StoreError:
            return None  # (e.g. the disk is full; the run itself will report that)
    rate = counters.pace()
    if not rate:
        return None
    return Rehearsal(
        rate=rate,
        compiling=counters["compiling"],
        starting=counters["waited_at_first"] + counters["waited_for_model"],
        processor=timer.processor,
    )


def _existing(path: Path | None) -> Path | None:
    """The nearest existing folder above a path."""
    if path is None:
        return None
    return next((folder for folder in path.absolute().parents if folder.is_dir()), None)


class _Timer:
    """Stops the run when its steps have lasted long enough."""

    def __init__(self, counters: Counters, stop: threading.Event, seconds: float) -> None:
        self._counters, self._stop, self._seconds = counters, stop, seconds
        self._over = threading.Event()
        self.processor = 0.0
        self._thread = threading.Thread(target=self._watch, name="rehearsal", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        began: tuple[float, float] | None = None
        while not self._over.wait(_POLL_SECONDS):
            computed, spent = self._counters["computed"], time.process_time()
            if not computed:
                continue
            began = began or (computed, spent)
            if computed > began[0]:
                self.processor = (spent - began[1]) / (computed - began[0])
            if self._counters["device_busy"] + self._counters["device_idle"] >= self._seconds:
                self._stop.set()
                return

    def close(self) -> None:
        self._over.set()
        self._thread.join()

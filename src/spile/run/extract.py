"""Extract one dataset from start to finish, in this process or together with joined ones."""

import logging
import os
import platform as host_platform
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

import jax

import spile
from spile.core.config import Recipe, Runtime, flag_of
from spile.core.errors import ConfigError, InputError, Interrupted, StoreError
from spile.core.humanize import plural, size
from spile.core.recipe import latent_names
from spile.core.threads import cancellation, cancelled_by, mapped
from spile.dataset.codec.columns import read_columns
from spile.dataset.codec.shard import read_tensors
from spile.dataset.codec.statistics import TapStats
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import Manifest
from spile.dataset.records.passes import readable_passes
from spile.dataset.records.prediction import Prediction, read_prediction
from spile.dataset.records.table import Table
from spile.metrics import Counters, MetricsRun, Reporter, open_backends, parse_backends
from spile.metrics.values import memory_counts
from spile.models.forward.decoder import needs_whole_block
from spile.objects import Spool, check_creates_once, is_bucket, open_objects
from spile.objects.protocol import COUNTED
from spile.plan.estimate import Budget, Estimate, refuse_if_too_large, step_of
from spile.plan.job import ExtractionJob
from spile.plan.passes import opened_for
from spile.run.assembly import Assembly
from spile.run.pipeline import display
from spile.run.pipeline.pickers import Picker, Place, StorePicker, UnitShare, find_place
from spile.run.pipeline.profile import Profile, ProfiledStep, host_span
from spile.run.pipeline.progress import reporting
from spile.run.world.devices import (
    local_devices,
    memory_limit,
    memory_used,
    peak_flops,
    prepared_device,
    process_count,
)
from spile.run.world.world import RunContext, SingleWorld, compare, join

_log = logging.getLogger("spile.run")
_ECHO_SECONDS = 1.0  # a signal that arrives within this time is a repeat of the same one


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    out: str
    rows: int
    tokens: int
    documents: int
    bytes: int
    units: int  # done
    units_total: int
    skipped: dict[str, int]
    estimate: Estimate
    prediction: Prediction | None = None
    truncated: dict[str, int] = field(default_factory=dict[str, int])  # rows, by encoded tap

    @property
    def complete(self) -> bool:
        """Whether every unit is done; False only if `--max-bytes` ended the run."""
        return self.units == self.units_total

    def __repr__(self) -> str:
        part = "" if self.complete else ", partial=True"
        return (
            f"<{self.out}: {plural(self.rows, 'row')} per tap of "
            f"{plural(self.documents, 'document')}, {size(self.bytes)} in "
            f"{plural(self.units, 'unit')}; spile.open({self.out!r}{part}) reads it>"
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How Spile's own commands run an extraction differently from `spile.extract`.

    Attributes:
        place: this process's rank and share, if they were found before.
        at_second_signal: called instead of raising `KeyboardInterrupt` at a second SIGINT.
        pick: makes the picker that chooses the next unit, instead of the store.
        ledger: the records of `out`, if some of them are to be replaced (`run/repair.py`).
    """

    place: Place | None = None
    at_second_signal: Callable[[], None] | None = None
    pick: Callable[[ExtractionJob, Presence], Picker] | None = None
    ledger: Ledger | None = None


def extract(
    recipe: Recipe,
    out: str | Path,
    runtime: Runtime | None = None,
    *,
    counters: Counters | None = None,
    on_start: Callable[[ExtractionJob, Estimate], None] | None = None,
    stop: threading.Event | None = None,
    options: RunOptions | None = None,
    progress: bool = True,
) -> Outcome:
    """Make the dataset, or continue it; return when every unit is done, or `max_bytes` are written.

    It shows its progress: on a terminal and below a notebook's cell as a line that changes,
    elsewhere every ten seconds on standard error. With `progress=False`, or if `counters` or
    `on_start` are given, whose owner may show it, it does not.

    SIGINT, SIGTERM or setting `stop` ends it cleanly, with `Interrupted`. Where processes are
    joined (`run/world/rank.py`), each of them calls this, and an error in one is raised in all.
    `options` is for Spile's own commands.
    """
    options = options or RunOptions()
    runtime = runtime or Runtime()
    parse_backends(runtime.metrics)  # refuse unknown backends before doing anything
    if runtime.profile:
        Profile.parse(runtime.profile)
    place = options.place or find_place(runtime, os.environ)
    rank, share = place.rank, str(place.share) if place.share else None
    runtime = replace(runtime, share=share)
    with (
        stop_on_signal(stop or threading.Event(), options.at_second_signal) as stop,
        cancelled_by(stop),
        closing(Spool(Path(runtime.spool))) if runtime.spool else nullcontext() as spool,
    ):
        ledger = options.ledger or Ledger(open_objects(str(out), spool))
        recipe, ledger = opened_for(recipe, ledger)
        presence = Presence(ledger.objects, runtime.stale_after, ledger.layout)
        presence.tell(**{"share": share} if share else {})
        world = SingleWorld()
        if rank:
            presence.tell(world={"coordinator": rank.coordinator, "process": rank.process})
            presence.start()  # before joining: if that fails, the heartbeats tell who had come
            world = join(rank, runtime, stop)
        shows_itself = progress and counters is None and on_start is None
        shows_itself &= rank is None or rank.leads
        counters = counters or Counters()
        try:
            run = Extraction(
                ledger, runtime, world, presence, counters, stop, place.share, options.pick
            )
            with display.progress(counters, quiet=not shows_itself) as shown:
                outcome = run.extract(recipe, on_start or shown)
                while run.has_more_units(outcome):
                    outcome = run.extract(recipe, on_start or shown)
            world.close()
        except BaseException as error:
            first = world.failed(error)
            state = "stopped" if isinstance(first, Interrupted) else "failed"
            presence.close(state, error=f"{type(first).__name__}: {first}")
            if first is error:
                raise
            raise first from error
        presence.close("done")
        return outcome


@dataclass(frozen=True)
class Extraction(RunContext):
    """One slice's work on a dataset."""

    stop: threading.Event
    share: UnitShare | None = None
    pick: Callable[[ExtractionJob, Presence], Picker] | None = None

    def extract(
        self, recipe: Recipe, on_start: Callable[[ExtractionJob, Estimate], None] | None
    ) -> Outcome:
        runtime, world, ledger = self.runtime, self.world, self.ledger
        device = prepared_device()
        compare(world, _started_with(recipe, runtime, ledger, device))
        if not world.leads:
            world.share("table", True)  # wait; the leader's table is then read from the store
            recipe = replace(recipe, more=None, add_corpus=None)
        parts = Assembly.of(self, recipe, device)
        if not runtime.ignore_space:
            refuse_if_too_large(parts.cost, ledger.objects.url)
        cancellation().check()
        if world.leads and is_bucket(ledger.objects.url) and ledger.read_table() is None:
            check_creates_once(ledger.objects)
        parts = parts.stored()
        table, cost = parts.job.table, parts.cost
        world.share("table", True)
        if on_start:
            on_start(parts.job, cost)
        if not world.share("complete", ledger.complete(table)):
            if table.shuffled:
                raise StoreError(
                    f"{ledger.objects.url}: rows of a shuffled dataset are missing; shuffle again"
                )
            self.work(parts)
            if world.leads:
                ledger.complete(table, patient=True)
            world.share("committed", True)
        if world.leads and table.generations:
            _tell_passes_behind(ledger, table)
        return outcome_of(ledger, table, cost, runtime)

    def has_more_units(self, outcome: Outcome) -> bool:
        """Return whether the dataset has grown while taps were added, so that they lack units."""
        if not self.world.leads or not has_grown(self.ledger, outcome):
            return False
        if self.world.processes > 1:  # (what joined processes share has one name a run)
            raise documents_were_added(self.ledger)
        return True

    def work(self, parts: Assembly) -> None:
        """Load the model, and do units as long as there are any."""
        job, device, cost = parts.job, parts.device, parts.cost
        step = parts.load()
        cancellation().check()
        profile = Profile.parse(self.runtime.profile) if self.runtime.profile else None
        profiled = None
        if profile and self.world.leads:
            profiled = ProfiledStep(step, profile)
            self.counters.annotate = host_span
        if self.pick:
            picker = self.pick(job, self.presence)
        else:
            budget = Budget(job.table, self.ledger, self.runtime.max_bytes)
            picker = StorePicker(job, self.ledger, self.presence, budget, self.stop, self.share)
        worker = parts.worker(profiled or step, picker, made_by=_made_by(device, cost))
        predicts_for = device.device_kind if self.world.leads else None
        with (
            reporting(self.presence, self.counters, cost, predicts_for),
            self._reporter(parts),
            closing(profiled) if profiled else nullcontext(),
        ):
            worker.run()

    def _reporter(self, parts: Assembly) -> Reporter:
        """The reporter of this process's metrics; without backends if it reports none."""
        runtime, world, cost = self.runtime, self.world, parts.cost
        every = float(runtime.metrics_every)
        if not runtime.metrics or not (world.leads or runtime.metrics_from == "all"):
            return Reporter({}, self.counters, every)
        # Distinguishes workers that report to one place; without a share, by the worker's own name.
        which = [self.presence.name] if self.pick else []
        which += [f"share-{runtime.share.replace('/', '-of-')}"] if runtime.share else []
        which += [f"process-{world.process}"] if world.processes > 1 else []
        last = self.ledger.objects.url.rstrip("/").rpartition("/")[2]
        run = MetricsRun(
            name=runtime.run_name or ("spile" if last in ("", ".", "..") else last),
            worker="-".join(which),
            config={
                **parts.job.recipe.to_json(),
                **asdict(runtime),
                "device": parts.device.device_kind,
            },
        )
        self.counters.set(**_arithmetic(parts))
        return Reporter(
            open_backends(parse_backends(runtime.metrics), run),
            self.counters,
            every,
            more=lambda: {**COUNTED.snapshot(), **_memory_metrics()},
            tokens_before=cost.tokens * cost.units_done // max(1, cost.units),
        )


@contextmanager
def stop_on_signal(
    stop: threading.Event, at_second: Callable[[], None] | None = None
) -> Generator[threading.Event, None, None]:
    """Let SIGINT and SIGTERM ask the run to stop; a second one no longer waits for units in hand.

    A second one that follows at once is ignored: a launcher may signal both this process and its
    parent, which passes the signal on.

    The handlers set a flag and raise nothing: an exception raised by a handler may land in a
    callback of some library, which swallows it.
    """
    previous: dict[int, Any] = {}
    first: dict[int, float] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        if time.monotonic() - first.setdefault(number, time.monotonic()) < _ECHO_SECONDS:
            return
        if at_second is not None and number == signal.SIGINT:
            at_second()
        last = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, last)
        signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        previous = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _tell_passes_behind(ledger: Ledger, table: Table) -> None:
    """Warn of taps that were added before the dataset grew, and lack the new documents."""
    for each, found in readable_passes(ledger, table):
        if each.is_behind(table):
            taps = ",".join(found.recipe.taps)
            _log.warning(
                "%s lack the new documents; the dataset is read without those until you run "
                "spile extract --out %s --add-taps %s", taps, ledger.url, taps,
            )  # fmt: skip


def has_grown(ledger: Ledger, outcome: Outcome) -> bool:
    """Return whether a dataset has grown while taps were added to it, so that they lack units.

    Raises:
        StoreError: if not all of the new units are done.
    """
    if not ledger.of_pass or not outcome.complete:
        return False
    dataset = ledger.of_pass.dataset
    newest = dataset.table()
    if len(newest.units) == outcome.units_total:
        return False
    if dataset.derived.read_manifest(newest.layout) is None:
        raise StoreError(
            f"{ledger.url}: documents are being added there, which these taps lack; run the same "
            "command again after that"
        )
    return True


def documents_were_added(ledger: Ledger) -> StoreError:
    """Return the error of a run that cannot continue with the new units."""
    return StoreError(
        f"{ledger.url}: documents were added meanwhile, which these taps lack; run the same "
        "command again"
    )


def outcome_of(ledger: Ledger, table: Table, cost: Estimate, runtime: Runtime) -> Outcome:
    """Summarize the dataset once no unit is left to do."""
    manifest = ledger.derived.read_manifest(table.layout)
    if manifest is not None:
        total = manifest.totals
    else:
        there = ledger.done_units()
        missing = [unit for unit in range(len(table.units)) if unit not in there]
        budget = Budget(table, ledger, runtime.max_bytes)
        if missing and not budget.leaves_out(missing, there):
            raise StoreError(
                f"{ledger.objects.url}: {len(missing)} of {len(table.units)} units are missing, "
                f"such as {missing[0]}; run the same command again"
            )
        total = ledger.catalog_so_far(table).totals()
    if not total.units:
        raise ConfigError(
            f"--max-bytes {runtime.max_bytes}: no unit is that small; choose more, or "
            "a smaller --unit-tokens and another --out"
        )
    if total.tokens and not total.rows:
        raise InputError(
            f"--where {table.recipe.where!r} keeps none of the corpus's "
            f"{total.tokens:,} tokens; choose another, and add --restart"
        )
    if not total.rows:
        reasons = ", ".join(f"{n} {reason}" for reason, n in total.skipped.items())
        raise InputError(
            f"the corpus holds no usable document ({reasons}); run another recipe with --restart"
        )
    return Outcome(
        out=ledger.url,
        rows=total.rows,
        tokens=total.tokens,
        documents=total.documents,
        bytes=total.bytes,
        units=total.units,
        units_total=len(table.units),
        skipped=total.skipped,
        estimate=cost,
        # (It was made for the units that there were.)
        prediction=None if table.generations else read_prediction(ledger.objects),
        truncated=_truncated_rows(ledger, table, manifest),
    )


def _truncated_rows(ledger: Ledger, table: Table, manifest: Manifest | None) -> dict[str, int]:
    """Rows with more active latents than were kept, by tap; taps without such rows are left out."""
    names = [latent_names(tap)[0] for tap in table.recipe.encode]
    if not names:
        return {}
    if manifest is not None:
        parts = iter([read_columns(ledger.objects, manifest.columns)])
    else:
        keys = [done.statistics.key for done in ledger.catalog_so_far(table)]
        parts = mapped(partial(read_tensors, ledger.objects), keys, ledger.objects.parallel)
    total = Counter[str]()
    for tensors in parts:
        for name in names:
            stats = TapStats.from_tensors(name, tensors, table.taps[name].width)
            total[name] += stats.truncated
    return {name: count for name, count in total.items() if count}


def _started_with(recipe: Recipe, runtime: Runtime, ledger: Ledger, device: Any) -> dict[str, Any]:
    """The settings that must be the same in every process of a world."""
    own = (
        "process_id",
        "bind_address",
        "threads",
        "write_threads",
        "render_processes",
        "coordinator",
        "spool",
        "cache",
        "metrics",
        "metrics_every",
        "metrics_from",
        "run_name",
        "profile",
    )
    flags = {**asdict(recipe), **asdict(runtime), "out": ledger.objects.url}
    return {
        # (First: another version may have other flags.)
        "spile": spile.__version__,
        "jax": jax.__version__,
        "libtpu": _version("libtpu"),
        **{flag_of(name): value for name, value in flags.items() if name not in own},
        "platform": device.platform,
        "device kind": device.device_kind,
        "number of local devices": len(local_devices()),
    }


def _arithmetic(parts: Assembly) -> dict[str, float]:
    """FLOPs of a token on each device, and the peak FLOP/s of the device."""
    job, device, cuts = parts.job, parts.device, parts.cuts
    rows = max(1, parts.cost.batch_rows // cuts.layout.groups)
    work = replace(
        step_of(job, rows, device.platform, cuts),
        whole=needs_whole_block(job.reached, job.layers),
    )
    peak = peak_flops(device, job.recipe.compute_dtype)
    known = {"flops_per_token": work.flops / work.tokens}
    return {**known, "peak_flops": peak} if peak else known


def _memory_metrics() -> Mapping[str, float]:
    found: dict[str, float] = {}
    for device in local_devices():
        used = None
        with suppress(RuntimeError):  # an array may be deleted while it is looked at
            used = memory_used(device)
        found |= memory_counts(device.id, used, memory_limit(device))
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _made_by(device: Any, cost: Estimate) -> dict[str, Any]:
    """Provenance kept in every done record."""
    return {
        "spile": spile.__version__,
        "jax": jax.__version__,
        "device": device.device_kind,
        "mesh": cost.mesh,
        "processes": process_count(),
        "batch_rows": cost.batch_rows,
        "host": socket.gethostname(),
        "machine": host_platform.machine(),
    }

"""One dataset from start to finish: by this process, or with others it is joined to."""

import logging
import os
import platform as host_platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import spile
from spile.background import mapped
from spile.config import Recipe, Runtime, flag_of
from spile.data.pack import Batch, PackedUnit
from spile.data.tokens import use_threads
from spile.engine.budget import Budget
from spile.engine.calibrate import channel_scales
from spile.engine.devices import memory_limit, memory_used, prepared_device
from spile.engine.estimate import (
    Estimate,
    estimate,
    planned_cuts,
    refuse_if_too_large,
    row_quantum,
)
from spile.engine.place import find_place
from spile.engine.resolve import Job, resolve, store_table
from spile.engine.step import Step
from spile.engine.worker import Worker
from spile.engine.world import Alone, compare, join
from spile.errors import ConfigError, InputError, Interrupted
from spile.layout import ONE_DEVICE, Cuts
from spile.metrics import Counters
from spile.models.decoder import needs_whole_block
from spile.models.params import Schedule
from spile.models.specs import array_axes
from spile.models.weights import load_params
from spile.objects import Spool, check_creates_once, is_bucket, open_objects
from spile.sharding import Shards, make_mesh
from spile.store.ledger import Ledger, derive_manifest
from spile.store.presence import Presence

_log = logging.getLogger("spile")
_ECHO_SECONDS = 1.0  # within which a signal is the same one again


@dataclass(frozen=True)
class Outcome:
    """What a finished run made."""

    rows: int
    tokens: int
    documents: int
    bytes: int
    units: int  # that are done
    units_total: int
    skipped: dict[str, int]
    estimate: Estimate

    @property
    def complete(self) -> bool:
        """All of it; less only where `--max-bytes` ended it."""
        return self.units == self.units_total


def extract(
    recipe: Recipe,
    out: str,
    runtime: Runtime | None = None,
    *,
    counters: Counters | None = None,
    on_start: Callable[[Job, Estimate], None] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Make the dataset, or continue it; returns when every unit is done, or `max_bytes` are.

    SIGINT, SIGTERM or setting `stop` ends it cleanly, with `Interrupted`. Where processes are
    joined (`engine/place.py`) each of them calls this, and what one fails with all of them raise.
    """
    runtime = runtime or Runtime()
    place = find_place(runtime, os.environ)
    with (
        _stop_on_signal(stop or threading.Event()) as stop,
        closing(Spool(Path(runtime.spool))) if runtime.spool else nullcontext() as spool,
    ):
        ledger = Ledger(open_objects(str(out), spool))
        presence = Presence(ledger.objects, runtime.stale_after)
        world = Alone()
        if place:
            presence.tell(world={"coordinator": place.coordinator, "process": place.process})
            presence.start()  # before joining: should that fail, it says who had come
            world = join(place, runtime, stop)
        try:
            run = _Run(ledger, runtime, world, presence, counters or Counters(), stop)
            outcome = run.extract(recipe, on_start)
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
class _Run:
    ledger: Ledger
    runtime: Runtime
    world: Alone
    presence: Presence
    counters: Counters
    stop: threading.Event

    def extract(self, recipe: Recipe, on_start: Callable[[Job, Estimate], None] | None) -> Outcome:
        runtime, world, ledger = self.runtime, self.world, self.ledger
        use_threads(runtime.threads or max(1, (os.cpu_count() or 1) - 1))
        device = prepared_device()
        compare(world, _started_with(recipe, runtime, ledger, device))
        if not world.leads:
            world.share("table", True)  # what the leader has settled is read from the store
        job = resolve(recipe, ledger, device.platform, heed=self._heed)
        cuts = self._cuts(job, device)
        cost = estimate(
            job,
            runtime,
            device.platform,
            done=ledger.done_units(),
            free_bytes=ledger.objects.free_bytes(),
            memory=memory_limit(device),
            cuts=cuts,
            processes=world.processes,
            out=ledger.objects,
        )
        if not runtime.ignore_space:
            refuse_if_too_large(cost, ledger.objects.url)
        self._heed()
        if world.leads and is_bucket(ledger.objects.url) and ledger.read_table() is None:
            check_creates_once(ledger.objects)
        job = store_table(job, ledger)
        world.share("table", True)
        if on_start:
            on_start(job, cost)
        if not world.share("complete", ledger.complete(job.table)):
            self._work(job, cost, cuts, device)
            if world.leads:
                ledger.complete(job.table)
            world.share("committed", True)
        return _outcome(ledger, job, cost, self.runtime)

    def _work(self, job: Job, cost: Estimate, cuts: Cuts, device: Any) -> None:
        batches = partial(
            PackedUnit.batches,
            rows=cost.batch_rows,
            # A unit's last step may be smaller; on a CPU compiling it would take longer.
            fewest=cost.batch_rows if device.platform == "cpu" else max(1, cost.batch_rows // 8),
            parts=self.world.processes,
            quantum=row_quantum(cuts.layout, self.world.processes),
        )
        before = memory_used(device)
        step = load_step(job, self.ledger, device, batches, cuts, self.world)
        if jax.device_count() > 1:
            loaded = memory_used(device)
            _log.info("each device: %.2f GB in use before loading, %.2f GB after, of %s",
                      before / 1e9, loaded / 1e9, _gigabytes(memory_limit(device)))  # fmt: skip
        self._heed()
        self.presence.start()
        worker = Worker(
            job,
            self.ledger,
            step,
            self.runtime,
            batches=batches,
            made_by=_made_by(device, cost),
            presence=self.presence,
            world=self.world,
            counters=self.counters,
            budget=Budget(job, self.ledger, self.runtime.max_bytes),
            stop=self.stop,
        )
        worker.run()

    def _cuts(self, job: Job, device: Any) -> Cuts:
        runtime, world = self.runtime, self.world
        devices, limit = jax.device_count(), memory_limit(device)
        cuts = planned_cuts(job, runtime, device.platform, devices, limit, world.processes)
        if devices > 1:
            _log.info("%d devices (%s), mesh %s", devices, device.device_kind, cuts.layout)
        return cuts

    def _heed(self) -> None:
        if self.stop.is_set():
            raise Interrupted


def load_step(
    job: Job,
    ledger: Ledger,
    device: Any,
    batches: Callable[[PackedUnit], Iterator[Batch]],
    cuts: Cuts = ONE_DEVICE,
    world: Alone | None = None,
) -> Step:
    """The model on the devices, ready to run a job's batches."""
    world = world or Alone()
    arch = job.checkpoint.arch
    shards = None
    if cuts.layout.size > 1:
        shards = Shards(make_mesh(cuts.layout, jax.devices()), cuts, array_axes(arch))
    whole = needs_whole_block(job.taps, job.layers)
    schedule = Schedule.of(arch, job.layers, whole=whole)
    params, digests = load_params(
        job.checkpoint,
        schedule,
        head=job.needs_head,
        dtype=jnp.dtype(job.recipe.compute_dtype),
        shards=shards,
        hashed=(world.process, world.processes),
    )
    shares = world.gather("weights", digests)
    if shares is not None:
        ledger.check_weights({name: digest for share in shares for name, digest in share.items()})
    world.share("weights", True)
    compute_dtype, store_dtype = job.recipe.compute_dtype, job.recipe.store_dtype
    make = partial(
        Step, params, arch, job.taps, schedule,
        compute_dtype=compute_dtype, device=device, shards=shards,
    )  # fmt: skip
    scales = None
    if store_dtype == "int8":
        measuring = make(store_dtype=compute_dtype)
        scales = channel_scales(job, ledger, measuring, batches, world)
    return make(store_dtype=store_dtype, scales=scales)


def _outcome(ledger: Ledger, job: Job, cost: Estimate, runtime: Runtime) -> Outcome:
    manifest = ledger.read_manifest()
    if manifest is None:  # (the budget is spent)
        found = mapped(ledger.read_done, sorted(ledger.done_units()), ledger.objects.parallel)
        manifest = derive_manifest(job.table, (done for done in found if done is not None))
    if not manifest["units"]:
        raise ConfigError(
            f"--max-bytes {runtime.max_bytes}: not one unit is as small as that; choose more, or "
            "a smaller --unit-tokens and another --out"
        )
    if manifest["tokens"] and not manifest["rows"]:
        raise InputError(
            f"--where {ledger.table().recipe.where!r} keeps none of the corpus's "
            f"{manifest['tokens']:,} tokens; choose another, and another --out"
        )
    if not manifest["rows"]:
        reasons = ", ".join(f"{n} {reason}" for reason, n in manifest["skipped"].items())
        raise InputError(f"the corpus holds no usable document ({reasons})")
    return Outcome(
        rows=manifest["rows"],
        tokens=manifest["tokens"],
        documents=manifest["documents"],
        bytes=manifest["bytes"],
        units=len(manifest["units"]),
        units_total=len(job.units),
        skipped=manifest["skipped"],
        estimate=cost,
    )


def _started_with(recipe: Recipe, runtime: Runtime, ledger: Ledger, device: Any) -> dict[str, Any]:
    """What must be the same in every process of a world."""
    own = ("process_id", "bind_address", "threads", "write_threads", "coordinator", "spool")
    flags = {**asdict(recipe), **asdict(runtime), "out": ledger.objects.url}
    return {
        # (First: another version may have other flags.)
        "spile": spile.__version__,
        "jax": jax.__version__,
        "libtpu": _version("libtpu"),
        **{flag_of(name): value for name, value in flags.items() if name not in own},
        "platform": device.platform,
        "device kind": device.device_kind,
        "number of local devices": jax.local_device_count(),
    }


def _gigabytes(size: int | None) -> str:
    return "an unknown total" if size is None else f"{size / 1e9:.2f} GB"


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
        "processes": jax.process_count(),
        "batch_rows": cost.batch_rows,
        "host": socket.gethostname(),
        "machine": host_platform.machine(),
    }


@contextmanager
def _stop_on_signal(stop: threading.Event) -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask the run to stop; a second one no longer waits for units in hand.

    (Not one that comes at once: a launcher may signal this process and its parent, which passes
    it on.)

    They set a flag and raise nothing: an exception raised by a handler may land in a callback
    of some library, which swallows it.
    """
    previous: dict[int, Any] = {}
    first: dict[int, float] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        if time.monotonic() - first.setdefault(number, time.monotonic()) < _ECHO_SECONDS:
            return
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

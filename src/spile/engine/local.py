"""The local engine: this process, its devices, one dataset from start to finish."""

import os
import platform as host_platform
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import spile
from spile.config import Recipe, Runtime
from spile.data.tokens import use_threads
from spile.engine.estimate import Estimate, batch_rows, estimate, refuse_if_too_large
from spile.engine.resolve import Job, resolve, store_table
from spile.engine.step import Step
from spile.engine.worker import Worker
from spile.errors import InputError, Interrupted
from spile.metrics import Counters
from spile.models.decoder import needs_whole_block
from spile.models.params import Schedule
from spile.models.weights import load_params
from spile.objects import open_objects
from spile.store.ledger import Ledger


@dataclass(frozen=True)
class Outcome:
    """What a finished run made."""

    rows: int
    tokens: int
    documents: int
    bytes: int
    units: int
    skipped: dict[str, int]
    estimate: Estimate


def extract(
    recipe: Recipe,
    out: str,
    runtime: Runtime | None = None,
    *,
    counters: Counters | None = None,
    on_start: Callable[[Job, Estimate], None] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Make the dataset, or continue it; returns when every unit is done.

    SIGINT, SIGTERM or setting `stop` ends it cleanly, with `Interrupted`.
    """
    with _stop_on_signal(stop or threading.Event()) as stop:
        return _extract(recipe, out, runtime or Runtime(), counters or Counters(), on_start, stop)


def _extract(
    recipe: Recipe,
    out: str,
    runtime: Runtime,
    counters: Counters,
    on_start: Callable[[Job, Estimate], None] | None,
    stop: threading.Event,
) -> Outcome:
    use_threads(runtime.threads or max(1, (os.cpu_count() or 1) - 1))
    device = jax.devices()[0]
    ledger = Ledger(open_objects(str(out)))
    job = resolve(recipe, ledger, device.platform, heed=lambda: _heed(stop))
    objects = ledger.objects
    cost = estimate(
        job, runtime, device.platform, done=ledger.done_units(), free_bytes=objects.free_bytes()
    )
    if not runtime.ignore_space:
        refuse_if_too_large(cost, objects.url)
    _heed(stop)
    job = store_table(job, ledger)
    if on_start:
        on_start(job, cost)
    if not ledger.complete(job.table):
        rows = batch_rows(job, runtime, device.platform)
        step = _load_step(job, ledger, device.platform)
        _heed(stop)
        worker = Worker(
            job,
            ledger,
            step,
            runtime,
            batch_rows=rows,
            made_by=_made_by(device, rows),
            counters=counters,
            stop=stop,
        )
        worker.run()
        ledger.complete(job.table)
    return _outcome(ledger, cost)


def _load_step(job: Job, ledger: Ledger, platform: str) -> Step:
    whole = needs_whole_block(job.taps, job.layers)
    schedule = Schedule.of(job.checkpoint.arch, job.layers, whole=whole)
    params, digests = load_params(
        job.checkpoint,
        schedule,
        head=job.needs_head,
        dtype=jnp.dtype(job.recipe.compute_dtype),
    )
    ledger.check_weights(digests)
    return Step(
        params,
        job.checkpoint.arch,
        job.taps,
        schedule,
        compute_dtype=job.recipe.compute_dtype,
        store_dtype=job.recipe.store_dtype,
        platform=platform,
    )


def _outcome(ledger: Ledger, cost: Estimate) -> Outcome:
    manifest = ledger.read_manifest()
    assert manifest is not None
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
        skipped=manifest["skipped"],
        estimate=cost,
    )


def _made_by(device: Any, rows: int) -> dict[str, Any]:
    """Provenance kept in every done record."""
    return {
        "spile": spile.__version__,
        "jax": jax.__version__,
        "device": device.device_kind,
        "mesh": "1",
        "batch_rows": rows,
        "host": socket.gethostname(),
        "machine": host_platform.machine(),
    }


def _heed(stop: threading.Event) -> None:
    if stop.is_set():
        raise Interrupted


@contextmanager
def _stop_on_signal(stop: threading.Event) -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask the run to stop; a second one no longer waits for units in hand.

    They set a flag and raise nothing: an exception raised by a handler may land in a callback
    of some library, which swallows it.
    """
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT
                      else signal.SIG_DFL)  # fmt: skip

    if threading.current_thread() is threading.main_thread():
        previous = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

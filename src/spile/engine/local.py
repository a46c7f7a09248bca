"""The local engine: this process, its devices, one dataset from start to finish."""

import os
import platform as host_platform
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import spile
from spile.config import Recipe, Runtime
from spile.data.tokens import use_threads
from spile.engine.calibrate import channel_scales
from spile.engine.estimate import Estimate, estimate, refuse_if_too_large
from spile.engine.resolve import Job, resolve, store_table
from spile.engine.step import Step
from spile.engine.worker import Worker
from spile.errors import InputError, Interrupted
from spile.metrics import Counters
from spile.models.decoder import needs_whole_block
from spile.models.demo import cache_directory
from spile.models.params import Schedule
from spile.models.weights import load_params
from spile.objects import open_objects
from spile.store.ledger import Ledger

# Measured at 7B shapes on an H200 (docs/benchmarks.md): cuBLAS is 3% faster than XLA's own
# matrix products, and compiles sooner.
_XLA_FLAGS = ("--xla_gpu_enable_triton_gemm=false",)


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
    device = prepared_device()
    ledger = Ledger(open_objects(str(out)))
    job = resolve(recipe, ledger, device.platform, heed=lambda: _heed(stop))
    objects = ledger.objects
    cost = estimate(
        job,
        runtime,
        device.platform,
        done=ledger.done_units(),
        free_bytes=objects.free_bytes(),
        memory=(device.memory_stats() or {}).get("bytes_limit"),
    )
    if not runtime.ignore_space:
        refuse_if_too_large(cost, objects.url)
    _heed(stop)
    job = store_table(job, ledger)
    if on_start:
        on_start(job, cost)
    if not ledger.complete(job.table):
        rows = cost.batch_rows
        step = load_step(job, ledger, device, rows)
        _heed(stop)
        worker = Worker(
            job,
            ledger,
            step,
            runtime,
            batch_rows=rows,
            # A unit's last step may be smaller; on a CPU compiling it would take longer.
            fewest_rows=rows if device.platform == "cpu" else max(1, rows // 8),
            made_by=_made_by(device, rows),
            counters=counters,
            stop=stop,
        )
        worker.run()
        ledger.complete(job.table)
    return _outcome(ledger, cost)


def load_step(job: Job, ledger: Ledger, device: Any, batch_rows: int) -> Step:
    """The model on the device, ready to run a job's batches."""
    whole = needs_whole_block(job.taps, job.layers)
    schedule = Schedule.of(job.checkpoint.arch, job.layers, whole=whole)
    params, digests = load_params(
        job.checkpoint,
        schedule,
        head=job.needs_head,
        dtype=jnp.dtype(job.recipe.compute_dtype),
    )
    ledger.check_weights(digests)
    compute_dtype, store_dtype = job.recipe.compute_dtype, job.recipe.store_dtype
    make = partial(
        Step, params, job.checkpoint.arch, job.taps, schedule,
        compute_dtype=compute_dtype, device=device,
    )  # fmt: skip
    scales = None
    if store_dtype == "int8":
        scales = channel_scales(job, ledger, make(store_dtype=compute_dtype), batch_rows)
    return make(store_dtype=store_dtype, scales=scales)


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


def prepared_device() -> Any:
    """This process's device, with what makes its steps faster unless the user said otherwise."""
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = [flag for flag in _XLA_FLAGS if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *chosen]).strip()
    device = jax.devices()[0]
    # (The CPU compiler ties what it caches to the very machine, and compiles fast anyway.)
    if device.platform != "cpu" and not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
    return device


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

"""What a run reports beside its counters: arithmetic against the chip's peak, memory, requests."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp

from spile.core.config import Runtime
from spile.metrics import Counters, Reporter, Run, open_backends, parse_backends
from spile.models.forward.decoder import needs_whole_block
from spile.models.layout import Cuts
from spile.objects.protocol import COUNTED
from spile.plan.chips import chip_of
from spile.plan.estimate import Estimate, step_of
from spile.plan.resolve import Job
from spile.run.devices import memory_limit, memory_used
from spile.run.world import Alone

_NAMELESS = ("", ".", "..")


def reporter(
    job: Job,
    runtime: Runtime,
    cost: Estimate,
    cuts: Cuts,
    device: Any,
    *,
    counters: Counters,
    world: Alone,
    out: str,
    worker: str | None,
) -> Reporter:
    """What reports this process's metrics, if it is to.

    Args:
        worker: which of several that report to one place, should their shares not say so.
    """
    every = float(runtime.metrics_every)
    if not runtime.metrics or not (world.leads or runtime.metrics_from == "all"):
        return Reporter({}, counters, every)
    which = [worker] if worker else []
    which += [f"share-{runtime.share.replace('/', '-of-')}"] if runtime.share else []
    which += [f"process-{world.process}"] if world.processes > 1 else []
    last = out.rstrip("/").rpartition("/")[2]
    run = Run(
        name=runtime.run_name or ("spile" if last in _NAMELESS else last),
        worker="-".join(which),
        config={**job.recipe.to_json(), **asdict(runtime), "device": device.device_kind},
    )
    counters.set(**_arithmetic(job, cost, cuts, device))
    return Reporter(
        open_backends(parse_backends(runtime.metrics), run),
        counters,
        every,
        more=lambda: {**COUNTED.snapshot(), **_memory(device)},
        tokens_before=cost.tokens * cost.units_done // max(1, cost.units),
    )


def _arithmetic(job: Job, cost: Estimate, cuts: Cuts, device: Any) -> dict[str, float]:
    """What a token costs each device, and what the device can do at most."""
    rows = max(1, cost.batch_rows // cuts.layout.groups)
    work = replace(
        step_of(job, rows, device.platform, cuts),
        whole=needs_whole_block(job.taps, job.layers),
        every_pair=False,  # of what the model asks for, whatever a kernel does besides
    )
    peak = peak_flops(device, job.recipe.compute_dtype)
    return {"flops_per_token": work.flops / work.tokens, "peak_flops": peak} if peak else {}


def peak_flops(device: Any, dtype: str) -> float | None:
    """FLOP/s of one device: as its maker publishes it, or else as large products reach here.

    Devices that share one processor have none of their own.
    """
    chip = chip_of(device.device_kind)
    if chip and dtype == "bfloat16":
        return chip.peak
    if device.platform == "cpu" and jax.local_device_count() > 1:
        return None
    size = 1024 if device.platform == "cpu" else 8192
    precision = "highest" if dtype == "float32" else "default"
    ones = jax.device_put(jnp.ones((size, size), dtype), device)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    multiply(ones, ones).block_until_ready()  # compiled
    return 2 * size**3 / min(_seconds(multiply, ones) for _ in range(3))


def _seconds(multiply: Any, ones: jax.Array) -> float:
    begin = time.perf_counter()
    multiply(ones, ones).block_until_ready()
    return time.perf_counter() - begin


def _memory(device: Any) -> Mapping[str, float]:
    found: dict[str, float] = {}
    with suppress(RuntimeError):  # an array may go while it is looked at
        found["memory_used"] = memory_used(device)
    limit = memory_limit(device)
    return found | ({"memory_limit": limit} if limit else {})

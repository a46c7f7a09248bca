"""Spile and the limits it is compared with; bench/gpu.py starts each in its own process.

Each prints one JSON object: tokens a second, and where the time went.
"""

import argparse
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from material import SEQ_LEN, SHAPES

WARM_UP = 4  # steps


def limit(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the sustained rate of the model's matrix products alone, chained in a scan."""
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    import jax
    import jax.numpy as jnp

    width, mlp, layers, heads, kv_heads, _ = SHAPES[options.shape]
    kv = kv_heads * width // heads
    key = jax.random.key(0)

    def matrix(i: int, *shape: int) -> Any:
        values = jax.random.normal(jax.random.fold_in(key, i), (layers, *shape), jnp.bfloat16)
        return values * jnp.bfloat16(shape[-1] ** -0.5)

    sizes = ((width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width))
    weights = [jax.jit(matrix, static_argnums=range(3))(i, *s) for i, s in enumerate(sizes)]
    weights.append(jax.jit(matrix, static_argnums=range(3))(9, width, mlp))

    def block(x: Any, w: Any) -> Any:
        q, k, v, o, gate, up, down = w
        used = 0 * ((x @ k.T)[:, :1] + (x @ v.T)[:, :1])  # so that XLA drops no product
        x = x + (x @ q.T) @ o.T + used
        hidden = (x @ gate.T + x @ up.T) * jnp.bfloat16(0.05)
        return (x + hidden @ down.T) * jnp.bfloat16(0.6), None  # neither dies out nor grows

    run = jax.jit(lambda x, w: jax.lax.scan(block, x, w)[0])
    x = jax.random.normal(key, (options.step_tokens, width), jnp.bfloat16)
    run(x, weights).block_until_ready()
    count, begin, last = 0, time.perf_counter(), None
    while time.perf_counter() - begin < options.seconds:
        ahead = run(x, weights)
        if last is not None:
            last.block_until_ready()
        last, count = ahead, count + 1
    jax.block_until_ready(last)
    return {"tok/s": count * options.step_tokens / (time.perf_counter() - begin)}


def sink(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the write rate of a directory: four threads, large writes, both ways."""
    size, total = 32 << 20, int(options.sink_bytes)
    Path(options.out).mkdir(parents=True)

    def write(number: int, flags: int) -> int:
        buffer = mmap.mmap(-1, size)
        buffer.write(np.random.default_rng(number).bytes(size))
        path = f"{options.out}/{number}"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | flags, 0o644)
        for _ in range(max(1, total // 4 // size)):
            assert os.write(descriptor, buffer) == size
        os.fsync(descriptor)
        os.close(descriptor)
        return os.stat(path).st_size

    rates: list[float] = []
    for flags in (0, os.O_DIRECT):
        begin = time.perf_counter()
        try:
            with ThreadPoolExecutor(4) as pool:
                written = sum(pool.map(lambda n, f=flags: write(n, f), range(4)))
        except OSError:
            continue
        rates.append(written / (time.perf_counter() - begin))
    return {"GB/s": max(rates) / 1e9}


def recipe_of(options: argparse.Namespace) -> Any:
    import spile

    return spile.Recipe(
        model=options.model, corpus=options.corpus, taps=options.tapped, seq_len=SEQ_LEN,
        unit_tokens=options.unit_tokens, store_dtype=options.store_dtype,
        max_docs=options.max_docs, compute_dtype=options.compute_dtype,
    )  # fmt: skip


def compute(options: argparse.Namespace) -> dict[str, Any]:
    """Measure Spile's step on batches of the corpus; nothing leaves the device."""
    import jax

    from spile.core.config import Runtime
    from spile.dataset.records.heartbeat import Presence
    from spile.dataset.records.ledger import Ledger
    from spile.metrics import Counters
    from spile.objects import open_objects
    from spile.plan.job import prepare_unit
    from spile.run.assembly import Assembly
    from spile.run.world.devices import prepared_device
    from spile.run.world.world import RunContext, SingleWorld

    runtime = Runtime(batch_tokens=options.batch_tokens, weights="resident")
    ledger = Ledger(open_objects(options.out))
    presence = Presence(ledger.objects, runtime.stale_after)
    context = RunContext(ledger, runtime, SingleWorld(), presence, Counters())
    parts = Assembly.of(context, recipe_of(options), prepared_device())
    job, rows = parts.job, parts.cost.batch_rows
    stored = sum(path.stat().st_size for path in Path(options.model).glob("*.safetensors"))
    begin = time.perf_counter()
    step = parts.load()
    step.loaded(3600.0)
    loaded = time.perf_counter() - begin
    begin = time.perf_counter()
    unit = job.units[0]
    packed = prepare_unit(job, job.reader(), unit, with_table=False).packed
    prepared = packed.num_tokens / (time.perf_counter() - begin)
    batches = list(packed.batches(rows))
    batches = batches[:-1] or batches  # the last is mostly padding
    for batch in batches:
        jax.block_until_ready(step.compute(batch))
    done, number, last, begin = 0, 0, None, time.perf_counter()
    while time.perf_counter() - begin < options.seconds:
        batch = batches[number % len(batches)]
        ahead = step.compute(batch)
        if last is not None:
            jax.block_until_ready(last)
        last, number, done = ahead, number + 1, done + int(batch.lengths.sum())
    jax.block_until_ready(last)
    rate = done / (time.perf_counter() - begin)
    with traced(options) as directory:
        for batch in batches[:4] if directory else []:
            jax.block_until_ready(step.compute(batch))
    profile = read_profile(directory, options.profile) if directory else {}
    return {
        "tok/s": rate,
        "profile": profile,
        "load GB/s": stored / loaded / 1e9,
        "text tok/s": prepared,
        "step": rows * SEQ_LEN,
    }


def spile(options: argparse.Namespace) -> dict[str, Any]:
    """Time `spile.extract` from the first written rows to the last durable file.

    When the clock starts, some steps may be computed but not yet written (if the sink is slower).
    So tokens are counted when they are computed, and bytes when they are written.

    With a profile, the time is not comparable. Another run comes first then: a trace that began
    before the device's first work, or during its work, was empty, crashed or hung.
    """
    import spile as package
    from spile.metrics import Counters

    counters, processor = Counters(), time.process_time
    seen: list[tuple[float, float, dict[str, float]]] = []
    spans = ("device_busy", "device_idle", "waited_for_text", "waited_for_writing")
    spans = (*spans, "waited_for_weights")
    stages = ("picking", "reading", "tokenizing", "packing", "compiling")
    names = ("tokens", "computed", "bytes", *spans, *stages)

    warm = WARM_UP * options.step_tokens
    # (A list of places is for gpu.py alone.)
    where = options.weights if "," not in options.weights else "auto"
    runtime = package.Runtime(batch_tokens=options.batch_tokens, weights=where)
    if options.profile:
        few = argparse.Namespace(**{**vars(options), "max_docs": 2 * WARM_UP})
        package.extract(recipe_of(few), f"{options.out}-few", runtime)
        shutil.rmtree(f"{options.out}-few")
    with ThreadPoolExecutor(1) as pool, traced(options) as profile:
        work = pool.submit(
            package.extract, recipe_of(options), options.out, runtime, counters=counters
        )
        while not work.done():
            seen.append((time.perf_counter(), processor(), {n: counters[n] for n in names}))
            wait([work], 0.02)
        end = time.perf_counter()
        work.result()
    # Loading, compiling and the first steps are warm-up, as they are for everyone.
    start, used, before = next(each for each in seen if each[2]["tokens"] >= warm)
    spent = {name: counters[name] - before[name] for name in names}
    shares = {name: round(spent[name] / (end - start), 4) for name in spans}
    result: dict[str, Any] = {"tok/s": spent["computed"] / (end - start), "shares": shares}
    result["GB/s"] = spent["bytes"] / (end - start) / 1e9
    result["cores"] = round((processor() - used) / (end - start), 2)  # used, on average
    # Long waits and when they ended: this distinguishes one wait from many.
    for name in ("device_idle", "waited_for_text", *stages):
        pairs = zip(seen, seen[1:], strict=False)
        long = [(now[0] - start, now[2][name] - last[2][name]) for last, now in pairs]
        result.setdefault("long", {})[name] = [
            f"{took:.1f} s at {at:.1f}" for at, took in long if took >= 0.1
        ]
    if profile:
        result["profile"] = read_profile(profile, options.profile)
    return result


@contextmanager
def traced(options: argparse.Namespace) -> Generator[Path | None]:
    """Trace the device inside the context; the trace is kept beside the results."""
    if not options.profile:
        yield None
        return
    import jax

    directory = Path(options.results or options.work).with_suffix(f".{options.shape}.profile")
    chosen = jax.profiler.ProfileOptions()
    chosen.python_tracer_level = chosen.host_tracer_level = 0  # they would slow down the host
    jax.profiler.start_trace(directory, profiler_options=chosen)
    try:
        yield directory
    finally:
        jax.profiler.stop_trace()


KINDS = {
    "gemm": ("gemm", "nvjet", "cutlass", "grouped_product"),  # the last: experts
    "attention": ("cudnn", "flash", "fmha", "sdpa", "attention"),
}


def kernels_of(directory: Path) -> list[tuple[float, float, str, str]]:
    """Begin, end, kind and name of every kernel of a trace, in nanoseconds."""
    from jax.profiler import ProfileData

    path = max(directory.glob("**/*.xplane.pb"), key=lambda found: found.stat().st_mtime)
    found: list[tuple[float, float, str, str]] = []
    for plane in ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            for event in line.events if line.name.startswith("Stream") else ():
                lower = event.name.lower()
                if lower.startswith(("memcpy", "memset")):
                    continue  # not a kernel, or idle time
                kind = next((k for k, words in KINDS.items() if any(w in lower for w in words)),
                            "everything else")  # fmt: skip
                end = event.start_ns + event.duration_ns
                found.append((event.start_ns, end, kind, event.name))
    return sorted(found)


def read_profile(directory: Path, seconds: float) -> dict[str, Any]:
    """Return the share of the last seconds without a kernel, and the shares of each kind."""
    found = kernels_of(directory)
    if not found:
        return {"seconds": 0.0}
    end = max(stop for _, stop, kind, _ in found if kind == "gemm")
    found = [each for each in found if end - seconds * 1e9 <= each[0] < end]
    busy, reached, spent = 0.0, found[0][0], dict.fromkeys((*KINDS, "everything else"), 0.0)
    for begin, stop, kind, _ in found:
        spent[kind] += stop - begin
        busy += max(0.0, stop - max(begin, reached))
        reached = max(reached, stop)
    span = reached - found[0][0]
    return {"seconds": span / 1e9, "idle": 1 - busy / span,
            **{kind: value / span for kind, value in sorted(spent.items())}}  # fmt: skip


CONTESTANTS = {f.__name__: f for f in (limit, sink, compute, spile)}

if __name__ == "__main__":
    print(json.dumps(CONTESTANTS[sys.argv[1]](argparse.Namespace(**json.loads(sys.argv[2])))))

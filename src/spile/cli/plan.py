"""The verb that estimates the cost of a run before it starts."""

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.cli.extract import COMMON_FLAGS, add_recipe_flags, given
from spile.cli.flags import Verbs, taps_help
from spile.core.config import Recipe, Runtime, build
from spile.core.errors import ConfigError
from spile.core.humanize import lasting, plural, size
from spile.core.options import listed
from spile.core.pool import is_reduced
from spile.models.config.kernel_choice import (
    NO_BACKWARD,
    KernelChoice,
    attention_kernels,
    recurrence_kernel,
    told_kernels,
    told_recurrence,
    unfit_gpu,
)
from spile.objects import check_creates_once, is_bucket, open_objects

if TYPE_CHECKING:
    from spile.compile.step import Compiled
    from spile.compile.targets import CompileTarget
    from spile.models.layout import Cuts
    from spile.objects import Objects
    from spile.plan.estimate import Estimate
    from spile.plan.job import ExtractionJob
    from spile.run.rehearsal import Rehearsal

_log = logging.getLogger("spile.cli")
_CALIBRATE = 5.0  # seconds
_NAMES = 32  # characters: the first column's width


@dataclass(frozen=True)
class Duration:
    """The time that one slice takes, in seconds; rates are tokens per second."""

    on: str
    measured: bool
    rate: float | None  # None: unknown, and `why` has the reason
    seconds: float | None = None
    starting: float | None = None  # part of `seconds`: until the first step
    compiling: float | None = None  # in total: later units may have other shapes
    processor: float | None = None  # CPU seconds of all cores, for the steps alone
    dollars: float | None = None
    why: str | None = None


def add_plan(verbs: Verbs) -> None:
    help = "what extract would cost: tokens, bytes, memory, time, dollars"
    usage = "spile plan --model X --corpus X --taps X [--out DIR] [more flags]"
    own = ("calibrate", "exact", "topology", "prices")
    common = (*COMMON_FLAGS, *own)
    sub = verbs.add("plan", plan, help, usage=usage, epilog=taps_help(), common=common)
    add_recipe_flags(sub)
    sub.add(
        "--calibrate",
        "seconds to run for, to measure the speed; the rows are then deleted; or off [5]",
        "SECONDS",
    )
    sub.switch(
        "--exact", "read the whole corpus to count every token and byte [read for 5 seconds]"
    )
    sub.add(
        "--topology",
        "time and cost on other chips, e.g. v5e-64, h200-8, as `spile compile` estimates them",
        "X",
    )
    sub.add(
        "--prices",
        "the bucket's prices in dollars: 1 GiB a month, 1,000 writes or listings, 1,000 "
        "reads [public list prices, e.g. 0.023,0.005,0.0004]",
        "S,W,R",
    )


def plan(arguments: argparse.Namespace) -> None:
    from spile.corpus.tokenize import use_threads
    from spile.dataset.records.ledger import Ledger
    from spile.models.layout import devices_of
    from spile.plan.chips import chip_of
    from spile.plan.estimate import (
        estimate,
        measure_throughput,
        planned_cuts,
        refuse_if_too_large,
    )
    from spile.plan.passes import opened_for
    from spile.plan.prices import price_of
    from spile.plan.residency import Machine
    from spile.plan.resolve import resolve
    from spile.plan.survey import survey
    from spile.run.pipeline.display import waiting

    options = given(arguments)
    recipe, runtime = build(options)
    seconds = _seconds(arguments.calibrate)
    price = price_of(options.get("out", "."), arguments.prices)
    recipe, ledger = opened_for(recipe, Ledger(open_objects(options.get("out", "."))))
    target = _target(arguments.topology)
    platform, present, kind = _platform(target)
    capability = _capability(target, platform)
    use_threads(runtime.threads)
    quiet = arguments.json or arguments.quiet
    with waiting("reading the model and the corpus", quiet=quiet):
        job = resolve(recipe, ledger, platform, capability=capability, cache=runtime.cache)
    devices = devices_of(runtime.mesh) or present
    processes = runtime.num_processes or (target.hosts if target else 1)
    memory = target.memory if target else _memory(platform)
    cuts = planned_cuts(job, runtime, platform, devices, memory, processes)
    machine = Machine(platform, memory, chip_of(kind), processes, cuts)
    objects = ledger.objects
    if is_bucket(objects.url):
        check_creates_once(objects)
    elif runtime.spool:
        raise ConfigError(f"--spool is for buckets; {objects.url} needs none")
    with waiting("reading the corpus", quiet=quiet):
        found = survey(job, ledger, runtime, processes=processes, exact=arguments.exact)
    cost = estimate(
        job,
        runtime,
        machine,
        done=ledger.done_units(),
        free_bytes=objects.free_bytes(),
        out=objects,
        found=found,
        price=price,
    )
    kernels = _kernels(job, runtime, platform, capability, here=target is None)
    arch, dtype = job.checkpoint.arch, job.recipe.compute_dtype
    recurrence = recurrence_kernel(platform, arch, dtype, capability, wanted=runtime.attention)
    if not arguments.json:
        _print_rows(
            [
                *counted_rows(job.recipe.to_json(), cost),
                attention_row(kernels),
                *recurrence_rows(recurrence),
            ]
        )
    pace = measure_throughput(job, runtime, machine)
    if not arguments.json:
        _print_rows(pace.rows())
    with waiting("compiling" if target else "compiling and measuring a step", quiet=quiet):
        if target:
            time = _elsewhere(job, runtime, target, cost)
        else:
            fits = devices == present and processes == 1
            time = _here(job, runtime, cost, cuts, seconds if fits else 0.0, objects)
    if arguments.json:
        told = {**dataclasses.asdict(cost), "total_bytes": cost.total_bytes}
        told |= {**dataclasses.asdict(pace), "cores_needed": pace.cores_needed}
        names = dict.fromkeys(choice.name for choice in kernels.values())
        against = {n: why for choice in kernels.values() for n, why in choice.passed_over.items()}
        told |= {"attention": ", ".join(names) or None, "attention_passed_over": against}
        told |= {"recurrence": recurrence and recurrence.name}
        print(json.dumps({**told, "time": dataclasses.asdict(time)}))
    else:
        _print_rows(_timed(time))
        for warning in cost.warnings:
            print(f"note: {warning}")
    if not runtime.ignore_space:
        refuse_if_too_large(cost, objects.url)


def _seconds(given: str | None) -> float:
    if given is None or given == "off":
        return 0.0 if given else _CALIBRATE
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise ConfigError(f"--calibrate must be seconds such as 5, or off; got {given!r}")
    return seconds


def _platform(target: "CompileTarget | None") -> tuple[str, int, str]:
    """Return the platform, number and jax name of the devices that a run would use."""
    if target:
        kind = target.chip.kind if target.chip else "cpu"
        return target.platform, len(target.devices), kind
    try:
        from spile.run.world.devices import devices_here
    except ImportError:  # a plan works without jax
        return "cpu", 1, "cpu"
    return devices_here()


def _capability(target: "CompileTarget | None", platform: str) -> float:
    """Return the compute capability of the GPUs that a run would use; 0 for other devices."""
    if target:
        return target.chip.capability if target.chip else 0.0
    if platform != "gpu":
        return 0.0
    from spile.models.forward.ops import gpu_capability

    return gpu_capability()


def _memory(platform: str) -> int | None:
    """Return the memory of a device, if the device reports it."""
    if platform == "cpu":
        return None
    from spile.run.world.devices import memory_limit, prepared_device

    return memory_limit(prepared_device())


def _kernels(
    job: "ExtractionJob", runtime: Runtime, platform: str, capability: float, *, here: bool
) -> dict[int, KernelChoice]:
    """Return the attention kernels of a run. Other machines have all that their GPUs can run."""
    missing: Mapping[str, str] = unfit_gpu(capability) if platform == "gpu" else {}
    if here and platform == "gpu":
        from spile.models.forward.kernels.attention import missing_kernels

        missing = missing_kernels()
    if job.objective:
        missing = {**missing, **NO_BACKWARD}
    recipe, arch = job.recipe, job.checkpoint.arch
    return attention_kernels(
        *(platform, arch, recipe.compute_dtype, recipe.seq_len),
        missing=missing,
        wanted=runtime.attention,
    )


def _here(
    job: "ExtractionJob",
    runtime: Runtime,
    cost: "Estimate",
    cuts: "Cuts",
    seconds: float,
    out: "Objects",
) -> Duration:
    if not seconds:
        return unknown("here", "not measured: --calibrate is off, or other devices are meant")
    if not cost.remaining_tokens:
        return unknown("here", "every unit is done")
    try:
        from spile.run.rehearsal import rehearse, why_not
    except ImportError:
        return unknown("here", "not measured: jax is not installed here")
    reason = why_not(job, cost)
    if reason:
        return unknown("here", f"not measured: {reason}")
    _log.info("compiling a step and running it for about %g s, to measure the time", seconds)
    near = Path(out.url) if out.free_bytes() is not None else None
    found = rehearse(job, runtime, cost, cuts, seconds, near)
    return measured(found, cost) if found else unknown("here", "not measured: too few steps")


def measured(found: "Rehearsal", cost: "Estimate") -> Duration:
    """Return the time for the remaining tokens, from a rehearsal."""
    left = cost.remaining_tokens
    return Duration(
        on="here",
        measured=True,
        rate=found.rate,
        seconds=found.starting + left / found.rate if left else 0.0,
        starting=found.starting,
        compiling=found.compiling,
        processor=found.processor * left,
    )


def unknown(on: str, why: str) -> Duration:
    return Duration(on=on, measured=False, rate=None, why=why)


def _target(topology: str | None) -> "CompileTarget | None":
    if topology is None:
        return None
    from spile.compile.targets import find_target

    return find_target(topology, None)


def _elsewhere(
    job: "ExtractionJob", runtime: Runtime, target: "CompileTarget", cost: "Estimate"
) -> Duration:
    from spile.compile.step import Question, compile_step

    asked = job.recipe
    recipe = Recipe(
        model=asked.model_source,
        taps=",".join(asked.taps),
        seq_len=asked.seq_len,
        compute_dtype=asked.compute_dtype,
        store_dtype=asked.store_dtype,
    )
    arch = job.checkpoint.arch
    question = Question(arch, recipe, runtime, target, job.encoders, job.splices)
    return elsewhere(compile_step(question, question.layout()), cost)


def elsewhere(found: "Compiled", cost: "Estimate") -> Duration:
    """Return the time from a compiled step: the chips' limit, with kernels one after another."""
    if not found.fits or found.tokens_one_by_one is None:
        why = found.notes[-1] if found.fits else f"a step does not fit on {found.topology}"
        return Duration(on=found.topology, measured=False, rate=None, why=why)
    left = cost.remaining_tokens
    rate = found.tokens_one_by_one * (cost.packing or 1.0)
    at_best = found.tokens_per_second or rate
    dollars = found.dollars and found.dollars * at_best / rate * left / 1e9
    return Duration(
        on=found.topology, measured=False, rate=rate, seconds=left / rate, dollars=dollars
    )


def counted_rows(recipe: Mapping[str, Any], cost: "Estimate") -> list[tuple[str, str]]:
    """Return the rows that are known without running a step."""
    chosen = "float64" if is_reduced(recipe.get("pool")) else recipe["store_dtype"]
    return [
        ("documents", f"{cost.documents:,}"),
        ("tokens", _tokens(cost)),
        ("rows to keep", f"{cost.rows:,}"),
        ("units", f"{cost.units:,} ({cost.units_done:,} done)"),
        ("contexts of", f"{recipe['seq_len']:,} tokens, {cost.batch_rows} packed in a step"),
        *([("  of their places filled", f"{cost.packing:.1%}")] if cost.packing else []),
        ("arithmetic", f"{cost.flops / 1e12:,.2f} TFLOP"),
        *((f"  {tap}", size(b)) for tap, b in cost.bytes_per_tap.items()),
        ("  index", size(cost.index_bytes)),
        ("  headers, statistics, documents", size(cost.overhead_bytes)),
        *([("    columns kept of documents", _kept(recipe, cost))] if recipe["keep"] else []),
        ("to store", _stored(cost, chosen)),
        *((f"  as {d}", size(b)) for d, b in cost.bytes_by_dtype.items() if d != chosen),
        *_compressed(cost, chosen),
        *_priced(cost),
        ("mesh", cost.mesh if cost.mesh != "1" else "one device"),
        ("weights per device", f"{size(cost.weights_bytes)} in {recipe['compute_dtype']}"),
        ("weights are kept", cost.residency.told(recipe["seq_len"])),
        *_backward(recipe, cost),
        ("memory per device", size(cost.device_bytes)),
        ("memory on the host", size(cost.host_bytes)),
    ]


def _backward(recipe: Mapping[str, Any], cost: "Estimate") -> list[tuple[str, str]]:
    """Return how the backward pass of gradients runs, if some are tapped."""
    if cost.recomputes is None:
        return []
    kept = "each block is computed again" if cost.recomputes else "blocks keep what it needs"
    if recipe.get("steps"):
        from spile.models.taps import Tap, sites_on_paths

        sites = plural(len(sites_on_paths(map(Tap.from_name, recipe["taps"]))), "site")
        told = f"{recipe['steps']} for each of {sites}, of {recipe['objective']}; {kept}"
        return [("backward passes", told)]
    return [("backward pass", f"of {recipe['objective']}; {kept}")]


def attention_row(kernels: Mapping[int, KernelChoice]) -> tuple[str, str]:
    return "attention", told_kernels(kernels)


def recurrence_rows(choice: KernelChoice | None) -> list[tuple[str, str]]:
    return [("recurrent layers", told_recurrence(choice))] if choice else []


def _kept(recipe: Mapping[str, Any], cost: "Estimate") -> str:
    """Return the columns that --keep stores, and their size."""
    return f"{size(cost.kept_bytes)}: {listed(recipe['keep'])}"


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Print rows immediately: the next ones may take seconds to compute."""
    for name, value in rows:
        print(f"{name:<{_NAMES}}  {value}")
    sys.stdout.flush()


def _tokens(cost: "Estimate") -> str:
    if cost.tokens_error == 0:
        return f"{cost.tokens:,} (all counted)"
    if cost.tokens_error is None:
        return f"{cost.tokens:,} (estimated)"
    share = cost.tokens_error / max(1, cost.tokens)
    return f"{cost.tokens:,} ± {share:.1%} (95%, of a sample)"


def _stored(cost: "Estimate", dtype: str) -> str:
    exactly = f" = {cost.total_bytes:,} bytes" if cost.exact else ""
    return f"{size(cost.total_bytes)} as {dtype}{exactly}"


def _timed(time: Duration) -> list[tuple[str, str]]:
    """Return the time, measured here or computed for other devices."""
    if time.rate is None or time.seconds is None:
        return [(f"time {_on(time.on)}", time.why or "unknown")]
    how = "measured" if time.measured else "computed: at the chips' limit"
    told = [
        (f"time {_on(time.on)}", f"{lasting(time.seconds)} at {time.rate:,.0f} tok/s ({how})"),
    ]
    if time.starting is not None and time.compiling is not None:
        start = f"{lasting(time.starting)} (compiling, in all: {lasting(time.compiling)})"
        told.append(("  until the first step", start))
    if time.dollars is not None:
        told.append(("  on demand", f"${time.dollars:,.2f}"))
    return told


def _on(name: str) -> str:
    return name if name == "here" else f"on {name}"


def _priced(cost: "Estimate") -> list[tuple[str, str]]:
    """Return the free space of a disk, or the price of a bucket."""
    if cost.monthly_dollars is not None:
        return [
            ("to keep it", f"${cost.monthly_dollars:,.2f} a month"),
            *_requested(cost),
            ("  as", str(cost.priced_as)),
        ]
    free = "unknown" if cost.free_bytes is None else size(cost.free_bytes)
    return [("free there", free)]


def _requested(cost: "Estimate") -> list[tuple[str, str]]:
    if cost.requests is None:
        return []
    asked, beats = cost.requests, f"${cost.hourly_dollars:.4f} an hour for each worker's heartbeats"
    told = f"{asked.creates:,} objects, {asked.lists:,} listings and {asked.reads:,} reads"
    return [("to write it", f"${cost.request_dollars:,.2f} for {told}, and {beats}")]


def _compressed(cost: "Estimate", dtype: str) -> list[tuple[str, str]]:
    """Return the size with --compress, by ratios measured on normal noise; rows may differ."""
    shares = {"bfloat16": 0.70, "float16": 0.88, "float32": 0.85, "float8_e4m3": 0.90, "int8": 0.86}
    share = shares.get(dtype)  # (not measured for sums by label)
    return [("  with --compress, about", size(int(cost.total_bytes * share)))] if share else []

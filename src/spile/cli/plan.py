"""What a run would cost, before it is one."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from spile.cli.extract import given
from spile.core.config import Recipe, Runtime, build
from spile.core.errors import ConfigError

if TYPE_CHECKING:
    from spile.cli.duration import Duration
    from spile.compile.targets import Target
    from spile.models.layout import Cuts
    from spile.objects import Objects
    from spile.plan.estimate import Estimate
    from spile.plan.resolve import Job

_CALIBRATE = 5.0  # seconds


def plan(arguments: argparse.Namespace) -> int:
    from spile.cli.extract_text import plan_table
    from spile.corpus.tokenize import use_threads
    from spile.dataset.ledger import Ledger
    from spile.models.layout import devices_of
    from spile.objects import check_creates_once, is_bucket, open_objects
    from spile.plan.chips import chip_of
    from spile.plan.estimate import estimate, planned_cuts, refuse_if_too_large
    from spile.plan.resolve import resolve
    from spile.plan.survey import survey
    from spile.plan.throughput import pace_of

    options = given(arguments)
    recipe, runtime = build(options)
    seconds = _seconds(arguments.calibrate)
    ledger = Ledger(open_objects(options.get("out", ".")))
    target = _target(arguments.topology)
    platform, present, kind = _platform(target)
    use_threads(runtime.threads)
    job = resolve(recipe, ledger, platform, cache=runtime.cache)
    devices = devices_of(runtime.mesh) or present
    processes = runtime.num_processes or (target.hosts if target else 1)
    memory = target.memory if target else None
    cuts = planned_cuts(job, runtime, platform, devices, memory, processes)
    objects = ledger.objects
    if is_bucket(objects.url):
        check_creates_once(objects)
    elif runtime.spool:
        raise ConfigError(f"--spool is for buckets; {objects.url} needs none")
    found = survey(job, ledger, runtime, processes=processes, exact=arguments.exact)
    cost = estimate(
        job, runtime, platform, done=ledger.done_units(), free_bytes=objects.free_bytes(),
        memory=memory, cuts=cuts, processes=processes, out=objects, found=found,
    )  # fmt: skip
    pace = pace_of(job, runtime, platform, cuts, chip_of(kind))
    if target:
        time = _elsewhere(job, runtime, target, cost)
    else:
        fits = devices == present and processes == 1
        time = _here(job, runtime, cost, cuts, seconds if fits else 0.0, objects)
    if arguments.json:
        told = {**dataclasses.asdict(cost), "total_bytes": cost.total_bytes}
        told |= {**dataclasses.asdict(pace), "cores_needed": pace.cores_needed}
        print(json.dumps({**told, "time": dataclasses.asdict(time)}))
    else:
        plan_table(job.recipe.to_json(), cost, time, pace.rows())
    if not runtime.ignore_space:
        refuse_if_too_large(cost, objects.url)
    return 0


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


def _here(
    job: "Job", runtime: Runtime, cost: "Estimate", cuts: "Cuts", seconds: float, out: "Objects"
) -> "Duration":
    from spile.cli.duration import measured, unknown

    if not seconds:
        return unknown("here", "not measured: --calibrate is off, or other devices are meant")
    if not cost.remaining_tokens:
        return unknown("here", "all of it is done")
    try:
        from spile.run.rehearsal import rehearse, why_not
    except ImportError:
        return unknown("here", "not measured: jax is not installed here")
    reason = why_not(job, cost)
    if reason:
        return unknown("here", f"not measured: {reason}")
    near = Path(out.url) if out.free_bytes() is not None else None
    found = rehearse(job, runtime, cost, cuts, seconds, near)
    return measured(found, cost) if found else unknown("here", "not measured: too few steps")


def _target(topology: str | None) -> "Target | None":
    if topology is None:
        return None
    from spile.compile.targets import find_target

    return find_target(topology, None)


def _elsewhere(job: "Job", runtime: Runtime, target: "Target", cost: "Estimate") -> "Duration":
    from spile.cli.duration import elsewhere
    from spile.compile.step import Question, compile_step

    asked = job.recipe
    recipe = Recipe(
        model=asked.model_source, taps=",".join(asked.taps), seq_len=asked.seq_len,
        compute_dtype=asked.compute_dtype, store_dtype=asked.store_dtype,
    )  # fmt: skip
    question = Question(job.checkpoint.arch, recipe, runtime, target, job.encoders)
    return elsewhere(compile_step(question, question.layout()), cost)


def _platform(target: "Target | None") -> tuple[str, int, str]:
    """The devices a run would use: where they are, how many, and what jax calls them."""
    if target:
        kind = target.chip.kind if target.chip else "cpu"
        return target.platform, len(target.devices), kind
    try:
        from spile.run.devices import devices_here
    except ImportError:  # a plan needs no jax
        return "cpu", 1, "cpu"
    return devices_here()

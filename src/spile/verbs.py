"""What each verb does: call one function, print what it gives.

Everything heavy is imported by the verb that needs it, so that `status`, `verify` and `--help`
start at once and run where jax is absent.
"""

import argparse
import dataclasses
import json
import logging
import os
from pathlib import Path

from spile.config import Recipe, Runtime, build, load_toml, parse_count
from spile.errors import ConfigError, InputError, SpileError


def _options(arguments: argparse.Namespace) -> tuple[Recipe, Runtime, str | None]:
    options = load_toml(Path(arguments.config)) if arguments.config else {}
    names = (*Recipe.names(), *Runtime.names(), "out")
    flags = {name: getattr(arguments, name) for name in names}
    options |= {name: value for name, value in flags.items() if value is not None}
    out = options.pop("out", None)
    if out is not None and (not isinstance(out, str) or not out):
        raise ConfigError(f"--out must be a non-empty text, got {out!r}")
    return *build(options), out


def extract(arguments: argparse.Namespace) -> int:
    from spile.engine.parent import is_child, supervise
    from spile.engine.place import find_place

    recipe, runtime, out = _options(arguments)
    if out is None:
        raise ConfigError("--out is missing: where should the dataset go?")
    place = find_place(runtime, os.environ)
    if place:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(logging.Formatter(f"spile [{place}]: %(message)s"))
        if not is_child():
            from spile.objects import open_objects

            return supervise(arguments.argv, place, open_objects(out))
        arguments.quiet |= not place.leads

    from spile.engine.local import extract
    from spile.metrics import Counters
    from spile.terminal import extract_summary, progress

    counters = Counters()
    with progress(counters, quiet=arguments.quiet or arguments.json) as on_start:
        outcome = extract(
            recipe, out, runtime, counters=counters, on_start=on_start, stop=arguments.stop
        )
    if place and not place.leads:
        return 0
    if arguments.json:
        print(json.dumps(dataclasses.asdict(outcome)))
    elif not arguments.quiet:
        print(extract_summary(out, outcome, counters))
    return 0


def plan(arguments: argparse.Namespace) -> int:
    from spile.engine.estimate import estimate, planned_cuts, refuse_if_too_large
    from spile.engine.resolve import resolve
    from spile.layout import devices_of
    from spile.objects import check_creates_once, is_bucket, open_objects
    from spile.store.ledger import Ledger
    from spile.terminal import plan_table

    recipe, runtime, out = _options(arguments)
    ledger = Ledger(open_objects(out or "."))
    platform, present = _platform()
    job = resolve(recipe, ledger, platform)
    devices = devices_of(runtime.mesh) or present
    processes = runtime.num_processes or 1
    cuts = planned_cuts(job, runtime, platform, devices, None, processes)
    objects = ledger.objects
    if is_bucket(objects.url):
        check_creates_once(objects)
    elif runtime.spool:
        raise ConfigError(f"--spool is for buckets; {objects.url} needs none")
    done = ledger.done_units()
    cost = estimate(
        job, runtime, platform, done=done, free_bytes=objects.free_bytes(), cuts=cuts,
        processes=processes, out=objects,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(cost), "total_bytes": cost.total_bytes}))
    else:
        plan_table(job.recipe.to_json(), cost)
    if not runtime.ignore_space:
        refuse_if_too_large(cost, objects.url)
    return 0


def _platform() -> tuple[str, int]:
    """The kind of devices a run here would use, and how many."""
    try:
        import jax
    except ImportError:
        return "cpu", 1
    return jax.default_backend(), jax.device_count()


def taps(arguments: argparse.Namespace) -> int:
    from spile.models.checkpoint import read_arch
    from spile.models.taps import describe_taps
    from spile.terminal import taps_table

    arch = read_arch(arguments.model)
    given = Recipe(seq_len=arguments.seq_len).seq_len
    seq_len = given or min(2048, arch.max_positions)
    entries = describe_taps(
        arch, seq_len, arguments.store_dtype, each_layer=arguments.all or arguments.json
    )
    if arguments.json:
        print(json.dumps(entries))
    else:
        taps_table(entries)
    return 0


def compile(arguments: argparse.Namespace) -> int:
    from spile.engine.compile import Question, compile_step, search
    from spile.engine.targets import find_target
    from spile.models.checkpoint import read_arch
    from spile.terminal import compile_text

    names = ("model", "taps", "seq_len", "compute_dtype", "store_dtype")
    recipe = Recipe(**{name: getattr(arguments, name) for name in names})
    names = ("batch_tokens", "mesh", "fsdp")
    runtime = Runtime(**{name: getattr(arguments, name) for name in names})
    arch = read_arch(arguments.model)
    question = Question(arch, recipe, runtime, find_target(arguments.topology, arguments.on))
    found = search(question) if arguments.search else [compile_step(question, question.layout())]
    if not arguments.json:
        print(compile_text(found))
    elif arguments.search:
        print(json.dumps({"meshes": [each.to_json() for each in found]}))
    else:
        print(json.dumps(found[0].to_json()))
    return 0


def convert(arguments: argparse.Namespace) -> int:
    from spile.models.gguf import convert

    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else None
    try:
        convert(Path(arguments.source), Path(arguments.dest), tokenizer=tokenizer)
    except OSError as error:
        where = error.filename or arguments.dest
        raise InputError(f"{where}: {error.strerror or error}") from error
    print(json.dumps({"model": arguments.dest}) if arguments.json else f"made {arguments.dest}")
    return 0


def check(arguments: argparse.Namespace) -> int:
    from spile.engine.recheck import check
    from spile.terminal import check_text

    if arguments.samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {arguments.samples}")
    moved = Recipe(model=arguments.model, lora=arguments.lora, corpus=arguments.corpus)
    report = check(arguments.out, samples=arguments.samples, recipe=moved)
    print(json.dumps(report.to_json()) if arguments.json else check_text(arguments.out, report))
    return 0 if report.ok else SpileError.exit_code


def export(arguments: argparse.Namespace) -> int:
    from spile.interop.export import export
    from spile.terminal import export_text

    names = ("to", "taps", "context_size", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    made = export(arguments.out, arguments.dest, **options)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else export_text(made))
    return 0


def compact(arguments: argparse.Namespace) -> int:
    from spile.objects import open_objects
    from spile.store.compact import compact
    from spile.terminal import compact_text

    runtime = Runtime(shard_bytes=arguments.shard_bytes)
    try:
        unit_bytes = parse_count(arguments.unit_bytes)
    except ValueError:
        raise ConfigError(
            f"--unit-bytes must be 1GiB or 500MB, got {arguments.unit_bytes!r}"
        ) from None
    made = compact(
        open_objects(arguments.out), open_objects(arguments.dest), unit_bytes=unit_bytes,
        shard_bytes=runtime.shard_bytes, compress=arguments.compress,
    )  # fmt: skip
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else compact_text(made))
    return 0


def push(arguments: argparse.Namespace) -> int:
    from spile.interop.push import push
    from spile.terminal import push_text

    made = push(
        arguments.out, arguments.repo, private=arguments.private, revision=arguments.revision
    )
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else push_text(made))
    return 0


def fetch(arguments: argparse.Namespace) -> int:
    from spile.engine.fetch import fetch
    from spile.terminal import counted, fetch_text

    with counted("files", quiet=arguments.json) as progress:
        made = fetch(arguments.model, arguments.corpus, arguments.to, progress)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else fetch_text(made))
    return 0


def status(arguments: argparse.Namespace) -> int:
    from spile.monitor.status import read_status
    from spile.objects import open_objects
    from spile.terminal import status_text

    status = read_status(open_objects(arguments.out))
    print(json.dumps(status.to_json()) if arguments.json else status_text(arguments.out, status))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    from spile.objects import open_objects
    from spile.store.journal import Journal
    from spile.store.verify import verify
    from spile.terminal import counted, verify_text

    objects = open_objects(arguments.out)
    journal = None if arguments.quick else Journal(objects.url, resume=arguments.resume)
    with counted("units", quiet=arguments.json) as progress:
        report = verify(
            objects, partial=arguments.partial, quick=arguments.quick, journal=journal,
            progress=progress,
        )  # fmt: skip
    if arguments.json:
        print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}))
    else:
        print(verify_text(arguments.out, report))
    return 0 if report.ok else SpileError.exit_code


def gc(arguments: argparse.Namespace) -> int:
    from spile.objects import open_objects
    from spile.store.gc import collect_garbage
    from spile.terminal import counted

    objects = open_objects(arguments.out)
    with counted("orphans", quiet=arguments.json) as progress:
        removed = collect_garbage(objects, abandoned=arguments.abandoned, progress=progress)
    if arguments.json:
        print(json.dumps({"removed": removed}))
    else:
        print(f"{len(removed)} orphans removed")
    return 0

"""Verbs about a dataset that is there: whether it is sound, other forms of it."""

import argparse
import dataclasses
import json

from spile.core.config import Runtime, parse_count
from spile.core.errors import ConfigError, SpileError


def verify(arguments: argparse.Namespace) -> int:
    from spile.cli.dataset_text import verify_text
    from spile.cli.progress import counted
    from spile.dataset.maintain.journal import Journal
    from spile.dataset.maintain.verify import verify
    from spile.objects import open_objects

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
    from spile.cli.progress import counted
    from spile.dataset.maintain.gc import collect_garbage
    from spile.objects import open_objects

    objects = open_objects(arguments.out)
    with counted("orphans", quiet=arguments.json) as progress:
        removed = collect_garbage(objects, abandoned=arguments.abandoned, progress=progress)
    if arguments.json:
        print(json.dumps({"removed": removed}))
    else:
        print(f"{len(removed)} orphans removed")
    return 0


def export(arguments: argparse.Namespace) -> int:
    from spile.cli.dataset_text import export_text
    from spile.interop.export import export

    names = ("to", "taps", "context_size", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    made = export(arguments.out, arguments.dest, **options)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else export_text(made))
    return 0


def compact(arguments: argparse.Namespace) -> int:
    from spile.cli.dataset_text import compact_text
    from spile.dataset.maintain.compact import compact
    from spile.objects import open_objects

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
    from spile.cli.dataset_text import push_text
    from spile.interop.hub.push import push

    made = push(
        arguments.out, arguments.repo, private=arguments.private, revision=arguments.revision
    )
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else push_text(made))
    return 0

"""Verbs about models: what they have, what a step of theirs needs, getting them."""

import argparse
import dataclasses
import json
from pathlib import Path

from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, InputError, SpileError


def taps(arguments: argparse.Namespace) -> int:
    from spile.cli.model_text import taps_table
    from spile.models.files.checkpoint import read_arch
    from spile.models.taps import describe_taps

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
    from spile.cli.model_text import compile_text
    from spile.compile.step import Question, compile_step, search
    from spile.compile.targets import find_target
    from spile.models.files.checkpoint import read_arch
    from spile.models.taps import parse_taps
    from spile.plan.encode import find_encoders

    names = ("model", "taps", "seq_len", "compute_dtype", "store_dtype", "encode", "latents")
    recipe = Recipe(**{name: getattr(arguments, name) for name in names})
    names = ("batch_tokens", "mesh", "fsdp")
    runtime = Runtime(**{name: getattr(arguments, name) for name in names})
    arch = read_arch(arguments.model)
    encoders = find_encoders(recipe, parse_taps(arguments.taps, arch), arch)
    target = find_target(arguments.topology, arguments.on)
    question = Question(arch, recipe, runtime, target, encoders)
    found = search(question) if arguments.search else [compile_step(question, question.layout())]
    if not arguments.json:
        print(compile_text(found))
    elif arguments.search:
        print(json.dumps({"meshes": [each.to_json() for each in found]}))
    else:
        print(json.dumps(found[0].to_json()))
    return 0


def convert(arguments: argparse.Namespace) -> int:
    from spile.models.files.gguf import convert

    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else None
    try:
        convert(Path(arguments.source), Path(arguments.dest), tokenizer=tokenizer)
    except OSError as error:
        where = error.filename or arguments.dest
        raise InputError(f"{where}: {error.strerror or error}") from error
    print(json.dumps({"model": arguments.dest}) if arguments.json else f"made {arguments.dest}")
    return 0


def check(arguments: argparse.Namespace) -> int:
    from spile.check.compare import check
    from spile.cli.model_text import check_text

    if arguments.samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {arguments.samples}")
    names = ("model", "lora", "encode", "corpus")
    moved = Recipe(**{name: getattr(arguments, name) for name in names})
    report = check(arguments.out, samples=arguments.samples, recipe=moved)
    print(json.dumps(report.to_json()) if arguments.json else check_text(arguments.out, report))
    return 0 if report.ok else SpileError.exit_code


def fetch(arguments: argparse.Namespace) -> int:
    from spile.cli.model_text import fetch_text
    from spile.cli.progress import counted
    from spile.plan.fetch import fetch

    with counted("files", quiet=arguments.json) as progress:
        made = fetch(
            arguments.model, arguments.corpus, arguments.to, progress,
            lora=arguments.lora, cache=arguments.cache,
        )  # fmt: skip
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else fetch_text(made))
    return 0

"""Verbs for models: taps, compile, convert, check, fetch."""

import argparse
import dataclasses
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.cli.flags import Verbs, add_options, taps_help
from spile.core.config import STEP_OPTIONS, STORE_DTYPES, Recipe, Runtime
from spile.core.disagreement import BOUND
from spile.core.errors import ConfigError, InputError, SpileError
from spile.core.humanize import plural, size
from spile.models.sites import SPLICED

if TYPE_CHECKING:
    from spile.check.compare import CheckReport
    from spile.compile.step import Compiled
    from spile.plan.fetch import Fetched


# Options of a run that change the step's program.
_RUNTIME = ("mesh", "fsdp", "batch_tokens", "attention", "weights")


def add_taps(verbs: Verbs) -> None:
    sub = verbs.add("taps", taps, "the places a model can be tapped at: shapes, bytes, other names")
    sub.add("--model", "as for extract", "X", required=True)
    sub.add("--seq-len", "for attn_pattern [2048, or the maximum]", "N")
    sub.add("--store-dtype", None, choices=STORE_DTYPES, default="bfloat16")
    sub.switch("--all", "list every layer instead of one line per site")


def taps(arguments: argparse.Namespace) -> None:
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
        # (A pipe has no width: 200.)
        print(taps_text(entries, shutil.get_terminal_size((200, 24)).columns))


def taps_text(entries: Sequence[Mapping[str, Any]], width: int) -> str:
    """Format taps: shape, bytes, meaning, and below each its other names."""
    shapes = ["×".join(map(str, entry["shape"])) or "1" for entry in entries]
    names = max(len("tap"), *(len(entry["name"]) for entry in entries))
    wide = max(len("shape"), *map(len, shapes))
    lines = [f"{'tap':{names}}  {'shape':{wide}}  bytes/token  meaning"]
    for entry, shape in zip(entries, shapes, strict=True):
        head = f"{entry['name']:{names}}  {shape:{wide}}  {entry['bytes']:>11,}  "
        lines += _wrapped(entry["meaning"], width, head, " " * len(head))
        if entry["aliases"]:
            lines += _wrapped(", ".join(entry["aliases"]), width, "    also ", " " * 9)
    sites = dict.fromkeys(re.split(r"[.:]", entry["name"])[0] for entry in entries)
    having = ", ".join(site for site in sites if site in SPLICED)
    told = f"gradient of --objective with respect to SITE (SITE_attr: times values): {having}"
    return "\n".join(
        [*lines, *_wrapped(told, width, f"{'SITE_grad':{names}}  ", " " * (names + 2))]
    )


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    """Wrap to `width`, without breaking names that are longer."""
    return textwrap.wrap(
        text,
        max(width, len(first) + 20),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def add_compile(verbs: Verbs) -> None:
    sub = verbs.add(
        "compile",
        compile,
        "compile the step for chips that are elsewhere: memory, speed, cost",
        epilog=taps_help(),
    )
    sub.add("--model", "directory with config.json", "X", required=True)
    sub.add("--topology", "e.g. v5e-64, v4-8, h200 [this machine]", "X")
    sub.switch("--search", "compile for every suitable mesh")
    sub.add("--on", "which compiler [libtpu, else cpu]", "libtpu|cpu|here")
    add_options(sub, "recipe", Recipe, STEP_OPTIONS)
    add_options(sub, "runtime", Runtime, _RUNTIME)


def compile(arguments: argparse.Namespace) -> None:
    from spile.compile.step import Question, compile_step, search
    from spile.compile.targets import find_target
    from spile.models.files.checkpoint import read_arch
    from spile.run.pipeline.display import waiting

    given = {name: getattr(arguments, name) for name in (*STEP_OPTIONS, *_RUNTIME)}
    given = {name: value for name, value in given.items() if value is not None}
    recipe = Recipe(**{name: given[name] for name in STEP_OPTIONS if name in given})
    runtime = Runtime(**{name: given[name] for name in _RUNTIME if name in given})
    target = find_target(arguments.topology, arguments.on)
    question = Question.of(read_arch(arguments.model), recipe, runtime, target)
    with waiting(f"compiling for {target.name}", quiet=arguments.json):
        if arguments.search:
            found = search(question)
        else:
            found = [compile_step(question, question.layout())]
    if not arguments.json:
        print(compile_text(found))
    elif arguments.search:
        print(json.dumps({"meshes": [each.to_json() for each in found]}))
    else:
        print(json.dumps(found[0].to_json()))


def compile_text(found: Sequence["Compiled"]) -> str:
    """Format the memory and speed of a step; if there are several meshes, list them all."""
    best = found[0]
    held = best.weights + best.taps + (best.temporaries or best.estimated_temporaries)
    made = "does not fit" if best.temporaries is None else size(best.temporaries)
    chip = ""
    if best.on == "cpu":
        held = best.weights + best.taps + best.estimated_temporaries
        chip = f" (virtual CPUs'; the chip's about {size(best.estimated_temporaries)})"
    verdict = {True: "yes", False: "no", None: "unknown"}[best.fits]
    room = f", {size(held)} of {size(best.memory)}" if best.memory else ""
    lines = [
        f"{best.topology}: {best.devices} device{'s' * (best.devices > 1)} on {best.hosts} "
        f"host{'s' * (best.hosts > 1)}, mesh {best.mesh}; compiled on {best.on} in "
        f"{best.compiling:.1f} s",
        f"a step of {best.tokens:,} tokens in contexts of {best.seq_len:,}, "
        f"{best.compute_dtype}, stored as {best.store_dtype}; of each device:",
        f"  weights       {size(best.weights)}; {best.kept}",
        *([f"  cut           {best.cut}"] if best.devices > 1 else []),
        f"  taps          {size(best.taps)}",
        f"  temporaries   {made}{chip}",
        f"  fits          {verdict}{room}",
        *([f"  on each host  {size(best.host_memory)} of blocks"] if best.host_memory else []),
        f"  arithmetic    {best.flops / 1e12:,.2f} TFLOP",
        f"  memory moves  {size(best.traffic)}",
    ]
    for kind, each in best.collectives.items():
        lines.append(f"  sends         {size(each.sent)} in {each.count:,} x {kind}")
    if best.seconds and best.tokens_per_second and best.tokens_one_by_one:
        times = ", ".join(
            f"{n.replace('_', ' ')} {s * 1e3:,.1f}" for n, s in vars(best.seconds).items()
        )
        cost = f"; ${best.dollars:,.2f} a billion tokens" if best.dollars else ""
        cost += f", ${best.dollars_spot:,.2f} spot" if best.dollars_spot else ""
        lines.append(f"  at least, ms  {times}")
        lines.append(
            f"at most {best.tokens_per_second:,.0f} tok/s, limited by "
            f"{best.seconds.limit.replace('_', ' ')}{cost}; {best.tokens_one_by_one:,.0f} if "
            "kernels run one by one"
        )
    lines += [f"note: {note}" for note in best.notes]
    if len(found) > 1:
        lines.append(f"{'mesh':26} {'weights':>9} {'fits':>5} {'tok/s':>11}  limited by")
    for each in found if len(found) > 1 else ():
        rate = f"{each.tokens_per_second:,.0f}" if each.tokens_per_second else "?"
        limit = each.seconds.limit.replace("_", " ") if each.seconds else "?"
        fits = {True: "yes", False: "no", None: "?"}[each.fits]
        lines.append(f"{each.mesh:26} {size(each.weights):>9} {fits:>5} {rate:>11}  {limit}")
    return "\n".join(lines)


def add_convert(verbs: Verbs) -> None:
    sub = verbs.add("convert", convert, "make a model directory from a GGUF file")
    sub.place("source", metavar="SRC.gguf")
    sub.place("dest", "the directory to make")
    sub.add("--tokenizer", "take tokenizer.json from here instead of the file", "DIR")


def convert(arguments: argparse.Namespace) -> None:
    from spile.models.files.gguf import convert
    from spile.run.pipeline.display import waiting

    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else None
    try:
        with waiting(f"converting {arguments.source}", quiet=arguments.json):
            convert(Path(arguments.source), Path(arguments.dest), tokenizer=tokenizer)
    except OSError as error:
        where = error.filename or arguments.dest
        raise InputError(f"{where}: {error.strerror or error}") from error
    print(json.dumps({"model": arguments.dest}) if arguments.json else f"made {arguments.dest}")


def add_check(verbs: Verbs) -> None:
    sub = verbs.add("check", check, "recompute samples with HF transformers and compare")
    sub.place("out")
    sub.number("--samples", "documents to recompute [4]", 4)
    for name in ("model", "lora", "encode", "splice", "corpus"):
        sub.add(f"--{name}", "its place now, if it has moved", "X")
    sub.add(
        "--max-disagreement",
        "of rollouts: the mean distance of the engine's log-probabilities that passes [0.1]",
        "NATS",
    )


def check(arguments: argparse.Namespace) -> int:
    from spile.check.compare import check
    from spile.run.pipeline.display import waiting

    if arguments.samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {arguments.samples}")
    names = ("model", "lora", "encode", "splice", "corpus")
    moved = Recipe(**{name: getattr(arguments, name) for name in names})
    bound = Runtime(max_disagreement=arguments.max_disagreement or BOUND).max_disagreement
    with waiting("comparing with HF transformers", quiet=arguments.json):
        report = check(arguments.out, samples=arguments.samples, recipe=moved, bound=bound)
    print(json.dumps(report.to_json()) if arguments.json else check_text(arguments.out, report))
    return 0 if report.ok else SpileError.exit_code


_CHECK_LEGEND = """\
  error          distance of the stored rows from HF transformers, relative to a row's length
  allowed        the most that rounding explains
  control        the same distance for the neighbouring layer or token: it must exceed `allowed`, or
                 the tap is unclear
  storing alone  what the stored dtype costs (in brackets: in a typical channel), and the cosine"""


def check_text(out: str, report: "CheckReport") -> str:
    """Format each tap's distance from the reference, and the verdict."""
    width = max(map(len, report.taps))
    narrow = report.next_token is not None  # products in float8
    lines = [
        f"{'tap':{width}}  error     allowed   control   {'bfloat16  ' if narrow else ''}"
        "storing alone         cosine"
    ]
    for name, tap in report.taps.items():
        half = "" if tap.bfloat16 is None else f"{tap.bfloat16:.2e}  "
        verdict = "" if tap.ok else "  <- " + ("too far" if tap.error > tap.allowed else "unclear")
        verdict += f": these are rows of {tap.really}" if tap.really else ""
        lines.append(
            f"{name:{width}}  {tap.error:.2e}  {tap.allowed:.2e}  {tap.control:.2e}  {half}"
            f"{tap.loss.relative_l2:.2e} ({tap.loss.typical_channel:.2e})  "
            f"{tap.loss.cosine:.6f}{verdict}"
        )
    for name, tap in report.taps.items():
        if made := tap.reconstruction:
            after = made.replaced_loss
            told = "" if after is None else f", {after:.4g} with its reconstructions in their place"
            lines.append(
                f"{name}: {made.error:.3g} of the rows' length is not reconstructed; the model's "
                f"loss is {made.loss:.4g} nats a token{told}"
            )
    far = sum(tap.error > tap.allowed for tap in report.taps.values())
    unclear = sum(not tap.ok for tap in report.taps.values()) - far
    disagree = "disagrees" if far == 1 else "disagree"
    verdict = [f"{plural(far, 'tap')} {disagree} with the reference"] if far else []
    verdict += [f"{plural(unclear, 'tap')} unclear"] if unclear else []
    lines.append(_CHECK_LEGEND)
    if report.next_token:
        lines.append("  bfloat16       the error if all products were in bfloat16")
        told = ", ".join(f"{value:.2g} in {dtype}" for dtype, value in report.next_token.items())
        lines.append(f"the next token's divergence from float32, in nats: {told}")
    if engine := report.disagreement:
        told = "" if engine.ok else "  <- another model, adapter, template or tokens, or rounding"
        some = f"; {engine.beyond:,} beyond it: {', '.join(map(str, engine.first))}"
        some += ", …" * (engine.beyond > len(engine.first))
        lines.append(
            f"the engine's log-probabilities of {plural(engine.tokens, 'token')} in "
            f"{plural(engine.documents, 'document')}: {engine.mean:.2g} from the model's on "
            f"average, up to {engine.largest:.2g} (bound {engine.bound:g}"
            f"{some * bool(engine.beyond)}){told}"
        )
        verdict += [] if engine.ok else ["the engine disagrees with the model"]
    lines.append(
        f"{out}: {', '.join(verdict) or 'every tap agrees with the reference'} "
        f"({plural(report.documents, 'document')}, {plural(report.tokens, 'token')}, "
        f"{report.reference})"
    )
    return "\n".join(lines)


def add_fetch(verbs: Verbs) -> None:
    sub = verbs.add("fetch", fetch, "download a model and a corpus ahead of a run")
    for name in ("model", "lora", "corpus", "cache"):
        sub.add(f"--{name}", "as for extract", "X")
    sub.add("--to", "make DIR/model, DIR/lora and DIR/corpus [the Hub's cache]", "DIR")


def fetch(arguments: argparse.Namespace) -> None:
    from spile.plan.fetch import fetch
    from spile.run.pipeline.display import counted

    with counted("files", quiet=arguments.json) as progress:
        made = fetch(
            arguments.model,
            arguments.corpus,
            arguments.to,
            progress,
            lora=arguments.lora,
            cache=arguments.cache,
        )
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else fetch_text(made))


def fetch_text(made: "Fetched") -> str:
    """Describe what was fetched, and the flags that use it."""
    flags = {f"--{name}": getattr(made, name) for name in ("model", "lora", "corpus", "cache")}
    use = " ".join(f"{flag} {shlex.quote(name)}" for flag, name in flags.items() if name)
    there = f" ({made.files_there:,} were there already)" if made.files_there else ""
    return f"{made.files:,} files{there}, {size(made.bytes)} fetched\n  use     {use}"

"""Verbs that run a recipe: `extract`, and `supervise`, which restarts it."""

import argparse
import dataclasses
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.cli.flags import Verbs, add_options, taps_help
from spile.cli.style import formatter, program, skipped
from spile.core.config import RayOptions, Recipe, Runtime, build, load_toml
from spile.core.errors import ConfigError, Interrupted
from spile.core.flags import Flags
from spile.core.humanize import compared, lasting, plural, size
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.dataset.records.prediction import Prediction
    from spile.metrics import Counters
    from spile.run.extract import Outcome
    from spile.run.pipeline.pickers import Place
    from spile.run.pipeline.profile import Traced

_EXTRACT_HELP = """\
Run a model over a corpus and keep the activations of the tapped places as a dataset.
The same command resumes after any interruption, and --out alone is enough to resume.

  spile extract --model demo --corpus demo --taps resid_post:20 --max-docs 50 --out acts/demo
  spile extract --model ./Qwen2.5-0.5B --corpus 'texts/*.parquet' \\
                --taps resid_post:all,mlp_out:12 --out acts/qwen
"""
_SHOWN_OPERATIONS = 12  # operations
_STAGES = (
    ("device busy", "device_busy"),
    ("device idle", "device_idle"),
    ("waited for the first text", "waited_at_first"),
    ("waited for the model", "waited_for_model"),
    ("waited for text", "waited_for_text"),
    ("waited for writing", "waited_for_writing"),
    ("waited for weights", "waited_for_weights"),
    ("reading documents", "reading"),
    ("tokenizing and packing", "preparing"),
    ("writing rows, all lanes", "writing"),
    ("making units durable", "committing"),
)


# Of the flags that `extract` and `plan` share, those that `--help` explains.
COMMON_FLAGS = ("out", *(f.name for f in dataclasses.fields(Recipe) if f.metadata["common"]))


def add_recipe_flags(sub: Flags) -> None:
    """Add the flags that `extract` and `plan` share."""
    sub.add("--out", "where the dataset goes: a directory, or URL of a bucket", "DIR")
    sub.add("--config", "TOML file of options; flags win", "FILE")
    sub.switch("--quiet", "print only errors")
    add_options(sub, "recipe", Recipe)
    add_options(sub, "runtime", Runtime)


def add_extract(verbs: Verbs) -> None:
    sub = verbs.add(
        "extract",
        extract,
        "make a dataset, or continue it",
        usage="spile extract --model X --corpus X --taps X --out DIR [more flags]",
        epilog=taps_help(),
        description=_EXTRACT_HELP,
        common=COMMON_FLAGS,
    )
    add_recipe_flags(sub)
    sub.switch("--log-json", "print progress and log as JSON objects on stderr, one a line")
    sub.switch("--restart", "start over with another recipe; refused once --out holds a row")
    add_options(sub, "engine", RayOptions)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the config file and the flags; flags win."""
    names = (*Recipe.names(), *Runtime.names(), *RayOptions.names(), "out")
    options = load_toml(Path(arguments.config), RayOptions.names()) if arguments.config else {}
    flags = {name: getattr(arguments, name, None) for name in names}
    options |= {name: value for name, value in flags.items() if value is not None}
    out = options.get("out")
    if out is not None and (not isinstance(out, str) or not out):
        raise ConfigError(f"--out must be a non-empty text, got {out!r}")
    return options


@dataclasses.dataclass(frozen=True)
class ExtractionAsked:
    """The options of a run, and this process's share and rank."""

    recipe: Recipe
    runtime: Runtime
    ray: RayOptions
    out: str
    place: "Place"


def extraction_of(arguments: argparse.Namespace) -> ExtractionAsked:
    """Parse the options, and name this process's share and rank in log lines from now on."""
    from spile.run.pipeline.pickers import Place, find_place

    options = given(arguments)
    recipe, runtime = build(options)
    ray = RayOptions(**{name: options[name] for name in RayOptions.names() if name in options})
    if "out" not in options:
        raise ConfigError("--out is missing; it says where the dataset goes")
    place = find_place(runtime, os.environ) if ray.engine == "local" else Place()
    if who := str(place):
        told = formatter(as_json=getattr(arguments, "log_json", False), who=who)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(told)
    return ExtractionAsked(recipe, runtime, ray, options["out"], place)


def extract(arguments: argparse.Namespace) -> int:
    asked = extraction_of(arguments)
    if (code := accompanied(asked, arguments)) is not None:
        return code
    rank = asked.place.rank
    if arguments.restart and (rank is None or rank.leads):
        _restart(asked)
    outcome, counters = run_extraction(asked, arguments)
    if rank and not rank.leads:
        return 0
    if arguments.json:
        spent = {"seconds": counters["unit_seconds"], "tokens_done": int(counters["tokens"])}
        print(json.dumps({**dataclasses.asdict(outcome), **counters.rates(), **spent}))
    elif not arguments.quiet:
        print(extract_summary(asked.out, outcome, counters))
        if asked.runtime.profile:
            print(_profiled(asked.runtime.profile, counters))
    return 0


def accompanied(asked: ExtractionAsked, arguments: argparse.Namespace) -> int | None:
    """Run the same command in a child, if this process is joined to others; return its exit code.

    In the child, and for a process by itself, it returns None.
    """
    from spile.run.world.child import accompany, is_child

    rank = asked.place.rank
    if rank and not is_child():
        return accompany(arguments.argv, rank, open_objects(asked.out))
    arguments.quiet |= bool(rank and not rank.leads)
    return None


def run_extraction(
    asked: ExtractionAsked, arguments: argparse.Namespace
) -> "tuple[Outcome, Counters]":
    """Make the dataset, or continue it, and show the progress."""
    from spile.metrics import Counters
    from spile.run.pipeline.display import progress

    if asked.ray.engine == "ray":
        from spile.fleet.ray import driver as ray_pool

        make = partial(ray_pool.extract, options=asked.ray)
    else:
        from spile.run.extract import RunOptions
        from spile.run.extract import extract as local

        options = RunOptions(place=asked.place, at_second_signal=_leave_at_once)
        make = partial(local, options=options)
    counters, as_json = Counters(), getattr(arguments, "log_json", False)
    quiet = arguments.quiet or (arguments.json and not as_json)
    with progress(counters, quiet=quiet, as_json=as_json) as on_start:
        outcome = make(
            asked.recipe,
            asked.out,
            asked.runtime,
            counters=counters,
            on_start=on_start,
            stop=arguments.stop,
        )
    return outcome, counters


def _restart(asked: ExtractionAsked) -> None:
    """Discard the stored recipe, if the dataset holds no rows."""
    from spile.dataset.maintain.gc import discard_empty

    for name in ("model", "corpus", "taps"):
        if getattr(asked.recipe, name) is None:
            raise ConfigError(f"--restart discards the stored recipe, so --{name} must be given")
    rank = asked.place.rank
    discard_empty(open_objects(asked.out), rank.coordinator if rank else None)


def _leave_at_once() -> None:
    """End the process at once; committed units stay valid, as after a kill."""
    told = b"\nspile: ended at once; what is committed stays valid: run the same command again\n"
    os.write(sys.stderr.fileno(), told)
    os._exit(Interrupted.exit_code)


def extract_summary(out: str, outcome: "Outcome", counters: "Counters") -> str:
    """Describe the result, and the commands that show, verify and read it."""
    # The script beside the interpreter: under `python -m spile.cli`, argv[0] is not a program.
    spile = program("spile", str(Path(sys.executable).with_name("spile")))
    quoted = shlex.quote(out)
    part = "" if outcome.complete else ", partial=True"
    of_tokens = f" (of {outcome.tokens:,} tokens)" if outcome.rows < outcome.tokens else ""
    lines = [
        f"{out}: {plural(outcome.documents, 'document')}, {plural(outcome.rows, 'row')} per tap"
        f"{of_tokens}, {size(outcome.bytes)} in {plural(outcome.units, 'unit')}"
    ]
    if not outcome.complete:
        lines.append(
            f"--max-bytes ended it after {outcome.units} of {outcome.units_total} units; the same "
            "command with a larger --max-bytes continues"
        )
    if outcome.skipped:
        lines.append(f"left out: {skipped(outcome.skipped)}")
    for tap, rows in outcome.truncated.items():
        lines.append(
            f"{tap}: in {plural(rows, 'row')} more latents were active than were kept; a larger "
            "--latents keeps more"
        )
    if outcome.prediction:
        lines.append(f"predicted: {_outcome_of(outcome, outcome.prediction, counters)}")
    rates = counters.rates()
    if rates["device_seconds"]:
        lines.append(
            f"the device computed for {rates['computed_share']:.1%} of "
            f"{rates['device_seconds']:.1f} s and waited for text for "
            f"{rates['waited_for_text_share']:.1%}; text came at "
            f"{rates['text_rate'] or 0:,.0f} tok/s"
        )
    lines += [
        f"  see     {spile} serve {quoted}",
        f"  verify  {spile} verify {quoted}{'' if outcome.complete else ' --partial'}",
        f"  read    import spile; ds = spile.open({out!r}{part})",
    ]
    return "\n".join(lines)


def _outcome_of(outcome: "Outcome", predicted: "Prediction", counters: "Counters") -> str:
    """Compare each prediction with the actual value."""
    told: list[str] = []
    if outcome.complete:
        told.append(
            f"{predicted.tokens:,} tokens ({compared(predicted.tokens, outcome.tokens)} came)"
        )
        told.append(f"{size(predicted.bytes)} ({compared(predicted.bytes, outcome.bytes)})")
    spent, done = counters["unit_seconds"], counters["tokens"]
    if predicted.seconds and spent and predicted.tokens:
        # (For this run's own units: other workers may have done the rest.)
        expected = predicted.seconds * done / predicted.tokens
        told.append(
            f"{lasting(expected)} for this run's units ({compared(expected, spent)}: "
            f"{lasting(spent)})"
        )
    return ", ".join(told) or "nothing about this run's own units"


def _profiled(profile: str, counters: "Counters") -> str:
    from spile.run.pipeline.profile import Profile, read_trace

    path = Profile.parse(profile).newest()
    return profile_summary(counters, path, read_trace(path) if path else None)


def profile_summary(counters: "Counters", path: Path | None, traced: "Traced | None") -> str:
    """Summarize a profile. Stages overlap, so their seconds do not add up to the run's."""
    lines = ["where the time went (stages overlap):"]
    lines += [f"  {name:<28}{counters[key]:>9.2f} s" for name, key in _STAGES]
    if path and traced:
        lines += _of_the_device(path, traced)
    return "\n".join(lines)


def _of_the_device(path: Path, traced: "Traced") -> Iterator[str]:
    total, steps = sum(traced.seconds.values()), traced.steps
    if steps:
        yield f"operations of the device in steps {steps[0]} to {steps[-1]}, {total:.3f} s in all:"
    for kind, seconds in traced.top(_SHOWN_OPERATIONS):
        yield f"  {kind[:40]:<40}{seconds * 1e3:>9.1f} ms {seconds / total:>6.1%}"
    rest = len(traced.seconds) - _SHOWN_OPERATIONS
    if rest > 0:
        less = total - sum(seconds for _, seconds in traced.top(_SHOWN_OPERATIONS))
        yield f"  {f'{rest} other kinds':<40}{less * 1e3:>9.1f} ms {less / total:>6.1%}"
    # …/plugins/profile/WHEN/TRACE
    yield f"  open    tensorboard --logdir {path.parents[3]}  (with xprof installed)"
    yield f"  or      {path}  at https://ui.perfetto.dev"


def add_supervise(verbs: Verbs) -> None:
    sub = verbs.add(
        "supervise",
        supervise,
        "run extract, and start it again when it fails",
        epilog="  spile supervise -- extract --out acts/demo --share 3/32",
        usage="spile supervise [options] -- extract ...",
    )
    sub.number(
        "--max-restarts",
        "give up after so many restarts without a finished unit in between [10]",
        10,
    )
    sub.number(
        "--backoff",
        "pause before a restart; doubled with each restart in a row [1]",
        1.0,
        unit="SECONDS",
    )
    sub.number("--max-backoff", "longest pause [60]", 60.0, unit="SECONDS")
    sub.place("command", "extract and its flags", nargs=argparse.REMAINDER, metavar=None)


def supervise(arguments: argparse.Namespace) -> int:
    from spile.fleet.supervise import Patience, Supervisor

    command = arguments.command[arguments.command[:1] == ["--"] :]
    if command[:1] != ["extract"]:
        raise ConfigError(
            "the command is missing: `spile supervise [--max-restarts N] -- extract ...`"
        )
    names = ("max_restarts", "backoff", "max_backoff")
    patience = Patience(**{name: getattr(arguments, name) for name in names})
    parsed = arguments.parse(command)
    if parsed.restart:
        raise ConfigError("--restart cannot be supervised: every restart would start over")
    asked = extraction_of(parsed)
    drives = asked.ray.engine == "ray"
    objects = open_objects(asked.out)
    return Supervisor(command, asked.place.rank, objects, patience, drives=drives).run()

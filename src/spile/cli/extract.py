"""Verbs that run a recipe, or say what that would cost."""

import argparse
import dataclasses
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.cli.lines import formatter
from spile.core.config import Recipe, Runtime, build, load_toml
from spile.core.errors import ConfigError
from spile.core.ray_options import RayOptions

if TYPE_CHECKING:
    from spile.metrics import Counters
    from spile.run.rank import Place


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the file and the flags; flags win."""
    names = (*Recipe.names(), *Runtime.names(), *RayOptions.names(), "out")
    options = load_toml(Path(arguments.config), RayOptions.names()) if arguments.config else {}
    flags = {name: getattr(arguments, name, None) for name in names}
    options |= {name: value for name, value in flags.items() if value is not None}
    out = options.get("out")
    if out is not None and (not isinstance(out, str) or not out):
        raise ConfigError(f"--out must be a non-empty text, got {out!r}")
    return options


@dataclasses.dataclass(frozen=True)
class _Extraction:
    """What is asked for, and where this process stands."""

    recipe: Recipe
    runtime: Runtime
    ray: RayOptions
    out: str
    place: "Place | None"


def _extraction(arguments: argparse.Namespace) -> _Extraction:
    """From here on this process's lines say who it is."""
    from spile.run.rank import find_place
    from spile.run.share import find_share

    options = given(arguments)
    recipe, runtime = build(options)
    ray = RayOptions(**{name: options[name] for name in RayOptions.names() if name in options})
    if "out" not in options:
        raise ConfigError("--out is missing: where should the dataset go?")
    place = share = None
    if ray.engine == "local":
        place, share = find_place(runtime, os.environ), find_share(runtime, os.environ)
    who = ", ".join([f"share {share}"] * bool(share) + [str(place)] * bool(place))
    if who:
        told = formatter(as_json=getattr(arguments, "log_json", False), who=who)
        for handler in logging.getLogger().handlers:
            handler.setFormatter(told)
    return _Extraction(recipe, runtime, ray, options["out"], place)


def extract(arguments: argparse.Namespace) -> int:
    from spile.cli.extract_text import extract_summary
    from spile.cli.progress import progress
    from spile.metrics import Counters
    from spile.run.child import accompany, is_child

    asked = _extraction(arguments)
    place, out = asked.place, asked.out
    if place:
        if not is_child():
            from spile.objects import open_objects

            return accompany(arguments.argv, place, open_objects(out))
        arguments.quiet |= not place.leads
    if asked.ray.engine == "ray":
        from spile.fleet.ray import driver as ray_pool

        make = partial(ray_pool.extract, options=asked.ray)
    else:
        from spile.run.extract import extract as make

    counters = Counters()
    quiet = arguments.quiet or (arguments.json and not arguments.log_json)
    with progress(counters, quiet=quiet, as_json=arguments.log_json) as on_start:
        outcome = make(
            asked.recipe, out, asked.runtime, counters=counters, on_start=on_start,
            stop=arguments.stop,
        )  # fmt: skip
    if place and not place.leads:
        return 0
    if arguments.json:
        spent = {"seconds": counters["unit_seconds"], "tokens_done": int(counters["tokens"])}
        print(json.dumps({**dataclasses.asdict(outcome), **counters.rates(), **spent}))
    elif not arguments.quiet:
        print(extract_summary(out, outcome, counters))
        if asked.runtime.profile:
            print(_profiled(asked.runtime.profile, counters))
    return 0


def _profiled(profile: str, counters: "Counters") -> str:
    from spile.cli.profile_text import profile_summary
    from spile.run.profile import STEP, Profile
    from spile.run.trace import read_trace

    path = Profile.parse(profile).newest()
    return profile_summary(counters, path, read_trace(path, STEP) if path else None)


def supervise(arguments: argparse.Namespace) -> int:
    from spile.fleet.supervise import Patience, Supervisor
    from spile.objects import open_objects

    command = arguments.command[arguments.command[:1] == ["--"] :]
    if command[:1] != ["extract"]:
        raise ConfigError("supervise what? `spile supervise [--max-restarts N] -- extract ...`")
    names = ("max_restarts", "backoff", "max_backoff")
    patience = Patience(**{name: getattr(arguments, name) for name in names})
    asked = _extraction(arguments.parse(command))
    drives = asked.ray.engine == "ray"
    objects = open_objects(asked.out)
    return Supervisor(command, asked.place, objects, patience, drives=drives).run()


def legacy(arguments: argparse.Namespace) -> int:
    from spile.cli.legacy import translate

    words = [word for word in arguments.arguments if word != "--dry-run"]
    dry_run = arguments.dry_run or len(words) < len(arguments.arguments)
    made = translate(arguments.program, words)
    told = [f"# {note}" for note in made.notes]
    told += [f"# {name} holds: {' '.join(text.split())}" for name, text in made.files.items()]
    told.append(str(made))
    print("\n".join(told), file=None if dry_run else sys.stderr)
    if dry_run:
        return 0
    for name, text in made.files.items():
        path = Path(name)
        if path.exists() and path.read_text("utf-8") != text:
            raise ConfigError(f"{name} is there and holds something else; move it away")
        path.write_text(text, "utf-8")
    given = argparse.Namespace(**{**vars(arguments), "argv": list(made.argv)})
    inner = arguments.parse(made.argv, given)
    return inner.verb(inner)

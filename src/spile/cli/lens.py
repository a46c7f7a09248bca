"""The verb `lens`: fits maps from a model's layers to its last, over a corpus."""

import argparse
import dataclasses
import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from spile.cli.extract import (
    accompanied,
    add_recipe_flags,
    extraction_of,
    run_extraction,
)
from spile.cli.flags import Verbs, add_options
from spile.core.config import RayOptions
from spile.core.errors import ConfigError
from spile.core.humanize import plural
from spile.models.files.lenses import JACOBIAN, LENS_KINDS
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.cli.extract import ExtractionAsked
    from spile.lens.fit import LensFit, Refining
    from spile.lens.refine import Maps, Refined

_HELP = """\
Fit a lens over a corpus: a map from the stream after each layer to that after the last one. The
model's own head then reads next tokens from any layer.
The same command resumes after any interruption; several machines may run it at once.

  spile lens fit --model M --corpus C --kind tuned --out lens/tuned
  spile lens fit --model M --corpus C --kind jacobian --max-docs 200 --out lens/jacobian
"""
_COMMON = ("kind", "layers", "out", "model", "corpus", "text_column", "max_docs", "max_tokens")


def add_lens(verbs: Verbs) -> None:
    sub = verbs.add(
        "lens",
        lens,
        "fit a tuned lens or a Jacobian lens",
        usage="spile lens fit --model X --corpus X --kind tuned|jacobian --out DIR [more flags]",
        description=_HELP,
        common=_COMMON,
    )
    sub.place("action", "fit", choices=("fit",), metavar=None)
    fitted = sub.group("lens")
    fitted.add(
        "--kind",
        "tuned: an affine map for each layer, by least squares, as tuned-lens reads it; jacobian: "
        "the mean Jacobian of the last layer, as jacobian-lens reads it",
        "|".join(LENS_KINDS),
    )
    fitted.add(
        "--layers", "layers to map from, as in --taps, e.g. 0-27/4 [all]", "X", default="all"
    )
    fitted.add(
        "--ridge",
        "of a tuned lens: pull the map towards the identity by this share of each channel's "
        "variance [1e-4]",
        "X",
        type=float,
    )
    fitted.add(
        "--refine",
        "of a tuned lens: then take N steps of Muon, of 1,024 tokens each, that lower the KL "
        "divergence from the model's own predictions [0]",
        "N",
        type=int,
        default=0,
    )
    fitted.add("--learning-rate", "of these steps; it falls to zero [0.02]", "X", type=float)
    add_recipe_flags(sub)
    sub.switch("--log-json", "print progress and log as JSON objects on stderr, one a line")
    add_options(sub, "engine", RayOptions)


def lens(arguments: argparse.Namespace) -> int:
    from spile.dataset.read.opening import open_dataset
    from spile.lens.fit import lens_of, sums_at, sums_recipe
    from spile.lens.solve import RIDGE

    if arguments.kind is None:
        raise ConfigError(f"--kind is missing: choose {' or '.join(LENS_KINDS)}")
    ridge = RIDGE if arguments.ridge is None else arguments.ridge
    if not 0 <= ridge < 1:
        raise ConfigError(f"--ridge must be at least 0 and less than 1, got {ridge:g}")
    if arguments.refine < 0:
        raise ConfigError(f"--refine must be a number of steps, got {arguments.refine}")
    if arguments.kind == JACOBIAN and (arguments.refine or arguments.ridge is not None):
        raise ConfigError("--refine and --ridge are for --kind tuned; leave them out")
    rate = arguments.learning_rate
    if rate is not None and not (arguments.refine and 0 < rate < math.inf):
        raise ConfigError(f"--learning-rate {rate:g}: give a positive number, beside --refine")
    asked = extraction_of(arguments)
    sums = dataclasses.replace(
        asked,
        recipe=sums_recipe(asked.recipe, arguments.kind, arguments.layers),
        out=sums_at(asked.out),
    )
    if (code := accompanied(sums, arguments)) is not None:
        return code
    outcome, _ = run_extraction(sums, arguments)
    rank = asked.place.rank
    if rank and not rank.leads:
        return 0
    if not outcome.complete:
        raise ConfigError(
            f"--max-bytes ended it after {outcome.units} of {outcome.units_total} units: the lens "
            "is made when all are done; give a larger --max-bytes, or fewer documents"
        )
    refining = _refining(asked, arguments) if arguments.refine else None
    made = lens_of(open_dataset(sums.out), asked.out, ridge=ridge, refining=refining)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(made)))
    elif not arguments.quiet:
        print(_summary(made))
    return 0


def _refining(asked: "ExtractionAsked", arguments: argparse.Namespace) -> "Refining":
    """Return the function that refines the maps of a tuned lens."""
    from functools import partial

    from spile.lens.fit import sums_recipe
    from spile.lens.refine import RATE, RefineOptions, refine

    rate = RATE if arguments.learning_rate is None else arguments.learning_rate
    recipe = sums_recipe(asked.recipe, arguments.kind, arguments.layers)
    objects, options = open_objects(asked.out), RefineOptions(arguments.refine, rate)

    def refining(target: str, maps: "Maps", spreads: Any, identity: str) -> "Refined":
        run = partial(refine, recipe, target, maps, spreads, objects, options)
        return run(identity=identity, runtime=asked.runtime)

    return refining


def _summary(made: "LensFit") -> str:
    counted = plural(made.counted, "prompt" if made.kind == JACOBIAN else "token")
    lines = [
        f"{made.out}: {made.kind} lens of {plural(len(made.layers), 'layer')} over {counted}: "
        f"{', '.join(made.files)}"
    ]
    known = [each for each in made.layers if each.explained is not None]
    if known:
        shown = known[:: max(1, len(known) // 6)]
        told = ", ".join(f"{each.layer} {each.explained:.3f}" for each in shown)
        lines.append(f"  variance of the last layer that it explains, by layer: {told}")
    refined = [each for each in made.layers if each.kl is not None]
    if refined:
        shown = refined[:: max(1, len(refined) // 6)]
        told = ", ".join(f"{e.layer} {e.kl[0]:.3f} -> {e.kl[1]:.3f}" for e in shown if e.kl)
        lines.append(
            f"  KL divergence in the first and the last tenth of the steps, in nats: {told}"
        )
    lines.append(f"  use     spile extract --lens {shlex.quote(made.out)} --taps lens_top:LAYERS …")
    return "\n".join(lines)

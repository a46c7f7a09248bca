"""The verb that counts the latents of a dataset: its features."""

import argparse
import dataclasses
import json
import re
import shlex
from typing import TYPE_CHECKING

from spile.cli.flags import Verbs
from spile.core.errors import ConfigError
from spile.core.humanize import plural, size

if TYPE_CHECKING:
    from spile.features.run import MadeFeatures


def add_features(verbs: Verbs) -> None:
    sub = verbs.add(
        "features",
        features,
        "count every latent: density, examples, neighbours, logits",
        epilog="  spile features acts/latents\n"
        "  spile features acts/demo --tap resid_post.9 --directions refusal.npy",
    )
    sub.place("out")
    sub.add("--tap", "the encoded tap; with --directions, a dense one [the only one]", "T")
    sub.add(
        "--directions",
        ".npy files of vectors in place of an encoder, comma separated",
        "FILES",
        default="",
    )
    sub.number("--examples", "rows to keep of each latent, at the top and in each band [10]")
    sub.number("--neighbour-rows", "rows to draw, to find neighbours [32768]")
    sub.number("--logits", "tokens that a latent raises and lowers most; 0: none [10]")
    sub.add("--model", "the model's place now, if it has moved; for logits", "X")
    sub.add("--encode", "the encoder's place now, if it has moved; for logits", "X")
    sub.add("--share", "I/N, from 0: count this share first, on one of N machines [0/1]", "I/N")


def features(arguments: argparse.Namespace) -> None:
    from spile.core.threads import cancelled_by
    from spile.features.run import FeatureRequest, make_features
    from spile.run.pipeline.display import counted

    request = FeatureRequest(
        tap=arguments.tap,
        directions=[name for name in map(str.strip, arguments.directions.split(",")) if name],
        examples=arguments.examples,
        rows=arguments.neighbour_rows,
        logits=arguments.logits,
        model=arguments.model,
        encode=arguments.encode,
        share=_share(arguments.share or "0/1"),
    )
    with (
        cancelled_by(arguments.stop),
        counted("parts", quiet=arguments.json) as progress,
    ):
        made = make_features(arguments.out, request, progress=progress)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else features_text(made))


def _share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--share is I/N, with I from 0 to N - 1, e.g. 0/4; not {text!r}")
    return int(match[1]), int(match[2])


def features_text(made: "MadeFeatures") -> str:
    """Describe what was counted, and what is left to count."""
    there, every = made.parts
    told = f"{made.dataset}: {plural(made.latents, 'feature')} of {made.tap}"
    if made.units is None or there < every:
        counted = f"{there:,} of {plural(every, 'part')} counted"
        lines = [
            f"{told}, {counted}; run the same command again once the other units are done",
        ]
    else:
        lines = [f"{told} over {plural(made.rows, 'row')}, {size(made.bytes)} ({made.name})"]
        lines.append(f"  look    spile serve {shlex.quote(made.dataset)}")
    if made.note:
        lines.append(f"  {made.note}")
    return "\n".join(lines)

"""The verb that encodes the rows of several models' datasets together: crosscoders."""

import argparse
import dataclasses
import json
import shlex
from typing import TYPE_CHECKING

from spile.cli.flags import Verbs
from spile.core.errors import ConfigError
from spile.core.humanize import plural, size
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.run.encode import MadeLatents


def add_encode(verbs: Verbs) -> None:
    sub = verbs.add(
        "encode",
        encode,
        "encode the rows of several models' datasets by a crosscoder",
        epilog="  spile extract --like acts/base --model CHAT --out acts/chat\n"
        "  spile encode acts/base acts/chat acts/crossed --encode CROSSCODER --tap resid_post:13",
    )
    sub.place("out", "the datasets, in the order in which the crosscoder reads them", nargs="+")
    sub.place("dest", "directory or URL of the new dataset")
    sub.add(
        "--encode",
        "directory, file or URL of the crosscoder (dictionary_learning, Kissane et al.)",
        "DIR",
        required=True,
    )
    sub.add("--tap", "the tap that it reads in every dataset", "T", required=True)
    sub.number("--latents", "how many latents to keep per row [64]")
    sub.add("--scale", "what each dataset's rows are multiplied by first [1]", "A,B")
    sub.add("--store-dtype", "of activations: bfloat16, float16 or float32 [bfloat16]", "X")


def encode(arguments: argparse.Namespace) -> None:
    from spile.core.threads import cancelled_by
    from spile.run.encode import EncodeRequest, encode
    from spile.run.pipeline.display import counted

    request = EncodeRequest(
        encoder=arguments.encode,
        tap=arguments.tap,
        latents=arguments.latents,
        scale=_numbers(arguments.scale),
        store_dtype=arguments.store_dtype or "bfloat16",
    )
    dest = open_objects(arguments.dest, prefix="SPILE_DEST_")
    with (
        cancelled_by(arguments.stop),
        counted("units", quiet=arguments.json) as progress,
    ):
        made = encode(arguments.out, dest, request, progress=progress)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else encoded_text(made))


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"--scale {text}: give a number for each dataset: 0.28,0.24") from None


def encoded_text(made: "MadeLatents") -> str:
    """Describe what was encoded, and what did not fit."""
    lines = [
        f"{made.dest}: {plural(made.rows, 'row')} of {made.tap}, {made.kept} of {made.latents:,} "
        f"latents each, in {plural(made.units, 'unit')}, {size(made.bytes)}"
    ]
    if made.truncated:
        lines.append(
            f"  {plural(made.truncated, 'row')} had more active latents; --latents keeps more"
        )
    lines.append(f"  count   spile features {shlex.quote(made.dest)}")
    return "\n".join(lines)

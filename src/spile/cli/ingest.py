"""The verb that makes a dataset of rows that another engine made."""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from spile.cli.flags import Verbs, count_of
from spile.core.config import COMPUTE_DTYPES
from spile.core.humanize import plural

if TYPE_CHECKING:
    from spile.interop.ingest import Ingested

_NAMES = ("model", "taps", "format", "prompts", "rows_by", "lora", "store_dtype", "compute_dtype")


def add_ingest(verbs: Verbs) -> None:
    sub = verbs.add(
        "ingest",
        ingest,
        "make a dataset of rows that vLLM, SGLang or another engine made",
        epilog="  spile ingest hidden_states/ --model Qwen/Qwen3-8B --out acts/vllm \\\n"
        "      --taps 'aux_hidden_states[2],aux_hidden_states[18],aux_hidden_states[33]'\n"
        "  spile check acts/vllm",
    )
    formats: Iterable[str] = ()
    if verbs.may_be("ingest"):
        from spile.interop.ingest import FORMATS as formats
    sub.place("source", "the engine's file or folder, or its URL")
    sub.add("--model", "the model that the engine ran, as for extract", "X", required=True)
    sub.add("--out", "the directory or URL of the dataset", "OUT", required=True)
    sub.add("--taps", "what the layers of each token are, in their order [as the files say]", "T")
    sub.add("--format", f"{', '.join(formats)} [recognised]", "FORMAT")
    sub.add("--prompts", "the prompts, for files without token ids", "FILE")
    sub.add("--rows-by", "the engine and its version, kept in the recipe", "NAME")
    sub.add("--lora", "the adapter that the engine merged, as for extract", "X")
    sub.add("--store-dtype", "[the files' own]", "X")
    sub.add("--compute-dtype", "in which the engine computes [bfloat16]", choices=COMPUTE_DTYPES)
    sub.add("--seq-len", "the most tokens that a document may have [the model's maximum]", "N")
    sub.add("--unit-tokens", "tokens that end a unit [256 MiB of rows]", "N")


def ingest(arguments: argparse.Namespace) -> None:
    from spile.interop.ingest import ingest
    from spile.run.pipeline.display import counted

    options = {name: getattr(arguments, name) for name in _NAMES}
    for name in ("seq_len", "unit_tokens"):
        given = getattr(arguments, name)
        flag = f"--{name.replace('_', '-')}"
        options[name] = None if given is None else count_of(flag, given, "a number, or 64k")
    with counted("documents", quiet=arguments.json) as progress:
        made = ingest(arguments.source, arguments.out, progress=progress, **options)
    print(json.dumps(dataclasses.asdict(made)) if arguments.json else ingest_text(made))


def ingest_text(made: "Ingested") -> str:
    """Describe what was stored, and what was refused."""
    lines = [
        f"{made.out}: {plural(made.rows, 'row')} of {plural(len(made.taps), 'tap')} "
        f"({', '.join(made.taps)}) in {made.dtype}, from {plural(made.documents, 'document')} of "
        f"{made.rows_by}, in {plural(made.units, 'unit')}"
    ]
    if made.refused:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in made.refused.items())
        lines.append(f"refused: {plural(sum(made.refused.values()), 'document')} ({reasons})")
    lines.append(f"  check   spile check {shlex.quote(made.out)}")
    return "\n".join(lines)

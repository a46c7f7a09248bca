"""What reading rollouts costs: how full packed rows are, and a step of a 7B model over them.

    python bench/rollouts.py --fill        how full rows are; on any machine, without a model
    python bench/rollouts.py [--model Qwen2.5-7B] [--layers 28] [--tokens 16384] [--seconds 4]

Lengths are log-normal: documents of text have a median of 600 tokens; rollouts have a prompt of
about 150 and an answer of about 700. Documents longer than a row are cut. Steps read packed rows
of documents or of rollouts, store the last layer's residual stream (of rollouts, the assistant's
tokens), and compare an engine's log-probabilities or not. Weights are random, in bfloat16.
"""

import argparse
import json
import os
from functools import partial
from typing import Any

import numpy as np
from families import CONFIGS, random_params, timed

from spile.core.expressions import RowFilter
from spile.core.index import ROLES
from spile.corpus.pack import PackedUnit, pack_unit

_UNIT = 1 << 20  # tokens of a unit


class _NoSpecials:
    """Stands for a tokenizer: no token is special."""

    def flags(self, tokens: np.ndarray) -> np.ndarray:
        return np.zeros(len(tokens), np.uint16)


def lengths(rng: np.random.Generator, median: float, spread: float, most: int) -> np.ndarray:
    drawn = rng.lognormal(np.log(median), spread, _UNIT // int(median))
    return np.clip(drawn, 8, most).astype(np.int64)


def unit_of(kind: str, seq_len: int, *, compares: bool, vocabulary: int = 1000) -> PackedUnit:
    """A packed unit of about a million tokens."""
    rng = np.random.default_rng(0)
    if kind == "text":
        answers = lengths(rng, 600, 1.0, 32768)
        prompts = np.zeros_like(answers)
    else:
        answers = lengths(rng, 700, 0.9, 32768)
        prompts = np.repeat(lengths(rng, 150, 0.6, 2048), 4)[: len(answers)]
    total = prompts + answers
    total = total[: max(1, int(np.searchsorted(np.cumsum(total), _UNIT)))]
    ids = [rng.integers(0, vocabulary, count).astype(np.int32) for count in total]
    user, assistant = ROLES["user"], ROLES["assistant"]
    both = zip(prompts, answers, strict=False)
    said = [np.repeat(np.array([user, assistant], np.uint16), each) for each in both][: len(ids)]
    logs = [np.where(roles == assistant, -1.0, np.nan).astype(np.float32) for roles in said]
    tokenizer: Any = _NoSpecials()
    return pack_unit(
        [*range(len(ids))], ids, tokenizer, seq_len=seq_len, long_docs="split", pack="ffd",
        rows=RowFilter(None if kind == "text" else "assistant", None),
        roles=[] if kind == "text" else said, logprobs=logs if compares else None,
    )  # fmt: skip


def fill() -> None:
    print(f"{'corpus':<10} {'rows of':>8} {'documents':>10} {'full':>7} {'stored':>8}")
    for kind in ("text", "rollouts"):
        for seq_len in (2048, 4096, 8192):
            unit = unit_of(kind, seq_len, compares=False)
            full = unit.lengths.sum() / unit.tokens.size
            stored = unit.num_rows / unit.num_tokens
            print(f"{kind:<10} {seq_len:>8,} {unit.num_docs:>10,} {full:>7.2%} {stored:>8.1%}")


def measure(options: argparse.Namespace) -> None:
    import jax

    from spile.models.config.hf_config import read_config
    from spile.models.taps import parse_taps
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings

    config = json.loads((CONFIGS / f"{options.model}.json").read_text())
    config["num_hidden_layers"] = options.layers
    _, arch = read_config(config, "bench")
    params, schedule = random_params(arch, options.layers)
    rows = options.tokens // options.seq_len
    device = jax.devices()[0]
    told = f"{options.model}, {options.layers} layers, a vocabulary of {arch.vocab_size:,}"
    print(f"{told}, {rows} rows of {options.seq_len:,}, {device.device_kind}", flush=True)
    for kind, compares in (("text", False), ("rollouts", False), ("rollouts", True)):
        unit = unit_of(kind, options.seq_len, compares=compares)
        batches = [*unit.batches(rows)]
        batch = batches[len(batches) // 2]  # the first ones hold the longest documents
        settings = StepSettings(
            arch=arch, taps=parse_taps(f"resid_post:{options.layers - 1}", arch),
            schedule=schedule, compute_dtype="bfloat16", store_dtype="bfloat16",
            place=StepDevices(device), compares=compares,
        )  # fmt: skip
        step: Any = ResidentStep(params, settings)
        seconds = timed(partial(step.compute, batch), options.seconds)
        tokens = int(batch.lengths.sum())
        name = f"{kind}, compared" if compares else kind
        shares = f"{tokens / batch.tokens.size:.1%} full, {batch.counts.sum() / tokens:.1%} stored"
        print(f"    {name:<20} {tokens / seconds:>9,.0f} tok/s  {seconds * 1e3:>8.1f} ms  {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--model", default="Qwen2.5-7B")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.fill:
        fill()
    else:
        measure(options)


if __name__ == "__main__":
    main()

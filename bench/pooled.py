"""What pooling every layer's residual stream costs a step, beside a plain step and dense rows.

    python bench/pooled.py [--model Qwen2.5-7B] [--layers 28] [--seq-len 2048] [--tokens 16384]
                           [--by mean,max] [--seconds 3]

The model is a published configuration with random bfloat16 weights and a small vocabulary, and
documents fill rows as in families.py. A plain step stores the last layer's residual stream alone.
Rows are copied to pinned host memory, beside the next step. Bytes are of what leaves the device,
for each token that is read; `stored` are those of bfloat16 rows in files.
"""

import argparse
import dataclasses
import os
from typing import Any

import numpy as np
from families import cut_config, natural_batch, random_params, timed


def pooled(batch: Any) -> Any:
    """Return a batch in which each document is a span."""
    from spile.corpus.pack import slots_for

    documents = int(batch.segments.max())
    slots = slots_for(documents)
    sizes = np.stack([np.bincount(row, minlength=slots + 1)[1:] for row in batch.segments])
    return dataclasses.replace(batch, slots=batch.segments, sizes=sizes.astype(np.int32))


def measure(options: argparse.Namespace) -> None:
    import jax

    from spile.models.config.hf_config import read_config
    from spile.models.taps import parse_taps
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings

    config, layers = cut_config(options.model, options.layers)
    _, arch = read_config(config, "bench")
    batch = natural_batch(max(1, options.tokens // options.seq_len), options.seq_len)
    tokens, documents = int(batch.lengths.sum()), int(batch.segments.max(axis=1).sum())
    params, schedule = random_params(arch, layers)
    told = f"{options.model}, {layers} layers, {tokens:,} tokens of {documents} documents a step"
    print(f"{told}, {jax.devices()[0].device_kind}", flush=True)
    every, last = f"resid_post:0-{layers - 1}", f"resid_post:{layers - 1}"
    plain = 0.0
    for name, taps, by in (
        ("plain: the last layer", last, None),
        *((f"{by} of every layer", every, by) for by in options.by.split(",")),
        ("every layer, dense", every, None),
    ):
        settings = StepSettings(
            arch=arch, taps=parse_taps(taps, arch), schedule=schedule, compute_dtype="bfloat16",
            store_dtype="bfloat16", place=StepDevices(jax.devices()[0]), pool=by,
        )  # fmt: skip
        step, given = ResidentStep(params, settings), pooled(batch) if by else batch

        def run(step: ResidentStep = step, given: Any = given) -> Any:
            (found,) = step(given).batches
            return dict(found.rows), dict(found.reduced)

        spent = timed(run, options.seconds)
        plain = plain or spent
        leaving = sum(array.nbytes for array in jax.tree.leaves(run())) / tokens
        rows = documents if by else tokens
        stored = rows * len(settings.taps) * arch.width * 2 / tokens
        print(
            f"    {name:<24} {tokens / spent:>9,.0f} tok/s {plain / spent:>7.1%} of plain, "
            f"{leaving:>9,.0f} bytes a token leave the device, {stored:>9,.0f} stored",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen2.5-7B")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--by", default="mean,max")
    parser.add_argument("--seconds", type=float, default=3.0)
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()

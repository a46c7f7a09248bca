"""What the likeliest tokens, and where heads look, add to a step of a 7B model, and their bytes.

    python bench/tops.py [--model Qwen2.5-7B] [--layers N] [--tokens 16384] [--seconds 4]
                         [--only plain,logprob,top_logits]

The model is a published configuration with random bfloat16 weights, its whole vocabulary and all
its layers, unless `--layers` cuts them. Every step also stores a residual stream, as `plain` does.
`top_logits` is compared with `logprob`, which multiplies by the same head; the rest with `plain`.
`--top-logits`, `--attn-top` and `--heads` say how many are kept. `bench/largest.py` compares ways
to find the likeliest tokens alone.
"""

import argparse
import json
import os
from functools import partial
from typing import Any

from families import CONFIGS, natural_batch, random_params, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen2.5-7B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--top-logits", type=int, default=64)
    parser.add_argument("--attn-top", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--only", help="some of the rows of the table, by name")
    options = parser.parse_args()
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from spile.core.tensors import DTYPES_BY_NAME
    from spile.models.config.hf_config import read_config
    from spile.models.taps import Tap, parse_taps, with_tops
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings

    config = json.loads((CONFIGS / f"{options.model}.json").read_text())
    if options.layers:
        config["num_hidden_layers"] = options.layers
    _, arch = read_config(config, "bench")
    seq, depth = options.seq_len, arch.num_layers
    batch = natural_batch(options.tokens // seq, seq)
    params, schedule = random_params(arch, depth)
    plain, middle = f"resid_post:{depth - 1}", depth // 2
    some = f"{middle}." + "+".join(f"h{head}" for head in range(options.heads))
    cases = {
        "plain": ("", "", {}),
        "logprob": ("logprob", "plain", {}),
        "top_logits": ("logprob,top_logits", "logprob", {"top_logits": options.top_logits}),
        "attn_top": (f"attn_top:{some}", "plain", {"attn_top": options.attn_top}),
        "attn_summary": (f"attn_summary:{some}", "plain", {}),
        "attn_summary, a layer": (f"attn_summary:{middle}", "plain", {}),
        "attn_pattern": (f"attn_pattern:{some}", "plain", {}),
    }

    if options.only:
        cases = {name: cases[name] for name in options.only.split(",")}

    def row_bytes(tap: Tap) -> int:
        return tap.width(arch, seq) * DTYPES_BY_NAME[tap.dtype("bfloat16")].itemsize

    def run(taps: tuple[Tap, ...]) -> float:
        settings = StepSettings(
            arch=arch, taps=taps, schedule=schedule, compute_dtype="bfloat16",
            store_dtype="bfloat16", place=StepDevices(jax.devices()[0]),
        )  # fmt: skip
        step: Any = ResidentStep(params, settings)
        return timed(partial(step.compute, batch), options.seconds)

    shape = f"{depth} layers, a vocabulary of {arch.vocab_size:,}"
    print(f"{options.model}: {shape}; {batch.tokens.size:,} tokens in rows of {seq:,}", flush=True)
    print(f"{'taps':<24} {'ms a step':>9} {'beyond':>9} {'share':>7} {'bytes a token':>14}")
    found: dict[str, float] = {}
    dense = sum(map(row_bytes, parse_taps(plain, arch)))
    for name, (taps, beside, tops) in cases.items():
        try:
            chosen = parse_taps(",".join(filter(None, (plain, taps))), arch)
            found[name] = run(with_tops(chosen, tops, arch, seq))
        except Exception as error:
            print(f"{name:<24} {str(error).splitlines()[0][:120]}", flush=True)
            continue
        with_k = with_tops(chosen, tops, arch, seq)
        own = [tap for tap in with_k if tap.site != "resid_post"]
        own = [tap for tap in own if name == "logprob" or tap.site != "logprob"]
        size = sum(map(row_bytes, own)) if own else dense
        told = f"{name:<24} {found[name] * 1e3:>9.2f}"
        if beside:
            more = found[name] - found[beside]
            share = f"{more / found['plain']:.2%}"
            told += f" {f'{more * 1e3:+.2f} ms':>9} {share:>7}"
        else:
            told += " " * 18
        print(f"{told} {size:>14,}", flush=True)


if __name__ == "__main__":
    main()

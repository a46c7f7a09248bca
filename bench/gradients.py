"""What gradients at every block's output add to a step of a 7B model, and the memory they take.

    python bench/gradients.py [--model Qwen2.5-7B] [--layers 6] [--tokens 16384] [--seconds 3]
                              [--profile N]

The model is a published configuration with random bfloat16 weights and its whole vocabulary. The
step with the tap `logprob` is what the others are compared with; it multiplies by the same head.
The last column compares gradients with those through attention in plain blocks, in one step: the
smallest cosine over layers of all tokens' gradients together. `--profile` prints the N longest
kernels of each step.
"""

import argparse
import json
import os
from functools import partial
from typing import Any

from families import CONFIGS, natural_batch, profile, random_params, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen2.5-7B")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profile", type=int, default=0)
    options = parser.parse_args()
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import numpy as np

    from spile.models.config.hf_config import read_config
    from spile.models.taps import parse_taps
    from spile.plan.objectives import find_objective
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings

    config = json.loads((CONFIGS / f"{options.model}.json").read_text())
    config["num_hidden_layers"] = options.layers
    _, arch = read_config(config, "bench")
    seq = options.seq_len
    batch = natural_batch(options.tokens // seq, seq)
    params, schedule = random_params(arch, arch.num_layers)

    def step_of(taps: str, *, remat: bool = False, attention: str = "auto") -> Any:
        chosen = parse_taps(taps, arch)
        settings = StepSettings(
            arch=arch, taps=chosen, schedule=schedule, compute_dtype="bfloat16",
            store_dtype="bfloat16", place=StepDevices(jax.devices()[0]), attention=attention,
            objective=find_objective(None, chosen, arch, "bfloat16"), remat=remat,
        )  # fmt: skip
        return ResidentStep(params, settings)

    def rows_of(step: Any) -> dict[str, np.ndarray]:
        ((rows, *_),) = step.compute(batch)
        return {tap: np.asarray(each, np.float32).reshape(-1) for tap, each in rows.items()}

    every = "resid_post_grad:all"
    steps = {
        "logprob": step_of("logprob"),
        "gradients, kept": step_of(every),
        "gradients, computed again": step_of(every, remat=True),
    }
    truth: dict[str, np.ndarray] = {}
    try:
        truth = rows_of(step_of(every, remat=True, attention="blocked"))
    except Exception as error:
        print("blocked:", str(error).splitlines()[0][:200], flush=True)
    shape = f"{arch.num_layers} layers, a vocabulary of {arch.vocab_size:,}"
    print(f"{options.model}: {shape}; {batch.tokens.size:,} tokens in rows of {seq:,}", flush=True)
    print(f"{'step':<28} {'ms':>8} {'ratio':>6} {'memory beside weights':>22} {'cosine':>8}")
    first = 0.0
    for name, step in steps.items():
        try:
            seconds = timed(partial(step.compute, batch), options.seconds)
            found = rows_of(step)
        except Exception as error:
            print(f"{name:<28} {str(error).splitlines()[0][:200]}", flush=True)
            continue
        first = first or seconds
        taken = max(each.memory_analysis().temp_size_in_bytes
                    for each in step.programs.compiled.values())  # fmt: skip
        cosines = [
            float(found[tap] @ own / np.linalg.norm(found[tap]) / np.linalg.norm(own))
            for tap, own in truth.items() if tap in found
        ]  # fmt: skip
        told = f"{min(cosines):>8.5f}" if cosines else ""
        memory = f"{taken / 1e9:.2f} GB"
        print(f"{name:<28} {seconds * 1e3:>8.2f} {seconds / first:>6.2f} {memory:>22} {told}",
              flush=True)  # fmt: skip
        if options.profile:
            profile(partial(step.compute, batch), options.profile)


if __name__ == "__main__":
    main()

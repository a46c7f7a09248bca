"""Fitting lenses: tokens a second of Spile's sums, and of the two projects' ways in torch.

    python bench/lens.py [--model Qwen2.5-0.5B] [--tokens 8192] [--seconds 3]
                         [--only jacobian,their-jacobian,tuned,their-tuned]

The model is a published configuration with random bfloat16 weights and all its layers. Prompts of a
Jacobian lens have 128 tokens. Spile's step holds `--tokens` of them, and runs a backward pass for
each channel; it is compiled, then run once. Jacobian-lens's estimator takes one prompt at a time,
repeated for eight channels in each backward pass; it runs here as its paper defines it, on HF's
model. A tuned lens costs Spile a forward pass and the covariances of each layer's stream with the
last. Tuned-lens trains: a forward pass, then for each layer the head, the KL divergence, and their
gradient. Its tokens are seen once for each step, Spile's once in all.
"""

import argparse
import dataclasses
import json
import os
import time
from typing import Any

import numpy as np
from families import CONFIGS, cut_config, natural_batch, random_params, timed

PROMPT, SKIPPED, AT_ONCE = 128, 16, 8
CASES = ("jacobian", "their-jacobian", "tuned", "their-tuned")


def prompts(rows: int) -> Any:
    """Return a batch of prompts, one in each row, and their valid positions."""
    from spile.corpus.pack import Batch, bucket

    ids = np.random.default_rng(0).integers(0, 4096, (rows, PROMPT)).astype(np.int32)
    positions = np.tile(np.arange(PROMPT, dtype=np.int32), (rows, 1))
    valid = PROMPT - 1 - SKIPPED
    columns = np.zeros((rows, bucket(valid, PROMPT)), np.int32)
    columns[:, :valid] = np.arange(SKIPPED, PROMPT - 1)
    counts = np.full(rows, valid, np.int32)
    slots = (columns > 0).astype(np.int32)
    sizes = np.zeros((rows, 4), np.int32)
    sizes[:, 0] = valid
    full = np.full(rows, PROMPT, np.int32)
    batch = Batch(ids, positions, np.ones_like(ids), full, columns, counts, contexts=16)
    return dataclasses.replace(batch, slots=slots, sizes=sizes)


def step_of(options: argparse.Namespace, pool: str) -> Any:
    import jax

    from spile.models.config.hf_config import read_config
    from spile.models.taps import Tap, parse_taps
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings

    config, layers = cut_config(options.model, None)
    _, arch = read_config(config, "bench")
    params, schedule = random_params(arch, layers)
    last = Tap("resid_post", layers - 1)
    settings = StepSettings(
        arch=arch, taps=(*parse_taps(f"resid_post:0-{layers - 2}", arch), last),
        schedule=schedule, place=StepDevices(jax.devices()[0]), compute_dtype="bfloat16",
        store_dtype="float32", pool=pool, beside=last,
    )  # fmt: skip
    return ResidentStep(params, settings)


def jacobian(options: argparse.Namespace) -> None:
    import jax

    from spile.core.pool import JACOBIAN

    step, batch = step_of(options, JACOBIAN), prompts(options.tokens // PROMPT)
    begin = time.perf_counter()
    step.compile(batch)
    compiled = time.perf_counter() - begin
    begin = time.perf_counter()
    jax.block_until_ready(step.compute(batch))
    spent = time.perf_counter() - begin
    tell("Jacobian lens, Spile", batch.tokens.size / spent, f"compiled in {compiled:.0f} s")


def their_jacobian(options: argparse.Namespace) -> None:
    import torch

    network = hf_model(options.model)
    streams: dict[int, Any] = {}
    for number, layer in enumerate(network.model.layers):

        def keep(_: Any, __: Any, out: Any, number: int = number) -> None:
            found = out[0] if isinstance(out, tuple) else out
            streams[number] = found.requires_grad_() if number == 0 else found

        layer.register_forward_hook(keep)
    last, count, begin = len(network.model.layers) - 1, 0, 0.0
    valid = torch.arange(SKIPPED, PROMPT - 1, device="cuda")
    while count < 2 or time.perf_counter() - begin < options.seconds:
        ids = torch.randint(0, 4096, (1, PROMPT), device="cuda").expand(AT_ONCE, -1)
        network.model(input_ids=ids, use_cache=False)
        target, sources = streams[last], [streams[layer] for layer in range(last)]
        batch = torch.arange(AT_ONCE, device="cuda")
        for first in range(0, target.shape[-1], AT_ONCE):
            cotangent = torch.zeros_like(target)
            cotangent[batch[:, None], valid[None, :], first + batch[:, None]] = 1.0
            found = torch.autograd.grad(target, sources, cotangent, retain_graph=True)
            for gradient in found:
                gradient[:, valid].float().mean(dim=1).cpu()
        count += 1
        if count == 1:  # the first is for warming up
            begin = time.perf_counter()
    spent = (time.perf_counter() - begin) / (count - 1)
    tell("Jacobian lens, torch, a prompt at a time", PROMPT / spent, f"{count - 1} prompts")


def tuned(options: argparse.Namespace) -> None:
    from spile.core.pool import COVARIANCE

    step, batch = step_of(options, COVARIANCE), natural_batch(8, 2048)
    rows = len(batch.tokens)
    sizes = np.zeros((rows, 4), np.int32)
    sizes[:, 0] = batch.lengths
    given = dataclasses.replace(
        batch,
        slots=(batch.segments > 0).astype(np.int32),
        sizes=sizes,
        labels=np.ones((rows, 1), np.int32),
    )
    spent = timed(lambda: step.compute(given), options.seconds)
    tell("tuned lens, Spile's sums", int(batch.lengths.sum()) / spent, "each token once")


def their_tuned(options: argparse.Namespace) -> None:
    import torch

    network = hf_model(options.model)
    network.requires_grad_(False)
    width, layers = network.config.hidden_size, network.config.num_hidden_layers
    with torch.device("cuda"):
        translators = [torch.nn.Linear(width, width).bfloat16() for _ in range(layers)]
    parameters = [each for translator in translators for each in translator.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    count, begin = 0, 0.0
    while count < 3 or time.perf_counter() - begin < options.seconds:
        ids = torch.randint(0, 4096, (1, 2048), device="cuda")
        with torch.no_grad():
            out = network(input_ids=ids, output_hidden_states=True, use_cache=False)
            labels = out.logits.float().log_softmax(-1)
        for translator, hidden in zip(translators, out.hidden_states[:-1], strict=True):
            logits = network.lm_head(network.model.norm(hidden + translator(hidden)))
            logs = logits.float().log_softmax(-1)
            loss = (labels.exp() * (labels - logs)).sum(-1).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        count += 1
        if count == 1:
            begin = time.perf_counter()
    spent = (time.perf_counter() - begin) / (count - 1)
    tell("tuned lens, training in torch", 2048 / spent, "each token once for a step")


def hf_model(name: str) -> Any:
    import torch
    import transformers

    config = json.loads((CONFIGS / f"{name}.json").read_text())
    settings = transformers.AutoConfig.for_model(**config)
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("cuda"):
        return kind._from_config(settings, dtype=torch.bfloat16).eval()


def tell(name: str, rate: float, more: str) -> None:
    print(f"{name:<44} {rate:>10,.0f} tok/s  ({more})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen2.5-0.5B")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default=",".join(CASES))
    options = parser.parse_args()
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for case in options.only.split(","):
        globals()[case.replace("-", "_")](options)


if __name__ == "__main__":
    main()

"""A crosscoder: one dictionary of latents for two models that read the same tokens.

    spile extract --model demo --corpus demo --keep year --taps resid_post:9 --max-docs 120 \
        --seq-len 256 --out acts/lora/base
    python examples/train_lora.py acts/lora/base --label 'year < 1900' --out lora
    spile extract --like acts/lora/base --lora lora --out acts/lora/tuned
    python examples/crosscoder.py acts/lora/base acts/lora/tuned --tap resid_post.9

This is the crosscoder of Lindsey et al. ("Sparse Crosscoders", Anthropic 2024). Latents are
ReLU(sum of W_enc x over the models + b); each model has its own decoder; the loss is the squared
error of all models, plus `--sparsity` times each latent times the sum of its decoders' norms. A
latent with nearly all of that norm in one model belongs to that model alone. The last line printed
is measured on every fifth document, which is not trained on.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spile
from spile.core.errors import SpileError

# Skip the first row of a context, which is huge and always the same.
LEARNT, HELD_OUT = "pos >= 1 and doc % 5 != 0", "pos >= 1 and doc % 5 == 0"
ALONE, SHARED = 0.1, 0.3  # a latent's share of norm in the smaller model: at most, at least
SETTINGS = {
    "latents": 1024, "steps": 400, "batch": 512, "rate": 1e-3, "sparsity": 2.0, "seed": 0
}  # fmt: skip

Rows = dict[str, jax.Array]  # by model: [rows, width], with a mean square of one


def begin(first: Rows, latents: int, seed: int) -> dict[str, Any]:
    """Start with small random directions for each model, and the first rows' means as biases."""
    keys = jax.random.split(jax.random.key(seed), len(first))
    dec = {
        side: jax.random.normal(key, (latents, x.shape[1])) * 0.1 / jnp.sqrt(x.shape[1])
        for key, (side, x) in zip(keys, first.items(), strict=True)
    }
    b_dec = {side: x.mean(axis=0) for side, x in first.items()}
    enc = {side: array.T for side, array in dec.items()}
    return {"enc": enc, "dec": dec, "b_enc": jnp.zeros(latents), "b_dec": b_dec}


def encode(coder: dict[str, Any], x: Rows) -> jax.Array:
    of_each = [(x[side] - coder["b_dec"][side]) @ w for side, w in coder["enc"].items()]
    return jax.nn.relu(sum(of_each) + coder["b_enc"])


def unexplained(coder: dict[str, Any], x: Rows, latents: jax.Array) -> Rows:
    """Return the squared error of each model, for all rows and values."""
    decoded = {side: latents @ w + coder["b_dec"][side] for side, w in coder["dec"].items()}
    return {side: jnp.square(x[side] - decoded[side]).sum() for side in decoded}


def norms(coder: dict[str, Any]) -> Rows:
    """Return the norm of each latent's decoder direction, in each model."""
    return {side: jnp.linalg.norm(w, axis=1) for side, w in coder["dec"].items()}


def loss(coder: dict[str, Any], x: Rows, sparsity: jax.Array) -> jax.Array:
    latents = encode(coder, x)
    wrong = sum(unexplained(coder, x, latents).values())
    return (wrong + sparsity * (latents * sum(norms(coder).values())).sum()) / len(latents)


@partial(jax.jit, donate_argnums=0)
def advance(state: dict[str, Any], x: Rows, rate: jax.Array, sparsity: jax.Array) -> dict[str, Any]:
    """Make one step of Adam."""
    number = state["step"] + 1
    slopes = jax.grad(loss)(state["coder"], x, sparsity)
    mean = jax.tree.map(lambda m, s: 0.9 * m + 0.1 * s, state["mean"], slopes)
    square = jax.tree.map(lambda m, s: 0.999 * m + 0.001 * s * s, state["square"], slopes)

    def moved(weight: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        size = jnp.sqrt(square / (1 - 0.999**number)) + 1e-8
        return weight - rate * (mean / (1 - 0.9**number)) / size

    coder = jax.tree.map(moved, state["coder"], mean, square)
    return {"coder": coder, "mean": mean, "square": square, "step": number}


def train(batches: Iterator[Rows], args: argparse.Namespace) -> dict[str, Any]:
    """Train; the sparsity rises in the first half of the steps, the rate falls in the second."""
    state: dict[str, Any] | None = None
    for number, x in enumerate(islice(batches, args.steps)):
        if state is None:
            coder = begin(x, args.latents, args.seed)
            zeros = [jax.tree.map(jnp.zeros_like, coder) for _ in range(2)]
            state = {"coder": coder, "mean": zeros[0], "square": zeros[1], "step": jnp.int32(0)}
        done = number / args.steps
        rate, sparsity = args.rate * min(1, 2 - 2 * done), args.sparsity * min(1, 2 * done)
        state = advance(state, x, rate, sparsity)
        if number % 50 == 0:
            print(f"step {number}: loss {float(loss(state['coder'], x, 0.0)):.1f} without sparsity")
    assert state is not None
    return state["coder"]


def evaluate(coder: dict[str, Any], x: Rows) -> dict[str, Any]:
    latents = encode(coder, x)
    live, wrong = (latents > 0).any(axis=0), unexplained(coder, x, latents)
    (first, one), (second, other) = norms(coder).items()
    share = np.asarray((other / (one + other))[live])  # of the second model
    found = {
        f"explained variance, {side}": float(1 - wrong[side] / jnp.square(a - a.mean(0)).sum())
        for side, a in x.items()
    }
    return found | {
        "L0": float((latents > 0).sum(axis=1).mean()),
        "live latents": int(live.sum()),
        "shared": int(((share >= SHARED) & (share <= 1 - SHARED)).sum()),
        f"only {first}": int((share <= ALONE).sum()),
        f"only {second}": int((share >= 1 - ALONE).sum()),
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("datasets", nargs=2)
    parser.add_argument("--tap", required=True)
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(given)
    try:
        pair = spile.align(*args.datasets)
        options = {"index": False, "seed": args.seed}
        batches = pair.batches(args.tap, args.batch, where=LEARNT, epochs=None, **options)
        tested = next(pair.batches(args.tap, 4096, where=HELD_OUT, **options))
    except SpileError as error:
        raise SystemExit(str(error)) from None
    sides = {name: name.partition("/")[0] for name in tested}
    scales = {n: x.shape[1] ** 0.5 / np.linalg.norm(x, axis=1).mean() for n, x in tested.items()}

    def scaled(batch: dict[str, np.ndarray]) -> Rows:
        return {side: jnp.asarray(batch[n] * scales[n]) for n, side in sides.items()}

    found = evaluate(train(map(scaled, batches), args), scaled(tested))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()

"""Measure the cost on a CPU of summing float32 products in short runs, against torch's products.

    python bench/products.py [--rows 2048]

It runs three blocks of a model's matrix products, in turns, best of eight: torch's, XLA's plain
ones, and XLA's in runs of at most 256, 384 and 512 terms (`models/forward/ops.py`).
docs/exactness.md has the accuracy of each.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spile.models.forward import ops

WIDTHS = {"demo model": (576, 1536), "Qwen2.5-0.5B": (896, 4864)}
RUNS = (256, 384, 512)
BLOCKS, ROUNDS = 3, 8


def block(x: Any, weights: Any, product: Callable[[Any, Any], Any], silu: Any) -> Any:
    """The products of attention's outer projections and of a gated MLP."""
    query, out, gate, up, down = weights
    x = x + product(product(x, query), out)
    x = x + product(silu(product(x, gate)) * product(x, up), down)
    return x / abs(x).mean()


def chain(product: Callable[[Any, Any], Any], silu: Any, x: Any, layers: Any) -> Any:
    for weights in layers:
        x = block(x, weights, product, silu)
    return x


def in_xla(run: int | None) -> Callable[[Any, Any], Any]:
    def product(x: Any, weight: Any) -> Any:
        if run is None:
            return jnp.einsum("mk,nk->mn", x, weight)
        ops._RUN = run  # pyright: ignore[reportPrivateUsage]
        return ops._in_runs("mk,nk->mn", x, weight)  # pyright: ignore[reportPrivateUsage]

    return jax.jit(partial(chain, product, jax.nn.silu))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2048)
    rows = parser.parse_args().rows
    for name, (width, inner) in WIDTHS.items():
        rng = np.random.default_rng(0)
        shapes = [(width, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
        drawn = [
            [(rng.standard_normal(s) / s[1] ** 0.5).astype(np.float32) for s in shapes]
            for _ in range(BLOCKS)
        ]
        x = rng.standard_normal((rows, width)).astype(np.float32)
        tensors = [[torch.from_numpy(w) for w in layer] for layer in drawn]
        arrays = [[jnp.asarray(w) for w in layer] for layer in drawn]
        of_torch = partial(chain, lambda a, w: a @ w.T, torch.nn.functional.silu)
        calls = {"torch": partial(of_torch, torch.from_numpy(x), tensors)}
        for run in (None, *RUNS):
            ways = partial(in_xla(run), jnp.asarray(x), arrays)
            calls[f"XLA, runs of {run}" if run else "XLA"] = ways
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(1 + ROUNDS):
            for way, call in calls.items():
                began = time.perf_counter()
                jax.block_until_ready(call())
                best[way] = min(best[way], time.perf_counter() - began)
        work = 2 * rows * BLOCKS * sum(a * b for a, b in shapes) / 1e9
        told = ", ".join(f"{way} {work / seconds:.0f}" for way, seconds in best.items())
        print(f"{name} ({width}, {inner}), {rows} rows, GFLOP/s: {told}")


main()

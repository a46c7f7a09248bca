"""What the TPU's compiler says of recurrent layers' kernels, beside the plain form; no TPU is used.

    python bench/tpu_kernels.py [--topologies v5e-8,v6e-8,v5p-8] [--tokens 16384]

One layer, rows of 2,048 tokens, compiled by libtpu for one chip. Bytes are those that a program
reads and writes in the chip's memory: the compiler's count, which has one turn of the plain form's
loop over chunks, and of a kernel its blocks. It prints a Markdown table.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from spile.compile.targets import find_target
from spile.models.config.arch import GatedDelta
from spile.models.forward.kernels import (
    decay_by_channel_tpu,
    gated_delta_tpu,
    state_space_tpu,
)
from spile.models.forward.kernels.chunks import plain_recurrence
from spile.models.forward.mixers import gated_delta, state_space

SEQ = 2048
HALF, FULL = jnp.bfloat16, jnp.float32
Given = list[tuple[tuple[int, ...], Any]]

# heads, groups, width of values, of keys
SPACES = {
    "state space, Mamba-Codestral": (128, 8, 64, 128),
    "state space, Bamba": (128, 1, 64, 128),
    "state space, granite-4.0-h-tiny": (48, 1, 64, 128),
    "state space, Falcon-H1-0.5B": (24, 1, 64, 128),
}
# value heads, key heads (as many: decay by channel), width of values, of keys
DELTAS = {
    "gated delta, Qwen3-Next": (32, 16, 128, 128),
    "gated delta, Qwen3.5-27B": (48, 16, 128, 128),
    "delta by channel, Kimi-Linear": (32, 32, 128, 128),
}


def of_delta(heads: int, groups: int, dim: int, keys: int, rows: int) -> tuple[Given, Any]:
    """Return the same for a gated delta layer."""
    given, shapes = of_space(heads, groups, dim, keys, rows)
    if heads > groups:
        return [*given[:5], given[6]], shapes
    decay = (rows, SEQ, heads * keys), FULL
    shaped = (*shapes, given[3][0], (rows, SEQ, heads, keys))
    return [*given[:4], decay, given[6]], shaped


def plain_delta(heads: int, groups: int, dim: int, keys: int) -> Callable[..., jax.Array]:
    sizes = GatedDelta(
        key_heads=groups, value_heads=heads, key_dim=keys, value_dim=dim, kernel=4, norm_eps=1e-6,
        by_channel=heads == groups,
    )  # fmt: skip
    with plain_recurrence(True):
        rule = gated_delta._rule(sizes, False, jnp.dtype(HALF))
    return lambda *given: rule(*given).values.astype(HALF)


def of_space(heads: int, groups: int, dim: int, keys: int, rows: int) -> tuple[Given, Any]:
    """Return the inputs of a layer's rule as they come from its convolution, and their shapes."""
    flat, own = (rows, SEQ, groups * keys), (rows, SEQ, groups, keys)
    scalars = ((rows, SEQ, heads), FULL)
    given = [(flat, HALF), (flat, HALF), ((rows, SEQ, heads * dim), HALF), scalars, scalars]
    return [*given, ((heads,), FULL), ((rows, SEQ), jnp.int32)], (own, own, (rows, SEQ, heads, dim))


def flat(run: Callable[..., jax.Array], shapes: Any, *given: jax.Array) -> jax.Array:
    shaped = (a.reshape(shape) for a, shape in zip(given, shapes, strict=False))
    out = run(*shaped, *given[len(shapes) :])
    return out.reshape(*out.shape[:2], -1)


def told(run: Callable[..., jax.Array], given: Given, device: Any) -> tuple[str, str]:
    """Compile a rule; return its temporaries and the bytes that it moves."""
    place = SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in given]
    found: Any = jax.jit(run).lower(*shapes).compile()
    moved = found.cost_analysis()["bytes accessed"]
    return f"{found.memory_analysis().temp_size_in_bytes / 1e6:,.0f}", f"{moved / 1e9:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topologies", default="v5e-8,v6e-8,v5p-8")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--only", default="", help="part of the names of the rules to compile")
    options = parser.parse_args()
    rows = options.tokens // SEQ
    print("| one layer | chip | temporaries, MB: plain | kernel | moved, GB: plain | kernel |")
    print("|---|---|---|---|---|---|")
    rules: list[tuple[str, tuple[Given, Any], Any, Any]] = [
        (name, of_space(*sizes, rows), state_space._in_float32, state_space_tpu.rule)
        for name, sizes in SPACES.items()
    ]
    for name, sizes in DELTAS.items():
        kernel = decay_by_channel_tpu if sizes[0] == sizes[1] else gated_delta_tpu
        fused = partial(kernel.rule, eps=1e-6)
        rules.append((name, of_delta(*sizes, rows), plain_delta(*sizes), fused))
    for topology in options.topologies.split(","):
        device = find_target(topology, "libtpu").devices[0]
        for name, (given, shapes), plain, kernel in rules:
            if options.only not in name:
                continue
            found = [told(partial(flat, run, shapes), given, device) for run in (plain, kernel)]
            cells = " | ".join(each for pair in zip(*found, strict=True) for each in pair)
            print(f"| {name} | {topology.split('-')[0]} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

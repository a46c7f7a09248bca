"""Queries or keys normalised and rotated in one pass over memory.

XLA takes two or three: one for the sizes of heads, and one that divides and rotates.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from spile.models.forward.ops import Heads, gpu_capability


class RotaryTiling(NamedTuple):
    """How a program runs."""

    heads: int = 32
    warps: int = 4


FASTEST = RotaryTiling()  # of those tried on an H200 (docs/benchmarks.md)


def serves(dtype: jnp.dtype, dim: int) -> bool:
    """Return whether this process has a GPU whose kernel takes such heads."""
    fits = dim in (32, 64, 128, 256, 512) and dtype == jnp.bfloat16
    return fits and 9 <= gpu_capability() < 10


def normed_and_rotated(
    x: Heads,
    weight: Float[Array, " dim"] | None,
    cos: Float[Array, "rows seq 1 half"],
    sin: Float[Array, "rows seq 1 half"],
    *,
    eps: float | None,
    scale: float = 1.0,
    tiling: RotaryTiling = FASTEST,
    interpret: bool = False,
) -> Heads:
    """Divide each head by its size, unless `eps` is None; weight and scale it; rotate all of it.

    Everything between is in float32, and rounded once.
    """
    rows, seq, heads, dim = x.shape
    given = () if weight is None else (weight.astype(jnp.float32),)
    half = dim // 2
    run: Any = pl.pallas_call(
        partial(_kernel, tiling=tiling, each=heads, eps=eps, scale=scale),
        out_shape=jax.ShapeDtypeStruct((rows * seq * heads, dim), x.dtype),
        grid=(pl.cdiv(rows * seq * heads, tiling.heads),),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=1),
        name="normed_and_rotated",
        interpret=interpret,
    )
    angles = (each.reshape(rows * seq, half) for each in (cos, sin))
    return run(x.reshape(-1, dim), *angles, *given).reshape(x.shape)


def _kernel(
    x: Any, cos: Any, sin: Any, *rest: Any,
    tiling: RotaryTiling, each: int, eps: float | None, scale: float,
) -> None:  # fmt: skip
    out, half = rest[-1], x.shape[1] // 2
    row = pl.program_id(0) * tiling.heads + jnp.arange(tiling.heads)
    column = jnp.arange(half)
    inside = jnp.broadcast_to((row < x.shape[0])[:, None], (tiling.heads, half))

    def load(ref: Any, rows: Array, begin: int) -> Array:
        at = ref.at[rows[:, None], begin + column[None, :]]
        return triton.load(at, mask=inside, other=0).astype(jnp.float32)

    first, second = load(x, row, 0), load(x, row, half)
    if eps is not None:
        summed = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
        size = jax.lax.rsqrt(summed / (2 * half) + eps)[:, None]
        first, second = first * size, second * size
    for weight in rest[:-1]:
        first = first * triton.load(weight.at[column])[None, :]
        second = second * triton.load(weight.at[half + column])[None, :]
    token = row // each
    c, s = load(cos, token, 0) * scale, load(sin, token, 0) * scale
    for begin, values in ((0, first * c - second * s), (half, second * c + first * s)):
        at = out.at[row[:, None], begin + column[None, :]]
        triton.store(at, values.astype(out.dtype), mask=inside)

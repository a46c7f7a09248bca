"""The short convolution of `mixers.recurrence` and its activation, in one pass over memory."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from spile.models.forward.ops import Channels, Places, activate


class ConvolutionTiling(NamedTuple):
    """How a program runs."""

    tokens: int = 64
    channels: int = 64
    warps: int = 4


FASTEST = ConvolutionTiling()  # of those tried on an H200 (docs/benchmarks.md)


def convolution(
    x: Channels,
    kernel: Float[jax.Array, "channels 1 width"],
    bias: Float[jax.Array, " channels"] | None,
    segments: Places,
    activation: str | None,
    *,
    tiling: ConvolutionTiling = FASTEST,
    interpret: bool = False,
) -> Channels:
    """Convolve each channel over the last tokens of the document; then activate, if asked."""
    rows, seq, channels = x.shape
    weights = kernel[:, 0].T.astype(jnp.float32)
    if bias is None:
        bias = jnp.zeros(channels, jnp.float32)
    run: Any = pl.pallas_call(
        partial(_kernel, tiling=tiling, width=len(weights), activation=activation),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(channels, tiling.channels), pl.cdiv(seq, tiling.tokens), rows),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=1),
        name="short_convolution",
        interpret=interpret,
    )
    return run(x, weights, bias.astype(jnp.float32), segments)


def _kernel(
    x: Any, weights: Any, bias: Any, segments: Any, out: Any,
    *, tiling: ConvolutionTiling, width: int, activation: str | None,
) -> None:  # fmt: skip
    row = pl.program_id(2)
    tokens = pl.program_id(1) * tiling.tokens + jnp.arange(tiling.tokens)
    dims = pl.program_id(0) * tiling.channels + jnp.arange(tiling.channels)
    inside, there = tokens < x.shape[1], dims < x.shape[2]
    own = triton.load(segments.at[row, tokens], mask=inside, other=-1)
    total = jnp.zeros((tiling.tokens, tiling.channels), jnp.float32)
    for ago in range(width):
        earlier = tokens - ago
        within = inside & (earlier >= 0)
        same = triton.load(segments.at[row, earlier], mask=within, other=-2) == own
        values = triton.load(
            x.at[row, earlier[:, None], dims[None, :]], mask=same[:, None] & there[None, :], other=0
        )
        scale = triton.load(weights.at[jnp.int32(width - 1 - ago), dims], mask=there, other=0.0)
        total = total + values.astype(jnp.float32) * scale[None, :]
    total = total + triton.load(bias.at[dims], mask=there, other=0.0)[None, :]
    if activation is not None:
        rounded = total.astype(x.dtype).astype(jnp.float32)
        total = activate(rounded, None, activation, None)
    triton.store(
        out.at[row, tokens[:, None], dims[None, :]],
        total.astype(out.dtype),
        mask=inside[:, None] & there[None, :],
    )

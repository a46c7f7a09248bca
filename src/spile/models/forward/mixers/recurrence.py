"""What mixers share that read their document token by token: convolutions, chunks and decay.

All of it begins anew with every document of a row.
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int

from spile.models.forward.ops import activate

_STEP = 2.0**-6  # a chunk's sum of multiples has no rounding error up to 2^18

Places = Int[Array, "rows seq"]
Channels = Float[Array, "rows seq channels"]


def convolution(
    x: Channels,
    kernel: Float[Array, "channels 1 width"],
    bias: Float[Array, " channels"] | None,
    segments: Places,
    activation: str | None,
) -> Channels:
    """Weigh each channel's last tokens, of the same document; then the activation, if any."""
    weights = kernel[:, 0].astype(jnp.float32)
    width = weights.shape[1]
    total = jnp.zeros(x.shape, jnp.float32)
    for ago in range(width):
        earlier = shifted(x, ago).astype(jnp.float32)
        same = (shifted(segments, ago, fill=-1) == segments)[..., None]
        total = total + jnp.where(same, earlier, 0.0) * weights[None, None, :, width - 1 - ago]
    if bias is not None:
        total = total + bias.astype(jnp.float32)[None, None]
    out = total.astype(x.dtype)
    return out if activation is None else activate(out, None, activation, None)


def shifted(x: Array, by: int, fill: int = 0) -> Array:
    """The value `by` tokens ago."""
    pads = ((0, 0), (by, 0), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x, pads, constant_values=fill)[:, : x.shape[1]]


def in_chunks(a: Array, fill: int = 0, *, size: int) -> Array:
    """[rows, seq, ...] -> [rows, chunks, size, ...]; the last chunk is filled up."""
    pads = ((0, 0), (0, -a.shape[1] % size), *[(0, 0)] * (a.ndim - 2))
    padded = jnp.pad(a, pads, constant_values=fill)
    return padded.reshape(a.shape[0], -1, size, *a.shape[2:])


def out_of_chunks(a: Array, *, seq: int) -> Array:
    """[rows, chunks, groups, heads of each, size, ...] -> [rows, seq, heads, ...]."""
    a = jnp.moveaxis(a, 4, 2)
    return a.reshape(a.shape[0], -1, a.shape[3] * a.shape[4], *a.shape[5:])[:, :seq]


def decays(
    kept: Float[Array, "rows chunks size groups heads"], places: Int[Array, "rows chunks size"]
) -> tuple[
    Float[Array, "rows chunks groups heads size size"],
    Float[Array, "rows chunks groups heads size"],
]:
    """Decay between two tokens of a chunk; and since the chunk's start, of what was before it.

    Zero across the border of a document. Both are differences of sums, which may be large where
    the result is not: so the sums are in two parts, of multiples of a step, which are exact, and of
    the rest.

    Args:
        kept: the logarithm of the factor by which each token lets a state decay.
        places: the document of each token.
    """
    seen = jnp.tril(places[..., :, None] == places[..., None, :])
    steps = jnp.round(kept / _STEP) * _STEP
    coarse, fine = (
        jnp.einsum("rntj,rnjgh->rnght", seen.astype(jnp.float32), part, precision=Precision.HIGHEST)
        for part in (steps, kept - steps)
    )
    apart = coarse[..., :, None] - coarse[..., None, :] + (fine[..., :, None] - fine[..., None, :])
    between = jnp.exp(jnp.where(seen[:, :, None, None], apart, -jnp.inf))
    before = jnp.pad(places[:, :-1, -1], ((0, 0), (1, 0)), constant_values=-1)
    continues = (places == before[..., None])[:, :, None, None]
    return between, jnp.where(continues, jnp.exp(coarse + fine), 0.0)

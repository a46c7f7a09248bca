"""Convolutions, chunks and decay, which all recurrent mixers share.

All of them restart with every document of a row.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from functools import partial

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Bool, Float, Int

from spile.models.forward.kernels import convolution as kernels
from spile.models.forward.kernels.chunks import serves_recurrence, with_gradient_of
from spile.models.forward.ops import Channels, Places, activate
from spile.models.forward.sharding import Shards

_STEP = 2.0**-6  # sums of multiples of this are exact in float32, up to 2^18

InChunks = Int[Array, "rows chunks size"]


def convolution(
    x: Channels,
    kernel: Float[Array, "channels 1 width"],
    bias: Float[Array, " channels"] | None,
    segments: Places,
    activation: str | None,
    *,
    shards: Shards | None = None,
) -> Channels:
    """Convolve each channel over the last tokens of the document; then activate, if asked.

    A GPU does so in one pass over memory. (Not on a mesh: the compiler cannot partition a kernel.)
    """
    plain = partial(_convolution, activation=activation)
    ways = {}
    if shards is None and serves_recurrence(x.dtype):
        fused = partial(kernels.convolution, activation=activation)
        ways["cuda"] = with_gradient_of(plain, fused)
    return jax.lax.platform_dependent(x, kernel, bias, segments, **ways, default=plain)


def _convolution(
    x: Channels,
    kernel: Float[Array, "channels 1 width"],
    bias: Float[Array, " channels"] | None,
    segments: Places,
    activation: str | None,
) -> Channels:
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
    """Return the value `by` tokens earlier."""
    pads = ((0, 0), (by, 0), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x, pads, constant_values=fill)[:, : x.shape[1]]


def in_chunks(a: Array, fill: int = 0, *, size: int) -> Array:
    """[rows, seq, ...] -> [rows, chunks, size, ...]; the last chunk is padded with `fill`."""
    pads = ((0, 0), (0, -a.shape[1] % size), *[(0, 0)] * (a.ndim - 2))
    padded = jnp.pad(a, pads, constant_values=fill)
    return padded.reshape(a.shape[0], -1, size, *a.shape[2:])


def out_of_chunks(a: Array, *, seq: int) -> Array:
    """[rows, chunks, groups, heads of each, size, ...] -> [rows, seq, heads, ...]."""
    a = jnp.moveaxis(a, 4, 2)
    return a.reshape(a.shape[0], -1, a.shape[3] * a.shape[4], *a.shape[5:])[:, :seq]


def decays(
    kept: Float[Array, "rows chunks size groups heads"], places: InChunks
) -> tuple[
    Float[Array, "rows chunks groups heads size size"],
    Float[Array, "rows chunks groups heads size"],
]:
    """Return the decay between any two tokens of a chunk, and from the chunk's start to each token.

    Both are zero across the border of a document.

    Args:
        kept: the log-decay at each token.
        places: the document of each token.
    """
    coarse, fine = summed(kept, places)
    apart = coarse[..., :, None] - coarse[..., None, :] + (fine[..., :, None] - fine[..., None, :])
    between = jnp.exp(jnp.where(_seen(places)[:, :, None, None], apart, -jnp.inf))
    return between, jnp.where(continues(places)[:, :, None, None], jnp.exp(coarse + fine), 0.0)


def summed(
    kept: Float[Array, "rows chunks size groups heads"], places: InChunks
) -> tuple[Float[Array, "rows chunks groups heads size"], ...]:
    """Return the sum of log-decay up to each token, in its document and its chunk, in two parts.

    A decay is the difference of two sums, which may be much larger than it. To stay exact, the
    first part sums multiples of a step, without rounding errors; the second sums the remainders.
    """
    seen, steps = _seen(places).astype(jnp.float32), jnp.round(kept / _STEP) * _STEP
    return tuple(
        jnp.einsum("rntj,rnjgh->rnght", seen, part, precision=Precision.HIGHEST)
        for part in (steps, kept - steps)
    )


def _seen(places: InChunks) -> Bool[Array, "rows chunks size size"]:
    """Return whether a token sees another: itself and earlier tokens of its document."""
    return jnp.tril(places[..., :, None] == places[..., None, :])


def continues(places: InChunks) -> Bool[Array, "rows chunks size"]:
    """Return whether a token's document began before its chunk."""
    before = jnp.pad(places[:, :-1, -1], ((0, 0), (1, 0)), constant_values=-1)
    return places == before[..., None]


def inverse_of_unit_lower(lower: Float[Array, "*lead size size"]) -> Array:
    """Return the inverse of the identity plus the strictly lower part of a matrix of size 2^n.

    It starts from the diagonal blocks of one element, which are their own inverse. Two neighbouring
    blocks, and the block below the first, then make one block of twice the size.
    """
    lead, size = lower.shape[:-2], lower.shape[-1]
    exact = partial(jnp.einsum, "...ij,...jk->...ik", precision=Precision.HIGHEST)
    inverse = jnp.ones((*lead, size, 1, 1), lower.dtype)  # blocks
    width = 1
    while width < size:
        pairs = size // (2 * width)
        blocks = lower.reshape(*lead, pairs, 2, width, pairs, 2, width)
        below = jnp.diagonal(blocks[..., 1, :, :, 0, :], axis1=-4, axis2=-2)  # pairs come last
        below = jnp.moveaxis(below, -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -exact(exact(second, below), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]

"""The gated delta rule by chunks, where each dimension of a key has its own decay.

The product of two tokens' keys then needs the decay of every channel from one token to the other
(arXiv:2510.26692). That decay is split at a border between the two tokens: one factor from the
earlier token to the border, and one from the border to the later token. So all products across a
border are one matrix product. Every factor is at most one. (With one border for a whole chunk, some
factors could overflow float32.) Kernels do the same for 16-bit values (`kernels.decay_by_channel`
on GPUs, `kernels.decay_by_channel_tpu` on TPUs).
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spile.models.forward.mixers.recurrence import (
    continues,
    in_chunks,
    inverse_of_unit_lower,
    out_of_chunks,
    summed,
)
from spile.models.forward.ops import Heads


class Sums(NamedTuple):
    """Sums of log-decay up to each token, in two parts; and the token's document."""

    coarse: Float[Array, "rows chunks heads size dim"]
    fine: Float[Array, "rows chunks heads size dim"]
    places: Int[Array, "rows chunks 1 size 1"]


def chunked(
    q: Heads,
    k: Heads,
    v: Heads,
    written: Float[Array, "rows seq heads"],
    kept: Heads,
    segments: Int[Array, "rows seq"],
    *,
    size: int,
) -> Heads:
    """Return what queries read, computed by chunks of `size` tokens; arguments as in `recurrent`.

    In the einsums: r rows, n chunks, h heads, t and j tokens of a chunk, k and v the dimensions of
    keys and values.
    """
    seq, cut = q.shape[1], partial(in_chunks, size=size)
    places = cut(segments, fill=-1)
    coarse, fine = (jnp.swapaxes(part, -1, -2) for part in summed(cut(kept), places))
    q, k, v = (jnp.moveaxis(cut(a), 3, 2) for a in (q, k, v))
    strength = jnp.moveaxis(cut(written), 3, 2)
    sums = Sums(coarse, fine, places[:, :, None, :, None])

    by_key, by_query = _products(jnp.stack([k, q]), k, sums)
    solved = inverse_of_unit_lower(by_key * strength[..., None]) * strength[..., None, :]
    since = jnp.where(continues(places)[:, :, None, :, None], jnp.exp(coarse + fine), 0.0)
    # What each token writes if the chunk starts with an empty state, and the correction for each
    # value in the state at the chunk's start.
    fresh = jnp.einsum("rnhtj,rnhjv->rnhtv", solved, v)
    known = jnp.einsum("rnhtj,rnhjk->rnhtk", solved, since * k)
    lasting = k * _decay(sums, Sums(*(each[..., -1:, :] for each in sums)))

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        by_query, asked, fresh, known, lasting, left = chunk
        wrote = fresh - jnp.einsum("rhtk,rhkv->rhtv", known, state)
        read = jnp.einsum("rhtj,rhjv->rhtv", by_query, wrote)
        read = read + jnp.einsum("rhtk,rhkv->rhtv", asked, state)
        after = left[..., None] * state + jnp.einsum("rhtk,rhtv->rhkv", lasting, wrote)
        return after, read

    by_chunk = (by_query, since * q, fresh, known, lasting, since[..., -1, :])
    begin = jnp.zeros((*fresh.shape[:1], fresh.shape[2], k.shape[-1], v.shape[-1]), jnp.float32)
    _, read = jax.lax.scan(step, begin, tuple(jnp.moveaxis(a, 1, 0) for a in by_chunk))
    return out_of_chunks(jnp.moveaxis(read, 0, 1)[:, :, :, None], seq=seq)


def _decay(of: Sums, until: Sums) -> Array:
    """Return each channel's decay from some tokens to others; 0 between documents."""
    apart = until.coarse - of.coarse + (until.fine - of.fine)
    return jnp.exp(jnp.where(until.places == of.places, apart, -jnp.inf))


def _products(
    x: Float[Array, "2 rows chunks heads size dim"],
    k: Float[Array, "rows chunks heads size dim"],
    sums: Sums,
) -> Float[Array, "2 rows chunks heads size size"]:
    """Return each token's products with its own key and with earlier keys, decayed until then.

    The matrix is built from blocks, at first of one token: two neighbouring blocks, and the
    products of the second's tokens with the first's keys, make a block of twice the size.
    """
    blocks, width = jnp.sum(x * k[None], axis=-1)[..., None, None], 1
    while width < k.shape[-2]:

        def half(a: Array, which: int, width: int = width) -> Array:
            """[..., size, dim] -> every other block of `width` tokens: [..., pairs, width, dim]."""
            return a.reshape(*a.shape[:-2], -1, 2, width, a.shape[-1])[..., which, :, :]

        first, second = (Sums(*(half(each, which) for each in sums)) for which in (0, 1))
        border = Sums(*(each[..., -1:, :] for each in first))
        asked = half(x, 1) * _decay(border, second)[None]
        corner = jnp.einsum("...tk,...jk->...tj", asked, (half(k, 0) * _decay(first, border))[None])
        above, below = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        above = jnp.concatenate([above, jnp.zeros_like(above)], axis=-1)
        blocks = jnp.concatenate([above, jnp.concatenate([corner, below], axis=-1)], axis=-2)
        width *= 2
    return blocks[..., 0, :, :]

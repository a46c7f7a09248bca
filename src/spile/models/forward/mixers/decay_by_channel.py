"""The gated delta rule by chunks, where each dimension of a key decays by a factor of its own.

The product of two tokens' keys then needs the decay of every channel from one token to the other
(arXiv:2510.26692). It is split at a border between them: into a factor of the earlier token, until
there, and one of the later token, from there on. So it is a matrix product of all tokens before a
border with all after it. Every factor is at most one: those until a place that is the same for all
pairs of a chunk could be too large for float32.
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

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

Heads = Float[Array, "rows seq heads dim"]


class Sums(NamedTuple):
    """Of the logarithms of decay up to each token, in two parts; and the token's document."""

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
    """What queries read, by chunks of `size` tokens; the others are those of `recurrent`.

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
    # What each token writes, if the chunk began with no state; and what it writes less for each
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
    """The factor by which each channel decays from some tokens to others; 0 between documents."""
    apart = until.coarse - of.coarse + (until.fine - of.fine)
    return jnp.exp(jnp.where(until.places == of.places, apart, -jnp.inf))


def _products(
    x: Float[Array, "2 rows chunks heads size dim"],
    k: Float[Array, "rows chunks heads size dim"],
    sums: Sums,
) -> Float[Array, "2 rows chunks heads size size"]:
    """Of each token with its key, and with the keys of those before it, which decay until then.

    From blocks of one token on: two neighbours, and the products of the second one's tokens with
    the first one's, make a block of twice the size.
    """
    blocks, width = jnp.sum(x * k[None], axis=-1)[..., None, None], 1
    while width < k.shape[-2]:

        def half(a: Array, which: int, width: int = width) -> Array:
            """[..., size, dim] -> every other block of so many tokens, [..., pairs, width, dim]."""
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

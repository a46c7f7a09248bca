"""Causal attention that never crosses a document: several implementations, one signature.

A token is told by its segment (which context of the row it belongs to; 0 is padding) and its
position within it. A token sees those of its own segment that come before it, and itself.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Queries = Float[Array, "rows seq heads dim"]
Keys = Float[Array, "rows seq kv_heads dim"]
Places = Int[Array, "rows seq"]
Attention = Callable[[Queries, Keys, Keys, Places, Places], Queries]

_HIDDEN = -1e30  # finite, so that padding, which may see nothing, gives no NaN


def for_platform(platform: str) -> Attention:
    """The implementation for where the step will run."""
    return blocked if platform == "cpu" else masked


def masked(q: Queries, k: Keys, v: Keys, segments: Places, positions: Places) -> Queries:
    """The definition: every pair is scored, and the invisible ones are masked."""
    del positions  # within a segment, order in the row is order of positions
    order = jnp.arange(q.shape[1])
    earlier = order[:, None] >= order[None, :]
    visible = (segments[:, :, None] == segments[:, None, :]) & earlier[None]
    rows, seq, heads, dim = q.shape
    grouped = q.reshape(rows, seq, k.shape[2], -1, dim) * jnp.asarray(dim**-0.5, q.dtype)
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", grouped, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _HIDDEN))
    mixed = jnp.einsum("rhgqk,rkhd->rqhgd", weights.astype(v.dtype), v)
    return mixed.reshape(rows, seq, heads, dim)


def blocked(
    q: Queries, k: Keys, v: Keys, segments: Places, positions: Places, block: int = 128
) -> Queries:
    """Work in proportion to the documents' lengths, for processors without a fused kernel.

    All rows are laid end to end. A block of queries looks back only as far as the start of its
    earliest context; since shapes are fixed, that distance is rounded up to one of a few widths,
    each compiled once.
    """
    rows, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    total = rows * seq
    block = min(block, total)
    count = -(-total // block)
    pad = count * block - total

    def flat(x: Array) -> Array:
        x = x.reshape(total, *x.shape[2:])
        return jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1)))

    start = jnp.arange(count * block) - flat(positions)
    # Segments are numbered within a row; a context's first token tells those of all rows apart.
    context = jnp.where(flat(segments) > 0, start, -1)
    earliest = jnp.min(jnp.where(context >= 0, start, total).reshape(count, block), axis=1)
    needed = jnp.arange(count) - jnp.minimum(earliest // block, jnp.arange(count)) + 1
    widths = _widths(min(count, -(-seq // block) + 1))
    choice = jnp.searchsorted(jnp.asarray(widths), needed)

    lead = (widths[-1] - 1) * block  # so that the widest look back stays inside the arrays

    def by_head(x: Array) -> Array:
        return jnp.pad(flat(x), ((lead, 0), (0, 0), (0, 0))).swapaxes(0, 1)

    keys, values = by_head(k), by_head(v)  # [kv heads, lead + tokens, dim]
    key_context = jnp.pad(context, (lead, 0), constant_values=-1)
    queries = flat(q * jnp.asarray(dim**-0.5, q.dtype))
    queries = queries.reshape(count, block, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(count, kv_heads, group * block, dim)

    def attend(width: int, i: Array) -> Array:
        size = width * block
        behind = partial(
            jax.lax.dynamic_slice_in_dim, start_index=lead + (i + 1) * block - size, slice_size=size
        )
        scores = jnp.einsum(
            "hqd,hkd->hqk", queries[i], behind(keys, axis=1), preferred_element_type=jnp.float32
        ).reshape(kv_heads, group, block, size)
        later = jnp.arange(size)[None, :] - (size - block) > jnp.arange(block)[:, None]
        own = jax.lax.dynamic_slice_in_dim(context, i * block, block)
        visible = (own[:, None] == behind(key_context)[None, :]) & ~later
        scores = jnp.where(visible[None, None], scores, _HIDDEN)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = jnp.einsum(
            "hqk,hkd->hqd",
            weights.astype(v.dtype).reshape(kv_heads, group * block, size),
            behind(values, axis=1),
            preferred_element_type=jnp.float32,
        ).reshape(kv_heads, group, block, dim)
        return (mixed / weights.sum(axis=-1, keepdims=True)).astype(q.dtype)

    branches = [partial(attend, width) for width in widths]
    out = jax.lax.map(lambda i: jax.lax.switch(choice[i], branches, i), jnp.arange(count))
    out = out.transpose(0, 3, 1, 2, 4).reshape(count * block, heads, dim)
    return out[:total].reshape(rows, seq, heads, dim)


def _widths(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to and including `most`."""
    widths = [1, 2, 3]
    while widths[-1] < most:
        widths.append(widths[-2] * 2)
    return sorted({min(width, most) for width in widths})

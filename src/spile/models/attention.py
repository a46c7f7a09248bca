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
Carry = tuple[Array, Array, Array]  # weighted values, sum of weights, largest score
Attention = Callable[[Queries, Keys, Keys, Places, Places], Queries]

_HIDDEN = -1e30  # finite, so that a row with nothing visible yet gives no NaN


def for_platform(platform: str) -> Attention:
    """The implementation for where the step will run."""
    return blocked if platform == "cpu" else masked


def masked(q: Queries, k: Keys, v: Keys, segments: Places, positions: Places) -> Queries:
    """The definition: every pair is scored, and the invisible ones are masked."""
    del positions  # within a segment, order in the row is order of positions
    order = jnp.arange(q.shape[1])
    visible = (segments[:, :, None] == segments[:, None, :]) & (order[:, None] >= order[None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None])


def blocked(
    q: Queries, k: Keys, v: Keys, segments: Places, positions: Places, block: int = 256
) -> Queries:
    """Work in proportion to the documents' lengths: blocks in which nothing is visible are skipped.

    All rows are laid end to end. A block of queries visits the blocks of keys from the start of
    its earliest context up to itself, keeping a running softmax.
    """
    rows, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    total = rows * seq
    block = min(block, total)
    count = -(-total // block)
    pad = count * block - total

    def flat(x: Array, fill: int = 0) -> Array:
        x = x.reshape(total, *x.shape[2:])
        return jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1)), constant_values=fill)

    order = jnp.arange(count * block)
    start = order - flat(positions)
    # Segments are numbered within a row; a context's first token tells contexts of all rows apart.
    context = jnp.where(flat(segments) > 0, start, -1).reshape(count, block)
    earliest = jnp.min(jnp.where(context >= 0, start.reshape(count, block), total), axis=1)
    first_block = jnp.minimum(earliest // block, jnp.arange(count))

    # [blocks, kv heads, tokens, dim]: each step below is a plain batch of matrix products
    keys = flat(k).reshape(count, block, kv_heads, dim).swapaxes(1, 2)
    values = flat(v).reshape(count, block, kv_heads, dim).swapaxes(1, 2)
    queries = flat(q * jnp.asarray(dim**-0.5, q.dtype))
    queries = queries.reshape(count, block, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(count, kv_heads, group * block, dim)

    def visit(i: Array, j: Array, carry: Carry) -> Carry:
        acc, norm, peak = carry
        scores = jnp.einsum(
            "hqd,hkd->hqk", queries[i], keys[j], preferred_element_type=jnp.float32
        ).reshape(kv_heads, group, block, block)
        later = (j * block + jnp.arange(block))[None, :] > (i * block + jnp.arange(block))[:, None]
        visible = (context[i][:, None] == context[j][None, :]) & ~later
        scores = jnp.where(visible, scores, _HIDDEN)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        norm = norm * decay + weights.sum(axis=-1)
        added = jnp.einsum(
            "hqk,hkd->hqd",
            weights.astype(v.dtype).reshape(kv_heads, group * block, block),
            values[j],
            preferred_element_type=jnp.float32,
        ).reshape(kv_heads, group, block, dim)
        return acc * decay[..., None] + added, norm, new_peak

    def attend(i: Array) -> Array:
        empty = (
            jnp.zeros((kv_heads, group, block, dim), jnp.float32),
            jnp.zeros((kv_heads, group, block), jnp.float32),
            jnp.full((kv_heads, group, block), _HIDDEN, jnp.float32),
        )
        acc, norm, _ = jax.lax.fori_loop(first_block[i], i + 1, partial(visit, i), empty)
        return (acc / norm[..., None]).astype(q.dtype)

    out = jax.lax.map(attend, jnp.arange(count))  # [blocks, kv, group, tokens, dim]
    out = out.transpose(0, 3, 1, 2, 4).reshape(count * block, heads, dim)
    return out[:total].reshape(rows, seq, heads, dim)

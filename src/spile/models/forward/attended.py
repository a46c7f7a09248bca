"""Where heads look: the keys that they weigh most, and a summary of their weights.

Scores are computed for a block of queries at a time, so that no array has the square of a long
row's length, and only for the heads and the queries that are stored.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Collection

import jax.numpy as jnp
from jaxtyping import Array, Float

from spile.models.forward.attention import (
    HIDDEN,
    AllKeys,
    Scoring,
    SomeQueries,
    TokenPlaces,
    Weights,
    masked_scores,
)
from spile.models.forward.largest import largest
from spile.models.forward.ops import Places, in_slices

_SCORES = 1 << 26  # held at once, in float32: 256 MiB
_NO_KEY, _NOT_A_NUMBER = -1, -2


def attended(
    q: SomeQueries,
    k: AllKeys,
    queries: TokenPlaces,
    keys: TokenPlaces,
    since: Places,
    scoring: Scoring,
    wanted: Collection[str],
    top: int,
) -> dict[str, Array]:
    """Return the values of the wanted sites [rows, queries, heads, ...], in float32 or int32.

    Args:
        since: the position of each query in its context, from where positions of keys count, too.
        top: how many keys to keep.
    """
    rows, count, heads, _ = q.shape

    def of_block(
        q: SomeQueries, order: Places, segments: Places, at: Places, since: Places
    ) -> dict[str, Array]:
        scores = masked_scores(q, k, TokenPlaces(order, segments, at), keys, scoring)
        found = _of_scores(scores, order, since, scoring, wanted, top)
        return {site: values.swapaxes(1, 2) for site, values in found.items()}

    slices = -(-rows * heads * count * k.shape[1] // _SCORES)
    order = jnp.broadcast_to(queries.order, since.shape)
    return in_slices(of_block, (q, order, queries.segments, queries.positions, since), slices)


def _of_scores(
    scores: Weights,
    order: Places,
    since: Places,
    scoring: Scoring,
    wanted: Collection[str],
    top: int,
) -> dict[str, Array]:
    """The same of a block of queries, from their scores [rows, heads, queries, keys]."""
    most, sink = scores.max(axis=-1, keepdims=True), None
    if scoring.sinks is not None:
        sink = scoring.sinks.astype(jnp.float32).reshape(1, -1, 1, 1)
        most = jnp.maximum(most, sink)
    weights = jnp.exp(scores - most)
    of_keys = weights.sum(axis=-1, keepdims=True)
    beside = 0.0 if sink is None else jnp.exp(sink - most)
    total = of_keys + beside
    order, since = order[:, None, :, None], since[:, None, :, None]
    found: dict[str, Array] = {}
    if "attn_top_keys" in wanted or "attn_top_weights" in wanted:
        values, place = largest(scores, top)
        there, sound = values > 0.5 * HIDDEN, jnp.isfinite(total)
        position = jnp.where(there, since - order + place, _NO_KEY)
        found["attn_top_keys"] = jnp.where(sound, position, _NOT_A_NUMBER).astype(jnp.int32)
        share = jnp.where(there, jnp.exp(values - most) / total, 0.0)
        found["attn_top_weights"] = jnp.where(sound, share, jnp.nan)
    if "attn_summary" in wanted:
        shifted = scores - most
        mean = (weights * shifted).sum(axis=-1, keepdims=True)
        if sink is not None:  # it is one of the softmax's outcomes
            mean = mean + beside * (sink - most)
        ago = order - jnp.arange(scores.shape[-1])[None, None, None]

        def weight_at(where: Array) -> Float[Array, "rows heads queries 1"]:
            return jnp.where(where, weights, 0.0).sum(axis=-1, keepdims=True) / total

        summary = (
            jnp.log(total) - mean / total,
            weight_at(ago == since),
            weight_at(ago == 0),
            weight_at(ago == 1),
            (weights * ago.astype(jnp.float32)).sum(axis=-1, keepdims=True) / of_keys,
        )
        found["attn_summary"] = jnp.concatenate(summary, axis=-1)
    return {site: values for site, values in found.items() if site in wanted}

"""What logits say about the next token: its log-probability and rank, the largest, the entropy."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Collection, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spile.models.forward.largest import largest


def next_token(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    known: Bool[Array, "*tokens"],
    wanted: Collection[str],
    tops: Mapping[str, int],
) -> dict[str, Array]:
    """Return the values of the wanted sites, in float32 or int32.

    Args:
        targets: the next tokens.
        known: whether there is a next token.
        tops: how many of the largest to keep, by site.
    """
    wide = logits.astype(jnp.float32)
    count = max((tops[site] for site in _LARGEST if site in wanted), default=0)
    if count:
        values, ids = largest(logits, count)
        most = values[..., :1]  # so that logits are read once less
    else:
        values = ids = None
        most = wide.max(axis=-1, keepdims=True)
    # (What is returned does not depend on it, so it needs no gradient.)
    most = jax.lax.stop_gradient(most)
    shifted = wide - most
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    log_total = jnp.log(total)
    own: Array = _chosen(wide.shape[-1], wide, targets[..., None])
    if "next_rank" in wanted:
        # On a GPU, XLA then reads the logits once for the sum above and for the rank.
        own = jax.lax.optimization_barrier(own)
    found: dict[str, Array] = {}
    if "logprob" in wanted:
        found["logprob"] = jnp.where(known, (own - most)[..., 0] - log_total, 0.0)
    if "entropy" in wanted:
        found["entropy"] = _entropy(shifted, weights, total, log_total)
    if "logsumexp" in wanted:
        found["logsumexp"] = most[..., 0] + log_total
    # Integers cannot be NaN: -1 stands for it.
    sound = jnp.isfinite(log_total)
    if "next_rank" in wanted:
        place = jax.lax.broadcasted_iota(targets.dtype, wide.shape, wide.ndim - 1)
        # (Of equal logits the lower id comes first, as among the largest.)
        above = (wide > own) | ((wide == own) & (place < targets[..., None]))
        rank = jnp.where(known, above.sum(axis=-1, dtype=jnp.int32), 0)
        found["next_rank"] = jnp.where(sound, rank, -1)
    if values is not None and ids is not None:
        found["top_token_ids"] = jnp.where(sound[..., None], ids, -1)
        found["top_logprobs"] = (values - most) - log_total[..., None]
    return {site: values for site, values in found.items() if site in wanted}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chosen(
    vocab: int, values: Float[Array, "*tokens vocab"], places: Int[Array, "*tokens 1"]
) -> Float[Array, "*tokens 1"]:
    """Take one value of each token. Its gradient scatters nothing, so XLA fuses it with others."""
    return jnp.take_along_axis(values, places, axis=-1)


def _taken(vocab: int, values: Array, places: Array) -> tuple[Array, Array]:
    return _chosen(vocab, values, places), places


def _given_back(vocab: int, places: Array, cotangent: Array) -> tuple[Array, None]:
    shape = (*places.shape[:-1], vocab)
    number = jax.lax.broadcasted_iota(places.dtype, shape, places.ndim - 1)
    return jnp.where(number == places, cotangent, 0.0), None


_chosen.defvjp(_taken, _given_back)


_LARGEST = ("top_token_ids", "top_logprobs")


def _entropy(
    shifted: Float[Array, "*tokens vocab"],
    weights: Float[Array, "*tokens vocab"],
    total: Float[Array, "*tokens"],
    log_total: Float[Array, "*tokens"],
) -> Float[Array, "*tokens"]:
    """The entropy of a softmax, in nats, rounded about once.

    The first value has the rounding errors of its parts. The mean difference between each token's
    surprise and that value is small, so it is much more exact than either; it is added.
    """
    first = log_total - (weights * shifted).sum(axis=-1) / total
    excess = (weights * ((log_total - first)[..., None] - shifted)).sum(axis=-1) / total
    return first + (excess + (total * jnp.exp(-log_total) - 1.0))

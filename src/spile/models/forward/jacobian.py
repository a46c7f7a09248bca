"""The mean Jacobian of a late tap with respect to earlier ones, summed over a batch's prompts.

A context is a prompt, and its kept tokens are its positions. For each channel of the target, one
backward pass starts with a one at every position. The gradient at a position of a source is then
that of the sum over all later positions; a prompt's Jacobian is its mean over the prompt's
positions. (This is the estimator of github.com/anthropics/jacobian-lens.) Documents are isolated,
so one backward pass serves all prompts of a batch.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spile.models.forward.decoder import Inputs
from spile.models.forward.gradient import Pullback


class Prompts(NamedTuple):
    """The positions of a batch's prompts."""

    at: Float[Array, "rows seq"]  # one at each position
    weights: Float[Array, "rows kept"]  # of each: they sum to one in a prompt
    counts: Int[Array, " rows"]  # prompts with positions, in each row


def prompts_of(inputs: Inputs, counts: Int[Array, " rows"]) -> Prompts:
    """Find the positions of a batch; `counts`: the kept tokens of each row."""
    segments, columns = inputs.segments, inputs.columns
    if columns is None:
        columns = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    real = jnp.arange(columns.shape[1])[None, :] < counts[:, None]
    rows = jnp.arange(len(segments))[:, None]
    own = jnp.where(real, jnp.take_along_axis(segments, columns, axis=1), 0)
    held = jnp.zeros((len(segments), segments.shape[1] + 1), jnp.int32).at[rows, own].add(1)
    each = jnp.take_along_axis(held, own, axis=1).astype(jnp.float32)
    at = jnp.zeros(segments.shape, jnp.float32).at[rows, columns].max(real.astype(jnp.float32))
    return Prompts(at, jnp.where(real, 1.0 / each, 0.0), (held[:, 1:] > 0).sum(axis=1))


def jacobian_sums(
    pullback: Pullback, target: str, value: Array, prompts: Prompts
) -> tuple[Mapping[str, Float[Array, "out width"]], Array]:
    """Return the sum of the prompts' Jacobians for each source, and whether each row is finite.

    Args:
        value: of the target [rows, seq, width], for its shape and dtype.
    """
    rows, _, width = value.shape

    def of_channel(channel: Array) -> tuple[dict[str, Array], Array]:
        one = jnp.arange(width) == channel
        cotangent = prompts.at[:, :, None] * one[None, None, :].astype(jnp.float32)
        found = pullback({target: cotangent.astype(value.dtype)})
        by_row = {tap: g.reshape(rows, -1, g.shape[-1]) for tap, g in found.items()}
        finite = [jnp.isfinite(g).all(axis=(1, 2)) for g in by_row.values()]
        sums = {
            tap: jnp.einsum(
                "rk,rkw->w",
                prompts.weights,
                gradient.astype(jnp.float32),
                precision=jax.lax.Precision.HIGHEST,
            )
            for tap, gradient in by_row.items()
        }
        return sums, jnp.stack(finite).all(axis=0)

    found, finite = jax.lax.map(of_channel, jnp.arange(width))
    return found, finite.all(axis=0)

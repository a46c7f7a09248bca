"""Probes: where a backward pass leaves the gradients of chosen values.

A probe changes no value. `watched` returns the values that it is given, and in the backward pass
writes their cotangent to the probe, in the form in which it will be stored. Probes of the blocks of
a scan are lent from one buffer for all of them: the cotangent of that buffer is carried through the
backward scan, and each block fills its own slot.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spile.models.forward.ops import in_slices

# A cotangent, and the arrays that its form depends on -> what the probe receives.
Form = Callable[[Array, Any], Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def watched(form: Form, values: Array, probe: Array, given: Any) -> Array:
    """Return the values unchanged; in a backward pass the probe receives their cotangent.

    Args:
        form: returns the probe's gradient, in its shape and dtype.
        given: the arrays that `form` reads; a backward pass may not close over any.
    """
    return values


def _watched(form: Form, values: Array, probe: Array, given: Any) -> tuple[Array, Any]:
    return values, given


def _seen(form: Form, given: Any, cotangent: Array) -> tuple[Any, ...]:
    return cotangent, form(cotangent, given), None


watched.defvjp(_watched, _seen)


@jax.custom_vjp
def lent(buffer: Array, slot: Array) -> tuple[Array, Array]:
    """Return a probe for one slot of a buffer [slots, ...], and the buffer for the next block."""
    return jnp.zeros(buffer.shape[1:], buffer.dtype), buffer


def _lent(buffer: Array, slot: Array) -> tuple[tuple[Array, Array], Array]:
    return lent(buffer, slot), slot


def _returned(slot: Array, cotangents: tuple[Array, Array]) -> tuple[Array, None]:
    probe, buffer = cotangents
    return jax.lax.dynamic_update_index_in_dim(buffer, probe, slot, 0), None


lent.defvjp(_lent, _returned)


# Of values [rows, tokens, width], arrays [rows, tokens] and weights: a number for each token.
OfTokens = Callable[..., Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_token(
    function: OfTokens, slices: int, hidden: Array, tokens: tuple[Array, ...], weights: Any
) -> Array:
    """Return a number for each token [rows, tokens], a function of that token's values alone.

    Its gradient is computed with the numbers themselves, a slice of the tokens at a time: what lies
    between (logits) is neither kept for the backward pass nor computed twice. Only `hidden` is
    differentiated.
    """
    return in_slices(lambda *part: {"": function(*part, weights)}, (hidden, *tokens), slices)[""]


def _by_token(
    function: OfTokens, slices: int, hidden: Array, tokens: tuple[Array, ...], weights: Any
) -> tuple[Array, Array]:
    def both(hidden: Array, *given: Array) -> dict[str, Array]:
        values, pull = jax.vjp(lambda own: function(own, *given, weights), hidden)
        return {"values": values, "gradient": pull(jnp.ones_like(values))[0]}

    found = in_slices(both, (hidden, *tokens), slices)
    return found["values"], found["gradient"]


def _scaled(
    function: OfTokens, slices: int, gradient: Array, cotangent: Array
) -> tuple[Array, None, None]:
    scaled = gradient.astype(cotangent.dtype) * cotangent[..., None]
    return scaled.astype(gradient.dtype), None, None


by_token.defvjp(_by_token, _scaled)

"""Probes change no value, and receive gradients in their own form and slot."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from spile.models.forward.probes import by_token, lent, watched


def test_each_block_of_a_scan_returns_its_gradient_to_its_own_slot() -> None:
    """The last slot's block runs first on the way back."""
    factors, slots = jnp.array([2.0, 3.0, 5.0]), jnp.array([0, 1, 2])

    def run(buffer: jax.Array) -> tuple[jax.Array, jax.Array]:
        def block(
            carry: tuple[jax.Array, jax.Array], given: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            (x, buffer), (factor, slot) = carry, given
            probe, buffer = lent(buffer, slot)
            form = lambda cotangent, given: cotangent[given].astype(jnp.bfloat16)  # noqa: E731
            return (watched(form, x * factor, probe, jnp.array([1])), buffer), None

        return jax.lax.scan(block, (jnp.ones(2), buffer), (factors, slots))[0]

    empty = jnp.zeros((3, 1), jnp.bfloat16)
    (x, _), pull = jax.vjp(run, empty)
    np.testing.assert_array_equal(x, [30.0, 30.0])
    (found,) = pull((jnp.array([1.0, 4.0]), jnp.zeros_like(empty)))
    np.testing.assert_array_equal(found, [[60.0], [20.0], [4.0]])


def test_numbers_of_tokens_have_the_plain_gradient_however_sliced() -> None:
    hidden = jax.random.normal(jax.random.key(0), (2, 5, 3))
    weights, own = jax.random.normal(jax.random.key(1), (3,)), jnp.arange(10.0).reshape(2, 5)
    cotangent = jax.random.normal(jax.random.key(2), (2, 5))

    def number(hidden: jax.Array, own: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sin(hidden @ weights) * own

    plain, wanted = jax.vjp(partial(number, own=own, weights=weights), hidden)
    for slices in (1, 2, 4):
        made = partial(by_token, number, slices, tokens=(own,), weights=weights)
        values, pull = jax.vjp(made, hidden)
        np.testing.assert_allclose(values, plain, rtol=1e-6)
        np.testing.assert_allclose(pull(cotangent)[0], wanted(cotangent)[0], rtol=1e-5)

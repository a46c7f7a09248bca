"""The positions of prompts, and sums of Jacobians of a function whose Jacobian is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.decoder import Inputs
from spile.models.forward.jacobian import jacobian_sums, prompts_of

# Two rows: contexts of 3 and 2 tokens and padding; a context of 6.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
COLUMNS = np.array([[1, 2, 4, 0], [2, 3, 4, 5]], np.int32)
COUNTS = np.array([3, 4], np.int32)


def inputs(columns: np.ndarray | None) -> Inputs:
    same = jnp.asarray(SEGMENTS)
    return Inputs(same, same, same, None if columns is None else jnp.asarray(columns))


def test_weights_of_a_prompts_positions_sum_to_one() -> None:
    found = prompts_of(inputs(COLUMNS), jnp.asarray(COUNTS))
    assert found.at.tolist() == [[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert found.weights.tolist() == [[0.5, 0.5, 1, 0], [0.25] * 4]
    assert found.counts.tolist() == [2, 1]
    whole = prompts_of(inputs(None), jnp.asarray([5, 6]))
    assert whole.at.tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    np.testing.assert_allclose(whole.weights.sum(axis=1), [2, 1])


@pytest.mark.parametrize("bad", [False, True])
def test_the_sum_is_over_prompts_of_the_mean_over_positions(bad: bool) -> None:
    """The target at a position: A times the sum of the source up to there, in its own prompt."""
    matrix = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    same = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS > 0)[:, None, :]
    before = jnp.asarray(np.tril(same).astype(np.float32))  # [rows, target, source]

    def pullback(cotangents: dict[str, jnp.ndarray]) -> dict[str, jnp.ndarray]:
        given = jnp.einsum("rto,oi,rts->rsi", cotangents["y"], jnp.asarray(matrix), before)
        kept = jnp.take_along_axis(given, jnp.asarray(COLUMNS)[:, :, None], axis=1)
        kept = kept.at[1, 0, 0].set(jnp.nan) if bad else kept
        return {"x": kept.reshape(-1, 3)}

    prompts = prompts_of(inputs(COLUMNS), jnp.asarray(COUNTS))
    found, finite = jacobian_sums(pullback, "y", jnp.zeros((2, 6, 4)), prompts)
    assert finite.tolist() == [True, not bad]
    if not bad:  # later positions of the prompt, counted from each: (2+1)/2, 1, (4+3+2+1)/4
        np.testing.assert_allclose(found["x"], matrix * (1.5 + 1 + 2.5), rtol=1e-6)

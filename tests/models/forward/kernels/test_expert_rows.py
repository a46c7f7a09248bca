"""Tokens reach all places of their experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.kernels.expert_rows import spread
from support.marks import some

ON_GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize("width", some([128, 720, 1152], 720))  # the last program has fewer columns
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_each_place_has_its_token(width: int, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((20, width)), dtype)
    places = rng.permutation(100)[:60].reshape(20, 3)
    places[rng.random(places.shape) < 0.3] = -1  # experts of another device
    found = spread(x, jnp.asarray(places), 100, columns=512, interpret=not ON_GPU)
    assert found.dtype == x.dtype
    token, number = np.nonzero(places >= 0)
    read, wanted = (np.asarray(a, np.float32) for a in (found, x))
    np.testing.assert_array_equal(read[places[token, number]], wanted[token])


def test_weights_multiply_what_is_copied() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((6, 256)), jnp.bfloat16)
    weights = jnp.asarray(rng.random((6, 2)), jnp.bfloat16)
    places = rng.permutation(12).reshape(6, 2)
    found = spread(x, jnp.asarray(places), 12, weights, interpret=not ON_GPU)
    wanted = np.asarray(x[:, None] * weights[:, :, None], np.float32)
    np.testing.assert_array_equal(np.asarray(found, np.float32)[places], wanted)

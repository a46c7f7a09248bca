"""Heads are normalised and rotated as `ops` does it, but rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.kernels.rotary import normed_and_rotated
from spile.models.forward.ops import norm, rotary_angles, rotate
from support.marks import some

ON_GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize(("heads", "dim"), some([(3, 128), (1, 64), (5, 32)], (5, 32)))
@pytest.mark.parametrize(("weighted", "eps"), [(True, 1e-6), (False, 1e-6), (False, None)])
def test_one_pass_gives_the_values_of_two(
    heads: int, dim: int, weighted: bool, eps: float | None
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 37, heads, dim)) * 3, jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(dim), jnp.bfloat16) if weighted else None
    places = jnp.asarray(rng.integers(0, 2048, (2, 37)), jnp.int32)
    angles = rotary_angles(places, 1e4 ** -(np.arange(dim // 2) / (dim // 2)), 1.1)
    found = normed_and_rotated(x, weight, *angles, eps=eps, scale=0.5, interpret=not ON_GPU)
    wide = x.astype(jnp.float32)
    if eps is not None:
        wide = norm(wide, weight, None, "rms_float32", eps)
    wanted = np.asarray(rotate(wide * 0.5, *angles))
    assert found.dtype == x.dtype
    read = np.asarray(found, np.float32)
    np.testing.assert_allclose(read, wanted, rtol=2.0**-8, atol=1e-6 * np.abs(wanted).max())

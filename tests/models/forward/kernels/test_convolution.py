"""The fused convolution gives the values of the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.kernels.convolution import convolution
from spile.models.forward.mixers import recurrence

ON_GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize(("activation", "biased"), [("silu", True), (None, False)])
def test_a_token_reads_from_the_last_ones_of_its_document(
    activation: str | None, biased: bool
) -> None:
    rng = np.random.default_rng(0)
    # Neither tokens nor channels fill the last tile.
    x = jnp.asarray(rng.standard_normal((2, 150, 72)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((72, 1, 4)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal(72), jnp.bfloat16) if biased else None
    lengths = ((1, 2, 61, 86), (64, 1, 80, 5))
    places = jnp.asarray(np.stack([np.repeat(np.arange(4), each) for each in lengths]))
    found = convolution(x, kernel, bias, places, activation, interpret=not ON_GPU)
    wanted = recurrence.convolution(x, kernel, bias, places, activation)
    rounding = 0 if activation is None else 2.0**-7
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=rounding, atol=rounding
    )

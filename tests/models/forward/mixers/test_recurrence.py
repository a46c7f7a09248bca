"""What recurrent mixers share: convolutions and decay that end at the borders of documents."""

import jax
import jax.numpy as jnp
import numpy as np

from spile.models.forward.mixers.recurrence import convolution, decays


def test_the_convolution_sees_the_last_tokens_of_its_document() -> None:
    x = jnp.asarray(np.arange(1.0, 8.0)[None, :, None], jnp.float32)
    kernel = jnp.asarray([[[1000.0, 100.0, 10.0, 1.0]]])
    segments = jnp.asarray([[1, 1, 1, 1, 1, 2, 2]])
    found = convolution(x, kernel, None, segments, "relu")
    assert found[0, :, 0].tolist() == [1, 12, 123, 1234, 2345, 6, 67]
    lower = convolution(x, kernel, jnp.asarray([-13.0]), segments, "relu")
    assert lower[0, :, 0].tolist() == [0, 0, 110, 1221, 2332, 0, 54]
    plain = convolution(x, kernel, jnp.asarray([-13.0]), segments, None)
    assert plain[0, :2, 0].tolist() == [-12, -1]


def test_decay_is_of_what_lies_between_and_ends_at_borders() -> None:
    kept = jnp.log(jnp.asarray([0.5, 0.25, 0.5, 0.125]))[None, None, :, None, None]
    between, since = jax.jit(decays)(kept, jnp.asarray([[[1, 1, 1, 2]]]))
    np.testing.assert_allclose(
        between[0, 0, 0, 0],
        [[1, 0, 0, 0], [0.25, 1, 0, 0], [0.125, 0.5, 1, 0], [0, 0, 0, 1]], rtol=1e-6,
    )  # fmt: skip
    assert not since.any(), "no document goes on from the chunk before the first"
    twice = jnp.concatenate([kept, kept], axis=1)
    _, since = jax.jit(decays)(twice, jnp.asarray([[[1, 1, 1, 2], [2, 2, 3, 3]]]))
    np.testing.assert_allclose(since[0, 1, 0, 0], [0.5, 0.125, 0, 0], rtol=1e-6)

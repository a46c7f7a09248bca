"""The arithmetic of built-in changes that other tests do not compare with HF."""

import numpy as np

from spile.models.splices import digest, orthonormal

RNG = np.random.default_rng(0)


def test_directions_that_depend_on_each_other_span_as_much_as_they_do() -> None:
    first, second = RNG.standard_normal((2, 16))
    basis = orthonormal(np.stack([first, second, first - 2 * second]))
    assert basis.shape == (2, 16)
    np.testing.assert_allclose(basis @ basis.T, np.eye(2), atol=1e-6)


def test_arrays_of_other_values_or_shapes_have_other_digests() -> None:
    array = RNG.standard_normal((2, 4))
    assert digest(array) == digest(array.astype(np.float32))
    assert len({digest(array), digest(array.reshape(-1)), digest(-array)}) == 3

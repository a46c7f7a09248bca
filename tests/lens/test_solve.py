"""The map of least squares is that of numpy's own solver."""

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.dataset.read.reduced import ReducedRows
from spile.lens.solve import explained, least_squares


def moments(x: np.ndarray, y: np.ndarray) -> ReducedRows:
    both = np.concatenate([x, y], axis=1)
    covariance = np.cov(both.T, bias=True)[None]
    return ReducedRows((None,), np.array([len(x)]), both.mean(axis=0)[None], None, covariance, "")


def test_without_a_ridge_it_is_numpys_and_explains_what_it_should() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 6)) * [1, 1, 1, 1000, 1, 0.01] + 3
    y = x @ rng.normal(size=(6, 6)) + rng.normal(size=(400, 6)) + 5
    matrix, bias = least_squares(moments(x, y), ridge=0)
    wanted, *_ = np.linalg.lstsq(np.c_[x, np.ones(400)], y, rcond=None)
    np.testing.assert_allclose(matrix + np.eye(6), wanted[:6].T, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(bias, wanted[6], rtol=1e-6, atol=1e-6)
    left = y - (x @ (matrix + np.eye(6)).T + bias)
    share = 1 - (left**2).sum() / ((y - y.mean(axis=0)) ** 2).sum()
    assert explained(moments(x, y), matrix) == pytest.approx(share, abs=1e-9)


def test_the_ridge_pulls_towards_the_identity_whatever_a_channels_unit() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 4))
    y = 2 * x + rng.normal(size=(50, 4))
    units = np.array([1, 1e3, 1, 1e-3])
    strong, _ = least_squares(moments(x, y), ridge=0.9)
    weak, _ = least_squares(moments(x, y), ridge=0.0)
    assert 0 < np.linalg.norm(strong) < np.linalg.norm(weak)
    scaled, _ = least_squares(moments(x * units, y * units), ridge=0.9)
    np.testing.assert_allclose(scaled / units[:, None] * units, strong, rtol=1e-8, atol=1e-10)


def test_too_few_tokens_are_refused_and_constant_channels_are_not() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(3, 8)), rng.normal(size=(3, 8))
    covariance = moments(x, y)
    assert covariance.covariances is not None
    covariance.covariances[0, :8, :8] = 1.0
    with pytest.raises(ConfigError, match="3 tokens do not determine a map of 8 channels"):
        least_squares(covariance, ridge=0)
    # Rounding alone would decide, although the system can be solved.
    x, y = rng.normal(size=(8, 8)), rng.normal(size=(8, 8))
    with pytest.raises(ConfigError, match="8 tokens do not determine a map of 8 channels"):
        least_squares(moments(x, y), ridge=0)
    with pytest.raises(ConfigError, match="1 tokens do not determine"):
        least_squares(moments(x[:1], y[:1]))
    x = np.c_[rng.normal(size=(20, 2)), np.full(20, 7.0)]
    matrix, bias = least_squares(moments(x, x), ridge=0)
    np.testing.assert_allclose(matrix, 0, atol=1e-9)
    np.testing.assert_allclose(bias, 0, atol=1e-9)

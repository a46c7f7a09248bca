"""Tuned lenses by least squares, from the second moments that `--reduce mean,cov:TAP` stores.

A tap's moments are of its channels x, followed by those of the last layer's stream y. The map that
is added to x, D x + b, minimizes the mean of |y - x - D x - b|², plus a ridge that pulls D towards
zero. The ridge is a share of each channel's own variance, so it does not depend on the channels'
units: a few channels of a residual stream are a thousand times as large as the others.
"""

from contextlib import suppress

import numpy as np

from spile.core.errors import ConfigError
from spile.dataset.read.reduced import ReducedRows

RIDGE = 1e-4


def least_squares(moments: ReducedRows, ridge: float = RIDGE) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix [out, in] and the bias of the map that is added, in float64.

    Args:
        moments: of x and y, of equal widths, with one label.
        ridge: the share of each channel's variance that is added to it.

    Raises:
        ConfigError: if there are too few tokens for a solution.
    """
    assert moments.covariances is not None
    width = moments.means.shape[1] // 2
    mean, covariance = moments.means[0], moments.covariances[0]
    own, both = covariance[:width, :width].copy(), covariance[:width, width:]
    variances = own.diagonal().copy()
    wanted = both - own  # x' (y - x)
    # (A channel that never varies tells nothing: any value keeps its row at zero.)
    own.flat[:: width + 1] += np.where(variances > 0, ridge * variances, 1.0)
    solved: np.ndarray = np.full((width, width), np.nan)
    varying = int(np.count_nonzero(variances > 0))
    enough = moments.counts[0] > (1 if ridge else varying)  # or rounding alone decides
    with suppress(np.linalg.LinAlgError):
        solved[:] = np.linalg.solve(own, wanted) if enough else np.nan
    matrix = solved.T
    if not np.isfinite(matrix).all():
        tokens = int(moments.counts[0])
        raise ConfigError(
            f"{tokens:,} tokens do not determine a map of {width} channels; give more documents, "
            f"or a larger --ridge than {ridge:g}"
        )
    bias = mean[width:] - mean[:width] - matrix @ mean[:width]
    return matrix, bias


def explained(moments: ReducedRows, matrix: np.ndarray) -> float:
    """Return the share of y's variance that a fitted map explains (R²), over all channels."""
    assert moments.covariances is not None
    width = len(matrix)
    covariance = moments.covariances[0]
    whole = matrix + np.eye(width)
    own, both, last = (
        covariance[:width, :width],
        covariance[:width, width:],
        covariance[width:, width:],
    )
    left = np.trace(last) - 2 * np.einsum("oi,io->", whole, both)
    left += np.einsum("oi,ij,oj->", whole, own, whole, optimize=True)
    return float(1 - left / np.trace(last))

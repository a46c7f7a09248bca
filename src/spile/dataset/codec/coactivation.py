"""Which latents are active in the same rows, from the ids of sampled rows.

Two latents are as near as the cosine of their activity: the number of rows in which both are
active, divided by the geometric mean of the numbers in which each is.
"""

import numpy as np
import numpy.typing as npt

_LEAST = 2  # rows in which both are active
_PAIRS = 1 << 24  # counted at a time


def nearest_latents(
    ids: np.ndarray, latents: int, others: np.ndarray, other_latents: int, count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return, for each latent, the nearest ones of another encoder, and how near they are.

    Pairs that meet in one row alone are left out.

    Args:
        ids: [rows, width]: the active latents of each row, −1 where none is.
        others: the same rows of the other encoder; the same array: of the same encoder, in which no
            latent is its own neighbour.

    Returns:
        [latents, count] each; −1, and 0, where there is none.
    """
    found = np.full((latents, count), -1, np.int32)
    scores = np.zeros((latents, count), np.float32)
    rows, flat = _active(ids)
    other_rows, other_flat = _active(others)
    own_counts = np.bincount(flat, minlength=latents)
    other_counts = np.bincount(other_flat, minlength=other_latents)
    by_latent = rows[np.argsort(flat, kind="stable")]  # the rows of each latent, one after another
    ends = np.cumsum(own_counts)
    per_row = np.bincount(other_rows, minlength=len(ids))
    first_of_row = np.cumsum(per_row) - per_row
    work = np.cumsum(own_counts * max(1, others.shape[1]))
    low = 0
    while low < latents and count:
        high = int(np.searchsorted(work, (work[low - 1] if low else 0) + _PAIRS, side="right"))
        high = min(latents, max(high, low + 1))
        chosen = by_latent[int(ends[low - 1]) if low else 0 : int(ends[high - 1])]
        sizes = per_row[chosen]
        starts = np.repeat(first_of_row[chosen] - (np.cumsum(sizes) - sizes), sizes)
        met = other_flat[starts + np.arange(int(sizes.sum()))]
        own = np.repeat(np.repeat(np.arange(low, high), own_counts[low:high]), sizes)
        pairs, together = np.unique(own * other_latents + met, return_counts=True)
        a, b = np.divmod(pairs, other_latents)
        kept = np.flatnonzero((together >= _LEAST) & ((a != b) | (ids is not others)))
        a, b, together = a[kept], b[kept], together[kept]
        near = together / np.sqrt(own_counts[a].astype(np.float64) * other_counts[b])
        order = np.lexsort((b, -near, a))
        a, b, near = a[order], b[order], near[order]
        sizes = np.bincount(a - low, minlength=high - low)
        rank = np.arange(len(a)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        best = np.flatnonzero(rank < count)
        found[a[best], rank[best]] = b[best]
        scores[a[best], rank[best]] = near[best]
        low = high
    return found, scores


def _active(ids: np.ndarray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the row of each active latent, and its id, in the order of rows."""
    rows, places = np.nonzero(ids >= 0)
    return rows, ids[rows, places].astype(np.int64)

"""Near latents: the cosine of activity, by a plain formula."""

import numpy as np
import pytest

from spile.dataset.codec import coactivation
from spile.dataset.codec.coactivation import nearest_latents


def drawn(rng: np.random.Generator, latents: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of 60 rows, and the same as [rows, latents] of zeros and ones."""
    ids = np.array([rng.permutation(latents)[:4] for _ in range(60)])
    ids[rng.random((60, 4)) < 0.3] = -1
    active = np.zeros((60, latents))
    rows, places = np.nonzero(ids >= 0)
    active[rows, ids[rows, places]] = 1
    return ids, active


@pytest.mark.parametrize("pairs", [1, 1 << 24])
@pytest.mark.parametrize("same", [True, False])
def test_nearest_latents_are_those_of_the_dense_product(
    pairs: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coactivation, "_PAIRS", pairs)
    rng = np.random.default_rng(0)
    ids, active = drawn(rng, 12)
    others, other = (ids, active) if same else drawn(rng, 9)
    together = active.T @ other
    cosine = together / np.sqrt(np.outer(active.sum(axis=0), other.sum(axis=0)))
    if same:
        np.fill_diagonal(cosine, 0)
    cosine[together < 2] = 0
    found, scores = nearest_latents(ids, 12, others, other.shape[1], 5)
    for latent in range(12):
        order = np.lexsort((np.arange(other.shape[1]), -cosine[latent]))[:5]
        wanted = [each for each in order.tolist() if cosine[latent, each] > 0]
        assert found[latent].tolist() == wanted + [-1] * (5 - len(wanted))
        assert scores[latent, : len(wanted)] == pytest.approx(cosine[latent, wanted])

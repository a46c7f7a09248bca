"""Neighbours: the cosine of activity over drawn rows, by a plain formula."""

import numpy as np
import pytest

from spile.core.errors import CorruptError
from spile.features import neighbours as module
from spile.features.neighbours import RowSample, neighbours
from spile.features.ranked import hashes


@pytest.mark.parametrize("pairs", [1, 1 << 24])
def test_neighbours_are_those_of_the_dense_product(
    pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAIRS", pairs)
    rng = np.random.default_rng(0)
    ids = np.array([rng.permutation(12)[:4] for _ in range(60)])
    ids[rng.random((60, 4)) < 0.3] = -1
    active = np.zeros((60, 12))
    rows, places = np.nonzero(ids >= 0)
    active[rows, ids[rows, places]] = 1
    together = active.T @ active
    cosine = together / np.sqrt(np.outer(active.sum(axis=0), active.sum(axis=0)))
    np.fill_diagonal(cosine, 0)
    cosine[together < 2] = 0
    found = neighbours(ids, 12, 5)
    for latent in range(12):
        order = np.lexsort((np.arange(12), -cosine[latent]))[:5]
        wanted = [each for each in order.tolist() if cosine[latent, each] > 0]
        assert found["ids"][latent].tolist() == wanted + [-1] * (5 - len(wanted))
        assert found["score"][latent, : len(wanted)] == pytest.approx(cosine[latent, wanted])


def test_drawn_rows_do_not_depend_on_the_pieces() -> None:
    places = np.arange(500)
    ids = np.arange(1000).reshape(500, 2)
    whole, parts = RowSample(40, 2), RowSample(40, 2)
    whole.add(places, hashes(places), ids)
    for at in range(0, 500, 13):
        piece = RowSample(40, 2)
        part = slice(at, at + 13)
        piece.add(places[part], hashes(places[part]), ids[part])
        parts.merge("part", piece.columns())
    one, other = whole.columns(), parts.columns()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    best = np.argsort(hashes(places), kind="stable")[:40]
    assert one["row"].tolist() == best.tolist()
    with pytest.raises(CorruptError, match="part: does not hold rows of 3 latents"):
        RowSample(40, 3).merge("part", one)

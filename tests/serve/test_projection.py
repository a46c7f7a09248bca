"""PCA against numpy's SVD; similarities against their definitions."""

import numpy as np
import pytest

from spile.serve.projection import has_umap, pca, similarities, umap


@pytest.mark.parametrize("shape", [(300, 40), (30, 200), (5, 2), (1, 3)])
def test_pca_is_that_of_the_svd(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal(shape) * np.geomspace(10, 0.1, shape[1]) + 7
    places, shares = pca(rows, 2)
    centred = rows - rows.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    expected = (left * sizes)[:, : places.shape[1]]
    np.testing.assert_allclose(np.abs(places), np.abs(expected), rtol=0.02, atol=0.02)
    total = max((sizes**2).sum(), 1e-30)
    np.testing.assert_allclose(shares, (sizes**2 / total)[: len(shares)], atol=1e-3)


def test_no_rows_have_no_places() -> None:
    places, shares = pca(np.zeros((0, 4)), 2)
    assert places.shape == (0, 0)
    assert len(shares) == 0


def test_cka_does_not_see_turns_and_scales_and_cosine_does() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((400, 16)).astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((16, 16)))[0].astype(np.float32)
    other = rng.standard_normal((400, 16)).astype(np.float32)
    found = similarities(
        {"a": rows, "turned": rows @ turn * 1e6, "opposite": -rows, "other": other,
         "narrow": rows[:, :5]}
    )  # fmt: skip
    cka, cosine = found["cka"], found["cosine"]
    np.testing.assert_allclose(np.diag(cka), 1, rtol=1e-4)
    np.testing.assert_allclose(cka, cka.T)
    assert cka[0, 1] == pytest.approx(1, abs=1e-3)
    assert cka[0, 2] == pytest.approx(1, abs=1e-3)
    assert cka[0, 3] < 0.2
    assert cosine[0, 2] == pytest.approx(-1, abs=1e-4)
    assert abs(cosine[0, 1]) < 0.3
    assert np.isnan(cosine[0, 4])
    assert 0.2 < cka[0, 4] < 1


def test_linear_cka_is_as_it_is_defined() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((60, 4)), rng.standard_normal((60, 7))
    b[:, :2] += a[:, :2]
    a0, b0 = a - a.mean(axis=0), b - b.mean(axis=0)
    expected = np.linalg.norm(b0.T @ a0) ** 2 / (
        np.linalg.norm(a0.T @ a0) * np.linalg.norm(b0.T @ b0)
    )
    assert similarities({"a": a, "b": b})["cka"][0, 1] == pytest.approx(expected, rel=1e-4)


def test_nothing_sampled_has_no_similarity() -> None:
    found = similarities({"a": np.zeros((0, 4), np.float32)})
    assert np.isnan(found["cosine"]).all()


@pytest.mark.skipif(not has_umap(), reason="umap-learn is not installed")
def test_umap_gives_a_place_to_every_row() -> None:
    rows = np.random.default_rng(0).standard_normal((80, 20))
    assert umap(rows).shape == (80, 2)

"""Projections of sampled rows to the plane (PCA, UMAP), and similarities between taps."""

import importlib
import importlib.util
from typing import Any

import numpy as np

_ROUNDS = 8  # rounds of power iteration
_BESIDE = 8  # extra directions, for faster convergence
_MOST_FOR_GRAMS = 512


def pca(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates on the first principal axes, and each axis's share of the variance."""
    count = min(count, *rows.shape)
    if count == 0:
        return np.zeros((len(rows), 0)), np.zeros(0)
    centred = rows.astype(np.float32) - rows.mean(axis=0, dtype=np.float64).astype(np.float32)
    total = float(np.einsum("ij,ij->", centred, centred, dtype=np.float64))
    followed = min(count + _BESIDE, *rows.shape)
    start = np.random.default_rng(0).standard_normal((rows.shape[1], followed))
    basis = start.astype(np.float32)
    for _ in range(_ROUNDS):
        basis = np.linalg.qr(centred.T @ np.linalg.qr(centred @ basis)[0])[0]
    left, sizes, _ = np.linalg.svd(centred @ basis, full_matrices=False)
    places = left[:, :count] * sizes[:count]
    # The sign of an axis is arbitrary: make its longest end positive.
    ends = places[np.abs(places).argmax(axis=0), np.arange(count)]
    places = places * np.where(ends < 0, -1, 1)
    return places, sizes[:count].astype(np.float64) ** 2 / max(total, 1e-30)


def has_umap() -> bool:
    return importlib.util.find_spec("umap") is not None


def umap(rows: np.ndarray) -> np.ndarray:
    """Return coordinates by umap-learn, which must be installed."""
    library: Any = importlib.import_module("umap")
    places, _ = pca(rows, 50)  # as its authors advise for wide rows
    return np.asarray(library.UMAP(n_components=2, random_state=0, n_jobs=1).fit_transform(places))


def similarities(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return similarities between taps: mean cosine of the same token's rows, and linear CKA.

    The cosine of taps of different widths is NaN.
    """
    taps = list(values)
    rows = [values[tap][:_MOST_FOR_GRAMS].astype(np.float32) for tap in taps]
    units = [each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-30) for each in rows]
    grams = [_gram(each) for each in rows]
    cosine, cka = np.full((2, len(taps), len(taps)), np.nan)
    for i in range(len(taps)):
        for j in range(i, len(taps)):
            cka[i, j] = cka[j, i] = float(np.vdot(grams[i], grams[j]))
            if rows[i].shape == rows[j].shape and len(rows[i]):
                mean = float(np.einsum("ij,ij->i", units[i], units[j]).mean())
                cosine[i, j] = cosine[j, i] = mean
    return {"cosine": cosine, "cka": cka}


def _gram(rows: np.ndarray) -> np.ndarray:
    """Return the inner products of centred rows, as a matrix of norm 1."""
    centred = rows - rows.mean(axis=0, keepdims=True) if len(rows) else rows
    # Scale first: products of large activations would overflow float32.
    centred = centred / max(float(np.abs(centred).max(initial=0)), 1e-30)
    gram = centred @ centred.T
    return gram / max(float(np.linalg.norm(gram)), 1e-30)

"""Latents of what the reference computed, and how far stored ones are from them. No jax."""

from dataclasses import dataclass

import numpy as np

from spile.core.recipe import latent_names
from spile.dataset.read.dataset import Dataset, Document
from spile.models.files.sae import Arrays, Encoder, activations
from spile.models.files.sae_files import load_arrays

_ROWS = 64  # of all latents, held at once


@dataclass(frozen=True)
class Top:
    """The largest latents of rows, and which they are."""

    values: np.ndarray
    ids: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> "Top":
        return Top(self.values[rows], self.ids[rows])

    def nothing(self) -> "Top":
        return Top(np.zeros_like(self.values), self.ids)

    def squares(self, other: "Top") -> np.ndarray:
        """Squared distance of each row from another's, over all latents."""
        ours, theirs = (each.values.astype(np.float64) for each in (self, other))
        rows = np.arange(len(ours))[:, None]
        most = 1 + max(int(self.ids.max(initial=0)), int(other.ids.max(initial=0)))
        keys = [(rows * most + each.ids.astype(np.int64)).reshape(-1) for each in (self, other)]
        _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
        common = ours.reshape(-1)[here] * theirs.reshape(-1)[there]
        dots = np.bincount(here // ours.shape[1], common, minlength=len(ours))
        lengths = np.square(ours).sum(axis=1) + np.square(theirs).sum(axis=1)
        return np.where(np.isnan(lengths), lengths, np.maximum(lengths - 2 * dots, 0.0))


class SparseTap:
    """An encoded tap."""

    def __init__(self, tap: str, encoder: Encoder) -> None:
        self.name, self._ids = latent_names(tap)
        self._encoder = encoder
        self._arrays: Arrays = load_arrays(encoder.sae)[0]

    @property
    def kept(self) -> int:
        return self._encoder.kept

    def encode(self, rows: np.ndarray) -> Top:
        """Of rows as the reference has them."""
        flat = rows.reshape(len(rows), -1).astype(np.float32)
        parts = [self._encode(flat[i : i + _ROWS]) for i in range(0, len(flat), _ROWS)]
        values, ids = zip(*parts, strict=True)
        return Top(np.concatenate(values), np.concatenate(ids))

    def _encode(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = activations(self._encoder.sae, self._arrays, rows, np, np.matmul)
        ids = np.argsort(-found, axis=1, kind="stable")[:, : self.kept]
        return np.take_along_axis(found, ids, axis=1), ids

    def stored(self, document: Document, rows: np.ndarray) -> Top:
        return Top(document.read(self.name)[rows], document.read(self._ids)[rows])

    def as_stored(self, dataset: Dataset, top: Top) -> Top:
        return Top(dataset.as_stored(self.name, top.values), top.ids)

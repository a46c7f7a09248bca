"""Rows of latents, as `spile check` recomputes them from the reference's activations."""

from dataclasses import dataclass

import numpy as np

from spile.check.sampled import SampledRows
from spile.core.recipe import latent_names
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.document import Document
from spile.dataset.read.dtypes import STORED
from spile.models.files.encoders.arithmetic import (
    activations,
    active_latents,
    along_decoder,
    completed,
    latents_of,
    reconstruction,
)
from spile.models.files.encoders.sae import Arrays, SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.splices import kth_largest
from spile.models.taps import Tap

_ROWS = 64  # rows for which all latents are held at once


@dataclass(frozen=True)
class RowLatents:
    """The largest latents of rows, and their ids."""

    values: np.ndarray
    ids: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> "RowLatents":
        return RowLatents(self.values[rows], self.ids[rows])

    def nothing(self) -> "RowLatents":
        return RowLatents(np.zeros_like(self.values), self.ids)

    def squares(self, other: "RowLatents") -> np.ndarray:
        """Squared distance of each row from another's, over all latents."""
        ours, theirs = (each.values.astype(np.float64) for each in (self, other))
        rows = np.arange(len(ours))[:, None]
        most = 1 + max(int(self.ids.max(initial=0)), int(other.ids.max(initial=0)))
        keys = [(rows * most + each.ids.astype(np.int64)).reshape(-1) for each in (self, other)]
        _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
        common = ours.reshape(-1)[here] * theirs.reshape(-1)[there]
        dots = np.bincount(here // ours.shape[1], common, minlength=len(ours))
        lengths: np.ndarray = np.square(ours).sum(axis=1) + np.square(theirs).sum(axis=1)
        return np.where(np.isnan(lengths), lengths, np.maximum(lengths - 2 * dots, 0.0))


class SparseTap:
    """An encoded tap: latents of its rows, or their attributions.

    Rows of attributions are values beside gradients: [rows, 2, width].
    """

    def __init__(self, tap: str, encoder: SparseEncoder) -> None:
        self.name, self._ids = latent_names(tap)
        self._encoder = encoder
        self._summed = Tap.from_name(tap).kind.summed
        self._arrays: Arrays = load_arrays(encoder.sae)[0]

    @property
    def kept(self) -> int:
        return self._encoder.kept

    def encode(self, rows: np.ndarray) -> RowLatents:
        """Encode rows of the reference."""
        flat = rows.astype(np.float32)
        flat = flat if self._summed else flat.reshape(len(rows), -1)
        parts = [self._encode(flat[i : i + _ROWS]) for i in range(0, len(flat), _ROWS)]
        values, ids = zip(*parts, strict=True)
        return RowLatents(np.concatenate(values), np.concatenate(ids))

    def pooled(self, values: np.ndarray, sampled: SampledRows) -> RowLatents:
        """Encode the tokens of the reference, and pool all of their latents if the rows are."""
        if sampled.by is None:
            return self.encode(values)
        flat = values.reshape(len(values), -1).astype(np.float32)
        top = [self._largest(self._of_span(flat[each], sampled.by)) for each in sampled.members]
        found, ids = zip(*top, strict=True)
        return RowLatents(np.concatenate(found), np.concatenate(ids))

    def written(self, rows: np.ndarray, layer: int) -> np.ndarray:
        """Return what all latents of rows write to a layer, by a cross-layer transcoder."""
        flat, sae = rows.reshape(len(rows), -1).astype(np.float32), self._encoder.sae
        at = sae.across.index(layer)
        decoder = np.split(self._arrays["W_dec"], len(sae.across), axis=1)[at]
        parts = (
            latents_of(sae, self._arrays, flat[i : i + _ROWS], np, np.matmul, kth_largest)
            for i in range(0, len(flat), _ROWS)
        )
        return np.concatenate([part @ decoder for part in parts])

    def reconstructed(self, rows: np.ndarray, written: np.ndarray | None = None) -> np.ndarray:
        """Return the reconstructions of rows of the reference, from all of their latents.

        Args:
            written: by a cross-layer transcoder: what all layers up to this one write to it.
        """
        flat, sae = rows.reshape(len(rows), -1).astype(np.float32), self._encoder.sae
        if written is not None:
            return completed(sae, self._arrays, written, flat, np.matmul)
        parts = [flat[i : i + _ROWS] for i in range(0, len(flat), _ROWS)]
        made = (reconstruction(sae, self._arrays, p, np, np.matmul, kth_largest) for p in parts)
        return np.concatenate(list(made))

    def _of_span(self, rows: np.ndarray, by: str) -> np.ndarray:
        """Return the mean or the maximum of each latent: [1, latents]."""
        parts = [
            latents_of(
                self._encoder.sae, self._arrays, rows[i : i + _ROWS], np, np.matmul, kth_largest
            ).astype(np.float64)
            for i in range(0, len(rows), _ROWS)
        ]
        if by == "max":
            return np.max([part.max(axis=0) for part in parts], axis=0)[None]
        return np.sum([part.sum(axis=0) for part in parts], axis=0)[None] / len(rows)

    def _encode(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sae = self._encoder.sae
        if self._summed:
            return self._largest(self._attributions(rows[:, 0], rows[:, 1]))
        found = activations(sae, self._arrays, rows, np, np.matmul)
        if sae.weighted:
            found = active_latents(sae, self._arrays, found, np, kth_largest)
        return self._largest(found)

    def _attributions(self, rows: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Return each latent times the product of the gradient with what it adds to the row."""
        sae = self._encoder.sae
        found = latents_of(sae, self._arrays, rows, np, np.matmul, kth_largest)
        return found * along_decoder(sae, self._arrays, rows, gradients, np, np.matmul)

    def _largest(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._encoder.dense:
            return found, self._all(len(found))
        ranked = np.abs(found) if self._summed else found
        ids = np.argsort(-ranked, axis=1, kind="stable")[:, : self.kept]
        return np.take_along_axis(found, ids, axis=1), ids

    def stored(self, document: Document, rows: np.ndarray) -> RowLatents:
        values = document.read(self.name, dtype=STORED)[rows]
        if self._encoder.dense:
            return RowLatents(values, self._all(len(values)))
        return RowLatents(values, document.read(self._ids)[rows])

    def _all(self, rows: int) -> np.ndarray:
        return np.broadcast_to(np.arange(self.kept), (rows, self.kept))

    def as_stored(self, dataset: Dataset, top: RowLatents) -> RowLatents:
        return RowLatents(dataset.as_stored(self.name, top.values), top.ids)

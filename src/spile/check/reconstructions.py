"""What encoders do not reconstruct, as `spile check` recomputes it, and what that costs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spile.check.latent_rows import SparseTap
from spile.check.load import Taps
from spile.core.errors import InputError
from spile.core.recipe import error_name
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.taps import Tap

_CONTEXTS = 8  # each takes a forward pass for each encoder


@dataclass(frozen=True)
class Reconstruction:
    """How well an encoder reconstructs rows of the reference.

    Attributes:
        error: the length of a row minus its reconstruction, relative to the row's own (root mean
            square over rows).
        loss: the model's own, in nats a token.
        replaced_loss: the same if each row is replaced by its reconstruction; None if no module of
            the reference takes or returns just those rows.
    """

    error: float
    loss: float
    replaced_loss: float | None


class ErrorTap:
    """The stored error of an encoded tap."""

    def __init__(
        self,
        tap: str,
        sparse: SparseTap,
        error_of: str,
        writers: Mapping[str, SparseTap] | None = None,
    ) -> None:
        """Args:
        writers: by tap, the layers of a cross-layer transcoder that write to the tap's own.
        """
        self.name, self._tap, self._sparse = error_name(tap), Tap.from_name(tap), sparse
        self.target = replace(self._tap, site=error_of).name
        self._writers = dict(writers or {})
        self.needed = {self.target, tap, *self._writers}

    def of(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return rows less their reconstructions, from the taps of a context."""
        rows, layer = values[self.target], self._tap.layer
        written = None
        if self._writers and layer is not None:
            each = (own.written(values[tap], layer) for tap, own in self._writers.items())
            written = np.sum([*each], axis=0)
        made = self._sparse.reconstructed(values[self._tap.name], written)
        return rows - made.reshape(rows.shape)


def error_taps(
    encoders: Mapping[str, SparseEncoder], sparse: Mapping[str, SparseTap]
) -> list[ErrorTap]:
    """Return the stored errors of encoded taps."""
    return [
        ErrorTap(tap, sparse[tap], each.error_of, _writers(tap, encoders, sparse))
        for tap, each in encoders.items()
        if each.error_of
    ]


def _writers(
    tap: str, encoders: Mapping[str, SparseEncoder], sparse: Mapping[str, SparseTap]
) -> dict[str, SparseTap]:
    """Return the layers of a cross-layer transcoder that write to a tap's own layer."""
    own = Tap.from_name(tap)
    return {
        name: sparse[name]
        for name, each in encoders.items()
        if own.layer in each.sae.across and Tap.from_name(name).site == own.site
    }


def with_errors(taps: Taps, errors: Collection[ErrorTap]) -> Taps:
    """Return a function that computes errors beside the taps of a reference."""

    def found(context: np.ndarray, names: Collection[str], **options: Any) -> dict[str, np.ndarray]:
        asked = [each for each in errors if each.name in names]
        needed = {name for each in asked for name in each.needed}
        values = taps(context, {*names, *needed} - {each.name for each in asked}, **options)
        return values | {each.name: each.of(values) for each in asked}

    return found


class Reconstructions:
    """Lengths of errors and losses, added up context by context."""

    def __init__(self, errors: Collection[ErrorTap], exact: Taps) -> None:
        self._errors, self._exact = errors, exact
        self._contexts = self._tokens = 0
        self._loss = 0.0
        self._squares = {each.name: np.zeros(2) for each in errors}  # of errors, and of rows
        self._replaced: dict[str, float | None] = {each.name: 0.0 for each in errors}

    def add(self, context: np.ndarray) -> None:
        """Add a context; more than a few are left out."""
        if not self._errors or self._contexts >= _CONTEXTS or len(context) < 2:
            return
        needed = {name for each in self._errors for name in each.needed}
        values = self._exact(context, {*needed, "logprob"})
        self._contexts += 1
        self._tokens += len(context) - 1
        self._loss -= float(values["logprob"].sum())
        for each in self._errors:
            rows, error = values[each.target], each.of(values)
            self._squares[each.name] += [float(np.square(a).sum()) for a in (error, rows)]
            before = self._replaced[each.name]
            if before is not None:
                after = self._loss_with(context, {each.target: rows - error})
                self._replaced[each.name] = None if after is None else before + after

    def _loss_with(self, context: np.ndarray, replaced: dict[str, np.ndarray]) -> float | None:
        try:
            found = self._exact(context, {"logprob"}, replaced=replaced)
        except InputError:
            return None
        return -float(found["logprob"].sum())

    def results(self) -> dict[str, Reconstruction]:
        """Return the figures by the name of the error."""
        if not self._tokens:
            return {}
        found: dict[str, Reconstruction] = {}
        for name, (error, rows) in self._squares.items():
            after = self._replaced[name]
            found[name] = Reconstruction(
                error=float(np.sqrt(error / rows)) if rows else 0.0,
                loss=self._loss / self._tokens,
                replaced_loss=None if after is None else after / self._tokens,
            )
        return found

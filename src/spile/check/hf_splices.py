"""The changes of `--splice` inside HF's model, in torch: gradients flow through them."""

# Strict, but for values that torch's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spile.check.hf_hooks import TorchChange
from spile.models.splices import Splice, changed_rows


class TorchFunctions:
    """The functions of numpy that `changed_rows` uses."""

    where, sqrt, exp, square = torch.where, torch.sqrt, torch.exp, torch.square

    @staticmethod
    def maximum(values: Tensor, least: float) -> Tensor:
        return values.clamp(min=least)


class HfSplices:
    """The changes of each tap, by its name; several changes of one apply in turn."""

    def __init__(self, splices: Sequence[Splice] = ()) -> None:
        self._by_tap: dict[str, list[tuple[Splice, Mapping[str, np.ndarray]]]] = {}
        self._read: dict[str, Tensor | None] = {}  # what transcoders read in this pass
        for splice in splices:
            self._by_tap.setdefault(splice.tap.name, []).append((splice, splice.load()[0]))
            if splice.reads:
                self._read[splice.reads.name] = None

    @property
    def taps(self) -> list[str]:
        """The taps at which something happens: those that are changed, or read for a change."""
        return [*dict.fromkeys((*self._by_tap, *self._read))]

    def change(self, tap: str, then: TorchChange | None = None) -> TorchChange:
        """Return the change of a tap's values [tokens, ...].

        Args:
            then: one more, after all others.
        """

        def changed(values: Tensor) -> Tensor:
            for splice, arrays in self._by_tap.get(tap, ()):
                read = self._read[splice.reads.name] if splice.reads else None
                values = _applied(splice, arrays, values, values if read is None else read)
            values = then(values) if then else values
            if tap in self._read:
                self._read[tap] = values
            return values

        return changed


def _applied(
    splice: Splice, arrays: Mapping[str, np.ndarray], values: Tensor, given: Tensor
) -> Tensor:
    def typed(array: np.ndarray) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(array)).to(given.device)
        return found.to(given) if found.is_floating_point() else found

    def kth_largest(found: Tensor, k: int) -> Tensor:
        return found.topk(k).values[..., -1:]

    own: dict[str, Any] = {name: typed(np.asarray(array)) for name, array in arrays.items()}
    rows, functions = given.reshape(len(given), -1), TorchFunctions
    new = changed_rows(splice.kind, splice.sae, own, rows, functions, torch.matmul, kth_largest)
    return new.reshape(values.shape).to(values)

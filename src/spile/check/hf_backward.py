"""Attributions, integrated gradients and edges, from the gradients and values of HF's model."""

# Strict, but for values that torch's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spile.check.backward import BackwardPass
from spile.check.hf_hooks import TorchChange
from spile.models.sites import BACKWARD
from spile.models.taps import Tap, ended_between, writes_to

# Of the objective with respect to some taps; with changes at the places of a path, if they are
# given.
Gradients = Callable[..., dict[str, np.ndarray]]


def is_backward(name: str) -> bool:
    """Whether a tap is made by a backward pass."""
    return name.partition(".")[0] in BACKWARD


@dataclass(frozen=True)
class HfBackward:
    """The taps of one context's backward pass."""

    gradients: Gradients
    values: Callable[[Collection[str]], dict[str, np.ndarray]]
    projection: Callable[[str], np.ndarray]  # of a tap's heads to the stream: [width, values]
    block_scale: Callable[[int], float]  # that the stream is multiplied with as a block ends
    made: BackwardPass

    def taps(self, names: Collection[str]) -> dict[str, np.ndarray]:
        sources = {name: _source_of(name) for name in names}
        summed = {name for name in names if BACKWARD[name.partition(".")[0]].summed}
        crossed = {name for name in names if BACKWARD[name.partition(".")[0]].crossed}
        gradients = self._gradients({*sources.values()})
        needed = {sources[name] for name in summed}
        if crossed:
            needed |= {replace(writer, heads=()).name for writer in self.made.writers}
        values = self.values(needed) if needed else {}
        found: dict[str, np.ndarray] = {}
        for name, source in sources.items():
            found[name] = gradients[source]
            if name in crossed:
                found[name] = self._edges(source, values, gradients[source])
            elif name in self.made.encoded:
                pair = (values[source], gradients[source])
                found[name] = np.stack([each.reshape(len(each), -1) for each in pair], axis=1)
            elif name in summed:
                found[name] = self._products(source, values, gradients[source])
        return found

    def _products(
        self, tap: str, values: Mapping[str, np.ndarray], gradients: np.ndarray
    ) -> np.ndarray:
        """Return the products of gradients with a tap's values less its baseline."""
        compared = values[tap] - self.made.baseline.get(tap, 0.0)
        return (compared * gradients).sum(axis=-1)

    def _edges(
        self, reader: str, values: Mapping[str, np.ndarray], gradients: np.ndarray
    ) -> np.ndarray:
        """Return [tokens, writers]; zero for a writer that comes after the reader."""
        products = np.zeros((len(gradients), len(self.made.writers)), gradients.dtype)
        assert self.made.arch
        for place, writer in enumerate(self.made.writers):
            if not writes_to(writer, Tap.from_name(reader), self.made.arch):
                continue
            name = replace(writer, heads=()).name
            ended = ended_between(writer, Tap.from_name(reader))
            own = gradients * math.prod(map(self.block_scale, ended))
            if writer.heads:
                own = (own @ self.projection(name)).reshape(values[name].shape)
            found = self._products(name, values, own)
            products[:, place] = found[:, writer.heads[0]] if writer.heads else found
        return products

    def _gradients(self, sources: Collection[str]) -> dict[str, np.ndarray]:
        """Return the gradient at each tap, or its mean over the path to its values."""
        if not self.made.steps:
            return self.gradients(sources)
        return {source: self._mean(source, self.made.steps) for source in sources}

    def _mean(self, source: str, steps: int) -> np.ndarray:
        places, weights = np.polynomial.legendre.leggauss(steps)  # from -1 to 1
        total = 0.0
        for place, weight in zip(places.tolist(), weights.tolist(), strict=True):
            path = self._path(source, (place + 1) / 2)
            total = total + weight / 2 * self.gradients([source], path)[source]
        return np.asarray(total)

    def _path(self, source: str, share: float) -> dict[str, TorchChange]:
        """Return the change that puts a tap's values at a share of the way from the baseline."""
        baseline = self.made.baseline.get(source)

        def on_path(values: Tensor) -> Tensor:
            if baseline is None:
                return share * values
            begin = torch.from_numpy(np.ascontiguousarray(baseline)).to(values)
            return begin + share * (values - begin)

        return {source: on_path}


def _source_of(name: str) -> str:
    """The name of the tap that a gradient, an attribution or edges are of."""
    site, dot, layer = name.partition(".")
    return f"{BACKWARD[site].of}{dot}{layer}"

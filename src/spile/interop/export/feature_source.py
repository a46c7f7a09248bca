"""Features as other tools show them: each with its examples as texts, and the tokens it changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.options import listed
from spile.dataset.read.features import Examples, Features
from spile.dataset.records.chosen_taps import site_and_layer
from spile.interop.export.export_source import ExportSource

_BARS = 40  # of a histogram with equal steps


@dataclass(frozen=True)
class ShownExample:
    """The tokens around a row, and the activation at each.

    Attributes:
        at: the place of the row among the tokens.
    """

    tokens: list[str]
    values: list[float]
    at: int


@dataclass(frozen=True)
class ShownBand:
    """Examples of one band; of the top rows, `share` is None."""

    low: float
    high: float
    share: float | None
    examples: list[ShownExample]


@dataclass(frozen=True)
class ShownFeature:
    """One feature with everything that was counted of it.

    Attributes:
        bars: heights and middles of a histogram with equal steps, from the exact histogram.
        raised, lowered: tokens, and by how much; None if logits were not computed.
    """

    index: int
    name: str | None
    count: int
    density: float
    mean: float
    largest: float
    quantiles: list[float]
    bars: tuple[list[float], list[float]]
    top: ShownBand
    bands: list[ShownBand]
    neighbours: list[tuple[int, float]]
    raised: list[tuple[str, float]] | None
    lowered: list[tuple[str, float]] | None


QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def chosen_features(source: ExportSource) -> list[Features]:
    """Return the features of the chosen taps.

    Raises:
        ConfigError: if there are none.
    """
    dataset = source.dataset
    found = [
        each for each in dataset.feature_sets if all(tap in source.taps for tap in each.stored_taps)
    ]
    _ = dataset.texts  # (which raises if there is no tokenizer)
    if not found:
        there = listed(each.tap for each in dataset.feature_sets)
        raise ConfigError(
            f"{dataset.url}: no features of the chosen taps were counted; there are {there}: "
            f"`spile features {dataset.url}` counts them"
        )
    return found


def layer_of(features: Features) -> int:
    """Return the layer of the tap; raise ConfigError if it has none."""
    layer = site_and_layer(features.tap)[1]
    if layer is None:
        raise ConfigError(f"{features.tap} belongs to no layer, which this format needs")
    return layer


def shown_features(
    source: ExportSource, features: Features, before: int, after: int
) -> Iterator[ShownFeature]:
    """Yield every feature with `before` tokens before and `after` tokens after each example."""
    names = _TokenNames(source)
    for index in range(len(features)):
        largest = float(np.nan_to_num(features.largest[index]))
        logits = features.logits(index)
        near = features.neighbours(index)

        def band(
            examples: Examples, low: float, high: float, share: float | None, index: int = index
        ) -> ShownBand:
            shown = _examples(features, names, index, examples, before, after)
            return ShownBand(low, high, share, shown)

        top = features.top(index)
        lowest = float(top.values[-1]) if len(top) else 0.0
        yield ShownFeature(
            index=index,
            name=features.names[index] if features.names else None,
            count=int(features.counts[index]),
            density=float(features.density[index]),
            mean=float(np.nan_to_num(features.means[index])),
            largest=largest,
            quantiles=np.nan_to_num(features.quantiles(index, QUANTILES)).tolist(),
            bars=_bars(features, index),
            top=band(top, lowest, largest, None),
            bands=[band(b.examples, b.low, b.high, b.share) for b in features.bands(index)],
            neighbours=[*zip(near[0].tolist(), near[1].tolist(), strict=True)],
            raised=logits and names.pairs(logits.raised, logits.raised_by),
            lowered=logits and names.pairs(logits.lowered, logits.lowered_by),
        )


class _TokenNames:
    """The text of each token, kept once it was asked for."""

    def __init__(self, source: ExportSource) -> None:
        self._texts, self._known = source.dataset.texts, dict[int, str]()

    def of(self, ids: np.ndarray) -> list[str]:
        for each in {*ids.tolist()} - self._known.keys():
            self._known[each] = self._texts.pieces([each])[0]
        return [self._known[each] for each in ids.tolist()]

    def pairs(self, ids: np.ndarray, values: np.ndarray) -> list[tuple[str, float]]:
        return [*zip(self.of(ids), values.tolist(), strict=True)]


def _examples(
    features: Features, names: _TokenNames, index: int, examples: Examples, before: int, after: int
) -> list[ShownExample]:
    if not len(examples):
        return []
    found = features.windows(index, examples.rows, before, after)
    return [
        ShownExample(
            names.of(tokens[there]), values[there].tolist(), int(np.count_nonzero(there[:before]))
        )
        for tokens, values, there in zip(found.tokens, found.values, found.there, strict=True)
    ]


def _bars(features: Features, index: int) -> tuple[list[float], list[float]]:
    """Spread the counts of a histogram, whose bins double, over equal steps."""
    edges, counts = features.histogram(index)
    used = np.flatnonzero(counts)
    if not len(used):
        return [], []
    low, high = float(edges[used[0]]), float(edges[used[-1] + 1])
    low = 0.0 if low > 0 else low
    steps = np.linspace(low, high, _BARS + 1)
    ends = np.interp(steps, edges, np.concatenate([[0], np.cumsum(counts)]))
    return np.diff(ends).tolist(), ((steps[1:] + steps[:-1]) / 2).tolist()


def only_layers(found: Sequence[Features]) -> Mapping[int, Features]:
    """Return features by their layer, for formats that hold one set for each.

    Raises:
        ConfigError: if two sets are of one layer, or of directions.
    """
    layers: dict[int, Features] = {}
    for each in found:
        if each.is_signed:
            continue
        layer = layer_of(each)
        if layer in layers:
            raise ConfigError(
                f"{layers[layer].tap} and {each.tap} are both of layer {layer}; choose with --taps"
            )
        layers[layer] = each
    if not layers:
        raise ConfigError("the chosen features are directions; this format holds latents of layers")
    return layers


def about_features(source: ExportSource, found: Sequence[Features]) -> dict[str, Any]:
    """Return the origin of features, to store beside them."""
    about = source.about()
    return {
        **{name: about[name] for name in ("spile", "dataset", "fingerprint", "recipe")},
        "features": {
            each.name: {"tap": each.tap, "features": len(each), "rows": each.rows} for each in found
        },
    }

"""circuit-tracer's packed features: what its page fetches of a transcoder's repository.

features/index.json.gz    by layer: the file, and where each feature's record begins and ends
features/layer_N.bin      a record for each feature: its length (uint32), and gzipped JSON
"""

import gzip
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spile.core.errors import ConfigError
from spile.dataset.read.features import Features
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource
from spile.interop.export.feature_source import (
    ShownBand,
    ShownFeature,
    about_features,
    chosen_features,
    only_layers,
    shown_features,
)

_BEFORE, _AFTER = 24, 8  # tokens around each example
_LENGTH = struct.Struct("<I")


def _write(source: ExportSource, to: Path) -> int:
    layers = only_layers(chosen_features(source))
    folder = to / "features"
    folder.mkdir()
    index: dict[str, Any] = {}
    for layer, features in sorted(layers.items()):
        name = f"layer_{layer}.bin"
        offsets = [0]
        with (folder / name).open("xb") as file:
            for shown in shown_features(source, features, _BEFORE, _AFTER):
                record = json.dumps(_record(features, layer, shown)).encode()
                data = gzip.compress(record, 6, mtime=0)
                offsets.append(offsets[-1] + file.write(_LENGTH.pack(len(data)) + data))
        index[str(layer)] = {"filename": name, "offsets": offsets}
    data = gzip.compress(json.dumps(index).encode(), 6, mtime=0)
    (folder / "index.json.gz").write_bytes(data)
    write_json(to / "spile.json", about_features(source, [*layers.values()]))
    return sum(map(len, layers.values()))


def _record(features: Features, layer: int, shown: ShownFeature) -> dict[str, Any]:
    """Return a feature in the fields of circuit-tracer's `frontend/feature_models.py`."""
    heights, _ = shown.bars
    total = layer + shown.index
    return {
        "transcoder_id": features.tap,
        "index": total * (total + 1) // 2 + shown.index,  # Cantor's pair of layer and feature
        "examples_quantiles": [
            _quantile("Top activations", shown.top),
            *(
                _quantile(f"{band.low:.3g} to {band.high:.3g}, drawn at random", band)
                for band in shown.bands
            ),
        ],
        "top_logits": [token for token, _ in shown.raised or ()],
        "bottom_logits": [token for token, _ in shown.lowered or ()],
        "act_min": 0.0,
        "act_max": shown.largest,
        "quantile_values": shown.quantiles,
        "histogram": heights,
        "activation_frequency": shown.density,
    }


def _quantile(name: str, band: ShownBand) -> dict[str, Any]:
    return {
        "quantile_name": name,
        "examples": [
            {
                "tokens_acts_list": [round(value, 5) for value in each.values],
                "train_token_ind": each.at,
                "is_repeated_datapoint": False,
                "tokens": each.tokens,
            }
            for each in band.examples
        ],
    }


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    index = json.loads(gzip.decompress((at / "features/index.json.gz").read_bytes()))
    counts: dict[str, int] = {}
    for layer, entry in index.items():
        data = (at / "features" / entry["filename"]).read_bytes()
        bounds = entry["offsets"]
        lengths = (_LENGTH.unpack_from(data, start)[0] for start in bounds[:-1])
        sizes = [
            stop - start - _LENGTH.size for start, stop in zip(bounds, bounds[1:], strict=False)
        ]
        whole = [*lengths] == sizes and bounds[-1] == len(data)
        counts[layer] = len(sizes) if whole else 0
    return counts


def _check(source: ExportSource) -> None:
    only_layers(chosen_features(source))
    if source.dataset.recipe.pool:
        raise ConfigError(f"{source.dataset.url}: holds pooled rows, which have no tokens around")


CIRCUIT_TRACER = ExportFormat(
    name="circuit-tracer",
    about="circuit-tracer: packed features, as its page fetches them",
    write=_write,
    count=_count,
    check=_check,
    integers=True,
    features=True,
)

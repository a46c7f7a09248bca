"""Neuronpedia's importable form, as SAEDashboard's `neuronpedia_export` lays it out.

MODEL/SOURCE/release.jsonl, model.jsonl, sourceset.jsonl, source.jsonl     one row each
MODEL/SOURCE/features/batch-N.jsonl.gz                                     a row for each feature
MODEL/SOURCE/activations/batch-N.jsonl.gz                                  a row for each example
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from spile.dataset.read.features import Features
from spile.dataset.records.chosen_taps import site_and_layer
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource
from spile.interop.export.feature_source import (
    ShownBand,
    ShownFeature,
    about_features,
    chosen_features,
    layer_of,
    shown_features,
)

_BEFORE, _AFTER = 48, 16  # tokens around each example
_BATCH = 128  # features of a file, as SAEDashboard writes
_TOP = -1.0  # the bin of top activations
_EMPTY = (
    "topkCosSimIndices", "topkCosSimValues", "neuron_alignment_indices", "neuron_alignment_values",
    "neuron_alignment_l1", "correlated_neurons_indices", "correlated_neurons_pearson",
    "correlated_neurons_l1", "correlated_features_l1", "logits_hist_data_bar_heights",
    "logits_hist_data_bar_values", "decoder_weights_dist",
)  # fmt: skip
_ABSENT = (  # of an activation
    "dataSource", "dataIndex", "dfaTargetIndex", "dfaMaxValue", "logitContributions", "zIndices",
    "zValues",
)  # fmt: skip
_STRENGTH = 10  # for steering, without a vector


def _write(source: ExportSource, to: Path) -> int:
    found = chosen_features(source)
    now = datetime.now(UTC).isoformat()
    for features in found:
        folder = to / _model(source) / _source_id(features)
        (folder / "features").mkdir(parents=True)
        (folder / "activations").mkdir()
        for name, row in _about(source, features, now).items():
            (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        every = shown_features(source, features, _BEFORE, _AFTER)
        for number, batch in enumerate(_batches(every)):
            rows = [_feature(source, features, each, now) for each in batch]
            examples = [row for each in batch for row in _activations(source, features, each, now)]
            for kind, written in (("features", rows), ("activations", examples)):
                _write_lines(folder / kind / f"batch-{number}.jsonl.gz", written)
    write_json(to / "spile.json", about_features(source, found))
    return sum(map(len, found))


def _batches(every: Iterator[ShownFeature]) -> Iterator[Sequence[ShownFeature]]:
    while batch := [*islice(every, _BATCH)]:
        yield batch


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), 5, mtime=0))


def _model(source: ExportSource) -> str:
    """Return the model's bare name, as Neuronpedia names models."""
    bare = re.sub(r"^hf://([^@]+)(@.*)?$", r"\1", source.dataset.recipe.model_source)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", bare.rstrip("/").rsplit("/", 1)[-1]).lower()


def _set_name(features: Features) -> str:
    """Return a name that no other set of the dataset has in the same layer."""
    site = site_and_layer(features.tap)[0].replace("_", "-").replace(".", "-")
    what = "directions" if features.is_signed else str(len(features))
    number = features.name.removeprefix(f"{features.tap}-")  # among the sets of the tap
    return f"spile-{site}-{what}" + ("" if number == "1" else f"-{number}")


def _source_id(features: Features) -> str:
    return f"{layer_of(features)}-{_set_name(features)}"


def _about(source: ExportSource, features: Features, now: str) -> dict[str, dict[str, Any]]:
    """Return the rows that describe the model, the set and the source.

    The importer asks who created them: `creatorId` is empty, and Neuronpedia's own tools fill it.
    """
    model, release, recipe = _model(source), "spile", source.dataset.recipe
    told = f"{len(features)} features of {features.tap}, over {features.rows} tokens"
    creator = {"creatorId": "", "creatorName": "spile", "createdAt": now}
    return {
        "release": {**creator, "name": release, "description": told, "visibility": "PUBLIC",
                    "descriptionShort": told, "creatorNameShort": "spile", "urls": []},
        "model": {"id": model, "instruct": model.endswith("-it"), "displayNameShort": model,
                  "displayName": model, "creatorId": "", "createdAt": now, "updatedAt": now},
        "sourceset": {**creator, "modelId": model, "name": _set_name(features),
                      "releaseName": release, "description": told, "visibility": "PUBLIC"},
        "source": {"modelId": model, "setName": _set_name(features), "id": _source_id(features),
                   "creatorId": "", "visibility": "PUBLIC", "dataset": recipe.corpus_source,
                   "num_prompts": source.dataset.num_documents,
                   "num_tokens_in_prompt": recipe.seq_len, "createdAt": now},
    }  # fmt: skip


def _feature(
    source: ExportSource, features: Features, shown: ShownFeature, now: str
) -> dict[str, Any]:
    heights, middles = shown.bars
    near = shown.neighbours
    row = {
        "modelId": _model(source), "layer": _source_id(features), "index": str(shown.index),
        "creatorId": "", "createdAt": now, "maxActApprox": shown.largest, "hasVector": False,
        "vector": [], "vectorLabel": shown.name, "hookName": None,
        "vectorDefaultSteerStrength": _STRENGTH,
        "correlated_features_indices": [latent for latent, _ in near],
        "correlated_features_pearson": [score for _, score in near],
        "neg_str": [token for token, _ in shown.lowered or ()],
        "neg_values": [value for _, value in shown.lowered or ()],
        "pos_str": [token for token, _ in shown.raised or ()],
        "pos_values": [value for _, value in shown.raised or ()],
        "frac_nonzero": shown.density, "freq_hist_data_bar_heights": heights,
        "freq_hist_data_bar_values": middles, "sourceSetName": _set_name(features),
    }  # fmt: skip
    if features.is_signed:
        vector = features.vectors[shown.index].tolist()
        row |= {"hasVector": True, "vector": vector, "vectorDefaultSteerStrength": shown.largest}
    return {**dict.fromkeys(_EMPTY, []), **row}


def _activations(
    source: ExportSource, features: Features, shown: ShownFeature, now: str
) -> Iterator[dict[str, Any]]:
    bands: list[tuple[ShownBand, float, float, float]] = [(shown.top, _TOP, _TOP, _TOP)]
    bands += [(band, band.low, band.high, band.share or 0.0) for band in shown.bands]
    number = 0
    for band, low, high, share in bands:
        for each in band.examples:
            largest = max(each.values)
            where = f"{source.dataset.fingerprint} {features.name} {shown.index} {number}"
            number += 1
            yield {
                **dict.fromkeys(_ABSENT),
                "id": f"c{xxhash.xxh3_128_hexdigest(where.encode())[:24]}",
                "tokens": each.tokens, "modelId": _model(source), "layer": _source_id(features),
                "index": str(shown.index), "maxValue": largest,
                "maxValueTokenIndex": each.values.index(largest), "minValue": min(each.values),
                "values": each.values, "creatorId": "", "createdAt": now, "dfaValues": [],
                "lossValues": [], "binMin": low, "binMax": high, "binContains": share,
                "qualifyingTokenIndex": each.at,
            }  # fmt: skip


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for path in at.glob("*/*/features/*.jsonl.gz"):
        with gzip.open(path, "rb") as file:
            counts[str(path)] = sum(1 for _ in file)
    return counts


def _check(source: ExportSource) -> None:
    for features in chosen_features(source):
        layer_of(features)


NEURONPEDIA = ExportFormat(
    name="neuronpedia",
    about="Neuronpedia: features and activations, as SAEDashboard exports them for import",
    write=_write,
    count=_count,
    check=_check,
    integers=True,
    features=True,
)

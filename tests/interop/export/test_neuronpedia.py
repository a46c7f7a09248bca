"""Neuronpedia's rows: the fields that SAEDashboard's `neuronpedia_export` writes."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.features.run import FeatureRequest, make_features
from spile.interop.export import export, neuronpedia
from support import web_page

# The fields of SAEDashboard@3ea1249, sae_dashboard/neuronpedia/neuronpedia_export.py.
FEATURE = """modelId layer index creatorId createdAt maxActApprox hasVector vector vectorLabel
    vectorDefaultSteerStrength hookName topkCosSimIndices topkCosSimValues neuron_alignment_indices
    neuron_alignment_values neuron_alignment_l1 correlated_neurons_indices
    correlated_neurons_pearson correlated_neurons_l1 correlated_features_indices
    correlated_features_pearson correlated_features_l1 neg_str neg_values pos_str pos_values
    frac_nonzero freq_hist_data_bar_heights freq_hist_data_bar_values logits_hist_data_bar_heights
    logits_hist_data_bar_values decoder_weights_dist sourceSetName"""
ACTIVATION = """id tokens index layer modelId maxValue maxValueTokenIndex minValue values creatorId
    dataSource dataIndex dfaValues dfaTargetIndex dfaMaxValue createdAt lossValues
    logitContributions binMin binMax binContains qualifyingTokenIndex zIndices zValues"""
NEEDED = ("id", "tokens", "index", "layer", "modelId", "maxValue", "maxValueTokenIndex",
          "minValue", "values", "creatorId")  # fmt: skip


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"{kind}/batch-*.jsonl.gz"), key=lambda p: int(p.stem[6:-6]))
    return [json.loads(line) for file in files for line in gzip.open(file, "rb")]


def test_features_and_activations_have_the_importers_fields(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuronpedia, "_BATCH", 16)
    made = export(str(counted), tmp_path / "dest", to="neuronpedia", taps=web_page.LATENT_PAIR)
    assert made.features == 40
    (model,) = (path for path in (tmp_path / "dest").iterdir() if path.is_dir())
    (folder,) = model.iterdir()
    assert folder.name == "1-spile-resid-post-40"
    for name in ("release", "model", "sourceset", "source"):
        (row,) = (folder / f"{name}.jsonl").read_text().splitlines()
        assert json.loads(row)["createdAt"]
    source = json.loads((folder / "source.jsonl").read_text())
    assert source["id"] == folder.name and source["modelId"] == model.name
    found = rows(folder, "features")
    features = spile.open(counted).features("resid_post.1")
    assert [each["index"] for each in found] == [str(number) for number in range(40)]
    for row in found:
        assert {*row} <= {*FEATURE.split()} and row["layer"] == folder.name
        assert row["frac_nonzero"] == features.density[int(row["index"])]
    every = rows(folder, "activations")
    assert len({each["id"] for each in every}) == len(every) > 40
    for row in every:
        assert {*NEEDED} <= {*row} <= {*ACTIVATION.split()}
        assert len(row["tokens"]) == len(row["values"]) > row["maxValueTokenIndex"]
        assert row["values"][row["maxValueTokenIndex"]] == row["maxValue"] == max(row["values"])
    top = [e for e in every if e["index"] == str(web_page.LOUD_LATENT) and e["binContains"] == -1]
    values = [each["values"][each["qualifyingTokenIndex"]] for each in top]
    assert values == features.top(web_page.LOUD_LATENT).values.tolist()


def test_each_set_of_directions_of_a_tap_has_a_folder_of_its_own(
    model: Path, tmp_path: Path
) -> None:
    built = web_page.build_two_encoders(tmp_path / "out", model, web_page.texts(6))
    width = built.table.taps["mlp_out.1"].width
    for number, name in enumerate(("one", "two")):
        np.save(tmp_path / f"{name}.npy", np.eye(width)[number])
        files = [str(tmp_path / f"{name}.npy")]
        make_features(str(built.path), FeatureRequest(tap="mlp_out.1", directions=files, logits=0))
    made = export(str(built.path), tmp_path / "dest", to="neuronpedia", taps="mlp_out.1")
    assert made.features == 2
    (model_folder,) = (path for path in (tmp_path / "dest").iterdir() if path.is_dir())
    wanted = {"1-spile-mlp-out-directions": "one", "1-spile-mlp-out-directions-2": "two"}
    assert {path.name for path in model_folder.iterdir()} == {*wanted}
    for name, label in wanted.items():
        (row,) = rows(model_folder / name, "features")
        assert (row["vectorLabel"], row["sourceSetName"]) == (label, name.removeprefix("1-"))

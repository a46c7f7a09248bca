"""Neuronpedia's rows: the fields that SAEDashboard's `neuronpedia_export` writes."""

import gzip
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
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
        assert {*row} == {*FEATURE.split()} and row["layer"] == folder.name
        assert row["frac_nonzero"] == features.density[int(row["index"])]
    every = rows(folder, "activations")
    assert len({each["id"] for each in every}) == len(every) > 40
    for row in every:
        assert {*NEEDED} <= {*row} == {*ACTIVATION.split()}
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


def dashboard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SAEDashboard's own converter, of a checkout (db4839a); it only needs orjson, or the like."""
    checkout = os.environ.get("SPILE_SAE_DASHBOARD")
    if not checkout:
        pytest.skip("SPILE_SAE_DASHBOARD does not name a checkout of SAEDashboard")
    plain = SimpleNamespace(
        loads=json.loads, dumps=lambda value: json.dumps(value, default=str).encode()
    )
    monkeypatch.setitem(sys.modules, "orjson", plain)
    path = Path(checkout, "sae_dashboard/neuronpedia/neuronpedia_export.py")
    spec = importlib.util.spec_from_file_location("neuronpedia_export", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "neuronpedia_export", module)
    spec.loader.exec_module(module)
    return module


def batch(features: list[dict[str, Any]], activations: list[dict[str, Any]]) -> dict[str, Any]:
    """Our rows in the form of a batch of SAEDashboard's runner."""
    names = {"bin_min": "binMin", "bin_max": "binMax", "bin_contains": "binContains",
             "qualifying_token_index": "qualifyingTokenIndex", "tokens": "tokens",
             "values": "values"}  # fmt: skip
    return {
        "features": [
            {
                **row,
                "feature_index": row["index"],
                "activations": [
                    {theirs: each[ours] for theirs, ours in names.items()}
                    for each in activations
                    if each["index"] == row["index"]
                ],
            }
            for row in features
        ]
    }


@pytest.mark.full
def test_rows_are_those_that_saedashboards_converter_writes(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = dashboard(monkeypatch)
    export(str(counted), tmp_path / "dest", to="neuronpedia", taps=web_page.LATENT_PAIR)
    (model,) = (path for path in (tmp_path / "dest").iterdir() if path.is_dir())
    (folder,) = model.iterdir()
    mine = rows(folder, "features"), rows(folder, "activations")
    (tmp_path / "batch-0.json").write_text(json.dumps(batch(*mine)))
    layer, _, source_set = folder.name.partition("-")
    told = {name: json.loads((folder / f"{name}.jsonl").read_text()) for name in
            ("release", "model", "sourceset", "source")}  # fmt: skip
    config = theirs.NeuronpediaExportConfig(
        saedashboard_output_dir=str(tmp_path), exports_dir=str(tmp_path / "theirs"),
        creator_name="spile", creator_id="", release_id=told["release"]["name"],
        release_title=told["release"]["description"], url="", model_name=model.name,
        neuronpedia_source_set_id=source_set, hf_weights_repo_id="", hf_weights_path="",
        neuronpedia_source_set_description=told["sourceset"]["description"], hook_point="x",
        layer_num=int(layer), prompts_huggingface_dataset_path=told["source"]["dataset"],
        n_prompts_total=told["source"]["num_prompts"],
        n_tokens_in_prompt=told["source"]["num_tokens_in_prompt"],
    )  # fmt: skip
    made = Path(theirs.export_neuronpedia_dashboards(config))
    assert made.name == folder.name and made.parent.name == model.name
    own = {"id", "createdAt", "sourceSetName", "hookName"}
    for ours, kind in zip(mine, ("features", "activations"), strict=True):
        found = rows(made, kind)
        assert len(found) == len(ours) > 0
        for one, other in zip(ours, found, strict=True):
            assert {n: v for n, v in one.items() if n not in own} == {
                n: v for n, v in other.items() if n not in own
            }
    kinds = {"release": "SourceRelease", "model": "Model", "sourceset": "SourceSet",
             "source": "Source"}  # fmt: skip
    when = {"createdAt", "updatedAt"}
    for name, row in told.items():
        whole = vars(getattr(theirs, kinds[name])(**row))
        wanted = json.loads((made / f"{name}.jsonl").read_text())
        if name == "source":
            wanted |= {"hfRepoId": None, "hfFolderId": None}
        assert {n: v for n, v in whole.items() if n not in when} == {
            n: v for n, v in wanted.items() if n not in when
        }

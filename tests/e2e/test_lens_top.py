"""`--lens`: what a lens predicts at a layer, stored as taps of a dataset."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import spile
from chaos.harness import check_sound
from spile.check.compare import check
from spile.core.config import Recipe, Runtime
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.lenses import jacobian_files, tuned_files

TOP = 5
OPTIONS: dict[str, Any] = {"seq_len": 32, "unit_tokens": 700, "compute_dtype": "float32"}
QUICK = Runtime(batch_tokens=128)


@pytest.fixture(scope="module")
def maps(model: Path) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    width = open_checkpoint(str(model)).arch.width
    rng = np.random.default_rng(0)
    return {
        layer: (rng.normal(size=(width, width)) / width, rng.normal(size=width) / 10)
        for layer in (0, 1)
    }


@pytest.fixture(scope="module")
def lenses(
    maps: dict[int, tuple[np.ndarray, np.ndarray]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    files = {
        "tuned": tuned_files(maps, layers=3, model="tiny"),
        "jacobian": jacobian_files({layer: matrix for layer, (matrix, _) in maps.items()}, 3),
    }
    found = {name: tmp_path_factory.mktemp(name) for name in files}
    for kind, own in files.items():
        for name, data in own.items():
            (found[kind] / name).write_bytes(data)
    return found


@pytest.fixture(scope="module")
def rows(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    recipe = Recipe(model=str(model), corpus=str(corpus), taps="resid_post:0+1", **OPTIONS)
    out = tmp_path_factory.mktemp("rows") / "out"
    spile.extract(recipe, out, QUICK)
    return spile.open(str(out))


def made(recipe: Recipe, out: Path, **options: Any) -> spile.Dataset:
    spile.extract(dataclasses.replace(recipe, **options), str(out), QUICK)
    return spile.open(str(out))


@pytest.fixture
def recipe(model: Path, corpus: Path) -> Recipe:
    return Recipe(
        model=str(model), corpus=str(corpus), taps="lens_top:0+1", top_logits=TOP, **OPTIONS
    )


@pytest.mark.parametrize("kind", ["tuned", "jacobian"])
def test_predictions_are_those_of_the_models_own_head(
    kind: str,
    model: Path,
    recipe: Recipe,
    rows: spile.Dataset,
    lenses: dict[str, Path],
    maps: dict[int, tuple[np.ndarray, np.ndarray]],
    tmp_path: Path,
) -> None:
    ds = made(recipe, tmp_path / "out", lens=str(lenses[kind]))
    names = ("lens_logsumexp", "lens_top_ids", "lens_top_logprobs")
    assert ds.taps == [f"{name}.{layer}" for layer in (0, 1) for name in names]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer, (matrix, bias) in maps.items():
        x = rows.read(f"resid_post.{layer}")
        stored = matrix.astype(np.float16 if kind == "jacobian" else np.float32)
        mapped = x @ stored.T.astype(np.float32)
        mapped += (x + bias.astype(np.float32)) if kind == "tuned" else 0
        with torch.no_grad():
            logits = network.lm_head(network.model.norm(torch.tensor(mapped)))
        logs = logits.log_softmax(-1)
        values, ids = logs.topk(TOP)
        found = ds.read(f"lens_top_logprobs.{layer}")
        np.testing.assert_allclose(found, values.numpy(), atol=2e-5)
        same = ds.read(f"lens_top_ids.{layer}").astype(np.int64) == ids.numpy()
        assert same.mean() > 0.999
        total = logits.logsumexp(-1).numpy()
        np.testing.assert_allclose(ds.read(f"lens_logsumexp.{layer}"), total, atol=2e-5)
    check_sound(tmp_path / "out")
    checked = check(ds.url, samples=2)
    assert checked.ok and {*checked.taps} == {*ds.taps}
    assert max(tap.error for tap in checked.taps.values()) < 2e-5


@pytest.mark.full
def test_a_lens_grows_with_the_dataset_and_stands_beside_other_taps(
    recipe: Recipe, lenses: dict[str, Path], tmp_path: Path
) -> None:
    where = str(lenses["tuned"])
    whole = made(recipe, tmp_path / "whole", lens=where, taps="resid_post:0,lens_top:0,top_logits")
    made(recipe, tmp_path / "out", taps="resid_post:0", top_logits=None, max_docs=25)
    added = Recipe(add_taps="lens_top:0", lens=where, top_logits=TOP)
    spile.extract(added, str(tmp_path / "out"), QUICK)
    spile.extract(Recipe(more=True, max_docs=40), str(tmp_path / "out"), QUICK)
    spile.extract(Recipe(add_taps="lens_top:0"), str(tmp_path / "out"), QUICK)
    grown = spile.open(str(tmp_path / "out"))
    for tap in grown.taps:
        for doc in (0, 24, 25, 39):
            found, wanted = (each.document(doc).read(tap) for each in (grown, whole))
            if "ids" in tap:
                assert (found == wanted).mean() > 0.99
            else:
                np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert whole.recipe.lens and whole.recipe.top_logits == TOP
    check_sound(tmp_path / "out")


def test_what_a_lens_cannot_do_is_refused(
    recipe: Recipe, lenses: dict[str, Path], tmp_path: Path
) -> None:
    where = str(lenses["tuned"])
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "lens_top needs --lens"),
        ({"lens": where, "taps": "embed", "top_logits": None}, "no tap reads it"),
        ({"lens": where, "taps": "lens_top:2"}, "has no layer 2; it has 0, 1"),
        ({"lens": where, "pool": "mean"}, "predicts after each token"),
        ({"lens": str(tmp_path)}, "holds no lens"),
        ({"lens": where, "top_logits": 1 << 20}, "only .* tokens in the vocabulary"),
    ]
    for options, why in refused:
        with pytest.raises(spile.SpileError, match=why):
            made(recipe, tmp_path / "no", **options)
    made(recipe, tmp_path / "out", lens=where, max_docs=2)
    other = dataclasses.replace(recipe, lens=str(lenses["jacobian"]), max_docs=2)
    with pytest.raises(spile.DriftError, match="lens"):
        spile.extract(other, str(tmp_path / "out"), QUICK)

"""`SITE_attr` with `--encode`: what each latent adds to the objective, by HF's autograd."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import spile
from chaos.harness import check_refused, check_sound, run
from spile.check.compare import check
from spile.check.hf_gradients import gradients, logprob
from spile.check.reference import Reference
from spile.core.config import Recipe
from spile.core.errors import SpileError
from support import saes

KEPT = 12
TAPS = "resid_post_attr:1,resid_post:1"


@pytest.fixture(scope="module")
def recipe(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    sae = saes.write_sae(tmp_path_factory.mktemp("sae") / "sae", hook="blocks.1.hook_resid_post")
    return Recipe(
        model=str(model), corpus=str(corpus), taps=TAPS, encode=str(sae), latents=KEPT,
        seq_len=64, unit_tokens=900, max_docs=6, compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip


def made(recipe: Recipe, out: Path, **options: Any) -> spile.Dataset:
    spile.extract(dataclasses.replace(recipe, **options), str(out))
    return spile.open(str(out))


@pytest.fixture(scope="module")
def dataset(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    return made(recipe, tmp_path_factory.mktemp("made") / "out")


def of_hf(model: Path, ids: np.ndarray) -> np.ndarray:
    """Return the attributions of all latents, [tokens, latents]."""
    reference = Reference(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    points = [point for point in reference.points if point.name == "resid_post.1"]
    found = gradients(reference.model, points, torch.tensor(ids.astype(np.int64)), logprob)
    rows = reference.taps(ids, {"resid_post.1"})["resid_post.1"]
    tensors = saes.random_tensors("jumprelu")
    latents = saes.plain_encode(rows, tensors, "jumprelu")
    return latents * (found["resid_post.1"] @ tensors["W_dec"].T)


@pytest.mark.full
def test_an_attribution_is_the_value_times_the_gradient_along_its_decoder(
    dataset: spile.Dataset, model: Path
) -> None:
    """The largest by magnitude are stored, with their signs."""
    check_sound(Path(dataset.url))
    assert dataset.encoded == ["resid_post.1", "resid_post_attr.1"]
    for doc in (0, 3):
        document = dataset.document(doc)
        rows = slice(0, 64)  # the first context
        wanted = of_hf(model, document.index["token_id"][rows])
        values = document.read("resid_post_attr_latents.1")[rows]
        ids = document.read("resid_post_attr_latent_ids.1")[rows]
        largest = np.abs(wanted).max()
        there = np.take_along_axis(wanted, ids.astype(np.int64), axis=1)
        assert np.abs(values - there).max() < 2e-5 * largest
        sizes = -np.sort(-np.abs(wanted), axis=1)[:, :KEPT]
        assert np.abs(np.abs(values) - sizes).max() < 2e-5 * largest
        assert (values < 0).any()
        assert (values > 0).any()


@pytest.mark.full
def test_attributions_of_latents_are_added_grown_streamed_and_checked(
    recipe: Recipe, dataset: spile.Dataset, tmp_path: Path
) -> None:
    """Of a top-k encoder, in bfloat16: the sum over latents is that of the reconstruction."""
    name = "resid_post_attr_latents.1"
    plain = made(recipe, tmp_path / "plain", taps="mlp_out:0", encode=None, latents=None)
    asked = Recipe(add_taps="resid_post_attr:1", encode=recipe.encode, latents=KEPT)
    spile.extract(asked, plain.url)
    spile.extract(Recipe(more=True, max_docs=8), plain.url)
    spile.extract(asked, plain.url)
    grown = spile.open(plain.url)
    for doc in (0, 5):
        whole = dataset.document(doc).read(name)
        np.testing.assert_allclose(grown.document(doc).read(name), whole, atol=1e-5)
    assert len(grown.document(7))
    report = check(grown.url, samples=2)
    assert report.ok
    assert {*report.taps} == {"mlp_out.0", "resid_post_attr_latents.1"}
    spile.extract(recipe, tmp_path / "disk", spile.Runtime(weights="disk"))
    streamed = spile.open(tmp_path / "disk")
    np.testing.assert_allclose(streamed.read(name), dataset.read(name), atol=1e-5)
    topk = saes.write_sae(tmp_path / "topk", "topk", hook="blocks.1.hook_resid_post")
    options: dict[str, Any] = {"encode": str(topk), "taps": "resid_post_attr:1", "latents": None}
    ds = made(recipe, tmp_path / "half", compute_dtype="bfloat16", **options)
    assert ds.latents("resid_post_attr.1", 0, 50).values.size
    check_refused(run("features", ds.url), 2, "holds attributions, and features count activations")


def test_what_has_no_attributions_of_latents_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    for told, options in (
        ("attributions have no error", {"encode_error": True}),
        ("are not pooled; leave out --pool", {"pool": "mean"}),
        ("leave out --steps", {"steps": 3}),
        ("leave out --baseline", {"baseline": "somewhere"}),
        ("an encoder cannot read resid_post_grad", {"taps": "resid_post_grad:1"}),
    ):
        with pytest.raises(SpileError, match=told):
            encode = recipe.encode
            if "grad" in told:
                encode = f"resid_post_grad.1={encode}"
            made(recipe, tmp_path / "out", **{"encode": encode, **options})

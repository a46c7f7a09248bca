"""`--baseline`: attributions are gradients times values less a mean, or another dataset's rows.

`--steps`: the gradients are means over the path from there.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import spile
from chaos.harness import check_sound
from spile.check.compare import check
from spile.check.hf_gradients import gradients, logprob
from spile.check.reference import Reference
from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError, SpileError

TOLERANCE = 2e-5  # of the tap's largest value
LENGTHS = (20, 7, 50, 32, 12, 9)  # some are longer than a context
VALUES = "resid_post:1,z:0"
PAIRS = {"resid_post_attr.1": "resid_post.1", "z_attr.0.h1.h3": "z.0"}
ATTRIBUTIONS = "resid_post_attr:1,z_attr:0.h1+h3"


def write(path: Path, seed: int, lengths: tuple[int, ...] = LENGTHS) -> str:
    rng = np.random.default_rng(seed)
    rows = [
        {"input_ids": rng.integers(3, 200, length).tolist(), "label": "ab"[n % 2]}
        for n, length in enumerate(lengths)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture(scope="module")
def recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    corpus = write(tmp_path_factory.mktemp("clean") / "clean.parquet", 0)
    return Recipe(
        model=str(model), corpus=corpus, taps=VALUES, seq_len=32, unit_tokens=60,
        compute_dtype="float32", store_dtype="float32", tokens_column="input_ids",
    )  # fmt: skip


def made(recipe: Recipe, out: Path, **options: Any) -> spile.Dataset:
    spile.extract(dataclasses.replace(recipe, **options), str(out))
    return spile.open(str(out))


@pytest.fixture(scope="module")
def corrupted(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    """The rows of other documents of the same lengths, in other units."""
    folder = tmp_path_factory.mktemp("corrupted")
    return made(recipe, folder / "out", corpus=write(folder / "c.parquet", 1), unit_tokens=1000)


@pytest.fixture(scope="module")
def clean(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    """Values, and their gradients."""
    taps = f"{VALUES},resid_post_grad:1,z_grad:0"
    return made(recipe, tmp_path_factory.mktemp("values") / "out", taps=taps)


def by_hand(clean: spile.Dataset, doc: int, tap: str, baseline: np.ndarray) -> np.ndarray:
    """Return a document's attributions, from stored gradients and values."""
    document, source = clean.document(doc), PAIRS[tap]
    site, _, layer = source.partition(".")
    product = document.read(f"{site}_grad.{layer}") * (document.read(source) - baseline)
    found = product.sum(axis=-1)
    return found[:, [1, 3]] if site == "z" else found


def compared(ds: spile.Dataset, clean: spile.Dataset, baseline: Any) -> None:
    """`baseline`: of a document and a source."""
    for tap, source in PAIRS.items():
        largest = np.abs(ds.read(tap)).max()
        for doc in range(len(LENGTHS)):
            wanted = by_hand(clean, doc, tap, baseline(doc, source))
            gap = np.abs(ds.document(doc).read(tap) - wanted)
            assert gap.max() < TOLERANCE * largest, (tap, doc)


def test_a_datasets_rows_are_subtracted_token_by_token(
    recipe: Recipe, clean: spile.Dataset, corrupted: spile.Dataset, tmp_path: Path
) -> None:
    """Documents pair, wherever they are packed."""
    ds = made(recipe, tmp_path / "out", taps=ATTRIBUTIONS, baseline=corrupted.url)
    check_sound(tmp_path / "out")
    compared(ds, clean, lambda doc, source: corrupted.document(doc).read(source))
    assert ds.recipe.baseline == f"rows {corrupted.fingerprint}"
    with pytest.raises(DriftError, match="baseline: stored .rows"):
        made(recipe, tmp_path / "out", taps=ATTRIBUTIONS, baseline="zero")


@pytest.mark.full
def test_check_and_filters_take_the_baseline_along(
    recipe: Recipe, clean: spile.Dataset, corrupted: spile.Dataset, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"taps": ATTRIBUTIONS, "baseline": corrupted.url}
    ds = made(recipe, tmp_path / "out", **options)
    report = check(ds.url, samples=4)
    assert report.ok
    assert {*report.taps} == {*PAIRS}
    some = made(recipe, tmp_path / "some", where="pos >= 3", every=2, **options)
    mean = made(recipe, tmp_path / "mean", pool="mean", **options)
    assert check(some.url, samples=3).ok
    assert check(mean.url, samples=3).ok
    for doc in range(len(LENGTHS)):
        document, kept = ds.document(doc), some.document(doc).index["offset"]
        for tap in PAIRS:
            every = document.read(tap)
            np.testing.assert_allclose(some.document(doc).read(tap), every[kept], atol=1e-5)
            np.testing.assert_allclose(mean.document(doc).read(tap)[0], every.mean(0), atol=1e-5)


@pytest.mark.full
def test_means_by_label_are_subtracted_also_by_a_later_pass(
    recipe: Recipe, clean: spile.Dataset, tmp_path: Path
) -> None:
    means = made(recipe, tmp_path / "means", store_dtype=None, reduce="mean", by="label")
    told = f"{means.url}:b"
    options: dict[str, Any] = {"taps": ATTRIBUTIONS, "baseline": told}
    ds = made(recipe, tmp_path / "out", **options)
    compared(ds, clean, lambda _, source: means.reduced(source)["b"])
    assert check(ds.url, samples=3).ok
    spile.extract(Recipe(), ds.url)  # the baseline comes from the store
    with pytest.raises(DriftError, match="baseline: stored .mean"):
        made(recipe, tmp_path / "out", **{**options, "baseline": f"{means.url}:a"})
    values = made(recipe, tmp_path / "values")
    spile.extract(Recipe(add_taps=ATTRIBUTIONS, baseline=told), values.url)
    added = spile.open(values.url)
    for tap in PAIRS:
        np.testing.assert_allclose(added.read(tap), ds.read(tap), atol=1e-6)


@pytest.mark.full
def test_streamed_blocks_subtract_the_same(
    recipe: Recipe, corrupted: spile.Dataset, tmp_path: Path
) -> None:
    asked = dataclasses.replace(recipe, taps=ATTRIBUTIONS, baseline=corrupted.url)
    ds = made(asked, tmp_path / "out")
    spile.extract(asked, tmp_path / "disk", spile.Runtime(weights="disk", batch_tokens=64))
    streamed = spile.open(tmp_path / "disk")
    for tap in PAIRS:
        np.testing.assert_allclose(streamed.read(tap), ds.read(tap), atol=1e-5)


def test_datasets_that_do_not_fit_are_refused(
    recipe: Recipe, corrupted: spile.Dataset, tmp_path: Path
) -> None:
    def refused(told: str, **options: Any) -> None:
        with pytest.raises(SpileError, match=told):
            made(recipe, tmp_path / "out", **{"taps": ATTRIBUTIONS, **options})

    url = corrupted.url
    refused("no tap holds an attribution", taps="resid_post_grad:1", baseline=url)
    refused("has no resid_post.0; it has z.0", taps="resid_post_attr:0", baseline=url)
    refused("no label 'a'", baseline=f"{url}:a")
    refused("its contexts have 32 tokens", baseline=url, seq_len=16)
    refused("made by another model", baseline=url, model="demo", taps="resid_post_attr:1")
    with pytest.raises(ConfigError, match="nothing"):
        made(recipe, tmp_path / "out", taps=ATTRIBUTIONS, baseline=str(tmp_path / "nothing"))


@pytest.mark.full
def test_documents_of_other_lengths_are_refused_by_name(
    recipe: Recipe, corrupted: spile.Dataset, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"taps": ATTRIBUTIONS, "baseline": corrupted.url}
    longer = write(tmp_path / "longer.parquet", 2, (20, 8))
    with pytest.raises(SpileError, match="document 1 has 7 tokens there, and 8 here"):
        made(recipe, tmp_path / "longer", corpus=longer, **options)
    more = write(tmp_path / "more.parquet", 2, (*LENGTHS, 5))
    with pytest.raises(SpileError, match="document 6 is not in that dataset"):
        made(recipe, tmp_path / "more", corpus=more, **options)
    few = made(recipe, tmp_path / "few", corpus=write(tmp_path / "few.parquet", 1), every=2)
    with pytest.raises(SpileError, match="document 0 has no row of token 1 there"):
        made(recipe, tmp_path / "out", taps=ATTRIBUTIONS, baseline=few.url)


# -- integrated gradients --------------------------------------------------------------------------

# Of one head of a site, the path is that of all heads.
_STEPPED = "z_attr:1.h2,mlp_out_attr:0,mlp_out_grad:0"


def totals(ds: spile.Dataset, tap: str) -> np.ndarray:
    """Return the sum of a tap's values over each document."""
    return np.array([ds.document(doc).read(tap).sum() for doc in range(len(LENGTHS))])


@pytest.mark.full
def test_attributions_on_a_path_add_up_to_the_objectives_difference(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Of each site by itself; the documents are packed together, and some are cut."""
    ds = made(recipe, tmp_path / "out", taps="z_attr:1,mlp_out_attr:0,logprob", steps=16)
    check_sound(tmp_path / "out")
    here = totals(ds, "logprob")
    for place in ("z.1", "mlp_out.0"):
        zero = made(recipe, tmp_path / place, taps="logprob", splice=f"zero:{place}")
        wanted = here - totals(zero, "logprob")
        found = totals(ds, place.replace(".", "_attr."))
        assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max(), place
    assert ds.recipe.steps == 16
    with pytest.raises(DriftError, match="steps: stored 16, now 3"):
        spile.extract(Recipe(steps=3), ds.url)
    with pytest.raises(ConfigError, match="--steps: integrated gradients need every block"):
        stepped = dataclasses.replace(recipe, taps="z_attr:0", steps=2)
        spile.extract(stepped, tmp_path / "streamed", spile.Runtime(weights="disk"))
    with pytest.raises(ConfigError, match="--steps 2: no tap holds a gradient"):
        made(recipe, tmp_path / "none", steps=2)


@pytest.mark.full
def test_the_path_begins_at_the_baseline(
    recipe: Recipe, corrupted: spile.Dataset, tmp_path: Path
) -> None:
    """At another dataset's rows, or at the mean of all."""
    model = spile.load_model(str(recipe.model), compute_dtype="float32")
    options: dict[str, Any] = {"taps": "z_attr:0,logprob", "steps": 32}
    rows = made(recipe, tmp_path / "rows", baseline=corrupted.url, **options)
    for doc in (0, 3):
        ids = rows.document(doc).index["token_id"].astype(np.int32)
        own = corrupted.document(doc).read("z.0")[None]
        after = np.asarray(model([ids], "logprob", splice={"z.0": spile.replaced(own)})["logprob"])
        wanted = rows.document(doc).read("logprob").sum() - after.sum()
        found = rows.document(doc).read("z_attr.0").sum()
        assert abs(found - wanted) < 1e-3 * abs(wanted)
    values = made(recipe, tmp_path / "values", taps="mlp_out:0")
    means = made(recipe, tmp_path / "means", taps="mlp_out:0", store_dtype=None, reduce="mean")
    options["taps"] = "mlp_out_attr:0,logprob"
    mean = made(recipe, tmp_path / "mean", baseline=means.url, **options)
    splice = f"mean:mlp_out.0={values.url}"
    spliced = made(recipe, tmp_path / "spliced", taps="logprob", splice=splice)
    wanted = totals(mean, "logprob") - totals(spliced, "logprob")
    found = totals(mean, "mlp_out_attr.0")
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


@pytest.mark.full
def test_gradients_on_a_path_are_those_of_its_points(recipe: Recipe, tmp_path: Path) -> None:
    """One step is the gradient halfway; heads share the path of their layer."""
    ds = made(recipe, tmp_path / "out", taps=_STEPPED, steps=1, where="pos >= 2")
    whole = made(recipe, tmp_path / "whole", taps="z_attr:1,mlp_out:0", steps=1)
    model = AutoModelForCausalLM.from_pretrained(str(recipe.model), dtype=torch.float32)
    module = model.model.layers[0].mlp
    points = [p for p in Reference(model).points if p.name == "mlp_out.0"]
    half = module.register_forward_hook(lambda module, args, out: out / 2)
    for doc in (0, 4):
        document, kept = ds.document(doc), ds.document(doc).index["offset"]
        ids = torch.tensor(whole.document(doc).index["token_id"].astype(np.int64))
        # (It is watched before the hook halves it.)
        truth = 2 * gradients(model, points, ids, logprob)["mlp_out.0"][kept]
        found = document.read("mlp_out_grad.0")
        assert np.abs(found - truth).max() < TOLERANCE * np.abs(truth).max()
        product = (found * whole.document(doc).read("mlp_out.0")[kept]).sum(axis=1)
        np.testing.assert_allclose(document.read("mlp_out_attr.0"), product, atol=1e-5)
        heads = whole.document(doc).read("z_attr.1")[kept]
        np.testing.assert_allclose(document.read("z_attr.1.h2"), heads[:, [2]], atol=1e-5)
    half.remove()
    for each in (ds, whole):
        report = check(each.url, samples=2)
        assert report.ok
        assert {*report.taps} == {*each.taps}

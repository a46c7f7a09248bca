"""`--baseline`: attributions are gradients times values less a mean, or another dataset's rows."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from chaos.harness import check_sound
from spile.check.compare import check
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

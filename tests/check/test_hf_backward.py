"""`check` recomputes integrated gradients, edges and attributions of latents, and finds faults."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from check.test_compare import assert_healthy, copied, faulty, forged
from spile.check.compare import check
from spile.core.config import Recipe
from spile.core.errors import InputError
from support import saes


@pytest.fixture(scope="module")
def recipe(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Short documents, in several units, packed together; one is cut."""
    path = tmp_path_factory.mktemp("corpus") / "tokens.parquet"
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(3, 200, n).tolist()} for n in (9, 20, 5, 12, 7, 6)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return Recipe(
        model=str(model), corpus=str(path), seq_len=16, unit_tokens=9, compute_dtype="float32",
        store_dtype="float32", tokens_column="input_ids",
    )  # fmt: skip


def made(recipe: Recipe, out: Path, **options: Any) -> spile.Dataset:
    spile.extract(dataclasses.replace(recipe, **options), str(out))
    return spile.open(str(out))


def found_faults(out: Path, copy: Path, change: Any, *taps: str) -> None:
    """Change what is stored of each tap, one after another; check finds it by name."""
    for number, tap in enumerate(taps):
        damaged = copied(out, copy / str(number))
        with forged(damaged) as values:
            change(values(tap))
        assert faulty(check(str(damaged), samples=1)) == {tap}


def test_gradients_on_a_path_of_a_changed_model_are_recomputed(
    recipe: Recipe, tmp_path: Path
) -> None:
    """A path and a splice at one place: the change comes first."""
    options: dict[str, Any] = {"taps": "z_attr:0.h2", "splice": "zero:z.0.h1,zero:mlp_out.1"}
    ds = made(recipe, tmp_path / "out", steps=2, **options)
    report = check(ds.url, samples=2)
    assert_healthy(report)
    assert {*report.taps} == {"z_attr.0.h2"}

    def off_by_a_weight(stored: list[np.ndarray]) -> None:
        for each in stored:
            each *= 1.001

    found_faults(tmp_path / "out", tmp_path, off_by_a_weight, "z_attr.0.h2")


def test_edges_and_attributions_of_latents_are_recomputed(recipe: Recipe, tmp_path: Path) -> None:
    encoder = saes.write_sae(tmp_path / "sae", "topk", hook="blocks.1.hook_resid_post")
    ds = made(
        recipe, tmp_path / "out", taps="resid_mid_edge:1,resid_post_attr:1", encode=str(encoder),
        writers="embed,z:all,mlp_out:all", latents=7,
    )  # fmt: skip
    report = check(ds.url, samples=2)
    assert_healthy(report)
    assert {*report.taps} == {"resid_mid_edge.1", "resid_post_attr_latents.1"}

    def of_another_writer(stored: list[np.ndarray]) -> None:
        for each in stored:
            each[:] = each[:, [0, 2, 1, *range(3, each.shape[1])]]  # two heads

    def without_signs(stored: list[np.ndarray]) -> None:
        for each in stored:
            each[:] = np.abs(each)

    folder = tmp_path / "out"
    found_faults(folder, tmp_path / "edges", of_another_writer, "resid_mid_edge.1")
    found_faults(folder, tmp_path / "latents", without_signs, "resid_post_attr_latents.1")


@pytest.mark.full
def test_baselines_sums_and_other_encoders_are_recomputed(recipe: Recipe, tmp_path: Path) -> None:
    """A path from other rows, edges beyond a mean, and each kind of encoder."""
    values = made(recipe, tmp_path / "values", taps="mlp_out:0,z:1", splice="zero:z.0")
    for steps, taps in ((2, "mlp_out_attr:0,z_grad:1"), (None, "mlp_out_attr:0,z_attr:1")):
        options: dict[str, Any] = {"taps": taps, "steps": steps, "splice": "zero:mlp_out.1"}
        ds = made(recipe, tmp_path / f"rows-{steps}", baseline=values.url, **options)
        assert_healthy(check(ds.url, samples=3))
    options = {"reduce": "mean", "store_dtype": None}
    means = made(recipe, tmp_path / "means", taps="embed,mlp_out:0", **options)
    edges = made(
        recipe, tmp_path / "edges", taps="resid_post_edge:all", writers="embed,mlp_out:0",
        baseline=means.url, **options,
    )  # fmt: skip
    assert_healthy(check(edges.url, samples=3))
    for kind in ("gated", "jumprelu", "standard"):
        sae = saes.write_sae(tmp_path / kind, kind, hook="blocks.0.hook_resid_post",
                             normalize_activations="layer_norm")  # fmt: skip
        options = {"taps": "resid_post_attr:0", "encode": str(sae), "latents": 9}
        assert_healthy(check(made(recipe, tmp_path / f"o-{kind}", **options).url, samples=3))
    half = made(recipe, tmp_path / "half", compute_dtype="bfloat16", **options)
    assert_healthy(check(half.url, samples=6))


@pytest.mark.full
def test_a_path_at_no_module_is_refused_by_name(recipe: Recipe, tmp_path: Path) -> None:
    ds = made(recipe, tmp_path / "out", taps="resid_mid_attr:1", steps=1, max_docs=2)
    with pytest.raises(InputError, match="a change at resid_mid.*: no module of LlamaForCausalLM"):
        check(ds.url, samples=2)

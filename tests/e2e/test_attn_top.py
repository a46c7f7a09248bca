"""Where heads look, from end to end: what is stored is what the stored patterns say."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import check_sound
from spile.check.compare import check
from spile.core.config import Recipe

TOP = 5
LOOKS = "attn_top:1.h0+h3,attn_summary:1.h0+h3"
PATTERN = "attn_pattern:1.h0+h3"
TAPS = ["attn_top_keys.1.h0.h3", "attn_top_weights.1.h0.h3", "attn_summary.1.h0.h3"]


@pytest.fixture(scope="module")
def recipe(model: Path, corpus: Path) -> Recipe:
    """Most documents are longer than a context."""
    return Recipe(
        model=str(model), corpus=str(corpus), taps=f"{LOOKS},{PATTERN}", attn_top=TOP, seq_len=32,
        unit_tokens=700, max_docs=20, compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip


def made(recipe: Recipe, out: Path, **options: Any) -> spile.Dataset:
    spile.extract(dataclasses.replace(recipe, **options), str(out))
    return spile.open(str(out))


def check_says_the_pattern(ds: spile.Dataset, pattern: np.ndarray | None = None) -> None:
    """Compare the three taps with numpy's, from the pattern stored beside them or given."""
    index = ds.index(0, len(ds))
    wide = ds.read("attn_pattern.1.h0.h3") if pattern is None else pattern
    keys, weights, summary = (ds.read(tap) for tap in TAPS)
    for row, pos in enumerate(index["pos"].tolist()):
        own = wide[row, :, : pos + 1].astype(np.float64)
        assert not wide[row, :, pos + 1 :].any()
        count = min(TOP, pos + 1)
        assert (keys[row, :, count:] == -1).all() and not weights[row, :, count:].any()
        order = np.argsort(-own, axis=1, kind="stable")[:, :count]
        largest = np.take_along_axis(own, order, axis=1)
        np.testing.assert_allclose(weights[row, :, :count], largest, atol=2e-6)
        named = np.take_along_axis(own, keys[row, :, :count].astype(np.int64), axis=1)
        np.testing.assert_allclose(named, largest, atol=2e-6)
        logs = np.log(own, out=np.zeros_like(own), where=own > 0)
        told = [
            -(own * logs).sum(axis=1), own[:, 0], own[:, pos],
            own[:, pos - 1] if pos else np.zeros(2), own @ (pos - np.arange(pos + 1)),
        ]  # fmt: skip
        np.testing.assert_allclose(summary[row], np.stack(told, axis=1), rtol=2e-5, atol=2e-5)


def test_long_documents_are_cut_and_each_context_looks_at_itself_alone(
    recipe: Recipe, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", where="offset % 3 != 1")
    index = ds.index(0, len(ds))
    assert (index["offset"] > index["pos"]).sum() > 50, "contexts after the first of a document"
    check_says_the_pattern(ds)
    check_sound(tmp_path / "out")
    checked = check(ds.url, samples=2)
    assert checked.ok and {*TAPS} < {*checked.taps}


@pytest.mark.full
def test_a_splice_before_the_block_changes_where_heads_look(recipe: Recipe, tmp_path: Path) -> None:
    plain = made(recipe, tmp_path / "plain")
    ds = made(recipe, tmp_path / "out", splice="zero:mlp_out.0")
    check_says_the_pattern(ds)
    moved = ds.read(TAPS[1]) - plain.read(TAPS[1])
    assert np.abs(moved).max() > 1e-3
    after = made(recipe, tmp_path / "after", taps=f"{LOOKS},resid_post:1", splice="zero:mlp_out.1")
    for tap in TAPS:
        found, wanted = after.read(tap), plain.read(tap)
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)  # (it comes earlier)
    assert check(ds.url, samples=2).ok


@pytest.mark.full
def test_looks_grow_with_a_dataset_and_are_added_to_one(recipe: Recipe, tmp_path: Path) -> None:
    whole = made(recipe, tmp_path / "whole")
    out = tmp_path / "out"
    made(recipe, out, taps=PATTERN, attn_top=None, max_docs=12)
    spile.extract(Recipe(add_taps=LOOKS, attn_top=TOP), str(out))
    spile.extract(Recipe(more=True, max_docs=20), str(out))
    assert len(spile.open(str(out))) < len(whole), "the added taps lack the new documents"
    spile.extract(Recipe(add_taps=",".join(TAPS)), str(out))  # as that run suggests
    ds = spile.open(str(out))
    assert len(ds) == len(whole) and {*ds.taps} == {*whole.taps}
    check_says_the_pattern(ds)
    check_sound(out)
    for doc in (0, 11, 19):
        for tap in TAPS:
            found, wanted = (each.document(doc)[tap] for each in (ds, whole))
            np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)

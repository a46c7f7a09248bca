"""The likeliest next tokens from end to end: what is stored is what the logits say."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.check.compare import check
from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError
from spile.core.tensors import read_header
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects
from spile.status.listing import list_files

TOP = 9
FOUR = ["logsumexp", "next_rank", "top_token_ids", "top_logprobs"]


@pytest.fixture(scope="module")
def recipe(model: Path, corpus: Path) -> Recipe:
    return Recipe(
        model=str(model), corpus=str(corpus), taps="logits,logprob,top_logits", top_logits=TOP,
        seq_len=64, unit_tokens=900, max_docs=12, compute_dtype="float32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def out(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "out"
    spile.extract(recipe, str(path))
    return path


def check_says_the_logits(ds: spile.Dataset) -> np.ndarray:
    """Compare the four taps with numpy's, from the logits stored beside them; return the order."""
    logits = ds["logits"][:].astype(np.float64)
    order = np.argsort(-logits, axis=1, kind="stable")
    total = np.log(np.exp(logits).sum(axis=1))
    assert np.array_equal(ds["top_token_ids"][:], order[:, :TOP])
    logs = np.take_along_axis(logits, order[:, :TOP], axis=1) - total[:, None]
    np.testing.assert_allclose(ds["top_logprobs"][:], logs, atol=1e-5)
    np.testing.assert_allclose(ds["logsumexp"][:], total, rtol=1e-6)
    return order


def test_each_tap_says_what_the_stored_logits_say(out: Path) -> None:
    ds = spile.open(str(out))
    assert [*ds.taps] == ["logits", "logprob", *FOUR]
    assert [ds.dtype(tap).name for tap in FOUR] == ["float32", "int32", "int32", "float32"]
    order, index = check_says_the_logits(ds), ds.index(0, ds.num_tokens)
    last = index["flags"] & spile.FLAGS["last"] > 0
    following = np.where(last, order[:, 0], np.roll(index["token_id"], -1))
    rank = ds["next_rank"][:]
    assert np.array_equal(np.argmax(order == following[:, None], axis=1), rank)
    assert last.any() and not ds["logprob"][:][last].any()
    within = ~last & (rank < TOP)
    known = ds["top_logprobs"][:][within, rank[within]]
    np.testing.assert_allclose(known, ds["logprob"][:][within], atol=1e-6)


@pytest.mark.full
def test_splices_filters_and_growth_hold_for_the_likeliest_tokens(
    recipe: Recipe, out: Path, tmp_path: Path
) -> None:
    changed = dataclasses.replace(recipe, splice="zero:mlp_out.1", where="pos % 3 != 1", max_docs=8)
    spile.extract(changed, str(tmp_path / "out"))
    spile.extract(Recipe(more=True, max_docs=12), str(tmp_path / "out"))
    ds, plain = spile.open(str(tmp_path / "out")), spile.open(str(out))
    check_says_the_logits(ds)
    assert 0 < len(ds) < len(plain) and (ds.index(0, len(ds))["pos"] % 3 != 1).all()
    kept = plain.document(3).index["pos"] % 3 != 1
    own, others = ds.document(3)["top_token_ids"], plain.document(3)["top_token_ids"][kept]
    assert own.shape == others.shape and (own != others).any(), "the model goes on changed"
    assert check(ds.url, samples=2).ok


@pytest.mark.full
def test_the_dataset_is_sound_and_agrees_with_hf(out: Path) -> None:
    assert verify(LocalObjects(out)).ok
    checked = check(str(out), samples=2)
    assert checked.ok and {*FOUR} < {*checked.taps}
    (shard, *_) = (file for file in list_files(LocalObjects(out), tap="top_token_ids") if file.rows)
    header = read_header(out / shard.key)["top_token_ids"]
    rows = np.memmap(out / shard.key, header.dtype, "r+", header.start, header.shape)
    rows[:] = rows[:, ::-1].copy()
    rows.flush()
    checked = check(str(out), samples=8)
    assert [tap for tap, found in checked.taps.items() if not found.ok] == ["top_token_ids"]
    rows[:] = rows[:, ::-1].copy()
    rows.flush()


def test_how_many_belongs_to_the_recipe_and_to_a_pass(
    recipe: Recipe, out: Path, tmp_path: Path
) -> None:
    with pytest.raises(DriftError, match=f"--top-logits was {TOP}, is now 5|top_logits"):
        spile.extract(Recipe(top_logits=5), str(out))
    assert spile.extract(Recipe(), str(out)).complete
    plain = Recipe(
        model=recipe.model, corpus=recipe.corpus, taps="logprob", seq_len=64, max_docs=12,
        compute_dtype="float32",
    )  # fmt: skip
    spile.extract(plain, str(tmp_path / "plain"))
    table = Ledger(LocalObjects(tmp_path / "plain")).table()
    assert "top_logits" not in table.recipe.to_json(), "recipes of other taps stay as they were"
    with pytest.raises(ConfigError, match="add top_logits to --taps"):
        spile.extract(Recipe(add_taps="entropy", top_logits=5), str(tmp_path / "plain"))
    spile.extract(Recipe(add_taps="top_logits", top_logits=5), str(tmp_path / "plain"))
    again = spile.extract(Recipe(add_taps="top_logits"), str(tmp_path / "plain"))
    assert again.complete, "options that are not given are the pass's own"
    ds, whole = spile.open(str(tmp_path / "plain")), spile.open(str(out))
    assert ds.shape("top_logprobs") == (5,)
    found, wanted = (each.document(3)["top_token_ids"] for each in (ds, whole))
    assert np.array_equal(found, wanted[:, :5])

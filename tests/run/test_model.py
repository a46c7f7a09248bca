"""A callable model: its taps and its loss for given tokens, with splices."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.models.forward.splice import added, only
from spile.run.pipeline import display
from support import tiny

TEXTS = ["the sad rose is there", "a tin", "no one here is so sure that it is"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> spile.Model:
    return spile.load_model(str(tiny.write_model(tmp_path_factory.mktemp("model"))))


def test_its_rows_are_those_that_are_stored(loaded: spile.Model, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 5)
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1,logprob", seq_len=96,
        compute_dtype="float32",
    )  # fmt: skip
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    documents = [ds.document(i) for i in range(5)]
    contexts = [document.index["token_id"][:96] for document in documents]
    found = loaded(contexts, "hidden_states[2],logprob")
    assert set(found) == {"resid_post.1", "logprob"}
    total, count = 0.0, 0
    for row, (context, document) in enumerate(zip(contexts, documents, strict=True)):
        own = np.asarray(found["resid_post.1"][row, : len(context)])
        np.testing.assert_allclose(own, document["resid_post.1"][: len(context)], atol=2e-5)
        total -= float(document["logprob"][: len(context) - 1].sum())
        count += len(context) - 1
    assert loaded.loss(contexts) == pytest.approx(total / count, rel=1e-5)


def test_texts_are_encoded(loaded: spile.Model) -> None:
    tokens = loaded.encode(TEXTS)
    np.testing.assert_array_equal(loaded(TEXTS)["logits"], loaded(tokens)["logits"])
    assert loaded(TEXTS[0])["logits"].shape[:2] == (1, len(tokens[0]))
    assert loaded.loss(TEXTS[0]) == loaded.loss(tokens[:1])
    assert repr(loaded).startswith("<spile.Model ") and "layers, width 32" in repr(loaded)


def test_loading_and_evaluation_are_not_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "_SILENT_SECONDS", 0.002)
    model = spile.load_model(str(tiny.write_model(tmp_path / "model")))
    assert "spile: loading the model  0:0" in capsys.readouterr().err
    model.loss(TEXTS)
    assert "spile: computing the loss  0:0" in capsys.readouterr().err


def test_values_may_be_replaced_by_a_function_or_by_arrays(loaded: spile.Model) -> None:
    tokens = loaded.encode(TEXTS)
    clean = loaded(tokens, "resid_post:0,logits")
    rows, logits = clean["resid_post.0"], clean["logits"]
    for same in (rows, np.asarray(rows), lambda x: x):
        again = loaded(tokens, splice={"blocks.0.hook_resid_post": same})["logits"]
        np.testing.assert_allclose(again, logits, atol=1e-5)
    zeroed = loaded(tokens, splice={"resid_post.0": np.zeros((), np.float32)})["logits"]
    assert np.nanmax(np.abs(zeroed - logits)) > 0.1
    assert loaded.loss(tokens, splice={"mlp_out:all": jnp.negative}) != loaded.loss(tokens)


def test_arrays_of_a_change_need_no_new_program(loaded: spile.Model) -> None:
    tokens = loaded.encode(TEXTS[:1])
    vector = np.ones(32, np.float32)
    where = jnp.ones((1, len(tokens[0])), bool)
    compiled: Any = loaded._run
    programs = compiled._cache_size()
    found = [
        loaded(tokens, splice={"resid_mid.1": only(where, added(jnp.asarray(vector * size)))})
        for size in (1.0, 2.0)
    ]
    assert np.abs(found[0]["logits"] - found[1]["logits"]).max() > 1e-3
    assert compiled._cache_size() == programs + 1


@pytest.mark.full
def test_lengths_do_not_show(loaded: spile.Model) -> None:
    tokens = loaded.encode(TEXTS)
    together = loaded(tokens)["logits"]
    for row, context in enumerate(tokens):
        alone = loaded([context])["logits"][0]
        np.testing.assert_allclose(together[row, : len(context)], alone, atol=1e-5)
    losses = [loaded.loss([context]) * (len(context) - 1) for context in tokens]
    assert loaded.loss(tokens) == pytest.approx(
        sum(losses) / sum(len(context) - 1 for context in tokens), rel=1e-5
    )


@pytest.mark.parametrize(
    ("splice", "complaint"),
    [
        ({"logits": jnp.negative}, "only these can be changed: embed, resid_pre"),
        ({"resid_past.1": jnp.negative}, "splice: no site 'resid_past'.*did you mean resid_post"),
        ({"q:all": jnp.negative, "q.1": jnp.negative}, r"splice 'q\.1': q\.1 is changed twice"),
        ({"resid_pre.1": jnp.negative, "resid_post.0": jnp.negative}, "name one"),
    ],
)
def test_what_cannot_be_spliced_is_refused(
    splice: dict[str, jax.Array], complaint: str, loaded: spile.Model
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loaded.loss(loaded.encode(TEXTS), splice=splice)


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([], "contexts must have 1 to 128 tokens"),
        ([np.array([], np.int32)], "contexts must have 1 to 128 tokens"),
        (np.zeros((1, 129), np.int32), r"1 to 128 tokens, got \[129\]"),
        (np.array([[3, tiny.VOCAB]]), "token ids must be 0 to 259"),
    ],
)
def test_tokens_the_model_cannot_read_are_refused(
    tokens: np.ndarray, complaint: str, loaded: spile.Model
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loaded.loss(tokens)


@pytest.mark.full
def test_a_model_whose_blocks_come_from_files_gives_the_same_values(model: Path) -> None:
    whole, streamed = (spile.load_model(str(model), weights=kept) for kept in ("resident", "disk"))
    texts = ["The capital of France", "is Paris."]
    taps = "embed,resid_pre:0+2,attn_in:1,z:1,attn_pattern:0,resid_post:all,logits"
    steer = jnp.full(whole.arch.width, 0.5)
    splices: list[dict[str, Any]] = [
        {},
        {"resid_post.1": added(steer)},
        {"resid_pre.1": added(steer), "embed": added(-steer), "mlp_out.2": lambda x: 2 * x},
    ]
    for splice in splices:
        wanted, found = (each(texts, taps, splice=splice) for each in (whole, streamed))
        assert wanted.keys() == found.keys()
        for tap in wanted:
            np.testing.assert_allclose(found[tap], wanted[tap], rtol=1e-4, atol=2e-5)
    assert streamed.loss(texts) == pytest.approx(whole.loss(texts), rel=1e-5)
    with pytest.raises(ConfigError, match="load it again"):
        streamed.to("1d")
    with pytest.raises(ConfigError, match="name one"):
        streamed(texts, splice={"resid_pre.2": added(steer), "resid_post.1": added(steer)})

"""Values of texts of several lengths: the last token and the mean are those of HF transformers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import spile
from spile.core.errors import ConfigError
from spile.models.forward.splice import added
from spile.run.tap_values import TapValues, blanked
from support import tiny

TEXTS = ["a", "the sad rose is there", "no one here is so sure that it is"]
TAP = "resid_post.1"
TOLERANCE = 2e-5  # of the largest value


@pytest.fixture(scope="module")
def loaded(model: Path) -> spile.Model:
    return spile.load_model(str(model))


@pytest.fixture(scope="module")
def alone(model: Path, loaded: spile.Model) -> list[np.ndarray]:
    """What HF computes for each text by itself, after block 1: [tokens, width]."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows: list[np.ndarray] = []
    for ids in loaded.encode(TEXTS):
        with torch.no_grad():
            found = reference(torch.tensor(ids[None]), output_hidden_states=True)
        rows.append(found.hidden_states[2][0].numpy())
    return rows


def close(found: jax.Array, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("weights", ["resident", "disk"])
def test_last_and_mean_are_those_of_each_text(
    weights: str, model: Path, alone: list[np.ndarray]
) -> None:
    found = spile.load_model(str(model), weights=weights)(TEXTS, TAP)
    close(found.last(), np.stack([rows[-1] for rows in alone]))
    close(found.mean(TAP), np.stack([rows.mean(0) for rows in alone]))


def test_a_text_is_the_same_alone_and_beside_longer_ones(
    loaded: spile.Model, alone: list[np.ndarray]
) -> None:
    for text, rows in zip(TEXTS[:2], alone[:2], strict=True):
        by_itself = loaded(text, TAP)
        close(by_itself.last()[0], rows[-1])
        close(by_itself.mean()[0], rows.mean(0))


def test_nothing_beyond_the_end_of_a_text_passes_for_a_token(
    loaded: spile.Model, alone: list[np.ndarray]
) -> None:
    found = loaded(TEXTS, f"{TAP},logits")
    assert found.lengths.tolist() == [len(rows) for rows in alone]
    assert found.mask.sum(axis=1).tolist() == found.lengths.tolist()
    for values in found.values():
        np.testing.assert_array_equal(np.isnan(np.asarray(values)).any(-1), ~found.mask)
    assert np.isnan(np.asarray(found[TAP])[0, -1]).all()
    assert "3 texts of 2 to 34 tokens: resid_post.1 [3, 34, 32] float32" in repr(found)


def test_ids_beyond_the_end_of_a_text_are_minus_one() -> None:
    ids = jnp.zeros((4, 2), jnp.int16)
    found = blanked({"expert_ids.0": ids}, jnp.array([[1, 1], [1, 0]]))["expert_ids.0"]
    assert found.dtype == jnp.int16 and found.tolist() == [[0, 0], [0, 0], [0, 0], [-1, -1]]
    with pytest.raises(ConfigError, match=r"mean: expert_ids\.0 holds ids"):
        TapValues({"expert_ids.0": found.reshape(2, 2, 2)}, (2, 1)).mean()


def test_values_that_are_spliced_in_leave_the_filler_alone(loaded: spile.Model) -> None:
    found = loaded(TEXTS, f"{TAP},logits")
    again = loaded(TEXTS, splice={TAP: np.asarray(found[TAP])})
    close(again.last(), np.asarray(found.last("logits")))
    shifted = loaded(TEXTS, splice={TAP: lambda rows: rows + 0 * found[TAP]})
    close(shifted.last(), np.asarray(found.last("logits")))


@pytest.mark.full
def test_gradients_are_those_of_each_text_alone(loaded: spile.Model) -> None:
    def steered(vector: jax.Array, texts: list[str]) -> jax.Array:
        found = loaded(texts, "resid_post:2,logits", splice={"resid_post.0": added(vector)})
        return found.last("logits")[:, 7].sum() + found.mean("resid_post.2")[:, 3].sum()

    zero = jnp.zeros(32)
    together = jax.grad(steered)(zero, TEXTS[:2])
    each = [jax.grad(steered)(zero, [text]) for text in TEXTS[:2]]
    close(together, np.sum([np.asarray(own) for own in each], axis=0))


def test_the_loss_has_a_gradient(loaded: spile.Model) -> None:
    vector = jnp.ones(32)

    def loss(vector: jax.Array) -> float:
        return loaded.loss(TEXTS, splice={"resid_post.0": added(vector)})

    value, gradient = jax.value_and_grad(loss)(vector)
    assert value == pytest.approx(loss(vector), rel=1e-5)
    step = 3e-2 * gradient / jnp.linalg.norm(gradient)
    risen = loss(vector + step) - loss(vector - step)
    assert risen == pytest.approx(2 * float(jnp.dot(step, gradient)), rel=1e-2)


def test_values_leave_a_function_that_jax_transforms(loaded: spile.Model) -> None:
    vectors = jnp.stack([jnp.zeros(32), jnp.ones(32)])
    many = jax.vmap(lambda v: loaded(TEXTS, TAP, splice={"resid_post.0": added(v)}))(vectors)
    assert isinstance(many, TapValues) and many[TAP].shape == (2, 3, 34, 32)
    with pytest.raises(ConfigError, match="pool them inside the function"):
        many.last()


def test_a_model_that_is_streamed_says_why_it_has_no_gradient(model: Path) -> None:
    streamed = spile.load_model(str(model), weights="disk")
    with pytest.raises(ConfigError, match="gone when the gradient needs them; give weights="):
        jax.grad(lambda v: streamed.loss("a tin", splice={"embed": added(v)}))(jnp.zeros(32))


def test_a_tap_that_is_not_there_is_named(loaded: spile.Model) -> None:
    found = loaded(TEXTS, f"{TAP},logits")
    with pytest.raises(ConfigError, match=r"name one of the taps: resid_post\.1, logits"):
        found.last()
    with pytest.raises(KeyError, match="no tap 'mlp_out.0'; there are"):
        found.mean("mlp_out.0")
    assert "mlp_out.0" not in found and set(found) == {TAP, "logits"}


def test_tokens_are_decoded(loaded: spile.Model) -> None:
    tokens = loaded.encode(TEXTS)
    assert [loaded.decode(ids) for ids in tokens] == [f"<s>{text}" for text in TEXTS]
    assert loaded.encode("a tin")[0].tolist() == loaded.encode(["a tin"])[0].tolist()
    best = jax.lax.top_k(loaded(TEXTS).last(), 2)[1]
    assert isinstance(loaded.decode(best[0, 0]), str) and loaded.decode([]) == ""
    for wrong, complaint in (
        (best, "one text at a time"),
        (-1, f"token ids must be 0 to {tiny.VOCAB - 1}"),
        (np.ones(2), "token ids are integers, not float64"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            loaded.decode(wrong)

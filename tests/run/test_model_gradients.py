"""`Model.grad` and `Model.jacobian`: gradients of texts, for notebooks."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError

TEXTS = ["the quick brown fox", "jumps"]


@pytest.fixture(scope="module")
def loaded(model: Path) -> spile.Model:
    return spile.load_model(str(model), compute_dtype="float32")


def close(found: jax.Array, wanted: jax.Array) -> None:
    ours, theirs = np.asarray(found), np.asarray(wanted)
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.nanmax(np.abs(ours - theirs)) < 2e-5 * np.nanmax(np.abs(theirs))


@pytest.mark.full
def test_gradients_are_those_that_jax_takes_through_a_splice(loaded: spile.Model) -> None:
    """Of several texts at once, each of its own; NaN beyond the end of the shorter one."""
    found = loaded.grad(TEXTS, "resid_post:0,z:1.h1")
    assert [*found] == ["resid_post.0", "z.1.h1"]
    plain = loaded(TEXTS, "resid_post:0,z:1")

    def total(more: jax.Array, tap: str) -> jax.Array:
        values = loaded(TEXTS, "logprob", splice={tap: spile.added(more)})
        return jnp.where(values.mask, values["logprob"], 0.0).sum()

    for tap, own in (("resid_post.0", "resid_post.0"), ("z.1", "z.1.h1")):
        zeros = jnp.zeros(plain[tap].shape)
        wanted = jnp.where(jnp.isnan(plain[tap]), jnp.nan, jax.grad(total)(zeros, tap))
        close(found[own], wanted[:, :, 1:2] if own != tap else wanted)


def test_attributions_are_gradients_times_values_less_a_baseline(loaded: spile.Model) -> None:
    """Of heads, too, and of each text by itself; the baseline may be another call's values."""
    grads, values = loaded.grad(TEXTS, "z:1"), loaded(TEXTS, "z:1")
    ids = [np.roll(tokens, 1) for tokens in loaded.encode(TEXTS)]
    other = loaded(ids, "z:1")
    found = loaded.attr(TEXTS, "z:1.h2", baseline=other)["z.1.h2"]
    close(found, (grads["z.1"] * (values["z.1"] - other["z.1"])).sum(-1)[:, :, 2:3])


@pytest.mark.full
def test_integrated_gradients_add_up_to_the_change_of_the_objective(loaded: spile.Model) -> None:
    """Along the path from a baseline; with an objective of one's own, and a splice before it."""
    text = TEXTS[0]
    begin = np.full(loaded.arch.width, 0.1, np.float32)
    options: dict[str, Any] = {"objective": {"resid_post.2": lambda rows: jnp.sin(rows).sum(-1)}}
    before = {"mlp_out.0": spile.added(begin)}
    found = loaded.attr(
        text, "mlp_out:0", baseline={"mlp_out.0": begin}, steps=8, splice=before, **options
    )

    def total(splice: Any) -> float:
        rows = loaded(text, "resid_post:2", splice=splice)["resid_post.2"]
        return float(jnp.sin(rows).sum())

    shape = loaded(text, "mlp_out:0")["mlp_out.0"].shape
    wanted = total(before) - total({"mlp_out.0": np.broadcast_to(begin, shape)})
    assert abs(float(found["mlp_out.0"].sum()) - wanted) < 1e-3 * abs(wanted)


def test_a_jacobian_has_the_gradient_of_each_value(loaded: spile.Model) -> None:
    text, tokens = TEXTS[0], len(loaded.encode(TEXTS[0])[0])
    matrix = loaded.jacobian(text, "resid_post:0", "resid_post:1", at=-2)
    width = loaded.arch.width
    assert matrix.shape == (width, tokens, width)
    assert not np.asarray(matrix[:, -1]).any(), "no token sees a later one"
    place = jnp.arange(tokens) == tokens - 2
    for channel in (0, width - 1):
        own = {"resid_post.1": lambda v, c=channel: jnp.where(place[None], v[..., c], 0.0)}
        close(
            matrix[channel][None], loaded.grad(text, "resid_post:0", objective=own)["resid_post.0"]
        )


def test_what_has_no_gradient_is_refused_by_name(loaded: spile.Model, model: Path) -> None:
    with pytest.raises(ConfigError, match="logprob has no gradient; choose from embed"):
        loaded.grad(TEXTS, "logprob")
    with pytest.raises(ConfigError, match=r"use model.grad\(text, 'resid_post.0'\)"):
        loaded(TEXTS, "resid_post_grad:0")
    with pytest.raises(ConfigError, match="needs a corpus"):
        loaded.grad(TEXTS, "embed", objective="loss:assistant")
    with pytest.raises(ConfigError, match="jacobian: 'resid_post:0-1' is 2 taps; name one"):
        loaded.jacobian(TEXTS[0], "resid_post:0-1", "resid_post:1")
    with pytest.raises(ConfigError, match="jacobian: give one text"):
        loaded.jacobian(TEXTS, "resid_post:0", "resid_post:1")
    with pytest.raises(ConfigError, match="give steps=N, or use attr"):
        loaded.grad(TEXTS, "embed", baseline={"embed": np.zeros(32)})
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        loaded.attr(TEXTS, "embed", steps=0)
    with pytest.raises(ConfigError, match="baseline: has no embed; it has z.1"):
        loaded.attr(TEXTS, "embed", baseline=loaded(TEXTS, "z:1"))
    with pytest.raises(ConfigError, match="baseline embed: has the shape .* as many tokens"):
        loaded.attr(TEXTS, "embed", baseline=loaded(TEXTS[1], "embed"))
    with pytest.raises(ConfigError, match="baseline embed: is not finite"):
        loaded.attr(TEXTS, "embed", baseline=loaded([*TEXTS[::-1]], "embed"))
    streamed = spile.load_model(str(model), compute_dtype="float32", weights="disk")
    with pytest.raises(ConfigError, match="give weights='resident'"):
        streamed.grad(TEXTS, "embed")

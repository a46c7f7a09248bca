"""A float16 product that overflows ends the run, and is named by its site, layer and value."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, DataError
from spile.core.tensors import write_tensors
from spile.models.forward.ops import product, to_float16
from spile.models.forward.splice import added
from support import tiny

MLP = "model.layers.1.mlp."


def write_model(directory: Path, scales: dict[str, float], **config: Any) -> Path:
    """A tiny Llama, some of whose tensors are multiplied."""
    tiny.write_model(directory, **config)
    tensors = tiny.random_tensors({**tiny.CONFIG, **config})
    for name, scale in scales.items():
        tensors[name] *= np.float32(scale)
    (directory / "model.safetensors").unlink()
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def recipe(model: Path, corpus: Path, taps: str, dtype: str | None = "float16") -> spile.Recipe:
    return spile.Recipe(
        model=str(model), corpus=str(corpus), taps=taps, seq_len=64, compute_dtype=dtype
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLP of block 1 multiplies values of some hundred thousands."""
    scales = {f"{MLP}up_proj.weight": 2e3, f"{MLP}gate_proj.weight": 1e2}
    return write_model(tmp_path_factory.mktemp("model") / "large", scales)


def test_the_first_site_that_overflows_is_named(large: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        spile.extract(recipe(large, corpus, "resid_post:0+2,final_norm"), str(tmp_path / "out"))
    found = re.fullmatch(
        r"resid_post\.2: NaN or infinity in unit 0, layer 2, document \d+ .*, token \d+ \(id .*\); "
        r"mlp_hidden\.1 reaches ([\d,]+), and float16 holds at most 65,504: give --compute-dtype "
        r"float32 \(or bfloat16, where the GPU has it\) and another --out",
        str(caught.value),
    )
    assert found and int(found[1].replace(",", "")) > 65504


def test_what_float16_cannot_hold_float32_can(large: Path, corpus: Path, tmp_path: Path) -> None:
    spile.extract(recipe(large, corpus, "resid_post:2", "float32"), str(tmp_path / "out"))
    spile.extract(recipe(large, corpus, "resid_post:0"), str(tmp_path / "before"))
    assert np.isfinite(spile.open(str(tmp_path / "before")).read("resid_post.0")).all()


def test_a_change_that_makes_it_overflow_is_part_of_the_search(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "far.npy", np.full(48, 1e6, np.float32))
    spliced = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1", seq_len=64,
        compute_dtype="float16", splice=f"steer:mlp_hidden.1={tmp_path}/far.npy",
    )  # fmt: skip
    with pytest.raises(
        DataError, match=r"mlp_hidden\.1 reaches 1,000,\d+, and float16 holds at most"
    ):
        spile.extract(spliced, str(tmp_path / "out"))


def test_a_streams_values_may_be_larger_than_float16(model: Path, corpus: Path) -> None:
    """Only products take float16: the stream, and what is added to it, are in float32."""
    loaded = spile.load_model(str(model), compute_dtype="float16")
    far = jnp.full(32, 1e6)
    found = loaded("a tin", "resid_post:1,logits", splice={"resid_post.0": added(far)})
    assert np.asarray(found["resid_post.1"]).min() > 65504
    assert np.isfinite(np.asarray(found["logits"])).all()


@pytest.mark.parametrize("far", [1e5, -1e5, np.inf, -np.inf, np.nan])
def test_an_overflow_cannot_hide_behind_an_activation(far: float) -> None:
    x, weight = jnp.array([[1.0, far]]), jnp.array([[1.0, -1.0], [1.0, 1.0]], jnp.float16)
    assert np.isnan(np.asarray(jax.nn.relu(product("ti,oi->to", x, weight)))).all()
    assert np.asarray(to_float16(jnp.array([65504.0, -65504.0]))).tolist() == [65504.0, -65504.0]


def test_sums_of_products_are_in_float32() -> None:
    ones = jnp.ones((1, 4096), jnp.float32)
    found = product("ti,oi->to", ones * 64, ones.astype(jnp.float16))
    assert found.dtype == jnp.float32 and found[0, 0] == 64 * 4096


def test_weights_that_float16_cannot_hold_are_refused(tmp_path: Path, corpus: Path) -> None:
    huge = write_model(tmp_path / "model", {f"{MLP}down_proj.weight": 1e6})
    with pytest.raises(ConfigError, match=r"down_proj\.weight: float16 holds no weights beyond"):
        spile.load_model(str(huge), compute_dtype="float16")
    spile.load_model(str(huge), compute_dtype="float32")


@pytest.mark.full
def test_ids_of_experts_that_nothing_chose_are_not_stored(tmp_path: Path, corpus: Path) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    far = write_model(tmp_path / "model", {"model.layers.1.post_attention_layernorm.weight": 1e6},
                      **config)  # fmt: skip
    with pytest.raises(DataError, match=r"expert_ids\.1: NaN .* mlp_in\.1 reaches"):
        spile.extract(recipe(far, corpus, "expert_ids:1"), str(tmp_path / "out"))

"""Which kernels a GPU runs inside a block; the kernels have tests of their own."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from spile.models.config.hf_config import read_config
from spile.models.forward.attention import masked
from spile.models.forward.decoder import Decoder, Inputs
from spile.models.forward.kernels import grouped, rotary
from spile.models.forward.weights import LayerSchedule, abstract_params
from spile.models.taps import parse_taps

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"


def lowered(name: str, dtype: str, *, backward: bool = False) -> str:
    """Return the program of a model's first two blocks for a GPU."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    arch = read_config({**config, depth: 2}, "test")[1]
    taps = parse_taps("mlp_hidden:1", arch)
    schedule = LayerSchedule.of(arch, 2, whole=True)
    params = abstract_params(arch, schedule, head=False, dtype=jnp.dtype(dtype))
    decoder = Decoder(arch, taps, dtype, masked, goes_back=backward)
    places = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    run = jax.jit(lambda params, *given: decoder.forward(params, Inputs(*given), schedule))
    return run.trace(params, places, places, places).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("dtype", "backward"), [("bfloat16", False), ("bfloat16", True),
                                                 ("float32", False)])  # fmt: skip
def test_a_narrow_model_runs_kernels_in_bfloat16(
    dtype: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lowered for a GPU that this machine need not have."""
    monkeypatch.setattr(grouped, "has_mosaic", lambda: True)
    monkeypatch.setattr(rotary, "gpu_capability", lambda: 9.0)
    text = lowered("Qwen3-0.6B", dtype, backward=backward)
    one_pass = dtype == "bfloat16"  # (whose gradient is that of its definition)
    assert ("normed_and_rotated" in text) == one_pass
    assert ("mosaic_gpu" in text) == (one_pass and not backward)


@pytest.mark.parametrize(
    ("name", "fused"),
    [("pythia-70m", True), ("pythia-6.9b", True), ("gpt2", False), ("Llama-3.1-8B", False)],
)
def test_an_inner_layer_is_one_kernel_where_that_gains(
    name: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA itself adds gpt2's GELU to the product, and wide gated layers gain nothing."""
    monkeypatch.setattr(grouped, "has_mosaic", lambda: True)
    assert ("mosaic_gpu" in lowered(name, "bfloat16")) == fused

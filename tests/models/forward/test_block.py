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

CONFIG = Path(__file__).parents[2] / "fixtures/configs/Qwen3-0.6B.json"


@pytest.mark.parametrize(("dtype", "backward"), [("bfloat16", False), ("bfloat16", True),
                                                 ("float32", False)])  # fmt: skip
def test_a_narrow_model_runs_kernels_in_bfloat16(
    dtype: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lowered for a GPU that this machine need not have."""
    monkeypatch.setattr(grouped, "has_mosaic", lambda: True)
    monkeypatch.setattr(rotary, "gpu_capability", lambda: 9.0)
    arch = read_config({**json.loads(CONFIG.read_text()), "num_hidden_layers": 2}, "test")[1]
    taps = parse_taps("mlp_hidden:1", arch)
    schedule = LayerSchedule.of(arch, 2, whole=True)
    params = abstract_params(arch, schedule, head=False, dtype=jnp.dtype(dtype))
    decoder = Decoder(arch, taps, dtype, masked, goes_back=backward)
    places = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    run = jax.jit(lambda params, *given: decoder.forward(params, Inputs(*given), schedule))
    text = run.trace(params, places, places, places).lower(lowering_platforms=("cuda",)).as_text()
    one_pass = dtype == "bfloat16"  # (whose gradient is that of its definition)
    assert ("normed_and_rotated" in text) == one_pass
    assert ("mosaic_gpu" in text) == (one_pass and not backward)

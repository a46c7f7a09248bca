"""Rotary frequencies: those of transformers for every kind, and settings read without guessing."""

import math
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spile.errors import InputError
from spile.models.rope import KINDS, Rope

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# name -> theta, head_dim, max positions, scaling
CASES: dict[str, tuple[float, int, int, dict[str, Any]]] = {
    "default": (1e4, 128, 4096, {"rope_type": "default"}),
    "default-qwen2": (1e6, 64, 32768, {"rope_type": "default"}),
    "linear": (1e4, 128, 4096, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (1e4, 128, 4096, {"rope_type": "dynamic", "factor": 2.0}),
    "llama3.1": (5e5, 128, 131072, LLAMA3),
    "llama3.2": (5e5, 64, 131072, {**LLAMA3, "factor": 32.0}),
    "yarn-qwen2.5": (1e6, 128, 32768, {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn-original-absent": (1e4, 64, 2048, {"rope_type": "yarn", "factor": 16.0}),
    "yarn-original-shorter": (1e4, 64, 8192, {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}),
    "yarn-all-settings": (1e4, 80, 65536, {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
        "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.25}),
    "yarn-factor-1": (1e4, 64, 2048, {"rope_type": "yarn", "factor": 1.0}),
}  # fmt: skip


def reference(
    theta: float, head_dim: int, positions: int, scaling: dict[str, Any]
) -> tuple[np.ndarray, float]:
    config = LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, max_position_embeddings=positions,
        rope_parameters={"rope_theta": theta, **scaling},
    )  # fmt: skip
    if scaling["rope_type"] == "default":
        compute = LlamaRotaryEmbedding.compute_default_rope_parameters
    else:
        compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    frequencies, amplitude = compute(config)
    return frequencies.numpy(), amplitude


def ours(
    theta: float, head_dim: int, positions: int, scaling: dict[str, Any]
) -> tuple[np.ndarray, float]:
    rope = Rope.from_config(
        {"rope_theta": theta, "rope_scaling": scaling}, "test", default_theta=1e4
    )
    return rope.frequencies(head_dim, positions)


def test_every_kind_is_compared() -> None:
    assert {scaling["rope_type"] for *_, scaling in CASES.values()} == set(KINDS)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    wanted, wanted_amplitude = reference(*CASES[name])
    found, amplitude = ours(*CASES[name])
    assert found.dtype == np.float32
    assert found.shape == (CASES[name][1] // 2,)
    np.testing.assert_allclose(found, wanted, rtol=2e-6)  # theirs is computed in float32
    assert amplitude == pytest.approx(wanted_amplitude, rel=1e-9)


@pytest.mark.parametrize("name", ["linear", "llama3.1", "yarn-qwen2.5", "yarn-original-shorter"])
def test_scaling_changes_the_frequencies(name: str) -> None:
    theta, head_dim, positions, _ = CASES[name]
    plain, _ = ours(theta, head_dim, positions, {"rope_type": "default"})
    scaled, _ = ours(*CASES[name])
    assert (scaled <= plain).all()
    assert scaled[-1] < 0.6 * plain[-1], "slow dimensions are stretched"


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones() -> None:
    theta, head_dim, positions, scaling = CASES["yarn-qwen2.5"]
    plain, _ = ours(theta, head_dim, positions, {"rope_type": "default"})
    scaled, amplitude = ours(theta, head_dim, positions, scaling)
    assert scaled[0] == plain[0] == 1.0
    assert scaled[-1] == pytest.approx(plain[-1] / 4)
    assert amplitude == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("name", CASES)
def test_settings_of_transformers_4_and_5_are_read_alike(name: str) -> None:
    theta, _, _, scaling = CASES[name]
    kind = scaling["rope_type"]
    rest = {key: value for key, value in scaling.items() if key != "rope_type"}
    configs = [
        {"rope_theta": theta, "rope_scaling": scaling},
        {"rope_theta": theta, "rope_scaling": {"type": kind, **rest}},
        {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}},
        {"rope_parameters": {"rope_theta": theta, **scaling}},
        {"rope_parameters": {"rope_theta": theta, **scaling}, "rope_scaling": None},
        {"rope_theta": theta, "rope_scaling": {"beta_fast": None, **scaling}},
    ]
    ropes = [Rope.from_config(config, "test", default_theta=3.0) for config in configs]
    assert ropes == [Rope(theta, kind, {k: float(v) for k, v in rest.items()})] * len(configs)


def test_what_transformers_saves_is_read() -> None:
    config = Qwen2Config(rope_parameters={"rope_theta": 1e6, **CASES["yarn-qwen2.5"][3]})
    rope = Rope.from_config(config.to_dict(), "test", default_theta=1e4)
    assert (rope.theta, rope.kind, rope.scaling["factor"]) == (1e6, "yarn", 4.0)


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_scaling": {}}])
def test_absent_settings_mean_the_familys_default(config: dict[str, Any]) -> None:
    assert Rope.from_config(config, "test", default_theta=5e3) == Rope(5e3)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported; known: default"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "disagree: ['linear', 'yarn']"),
        ({"type": "linear"}, "missing or unknown keys: factor"),
        ({"type": "linear", "factor": None}, "missing or unknown keys: factor"),
        ({"type": "default", "factor": 2.0}, "missing or unknown keys: factor"),
        ({"type": "yarn", "factor": 2.0, "mscale": 1.0}, "missing or unknown keys: mscale"),
        ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor, low_freq_factor, original_max"),
        ({"factor": 2.0}, "missing or unknown keys: factor"),
    ],
)
def test_settings_that_are_not_understood_are_refused(scaling: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        Rope.from_config({"rope_scaling": scaling}, "dir/config.json", default_theta=1e4)
    assert str(caught.value).startswith("dir/config.json: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "linear", "factor": "two"}},
        {"rope_scaling": {"type": "linear", "factor": 0.0}},
        {"rope_scaling": {"type": "linear", "factor": float("nan")}},
        {"rope_scaling": {"type": ["linear"], "factor": 2.0}},
        {"rope_scaling": ["linear", 2.0]},
        {"rope_scaling": 2.0},
        {"rope_theta": "many"},
        {"rope_theta": -1.0},
    ],
)
def test_settings_that_are_no_positive_numbers_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="rope"):
        Rope.from_config(config, "test", default_theta=1e4)

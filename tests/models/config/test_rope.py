"""Rotary frequencies: those of transformers for every kind, and settings read without guessing."""

import math
from typing import Any

import numpy as np
import pytest
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from spile.core.errors import InputError
from spile.models.config.rope import KINDS, Rope

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN_OSS = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.5 * i for i in range(pairs)], **more,
    }  # fmt: skip


# name -> theta, head_dim, max positions, scaling
CASES: dict[str, tuple[float, int, int, dict[str, Any]]] = {
    "default": (1e4, 128, 4096, {"rope_type": "default"}),
    "default-qwen2": (1e6, 64, 32768, {"rope_type": "default"}),
    "default-quarter": (1e4, 64, 2048, {"rope_type": "default", "partial_rotary_factor": 0.25}),
    # an odd number of dimensions is rounded up to pairs
    "default-odd": (1e4, 20, 2048, {"rope_type": "default", "partial_rotary_factor": 0.25}),
    "linear": (1e4, 128, 4096, {"rope_type": "linear", "factor": 4.0}),
    "linear-half": (1e4, 128, 4096, {
        "rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}),
    "dynamic": (1e4, 128, 4096, {"rope_type": "dynamic", "factor": 2.0}),
    "llama3.1": (5e5, 128, 131072, LLAMA3),
    "llama3.2": (5e5, 64, 131072, {**LLAMA3, "factor": 32.0}),
    "llama4": (5e5, 128, 10485760, {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}),
    "yarn-qwen2.5": (1e6, 128, 32768, {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn-original-absent": (1e4, 64, 2048, {"rope_type": "yarn", "factor": 16.0}),
    "yarn-original-shorter": (1e4, 64, 8192, {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}),
    "yarn-all-settings": (1e4, 80, 65536, {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
        "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.25}),
    "yarn-mscale": (1e4, 80, 65536, {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
        "mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn-factor-1": (1e4, 64, 2048, {"rope_type": "yarn", "factor": 1.0}),
    "yarn-gpt-oss": (1.5e5, 64, 131072, YARN_OSS),
    "yarn-gpt-oss-truncated": (1.5e5, 64, 131072, {**YARN_OSS, "truncate": True}),
    "yarn-three-quarters": (1.5e5, 64, 131072, {**YARN_OSS, "partial_rotary_factor": 0.75}),
    # so long an original that the ramp ends before it begins
    "yarn-endless": (1e4, 16, 10**12, {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**12}),
    "proportional": (1e6, 64, 131072, {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}),
    "longrope": (1e4, 96, 131072, longrope(48)),
    "longrope-original-absent": (1e4, 96, 4096, {
        k: v for k, v in longrope(48).items() if not k.startswith("original")}),
    "longrope-factor": (1e4, 96, 131072, longrope(48, factor=16.0)),
    "longrope-attention-factor": (1e4, 96, 131072, longrope(48, attention_factor=1.5)),
    "longrope-no-longer": (1e4, 96, 4096, longrope(48)),
    "longrope-phi-4-mini": (1e4, 128, 131072, longrope(48, partial_rotary_factor=0.75)),
}  # fmt: skip


def reference(
    theta: float, head_dim: int, positions: int, scaling: dict[str, Any]
) -> tuple[np.ndarray, float]:
    settings = {"rope_theta": theta, **scaling}
    sizes: dict[str, Any] = {
        "hidden_size": head_dim * 2, "num_attention_heads": 2, "max_position_embeddings": positions
    }  # fmt: skip
    if scaling["rope_type"] == "default":  # Llama's own has no part of a head
        config = GPTNeoXConfig(**sizes, rope_parameters={"partial_rotary_factor": 1.0, **settings})
        module = GPTNeoXRotaryEmbedding(config)
        return module.inv_freq.numpy(), module.attention_scaling
    config = LlamaConfig(**sizes, rope_parameters=settings)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
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
    _, head_dim, _, scaling = CASES[name]
    assert found.dtype == np.float32
    if scaling["rope_type"] == "proportional":  # as many numbers as if all dimensions turned
        assert np.count_nonzero(found) == head_dim // 8
        scaling = {}
    rotated = int(head_dim * scaling.get("partial_rotary_factor", 1.0))
    assert found.shape == (math.ceil(rotated / 2),)
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


def test_bounds_that_are_not_rounded_give_other_frequencies() -> None:
    exact, _ = ours(*CASES["yarn-gpt-oss"])
    rounded, _ = ours(*CASES["yarn-gpt-oss-truncated"])
    assert not np.allclose(exact, rounded, rtol=1e-3)


def test_longrope_uses_its_short_factors_and_ends_where_they_do() -> None:
    theta, head_dim, positions, scaling = CASES["longrope"]
    plain, _ = ours(theta, head_dim, positions, {"rope_type": "default"})
    scaled, amplitude = ours(theta, head_dim, positions, scaling)
    np.testing.assert_allclose(scaled, plain / scaling["short_factor"], rtol=1e-6)
    assert amplitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    rope = Rope.from_config({"rope_scaling": scaling}, "test", default_theta=theta)
    assert rope.longest(positions) == 4096
    assert rope.longest(2048) == 2048

    # What transformers computes for a context that is one token longer is something else.
    config = Phi3Config(
        hidden_size=192, num_attention_heads=2, max_position_embeddings=positions,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, "partial_rotary_factor": 1.0, **scaling},
    )  # fmt: skip
    np.testing.assert_allclose(Phi3RotaryEmbedding(config).inv_freq.numpy(), scaled, rtol=2e-6)
    compute = ROPE_INIT_FUNCTIONS["longrope"]
    np.testing.assert_allclose(compute(config, seq_len=4096)[0].numpy(), scaled, rtol=2e-6)
    assert not np.allclose(compute(config, seq_len=4097)[0].numpy(), scaled, rtol=0.5)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("longrope")])
def test_other_kinds_hold_for_the_whole_context(name: str) -> None:
    _, _, positions, scaling = CASES[name]
    rope = Rope.from_config({"rope_scaling": scaling}, "test", default_theta=1e4)
    assert rope.longest(positions) == positions


@pytest.mark.parametrize("name", CASES)
def test_settings_of_transformers_4_and_5_are_read_alike(name: str) -> None:
    theta, _, _, scaling = CASES[name]
    kind, fraction = scaling["rope_type"], scaling.get("partial_rotary_factor", 1.0)
    rest = {k: v for k, v in scaling.items() if k not in ("rope_type", "partial_rotary_factor")}
    bare = {"rope_type": kind, **rest}
    outside = {"rope_theta": theta, "partial_rotary_factor": fraction}
    configs = [
        {"rope_theta": theta, "rope_scaling": scaling},
        {**outside, "rope_scaling": {"type": kind, **rest}},
        {**outside, "rope_scaling": {"type": kind, **bare}},
        {"rope_parameters": {**outside, **bare}},
        {"rope_parameters": {**outside, **bare}, "rope_scaling": None},
        {"rope_theta": theta, "rope_scaling": {"beta_fast": None, **scaling}},
        {**outside, "rope_scaling": {"beta_fast": None, **bare}},
    ]
    ropes = [Rope.from_config(config, "test", default_theta=3.0) for config in configs]
    numbers = {k: tuple(v) if isinstance(v, list) else v for k, v in rest.items()}
    assert ropes == [Rope(theta, kind, numbers, fraction)] * len(configs)


def test_what_transformers_saves_is_read() -> None:
    config = Qwen2Config(rope_parameters={"rope_theta": 1e6, **CASES["yarn-qwen2.5"][3]})
    rope = Rope.from_config(config.to_dict(), "test", default_theta=1e4)
    assert (rope.theta, rope.kind, rope.scaling["factor"]) == (1e6, "yarn", 4.0)


def test_the_old_name_of_longrope_is_read() -> None:
    scaling = longrope(4)
    old = {"type": "su", **{k: v for k, v in scaling.items() if k != "rope_type"}}
    new = Rope.from_config({"rope_scaling": scaling}, "test", default_theta=1e4)
    assert Rope.from_config({"rope_scaling": old}, "test", default_theta=1e4) == new


def test_the_original_length_may_stand_beside_the_scaling() -> None:
    """If both are given, transformers uses the outer one; kinds that do not use it ignore it."""
    key = "original_max_position_embeddings"
    inner = longrope(4, original_max_position_embeddings=512)
    config = {key: 1024, "rope_scaling": inner}
    assert Rope.from_config(config, "test", default_theta=1e4).scaling[key] == 1024
    plain = {key: 1024, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert key not in Rope.from_config(plain, "test", default_theta=1e4).scaling


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_scaling": {}}])
def test_absent_settings_mean_the_familys_default(config: dict[str, Any]) -> None:
    assert Rope.from_config(config, "test", default_theta=5e3) == Rope(5e3)


def test_settings_differ_where_any_part_of_them_does() -> None:
    ropes = [Rope(1e4), Rope(1e5), Rope(1e4, fraction=0.5), Rope(1e4, "linear", {"factor": 2.0}),
             Rope(1e4, "linear", {"factor": 4.0})]  # fmt: skip
    assert all((a == b) is (a is b) for a in ropes for b in ropes)
    assert all(hash(rope) == hash(Rope(rope.theta, rope.kind, {}, rope.fraction)) for rope in ropes)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "axial", "factor": 2.0}, "'axial' is not supported; known: default, linear"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "disagree: ['linear', 'yarn']"),
        ({"type": "linear"}, "missing or unknown keys: factor"),
        ({"type": "linear", "factor": None}, "missing or unknown keys: factor"),
        ({"type": "default", "factor": 2.0}, "missing or unknown keys: factor"),
        ({"type": "yarn", "factor": 2.0, "alpha": 1.0}, "missing or unknown keys: alpha"),
        ({"type": "linear", "factor": 2.0, "truncate": False}, "unknown keys: truncate"),
        ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor, low_freq_factor, original_max"),
        ({"rope_type": "longrope", "factor": 2.0}, "missing or unknown keys: long_factor, short_"),
        ({"factor": 2.0}, "missing or unknown keys: factor"),
        ({**LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor is below low_freq_factor"),
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
        {"rope_scaling": {"type": "linear", "factor": 10**400}},
        {"rope_scaling": {"type": "linear", "factor": [2.0]}},
        {"rope_scaling": {"type": ["linear"], "factor": 2.0}},
        {"rope_scaling": ["linear", 2.0]},
        {"rope_scaling": 2.0},
        {"rope_scaling": {**YARN_OSS, "truncate": "no"}},
        {"rope_scaling": {**YARN_OSS, "attention_factor": [1.0]}},
        {"rope_scaling": {**LLAMA3, "low_freq_factor": [1.0]}},
        {"rope_scaling": longrope(2, short_factor=1.0)},
        {"rope_scaling": longrope(2, long_factor=[1.0, "2"])},
        {"rope_scaling": longrope(2, short_factor=[1.0, 0.0])},
        {"rope_theta": "many"},
        {"rope_theta": -1.0},
        {"rope_theta": 0},
        {"rope_theta": 1.0},
        {"partial_rotary_factor": 0},
        {"partial_rotary_factor": "half"},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.0}},
    ],
)
def test_settings_that_are_no_positive_numbers_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="rope|rotary"):
        Rope.from_config(config, "test", default_theta=1e4)

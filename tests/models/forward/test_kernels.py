"""Accelerators' attention kernels against the definition."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from marks import some
from spile.models.config.hf_config import read_config
from spile.models.forward import kernels
from spile.models.forward.attention import Attention, Scoring, blocked, masked
from spile.models.forward.kernels import cudnn, for_platform, splash

ON_GPU = jax.default_backend() == "gpu"
SEQ, HEADS, KV_HEADS = 256, 4, 2
SCALE = 128**-0.5
DIMS = (64, 128)  # splash fills up the first
# Contexts of each row: short ones, one that fills the row, a single token, padding at the end.
ROWS = ((100, 1, 90, 50), (256,), (3, 3, 3, 3, 3), ())
SCORINGS = {
    "plain": Scoring(SCALE),
    "window": Scoring(SCALE, window=37),
    "wide-window": Scoring(SCALE, window=200),
    "cap": Scoring(0.05, cap=3.0),
    "cap-window": Scoring(0.05, window=130, cap=2.0),
}


def places() -> tuple[jax.Array, jax.Array]:
    segments = np.zeros((len(ROWS), SEQ), np.int32)
    positions = np.zeros_like(segments)
    for row, lengths in enumerate(ROWS):
        start = 0
        for number, length in enumerate(lengths, 1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    return jnp.asarray(segments), jnp.asarray(positions)


def random_heads(dim: int, dtype: Any = np.float32) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [(len(ROWS), SEQ, count, dim) for count in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def worst(attention: Attention, scoring: Scoring, dim: int, dtype: Any = np.float32) -> float:
    """The largest difference from the definition, computed in float32, over real tokens."""
    segments, positions = places()
    q, k, v = random_heads(dim, dtype)
    exact = [x.astype(np.float32) for x in (q, k, v)]
    want = masked(segments, positions)(exact[0], exact[1], exact[2], scoring, None)
    got = attention(segments, positions)(q, k, v, scoring, None)
    real = (segments > 0)[..., None, None]
    return float(jnp.abs(jnp.where(real, got.astype(np.float32) - want, 0.0)).max())


@pytest.mark.skipif(ON_GPU, reason="interpreted on CPUs, compiled on TPUs")
@pytest.mark.parametrize("dim", some(DIMS, 64))
@pytest.mark.parametrize("name", some(SCORINGS, "plain", "cap-window"))
def test_splash_attention_is_the_definition(name: str, dim: int) -> None:
    def interpreted(segments: Any, positions: Any) -> Any:
        return splash(segments, positions, interpret=True)

    assert worst(interpreted, SCORINGS[name], dim) < 2e-6


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU with cuDNN")
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["plain", "window", "wide-window"])
def test_packed_cudnn_attention_is_the_definition(name: str, dim: int) -> None:
    def packed(segments: Any, positions: Any) -> Any:
        return cudnn(segments, positions, contexts=8)

    floor = worst(masked, SCORINGS[name], dim, jnp.bfloat16)
    error = worst(packed, SCORINGS[name], dim, jnp.bfloat16)
    assert error <= 2 * floor
    segments, positions = places()
    out = packed(segments, positions)(*random_heads(dim, jnp.bfloat16), SCORINGS[name], None)
    assert bool(jnp.isfinite(out).all()), "padding must be written too"


def arch_with(**changes: Any) -> Any:
    _, arch = read_config({**tiny.CONFIG, "head_dim": 128, **changes}, "test")
    return arch


GIVEN: dict[str, int] = {"seq_len": 256, "contexts": 8}


def test_each_platform_has_its_kernel() -> None:
    assert for_platform("cpu", arch_with(), "float32", **GIVEN) is blocked
    assert for_platform("tpu", arch_with(), "bfloat16", **GIVEN) is splash
    assert for_platform("tpu", arch_with(head_dim=64), "bfloat16", **GIVEN) is splash


@pytest.mark.parametrize(
    ("platform", "changes", "dtype", "seq_len", "reason"),
    [
        ("gpu", {}, "float32", 256, "float32 was asked for"),
        ("gpu", {"head_dim": 320}, "bfloat16", 256, "heads of up to 256 in steps of 8, not 320"),
        ("gpu", {"head_dim": 20}, "bfloat16", 256, "heads of up to 256 in steps of 8, not 20"),
        ("tpu", {}, "float32", 256, "float32 was asked for"),
        ("tpu", {}, "bfloat16", 200, "contexts of multiples of 128, not 200"),
        ("METAL", {}, "bfloat16", 256, "no kernel for METAL"),
    ],
)
def test_a_fallback_says_its_reason(
    platform: str,
    changes: dict[str, Any],
    dtype: str,
    seq_len: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "spile"):
        found = for_platform(platform, arch_with(**changes), dtype, seq_len=seq_len, contexts=8)
    assert found is masked
    assert reason in caplog.text


def test_a_jax_without_packed_attention_is_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_CUDNN", "jax.no_such_module")
    with caplog.at_level(logging.INFO, "spile"):
        assert for_platform("gpu", arch_with(), "bfloat16", **GIVEN) is masked
    assert "no packed cuDNN attention" in caplog.text


def test_a_gpu_before_hopper_takes_the_fallback_instead_of_failing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    older = SimpleNamespace(
        check_cudnn_version=lambda: 91000,
        check_compute_capability=asked.append,  # returns None: not that new
        MaskType=SimpleNamespace(PADDING_CAUSAL=1),
    )
    monkeypatch.setitem(sys.modules, "an_older_gpu", cast(ModuleType, older))
    monkeypatch.setattr(kernels, "_CUDNN", "an_older_gpu")
    with caplog.at_level(logging.INFO, "spile"):
        assert for_platform("gpu", arch_with(), "bfloat16", **GIVEN) is masked
    assert "Hopper" in caplog.text and asked == ["9.0"]


def test_the_private_interface_of_jax_is_where_it_was() -> None:
    """cuDNN's packed attention has no public one; if this fails, look where it moved to."""
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    names = module.dot_product_attention.__code__.co_varnames
    assert {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "sliding_window_length"} <= {*names}
    assert module.MaskType.PADDING_CAUSAL
    assert module.check_compute_capability("9.0") in (True, False)

"""Accelerators' attention kernels against the definition."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.config.arch import Latent, Layer
from spile.models.config.hf_config import read_config
from spile.models.forward.attention import Attention, Scoring, blocked, masked
from spile.models.forward.kernels import attention as kernels
from spile.models.forward.kernels.attention import (
    by_width,
    cudnn,
    flash,
    for_platform,
    splash,
    widened,
)
from spile.models.forward.kernels.wide_attention import FASTEST, wide
from support import tiny
from support.marks import some

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


def random_heads(
    dim: int, dtype: Any = np.float32, values: int | None = None
) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    sizes = ((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, values or dim))
    shapes = [(len(ROWS), SEQ, *size) for size in sizes]
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def worst(
    attention: Attention,
    scoring: Scoring,
    dim: int,
    dtype: Any = np.float32,
    values: int | None = None,
) -> float:
    """The largest difference from the definition, computed in float32, over real tokens."""
    segments, positions = places()
    q, k, v = random_heads(dim, dtype, values)
    exact = [x.astype(np.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):  # as in float32 runs: a GPU would round first
        want = masked(segments, positions)(exact[0], exact[1], exact[2], scoring)
        got = attention(segments, positions)(q, k, v, scoring)
    real = (segments > 0)[..., None, None]
    return float(jnp.abs(jnp.where(real, got.astype(np.float32) - want, 0.0)).max())


@pytest.mark.skipif(ON_GPU, reason="interpreted on CPUs, compiled on TPUs")
@pytest.mark.parametrize("dim", some(DIMS, 64))
@pytest.mark.parametrize("name", some(SCORINGS, "cap-window"))
def test_splash_attention_is_the_definition(name: str, dim: int) -> None:
    def interpreted(segments: Any, positions: Any) -> Any:
        return splash(segments, positions, interpret=True)

    assert worst(interpreted, SCORINGS[name], dim) < 2e-6


@pytest.mark.skipif(ON_GPU, reason="interpreted on CPUs, compiled on TPUs")
def test_splash_attention_has_sinks() -> None:
    segments, positions = places()
    q, k, v = random_heads(64, jnp.float32)
    sinks = jnp.linspace(-2.0, 3.0, q.shape[2])
    scoring = replace(SCORINGS["plain"], sinks=sinks)
    wanted = masked(segments, positions)(q, k, v, scoring)
    found = splash(segments, positions, interpret=True)(q, k, v, scoring)
    real = (segments > 0)[..., None, None]
    assert float(jnp.abs(jnp.where(real, found - wanted, 0.0)).max()) < 2e-6
    plain = masked(segments, positions)(q, k, v, SCORINGS["plain"])
    assert float(jnp.abs(jnp.where(real, found - plain, 0.0)).max()) > 0.01


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU and tokamax")
@pytest.mark.parametrize("kernel", ["mosaic", "triton"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", SCORINGS)
def test_flash_attention_is_the_definition(name: str, dim: int, kernel: str) -> None:
    pytest.importorskip("tokamax")
    floor = worst(masked, SCORINGS[name], dim, jnp.bfloat16)
    with jax.numpy_rank_promotion("allow"):  # in tokamax
        error = worst(partial(flash, kernel=kernel), SCORINGS[name], dim, jnp.bfloat16)
    assert error <= 2 * floor


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU and tokamax")
@pytest.mark.parametrize("kernel", ["mosaic", "triton"])
@pytest.mark.parametrize("name", ["plain", "window", "wide-window"])
def test_flash_attention_has_sinks(name: str, kernel: str) -> None:
    pytest.importorskip("tokamax")
    segments, positions = places()
    q, k, v = random_heads(64, jnp.bfloat16)
    scoring = replace(SCORINGS[name], sinks=jnp.linspace(-2.0, 3.0, HEADS))
    by_definition = masked(segments, positions)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    exact = by_definition(wide[0], wide[1], wide[2], scoring)
    plain = by_definition(q, k, v, scoring)
    with jax.numpy_rank_promotion("allow"):  # in tokamax
        found = flash(segments, positions, kernel=kernel)(q, k, v, scoring)
    real = (segments > 0)[..., None, None]
    floor, error = (
        float(jnp.abs(jnp.where(real, each.astype(np.float32) - exact, 0.0)).max())
        for each in (plain, found)
    )
    assert error <= 2 * floor


# The interpreter takes long for blocks as large as those that are fastest.
INTERPRETED = FASTEST._replace(queries=32, keys=16)


@pytest.mark.parametrize("dim", [512] if ON_GPU else [64])
@pytest.mark.parametrize("name", some(("plain", "window", "wide-window"), "wide-window"))
def test_attention_of_wide_heads_is_the_definition(name: str, dim: int) -> None:
    tiling = FASTEST if ON_GPU else INTERPRETED
    kernel = partial(wide, tiling=tiling, interpret=not ON_GPU)
    floor = worst(masked, SCORINGS[name], dim, jnp.bfloat16)
    assert worst(kernel, SCORINGS[name], dim, jnp.bfloat16) <= 2 * floor


def test_attention_of_wide_heads_takes_rows_of_any_length() -> None:
    length = 70  # not a multiple of any block
    segments = jnp.asarray([[1] * 50 + [2] * 20, [1] * 30 + [0] * 40], jnp.int32)
    positions = jnp.asarray([[*range(50), *range(20)], [*range(30), *([0] * 40)]], jnp.int32)
    rng = np.random.default_rng(1)
    dim = 512 if ON_GPU else 64
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, length, heads, dim)), jnp.bfloat16)
        for heads in (4, 2, 2)
    )
    tiling = FASTEST if ON_GPU else INTERPRETED
    found = wide(segments, positions, tiling=tiling, interpret=not ON_GPU)(
        q, k, v, SCORINGS["plain"]
    )
    exact = [each.astype(jnp.float32) for each in (q, k, v)]
    wanted = masked(segments, positions)(exact[0], exact[1], exact[2], SCORINGS["plain"])
    real = (segments > 0)[..., None, None]
    assert found.shape == q.shape and bool(jnp.isfinite(found).all())
    assert float(jnp.abs(jnp.where(real, found.astype(jnp.float32) - wanted, 0.0)).max()) < 0.02


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU with cuDNN")
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["plain", "window", "wide-window"])
def test_packed_cudnn_attention_is_the_definition(name: str, dim: int) -> None:
    def packed(segments: Any, positions: Any, contexts: int = 8) -> Any:
        return cudnn(segments, positions, contexts=contexts)

    floor = worst(masked, SCORINGS[name], dim, jnp.bfloat16)
    error = worst(packed, SCORINGS[name], dim, jnp.bfloat16)
    assert error <= 2 * floor
    segments, positions = places()
    out = packed(segments, positions)(*random_heads(dim, jnp.bfloat16), SCORINGS[name])
    assert bool(jnp.isfinite(out).all()), "padding must be written too"
    roomy = packed(segments, positions, 64)(*random_heads(dim, jnp.bfloat16), SCORINGS[name])
    np.testing.assert_array_equal(out, roomy)  # so a program with more room may take its place


NARROW = Latent(rank=32, query_rank=None, rope_dim=64, value_dim=128)


@pytest.mark.skipif(ON_GPU, reason="interpreted on CPUs, compiled on TPUs")
def test_values_narrower_than_keys_are_filled_up_for_a_kernel() -> None:
    kernel = partial(splash, interpret=True)
    assert worst(partial(widened, kernel=kernel), SCORINGS["plain"], 192, values=128) < 2e-6


@pytest.mark.parametrize("values", some([40, 200], 200))
def test_blocked_attention_has_values_of_any_width(values: int) -> None:
    assert worst(blocked, SCORINGS["window"], 64, values=values) < 2e-6


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel", ["mosaic", "triton", "cudnn"])
def test_each_kernel_of_a_gpu_takes_narrower_values_filled_up(kernel: str) -> None:
    one = partial(cudnn, contexts=8) if kernel == "cudnn" else partial(flash, kernel=kernel)
    floor = worst(masked, SCORINGS["plain"], 192, jnp.bfloat16, values=128)
    found = worst(partial(widened, kernel=one), SCORINGS["plain"], 192, jnp.bfloat16, values=128)
    assert found <= 2 * floor


@pytest.mark.skipif(ON_GPU, reason="interpreted on CPUs, compiled on TPUs")
def test_each_width_of_heads_goes_to_its_own_kernel() -> None:
    chosen = {64: partial(splash, interpret=True), 40: blocked}
    for width in chosen:
        assert worst(partial(by_width, kernels=chosen), SCORINGS["window"], width) < 2e-6
    with pytest.raises(KeyError):
        worst(partial(by_width, kernels=chosen), SCORINGS["window"], 128)


@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("name", ["plain", "window"])
def test_heads_of_two_widths_are_the_definition_on_a_gpu(name: str, width: int) -> None:
    """As in Gemma 4: a fused kernel for narrow heads, blocks for wide ones."""
    arch = arch_with(head_dim=256)
    arch = replace(arch, layers=(Layer(window=37), Layer(head_dim=512)))
    with jax.numpy_rank_promotion("allow"):  # in tokamax
        attention = for_platform("gpu", arch, "bfloat16", **GIVEN)
        error = worst(attention, SCORINGS[name], width, jnp.bfloat16)
    assert error <= 2 * worst(masked, SCORINGS[name], width, jnp.bfloat16)


def arch_with(**changes: Any) -> Any:
    _, arch = read_config({**tiny.CONFIG, "head_dim": 128, **changes}, "test")
    return arch


GIVEN: dict[str, Any] = {"seq_len": 256, "contexts": 8}


def test_each_platform_has_its_kernel() -> None:
    assert for_platform("cpu", arch_with(), "float32", **GIVEN) is blocked
    assert for_platform("tpu", arch_with(), "bfloat16", **GIVEN) is splash
    assert for_platform("tpu", arch_with(head_dim=64), "bfloat16", **GIVEN) is splash
    assert for_platform("METAL", arch_with(), "bfloat16", **GIVEN) is blocked
    narrow = replace(arch_with(head_dim=192), latent=NARROW)
    made = cast("partial[Any]", for_platform("tpu", narrow, "bfloat16", **GIVEN))
    assert (made.func, made.keywords) == (widened, {"kernel": splash})
    assert for_platform("cpu", narrow, "float32", **GIVEN) is blocked


def test_chunks_are_contexts_for_a_kernel_that_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu(monkeypatch, "9.0")
    arch = arch_with()
    cut = replace(arch, layers=(*arch.layers, Layer(chunk=100)))
    chosen = {"wanted": "cudnn", **GIVEN}
    found = [for_platform("gpu", each, "bfloat16", **chosen) for each in (arch, cut)]
    assert [cast(Any, each).keywords for each in found] == [{"contexts": 8}, {"contexts": 10}]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Pretend that this process has such a GPU; its kernels are chosen, but cannot run."""
    device = SimpleNamespace(compute_capability=capability, platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    module = SimpleNamespace(
        check_cudnn_version=lambda: 91000,
        check_compute_capability=lambda wanted: float(capability) >= float(wanted),
        MaskType=SimpleNamespace(PADDING_CAUSAL=1),
    )
    monkeypatch.setitem(sys.modules, "a_cudnn", cast(ModuleType, module))
    monkeypatch.setattr(kernels, "_CUDNN", "a_cudnn")
    for number, name in enumerate(("mosaic", "triton")):
        monkeypatch.setitem(sys.modules, f"a_tokamax_{number}", cast(ModuleType, module))
        monkeypatch.setitem(kernels._TOKAMAX, name, f"a_tokamax_{number}")
    kernels.missing_kernels.cache_clear()
    kernels._say_once.cache_clear()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    kernels.missing_kernels.cache_clear()


@pytest.mark.parametrize(
    ("capability", "kernel"), [("9.0", "mosaic"), ("10.0", "mosaic"), ("8.0", "triton")]
)
def test_a_gpu_has_the_kernel_of_its_generation(
    capability: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, capability)
    found = for_platform("gpu", arch_with(), "bfloat16", **GIVEN)
    assert isinstance(found, partial) and found.func is flash
    assert found.keywords == {"kernel": kernel}


def test_heads_too_wide_for_a_kernel_do_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu(monkeypatch, "9.0")
    arch = replace(arch_with(head_dim=256), layers=(Layer(window=64), Layer(head_dim=512)))
    found = cast("partial[Any]", for_platform("gpu", arch, "bfloat16", **GIVEN))
    narrow, widest = (found.keywords["kernels"][width] for width in (256, 512))
    assert found.func is by_width and widest is wide
    assert (narrow.func, narrow.keywords) == (flash, {"kernel": "mosaic"})
    assert for_platform("tpu", arch, "bfloat16", **GIVEN) is splash
    on_a_gpu(monkeypatch, "10.0")
    found = cast("partial[Any]", for_platform("gpu", arch, "bfloat16", **GIVEN))
    assert found.keywords["kernels"][512] is blocked


def test_a_missing_kernel_package_is_named_once_with_how_to_install_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, "9.0")
    for name in ("mosaic", "triton"):
        monkeypatch.setitem(kernels._TOKAMAX, name, "no_tokamax_here")
    with caplog.at_level(logging.INFO, "spile"):
        for _ in range(3):
            found = for_platform("gpu", arch_with(), "bfloat16", **GIVEN)
            assert isinstance(found, partial) and found.func is cudnn
        assert len(caplog.messages) == 1
        assert "pip install 'spile[kernels]'" in caplog.text and "cuDNN's packed" in caplog.text
        capped = for_platform("gpu", arch_with(), "float32", **GIVEN)
    assert capped is blocked and "float32 was asked for" in caplog.text


def test_an_old_gpu_or_another_jax_takes_the_fallback_instead_of_failing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu(monkeypatch, "7.5")
    assert for_platform("gpu", arch_with(), "bfloat16", **GIVEN) is blocked
    monkeypatch.setattr(kernels, "_CUDNN", "jax.no_such_module")
    kernels.missing_kernels.cache_clear()
    assert for_platform("gpu", arch_with(), "bfloat16", **GIVEN) is blocked
    assert "no packed cuDNN attention" in kernels.missing_kernels()["cudnn"]


def test_the_private_interface_of_jax_is_where_it_was() -> None:
    """cuDNN's packed attention is not public; if this fails, look for its new place."""
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    names = module.dot_product_attention.__code__.co_varnames
    assert {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "sliding_window_length"} <= {*names}
    assert module.MaskType.PADDING_CAUSAL
    assert module.check_compute_capability("9.0") in (True, False)

"""The arithmetic beside attention, compared with HF's modules: the same casts in all places."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_to_neighbours
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from spile.models.config.hf_config import ACTIVATIONS
from spile.models.forward.ops import (
    NORMS,
    Float8Weight,
    activate,
    linear,
    norm,
    rotary_angles,
    rotate,
    softcap,
)
from support import quick
from support.marks import some

WIDTH = 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
THEIRS: dict[str, list[Any]] = {
    "rms": [LlamaRMSNorm],
    "rms_float32": [Olmo2RMSNorm, GptOssRMSNorm],
    "rms_plus_one": [Gemma3RMSNorm],
    "layer": [torch.nn.LayerNorm],
    "layer_weight": [CohereLayerNorm, partial(torch.nn.LayerNorm, bias=False)],
    "layer_bare": [partial(torch.nn.LayerNorm, elementwise_affine=False)],
}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ours(array: np.ndarray, dtype: str) -> Any:
    return jnp.asarray(array, dtype)


def theirs(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.tensor(array).to(DTYPES[dtype])


def assert_same(found: Any, wanted: torch.Tensor, dtype: str) -> None:
    """Equal up to rounding; in bfloat16 nearly bit for bit, which a missing cast would prevent."""
    assert found.dtype == dtype
    assert wanted.dtype == DTYPES[dtype]
    a, b = np.asarray(found, np.float32), wanted.detach().float().numpy()
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=2**-20 if dtype == "float32" else 2**-7, atol=1e-6)
    if dtype == "bfloat16":
        assert (a != b).mean() < 0.02


def test_every_norm_is_tested() -> None:
    assert set(THEIRS) == set(NORMS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_norms_are_hfs_to_the_last_cast(kind: str, dtype: str, eps: float) -> None:
    x = random(3, 50, WIDTH) * 3 + 1
    weight, bias = random(WIDTH, seed=1), random(WIDTH, seed=2)
    for make in THEIRS[kind]:
        module = make(WIDTH, eps=eps).to(DTYPES[dtype])
        with torch.no_grad():
            if kind != "layer_bare":
                module.weight.copy_(theirs(weight, dtype))
            if kind == "layer":
                module.bias.copy_(theirs(bias, dtype))
            wanted = module(theirs(x, dtype))
        beside = ours(bias, dtype) if kind == "layer" else None
        scale = None if kind == "layer_bare" else ours(weight, dtype)
        found = norm(ours(x, dtype), scale, beside, kind, eps)
        assert_same(found, wanted, dtype)


def test_norms_differ() -> None:
    x, weight = ours(random(50, WIDTH) * 3 + 1, "bfloat16"), ours(random(WIDTH), "bfloat16")
    weights = {kind: None if kind == "layer_bare" else weight for kind in NORMS}
    biases = {"layer": ours(random(WIDTH, seed=2), "bfloat16")}
    found = {
        kind: np.asarray(norm(x, weights[kind], biases.get(kind), kind, 1e-6), np.float32)
        for kind in NORMS
    }
    for kind in NORMS:
        for other in NORMS:
            differ = (found[kind] != found[other]).mean()
            assert differ > 0.1 or kind == other, (kind, other)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_activations_are_hfs(name: str, gated: bool) -> None:
    x, up = random(7, 64) * 4, random(7, 64, seed=1)
    wanted = ACT2FN[name](torch.tensor(x))
    if gated:
        wanted = wanted * torch.tensor(up)
        found = activate(jnp.asarray(up), jnp.asarray(x), name, None)
    else:
        found = activate(jnp.asarray(x), None, name, None)
    np.testing.assert_allclose(found, wanted.numpy(), atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clamped_gate_is_gpt_oss(dtype: str) -> None:
    theirs_: Any = GptOssExperts
    gate, up = random(40, 64) * 3, random(40, 64, seed=1) * 3
    both = torch.stack([theirs(gate, dtype), theirs(up, dtype)], dim=-1).flatten(-2)
    wanted = theirs_._apply_gate(SimpleNamespace(alpha=1.702, limit=1.5), both)
    found = activate(ours(up, dtype), ours(gate, dtype), "quick_gelu", 1.5)
    step = 2**-6 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(
        np.asarray(found, np.float32), wanted.float().numpy(), rtol=step, atol=step
    )
    assert (np.abs(up) > 1.5).any()
    assert (gate > 1.5).any()


ROTATED = some(itertools.product(DTYPES, [8, 4, 2]), ("float32", 8), ("bfloat16", 4))


@pytest.mark.parametrize(("dtype", "rotated"), ROTATED)
def test_rotation_is_hfs_and_leaves_what_it_does_not_reach(dtype: str, rotated: int) -> None:
    dim = 8
    q, k = random(2, 30, 4, dim), random(2, 30, 1, dim, seed=1)
    positions = np.stack([np.arange(30), np.arange(30)[::-1] * 7]).astype(np.int32)
    frequencies = (1e4 ** -(np.arange(0, rotated, 2) / rotated)).astype(np.float32)

    @partial(jax.jit, compiler_options=quick.OPTIONS)
    def turn(q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
        cos, sin = rotary_angles(positions, frequencies, 1.25)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    angles = torch.tensor(positions).float()[..., None] * torch.tensor(frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    turned = apply_rotary_pos_emb(
        theirs(q[..., :rotated], dtype),
        theirs(k[..., :rotated], dtype),
        (angles.cos() * 1.25).to(DTYPES[dtype]),
        (angles.sin() * 1.25).to(DTYPES[dtype]),
        unsqueeze_dim=2,
    )
    both = turn(ours(q, dtype), ours(k, dtype), jnp.asarray(positions))
    for x, array, wanted in zip((q, k), both, turned, strict=True):
        found = np.asarray(array)
        assert np.array_equal(found[..., rotated:], np.asarray(ours(x, dtype))[..., rotated:])
        assert found.dtype == dtype
        step = 2**-6 if dtype == "bfloat16" else 5e-6
        ours_ = found[..., :rotated].astype(np.float32)
        np.testing.assert_allclose(ours_, wanted.float().numpy(), atol=step)


def test_neighbours_are_rotated_as_in_glm() -> None:
    """Rotates six of eight dimensions; halves of all eight would give something else."""
    q = random(2, 30, 4, 8)
    positions = np.tile(np.arange(30, dtype=np.int32), (2, 1))
    frequencies = (1e4 ** -(np.arange(0, 6, 2) / 6)).astype(np.float32)
    cos, sin = rotary_angles(jnp.asarray(positions), frequencies, 1.0)
    angles = torch.tensor(positions).float()[..., None] * torch.tensor(frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    given = torch.tensor(q)
    wanted, _ = apply_to_neighbours(given, given, angles.cos(), angles.sin(), unsqueeze_dim=2)
    found = rotate(jnp.asarray(q), cos, sin, interleaved=True)
    np.testing.assert_allclose(found, wanted.numpy(), atol=5e-6)
    assert np.abs(np.asarray(rotate(jnp.asarray(q), cos, sin)) - wanted.numpy()).max() > 0.1


@settings(deadline=None, max_examples=30)
@given(st.floats(0.5, 100), st.integers(0, 100))
def test_a_cap_bounds_and_keeps_the_order(cap: float, seed: int) -> None:
    x = np.sort(random(64, seed=seed) * 100)
    found = np.asarray(softcap(jnp.asarray(x), cap))
    np.testing.assert_allclose(found, cap * np.tanh(x.astype(np.float64) / cap), rtol=1e-5)
    assert (np.diff(found) >= -1e-6 * cap).all()
    assert np.abs(found).max() <= cap * (1 + 1e-6)
    assert softcap(jnp.asarray(x), None).tolist() == x.tolist()


def rounded_to_float8(values: np.ndarray) -> np.ndarray:
    """Values as float8 holds them, each row scaled to its largest one."""
    wide = values.astype(np.float32)
    scale = np.abs(wide).max(axis=-1, keepdims=True) / np.float32(448)
    scale = np.where(scale > 0, scale, 1)
    return (wide / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def test_a_product_in_float8_is_that_of_the_rounded_factors() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 96)).astype(ml_dtypes.bfloat16)
    x[1, 2] = 0
    weight = (rng.standard_normal((40, 96)) * np.geomspace(1e-6, 10, 40)[:, None]).astype(x.dtype)
    bias = np.full(40, 1e-3, x.dtype)
    narrow = Float8Weight.of(jnp.asarray(weight))
    assert (narrow.values.dtype, narrow.scale.shape) == (jnp.float8_e4m3fn, (40,))
    found = np.asarray(linear(jnp.asarray(x), narrow, jnp.asarray(bias)), np.float64)
    wanted = rounded_to_float8(x) @ rounded_to_float8(weight).T + bias.astype(np.float64)
    length = np.linalg.norm(wanted, axis=-1, keepdims=True)
    assert np.abs(found - wanted).max() <= 2**-8 * length.max()
    np.testing.assert_array_equal(found[1, 2], bias.astype(np.float64))
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(found - exact).max() > 2**-7 * length.max(), "it is not the product in bfloat16"


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_linear_is_the_matrix_as_stored_and_a_bias_over_all_tokens(shape: tuple[int, ...]) -> None:
    x, weight, bias = random(*shape), random(4, 5, seed=1), random(4, seed=2)
    found = linear(jnp.asarray(x), jnp.asarray(weight))
    np.testing.assert_allclose(found, x @ weight.T, atol=1e-6)
    found = linear(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias))
    np.testing.assert_allclose(found, x @ weight.T + bias, atol=1e-6)


def test_after_one_large_term_a_product_keeps_the_digits_of_the_others() -> None:
    """As in rows of first tokens: each further term would be rounded at the large one's size."""
    if jax.default_backend() != "cpu":
        pytest.skip("on a CPU products are added up in short runs")
    x, weight = random(64, 1536), random(96, 1536, seed=1)
    x[:, 600] = 1e4
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)

    def error(found: Any) -> float:
        gap = (np.asarray(found, np.float64) - exact) / np.abs(1e4 * weight[:, 600])
        return float(np.sqrt(np.square(gap).mean()))

    in_one = jax.jit(partial(jnp.einsum, "ti,oi->to"))(x, weight)
    in_runs = jax.jit(linear)(jnp.asarray(x), jnp.asarray(weight))
    assert error(in_runs) < 0.75 * error(in_one)
    # short sums, and other dtypes, are still one product
    for short in (x[:, :256], jnp.asarray(x[:, :512], jnp.bfloat16)):
        width = jnp.asarray(weight[:, : short.shape[1]], short.dtype)
        program = jax.make_jaxpr(linear)(jnp.asarray(short), width)
        assert [str(step.primitive) for step in program.eqns].count("dot_general") == 1

"""Mixtures of experts, compared with a plain loop over tokens and experts."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Dots1Config
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter

from spile.models.config.arch import Arch, Experts, Layer
from spile.models.config.rope import Rope
from spile.models.config.specs import block_specs
from spile.models.forward import moe
from spile.models.forward.kernels import grouped
from spile.models.forward.kernels.grouped import Float8Rows, Groups, ragged, tiled
from spile.models.forward.moe import mix, route
from spile.models.forward.ops import Float8Weight, to_float8
from spile.models.forward.weights import Block
from support import quick
from support.marks import some

ROWS, SEQ, WIDTH, INNER = 2, 7, 12, 20
COUNT = 5
ROUTE = jax.jit(route, static_argnums=2, compiler_options=quick.OPTIONS)
MIX = jax.jit(mix, static_argnums=4, compiler_options=quick.OPTIONS)
KINDS: dict[str, dict[str, Any]] = {
    "gated": {},
    "plain": {"gated": False, "activation": "relu"},
    "biased": {"mlp_bias": True},
    "clamped": {"mlp_bias": True, "activation": "quick_gelu", "glu_limit": 0.7},
}


def arch_of(chosen: int = 2, *, normalised: bool = True, **changes: Any) -> Arch:
    usual = {
        "family": "test", "vocab_size": 9, "width": WIDTH, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 6, "mlp_width": INNER, "layers": (Layer(),), "max_positions": 9,
        "rope_positions": 9, "tied_head": True, "norm_eps": 1e-6, "ropes": (Rope(1e4),),
        "attn_scale": 1.0, "qkv_bias": False, "out_bias": False, "activation": "silu",
        "mlp_bias": False, "experts": Experts(COUNT, chosen, normalised),
    }  # fmt: skip
    return Arch(**{**usual, **changes})


def random_block(arch: Arch, seed: int = 0) -> dict[str, np.ndarray]:
    """A block's experts and router."""
    rng = np.random.default_rng(seed)
    names = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down", "w_router", "b_router")
    return {
        spec.name: (rng.standard_normal(spec.shape) * spec.shape[-1] ** -0.5).astype(np.float32)
        for spec in block_specs(arch)
        if spec.name in names
    }


def on_device(block: dict[str, np.ndarray], dtype: str = "float32") -> Block:
    return {name: jnp.asarray(array, dtype) for name, array in block.items()}


def tokens(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, SEQ, WIDTH)).astype(np.float32)


def expert(x: np.ndarray, block: dict[str, np.ndarray], number: int, arch: Arch) -> np.ndarray:
    """One expert on one token, in float64."""

    def layer(value: np.ndarray, name: str) -> np.ndarray:
        out = block[f"w_{name}"][number].astype(np.float64) @ value
        return out + block[f"b_{name}"][number] if f"b_{name}" in block else out

    up = layer(x, "up")
    if not arch.gated:
        return layer(np.maximum(up, 0.0), "down")
    gate, steepness = layer(x, "gate"), 1.702 if arch.activation == "quick_gelu" else 1.0
    if arch.glu_limit is not None:
        gate = np.minimum(gate, arch.glu_limit)
        up = np.clip(up, -arch.glu_limit, arch.glu_limit) + 1.0
    return layer(gate / (1.0 + np.exp(-steepness * gate)) * up, "down")


def routed(
    x: np.ndarray, block: dict[str, np.ndarray], experts: Experts
) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Return one token's scores, its chosen experts, best first, and their weights."""
    scores = block["w_router"].astype(np.float64) @ x + block.get("b_router", 0.0)
    ids = sorted(range(len(scores)), key=lambda i: -scores[i])[: experts.chosen]
    chances = np.exp(scores) / np.exp(scores).sum()
    weights = chances[ids]
    return scores, ids, weights / weights.sum() if experts.normalised else weights


def mixed(
    x: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    block: dict[str, np.ndarray],
    arch: Arch,
) -> np.ndarray:
    out = np.zeros(x.shape)
    for row, column in np.ndindex(*ids.shape[:2]):
        for weight, number in zip(weights[row, column], ids[row, column], strict=True):
            out[row, column] += weight * expert(x[row, column], block, number, arch)
    return out


def run_mix(
    x: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    block: dict[str, np.ndarray],
    arch: Arch,
) -> np.ndarray:
    given = (jnp.asarray(x), jnp.asarray(weights, jnp.float32), jnp.asarray(ids, jnp.int32))
    return np.asarray(MIX(*given, on_device(block), arch))


@pytest.mark.parametrize(
    ("chosen", "normalised", "biased"),
    some(
        itertools.product([1, 2, COUNT], [True, False], [True, False]),
        *((1, True, False), (2, True, True), (2, False, False), (COUNT, False, True)),
    ),
)
def test_each_token_is_routed_by_its_own_scores(
    chosen: int, normalised: bool, biased: bool
) -> None:
    arch = arch_of(chosen, normalised=normalised, mlp_bias=biased)
    assert arch.experts
    block, x = random_block(arch), tokens()
    assert ("b_router" in block) is biased
    logits, weights, ids = map(np.asarray, ROUTE(jnp.asarray(x), on_device(block), arch.experts))
    for place in np.ndindex(ROWS, SEQ):
        wanted_scores, wanted_ids, wanted_weights = routed(x[place], block, arch.experts)
        np.testing.assert_allclose(logits[place], wanted_scores, atol=1e-5)
        assert ids[place].tolist() == wanted_ids
        np.testing.assert_allclose(weights[place], wanted_weights, atol=1e-6)
    assert (np.diff(weights) <= 0).all(), "largest first"
    total = weights.sum(axis=-1)
    assert np.allclose(total, 1.0) is (normalised or chosen == COUNT)


@pytest.mark.parametrize("normalised", [True, False])
def test_of_equal_scores_the_first_are_chosen_and_each_only_once(normalised: bool) -> None:
    arch = arch_of(3, normalised=normalised)
    assert arch.experts
    block, x = random_block(arch), tokens()
    block["w_router"][:] = block["w_router"][0]
    _, weights, ids = map(np.asarray, ROUTE(jnp.asarray(x), on_device(block), arch.experts))
    assert (ids == np.arange(3)).all()
    np.testing.assert_allclose(weights, 1 / 3 if normalised else 1 / COUNT, atol=1e-6)
    block["w_router"][3] *= 100  # the largest for some tokens, the smallest for others
    _, _, ids = map(np.asarray, ROUTE(jnp.asarray(x), on_device(block), arch.experts))
    found = {tuple(place) for place in ids.reshape(-1, 3).tolist()}
    assert found == {(3, 0, 1), (0, 1, 2)}


@pytest.mark.parametrize(
    ("kind", "chosen"),
    some(
        itertools.product(KINDS, [1, 3, COUNT]),
        *(("plain", 1), ("clamped", 3)),
    ),
)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000))
def test_the_mix_is_that_of_the_chosen_experts(kind: str, chosen: int, seed: int) -> None:
    arch = arch_of(chosen, **KINDS[kind])
    rng = np.random.default_rng(seed)
    block, x = random_block(arch, seed), tokens(seed)
    ids = np.argsort(rng.random((ROWS, SEQ, COUNT)))[..., :chosen]
    weights = rng.random((ROWS, SEQ, chosen))
    wanted = mixed(x, weights, ids, block, arch)
    np.testing.assert_allclose(run_mix(x, weights, ids, block, arch), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", some(KINDS, "plain", "clamped"))
@pytest.mark.parametrize("number", [0, 3, COUNT - 1])
def test_no_token_is_dropped_when_all_choose_the_same_expert(kind: str, number: int) -> None:
    arch = arch_of(1, **KINDS[kind])
    block, x = random_block(arch), tokens()
    ids, weights = np.full((ROWS, SEQ, 1), number), np.ones((ROWS, SEQ, 1))
    found = run_mix(x, weights, ids, block, arch)
    np.testing.assert_allclose(found, mixed(x, weights, ids, block, arch), atol=1e-5)
    assert (np.abs(found).max(axis=-1) > 1e-3).all(), "every token has been there"


def test_a_tokens_mix_does_not_depend_on_the_others() -> None:
    arch = arch_of(2, **KINDS["biased"])
    rng = np.random.default_rng(3)
    block, x = random_block(arch), tokens()
    ids = np.argsort(rng.random((ROWS, SEQ, COUNT)))[..., :2]
    weights = rng.random((ROWS, SEQ, 2))
    before = run_mix(x, weights, ids, block, arch)
    others = np.ones((ROWS, SEQ), bool)
    others[1, 3] = False
    x[others] = rng.standard_normal((others.sum(), WIDTH))
    ids[others] = (ids[others] + 1) % COUNT
    after = run_mix(x, weights, ids, block, arch)
    np.testing.assert_allclose(after[1, 3], before[1, 3], atol=1e-6)
    assert np.abs(after - before)[others].max(axis=-1).min() > 1e-3


@pytest.mark.parametrize("kind", some(KINDS, "biased"))
def test_the_order_of_the_chosen_does_not_matter_and_their_weights_do(kind: str) -> None:
    arch = arch_of(2, **KINDS[kind])
    block, x = random_block(arch), tokens()
    ids = np.broadcast_to(np.array([4, 1]), (ROWS, SEQ, 2))
    weights = np.broadcast_to(np.array([0.9, 0.1]), (ROWS, SEQ, 2))
    found = run_mix(x, weights, ids, block, arch)
    turned = run_mix(x, weights[..., ::-1], ids[..., ::-1], block, arch)
    np.testing.assert_allclose(turned, found, atol=1e-6)
    swapped = run_mix(x, weights[..., ::-1], ids, block, arch)
    assert np.abs(swapped - found).max() > 1e-2


@pytest.mark.parametrize("kind", some(KINDS, "gated", "clamped"))
def test_bfloat16_stays_within_its_own_rounding(kind: str) -> None:
    arch = arch_of(2, **KINDS[kind])
    assert arch.experts
    block = on_device(random_block(arch), "bfloat16")
    x = jnp.asarray(tokens(), jnp.bfloat16)
    logits, weights, ids = ROUTE(x, block, arch.experts)
    assert logits.dtype == weights.dtype == jnp.bfloat16
    # the compiler may decide by the scores before they were rounded
    scores = np.asarray(logits, np.float32)
    taken = np.take_along_axis(scores, np.asarray(ids), axis=-1)
    np.testing.assert_allclose(taken, -np.sort(-scores)[..., :2], atol=2**-7)
    shares = np.exp(taken) / np.exp(taken).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(np.asarray(weights, np.float32), shares, atol=2**-7)
    out = MIX(x, weights, ids, block, arch)
    assert out.dtype == jnp.bfloat16
    host = {name: np.asarray(array, np.float32) for name, array in block.items()}
    inputs, shares = np.asarray(x, np.float32), np.asarray(weights, np.float32)
    exact = mixed(inputs, shares, np.asarray(ids), host, arch)
    assert np.abs(np.asarray(out, np.float32) - exact).max() < 2**-6 * np.abs(exact).max()


def test_rows_gathered_in_words_are_those_rows() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 12)), jnp.bfloat16)
    places = jnp.asarray([3, 0, 6, 3, 5])
    found = moe._rows_by_words(x, places)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x)[np.asarray(places)])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2), (2, 1)])
def test_corrected_scores_choose_and_plain_ones_weigh_as_in_hf(
    groups: int, chosen_groups: int, normalised: bool
) -> None:
    config = Dots1Config(
        hidden_size=WIDTH, n_routed_experts=8, num_experts_per_tok=3, n_group=groups,
        topk_group=chosen_groups, norm_topk_prob=normalised, routed_scaling_factor=2.5,
    )  # fmt: skip
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((8, WIDTH)).astype(np.float32)
    correction = rng.standard_normal(8).astype(np.float32)
    router: Any = Dots1TopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(torch.tensor(weight))
        router.e_score_correction_bias.copy_(torch.tensor(correction))
        logits, weights, ids = router(torch.tensor(tokens()))
    experts = Experts(
        8, 3, normalised, scored="sigmoid", corrected=True, groups=groups,
        chosen_groups=chosen_groups, scale=2.5, wide=True,
    )  # fmt: skip
    block = on_device({"w_router": weight, "correction": correction})
    found = [np.asarray(each).reshape(-1, each.shape[-1]) for each in
             ROUTE(jnp.asarray(tokens()), block, experts)]  # fmt: skip
    np.testing.assert_allclose(found[0], logits.numpy(), atol=1e-5)
    order = np.argsort(-weights.numpy(), axis=-1)  # theirs are not sorted
    np.testing.assert_allclose(
        found[1], np.take_along_axis(weights.numpy(), order, -1), rtol=1e-5, atol=1e-6
    )
    assert np.array_equal(found[2], np.take_along_axis(ids.numpy(), order, -1))
    plain = np.argsort(-logits.numpy(), axis=-1)[:, :3]
    assert (np.sort(plain) != np.sort(found[2])).any(), "the correction tells"


def rounded(values: np.ndarray) -> np.ndarray:
    """Values as float8 holds them, each row scaled to its largest."""
    numbers, scale = to_float8(jnp.asarray(values, jnp.float32))
    return np.asarray(numbers, np.float64) * np.asarray(scale, np.float64)[..., None]


@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts_in_float8_multiply_rounded_factors(weighs_input: bool) -> None:
    rng = np.random.default_rng(3)
    experts = Experts(COUNT, 2, normalised=True, weighs_input=weighs_input)
    arch = arch_of(experts=experts)
    exact = random_block(arch)
    block = on_device(exact, "bfloat16") | {
        name: Float8Weight.of(jnp.asarray(exact[name])) for name in ("w_gate", "w_up", "w_down")
    }
    x = jnp.asarray(rng.standard_normal((ROWS, SEQ, WIDTH)), jnp.bfloat16)
    _, weights, ids = ROUTE(x, block, experts)
    found = np.asarray(MIX(x, weights, ids, block, arch), np.float64)
    narrow = {name: rounded(exact[name]) for name in ("w_gate", "w_up", "w_down")}
    given, shares = rounded(np.asarray(x, np.float32)), np.asarray(weights, np.float64)
    wanted = np.zeros_like(found)
    for place in itertools.product(range(ROWS), range(SEQ), range(2)):
        row, token, _ = place
        expert, share = int(ids[place]), shares[place]
        read = given[row, token] * (share if weighs_input else 1.0)
        gate, up = (narrow[name][expert] @ read for name in ("w_gate", "w_up"))
        inner = gate / (1 + np.exp(-gate)) * up
        out = narrow["w_down"][expert] @ rounded(inner.astype(np.float32)[None])[0]
        wanted[row, token] += out * (1.0 if weighs_input else share)
    # Inner layers are rounded to bfloat16 first, which may move a number to the next of float8.
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)


@pytest.mark.full
def test_each_way_multiplies_float8_alike() -> None:
    rng = np.random.default_rng(4)
    sizes = (5, 0, 9, 3)
    x = Float8Rows(*to_float8(jnp.asarray(rng.standard_normal((20, 16)), jnp.float32)))
    w = Float8Weight.of(jnp.asarray(rng.standard_normal((4, 8, 16)), jnp.float32))
    runs = Groups(jnp.asarray(sizes), 20)
    owner = np.repeat(np.arange(4), sizes)
    rows = np.asarray(x.values, np.float64) * np.asarray(x.scale)[:, None]
    matrices = np.asarray(w.values, np.float64) * np.asarray(w.scale)[..., None]
    wanted = np.einsum("ri,roi->ro", rows[:17], matrices[owner])
    for way, close in ((tiled, 1e-5), (ragged, 2.0**-8)):
        found = np.asarray(way(runs)(x, w), np.float64)[:17]
        assert np.linalg.norm(found - wanted) <= close * np.linalg.norm(wanted)


def test_a_mix_that_is_differentiated_copies_no_words_and_calls_no_kernel() -> None:
    """jax would take the gradient of values that were copied as integers for zero."""
    arch = arch_of(2)
    block, x = random_block(arch, 0), tokens(0)
    ids = jnp.zeros((ROWS, SEQ, 2), jnp.int32).at[..., 1].set(1)
    weights = jnp.ones((ROWS, SEQ, 2), jnp.bfloat16)
    half = {name: jnp.asarray(array, jnp.bfloat16) for name, array in block.items()}

    def program(*, differentiable: bool) -> str:
        def out(x: Any) -> Any:
            return mix(x, weights, ids, half, arch, differentiable=differentiable)

        return str(jax.make_jaxpr(out)(jnp.asarray(x, jnp.bfloat16)))

    assert "bitcast" in program(differentiable=False)
    assert "bitcast" not in program(differentiable=True)


@pytest.mark.parametrize("kind", ["gated", "clamped"])
def test_a_gpus_kernels_route_copy_and_multiply(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered for a GPU that this machine need not have; the kernels have tests of their own."""
    for module in (grouped, moe):
        monkeypatch.setattr(module, "has_mosaic", lambda: True)
    arch = arch_of(width=256, mlp_width=256, **KINDS[kind])
    block = {
        spec.name: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for spec in block_specs(arch)
    }
    x = jax.ShapeDtypeStruct((ROWS, SEQ, 256), jnp.bfloat16)

    def mixed(x: jax.Array, block: Block) -> jax.Array:
        assert arch.experts
        return mix(x, *route(x, block, arch.experts)[1:], block, arch)

    text = jax.jit(mixed).trace(x, block).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("largest_scores", "places_for_experts", "rows_for_experts", "mosaic_gpu"):
        assert name in text
    assert "stablehlo.sort" not in text

"""Grouped products: the layout of rows, and the Hopper kernel compared with the tiles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.kernels import grouped
from spile.models.forward.kernels.grouped import EIGHT, Float8Rows, Gating, Groups
from spile.models.forward.ops import FLOAT8, Float8Weight, activate, to_float8
from support.marks import some

SIZES = (300, 0, 1, 211, 128, 0)
GATINGS = {
    "gpt-oss": Gating("quick_gelu", 7.0),
    "qwen": Gating("silu"),
    "gemma": Gating("gelu_pytorch_tanh"),
}


def test_runs_begin_at_multiples_and_hold_their_rows_in_order() -> None:
    expert = np.repeat(np.arange(len(SIZES)), SIZES)
    runs = Groups(jnp.asarray(SIZES), len(expert), EIGHT)
    places = np.asarray(runs.places(jnp.asarray(expert)))
    for number, size in enumerate(SIZES):
        own = places[expert == number]
        np.testing.assert_array_equal(own, int(runs.starts()[number]) + np.arange(size))
    assert not np.any(np.asarray(runs.starts()) % EIGHT)
    assert places.max() < runs.rows
    laid = np.asarray(runs.lay(jnp.arange(1, len(expert) + 1), jnp.asarray(expert)))
    np.testing.assert_array_equal(laid[places], np.arange(1, len(expert) + 1))
    assert np.count_nonzero(laid) == len(expert)


@pytest.mark.parametrize("runs", [1, 5])
def test_a_layout_has_room_for_any_sizes_and_nothing_beside_a_single_run(runs: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, 90, runs)
        layout = Groups(jnp.asarray(sizes), int(sizes.sum()), EIGHT)
        assert (-(-sizes // EIGHT) * EIGHT).sum() <= layout.rows
    assert Groups(jnp.asarray([4096]), 4096, EIGHT).rows == 4096


def test_the_inner_layer_of_a_plain_mlp_is_not_copied() -> None:
    x, matrix = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 512), (832, 512)))
    traced = jax.jit(partial(grouped.gated_product, gating=GATINGS["qwen"])).trace(
        x, matrix, matrix
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert not [each for each in text.splitlines() if "stablehlo.slice" in each and "832" in each]


def test_tiles_of_the_table_cover_each_run_once() -> None:
    runs = Groups(jnp.asarray(SIZES), sum(SIZES) + 50, EIGHT)  # 50 rows belong to nobody
    owner, first, left, used = map(np.asarray, grouped._table(runs))
    covered = np.full(runs.rows, -1)
    for tile in range(used[0]):
        rows = slice(EIGHT * first[tile], EIGHT * (first[tile] + left[tile]))
        assert left[tile] > 0 and np.all(covered[rows] == -1)
        covered[rows] = owner[tile]
    wanted = np.full(runs.rows, -1)
    for number, (start, size) in enumerate(zip(np.asarray(runs.starts()), SIZES, strict=True)):
        wanted[start : start + -(-size // EIGHT) * EIGHT] = number
    np.testing.assert_array_equal(covered, wanted)


# (No number of stages divides the second.)
@pytest.mark.parametrize("terms", some([512, 1408], 1408))
def test_the_hopper_kernel_is_lowered_by_this_jax(terms: int) -> None:
    def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return grouped.mosaic(Groups(sizes, 500, EIGHT))(x, w)

    rows = Groups(jnp.asarray(SIZES), 500, EIGHT).rows
    shapes = [
        jax.ShapeDtypeStruct((rows, terms), jnp.bfloat16),
        jax.ShapeDtypeStruct((len(SIZES), 832, terms), jnp.bfloat16),
        jax.ShapeDtypeStruct((len(SIZES),), jnp.int32),
    ]
    lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("gated", some([False, True], True))
def test_the_hopper_kernel_of_float8_is_lowered_by_this_jax(gated: bool) -> None:
    def run(rows: Float8Rows, w: Float8Weight, sizes: jax.Array) -> jax.Array:
        runs = Groups(sizes, 500, EIGHT)
        if gated:
            return grouped.mosaic_gated(runs, Gating("silu"))(rows, w, w)
        return grouped.mosaic(runs)(rows, w)

    rows = Groups(jnp.asarray(SIZES), 500, EIGHT).rows
    narrow, wide = (
        partial(jax.ShapeDtypeStruct, dtype=FLOAT8),
        partial(jax.ShapeDtypeStruct, dtype=jnp.float32),
    )
    shapes = [
        Float8Rows(narrow((rows, 768)), wide((rows,))),
        Float8Weight(narrow((len(SIZES), 832, 768)), wide((len(SIZES), 832))),
        jax.ShapeDtypeStruct((len(SIZES),), jnp.int32),
    ]
    lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("name", some(GATINGS, "gpt-oss"))
def test_the_hopper_kernel_of_gated_layers_is_lowered_by_this_jax(name: str) -> None:
    gating = GATINGS[name]

    def run(x: jax.Array, w: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        biases = (b, b) if gating.limit else None
        return grouped.mosaic_gated(Groups(sizes, 500, EIGHT), gating)(x, w, w, biases)

    rows = Groups(jnp.asarray(SIZES), 500, EIGHT).rows
    shapes = [
        jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((len(SIZES), 832, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((len(SIZES), 832), jnp.bfloat16),
        jax.ShapeDtypeStruct((len(SIZES),), jnp.int32),
    ]
    lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.skipif(not grouped.has_mosaic(), reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("sizes", "inner", "outer"),
    [
        (SIZES, 128, 256),
        ((0, 0, 0, 512), 192, 768),
        ((7, 9, 100, 90), 2880, 2880),
        ((9000, 3288), 256, 832),
        (tuple(range(512)), 1408, 512),
    ],
)
def test_the_hopper_kernel_multiplies_as_the_tiles_do(
    sizes: tuple[int, ...], inner: int, outer: int
) -> None:
    rng = np.random.default_rng(0)
    count = sum(sizes) + 100  # the last 100 belong to no expert
    x = jnp.asarray(rng.standard_normal((count, inner)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((len(sizes), outer, inner)) / inner**0.5, jnp.bfloat16)
    assert grouped.mosaic_serves(w)
    expert = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes).tolist() + [len(sizes) - 1] * 100)

    @partial(jax.jit, static_argnums=0)
    def run(aligned: int, x: jax.Array, w: jax.Array) -> jax.Array:
        runs = Groups(jnp.asarray(sizes), count, aligned)
        way = grouped.tiled if aligned == 1 else grouped.mosaic
        return way(runs)(x[runs.lay(jnp.arange(count), expert)], w)[runs.places(expert)]

    found, wanted = (np.asarray(run(n, x, w), np.float32)[: sum(sizes)] for n in (EIGHT, 1))
    assert np.linalg.norm(found - wanted) <= 4e-3 * np.linalg.norm(wanted)


@pytest.mark.skipif(not grouped.has_mosaic(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("gating", GATINGS.values(), ids=GATINGS)
@pytest.mark.parametrize(
    ("sizes", "inner", "outer"),
    [(SIZES, 128, 256), ((7, 9, 100, 90), 2880, 2880), ((9000, 3288), 256, 832)],
)
def test_the_hopper_kernel_of_gated_layers_activates_products(
    sizes: tuple[int, ...], inner: int, outer: int, gating: Gating
) -> None:
    rng = np.random.default_rng(0)
    count, experts = sum(sizes), len(sizes)
    x = jnp.asarray(rng.standard_normal((count, inner)), jnp.bfloat16)
    gate, up = (
        jnp.asarray(rng.standard_normal((experts, outer, inner)) / inner**0.5, jnp.bfloat16)
        for _ in range(2)
    )
    biases = rng.standard_normal((2, experts, outer)) if gating.limit else None
    expert = jnp.asarray(np.repeat(np.arange(experts), sizes))
    runs = Groups(jnp.asarray(sizes), count, EIGHT)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        given = x[runs.lay(jnp.arange(count), expert)]
        of = None if biases is None else tuple(jnp.asarray(biases, jnp.bfloat16))
        return grouped.mosaic_gated(runs, gating)(given, gate, up, of)[runs.places(expert)]

    @jax.jit
    def definition(x: jax.Array) -> jax.Array:
        wide = partial(grouped.tiled(Groups(jnp.asarray(sizes), count)), x.astype(jnp.float32))
        both = [wide(w.astype(jnp.float32)) for w in (gate, up)]
        if biases is not None:
            given = jnp.asarray(biases, jnp.bfloat16).astype(jnp.float32)
            both = [each + bias[expert] for each, bias in zip(both, given, strict=True)]
        return activate(both[1], both[0], *gating)

    found, wanted = (np.asarray(f(x), np.float32) for f in (run, definition))
    assert np.linalg.norm(found - wanted) <= 4e-3 * np.linalg.norm(wanted)


@pytest.mark.skipif(not grouped.has_mosaic(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("gating", [None, Gating("silu")])
@pytest.mark.parametrize(("sizes", "inner", "outer"), [(SIZES, 128, 256), ((700, 90), 768, 832)])
def test_the_hopper_kernel_multiplies_float8(
    sizes: tuple[int, ...], inner: int, outer: int, gating: Gating | None
) -> None:
    rng = np.random.default_rng(0)
    count, experts = sum(sizes), len(sizes)
    x = Float8Rows(*to_float8(jnp.asarray(rng.standard_normal((count, inner)), jnp.float32)))
    weights = rng.standard_normal((2, experts, outer, inner)) / inner**0.5
    gate, up = (Float8Weight.of(jnp.asarray(each, jnp.float32)) for each in weights)
    owner = np.repeat(np.arange(experts), sizes)
    runs = Groups(jnp.asarray(sizes), count, EIGHT)
    laid = runs.lay(jnp.arange(count), jnp.asarray(owner))
    rows = Float8Rows(x.values[laid], x.scale[laid])
    if gating:
        found = grouped.mosaic_gated(runs, gating)(rows, gate, up)
    else:
        found = grouped.mosaic(runs)(rows, up)
    found = np.asarray(found[runs.places(jnp.asarray(owner))], np.float64)
    read = np.asarray(x.values, np.float64) * np.asarray(x.scale, np.float64)[:, None]
    by_gate, by_up = (
        np.einsum(
            "ri,roi->ro",
            read,
            (np.asarray(w.values, np.float64) * np.asarray(w.scale)[..., None])[owner],
        )
        for w in (gate, up)
    )
    wanted = by_gate / (1 + np.exp(-by_gate)) * by_up if gating else by_up
    assert np.linalg.norm(found - wanted) <= 4e-3 * np.linalg.norm(wanted)

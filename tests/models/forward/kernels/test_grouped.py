"""Grouped products: the layout of rows, and the Hopper kernel compared with the tiles."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtr

from spile.models.forward.kernels import grouped
from spile.models.forward.kernels.grouped import EIGHT, Activation, Float8Rows, Groups
from spile.models.forward.ops import FLOAT8, Float8Weight, activate, to_float8
from support.marks import some

SIZES = (300, 0, 1, 211, 128, 0)
ACTIVATIONS = {
    "gpt-oss": Activation("quick_gelu", 7.0),
    "qwen": Activation("silu"),
    "gemma": Activation("gelu_pytorch_tanh"),
    "pythia": Activation("gelu"),  # without a gate
}


def laid_out(sizes: tuple[int, ...], aligned: int = EIGHT) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each row in the layout, and the row at each place (0 in gaps)."""
    room = [-(-size // aligned) * aligned for size in sizes]
    starts = np.cumsum(room) - room
    places = np.concatenate([begin + np.arange(n) for begin, n in zip(starts, sizes, strict=True)])
    rows = np.zeros(Groups(jnp.asarray(sizes), sum(sizes), aligned).rows, int)
    rows[places] = np.arange(sum(sizes))
    return places, rows


def test_runs_begin_at_multiples_one_after_the_other() -> None:
    runs = Groups(jnp.asarray(SIZES), sum(SIZES), EIGHT)
    places, _ = laid_out(SIZES)
    first = np.cumsum(SIZES) - SIZES
    for start, row, size in zip(np.asarray(runs.starts()), first, SIZES, strict=True):
        assert start % EIGHT == 0
        assert size == 0 or start == places[row]
    assert places.max() < runs.rows


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
    traced = jax.jit(partial(grouped.inner_layer, activation=ACTIVATIONS["qwen"])).trace(
        x, matrix, matrix, None
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
            return grouped.mosaic_activated(runs, Activation("silu"))(rows, w, w)
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


@pytest.mark.parametrize("name", some(ACTIVATIONS, "gpt-oss", "pythia"))
def test_the_hopper_kernel_of_inner_layers_is_lowered_by_this_jax(name: str) -> None:
    activation = ACTIVATIONS[name]

    def run(x: jax.Array, w: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        matrices, biases = ((w,), (b,)) if name == "pythia" else ((w, w), (b, b))
        multiply = grouped.mosaic_activated(Groups(sizes, 500, EIGHT), activation)
        return multiply(x, *matrices, biases=biases if activation.limit or name == "pythia" else ())

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

    @partial(jax.jit, static_argnums=0)
    def run(aligned: int, x: jax.Array, w: jax.Array) -> jax.Array:
        runs = Groups(jnp.asarray(sizes), count, aligned)
        places, rows = laid_out((*sizes[:-1], sizes[-1] + 100), aligned)
        way = grouped.tiled if aligned == 1 else grouped.mosaic
        return way(runs)(x[rows], w)[places]

    found, wanted = (np.asarray(run(n, x, w), np.float32)[: sum(sizes)] for n in (EIGHT, 1))
    assert np.linalg.norm(found - wanted) <= 4e-3 * np.linalg.norm(wanted)


@pytest.mark.skipif(not grouped.has_mosaic(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(
    ("sizes", "width", "outer"),
    [(SIZES, 128, 256), ((7, 9, 100, 90), 2880, 2880), ((9000, 3288), 256, 832)],
)
def test_the_hopper_kernel_of_inner_layers_activates_products(
    sizes: tuple[int, ...], width: int, outer: int, name: str
) -> None:
    rng = np.random.default_rng(0)
    count, experts = sum(sizes), len(sizes)
    activation, matrices = ACTIVATIONS[name], 1 if name == "pythia" else 2
    biased = bool(activation.limit) or matrices == 1
    x = jnp.asarray(rng.standard_normal((count, width)), jnp.bfloat16)
    weights = [
        jnp.asarray(rng.standard_normal((experts, outer, width)) / width**0.5, jnp.bfloat16)
        for _ in range(matrices)
    ]
    drawn = rng.standard_normal((matrices if biased else 0, experts, outer))
    biases = tuple(jnp.asarray(each, jnp.bfloat16) for each in drawn)
    expert = np.repeat(np.arange(experts), sizes)
    runs = Groups(jnp.asarray(sizes), count, EIGHT)
    places, rows = laid_out(sizes)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return grouped.mosaic_activated(runs, activation)(x[rows], *weights, biases=biases)[places]

    @jax.jit
    def definition(x: jax.Array) -> jax.Array:
        wide = partial(grouped.tiled(Groups(jnp.asarray(sizes), count)), x.astype(jnp.float32))
        products = [wide(w.astype(jnp.float32)) for w in weights]
        for number, bias in enumerate(biases):
            products[number] = products[number] + bias.astype(jnp.float32)[expert]
        return activate(products[0], products[1] if matrices == 2 else None, *activation)

    found, wanted = (np.asarray(f(x), np.float32) for f in (run, definition))
    assert np.linalg.norm(found - wanted) <= 4e-3 * np.linalg.norm(wanted)


def test_the_kernels_gelu_is_as_exact_as_bfloat16_even_where_it_is_tiny() -> None:
    x = jnp.linspace(-5.4, 5.4, 20_001)
    found = np.asarray(grouped._activated(x, activation=ACTIVATIONS["pythia"]), np.float64)
    wanted = np.asarray(x, np.float64) * ndtr(np.asarray(x, np.float64))
    np.testing.assert_allclose(found, wanted, rtol=3e-4)
    far = np.asarray(
        grouped._activated(jnp.asarray([-40.0, 40.0]), activation=ACTIVATIONS["pythia"])
    )
    np.testing.assert_array_equal(far, [0, 40])
    assert np.isnan(grouped._activated(jnp.asarray([jnp.nan]), activation=ACTIVATIONS["pythia"]))


@pytest.mark.skipif(not grouped.has_mosaic(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("activation", [None, Activation("silu")])
@pytest.mark.parametrize(("sizes", "width", "outer"), [(SIZES, 128, 256), ((700, 90), 768, 832)])
def test_the_hopper_kernel_multiplies_float8(
    sizes: tuple[int, ...], width: int, outer: int, activation: Activation | None
) -> None:
    rng = np.random.default_rng(0)
    count, experts = sum(sizes), len(sizes)
    x = Float8Rows(*to_float8(jnp.asarray(rng.standard_normal((count, width)), jnp.float32)))
    weights = rng.standard_normal((2, experts, outer, width)) / width**0.5
    gate, up = (Float8Weight.of(jnp.asarray(each, jnp.float32)) for each in weights)
    owner = np.repeat(np.arange(experts), sizes)
    runs = Groups(jnp.asarray(sizes), count, EIGHT)
    places, laid = laid_out(sizes)
    rows = Float8Rows(x.values[laid], x.scale[laid])
    if activation:
        found = grouped.mosaic_activated(runs, activation)(rows, up, gate)
    else:
        found = grouped.mosaic(runs)(rows, up)
    found = np.asarray(found[places], np.float64)
    read = np.asarray(x.values, np.float64) * np.asarray(x.scale, np.float64)[:, None]
    by_gate, by_up = (
        np.einsum(
            "ri,roi->ro",
            read,
            (np.asarray(w.values, np.float64) * np.asarray(w.scale)[..., None])[owner],
        )
        for w in (gate, up)
    )
    wanted = by_gate / (1 + np.exp(-by_gate)) * by_up if activation else by_up
    assert np.linalg.norm(found - wanted) <= 4e-3 * np.linalg.norm(wanted)

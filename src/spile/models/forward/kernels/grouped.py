"""Grouped products: each expert's matrix multiplies its own run of rows.

TPUs have an instruction for it, Hopper GPUs use a kernel written here, and all other devices
multiply tiles in batched products.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product as pairs
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spile.models.forward.ops import (
    FLOAT8,
    Float8Weight,
    activate,
    gpu_capability,
    product,
)

_GATHERED = 1 << 28  # most bytes of expert weights to gather at once
_MOSAIC = "jax.experimental.pallas.mosaic_gpu"
# A tile of the Hopper kernel: its rows, its columns, and the bytes of the terms that it adds up at
# once. These shapes were the fastest (docs/benchmarks.md).
_ROWS, _COLUMNS, _TERM_BYTES = 128, 256, 128
_FEWER = 192  # columns of a tile, if that leaves less of the last tile empty
_CORES = 132  # multiprocessors of an H100 or H200, if the device does not report its own
_STORED = 64  # rows and columns that are stored at once
EIGHT = 8  # the GPU copies rows in multiples of this

# Activations that the Hopper kernel has.
_SERVED = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu")
# Terms of a polynomial that is a normal distribution's tail beyond u, divided by its density
# exp(-u * u / 2), up to _FAR: at most 2.4e-4 of it wrong, an eighth of what bfloat16 rounds.
_TAIL = (
    4.9990437e-01, -3.9645546e-01, 2.3821835e-01, -1.0957696e-01, 3.6828319e-02,
    -8.5135841e-03, 1.2605459e-03, -1.0663695e-04, 3.8993847e-06,
)  # fmt: skip
_FAR = 5.5


class Float8Rows(NamedTuple):
    """Rows in float8, with a scale for each."""

    values: Float[Array, "rows in"]
    scale: Float[Array, " rows"]


ExpertRows: TypeAlias = Float[Array, "rows in"] | Float8Rows
Matrices: TypeAlias = Float[Array, "experts out in"] | Float8Weight
# Both in float8, or neither.
Grouped: TypeAlias = Callable[[ExpertRows, Matrices], Array]


@dataclass(frozen=True, eq=False)
class Groups:
    """The layout of rows by expert: one run of `sizes[i]` rows for each expert i, in order."""

    sizes: Int[Array, " experts"]
    count: int  # all rows, including those that belong to no expert
    aligned: int = 1  # each run begins at a multiple of this; for the Hopper kernel, `EIGHT`

    @property
    def rows(self) -> int:
        """The number of rows in the layout, including the gaps between runs."""
        if self.aligned == 1:
            return self.count
        # (Of one run, all rows are its own: nothing has to be cut off.)
        gaps = (self.aligned - 1) * len(self.sizes)
        return max(_ROWS, (self.count + gaps) // self.aligned * self.aligned)

    def starts(self) -> Int[Array, " experts"]:
        room = -(-self.sizes // self.aligned) * self.aligned
        return jnp.cumsum(room) - room


def unscaled(values: ExpertRows | Matrices) -> Array:
    """Return the numbers to multiply, without their scales."""
    return values.values if isinstance(values, (Float8Rows, Float8Weight)) else values


def scaled_by_row(products: Float[Array, "rows out"], x: ExpertRows) -> Array:
    return products * x.scale[:, None] if isinstance(x, Float8Rows) else products


def ragged(runs: Groups) -> Grouped:
    """Multiply by the TPU's instruction. (On other devices it would multiply by all experts.)"""

    def multiply(x: ExpertRows, w: Matrices) -> Array:
        if not isinstance(w, Float8Weight):
            return by_instruction(unscaled(x), w)
        # bfloat16 holds every number of float8.
        given, by = unscaled(x).astype(jnp.bfloat16), w.values.astype(jnp.bfloat16)
        y = by_instruction(given, by, jnp.float32)
        experts = jnp.arange(len(runs.sizes))
        of = jnp.repeat(experts, runs.sizes, total_repeat_length=runs.count)
        return scaled_by_row(y * w.scale[of], x).astype(jnp.bfloat16)

    def by_instruction(x: Array, w: Array, dtype: Any = None) -> Array:
        return jax.lax.ragged_dot(x, w.swapaxes(1, 2), runs.sizes, preferred_element_type=dtype)

    return multiply


def tiled(runs: Groups) -> Grouped:
    """Cut each expert's run of rows into tiles, and multiply them in batched products.

    A tile holds rows of one expert only, so the last tile of a run is padded. The number of tiles
    does not depend on the routing: it is the number that the rows fill, plus one for each expert.
    A tile is at most a quarter of a mean run (except for very few rows), so this adds at most a
    quarter. Float8 is multiplied in float32.
    """
    sizes, count, experts = runs.sizes, runs.count, len(runs.sizes)
    tile = min(1024, max(8, 1 << (max(1, count // (4 * experts)).bit_length() - 1)))

    def multiply_all(x: ExpertRows, w: Matrices) -> Array:
        rows, weights = unscaled(x), unscaled(w)
        item = max(weights.dtype.itemsize, 4 if isinstance(w, Float8Weight) else 0)
        chunk = max(1, _GATHERED // (weights[0].size * item))
        tiles = -(-count // tile) + experts
        chunk = min(chunk, tiles)
        owner, within, used = _tiles(sizes, tile, -(-tiles // chunk) * chunk)
        first = (jnp.cumsum(sizes) - sizes)[owner] + within * tile
        places = first[:, None] + jnp.arange(tile)[None, :]
        limit = jnp.where(jnp.arange(len(owner)) < used, jnp.cumsum(sizes)[owner], 0)
        places = jnp.where(places < limit[:, None], places, count)  # `count`: padding

        def multiply(part: tuple[Array, Array]) -> Array:
            places, owner = part
            gathered = rows.at[places].get(mode="fill", fill_value=0)
            if not isinstance(w, Float8Weight):
                return product("tni,toi->tno", gathered, weights[owner])
            wide = (a.astype(jnp.float32) for a in (gathered, weights[owner]))
            return product("tni,toi->tno", *wide) * w.scale[owner][:, None, :]

        parts = (places.reshape(-1, chunk, tile), owner.reshape(-1, chunk))
        out = jax.lax.map(multiply, parts).reshape(len(owner) * tile, -1)
        whole = jnp.zeros((count, out.shape[-1]), out.dtype)
        whole = whole.at[places.reshape(-1)].set(out, mode="drop")
        return scaled_by_row(whole, x)

    return multiply_all


def _tiles(
    sizes: Int[Array, " experts"], tile: int, tiles: int
) -> tuple[Int[Array, " tiles"], Int[Array, " tiles"], Int[Array, ""]]:
    """Return each tile's expert and its number within its run; and the number of tiles."""
    each = -(-sizes // tile)
    ends = jnp.cumsum(each)
    number = jnp.arange(tiles)
    # Comparing with all ends is one small kernel, where a binary search is one for each step.
    passed = jnp.sum(number[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(passed, len(sizes) - 1)
    return owner, number - (ends - each)[owner], ends[-1]


def mosaic_serves(*matrices: Matrices) -> bool:
    """Return whether the Hopper kernel can multiply by these weights here."""

    def served(w: Array) -> bool:
        _, columns, terms = w.shape
        fits = columns >= _COLUMNS and columns % _STORED == 0
        fits = fits and terms * w.dtype.itemsize % _TERM_BYTES == 0
        return fits and w.dtype in (jnp.bfloat16, jnp.float16, FLOAT8)

    return all(served(unscaled(w)) for w in matrices) and has_mosaic()


@cache
def has_mosaic() -> bool:
    """Return whether this process has a Hopper GPU, which the kernel needs."""
    return 9 <= gpu_capability() < 10 and importlib.util.find_spec(_MOSAIC) is not None


def mosaic(runs: Groups) -> Grouped:
    """Multiply by a Hopper kernel that looks up a tile's expert in a table.

    jax's own kernel (`ragged_dot_mgpu`) searches all experts in every tile, so with 512 experts it
    is 6 to 15 times as slow. Rows that belong to no expert are left unset.
    """
    table = _table(runs)
    return lambda x, w: _multiplied(runs, table, x, [w])


class Activation(NamedTuple):
    """How products become the inner layer of an MLP: arguments of `activate`."""

    name: str
    limit: float | None = None

    def serves(self, dtype: jnp.dtype) -> bool:
        """Return whether the Hopper kernel can compute it. (float16 products are bounded first.)"""
        bounded = self.name == "gelu" and self.limit is not None
        return self.name in _SERVED and not bounded and dtype == jnp.bfloat16


def mosaic_activated(runs: Groups, activation: Activation) -> Callable[..., Array]:
    """Multiply by up's matrix, and by the gate's if there is one, and activate, in one kernel.

    Rows are read once, products are never rounded or stored, and half as many values leave the
    kernel as two products have.
    """
    table = _table(runs)

    def multiply(
        x: ExpertRows,
        up: Matrices,
        gate: Matrices | None = None,
        biases: tuple[Array, ...] = (),  # of up, and of the gate
    ) -> Array:
        matrices = [up] if gate is None else [up, gate]
        return _multiplied(runs, table, x, matrices, activation, biases)

    return multiply


def inner_layer(
    x: Float[Array, "rows in"],
    up: Float[Array, "out in"],
    gate: Float[Array, "out in"] | None,
    bias: Float[Array, " out"] | None,
    activation: Activation,
) -> Float[Array, "rows out"]:
    """Return the inner layer of an MLP: by one kernel on a GPU, as for one expert.

    Args:
        bias: that of `up`, if there is no gate.
    """

    def fused(x: Array, up: Array, gate: Array | None, bias: Array | None) -> Array:
        runs = Groups(jnp.full(1, len(x)), len(x), EIGHT)
        others = () if bias is None else (bias[None],)
        of_gate = None if gate is None else gate[None]
        return mosaic_activated(runs, activation)(x, up[None], of_gate, others)[: len(x)]

    def plain(x: Array, up: Array, gate: Array | None, bias: Array | None) -> Array:
        by = partial(product, "...i,oi->...o", x)
        products = by(up) if bias is None else by(up) + bias[None]
        return activate(products, None if gate is None else by(gate), *activation)

    return jax.lax.platform_dependent(x, up, gate, bias, cuda=fused, default=plain)


def _multiplied(
    runs: Groups,
    table: list[Int[Array, " tiles"]],
    x: ExpertRows,
    matrices: list[Matrices],
    activation: Activation | None = None,
    biases: tuple[Array, ...] = (),
) -> Array:
    """Run the Hopper kernel."""

    def wide(values: Array) -> Array:  # a tile reads whole columns of these
        over = -values.shape[1] % _columns(values.shape[1], len(matrices))
        return jnp.pad(values.astype(jnp.float32), ((0, 0), (0, over)))

    scales: list[Array] = []
    if isinstance(x, Float8Rows):
        x, scales = x.values, [jnp.pad(x.scale, (0, _ROWS))]
        scales += [wide(w.scale) for w in matrices if isinstance(w, Float8Weight)]
    given = [unscaled(w) for w in matrices]
    run = _hopper(x.shape[1], given[0].shape[1], x.dtype, runs.rows, len(matrices), activation)
    return run(*table, x, *given, *scales, *map(wide, biases))


def _table(runs: Groups) -> list[Int[Array, " tiles"]]:
    """Return each tile's expert, first row and number of rows, the latter two in eights.

    The last array holds the number of tiles that have rows.
    """
    eights = -(-runs.sizes // EIGHT)
    tiles = -(-runs.rows // _ROWS) + len(runs.sizes)
    owner, within, used = _tiles(eights * EIGHT, _ROWS, tiles)
    step = _ROWS // EIGHT
    first = runs.starts()[owner] // EIGHT + within * step
    left = jnp.clip(eights[owner] - within * step, 0, step)
    return [values.astype(jnp.int32) for values in (owner, first, left, used[None])]


def _columns(columns: int, matrices: int) -> int:
    """Return the columns of the result in a tile."""
    if matrices > 1:
        return _COLUMNS // 2
    computed = {wide: -(-columns // wide) * wide for wide in (_COLUMNS, _FEWER)}
    # Wider tiles read less for each product.
    return _FEWER if 1.03 * computed[_FEWER] < computed[_COLUMNS] else _COLUMNS


@cache
def _hopper(
    terms: int, columns: int, dtype: Any, rows: int, count: int, activation: Activation | None
) -> Callable[..., Array]:
    """Return the kernel: persistent, with one warpgroup that loads and two that multiply.

    It takes the table of `_table`, which counts in eights because the GPU copies eight rows whole.
    Each warpgroup has half of a tile's columns, or half of its rows: with two matrices, it has both
    products of a value; and half of 192 columns are no two blocks of `_STORED`. Rows and matrices
    in float8 come with their scales, those of an inner layer with biases or without.

    Args:
        count: the number of matrices: two if there is a gate.
    """
    pl: Any = importlib.import_module("jax.experimental.pallas")
    gpu: Any = importlib.import_module(_MOSAIC)
    at_once = _TERM_BYTES // dtype.itemsize
    steps = terms // at_once
    result = jnp.dtype(jnp.bfloat16) if dtype == FLOAT8 else dtype
    # If the number of stages divides a tile's steps, the next tile loads while one is stored.
    stages = next((n for n in (4, 3) if steps % n == 0), 4)
    follows = steps % stages == 0
    wide = _columns(columns, count)
    by_rows = wide < _COLUMNS
    # The rows and columns of a tile that a warpgroup has.
    tall, own = (_ROWS // 2, wide) if by_rows else (_ROWS, wide // 2)
    across = -(-columns // wide)
    # jax 0.10 requires an index beside the reference, 0.11 warns of one.
    required = inspect.signature(gpu.load).parameters["idx"].default is inspect.Parameter.empty
    no_index = {"idx": None} if required else {}

    def swizzled(values: int) -> tuple[Any, Any]:
        return gpu.TilingTransform((8, values)), gpu.SwizzleTransform(_TERM_BYTES)

    def pipeline(body: Any, context: Any, state: Any = None) -> Any:
        specs = [
            gpu.BlockSpec((size, at_once), lambda k: (0, k), transforms=swizzled(at_once))
            for size in (_ROWS, *(wide,) * count)
        ]
        return gpu.emit_pipeline_warp_specialized(
            body, grid=(steps,), memory_registers=40, in_specs=specs, wg_axis="group",
            num_compute_wgs=2, max_concurrent_steps=stages, compute_context=context,
            pipeline_state=state,
        )  # fmt: skip

    def grouped_product(
        owners: Any, firsts: Any, lefts: Any, used: Any, x: Any, *rest: Any
    ) -> None:
        matrices, others, out = rest[:count], rest[count:-1], rest[-1]
        scales = others[: 1 + count] if dtype == FLOAT8 else ()
        biases = others[len(scales) :]

        def nothing(*_: Any) -> None:
            return None

        @partial(
            pl.run_scoped,
            buffers=pipeline(nothing, nothing).get_allocations(x, *(w.at[0] for w in matrices)),
            stored=gpu.SMEM((2, 2, _STORED, _STORED), result, transforms=swizzled(_STORED)),
            collective_axes="group",
        )
        def scope(buffers: Any, stored: Any) -> None:
            group = jax.lax.axis_index("group")
            tiles = used[0]

            @gpu.nd_loop((tiles * across,), collective_axes="sm")
            def loop(info: Any) -> None:
                tile, column = gpu.planar_snake(info.index[0], (tiles, across), 0, 4)
                first, left, owner = firsts[tile] * EIGHT, lefts[tile] * EIGHT, owners[tile]
                down, within = (group * tall, 0) if by_rows else (0, group * own)
                mine = pl.ds(down, tall) if by_rows else pl.ds(within, own)
                over = column * wide + within

                def multiply(_: Any, given: Any, *rest: Any) -> Any:
                    weights, totals = rest[:-1], rest[-1]
                    given = given.at[mine] if by_rows else given
                    for total, weight in zip(totals, weights, strict=True):
                        part = weight if by_rows else weight.at[mine]
                        gpu.wgmma(total, given, gpu.transpose_ref(part, (1, 0)))
                    gpu.wgmma_wait(0)
                    return totals

                def finish(run: Any) -> None:
                    def sums(*totals: Any) -> None:
                        run(totals)
                        store(combined([total[...] for total in totals]).astype(result))

                    pl.run_scoped(sums, *[gpu.ACC((tall, own), jnp.float32) for _ in matrices])

                def spread(values: Any, where: tuple[Any, ...], axis: int) -> Any:
                    loaded = gpu.load(values.at[where], **no_index, optimized=False)
                    return jax.lax.broadcast_in_dim(loaded, (tall, own), (axis,))

                def combined(products: list[Any]) -> Any:
                    """Return the values to store of a tile's products."""
                    if scales:
                        by_row = spread(scales[0], (pl.ds(first + down, tall),), 0)
                        products = [each * by_row for each in products]
                    there = (owner, pl.ds(over, own))
                    for number, scale in enumerate(scales[1:]):
                        products[number] = products[number] * spread(scale, there, 1)
                    for number, bias in enumerate(biases):
                        products[number] = products[number] + spread(bias, there, 1)
                    return (
                        products[0]
                        if activation is None
                        else _activated(*products, activation=activation)
                    )

                def store(values: Any) -> None:
                    places = pairs(range(0, tall, _STORED), range(0, own, _STORED))
                    for number, (row, at) in enumerate(places):
                        piece = stored.at[group, number % 2]
                        gpu.wait_smem_to_gmem(1, wait_read_only=True)
                        piece[...] = values[row : row + _STORED, at : at + _STORED]
                        gpu.commit_smem()
                        to = out.at[:, pl.ds(over + at, _STORED)]
                        begin = down + row
                        _store_some(pl, gpu, piece, to, first + begin, left - begin)
                        gpu.commit_smem_to_gmem_group()

                state = None
                if follows:
                    last = info.local_index == info.num_local_steps - 1
                    kinds = gpu.PipelinePipeline
                    state = jnp.where(last, int(kinds.STOP), int(kinds.STEADY))
                    state = jnp.where(info.local_index == 0, int(kinds.START), state)
                parts = [w.at[owner, pl.ds(column * wide, wide), :] for w in matrices]
                run = pipeline(multiply, finish, state)
                run(x.at[pl.ds(first, _ROWS), :], *parts, allocations=buffers)

        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    return gpu.kernel(
        grouped_product,
        out_type=jax.ShapeDtypeStruct((rows, columns), result),
        grid=(getattr(jax.local_devices()[0], "core_count", None) or _CORES,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="group",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Warpgroup,
        ),
    )


def _activated(up: Any, gate: Any = None, *, activation: Activation) -> Any:
    """Do what `activate` does, without the error function, which the kernel has not."""
    if activation.name != "gelu":
        return activate(up, gate, *activation)
    x = up if gate is None else gate
    size = jnp.abs(x)
    # (2 to the power of a number is fewer instructions than e to it.)
    density = jnp.exp2(-0.5 * math.log2(math.e) * x * x)
    tail = _polynomial(jnp.minimum(size, _FAR)) * density
    active = jnp.maximum(x, 0.0) - size * tail
    return active if gate is None else active * up


def _polynomial(u: Any) -> Any:
    total = jnp.full_like(u, _TAIL[-1])
    for term in _TAIL[-2::-1]:
        total = total * u + term
    return total


def _store_some(pl: Any, gpu: Any, piece: Any, out: Any, first: Any, left: Any) -> None:
    """Store the remaining rows of a piece: all of them, or runs of 32, 16 and 8."""

    @pl.when(left >= _STORED)
    def whole() -> None:
        gpu.copy_smem_to_gmem(piece, out.at[pl.ds(first, _STORED)], commit_group=False)

    size = _STORED // 2
    while size >= EIGHT:
        done = left // (2 * size) * (2 * size)

        @pl.when((left > 0) & (left < _STORED) & (left // size % 2 == 1))
        def part(size: int = size, done: Any = done) -> None:
            given, to = piece.at[pl.ds(done, size)], out.at[pl.ds(first + done, size)]
            gpu.copy_smem_to_gmem(given, to, commit_group=False)

        size //= 2

"""The rule of `mixers.decay_by_channel` in two kernels for GPUs.

As `gated_delta`: the first kernel solves what each chunk's tokens write, for all chunks side by
side; the second goes through the chunks in sequence, with the state in registers. But the decay
between two tokens is part of their products, so keys and queries are decayed before they are
multiplied. Pairs of tokens are ordered by the border between them: that of two neighbouring blocks
of 1, 2, 4 … tokens. The decay from a token to the border, or since it, is at most one, so one
product has all pairs of a size. The first kernel also multiplies by the inverse, which leaves one
product less in the sequence. Decayed keys and queries are rounded to 16 bits, so what multiplies
written values is not: it is in TF32.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from spile.models.forward.kernels.chunks import (
    LEAST,
    columns_of,
    dot,
    dot_by_columns,
    dot_by_rows,
    in_whole_chunks,
    inverse_of_unit_lower,
    rows_of,
)
from spile.models.forward.ops import Heads, Scalars


class ChannelTiling(NamedTuple):
    """How programs run."""

    chunk: int = 16  # tokens
    solve_warps: int = 4
    warps: int = 4
    stages: int = 3
    split: int = 2  # programs for each head of the second kernel, each with a part of the values


FASTEST = ChannelTiling()  # of those tried (docs/benchmarks.md)


def rule(
    q: Heads,
    k: Heads,
    v: Heads,
    written: Scalars,
    kept: Heads,
    segments: Int[Array, "rows seq"],
    *,
    eps: float,
    tiling: ChannelTiling = FASTEST,
    interpret: bool = False,
) -> Heads:
    """Return what queries read, in the dtype of the values.

    Args:
        q: queries before they are normalised, as are the keys.
        written: the share of the value under its key that a token replaces.
        kept: the log-decay of each channel of the state.
        eps: what the norms of queries and keys add to the sum of squares.
    """
    rows, seq, heads, dim = v.shape
    size = tiling.chunk
    q, k, v, written, kept = (in_whole_chunks(a, size) for a in (q, k, v, written, kept))
    segments = in_whole_chunks(segments, size, fill=-1)
    chunks, channels = v.shape[1] // size, q.shape[-1]
    strength = jnp.moveaxis(written.astype(jnp.float32), 1, 2)
    decayed = jax.ShapeDtypeStruct(q.shape, v.dtype)
    solve: Any = pl.pallas_call(
        partial(_solve, size=size, eps=eps),
        out_shape=(
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            jax.ShapeDtypeStruct((rows, heads, chunks, size, size), jnp.float32),
            decayed,
            decayed,
            decayed,
            jax.ShapeDtypeStruct((rows, heads, chunks, channels), jnp.float32),
        ),
        grid=(rows, chunks, heads),
        compiler_params=triton.CompilerParams(num_warps=tiling.solve_warps, num_stages=1),
        name="decay_by_channel_solve",
        interpret=interpret,
    )
    solved = solve(q, k, v, strength, _summed(kept.astype(jnp.float32), size), segments)
    part = max(LEAST, dim // tiling.split)
    run: Any = pl.pallas_call(
        partial(_chunks, size=size, part=part),
        out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(rows, heads, dim // part),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        name="decay_by_channel_rule",
        interpret=interpret,
    )
    return run(*solved)[:, :seq]


def _summed(kept: Heads, size: int) -> Heads:
    """Return the log-decay up to each token of its chunk. (One product, where a scan is many.)"""
    chunks = kept.reshape(kept.shape[0], -1, size, kept.shape[2] * kept.shape[3])
    until = jnp.tril(jnp.ones((size, size), jnp.float32))
    summed = jnp.einsum("tj,rnjd->rntd", until, chunks, precision=jax.lax.Precision.HIGHEST)
    return summed.reshape(kept.shape)


def _solve(
    q: Any, k: Any, v: Any, written: Any, sums: Any, segments: Any,
    fresh: Any, scores: Any, asking: Any, known: Any, lasting: Any, left: Any,
    *, size: int, eps: float,
) -> None:  # fmt: skip
    row, number, head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first = number * size
    here, token = pl.ds(first, size), jnp.arange(size)
    channel = jnp.arange(q.shape[-1])
    dtype = asking.dtype

    def normed(given: Any) -> Float[Array, "size dim"]:
        wide = given[row, here, head, :].astype(jnp.float32)
        return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + eps)[:, None]

    asked, keys = normed(q) * q.shape[-1] ** -0.5, normed(k)
    summed = sums[row, here, head, :]
    line, column = rows_of(size), columns_of(size)
    by_query = jnp.where(line == column, jnp.sum(asked * keys, axis=1)[:, None], 0.0)

    def meet(number: Array, products: tuple[Array, Array]) -> tuple[Array, Array]:
        width = jnp.left_shift(1, number)
        # The last token of the first of two neighbouring blocks.
        border = first + (token & (-2 * width)) + width - 1
        there = triton.load(sums.at[row, border[:, None], head, channel[None, :]])
        later = ((token & width) != 0)[:, None]
        decay = jnp.exp(jnp.where(later, summed - there, there - summed))
        key, query = (keys * decay).astype(dtype), (asked * decay).astype(dtype)
        # A token of the second block, and one of the first.
        pair = ((line & width) != 0) & ((column & -width) == (line & -width) - width)
        by_key, by_query = products
        by_key = jnp.where(pair, dot_by_rows(key, key), by_key)
        return by_key, jnp.where(pair, dot_by_rows(query, key), by_query)

    # (In a loop: all widths at once would not fit in registers.)
    begin = jnp.zeros((size, size), jnp.float32), by_query
    by_key, by_query = jax.lax.fori_loop(0, size.bit_length() - 1, meet, begin)
    places = segments[row, here]
    before = jnp.where(number == 0, -1, segments[row, jnp.maximum(first - 1, 0)])
    last, end = segments[row, first + size - 1], sums[row, first + size - 1, head, :]
    seen = places[:, None] == places[None, :]
    strength = written[row, head, here]
    below = jnp.where(seen, by_key * strength[:, None], 0.0)
    solved = inverse_of_unit_lower(below, None) * strength[None, :]
    scores[row, head, number] = jnp.where(seen, by_query, 0.0)
    since = jnp.where((places == before)[:, None], jnp.exp(summed), 0.0)
    asking[row, here, head, :] = (asked * since).astype(dtype)
    # What tokens write if the chunk begins with an empty state, and what they take from each value
    # of the state.
    fresh[row, here, head, :] = dot(solved, v[row, here, head, :].astype(jnp.float32))
    known[row, here, head, :] = dot(solved, keys * since).astype(dtype)
    lasts = jnp.where((places == last)[:, None], jnp.exp(end[None, :] - summed), 0.0)
    lasting[row, here, head, :] = (keys * lasts).astype(dtype)
    left[row, head, number] = jnp.where(last == before, jnp.exp(end), 0.0)


def _chunks(
    fresh: Any, scores: Any, asking: Any, known: Any, lasting: Any, left: Any, out: Any,
    *, size: int, part: int,
) -> None:  # fmt: skip
    row, head, dims = pl.program_id(0), pl.program_id(1), pl.ds(pl.program_id(2) * part, part)
    dtype = out.dtype

    def step(number: Array, state: Array) -> Array:
        here = pl.ds(number * size, size)
        held = state.astype(dtype)
        wrote = fresh[row, here, head, dims] - dot(known[row, here, head, :], held)
        read = dot(asking[row, here, head, :], held) + dot(scores[row, head, number], wrote)
        out[row, here, head, dims] = read.astype(dtype)
        lasts = dot_by_columns(lasting[row, here, head, :], wrote.astype(dtype))
        return state * left[row, head, number][:, None] + lasts

    begin = jnp.zeros((known.shape[-1], part), jnp.float32)
    jax.lax.fori_loop(0, out.shape[1] // size, step, begin)

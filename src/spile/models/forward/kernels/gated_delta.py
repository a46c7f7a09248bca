"""The rule of `mixers.gated_delta` in two kernels.

What a chunk's tokens write depends on what earlier ones wrote. The first kernel solves that for all
chunks side by side, and scales queries and keys. The second goes through the chunks in sequence,
with the state in registers. Products multiply in 16 bits and sum in float32; the inverse is in
TF32, and the state stays in float32.
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
    decay,
    dot,
    dot_by_columns,
    dot_by_rows,
    in_whole_chunks,
    inverse_of_unit_lower,
    rows_of,
)
from spile.models.forward.ops import Heads, Scalars


class DeltaTiling(NamedTuple):
    """How programs run."""

    chunk: int = 64  # tokens
    solve_warps: int = 4
    warps: int = 4
    stages: int = 3
    split: int = 2  # programs for each head of the second kernel, each with a part of the values
    precision: jax.lax.DotAlgorithmPreset | None = None  # of the inverse: TF32


FASTEST = DeltaTiling()  # of those tried on an H200 (docs/benchmarks.md)


def rule(
    q: Float[Array, "rows seq keys dim"],
    k: Float[Array, "rows seq keys dim"],
    v: Heads,
    written: Scalars,
    kept: Scalars,
    segments: Int[Array, "rows seq"],
    *,
    eps: float,
    tiling: DeltaTiling = FASTEST,
    interpret: bool = False,
) -> Heads:
    """Return what queries read, in the dtype of the values.

    Args:
        q: queries before they are normalised, as are the keys.
        written: the share of the value under its key that a token replaces.
        kept: the log-decay of the state.
        eps: what the norms of queries and keys add to the sum of squares.
    """
    rows, seq, heads, dim = v.shape
    size, each = tiling.chunk, heads // q.shape[2]
    q, k, v, written, kept = (in_whole_chunks(a, size) for a in (q, k, v, written, kept))
    segments = in_whole_chunks(segments, size, fill=-1)
    chunks = v.shape[1] // size
    by_head = [jnp.moveaxis(a.astype(jnp.float32), 1, 2) for a in (written, kept)]
    square = jax.ShapeDtypeStruct((rows, heads, chunks, size, size), v.dtype)
    scale = jax.ShapeDtypeStruct((rows, heads, v.shape[1]), jnp.float32)
    solve: Any = pl.pallas_call(
        partial(_solve, size=size, each=each, eps=eps, precision=tiling.precision),
        out_shape=(
            square,
            square,
            scale,
            scale,
            scale,
            jax.ShapeDtypeStruct((rows, heads, chunks), jnp.float32),
        ),
        grid=(rows, chunks, heads),
        compiler_params=triton.CompilerParams(num_warps=tiling.solve_warps, num_stages=1),
        name="gated_delta_solve",
        interpret=interpret,
    )
    solved = solve(q, k, *by_head, segments)
    part = max(LEAST, dim // tiling.split)
    run: Any = pl.pallas_call(
        partial(_chunks, size=size, part=part, each=each),
        out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(rows, heads, dim // part),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        name="gated_delta_rule",
        interpret=interpret,
    )
    return run(q, k, v, *solved)[:, :seq]


def _solve(
    q: Any, k: Any, written: Any, kept: Any, segments: Any,
    solved: Any, scores: Any, asking: Any, known: Any, lasting: Any, left: Any,
    *, size: int, each: int, eps: float, precision: jax.lax.DotAlgorithmPreset | None,
) -> None:  # fmt: skip
    row, number, head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first = number * size
    here = pl.ds(first, size)
    asked, keys = q[row, here, head // each, :], k[row, here, head // each, :]
    before = jnp.where(number == 0, -1, segments[row, jnp.maximum(first - 1, 0)])
    own = decay(kept[row, head, here], segments[row, here], before, segments[row, first + size - 1])
    ask, key = _norm(asked, eps) * q.shape[-1] ** -0.5, _norm(keys, eps)
    strength = written[row, head, here]
    by_key = dot_by_rows(keys, keys) * own.between * (key * strength)[:, None] * key[None, :]
    below = jnp.where(rows_of(size) > columns_of(size), by_key, 0.0)
    inverse = inverse_of_unit_lower(below, precision)
    solved[row, head, number] = (inverse * strength[None, :]).astype(solved.dtype)
    by_query = dot_by_rows(asked, keys) * own.between * ask[:, None] * key[None, :]
    scores[row, head, number] = by_query.astype(scores.dtype)
    asking[row, head, here] = ask * own.since
    known[row, head, here] = key * own.since
    lasting[row, head, here] = key * own.lasting
    left[row, head, number] = own.left


def _norm(x: Float[Array, "size dim"], eps: float) -> Float[Array, " size"]:
    """Return what makes each vector one of length 1."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + eps)


def _chunks(
    q: Any, k: Any, v: Any, solved: Any, scores: Any, asking: Any, known: Any, lasting: Any,
    left: Any, out: Any, *, size: int, part: int, each: int,
) -> None:  # fmt: skip
    row, head, dims = pl.program_id(0), pl.program_id(1), pl.ds(pl.program_id(2) * part, part)
    group, dtype = head // each, v.dtype

    def step(number: Array, state: Array) -> Array:
        here = pl.ds(number * size, size)
        keys, asked = k[row, here, group, :], q[row, here, group, :]
        held = state.astype(dtype)
        missing = v[row, here, head, dims].astype(jnp.float32)
        missing = missing - known[row, head, here][:, None] * dot(keys, held)
        wrote = dot(solved[row, head, number], missing.astype(dtype))
        read = asking[row, head, here][:, None] * dot(asked, held)
        read = read + dot(scores[row, head, number], wrote.astype(dtype))
        out[row, here, head, dims] = read.astype(dtype)
        lasts = (lasting[row, head, here][:, None] * wrote).astype(dtype)
        return state * left[row, head, number] + dot_by_columns(keys, lasts)

    begin = jnp.zeros((q.shape[-1], part), jnp.float32)
    jax.lax.fori_loop(0, v.shape[1] // size, step, begin)

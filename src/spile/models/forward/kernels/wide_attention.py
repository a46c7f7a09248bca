"""Flash attention for heads of 512, as Gemma 4's full layers have; the libraries' end at 256.

Each program has a block of a head's queries. It reads the keys from the first that one of them sees
to the last, keeps running maxima and sums, and never stores a score.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array

from spile.models.forward.attention import (
    HIDDEN,
    Attend,
    Keys,
    Mixed,
    Places,
    Queries,
    Scoring,
    Values,
)
from spile.models.forward.kernels.chunks import dot, dot_by_rows


class AttentionTiling(NamedTuple):
    """How a program runs."""

    queries: int = 32
    keys: int = 32
    warps: int = 4
    stages: int = 2


FASTEST = AttentionTiling()  # of those tried on an H200 (docs/benchmarks.md)


def wide(
    segments: Places,
    positions: Places,
    *,
    tiling: AttentionTiling = FASTEST,
    interpret: bool = False,
) -> Attend:
    """Attend within documents. Values are as wide as keys, and the width is a power of two."""
    seq = segments.shape[1]
    block = max(tiling.queries, tiling.keys)
    over = -seq % block
    place = jnp.arange(seq, dtype=jnp.int32)[None]
    start = jnp.where(segments > 0, place - positions, place)  # padding sees itself

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        # `kernel_choice` says so.
        assert scoring.slopes is None and scoring.sinks is None and scoring.cap is None
        first = start
        if scoring.window is not None:
            first = jnp.maximum(start, place - scoring.window + 1)
        q, k, v = (jnp.pad(each, ((0, 0), (0, over), (0, 0), (0, 0))) for each in (q, k, v))
        # A query beyond the row sees itself alone, as padding does.
        added = jnp.broadcast_to(seq + jnp.arange(over, dtype=jnp.int32)[None], (len(q), over))
        first = jnp.concatenate([jnp.broadcast_to(first, (len(q), seq)), added], axis=1)
        rows, length, heads, _ = q.shape
        run: Any = pl.pallas_call(
            partial(
                _kernel, tiling=tiling, each=heads // k.shape[2],
                scale=scoring.scale * math.log2(math.e),
            ),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(length // tiling.queries, heads, rows),
            compiler_params=triton.CompilerParams(
                num_warps=tiling.warps, num_stages=tiling.stages
            ),
            name="wide_attention",
            interpret=interpret,
        )  # fmt: skip
        return run(q, k, v, first)[:, :seq]

    return attend


def _kernel(
    q: Any,
    k: Any,
    v: Any,
    first: Any,
    out: Any,
    *,
    tiling: AttentionTiling,
    each: int,
    scale: float,
) -> None:
    number, head, row = (pl.program_id(axis) for axis in range(3))
    begin, own = number * tiling.queries, head // each
    here = pl.ds(begin, tiling.queries)
    asked, starts = q[row, here, head, :], first[row, here]
    places = begin + jnp.arange(tiling.queries, dtype=jnp.int32)

    def step(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, highest, summed = state
        at = number * tiling.keys
        there = pl.ds(at, tiling.keys)
        key = at + jnp.arange(tiling.keys, dtype=jnp.int32)
        seen = (key[None, :] >= starts[:, None]) & (key[None, :] <= places[:, None])
        scores = jnp.where(seen, dot_by_rows(asked, k[row, there, own, :]) * scale, HIDDEN)
        higher = jnp.maximum(highest, jnp.max(scores, axis=1))
        # (Where a query has seen no key yet, hidden scores are the highest.)
        weights = jnp.where(seen, jnp.exp2(scores - higher[:, None]), 0.0)
        left = jnp.exp2(highest - higher)
        read = dot(weights.astype(v.dtype), v[row, there, own, :])
        return total * left[:, None] + read, higher, summed * left + jnp.sum(weights, axis=1)

    state = (
        jnp.zeros((tiling.queries, q.shape[-1]), jnp.float32),
        jnp.full((tiling.queries,), HIDDEN, jnp.float32),
        jnp.zeros((tiling.queries,), jnp.float32),
    )
    last = (begin + tiling.queries - 1) // tiling.keys
    total, _, summed = jax.lax.fori_loop(jnp.min(starts) // tiling.keys, last + 1, step, state)
    out[row, here, head, :] = (total / summed[:, None]).astype(out.dtype)

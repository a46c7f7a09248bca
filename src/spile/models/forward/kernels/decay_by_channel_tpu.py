"""The rule of `mixers.decay_by_channel` in one kernel for TPUs: chunks in sequence, states in VMEM.

As `gated_delta_tpu`, but the decay between two tokens of a half is part of their products. Pairs
are ordered by the border between them: that of two neighbouring blocks of 1, 2, 4 … tokens. The
decay from a token to the border, or since it, is at most one, so one product has all such pairs.
Decayed keys and queries are rounded, unlike those of `gated_delta_tpu`. So what multiplies written
values has twice the bits.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Array, Float, Int

from spile.models.forward.kernels.chunks import (
    columns_of,
    dot,
    dot_by_rows,
    in_whole_chunks,
    rows_of,
)
from spile.models.forward.kernels.chunks_tpu import (
    CHUNK,
    HALF,
    Marks,
    halves,
    in_parts,
    inverses_of_unit_lower,
    marked,
    norm,
    placed,
)
from spile.models.forward.ops import Heads, Scalars

_MOST = 4  # heads of a program
_WIDTHS = [1 << n for n in range(HALF.bit_length() - 1)]  # of blocks on either side of a border


def rule(
    q: Heads,
    k: Heads,
    v: Heads,
    written: Scalars,
    kept: Heads,
    segments: Int[Array, "rows seq"],
    *,
    eps: float,
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
    together = max(n for n in range(1, _MOST + 1) if heads % n == 0)
    whole = seq + -seq % CHUNK
    strength = jnp.moveaxis(in_whole_chunks(written.astype(jnp.float32), CHUNK), 1, 2)
    tokens = pl.BlockSpec((1, CHUNK, together * dim), lambda row, part, chunk: (row, chunk, part))
    run: Any = pl.pallas_call(
        partial(_kernel, eps=eps),
        out_shape=jax.ShapeDtypeStruct((rows, whole, heads * dim), v.dtype),
        grid=(rows, heads // together, whole // CHUNK),
        in_specs=[
            tokens,
            tokens,
            tokens,
            pl.BlockSpec((1, 1, together, CHUNK), lambda row, part, chunk: (row, part, 0, chunk)),
            tokens,
            pl.BlockSpec((1, len(Marks._fields), CHUNK), lambda row, part, chunk: (row, 0, chunk)),
        ],
        out_specs=tokens,
        scratch_shapes=[tpu.VMEM((together, dim, dim), jnp.float32)],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * whole * heads * (dim * 4 * dim + 60 * CHUNK * HALF),
            transcendentals=rows * whole * heads * dim * (len(_WIDTHS) + 2),
            bytes_accessed=12 * rows * whole * heads * dim,
        ),
        name="decay_by_channel_rule",
        interpret=interpret,
    )
    read = run(
        *(in_whole_chunks(a.reshape(rows, seq, -1), CHUNK) for a in (q, k, v)),
        strength.reshape(rows, -1, together, whole),
        in_whole_chunks(kept.astype(jnp.float32).reshape(rows, seq, -1), CHUNK),
        marked(segments, size=HALF),
    )
    return read[:, :seq].reshape(v.shape)


class _Masks(NamedTuple):
    """What all heads of a program share."""

    summed: Array  # [sums x chunk, chunk]: the tokens whose log-decay is summed, in 16 bits
    seen: Array  # [half, chunk]: whether a token sees another, of each half
    continues: Array  # [chunk, 1]: whether a token's document began before its half
    lasts: Array  # [chunk, 1]: whether it reaches the half's end
    left: Array  # [chunk, 1]: whether one document began before the half, and reaches its end


def _kernel(
    q: Any, k: Any, v: Any, written: Any, kept: Any, marks: Any, out: Any, state: Any, *, eps: float
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = jnp.zeros(state.shape, state.dtype)

    heads, dim, _ = state.shape
    masks = _masks(Marks(*(marks[0, i : i + 1] for i in range(3))))
    strength, dtype = written[0, 0], v.dtype
    share = strength.T
    lower, scores, before, after, lefts = ([] for _ in range(5))
    for head in range(heads):
        lanes = slice(head * dim, (head + 1) * dim)
        asked, keys = (a[0, :, lanes].astype(jnp.float32) for a in (q, k))
        asked, keys = asked * (norm(asked, eps) * dim**-0.5), keys * norm(keys, eps)
        faded = _faded(kept[0, :, lanes], masks)
        by_key, by_query = _products(asked, keys, faded, dtype)
        by_key = by_key * halves(share[:, head : head + 1])
        lower.append(jnp.where(masks.seen, by_key, 0.0))
        scores.append(jnp.where(masks.seen, by_query, 0.0))
        since = jnp.where(masks.continues, faded[-2], 0.0)
        before.append([(a * since).astype(dtype) for a in (keys, asked)])
        after.append(jnp.where(masks.lasts, keys * faded[-1], 0.0).T)
        lefts.append(jnp.where(masks.left, faded[-2], 0.0).T)
    inverses = inverses_of_unit_lower(lower)
    for first in (0, HALF):
        here, end = slice(first, first + HALF), slice(first + HALF - 1, first + HALF)
        for head, inverse in enumerate(inverses):
            lanes, held = slice(head * dim, (head + 1) * dim), state[head]
            both = jnp.concatenate([a[here] for a in before[head]])
            met = dot(both, held.astype(dtype))
            missing = v[0, here, lanes].astype(jnp.float32) - met[:HALF]
            solved = inverse * strength[head : head + 1]
            wrote = _finer(solved, placed(missing.astype(dtype), first)).astype(dtype)
            read = met[HALF:] + _finer(scores[head], placed(wrote, first))
            out[0, here, lanes] = read.astype(dtype)
            state[head] = held * lefts[head][:, end] + _finer(after[head], placed(wrote, first))


def _finer(a: Array, b: Array) -> Array:
    """Multiply float32 by values of 16 bits, which is two products."""
    both = dot(jnp.concatenate(in_parts(a)).astype(b.dtype), b)
    return both[: len(a)] + both[len(a) :]


def _masks(marks: Marks) -> _Masks:
    row, column = rows_of(CHUNK), columns_of(CHUNK)
    own, before, last = (jnp.broadcast_to(a, (CHUNK, CHUNK)) for a in marks)
    inside = (row & -HALF) == (column & -HALF)
    sums: list[Array] = []
    for width in _WIDTHS:
        border = (row & (-2 * width)) + width
        later = (column >= border) & (column <= row)
        sums.append(
            jnp.where(
                (row & width) != 0, _as_float(later), _as_float((column > row) & (column < border))
            )
        )
    sums += [_as_float(inside & (row >= column)), _as_float(inside & (row < column))]
    seen = halves(_as_float(inside & (own == own.T) & (row >= column))) > 0
    turned = [a.T[:, :1] for a in (own, before, last)]
    return _Masks(
        jnp.concatenate(sums).astype(jnp.bfloat16),
        seen,
        turned[0] == turned[1],
        turned[0] == turned[2],
        turned[1] == turned[2],
    )


def _as_float(mask: Array) -> Array:
    return mask.astype(jnp.float32)


def _faded(kept: Float[Array, "chunk dim"], masks: _Masks) -> list[Array]:
    """Return each token's decay: to each width's border or since it, and in its half."""
    high, low = (dot(masks.summed, part.astype(jnp.bfloat16)) for part in in_parts(kept))
    sums = high + low
    return [jnp.exp(sums[i : i + CHUNK]) for i in range(0, len(sums), CHUNK)]


def _products(
    asked: Float[Array, "chunk dim"],
    keys: Float[Array, "chunk dim"],
    faded: list[Array],
    dtype: Any,
) -> tuple[Array, Array]:
    """Return the products of keys, below the diagonal, and of queries with keys: [half, chunk]."""
    row = jax.lax.broadcasted_iota(jnp.int32, (HALF, CHUNK), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (HALF, CHUNK), 1) & (HALF - 1)
    by_key = jnp.zeros((HALF, CHUNK), jnp.float32)
    own = jnp.sum(asked * keys, axis=1, keepdims=True)
    by_query = jnp.where(row == column, halves(own), 0.0)
    for width, decay in zip(_WIDTHS, faded, strict=False):
        # A block of the second of two neighbours, and the first's tokens.
        pair = ((row & width) != 0) & ((column & -width) == (row & -width) - width)
        key, query = ((a * decay).astype(dtype) for a in (keys, asked))
        by_key = jnp.where(pair, halves(dot_by_rows(key, key)), by_key)
        by_query = jnp.where(pair, halves(dot_by_rows(query, key)), by_query)
    return by_key, by_query

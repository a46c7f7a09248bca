"""The rule of `mixers.gated_delta` in one kernel for TPUs: chunks in sequence, states in VMEM.

Each program has some key heads of a row, and their value heads. What a token writes depends on what
earlier ones wrote. That is solved within each half of a chunk, for both halves at once: their
matrices lie side by side in the lanes. Products multiply in 16 bits and sum in float32; those of
the inverse have twice the bits, and the state stays in float32.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Array, Float, Int

from spile.models.forward.kernels.chunks import dot, dot_by_rows, in_whole_chunks
from spile.models.forward.kernels.chunks_tpu import (
    CHUNK,
    HALF,
    Marks,
    below,
    decay_by_head,
    halves,
    inverses_of_unit_lower,
    marked,
    norm,
    placed,
)
from spile.models.forward.ops import Heads, Scalars

_MOST = 6  # value heads of a program


def rule(
    q: Float[Array, "rows seq keys dim"],
    k: Float[Array, "rows seq keys dim"],
    v: Heads,
    written: Scalars,
    kept: Scalars,
    segments: Int[Array, "rows seq"],
    *,
    eps: float,
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
    groups, wide = q.shape[2], q.shape[3]
    each = heads // groups
    keys = max(n for n in range(1, groups + 1) if groups % n == 0 and n * each <= max(each, _MOST))
    together, whole = keys * each, seq + -seq % CHUNK

    def by_part(a: Array) -> Array:
        """[rows, seq, heads] -> [rows, programs, heads of each, seq], in float32."""
        filled = in_whole_chunks(a.astype(jnp.float32), CHUNK)
        return jnp.moveaxis(filled, 1, 2).reshape(rows, -1, together, whole)

    def tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, CHUNK, width), lambda row, part, chunk: (row, chunk, part))

    scalar = pl.BlockSpec((1, 1, together, CHUNK), lambda row, part, chunk: (row, part, 0, chunk))
    run: Any = pl.pallas_call(
        partial(_kernel, each=each, eps=eps),
        out_shape=jax.ShapeDtypeStruct((rows, whole, heads * dim), v.dtype),
        grid=(rows, groups // keys, whole // CHUNK),
        in_specs=[
            tokens(keys * wide),
            tokens(keys * wide),
            tokens(together * dim),
            scalar,
            scalar,
            pl.BlockSpec((1, len(Marks._fields), CHUNK), lambda row, part, chunk: (row, 0, chunk)),
        ],
        out_specs=tokens(together * dim),
        scratch_shapes=[tpu.VMEM((together, wide, dim), jnp.float32)],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * whole * heads * (dim * 4 * wide + 20 * CHUNK * HALF),
            transcendentals=rows * whole * heads * HALF,
            bytes_accessed=4 * rows * whole * (heads * dim + groups * wide),
        ),
        name="gated_delta_rule",
        interpret=interpret,
    )
    read = run(
        *(in_whole_chunks(a.reshape(rows, seq, -1), CHUNK) for a in (q, k, v)),
        *(by_part(a) for a in (written, kept)),
        marked(segments, size=HALF),
    )
    return read[:, :seq].reshape(v.shape)


def _kernel(
    q: Any, k: Any, v: Any, written: Any, kept: Any, marks: Any, out: Any, state: Any,
    *, each: int, eps: float,
) -> None:  # fmt: skip
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = jnp.zeros(state.shape, state.dtype)

    heads, wide, dim = state.shape
    own = decay_by_head(kept[0, 0], Marks(*(marks[0, i : i + 1] for i in range(3))), size=HALF)
    seen, strength = halves(own.seen.astype(jnp.float32)) > 0, written[0, 0]
    lasting = jnp.where(own.lasts, jnp.exp(own.at_end - own.summed), 0.0)
    summed, lasts, share = (a.T for a in (own.summed, lasting, strength))
    asked, keys = (
        [a[0, :, i * wide : (i + 1) * wide] for i in range(heads // each)] for a in (q, k)
    )
    turned = [a.astype(jnp.float32).T.astype(a.dtype) for a in keys]
    ask, key = [norm(a, eps) * wide**-0.5 for a in asked], [norm(a, eps) for a in keys]
    by_query, lower = list[Array](), list[Array]()
    for head in range(heads):
        group, column = head // each, slice(head, head + 1)
        by_lane = jnp.broadcast_to(key[group], (CHUNK, CHUNK)).T[:1]
        apart = jnp.where(seen, halves(summed[:, column]) - own.summed[column], -jnp.inf)
        between = jnp.exp(apart) * by_lane
        met = halves(dot_by_rows(keys[group], keys[group]))
        lower.append(below(met * between * halves(key[group] * share[:, column])))
        met = halves(dot_by_rows(asked[group], keys[group]))
        by_query.append((met * between * halves(ask[group])).astype(v.dtype))
    inverses = inverses_of_unit_lower(lower)
    solved = [(a * strength[i : i + 1]).astype(v.dtype) for i, a in enumerate(inverses)]
    since = jnp.where(own.continues[:, :heads], jnp.exp(summed), 0.0)
    for first in (0, HALF):
        for head in range(heads):
            group, column = head // each, slice(head, head + 1)
            here, values = slice(first, first + HALF), slice(head * dim, (head + 1) * dim)
            held = state[head]
            both = jnp.concatenate([keys[group][here], asked[group][here]])
            met = dot(both, held.astype(v.dtype))
            missing = v[0, here, values].astype(jnp.float32)
            missing = missing - (key[group] * since[:, column])[here] * met[:HALF]
            wrote = dot(solved[head], placed(missing.astype(v.dtype), first))
            read = dot(by_query[head], placed(wrote.astype(v.dtype), first))
            read = read + (ask[group] * since[:, column])[here] * met[HALF:]
            out[0, here, values] = read.astype(v.dtype)
            added = (wrote * (key[group] * lasts[:, column])[here]).astype(v.dtype)
            left = own.left[column, first : first + 1]
            state[head] = held * left + dot(turned[group], placed(added, first))

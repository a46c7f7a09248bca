"""The rule of `mixers.state_space` in one kernel for TPUs: chunks in sequence, states in VMEM.

Each program has some heads of a row, which share keys and queries. Tokens of a chunk fill the
lanes, and so do heads that are narrower than them, side by side. Products multiply in 16 bits and
sum in float32; the state stays in float32.
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
    LANES,
    Marks,
    decay_by_head,
    marked,
    most_heads,
    side_by_side,
)
from spile.models.forward.ops import Heads, Scalars


def rule(
    q: Float[Array, "rows seq groups state"],
    k: Float[Array, "rows seq groups state"],
    v: Heads,
    steps: Scalars,
    kept: Scalars,
    skip: Float[Array, " heads"],
    segments: Int[Array, "rows seq"],
    *,
    interpret: bool = False,
) -> Heads:
    """Return what queries read, plus each token's value times `skip`, in the dtype of the values.

    Args:
        steps: the step size, which scales what each token adds to the state.
        kept: the log-decay of the state.
    """
    rows, seq, heads, dim = v.shape
    groups, wide = q.shape[2], q.shape[3]
    each = heads // groups
    over = -each % max(1, LANES // dim)
    own = each + over  # heads of a group, with those that fill the lanes
    together = most_heads(own, dim)
    parts = own // together

    def by_part(a: Array) -> Array:
        """[rows, seq, heads] -> [rows, programs, heads of each, seq], in float32."""
        filled = _filled(a.astype(jnp.float32).reshape(rows, seq, groups, each), over)
        return jnp.moveaxis(in_whole_chunks(filled, CHUNK), 1, 3).reshape(rows, -1, together, whole)

    whole = seq + -seq % CHUNK
    values = _filled(v.reshape(rows, seq, groups, each, dim), over).reshape(rows, seq, -1)
    added = jnp.repeat(_filled(skip.astype(jnp.float32).reshape(groups, each), over), dim)
    group = lambda part: jax.lax.div(part, jnp.int32(parts))  # noqa: E731
    token = pl.BlockSpec((1, CHUNK, wide), lambda row, part, chunk: (row, chunk, group(part)))
    value = pl.BlockSpec((1, CHUNK, together * dim), lambda row, part, chunk: (row, chunk, part))
    scalar = pl.BlockSpec((1, 1, together, CHUNK), lambda row, part, chunk: (row, part, 0, chunk))
    run: Any = pl.pallas_call(
        partial(_kernel, dim=dim),
        out_shape=jax.ShapeDtypeStruct((rows, whole, values.shape[-1]), v.dtype),
        grid=(rows, groups * parts, whole // CHUNK),
        in_specs=[
            token,
            token,
            value,
            scalar,
            scalar,
            pl.BlockSpec((1, together * dim), lambda row, part, chunk: (0, part)),
            pl.BlockSpec((1, len(Marks._fields), CHUNK), lambda row, part, chunk: (row, 0, chunk)),
        ],
        out_specs=value,
        scratch_shapes=[tpu.VMEM((wide, together * dim), jnp.float32)],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * whole * values.shape[-1] * (CHUNK + 2 * wide),
            transcendentals=rows * whole * values.shape[-1] // dim * CHUNK,
            bytes_accessed=2 * rows * whole * (2 * values.shape[-1] + 2 * wide * groups * parts),
        ),
        name="state_space_rule",
        interpret=interpret,
    )
    read = run(
        *(in_whole_chunks(a.reshape(rows, seq, -1), CHUNK) for a in (q, k, values)),
        *(by_part(a) for a in (steps, kept)),
        added[None],
        marked(segments),
    )
    return read[:, :seq].reshape(rows, seq, groups, own, dim)[..., :each, :].reshape(v.shape)


def _filled(a: Array, over: int) -> Array:
    """Return [..., groups, heads, ...] with more heads, whose values are zero."""
    axis = 1 if a.ndim == 2 else 3
    return jnp.pad(a, [(0, over if place == axis else 0) for place in range(a.ndim)])


def _kernel(
    q: Any, k: Any, v: Any, steps: Any, kept: Any, skip: Any, marks: Any, out: Any, state: Any,
    *, dim: int,
) -> None:  # fmt: skip
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = jnp.zeros(state.shape, state.dtype)

    asked, keys, dtype = q[0], k[0], v.dtype
    own = decay_by_head(kept[0, 0], Marks(*(marks[0, i : i + 1] for i in range(3))))
    scores, turned = dot_by_rows(asked, keys), keys.astype(jnp.float32).T
    # The factor of a token's step is part of its decay.
    until = own.summed - jnp.log(steps[0, 0])
    lasting = jnp.where(own.lasts, jnp.exp(own.at_end - until), 0.0)
    heads, width = len(until), max(dim, LANES)
    summed = own.summed.T
    for first in range(0, heads, width // dim):
        here, these = slice(first * dim, first * dim + width), range(first, first + width // dim)
        values, held = v[0, :, here], state[:, here]
        near: list[Array] = []
        added: list[Array] = []
        sums: list[Array] = []
        for head in these:
            row = slice(head, head + 1)
            total = jnp.broadcast_to(summed[:, row], (CHUNK, CHUNK))
            between = jnp.exp(jnp.where(own.seen, total - until[row], -jnp.inf))
            near.append(dot((scores * between).astype(dtype), values))
            added.append(dot((turned * lasting[row]).astype(dtype), values))
            sums.append(total)
        since = jnp.exp(jnp.where(own.continues, side_by_side(sums, dim), -jnp.inf))
        read = side_by_side(near, dim) + since * dot(asked, held.astype(dtype))
        out[0, :, here] = (read + values.astype(jnp.float32) * skip[:, here]).astype(dtype)
        left = side_by_side([own.left[head : head + 1, :1] for head in these], dim)
        state[:, here] = held * left + side_by_side(added, dim)

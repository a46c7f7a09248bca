"""The rule of `mixers.state_space` in one kernel: chunks in sequence, the state in registers.

Each program has a head of a row. Products multiply in 16 bits and sum in float32, and the state
stays in float32.
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
    decay,
    dot,
    dot_by_columns,
    dot_by_rows,
    in_whole_chunks,
)
from spile.models.forward.ops import Heads, Scalars


class StateSpaceTiling(NamedTuple):
    """How a program runs."""

    chunk: int = 64  # tokens
    warps: int = 4
    stages: int = 2


FASTEST = StateSpaceTiling()  # of those tried on an H200 (docs/benchmarks.md)


def rule(
    q: Float[Array, "rows seq groups state"],
    k: Float[Array, "rows seq groups state"],
    v: Heads,
    steps: Scalars,
    kept: Scalars,
    skip: Float[Array, " heads"],
    segments: Int[Array, "rows seq"],
    *,
    tiling: StateSpaceTiling = FASTEST,
    interpret: bool = False,
) -> Heads:
    """Return what queries read, plus each token's value times `skip`, in the dtype of the values.

    Args:
        steps: the step size, which scales what each token adds to the state.
        kept: the log-decay of the state.
    """
    rows, seq, heads, _ = v.shape
    size = tiling.chunk
    q, k, v, steps, kept = (in_whole_chunks(a, size) for a in (q, k, v, steps, kept))
    segments = in_whole_chunks(segments, size, fill=-1)
    run: Any = pl.pallas_call(
        partial(_kernel, size=size, each=heads // q.shape[2]),
        out_shape=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(rows, heads),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        name="state_space_rule",
        interpret=interpret,
    )
    by_head = (jnp.moveaxis(a.astype(jnp.float32), 1, 2) for a in (steps, kept))
    return run(q, k, v, *by_head, skip.astype(jnp.float32), segments)[:, :seq]


def _kernel(
    q: Any, k: Any, v: Any, steps: Any, kept: Any, skip: Any, segments: Any, out: Any,
    *, size: int, each: int,
) -> None:  # fmt: skip
    row, head = pl.program_id(0), pl.program_id(1)
    group, dtype = head // each, v.dtype
    added = skip[head]

    def step(number: Array, state: Array) -> Array:
        first = number * size
        here = pl.ds(first, size)
        asked, keys, values = q[row, here, group, :], k[row, here, group, :], v[row, here, head, :]
        before = jnp.where(number == 0, -1, segments[row, jnp.maximum(first - 1, 0)])
        own = decay(
            kept[row, head, here], segments[row, here], before, segments[row, first + size - 1]
        )
        scale = steps[row, head, here]
        scores = dot_by_rows(asked, keys) * own.between * scale[None, :]
        read = dot(scores.astype(dtype), values)
        read = read + own.since[:, None] * dot(asked, state.astype(dtype))
        wide = values.astype(jnp.float32)
        out[row, here, head, :] = (read + wide * added).astype(dtype)
        written = (wide * (own.lasting * scale)[:, None]).astype(dtype)
        return state * own.left + dot_by_columns(keys, written)

    begin = jnp.zeros((q.shape[-1], v.shape[-1]), jnp.float32)
    jax.lax.fori_loop(0, v.shape[1] // size, step, begin)

"""Which experts tokens choose, and where their rows then lie, without sorting.

XLA sorts the scores of each token, and then all choices by expert, in a dozen kernels. Here one
kernel takes the largest scores one after another, and one counts, in a block of tokens, the earlier
tokens that chose the same expert.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from spile.models.forward.kernels.chunks import LEAST, columns_of, dot, rows_of

_HELD = 8192  # numbers of a block that a program keeps in registers
_MOST_TOKENS = 64
_LEAST_KEY = -(2**31)


def largest_scores(
    scores: Float[Array, "*tokens experts"], count: int, *, interpret: bool = False
) -> tuple[Float[Array, "*tokens count"], Int[Array, "*tokens count"]]:
    """Return the largest scores and their experts, as `jax.lax.top_k` does."""
    flat = scores.astype(jnp.float32).reshape(-1, scores.shape[-1])
    tokens, experts = flat.shape
    wide, block = _block(experts)
    shape = (*scores.shape[:-1], count)
    run: Any = pl.pallas_call(
        partial(_largest, block=block, wide=wide),
        out_shape=[jax.ShapeDtypeStruct((tokens, count), t) for t in (jnp.float32, jnp.int32)],
        grid=(pl.cdiv(tokens, block),),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        name="largest_scores",
        interpret=interpret,
    )
    values, ids = run(flat)
    return values.reshape(shape).astype(scores.dtype), ids.reshape(shape)


def places_of(
    ids: Int[Array, "tokens chosen"], experts: int, aligned: int, *, interpret: bool = False
) -> tuple[Int[Array, "tokens chosen"], Int[Array, " experts"]]:
    """Return the place of each choice in the layout by expert, and how often each was chosen.

    The rows of an expert are in the order of the tokens, and begin at a multiple of `aligned`. A
    token chooses an expert at most once. A negative id is none, and so is its place.
    """
    tokens = len(ids)
    wide, block = _block(experts)
    blocks = pl.cdiv(tokens, block)
    run: Any = pl.pallas_call(
        partial(_count, block=block, wide=wide),
        out_shape=[
            jax.ShapeDtypeStruct(ids.shape, jnp.int32),
            jax.ShapeDtypeStruct((blocks, wide), jnp.float32),
        ],
        grid=(blocks,),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        name="places_for_experts",
        interpret=interpret,
    )
    earlier, counts = run(ids)
    # (A product is one kernel, and exact for such counts; a cumulative sum is several.)
    before = jnp.tril(jnp.ones((blocks, blocks), jnp.float32), -1)
    before = jnp.dot(before, counts[:, :experts], precision=jax.lax.Precision.HIGHEST)
    sizes = counts[:, :experts].sum(axis=0).astype(jnp.int32)
    room = -(-sizes // aligned) * aligned
    number = jnp.arange(experts)
    starts = jnp.where(number[None, :] < number[:, None], room[None, :], 0).sum(axis=1)
    begins = before.astype(jnp.int32) + starts[None, :]
    own = begins[jnp.arange(tokens)[:, None] // block, jnp.maximum(ids, 0)]
    return jnp.where(ids < 0, -1, earlier + own), sizes


def _block(experts: int) -> tuple[int, int]:
    """Return the experts, filled up, and the tokens that a program has."""
    wide = max(LEAST, pl.next_power_of_2(experts))
    return wide, max(LEAST, min(_MOST_TOKENS, _HELD // wide))


def _largest(scores: Any, values: Any, ids: Any, *, block: int, wide: int) -> None:
    token, expert = pl.program_id(0) * block + jnp.arange(block), jnp.arange(wide)
    inside, there = token < scores.shape[0], expert < scores.shape[1]
    at = scores.at[token[:, None], expert[None, :]]
    given = triton.load(at, mask=inside[:, None] & there[None, :], other=0.0)
    # Integers in the order of the numbers: -0.0 is below 0.0, NaN above all.
    keys = _ordered(jax.lax.bitcast_convert_type(given, jnp.int32))
    keys = jnp.where(there[None, :], keys, _LEAST_KEY)
    for number in range(ids.shape[1]):
        best = jnp.max(keys, axis=1)
        same = (keys == best[:, None]) & there[None, :]
        own = jnp.min(jnp.where(same, expert[None, :], wide), axis=1)
        value = jax.lax.bitcast_convert_type(_ordered(best), jnp.float32)
        triton.store(values.at[token, number], value, mask=inside)
        triton.store(ids.at[token, number], own, mask=inside)
        # (Taken experts are below the lowest score, which is a NaN's.)
        keys = jnp.where(expert[None, :] == own[:, None], _LEAST_KEY, keys)


def _ordered(bits: Int[Array, "..."]) -> Int[Array, "..."]:
    """Turn the bits of floats into integers of the same order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _count(ids: Any, earlier: Any, counts: Any, *, block: int, wide: int) -> None:
    number = pl.program_id(0)
    token, expert = number * block + jnp.arange(block), jnp.arange(wide)
    inside = token < ids.shape[0]

    def chosen(which: int) -> Array:
        own = triton.load(ids.at[token, which], mask=inside, other=-1)
        return own[:, None] == expert[None, :]

    every = range(ids.shape[1])
    member = jnp.zeros((block, wide), jnp.float32)
    for which in every:
        member = member + jnp.where(chosen(which), 1.0, 0.0)
    before = jnp.where(rows_of(block) > columns_of(block), 1.0, 0.0)
    found = dot(before.astype(jnp.bfloat16), member.astype(jnp.bfloat16))
    for which in every:
        own = jnp.sum(jnp.where(chosen(which), found, 0.0), axis=1)
        triton.store(earlier.at[token, which], own.astype(jnp.int32), mask=inside)
    triton.store(counts.at[number, expert], jnp.sum(member, axis=0))

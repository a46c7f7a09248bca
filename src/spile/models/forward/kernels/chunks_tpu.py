"""What TPU kernels of recurrent mixers share: chunks as wide as the lanes, and their decay."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spile.models.forward.kernels.chunks import (
    columns_of,
    dot,
    dot_by_rows,
    in_whole_chunks,
    rows_of,
)

LANES = 128
CHUNK = LANES  # tokens
HALF = CHUNK // 2
_WIDEST = 1024  # values of a token in one program
_EXACT = jax.lax.Precision.HIGHEST


class Marks(NamedTuple):
    """The documents of a chunk's tokens, of the token before it, and of its last token."""

    own: Int[Array, "1 size"]
    before: Int[Array, "1 size"]
    last: Int[Array, "1 size"]


def most_heads(heads: int, dim: int) -> int:
    """Return how many heads a program has: all that fit, or an equal part of them."""
    fill = max(1, LANES // dim)
    fits = (n for n in range(fill, heads + 1, fill) if heads % n == 0 and n * dim <= _WIDEST)
    return max(fits, default=fill)


def marked(segments: Int[Array, "rows seq"], *, size: int = CHUNK) -> Int[Array, "rows marks seq"]:
    """Return the `Marks` of all chunks; a row's first chunk continues no document.

    `size`: tokens for which the decay is computed at a time; a chunk may have several such parts.
    """
    places = in_whole_chunks(segments, CHUNK, fill=-1)
    last = places[:, size - 1 :: size]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-2)
    marks = Marks(places, *(jnp.repeat(a, size, axis=1) for a in (before, last)))
    return jnp.stack(marks, axis=1)


class DecayByHead(NamedTuple):
    """How much of a state is left between tokens of a part of a chunk, for several heads.

    Factors are zero across a document's border.
    """

    seen: Array  # [chunk, chunk]: whether a token sees another
    summed: Array  # [heads, chunk]: of log-decay up to each token, in its document
    continues: Array  # [chunk, chunk]: by row, whether a token's document began before its part
    at_end: Array  # [heads, chunk]: of log-decay up to the part's end, the same at all its tokens
    left: Array  # [heads, chunk]: the factor of the state at the part's start, at its end
    lasts: Array  # [1, chunk]: whether a token belongs to the part's last document


def decay_by_head(
    kept: Float[Array, "heads chunk"], marks: Marks, *, size: int = CHUNK
) -> DecayByHead:
    """Return the decay within each part of a chunk from the log-decay at each token."""
    shape = (CHUNK, CHUNK)
    row, column = rows_of(CHUNK), columns_of(CHUNK)
    across = jnp.broadcast_to(marks.own, shape)
    part = (row & -size) == (column & -size)
    seen = part & (across == across.T) & (row >= column)
    ending = part & (across == jnp.broadcast_to(marks.last, shape).T)
    summed, at_end = (dot_by_rows(kept, a.astype(jnp.float32), _EXACT) for a in (seen, ending))
    continues = across.T == jnp.broadcast_to(marks.before, shape).T
    left = jnp.where(marks.last == marks.before, jnp.exp(at_end), 0.0)
    return DecayByHead(seen, summed, continues, at_end, left, marks.own == marks.last)


def side_by_side(parts: Sequence[Array], dim: int) -> Array:
    """Return `dim` lanes of each part: its own of a row of lanes, or its only one."""
    if len(parts) == 1:
        return parts[0]
    shape = (len(parts[0]), len(parts) * dim)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    joined = jnp.broadcast_to(parts[-1], shape)
    for number in reversed(range(len(parts) - 1)):
        joined = jnp.where(lane < (number + 1) * dim, parts[number], joined)
    return joined


def inverses_of_unit_lower(lower: Sequence[Array]) -> list[Array]:
    """Return the inverses of the identity plus strictly lower matrices.

    As `chunks.inverse_of_unit_lower`, but with each factor in two parts of 16 bits: a product takes
    three of them. All matrices take each step together, so that none waits for its last product.

    Args:
        lower: [size, lanes] each: matrices side by side.
    """
    size, shape = len(lower[0]), lower[0].shape
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 1) & (size - 1)
    inverses = [jnp.where(row == column, 1.0, 0.0)] * len(lower)
    width = 1
    while width < size:
        # A block below the diagonal, whose row of blocks is odd.
        pair = ((row & width) != 0) & ((column & -width) == (row & -width) - width)
        below = [jnp.where(pair, each, 0.0) for each in lower]
        if width > 1:
            parts = [in_parts(each) for each in inverses]
            first = [_product(a, in_parts(b)) for a, b in zip(parts, below, strict=True)]
            below = [_product(in_parts(a), b) for a, b in zip(first, parts, strict=True)]
        inverses = [a - b for a, b in zip(inverses, below, strict=True)]
        width *= 2
    return inverses


def in_parts(a: Array) -> tuple[Array, Array]:
    """Return two parts of 16 bits, whose sum is nearly the value, in float32."""
    high = a.astype(jnp.bfloat16).astype(jnp.float32)
    return high, a - high


def _product(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    """Multiply each of the matrices that are side by side in `a` by that in `b`."""
    size = len(a[0])
    high, low = (_on_diagonal(each) for each in b)
    both = dot(jnp.concatenate(a).astype(jnp.bfloat16), high)
    return both[:size] + both[size:] + dot(a[0].astype(jnp.bfloat16), low)


def _on_diagonal(a: Float[Array, "size lanes"]) -> Float[Array, "lanes lanes"]:
    """Return a matrix of 16 bits whose diagonal has the matrices that are side by side."""
    part = jax.lax.broadcasted_iota(jnp.int32, a.shape, 1) & -len(a)
    blocks = [jnp.where(part == first, a, 0.0) for first in range(0, a.shape[1], len(a))]
    return jnp.concatenate(blocks).astype(jnp.bfloat16)


def norm(x: Float[Array, "size dim"], eps: float) -> Float[Array, "size 1"]:
    """Return what makes each vector one of length 1."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(wide * wide, axis=1, keepdims=True) + eps)


def halves(a: Array) -> Array:
    """[chunk, 1 or chunk] -> [half, chunk]: each half's values for the lanes of its own tokens."""
    first = jax.lax.broadcasted_iota(jnp.int32, (HALF, CHUNK), 1) < HALF
    return jnp.where(first, a[:HALF], a[HALF:])


def below(a: Float[Array, "half chunk"]) -> Float[Array, "half chunk"]:
    """Return the values strictly below the diagonal of each half."""
    row = jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
    column = jax.lax.broadcasted_iota(jnp.int32, a.shape, 1) & (HALF - 1)
    return jnp.where(row > column, a, 0.0)


def placed(a: Float[Array, "half dim"], first: int) -> Float[Array, "chunk dim"]:
    """Return a chunk that has these values in one half, and zeros in the other."""
    parts = [a, jnp.zeros_like(a)]
    return jnp.concatenate(parts if first == 0 else parts[::-1])

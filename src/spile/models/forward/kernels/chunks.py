"""What the kernels of recurrent mixers share: where they run, decay within a chunk, and products.

Decay and products are functions of values in registers.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from spile.models.config.kernel_choice import unfit_on_tpu, unfit_recurrence
from spile.models.forward.ops import gpu_capability

LEAST = 16  # the smallest side of a tile that is multiplied
_plain = ContextVar("plain", default=False)


@contextmanager
def plain_recurrence(plain: bool) -> Generator[None, None, None]:
    """Trace recurrent layers without kernels, if asked."""
    token = _plain.set(plain)
    try:
        yield
    finally:
        _plain.reset(token)


def serves_recurrence(dtype: jnp.dtype, *sizes: int) -> bool:
    """Return whether this process has a GPU whose kernels mix such values, and states so large."""
    if _plain.get():
        return False
    return unfit_recurrence("gpu", str(dtype), gpu_capability(), *sizes) is None


def serves_on_tpu(rule: str, dtype: jnp.dtype, keys: int, values: int) -> bool:
    """Return whether a TPU's kernel for a rule mixes such values; arguments as `unfit_on_tpu`."""
    return not _plain.get() and unfit_on_tpu(rule, str(dtype), keys, values) is None


def with_gradient_of(
    definition: Callable[..., Any], kernel: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a kernel whose gradient is that of the definition, which is computed anew for it."""

    def forward(*given: Any) -> tuple[Any, tuple[Any, ...]]:
        return kernel(*given), given

    def backward(given: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
        return jax.vjp(definition, *given)[1](cotangent)

    run: Any = jax.custom_vjp(kernel)
    run.defvjp(forward, backward)
    return run


def in_whole_chunks(a: Shaped[Array, "rows seq *rest"], size: int, fill: int = 0) -> Array:
    """Pad tokens to a multiple of a chunk's."""
    over = -a.shape[1] % size
    widths = ((0, 0), (0, over), *[(0, 0)] * (a.ndim - 2))
    return jnp.pad(a, widths, constant_values=fill) if over else a


class Decay(NamedTuple):
    """How much of a state is left between tokens of a chunk; zero across a document's border."""

    between: Float[Array, "size size"]  # of what a token wrote, when a later one reads
    since: Float[Array, " size"]  # of the state at the chunk's start, at each token
    lasting: Float[Array, " size"]  # of what a token wrote, at the chunk's end
    left: Float[Array, ""]  # of the state at the chunk's start, at its end


def decay(
    kept: Float[Array, " size"],
    places: Int[Array, " size"],
    before: Int[Array, ""],
    last: Int[Array, ""],
) -> Decay:
    """Return the decay within a chunk.

    Args:
        kept: the log-decay at each token.
        places: the document of each token.
        before: the document of the token before the chunk.
        last: the document of the chunk's last token.
    """
    seen = (places[:, None] == places[None, :]) & (rows_of(len(kept)) >= columns_of(len(kept)))
    summed = jnp.sum(jnp.where(seen, kept[None, :], 0.0), axis=1)
    apart = jnp.where(seen, summed[:, None] - summed[None, :], -jnp.inf)
    at_end = jnp.sum(jnp.where(places == last, kept, 0.0))
    lasting = jnp.exp(jnp.where(places == last, at_end - summed, -jnp.inf))
    since = jnp.where(places == before, jnp.exp(summed), 0.0)
    return Decay(jnp.exp(apart), since, lasting, jnp.where(last == before, jnp.exp(at_end), 0.0))


def rows_of(size: int) -> Int[Array, "size size"]:
    """Return the number of each element's row."""
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)


def columns_of(size: int) -> Int[Array, "size size"]:
    """Return the number of each element's column."""
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)


def dot(
    a: Float[Array, "m n"],
    b: Float[Array, "n p"],
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "m p"]:
    """Multiply two tiles; the sum is in float32."""
    return _dot(a, b, 1, 0, precision)


def dot_by_rows(
    a: Float[Array, "m n"],
    b: Float[Array, "p n"],
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "m p"]:
    """Multiply a tile by the transpose of another."""
    return _dot(a, b, 1, 1, precision)


def dot_by_columns(a: Float[Array, "n m"], b: Float[Array, "n p"]) -> Float[Array, "m p"]:
    """Multiply the transpose of a tile by another."""
    return _dot(a, b, 0, 0)


def _dot(a: Array, b: Array, of: int, by: int, precision: jax.lax.PrecisionLike = None) -> Array:
    terms = (((of,), (by,)), ((), ()))
    return jax.lax.dot_general(a, b, terms, precision, preferred_element_type=jnp.float32)


def inverse_of_unit_lower(
    lower: Float[Array, "size size"], precision: jax.lax.PrecisionLike
) -> Float[Array, "size size"]:
    """Return the inverse of the identity plus the strictly lower part of a matrix of size 2^n.

    As `mixers.recurrence` does, from the diagonal's blocks to blocks of twice their size; all pairs
    of blocks are part of one product here.
    """
    size = len(lower)
    row, column = rows_of(size), columns_of(size)
    inverse = jnp.where(row == column, 1.0, 0.0)
    width = 1
    while width < size:
        pair = (row // width % 2 == 1) & (column // width == row // width - 1)
        below = jnp.where(pair, lower, 0.0)
        if width == 1:
            inverse = inverse - below
        else:
            inverse = inverse - dot(dot(inverse, below, precision), inverse, precision)
        width *= 2
    return inverse

"""The largest values of a long axis, exactly, without sorting all of it."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

_LONG = 1024  # from this length on, a GPU finds a threshold faster than it sorts
_DIGIT = 4  # bits of a threshold that are found in one pass


def largest(
    values: Float[Array, "*tokens all"], count: int
) -> tuple[Float[Array, "*tokens count"], Int[Array, "*tokens count"]]:
    """Return the largest values in float32, in descending order, and their places.

    Of equal values the one at the lower place comes first.

    `lax.top_k` sorts the whole axis, which takes longer than a 7B model for a vocabulary of 152k.
    This cuts the axis into short parts and looks only into the `count` parts whose maxima are
    largest. They hold every value wanted: one in another part has `count` maxima before it, each
    larger, or equal and at a lower place.
    """
    total = values.shape[-1]
    size = part_size(total, count)
    parts = -(-total // size)
    if parts <= count or size == 1:
        return jax.lax.top_k(_sortable(values), count)
    lead = values.shape[:-1]
    padding = [(0, 0)] * len(lead) + [(0, parts * size - total)]
    by_part = jnp.pad(values, padding, constant_values=-jnp.inf).reshape(*lead, parts, size)
    part = _places(by_part.max(axis=-1), count)
    members = jnp.take_along_axis(by_part, part[..., None], axis=-2)
    members = members.reshape(*lead, count * size)
    place = _places(members, count)
    found = jnp.take_along_axis(members, place, axis=-1)
    found, order = jax.lax.top_k(_sortable(found), count)
    place = jnp.take_along_axis(place, order, axis=-1)
    return found, jnp.take_along_axis(part, place // size, axis=-1) * size + place % size


def part_size(total: int, count: int) -> int:
    """Return the length of a part for which both searches together see fewest values, about."""
    return 1 << round(math.log2(max(1.0, total / count)) / 2)


def _places(values: Float[Array, "*tokens all"], count: int) -> Int[Array, "*tokens count"]:
    """Return the places of the largest values, ascending; of ties the lower ones are chosen."""
    ways = {"cuda": partial(above_threshold, count=count)} if values.shape[-1] >= _LONG else {}
    return jax.lax.platform_dependent(values, **ways, default=partial(_by_sorting, count=count))


def _by_sorting(values: Float[Array, "*tokens all"], count: int) -> Int[Array, "*tokens count"]:
    return jnp.sort(jax.lax.top_k(_sortable(values), count)[1], axis=-1)


def _sortable(values: Float[Array, "*tokens all"]) -> Float[Array, "*tokens all"]:
    """Values as `top_k` should see them: it puts -0.0 after 0.0; on a CPU, only float32 is fast."""
    return jnp.where(values == 0, 0, values).astype(jnp.float32)


def above_threshold(values: Float[Array, "*tokens all"], count: int) -> Int[Array, "*tokens count"]:
    """Return what `_places` does, without sorting, for an axis of at most 32,767 values.

    The threshold is the largest number that `count` values reach. Its bits are found from the
    highest down, by counting how many values reach each candidate.
    """
    lead, total = values.shape[:-1], values.shape[-1]
    keys = _in_order(values)
    threshold = _threshold(keys, count)[..., None]
    above, ties = keys > threshold, keys == threshold
    # Two sums at once: of values above the threshold, and, in the upper bits, of ties.
    sums = jnp.cumsum(above.astype(jnp.int32) + (ties.astype(jnp.int32) << 16), axis=-1)
    above_so_far, ties_so_far = sums & 0xFFFF, sums >> 16
    wanted_ties = count - above_so_far[..., -1:]
    chosen = above | (ties & (ties_so_far <= wanted_ties))
    slot = above_so_far + jnp.minimum(ties_so_far, wanted_ties) - 1
    slot = jnp.where(chosen, slot, count).reshape(-1, total)  # others are dropped
    row, place = (jax.lax.broadcasted_iota(jnp.int32, slot.shape, axis) for axis in (0, 1))
    found = jnp.zeros((slot.shape[0], count), jnp.int32)
    return found.at[row, slot].set(place, mode="drop").reshape(*lead, count)


def _threshold(keys: UInt[Array, "*tokens all"], count: int) -> UInt[Array, "*tokens"]:
    """Return the `count`-th largest key."""
    found = jnp.zeros(keys.shape[:-1], keys.dtype)
    for shift in range(keys.dtype.itemsize * 8 - _DIGIT, -1, -_DIGIT):
        digit = jnp.zeros(found.shape, keys.dtype)
        for candidate in range(1, 1 << _DIGIT):
            least = found + np.array(candidate << shift, keys.dtype)
            reached = (keys >= least[..., None]).sum(axis=-1, dtype=jnp.int32) >= count
            digit = digit + reached.astype(keys.dtype)
        found = found + (digit << np.array(shift, keys.dtype))
    return found


def _in_order(values: Float[Array, "*tokens all"]) -> UInt[Array, "*tokens all"]:
    """Return integers in the order of the values; 0.0 and -0.0 are equal."""
    bits = values.dtype.itemsize * 8
    unsigned = jnp.dtype(f"uint{bits}")
    raw = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), unsigned)
    sign = np.array(1 << (bits - 1), unsigned)
    return jnp.where(raw >= sign, ~raw, raw | sign)

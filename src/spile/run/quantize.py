"""Rows as they will be stored, made on the device, so that fewer bytes leave it.

What the stored forms are, and how they are read back, is in `dataset/write/quantization.py`.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from spile.dataset.write.quantization import FLOAT8, FLOAT8_MAX, INT8_MAX


@dataclass(frozen=True)
class Encoded:
    """Values in their stored form, and what reading them back gives."""

    stored: Shaped[Array, "rows ..."]
    scale: Float[Array, " rows"] | None  # where each row has one
    decoded: Shaped[Array, "rows ..."]
    clipped: Int[Array, " rows"] | None  # values of each row that were too large


def encode(
    values: Shaped[Array, "rows ..."],
    dtype: str,
    channel_scale: Float[Array, "..."] | None,
) -> Encoded:
    """Round values to the form in which they are stored; plain ones arrive in theirs."""
    if dtype == "float8_e4m3":
        return _by_row(values)
    if dtype == "int8":
        assert channel_scale is not None
        return _by_channel(values, channel_scale)
    return Encoded(values, None, values, None)


def _by_row(values: Shaped[Array, "rows ..."]) -> Encoded:
    wide = values.astype(jnp.float32)
    # What is not finite is stored as NaN, and must not spoil the rest of its row.
    present = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0)
    largest = present.reshape(len(values), -1).max(axis=-1)
    # Never so small that a device flushes it to zero.
    smallest = float(np.finfo(np.float32).tiny)
    scale = jnp.where(largest > 0, jnp.maximum(largest / FLOAT8_MAX, smallest), 1.0)
    shaped = scale.reshape(*scale.shape, *[1] * (values.ndim - 1))
    stored = (wide / shaped).astype(FLOAT8)
    return Encoded(stored, scale, stored.astype(jnp.float32) * shaped, None)


def _by_channel(values: Shaped[Array, "rows ..."], scale: Float[Array, "..."]) -> Encoded:
    scale = scale[None]
    steps = jnp.rint(values.astype(jnp.float32) / scale)
    stored = jnp.clip(steps, -INT8_MAX, INT8_MAX).astype(jnp.int8)
    beyond = (jnp.abs(steps) > INT8_MAX).reshape(len(values), -1).sum(axis=-1)
    return Encoded(stored, None, stored.astype(jnp.float32) * scale, beyond)

"""The arithmetic of one block that is not attention. Casts follow the reference (HF) exactly:
norms and rotary angles in float32, their results in the compute dtype."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rms_norm(
    x: Float[Array, "*tokens width"], weight: Float[Array, " width"], eps: float
) -> Float[Array, "*tokens width"]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return _per_channel(weight, x) * (wide * scale).astype(x.dtype)


def linear(
    x: Float[Array, "*tokens in"],
    weight: Float[Array, "out in"],
    bias: Float[Array, " out"] | None = None,
) -> Float[Array, "*tokens out"]:
    y = jnp.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + _per_channel(bias, y)


def rotary_angles(
    positions: Int[Array, "rows seq"], frequencies: np.ndarray, amplitude: float
) -> tuple[Float[Array, "rows seq 1 half"], Float[Array, "rows seq 1 half"]]:
    """cos and sin for every token, in float32; computed once and used by every block."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(
    x: Float[Array, "rows seq heads dim"],
    cos: Float[Array, "rows seq 1 half"],
    sin: Float[Array, "rows seq 1 half"],
) -> Float[Array, "rows seq heads dim"]:
    """Rotate the pairs (i, i + dim/2), as HF does."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def activate(x: Float[Array, "*tokens mlp"], name: str) -> Float[Array, "*tokens mlp"]:
    return {"silu": jax.nn.silu}[name](x)


def _per_channel(values: Float[Array, " width"], like: Array) -> Array:
    """Shaped to broadcast over tokens; said aloud, because ranks are never promoted silently."""
    return jnp.expand_dims(values, tuple(range(like.ndim - 1)))

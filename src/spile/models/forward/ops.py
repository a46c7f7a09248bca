"""The arithmetic of one block that is not attention. Casts follow the reference (HF) exactly:
norms and rotary angles in float32, their results in the compute dtype."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Shapes that blocks and mixers share.
Places = Int[Array, "rows seq"]
Hidden = Float[Array, "rows seq width"]
Channels = Float[Array, "rows seq channels"]
Scalars = Float[Array, "rows seq heads"]
Heads = Float[Array, "rows seq heads dim"]


def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the exact GELU. For 16-bit inputs, compute in float32 and round once, as torch does.

    For those, `erf` is exact enough. It takes less than half the time of jax.nn's `erfc`, which is
    more exact for large negative inputs.
    """
    if x.dtype == jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * np.float32(0.5**0.5)))).astype(x.dtype)


# rms: scaled, cast, then weighted (Llama); rms_float32: weighted before the cast (OLMo 2);
# rms_plus_one: weighted by the stored weight plus one, before the cast (Gemma);
# layer: also centred, with weight and bias (GPT-2); layer_weight: without a bias (Cohere);
# layer_bare: without weight or bias (OLMo).
NORMS = ("rms", "rms_float32", "rms_plus_one", "layer", "layer_weight", "layer_bare")
_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), jax.nn.gelu),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(x * jnp.asarray(1.702, x.dtype)),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
# On a CPU, XLA adds up 512 float32 terms in sequence, torch 384. After one large term, such as the
# first token of a context has, every further addition rounds at that term's magnitude. Summing runs
# of at most this many terms, and then the sums, is as close to float64 as torch is
# (docs/exactness.md has the cost and the error of other lengths).
_RUN = 384
FLOAT8 = jnp.float8_e4m3fn
FLOAT16_MAX = float(jnp.finfo(jnp.float16).max)
_FLOAT8_MAX = float(jnp.finfo(FLOAT8).max)
_HAS_FLOAT8 = 8.9  # the compute capability of the first GPUs that multiply it


class Float8Weight(NamedTuple):
    """A float8 matrix with a scale for each output channel."""

    values: Float[Array, "*cycles out in"]
    scale: Float[Array, "*cycles out"]

    @classmethod
    def of(cls, weight: Float[Array, "*cycles out in"]) -> "Float8Weight":
        return cls(*to_float8(weight))


def norm(
    x: Float[Array, "*tokens width"],
    weight: Float[Array, "*heads width"] | None,
    bias: Float[Array, " width"] | None,
    kind: str,
    eps: float,
    *,
    rotated: bool = False,
) -> Float[Array, "*tokens width"]:
    """Normalise the last axis. `rotated`: whether `rotate` follows."""
    wide = x.astype(jnp.float32)
    if kind.startswith("layer"):
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    size = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if rotated:
        # On a GPU, this lets the kernel that rotates also divide, which saves a pass over memory.
        apart = {"cuda": jax.lax.optimization_barrier}
        size = jax.lax.platform_dependent(size, **apart, default=lambda size: size)
    wide = wide * size
    if weight is None:
        return wide.astype(x.dtype)
    scale = _per_channel(weight, x)
    if kind == "rms":
        return scale * wide.astype(x.dtype)
    scale = scale.astype(jnp.float32)
    wide = wide * (1.0 + scale if kind == "rms_plus_one" else scale)
    if bias is not None:
        wide = wide + _per_channel(bias, x).astype(jnp.float32)
    return wide.astype(x.dtype)


def linear(
    x: Float[Array, "*tokens in"],
    weight: Float[Array, "out in"] | Float8Weight,
    bias: Float[Array, " out"] | None = None,
) -> Float[Array, "*tokens out"]:
    if isinstance(weight, Float8Weight):
        y = _float8_product(x, weight)
    else:
        y = product("...i,oi->...o", x, weight)
    return y if bias is None else y + _per_channel(bias, y)


def product(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Array:
    """Return an einsum over the last axis of both; in float32 on a CPU, sum in short runs.

    Products with float16 weights are summed, and returned, in float32.
    """
    if weight.dtype == jnp.float16:
        return jnp.einsum(
            equation,
            to_float16(x),
            weight,
            precision=jax.lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )
    whole = partial(jnp.einsum, equation)
    if x.dtype != jnp.float32 or x.shape[-1] <= _RUN:
        return whole(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=partial(_in_runs, equation), default=whole)


def widened(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return what was looked up in a float16 table in float32, as all that is no product."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def to_float16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return float16 values, and NaN in place of those that are too large.

    Infinity could vanish later: an activation turns its negative into zero, a softmax into a
    weight of zero. NaN reaches every value that is computed from it.
    """
    fits = jnp.abs(x) <= FLOAT16_MAX
    return jnp.where(fits, x, jnp.nan).astype(jnp.float16)


def to_float8(
    x: Float[Array, "*lead width"],
) -> tuple[Float[Array, "*lead width"], Float[Array, "*lead"]]:
    """Return float8 values and their scales; each row's largest value becomes float8's largest."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    # A smaller scale could be flushed to zero.
    smallest = float(np.finfo(np.float32).tiny)
    scale = jnp.where(largest > 0, jnp.maximum(largest / _FLOAT8_MAX, smallest), 1.0)
    return (wide / scale[..., None]).astype(FLOAT8), scale


def _float8_product(
    x: Float[Array, "*tokens in"], weight: Float8Weight
) -> Float[Array, "*tokens out"]:
    """Multiply float8 by float8, with a scale for each token and each output channel.

    Devices without such an instruction multiply the same numbers in float32.
    """
    ways = {"cuda": _by_tensor_cores} if gpu_capability() >= _HAS_FLOAT8 else {}
    values, scale = to_float8(x)
    y = jax.lax.platform_dependent(values, weight.values, **ways, default=_in_float32)
    return (y * scale[..., None] * _per_channel(weight.scale, y)).astype(x.dtype)


def _by_tensor_cores(x: Float[Array, "*tokens in"], weight: Float[Array, "out in"]) -> Array:
    y = jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.bfloat16)
    return y.astype(jnp.float32)


def _in_float32(x: Float[Array, "*tokens in"], weight: Float[Array, "out in"]) -> Array:
    return product("...i,oi->...o", x.astype(jnp.float32), weight.astype(jnp.float32))


def gpu_capability() -> float:
    """Return the compute capability of this process's NVIDIA GPU, such as 9.0; 0 without one."""
    given = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    return float(given) if given.replace(".", "", 1).isdigit() else 0.0  # other makers have names


def _in_runs(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Array:
    width = x.shape[-1]
    count = -(-width // _RUN)
    ends = [i * width // count for i in range(1, count + 1)]
    runs = [slice(start, end) for start, end in pairwise([0, *ends])]
    parts = (jnp.einsum(equation, x[..., run], weight[..., run]) for run in runs)
    return reduce(jnp.add, parts)


def rotary_angles(
    positions: Int[Array, "rows seq"], frequencies: np.ndarray, amplitude: float
) -> tuple[Float[Array, "rows seq 1 half"], Float[Array, "rows seq 1 half"]]:
    """Return cos and sin for every token, in float32; every block uses them."""
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(
    x: Float[Array, "rows seq heads dim"],
    cos: Float[Array, "rows seq 1 half"],
    sin: Float[Array, "rows seq 1 half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "rows seq heads dim"]:
    """Rotate the pairs (i, i + half), or neighbours; other dimensions stay unchanged."""
    half = cos.shape[-1]
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    rest = x[..., 2 * half :]
    if interleaved:
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([turned.reshape(*x.shape[:-1], 2 * half), rest], axis=-1)
    first, second = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def activate(
    up: Float[Array, "*tokens mlp"],
    gate: Float[Array, "*tokens mlp"] | None,
    name: str,
    limit: float | None,
) -> Float[Array, "*tokens mlp"]:
    """Return the activations of an MLP's inner layer, multiplied by the gate if there is one."""
    if gate is None:
        return _ACTIVATIONS[name](up)
    if limit is not None:
        gate = jnp.minimum(gate, jnp.asarray(limit, gate.dtype))
        up = jnp.clip(up, -limit, limit) + jnp.asarray(1, up.dtype)
    return _ACTIVATIONS[name](gate) * up


def xielu(
    x: Float[Array, "*tokens mlp"], up: Float[Array, "1"], down: Float[Array, "1"]
) -> Float[Array, "*tokens mlp"]:
    """Return xIELU (arXiv:2411.13010), whose two slopes are learned; clamped at -1e-6 as in HF."""
    up, down = (_per_channel(jax.nn.softplus(bend), x) for bend in (up, down))
    half = jnp.asarray(0.5, x.dtype)
    below = jnp.expm1(jnp.minimum(x, jnp.asarray(-1e-6, x.dtype))) - x
    return jnp.where(x > 0, up * x * x, below * (half + down)) + half * x


def scaled(x: Float[Array, "..."], scale: float) -> Float[Array, "..."]:
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def softcap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Squash smoothly into (-cap, cap)."""
    if cap is None:
        return x
    limit = jnp.asarray(cap, x.dtype)
    return jnp.tanh(x / limit) * limit


def _per_channel(values: Float[Array, "*heads width"], like: Array) -> Array:
    """Reshape to broadcast over tokens; explicit, because implicit rank promotion is forbidden."""
    return jnp.expand_dims(values, tuple(range(like.ndim - values.ndim)))


def in_slices(
    function: Callable[..., dict[str, Array]], arrays: tuple[Array, ...], slices: int
) -> dict[str, Array]:
    """Apply a function of arrays [rows, tokens, ...] to some of the tokens at a time."""
    rows, tokens = arrays[0].shape[:2]
    slices = min(tokens, slices)
    if slices <= 1:
        return function(*arrays)
    size = -(-tokens // slices)

    def cut(a: Array) -> Array:
        padded = jnp.pad(a, ((0, 0), (0, slices * size - tokens), *[(0, 0)] * (a.ndim - 2)))
        return padded.reshape(rows, slices, size, *a.shape[2:]).swapaxes(0, 1)

    parts = jax.lax.map(lambda part: function(*part), tuple(map(cut, arrays)))
    return {
        name: a.swapaxes(0, 1).reshape(rows, slices * size, *a.shape[3:])[:, :tokens]
        for name, a in parts.items()
    }

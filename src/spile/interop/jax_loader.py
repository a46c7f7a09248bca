"""Batches as JAX arrays, sent to devices ahead of time; 8-bit rows are decoded on the device.

    batches = ds.batches(["resid_post.20"], 4096, encoded=True, drop_last=True)
    for batch in spile.on_devices(batches, NamedSharding(mesh, P("data"))): ...

With several processes, each passes its share (`rank=jax.process_index(), world=
jax.process_count()`). The rows of the global array have the same order for any number of processes.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import contextlib
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spile.core.errors import ConfigError
from spile.core.threads import Producer
from spile.dataset.read.batches import Batches
from spile.dataset.read.window import Affine, Encoded


def on_devices(
    batches: Batches,
    sharding: jax.sharding.Sharding | None = None,
    *,
    dtype: Any = None,
    ahead: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield the batches as JAX arrays; "index" stays numpy, and holds this process's share.

    `batch["state"]` is the position of the iteration after the batch. (`batches` itself is ahead by
    the batches in transfer.)

    Args:
        sharding: how the rows of all processes are laid out, along the first axis; None: on the
            default device.
        dtype: the dtype of taps, converted on the device; by default the stored one, or that of
            `batches` if it was given.
        ahead: batches to transfer while one is used.
    """
    _check(batches, sharding)
    # Threads only transfer; the caller alone starts programs. All processes of a world must start
    # their programs in the same order, which a second thread would break.
    source = Producer(_put(batches, sharding), ahead, "spile-to-devices")
    with contextlib.closing(source):
        for batch in source:
            yield {name: _made(values, dtype) for name, values in batch.items()}


def _check(batches: Batches, sharding: jax.sharding.Sharding | None) -> None:
    world, processes = batches.share.world, jax.process_count()
    if sharding is not None and not sharding.is_fully_addressable and world != processes:
        raise ConfigError(
            f"the batches have {world} ranks, but {processes} processes share the array; pass "
            "rank=jax.process_index(), world=jax.process_count()"
        )


class _Coded(NamedTuple):
    """8-bit values on devices, and the parameters to decode them."""

    codes: jax.Array
    scale: Any
    by_row: bool
    affine: Affine | None


def _put(
    batches: Batches, sharding: jax.sharding.Sharding | None
) -> Generator[dict[str, Any], None, None]:
    for batch in batches.unconverted():
        made: dict[str, Any] = {}
        for name, values in batch.items():
            if name == "index":
                made[name] = values
            elif isinstance(values, Encoded):
                by_row = batches.view_of(name).scaled_by(name) == "row"
                scale = _array(values.scale, batches, sharding) if by_row else values.scale
                codes = _array(values.codes, batches, sharding)
                made[name] = _Coded(codes, scale, by_row, batches.view_of(name).affine(name))
            else:
                made[name] = _array(values, batches, sharding)
        made["state"] = batches.state_dict()
        yield made


def _made(values: Any, dtype: Any) -> Any:
    if isinstance(values, _Coded):
        affine = values.affine or Affine(None, None)
        return _decoded(
            values.codes,
            values.scale,
            affine.shift,
            affine.factor,
            dtype=dtype,
            by_row=values.by_row,
        )
    if isinstance(values, jax.Array) and dtype is not None:
        return _cast(values, dtype=dtype)
    return values


def _array(
    values: np.ndarray, batches: Batches, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Return a global array; each process contributes its rows."""
    if sharding is None:
        return jax.device_put(values)
    rows = len(values) if sharding.is_fully_addressable else batches.given
    shape = (rows, *values.shape[1:])
    try:
        sharding.shard_shape(shape)
    except ValueError:
        raise ConfigError(
            f"a batch of {rows} rows cannot be split evenly over {len(sharding.device_set)} "
            "devices; choose another batch_size, and drop_last=True"
        ) from None
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.make_array_from_process_local_data(sharding, values, shape)


@partial(jax.jit, static_argnames=("dtype", "by_row"))
def _decoded(
    codes: jax.Array, scale: Any, shift: Any, factor: Any, *, dtype: Any, by_row: bool
) -> jax.Array:
    """Decode like `dataset.codec.quantization.decode`: in float32, rounded once."""
    scale = jnp.asarray(scale)
    scale = scale.reshape(-1, *[1] * (codes.ndim - 1)) if by_row else scale[None]
    values = codes.astype(jnp.float32) * scale
    if shift is not None:
        values = values - jnp.asarray(shift)[None]
    if factor is not None:
        factor = jnp.asarray(factor, jnp.float32)
        values = values * (factor[None] if factor.ndim else factor)
    return values if dtype is None else values.astype(dtype)


@partial(jax.jit, static_argnames="dtype")
def _cast(values: jax.Array, *, dtype: Any) -> jax.Array:
    return values.astype(dtype)

"""The mesh of devices: how a batch's rows, the weights and the stored rows are laid out on it.

Devices are ordered by process. So the parts of a model stay within a host as far as possible, and
each process holds one run of a step's stored rows, whatever the mesh.
(`mesh_utils.create_device_mesh` orders them by the torus instead, which breaks both.)
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spile.models.layout import AXES, ROWS, Cuts, Layout

P = PartitionSpec
PINNED = "pinned_host"  # host memory that the device copies from and to at full rate

_MOVED = 256 << 20  # bytes moved at a time


def make_mesh(layout: Layout, devices: Sequence[Any]) -> Mesh:
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    shape = (layout.data, layout.fsdp, layout.model)
    return Mesh(np.array(ordered).reshape(shape), AXES)


@dataclass(frozen=True)
class Shards:
    """The layout of one model's arrays on one mesh."""

    mesh: Mesh
    cuts: Cuts
    axes: Mapping[str, tuple[str, ...]] = field(hash=False)  # of each array of the model, by name

    @cached_property
    def layout(self) -> Layout:
        return self.cuts.layout

    def kept(self, name: str, *, stacked: bool = False, scale: bool = False) -> NamedSharding:
        """The sharding of a model's array.

        Args:
            stacked: with a leading axis of blocks.
            scale: of the scales of its output channels instead.
        """
        along = self.cuts.along(self.axes[name])[: -1 if scale else None]
        return self._named(*[None] * stacked, *along)

    def used(self, name: str, array: jax.Array) -> jax.Array:
        """Lay an array out as a block uses it: gather here what is cut along `fsdp`.

        It may also be the scales of the array's output channels.
        """
        along = self.cuts.along(self.axes[name], gathered=True)[: array.ndim]
        return jax.lax.with_sharding_constraint(array, self._named(*along))

    def rows(self, array: jax.Array) -> jax.Array:
        """Lay out [rows, ...] by rows."""
        return jax.lax.with_sharding_constraint(array, self._named(ROWS))

    def runs(self, array: jax.Array, *, lead: int = 0) -> jax.Array:
        """Lay out [..., tokens, ...] so that each device has a run of them, in device order."""
        return jax.lax.with_sharding_constraint(array, self._named(*[None] * lead, AXES))

    @property
    def by_rows(self) -> NamedSharding:
        return self._named(ROWS)

    def by_runs(self, memory: str | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, P(AXES), memory_kind=memory)

    @property
    def whole(self) -> NamedSharding:
        return self._named()

    def each(
        self, function: Callable[..., Any], specs: Sequence[PartitionSpec], out: PartitionSpec
    ) -> Callable[..., Any]:
        """Return a function that every device applies to its own part."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(specs), out_specs=out, check_vma=False
        )

    def model_axis(self, logical: str) -> str | None:
        """`model` if this logical axis is cut along it."""
        return self.cuts.cut.get(logical)

    def _named(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Make a global array from one that every process has; each device gets its part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def local_runs(array: jax.Array) -> list[np.ndarray]:
    """The parts of an array, cut along its first axis, on this process's devices, in order."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]


def moved(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same array in another layout, on the same or on other devices.

    A large array is moved piece by piece: memory holds only one piece beside the two copies.
    """
    pieces = min(len(array), -(-array.nbytes // _MOVED)) if array.ndim else 1
    if pieces <= 1:
        return jax.device_put(array, sharding)
    size = -(-len(array) // pieces)
    out = jax.jit(lambda: jnp.zeros(array.shape, array.dtype), out_shardings=sharding)()
    write = jax.jit(
        lambda out, piece, start: jax.lax.dynamic_update_slice_in_dim(out, piece, start, 0),
        donate_argnums=0, out_shardings=sharding,
    )  # fmt: skip
    whole = NamedSharding(sharding.mesh, P())
    for start in range(0, len(array), size):
        piece = jax.device_put(array[start : start + size], whole)
        out = write(out, piece, jax.device_put(np.int32(start), whole))
    return out

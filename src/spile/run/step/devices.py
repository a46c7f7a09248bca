"""The devices that a step runs on, and how its arrays are laid out there."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array

from spile.corpus.pack import Batch
from spile.models.forward.sharding import PINNED, Shards, put
from spile.run.step.stored import Extras


@dataclass(frozen=True)
class StepDevices:
    """The devices that a step runs on, and how its arrays are laid out there."""

    device: Any  # one of them; the only one, if there are no `shards`
    shards: Shards | None = None

    @property
    def devices(self) -> int:
        return self.shards.layout.size if self.shards else 1

    @property
    def own(self) -> slice:
        """This process's devices, as a slice of all."""
        if self.shards is None:
            return slice(None)
        owners = [device.process_index for device in self.shards.mesh.devices.flat]
        first = owners.index(jax.process_index())
        return slice(first, first + owners.count(jax.process_index()))

    def host(self, *, gathered: bool = False) -> Sharding | None:
        """The sharding of rows that leave the device; None if there is nothing to copy.

        Copies into pinned memory run at the link's full rate and beside the next step; ordinary
        copies do neither. On a CPU, host and device memory are the same.
        """
        if self.device.platform == "cpu":
            return None
        if self.shards:
            shards = self.shards
            return shards.whole.with_memory_kind(PINNED) if gathered else shards.by_runs(PINNED)
        return SingleDeviceSharding(self.device, memory_kind=PINNED)

    def gathers(self, pool: str | None) -> bool:
        """Whether every device gets the rows of all: a span's tokens may lie in several processes.

        A pooled row stands for many tokens, so this moves little.
        """
        return pool is not None and self.own != slice(0, self.devices) and self.shards is not None

    def stream(self, kind: str = "device") -> Sharding:
        """The sharding of a stream in this kind of memory."""
        if self.shards:
            return self.shards.by_rows.with_memory_kind(kind)
        return SingleDeviceSharding(self.device, memory_kind=kind)

    def divisible(self, batch: Batch) -> Batch:
        """Pad the columns, so that every device has the same number of tokens that may be kept."""
        rows, width = len(batch.tokens), batch.leaving[1]
        if rows * width % self.devices == 0:
            return batch
        assert self.shards
        if batch.sizes is not None:
            more = -width % self.shards.layout.model
            return replace(batch, sizes=np.pad(batch.sizes, ((0, 0), (0, more))))
        columns = batch.columns
        if columns is None:
            columns = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))
        more = -width % self.shards.layout.model
        return replace(batch, columns=np.pad(columns, ((0, 0), (0, more))))

    def fetch(self, gaps: Array | None) -> Array | None:
        """Begin to copy an array that is whole on every device to the host."""
        host = self.host(gathered=True)
        return gaps if gaps is None or host is None else jax.device_put(gaps, host)

    def put(self, kept: np.ndarray, inputs: Sequence[np.ndarray | None]) -> tuple[Any, Any]:
        """Copy the places of kept tokens, and a batch's arrays, to the devices."""
        if self.shards is None:
            return jax.device_put((kept, tuple(inputs)))
        by_rows = self.shards.by_rows
        arrays = (None if array is None else put(array, by_rows) for array in inputs)
        return put(kept, self.shards.by_runs()), tuple(arrays)

    def everywhere(self, extras: Extras) -> Extras:
        """Copy arrays whole to every device; shapes in place of arrays pass through."""
        place = self.shards.whole if self.shards else None

        def whole(given: Any) -> Any:
            abstract = isinstance(given, jax.ShapeDtypeStruct)
            return given if abstract else jax.device_put(given, place)

        return jax.tree.map(whole, extras)

    def by_rows(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = self.shards.by_rows if self.shards else None
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    def by_runs(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = self.shards.by_runs() if self.shards else None
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

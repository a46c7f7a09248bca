"""The decoder's weights, from checkpoint files to device arrays.

Only the blocks that will run are read, checked and hashed.

Every tensor's full hash is taken as it is read. The first worker of a dataset records them in the
store, and every later one compares before its first commit, so that weights which changed under
the same path cannot slip into half of a dataset.
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

import math
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from numpy.lib.array_utils import byte_bounds

from spile.core.tensors import TensorInfo, as_bytes
from spile.models.config.arch import Arch
from spile.models.config.specs import ParamSpec, block_specs, head_specs, outer_specs
from spile.models.files import quantized as mxfp4
from spile.models.files.checkpoint import Checkpoint
from spile.models.files.safetensors import read_tensor
from spile.models.forward.sharding import Shards, moved

_THREADS = 8
_COPIED = 2 << 20  # bytes of a tensor that each thread has in memory at a time
_HASHED = 2 << 20
_ALIGNED = 64

Index = tuple[slice, ...]
# Arrays by name; jax puts placeholders in their stead while it looks at the tree.
Arrays = dict[str, Any]
Block = Arrays  # of one block; inside `Params.cycle` each has a leading axis of cycles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The weights on the device; those after the blocks only where a tap asks for them.

    Blocks whose kinds repeat are scanned: `cycle` has one entry for each block of a period, its
    arrays stacked over the repetitions. What does not fill a period is in `tail`, block by block.
    """

    outer: Arrays
    cycle: tuple[Block, ...]
    tail: tuple[Block, ...]


@dataclass(frozen=True)
class LayerSchedule:
    """How the first `depth` blocks are run: `cycles` times a period, then the rest."""

    depth: int
    period: int
    cycles: int

    @classmethod
    def of(cls, arch: Arch, depth: int, *, whole: bool) -> "LayerSchedule":
        """Without `whole` the last block stands apart: what no tap needs of it is left out."""
        return cls(depth, arch.period, max(0, depth - (not whole)) // arch.period)

    @property
    def scanned(self) -> int:
        return self.period * self.cycles


@dataclass(frozen=True)
class ShardBuffer:
    """The part of an array that some device will hold, and where it lies in the whole."""

    out: np.ndarray
    index: Index


def load_params(
    checkpoint: Checkpoint,
    schedule: LayerSchedule,
    *,
    head: bool,
    dtype: jnp.dtype,
    shards: Shards | None = None,
    hashed: tuple[int, int] = (0, 1),
) -> tuple[Params, dict[str, str]]:
    """Read the blocks that are scheduled (and the head if asked for).

    Args:
        shards: where each array lies; of what lies elsewhere nothing is read.
        hashed: this process's number, and how many share the work of hashing.

    Returns:
        The parameters, and a hash for each tensor of this process's share.
    """
    loading = _Loading(checkpoint, schedule, dtype, shards)
    late = {spec.name for spec in head_specs(checkpoint.arch)}
    cycle: tuple[Block, ...] = ()
    if schedule.cycles:
        places = range(schedule.period)
        cycle = tuple(
            {name: loading.stacked(spec, place) for name, spec in loading.blocks.items()}
            for place in places
        )
    params = Params(
        outer={
            spec.name: loading.whole(spec)
            for spec in outer_specs(checkpoint.arch)
            if head or spec.name not in late
        },
        cycle=cycle,
        tail=tuple(
            {name: loading.whole(spec, layer) for name, spec in loading.blocks.items()}
            for layer in range(schedule.scanned, schedule.depth)
        ),
    )
    return params, loading.digests(*hashed, head=head)


def moved_params(params: Params, shards: Shards) -> Params:
    """A loaded model laid out on another mesh, array by array."""

    def block(arrays: Block, *, stacked: bool) -> Block:
        return {n: moved(a, shards.kept(n, stacked=stacked)) for n, a in arrays.items()}

    return Params(
        outer=block(params.outer, stacked=False),
        cycle=tuple(block(arrays, stacked=True) for arrays in params.cycle),
        tail=tuple(block(arrays, stacked=False) for arrays in params.tail),
    )


class _Loading:
    """Arrays of ours, out of a checkpoint's tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        schedule: LayerSchedule,
        dtype: jnp.dtype,
        shards: Shards | None,
    ) -> None:
        self._checkpoint, self._schedule = checkpoint, schedule
        self._dtype, self._shards = dtype, shards
        self.blocks = {spec.name: spec for spec in block_specs(checkpoint.arch)}
        self._digests: dict[str, str] = {}

    def whole(self, spec: ParamSpec, layer: int | None = None) -> jax.Array:
        def fill(parts: list[ShardBuffer]) -> None:
            self._fill(parts, spec, layer)

        return self._array(spec.shape, spec.name, fill, stacked=False)

    def stacked(self, spec: ParamSpec, place: int) -> jax.Array:
        """The arrays of every block at this place of a period."""
        schedule = self._schedule

        def fill(parts: list[ShardBuffer]) -> None:
            def fill_one(cycle: int) -> None:
                those = [ShardBuffer(part.out[cycle], part.index[1:]) for part in parts]
                self._fill(those, spec, cycle * schedule.period + place)

            # Copying and hashing leave the interpreter alone; one core cannot keep up with a disk.
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(fill_one, range(schedule.cycles)))

        return self._array((schedule.cycles, *spec.shape), spec.name, fill, stacked=True)

    def _array(
        self,
        shape: tuple[int, ...],
        name: str,
        fill: Callable[[list[ShardBuffer]], None],
        stacked: bool,
    ) -> jax.Array:
        def parts(indices: Iterable[Index]) -> dict[str, ShardBuffer]:
            """Devices that hold the same are given the same."""
            made = {str(i): i for i in indices}
            buffers = {
                k: ShardBuffer(_buffer(_shape(shape, i), self._dtype), i) for k, i in made.items()
            }
            fill(list(buffers.values()))
            return buffers

        if self._shards is None:
            (part,) = parts([(slice(None),) * len(shape)]).values()
            return jnp.asarray(part.out)
        sharding = self._shards.kept(name, stacked=stacked)
        found = parts(
            i for i in sharding.addressable_devices_indices_map(shape).values() if i is not None
        )
        return jax.make_array_from_callback(shape, sharding, lambda index: found[str(index)].out)

    def _fill(self, parts: list[ShardBuffer], spec: ParamSpec, layer: int | None) -> None:
        """Fill parts of one of our arrays; each tensor is read once for them all."""
        checkpoint = self._checkpoint
        source = checkpoint.source(spec.name)
        for number, name in enumerate(checkpoint.names(spec, layer)):
            wanted = _of_expert(parts, number, spec.shape[0]) if source.per_expert else parts

            def take(tensor: np.ndarray, wanted: list[ShardBuffer] = wanted) -> list[np.ndarray]:
                taken = source.take(tensor, spec, self.blocks, checkpoint.arch.head_dim)
                return [taken[part.index] for part in wanted]

            if wanted:
                tensor = self._read(name, take)
                for part, taken in zip(wanted, take(tensor), strict=True):
                    _copy(taken, part.out, tensor)

    def _read(self, name: str, take: Callable[[np.ndarray], list[np.ndarray]]) -> np.ndarray:
        """A tensor, of which nothing is looked at but what is taken."""
        checkpoint = self._checkpoint
        stored, adapter = checkpoint.stored(name), checkpoint.adapter
        # Decoding and merging look at all of a tensor.
        as_stored = len(stored) == 1 and not (adapter and name in adapter.targets)
        parts: list[np.ndarray] = []
        for each in stored:
            file, info = checkpoint.tensors[each]
            remote = not isinstance(file, Path)
            used = _used(info, take) if remote and as_stored else slice(0, info.stop - info.start)
            parts.append(read_tensor(file, info, used))
            # What is fetched whole is hashed as it comes, and what is mapped when we are alone and
            # read all of it anyway; once, though it may hold several arrays.
            whole = used == slice(0, info.stop - info.start) if remote else self._shards is None
            if whole and each not in self._digests:
                self._digests[each] = xxhash.xxh3_128_hexdigest(as_bytes(parts[-1]))
        tensor = mxfp4.decode(*parts) if len(parts) > 1 else parts[0]
        return adapter.merge(name, tensor) if adapter else tensor

    def digests(self, process: int, processes: int, *, head: bool) -> dict[str, str]:
        """The hashes of a share of the tensors: between them, processes take those of all."""
        share = sorted(self._tensors(head))[process::processes]
        with ThreadPoolExecutor(_THREADS) as pool:
            taken = pool.map(lambda name: self._digests.get(name) or self._digest(name), share)
            return dict(zip(share, taken, strict=True))

    def _tensors(self, head: bool) -> set[str]:
        """Every tensor that any process reads."""
        checkpoint = self._checkpoint
        late = {spec.name for spec in head_specs(checkpoint.arch)}
        outer = [s for s in outer_specs(checkpoint.arch) if head or s.name not in late]
        names = [name for spec in outer for name in checkpoint.names(spec)]
        for layer in range(self._schedule.depth):
            names += [n for s in self.blocks.values() for n in checkpoint.names(s, layer)]
        return {stored for name in names for stored in checkpoint.stored(name)}

    def _digest(self, name: str) -> str:
        """From the file, piece by piece: what is mapped counts as this process's memory."""
        path, info = self._checkpoint.tensors[name]
        state = xxhash.xxh3_128()
        with path.open("rb") as file:
            file.seek(info.start)
            for start in range(info.start, info.stop, _HASHED):
                state.update(file.read(min(_HASHED, info.stop - start)))
        return state.hexdigest()


def _of_expert(parts: list[ShardBuffer], number: int, experts: int) -> list[ShardBuffer]:
    """What one expert's tensor is to fill, of parts that begin with an axis of experts."""
    found: list[ShardBuffer] = []
    for part in parts:
        held = range(experts)[part.index[0]]
        if number in held:
            found.append(ShardBuffer(part.out[held.index(number)], part.index[1:]))
    return found


def _used(info: TensorInfo, take: Callable[[np.ndarray], list[np.ndarray]]) -> slice:
    """The bytes of a tensor from the first that is taken to the last."""
    tensor = np.empty(info.shape, info.dtype)  # never touched
    begin, _ = byte_bounds(tensor)
    low, high = tensor.nbytes, 0
    for taken in take(tensor):
        if not np.may_share_memory(taken, tensor):  # it is a copy, of who knows what
            return slice(0, tensor.nbytes)
        first, end = byte_bounds(taken)
        low, high = min(low, first - begin), max(high, end - begin)
    return slice(low, high)


def _copy(taken: np.ndarray, target: np.ndarray, tensor: np.ndarray) -> None:
    """Copy what was taken of a tensor, some rows at a time: pages that were read are let go."""
    if not taken.ndim:
        target[...] = taken
        return
    rows = max(1, _COPIED // max(1, tensor.nbytes // len(taken)))
    for start in range(0, len(taken), rows):
        target[start : start + rows] = taken[start : start + rows]
        if isinstance(tensor.base, mmap.mmap):
            tensor.base.madvise(mmap.MADV_DONTNEED)


def _shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(size)[part]) for size, part in zip(shape, index, strict=True))


def _buffer(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Aligned as jax wants it: where device and host are one, it need not be copied."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)

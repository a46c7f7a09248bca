"""From checkpoint files to device arrays: only the blocks that will run, checked and hashed.

Every tensor's full hash is taken as it is read. The first worker of a dataset records them in the
store, and every later one compares before its first commit, so that weights which changed under
the same path cannot slip into half of a dataset.
"""

import math
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from spile.models import mxfp4
from spile.models.checkpoint import Checkpoint
from spile.models.params import Block, Params, Schedule
from spile.models.specs import ParamSpec, block_specs, head_specs, outer_specs
from spile.sharding import Shards, moved
from spile.tensors import as_bytes, map_tensor

_THREADS = 8
_COPIED = 2 << 20  # bytes of a tensor that each thread has in memory at a time
_HASHED = 2 << 20
_ALIGNED = 64

Index = tuple[slice, ...]


def load_params(
    checkpoint: Checkpoint,
    schedule: Schedule,
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
        schedule: Schedule,
        dtype: jnp.dtype,
        shards: Shards | None,
    ) -> None:
        self._checkpoint, self._schedule = checkpoint, schedule
        self._dtype, self._shards = dtype, shards
        self.blocks = {spec.name: spec for spec in block_specs(checkpoint.arch)}
        self._digests: dict[str, str] = {}

    def whole(self, spec: ParamSpec, layer: int | None = None) -> jax.Array:
        def part(index: Index) -> np.ndarray:
            out = _buffer(_shape(spec.shape, index), self._dtype)
            self._fill(out, spec, layer, index)
            return out

        return self._array(spec.shape, spec.name, part, stacked=False)

    def stacked(self, spec: ParamSpec, place: int) -> jax.Array:
        """The arrays of every block at this place of a period."""
        schedule = self._schedule

        def part(index: Index) -> np.ndarray:
            out = _buffer((schedule.cycles, *_shape(spec.shape, index[1:])), self._dtype)

            def fill(cycle: int) -> None:
                self._fill(out[cycle], spec, cycle * schedule.period + place, index[1:])

            # Copying and hashing leave the interpreter alone; one core cannot keep up with a disk.
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(fill, range(schedule.cycles)))
            return out

        return self._array((schedule.cycles, *spec.shape), spec.name, part, stacked=True)

    def _array(
        self, shape: tuple[int, ...], name: str, part: Callable[[Index], np.ndarray], stacked: bool
    ) -> jax.Array:
        if self._shards is None:
            return jnp.asarray(part((slice(None),) * len(shape)))
        sharding = self._shards.kept(name, stacked=stacked)
        found: dict[str, np.ndarray] = {}  # devices that hold the same are given the same

        def of_device(index: Index | None) -> np.ndarray:
            assert index is not None
            key = str(index)
            if key not in found:
                found[key] = part(index)
            return found[key]

        return jax.make_array_from_callback(shape, sharding, of_device)

    def _fill(self, out: np.ndarray, spec: ParamSpec, layer: int | None, index: Index) -> None:
        checkpoint = self._checkpoint
        source = checkpoint.source(spec.name)
        names = checkpoint.names(spec, layer)
        targets = [out]
        if source.per_expert:
            targets, names, index = list(out), names[index[0]], index[1:]
        for target, name in zip(targets, names, strict=True):
            tensor = self._read(name)
            taken = source.take(tensor, spec, self.blocks, checkpoint.arch.head_dim)[index]
            _copy(taken, target, tensor)

    def _read(self, name: str) -> np.ndarray:
        checkpoint = self._checkpoint
        parts: list[np.ndarray] = []
        for stored in checkpoint.stored(name):
            parts.append(map_tensor(*checkpoint.tensors[stored]))
            # Alone we read all of it anyway; once, though it may hold several arrays.
            if self._shards is None and stored not in self._digests:
                self._digests[stored] = xxhash.xxh3_128_hexdigest(as_bytes(parts[-1]))
        tensor = mxfp4.decode(*parts) if len(parts) > 1 else parts[0]
        return checkpoint.adapter.merge(name, tensor) if checkpoint.adapter else tensor

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

"""The decoder's weights, from checkpoint files to device arrays.

Only the blocks that will run are read, checked and hashed.

The full hash of every tensor is computed as it is read. The first worker of a dataset records the
hashes in the store, and every later one compares before its first commit. So weights that changed
under the same path cannot end up in half of a dataset. A tensor that is read again, for another
sweep, is hashed again.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from numpy.lib.array_utils import byte_bounds

from spile.core.errors import ConfigError
from spile.core.tensors import TensorInfo, as_bytes
from spile.core.threads import cancellation
from spile.models.config.specs import (
    ParamSpec,
    TensorSource,
    block_specs,
    head_specs,
    in_float8,
    outer_specs,
)
from spile.models.files.checkpoint import Checkpoint
from spile.models.files.safetensors import read_tensor
from spile.models.forward.ops import FLOAT8, Float8Weight
from spile.models.forward.sharding import Shards
from spile.models.forward.weights import (
    Block,
    LayerSchedule,
    Params,
    WeightArrays,
    held_dtype,
    kept_as,
)
from spile.objects.opened import OpenedFile, changed

_THREADS = 8
_PUTTING = 4  # threads
_READING = 4  # threads, for each tensor
_BLOCKS = 4  # are read and copied at a time
_COPIED = 2 << 20  # bytes of a tensor that each thread holds in memory at a time
_HASHED = 2 << 20
_READ = 8 << 20  # bytes that are read and hashed at a time

Index = tuple[slice, ...]


@dataclass(frozen=True)
class ShardBuffer:
    """The part of an array that a device will hold, and its place in the whole."""

    out: np.ndarray
    index: Index


Parts = Mapping[str, ShardBuffer]  # by index, written out
# Arrays by name; tensors that are packed, as they are stored, by their names in the first block.
HostBlock = Mapping[str, Parts | np.ndarray]


def load_params(
    checkpoint: Checkpoint,
    schedule: LayerSchedule,
    *,
    head: bool,
    dtype: jnp.dtype,
    shards: Shards | None = None,
    hashed: tuple[int, int] = (0, 1),
) -> tuple[Params, dict[str, str]]:
    """Read the scheduled blocks (and the head if `head`).

    Args:
        dtype: float8 is for the blocks' matrices; the other arrays are then in bfloat16. float16
            is for all matrices; the other arrays are then in float32.
        shards: the layout of each array; parts that lie elsewhere are not read.
        hashed: this process's number, and the number of processes that share the hashing.

    Returns:
        The parameters, and a hash for each tensor of this process's share.
    """
    loader = ArrayLoader(checkpoint, schedule, dtype, shards)
    params = loader.params(head=head)
    return params, loader.digests(*hashed, head=head)


class ArrayLoader:
    """Makes our arrays from a checkpoint's tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        schedule: LayerSchedule,
        dtype: jnp.dtype,
        shards: Shards | None,
    ) -> None:
        self._checkpoint, self._schedule = checkpoint, schedule
        self._cancellation = cancellation()  # tensors are read in other threads
        self._dtype, self._float8 = dtype, dtype == FLOAT8
        self._shards = shards
        self.blocks = {spec.name: spec for spec in block_specs(checkpoint.arch)}
        self._digests: dict[str, str] = {}
        self._setters: dict[tuple[str, ...], Any] = {}

    def held_dtype(self, name: str) -> jnp.dtype:
        return held_dtype(name, self._dtype)

    def whole(self, spec: ParamSpec, layer: int | None = None) -> Any:
        def fill(parts: list[ShardBuffer]) -> None:
            self._fill(parts, spec, layer)

        return self._narrowed(spec, self._array(spec.shape, spec.name, fill, stacked=False))

    def _specs(self, layer: int) -> tuple[ParamSpec, ...]:
        arch = self._checkpoint.arch
        return block_specs(arch, arch.layers[layer])

    def _by_name(self, layer: int | None) -> dict[str, ParamSpec]:
        """The arrays of a block; none of those outside the blocks is fused with another."""
        return {} if layer is None else {spec.name: spec for spec in self._specs(layer)}

    def params(self, *, head: bool) -> Params:
        """All arrays of the scheduled blocks; those after the blocks only if `head`."""
        schedule = self._schedule
        cycle = self._stacked() if schedule.cycles else ()
        tail, lead = (
            tuple(map(self.unpacked, self.copied_blocks(layers)))
            for layers in (range(schedule.scanned, schedule.depth), range(schedule.lead))
        )
        return Params(self.outer(head=head), cycle, tail, lead)

    def outer(self, *, head: bool, embedding: bool = True) -> WeightArrays:
        """The arrays before and, if `head`, after the blocks."""
        arch = self._checkpoint.arch
        late = {spec.name for spec in head_specs(arch)}
        return {
            spec.name: self.whole(spec)
            for spec in outer_specs(arch)
            if (head or spec.name not in late) and (embedding or spec.name != "embed")
        }

    def on_host(self, spec: ParamSpec) -> np.ndarray:
        """An array before or after the blocks, in host memory."""
        out = _buffer(spec.shape, self.held_dtype(spec.name))
        self._fill([ShardBuffer(out, (slice(None),) * out.ndim)], spec, None)
        return out

    def _stacked(self) -> tuple[Block, ...]:
        """The arrays of every block at each place of a period, stacked."""
        schedule, stacks = self._schedule, list[Block]()
        repeated = range(schedule.lead, schedule.scanned)
        for number, block in enumerate(self.copied_blocks(repeated)):
            cycle, place = divmod(number, schedule.period)
            unpacked = self.unpacked(block)
            if cycle == 0:
                stacks.append(self._room_for(unpacked))
            stacks[place] = self._set_in(stacks[place], unpacked, cycle)
        return tuple(stacks)

    def copied_blocks(self, layers: Iterable[int]) -> Iterator[Block]:
        """Blocks on the device, packed tensors as they are stored.

        Some are read and copied at a time: one thread fills neither the disk nor the link. Neither
        the host nor the device holds more than those before they are taken.
        """

        def copied(layer: int) -> Block:
            return jax.block_until_ready(self.put_block(layer, self.host_block(layer)))

        wanted = iter(layers)
        with ThreadPoolExecutor(_BLOCKS) as pool:
            coming = deque(pool.submit(copied, layer) for layer in islice(wanted, _BLOCKS))
            try:
                while coming:
                    block = coming.popleft().result()
                    coming.extend(pool.submit(copied, layer) for layer in islice(wanted, 1))
                    yield block
            finally:
                pool.shutdown(cancel_futures=True)

    def _room_for(self, block: Block) -> Block:
        """A stack with room for such a block of each cycle, still empty."""
        cycles = self._schedule.cycles

        def zeros() -> Block:
            return jax.tree.map(lambda one: jnp.zeros((cycles, *one.shape), one.dtype), block)

        return jax.jit(zeros, out_shardings=self._stack_places(block))()

    def _set_in(self, stack: Block, block: Block, number: int) -> Block:
        """Set one block of a stack, in place."""
        names = tuple(block)  # those of its kind
        if names not in self._setters:

            def set_in(stack: Block, block: Block, number: Any) -> Block:
                set_one = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
                return jax.tree.map(set_one, stack, block)

            places = self._stack_places(block)
            self._setters[names] = jax.jit(set_in, donate_argnums=0, out_shardings=places)
        return self._setters[names](stack, block, number)

    def _stack_places(self, block: Block) -> Any:
        """The shardings of a stack of such blocks; None on one device."""
        shards = self._shards
        float8 = {n: self._float8 and in_float8(self.blocks[n]) for n in block}
        return shards and {n: kept_as(n, shards, stacked=True, float8=float8[n]) for n in block}

    def host_block(self, layer: int) -> HostBlock:
        """One block in host memory; packed tensors as they are stored. `put_block` takes it."""
        reads = dict[str, Callable[[], Parts | np.ndarray]]()
        for spec in self._specs(layer):
            if not self._packs(spec):
                reads[spec.name] = partial(self._parts, spec, layer)
                continue
            # A tensor that holds several arrays is read, and copied, once.
            known = self._checkpoint.layer_with(spec)
            here, first = (self._stored(spec, number) for number in (layer, known))
            for name, known_as in zip(chain(*here), chain(*first), strict=True):
                reads[known_as] = partial(self._as_stored, name)
        with ThreadPoolExecutor(_THREADS) as pool:
            return dict(zip(reads, pool.map(lambda read: read(), reads.values()), strict=True))

    def put_block(self, layer: int, found: HostBlock) -> Block:
        """Copy a block to the device; packed tensors stay so until `unpacked`."""
        specs = self._by_name(layer)

        def put(name: str) -> Any:
            parts = found[name]
            if isinstance(parts, np.ndarray):
                return jax.device_put(parts)
            spec = specs[name]
            return self._narrowed(spec, self._put(parts, spec.shape, name, stacked=False))

        # The runtime copies each array in the thread that puts it, and one does not fill the link.
        with ThreadPoolExecutor(_PUTTING) as pool:
            return dict(zip(found, pool.map(put, found), strict=True))

    def unpacked(self, block: Block) -> Block:
        """A block whose packed tensors are decoded, on the device."""
        packed = {name: array for name, array in block.items() if name not in self.blocks}
        plain = {name: array for name, array in block.items() if name in self.blocks}
        return plain | self._decode(packed) if packed else block

    def _packs(self, spec: ParamSpec) -> bool:
        return self._shards is None and self._checkpoint.stays_packed(spec)

    def _stored(self, spec: ParamSpec, layer: int) -> list[tuple[str, ...]]:
        """The stored tensors of each tensor that holds an array."""
        return [self._checkpoint.stored(name) for name in self._checkpoint.names(spec, layer)]

    def _as_stored(self, name: str) -> np.ndarray:
        info = self._checkpoint.tensors[name][1]
        out = _buffer(info.shape, info.dtype)
        self._read_into(name, out)
        return out

    @cached_property
    def _decode(self) -> Callable[[WeightArrays], WeightArrays]:
        """Decodes the stored tensors of a block, named as those of the first block of its kind."""

        kinds = dict.fromkeys(self._checkpoint.arch.layers)
        every = dict.fromkeys(s for k in kinds for s in block_specs(self._checkpoint.arch, k))

        def decode(stored: WeightArrays) -> WeightArrays:
            packed = filter(self._packs, every)
            first = {s: self._stored(s, self._checkpoint.layer_with(s))[0][0] for s in packed}
            return {s.name: self._decoded(s, stored) for s, name in first.items() if name in stored}

        return jax.jit(decode)

    def _decoded(self, spec: ParamSpec, stored: WeightArrays) -> Any:
        checkpoint, source = self._checkpoint, self._checkpoint.source(spec.name)
        arrays: list[jax.Array] = []
        layer = checkpoint.layer_with(spec)
        names = zip(checkpoint.names(spec, layer), self._stored(spec, layer), strict=True)
        for name, parts in names:
            tensor: Any = checkpoint.packed[name].decode(jnp, *[stored[part] for part in parts])
            taken = source.take(tensor, spec, self._by_name(layer))
            arrays.append(jnp.asarray(taken).astype(self.held_dtype(spec.name)))
        array = jnp.stack(arrays) if source.one_by_one else arrays[0]
        return Float8Weight.of(array) if self._float8 and in_float8(spec) else array

    def _narrowed(self, spec: ParamSpec, array: jax.Array) -> Any:
        """The array in float8, if it is to be and can be."""
        if not (self._float8 and in_float8(spec)):
            return array
        place = None
        if self._shards:
            stacked = array.ndim > len(spec.shape)
            place = kept_as(spec.name, self._shards, stacked=stacked, float8=True)
        return jax.jit(Float8Weight.of, out_shardings=place)(array)

    def _array(
        self,
        shape: tuple[int, ...],
        name: str,
        fill: Callable[[list[ShardBuffer]], None],
        stacked: bool,
    ) -> jax.Array:
        return self._put(self._filled(shape, name, fill, stacked), shape, name, stacked)

    def _parts(self, spec: ParamSpec, layer: int) -> Parts:
        def fill(parts: list[ShardBuffer]) -> None:
            self._fill(parts, spec, layer)

        return self._filled(spec.shape, spec.name, fill, stacked=False)

    def _filled(
        self,
        shape: tuple[int, ...],
        name: str,
        fill: Callable[[list[ShardBuffer]], None],
        stacked: bool,
    ) -> Parts:
        """The parts of an array that this process's devices hold; equal ones are one buffer."""
        indices: Iterable[Index | None] = [(slice(None),) * len(shape)]
        if self._shards is not None:
            sharding = self._shards.kept(name, stacked=stacked)
            indices = sharding.addressable_devices_indices_map(shape).values()
        made = {str(i): i for i in indices if i is not None}
        dtype = self.held_dtype(name)
        parts = {k: ShardBuffer(_buffer(_shape(shape, i), dtype), i) for k, i in made.items()}
        fill(list(parts.values()))
        return parts

    def _put(self, parts: Parts, shape: tuple[int, ...], name: str, stacked: bool) -> jax.Array:
        if self._shards is None:
            (part,) = parts.values()
            return jnp.asarray(part.out)
        sharding = self._shards.kept(name, stacked=stacked)
        return jax.make_array_from_callback(shape, sharding, lambda index: parts[str(index)].out)

    def _fill(self, parts: list[ShardBuffer], spec: ParamSpec, layer: int | None) -> None:
        """Fill parts of one of our arrays; each tensor is read once for all of them."""
        checkpoint = self._checkpoint
        source, specs = checkpoint.source(spec.name), self._by_name(layer)
        for number, name in enumerate(checkpoint.names(spec, layer)):
            wanted = _of_expert(parts, number, spec.shape[0]) if source.one_by_one else parts

            def take(tensor: np.ndarray, wanted: list[ShardBuffer] = wanted) -> list[np.ndarray]:
                taken = source.take(tensor, spec, specs)
                return [taken[part.index] for part in wanted]

            if self._plain(name, source, wanted):
                self._read_into(name, wanted[0].out)
            elif wanted:
                tensor = self._read(name, take)
                for part, taken in zip(wanted, take(tensor), strict=True):
                    _copy(taken, part.out, tensor)
            for part in wanted:
                _check_range(part.out, name)

    def _plain(self, name: str, source: TensorSource, wanted: list[ShardBuffer]) -> bool:
        """Whether a tensor of a local file is exactly what one buffer must hold."""
        checkpoint = self._checkpoint
        return (
            self._shards is None
            and len(wanted) == 1
            and not (source.parts or source.transposed)
            and checkpoint.stored(name) == (name,)
            and not (checkpoint.adapter and name in checkpoint.adapter.targets)
            and isinstance(checkpoint.tensors[name][0], OpenedFile)
        )

    def _read_into(self, name: str, out: np.ndarray, used: slice | None = None) -> None:
        """Read a tensor, its pieces in parallel, and hash it on the way.

        It is not mapped: an error of the disk would then end the process. `used`: the bytes to
        read, of a tensor that was hashed before; only a whole tensor is hashed again.
        """
        self._cancellation.check()
        file, info = self._checkpoint.tensors[name]
        whole = slice(0, info.stop - info.start)
        flat, used = out.reshape(-1), used or whole
        digest = xxhash.xxh3_128() if used == whole else None

        def read(start: int) -> memoryview:
            stop = min(start + _READ, used.stop)
            target = flat[start // info.dtype.itemsize : stop // info.dtype.itemsize]
            piece = target if out.dtype == info.dtype else np.empty(target.shape, info.dtype)
            got = as_bytes(piece)
            file.read_into(info.start + start, got)
            if piece is not target:
                with np.errstate(over="ignore"):  # `_check_range` looks
                    target[...] = piece
            return got

        with ThreadPoolExecutor(_READING) as pool:
            for got in pool.map(read, range(used.start, used.stop, _READ)):
                if digest:
                    digest.update(got)
        if digest:
            self._note(name, digest.hexdigest())

    def _note(self, name: str, digest: str) -> None:
        """Remember the hash of a tensor; refuse one that was read with another hash before."""
        known = self._digests.setdefault(name, digest)
        if known != digest:
            raise changed(
                self._checkpoint.tensors[name][0], f"{name} had the hash {known}, now {digest}"
            )

    def _read(self, name: str, take: Callable[[np.ndarray], list[np.ndarray]]) -> np.ndarray:
        """Read a tensor; bytes outside what `take` selects may be undefined."""
        self._cancellation.check()
        checkpoint = self._checkpoint
        stored, adapter = checkpoint.stored(name), checkpoint.adapter
        # Decoding and merging read all of a tensor.
        as_stored = len(stored) == 1 and not (adapter and name in adapter.targets)
        parts: list[np.ndarray] = []
        for each in stored:
            file, info = checkpoint.tensors[each]
            remote, whole = not isinstance(file, OpenedFile), slice(0, info.stop - info.start)
            if not remote and self._shards is None:
                # A tensor that holds several arrays is read and hashed whole for the first one.
                known = as_stored and each in self._digests
                parts.append(_buffer(info.shape, info.dtype))
                self._read_into(each, parts[-1], _used(info, take) if known else whole)
                continue
            used = _used(info, take) if remote and as_stored else whole
            parts.append(read_tensor(file, info, used))
            if remote and used == whole:
                self._note(each, xxhash.xxh3_128_hexdigest(as_bytes(parts[-1])))
        packed = checkpoint.packed.get(name)
        tensor = packed.decode(np, *parts) if packed else parts[0]
        return adapter.merge(name, tensor) if adapter else tensor

    def digests(self, process: int, processes: int, *, head: bool) -> dict[str, str]:
        """The hashes of this process's share of the tensors; together, processes hash all.

        Raises:
            DataError: if the files have changed since they were opened, or were replaced.
        """
        share = sorted(self._tensors(head))[process::processes]
        with ThreadPoolExecutor(_THREADS) as pool:
            taken = pool.map(lambda name: self._digests.get(name) or self._digest(name), share)
            found = dict(zip(share, taken, strict=True))
        self._checkpoint.check_files(loading=True)
        return found

    def check(self) -> None:
        """Raise DataError if the files no longer hold what they held at first."""
        self._checkpoint.check_files()

    def _tensors(self, head: bool) -> set[str]:
        """Every tensor that any process reads."""
        checkpoint = self._checkpoint
        late = {spec.name for spec in head_specs(checkpoint.arch)}
        outer = [s for s in outer_specs(checkpoint.arch) if head or s.name not in late]
        names = [name for spec in outer for name in checkpoint.names(spec)]
        for layer in range(self._schedule.depth):
            names += [n for s in self._specs(layer) for n in checkpoint.names(s, layer)]
        return {stored for name in names for stored in checkpoint.stored(name)}

    def _digest(self, name: str) -> str:
        """Hash from the file, piece by piece: mapped pages would count as this process's memory."""
        self._cancellation.check()
        file, info = self._checkpoint.tensors[name]
        state, room = xxhash.xxh3_128(), memoryview(bytearray(_HASHED))
        for start in range(info.start, info.stop, _HASHED):
            piece = room[: min(_HASHED, info.stop - start)]
            file.read_into(start, piece)
            state.update(piece)
        return state.hexdigest()


def _of_expert(parts: list[ShardBuffer], number: int, experts: int) -> list[ShardBuffer]:
    """The buffers that one expert's tensor fills, from parts that begin with an axis of experts."""
    found: list[ShardBuffer] = []
    for part in parts:
        held = range(experts)[part.index[0]]
        if number in held:
            found.append(ShardBuffer(part.out[held.index(number)], part.index[1:]))
    return found


def _used(info: TensorInfo, take: Callable[[np.ndarray], list[np.ndarray]]) -> slice:
    """The range of bytes from the first to the last that `take` selects."""
    tensor = np.empty(info.shape, info.dtype)  # never accessed
    begin, _ = byte_bounds(tensor)
    low, high = tensor.nbytes, 0
    for taken in take(tensor):
        if not np.may_share_memory(taken, tensor):  # a copy: any byte may have been used
            return slice(0, tensor.nbytes)
        first, end = byte_bounds(taken)
        low, high = min(low, first - begin), max(high, end - begin)
    return slice(low, high)


def _copy(taken: np.ndarray, target: np.ndarray, tensor: np.ndarray) -> None:
    """Copy the taken part of a tensor, some rows at a time, releasing the pages that were read."""
    if not taken.ndim:
        target[...] = taken
        return
    rows = max(1, _COPIED // max(1, tensor.nbytes // len(taken)))
    for start in range(0, len(taken), rows):
        with np.errstate(over="ignore"):  # `_check_range` looks
            target[start : start + rows] = taken[start : start + rows]
        if isinstance(tensor.base, mmap.mmap):
            tensor.base.madvise(mmap.MADV_DONTNEED)


def _check_range(held: np.ndarray, name: str) -> None:
    """Raise if a float16 array holds infinity: its tensor has values that float16 cannot hold."""
    if held.dtype == np.float16 and (held.view(np.uint16) & 0x7FFF == 0x7C00).any():
        raise ConfigError(
            f"{name}: float16 holds no weights beyond 65504; give --compute-dtype float32"
        )


def _shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(size)[part]) for size, part in zip(shape, index, strict=True))


def _buffer(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """An empty array aligned as jax needs it: if device and host are one, it is not copied.

    It is mapped, so that its memory goes back to the system with it: of large arrays that come and
    go in several threads, an allocator keeps much.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    raw = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(raw, dtype).reshape(shape)

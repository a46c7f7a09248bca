"""Models that run block by block: the blocks in turn, and the walk of batches through them.

A block is kept on the device, in host memory or in its files. While the device computes one
streamed block, the next is copied, and files are read one block further ahead. So the device holds
three streamed blocks besides those that it keeps: one finishing, one computing, one being copied
in. A CPU copies nothing, and its memory holds two: one computing, one being read.

Start a copy before the work that should hide it: a GPU's runtime lets a copy wait for all work that
was handed to the device before it.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from spile.core.tensors import TensorInfo
from spile.core.threads import NEVER, Cancellation
from spile.models.config.arch import Layer
from spile.models.config.specs import ParamSpec, outer_specs
from spile.models.files.checkpoint import Checkpoint
from spile.models.forward.decoder import Beside
from spile.models.forward.sharding import PINNED
from spile.models.forward.weight_loader import ArrayLoader
from spile.models.forward.weights import Block, WeightArrays
from spile.objects.opened import OpenedFile

_LOOK = 0.002  # seconds between looks whether the device still works


class StreamedBlocks:
    """Gives blocks in turn, again and again."""

    def __init__(
        self,
        resident: Mapping[int, Block],
        streamed: Sequence[int],
        put: Callable[[int, Any], Block],
        read: Callable[[int], Any] | None = None,
        *,
        unpack: Callable[[Block], Block] = lambda block: block,
        copied: bool = True,
    ) -> None:
        """Args:
        resident: the blocks that stay on the device.
        streamed: the numbers of the others, ascending.
        put: begins to copy one of those to the device, from what `read` has returned.
        read: reads one of those from its files; runs in a thread of its own.
        unpack: decodes a block that came as it is stored, whenever it is used.
        copied: host and device have memories of their own.
        """
        self._resident, self._streamed = resident, list(streamed)
        self._put, self._read, self._unpack, self._copied = put, read, unpack, copied
        self._pool = ThreadPoolExecutor(1, "weights")
        self._copying = ThreadPoolExecutor(1, "weights-copy")
        self._reading: dict[int, Future[Any]] = {}
        self._coming: dict[int, Block] = {}
        self._working: deque[tuple[int, Any]] = deque()  # blocks in use, and their results
        self.backward = False  # blocks are used in reverse order
        self.waited = 0.0  # seconds that the device had nothing to do but wait for a block

    def take(self, layer: int) -> Block:
        """Return a block on the device, or on its way there; also start to copy the next one.

        Waits until the block before the last one is done, and makes room for another one.
        """
        while len(self._working) > self._copied:
            self._finish()
        if self._coming and layer not in self._coming and layer not in self._resident:
            self._coming.clear()  # the sweep before ended early
        here = layer in self._resident
        block = self._resident[layer] if here else self._arriving(layer)
        if self._streamed and self._copied:
            self._arriving(self._after(layer))
        return self._unpack(block)

    def used(self, layer: int, result: jax.Array) -> None:
        """Note that a block's work was handed to the device, and what is ready when it is done."""
        self._working.append((layer, result))

    def _finish(self) -> None:
        """Wait for the earliest work, and count how long the work after it waits for its block."""
        layer, done = self._working.popleft()
        done.block_until_ready()
        self._coming.pop(layer, None)
        following = self._coming.get(self._working[0][0]) if self._working else None
        if following is not None:
            begin = time.perf_counter()
            jax.block_until_ready(following)
            self.waited += time.perf_counter() - begin

    def _after(self, layer: int) -> int:
        """The streamed block that is used next after a block."""
        if self.backward:
            return self._streamed[bisect_left(self._streamed, layer) - 1]
        return self._streamed[bisect_right(self._streamed, layer) % len(self._streamed)]

    def _arriving(self, layer: int) -> Block:
        """A streamed block; its copy starts now if it has not yet."""
        if layer not in self._coming:
            found = self._was_read(layer)
            if found is None:
                self._coming[layer] = self._put(layer, None)
            else:  # from ordinary memory, which takes as long as reading it
                copying = self._copying.submit(self._put, layer, found)
                self._coming[layer] = self._waited_for(copying)
        return self._coming[layer]

    def _was_read(self, layer: int) -> Any:
        """The arrays read for a block; meanwhile the next one is read."""
        if self._read is None:
            return None
        if layer not in self._reading:
            self._reading.clear()
            self._reading[layer] = self._pool.submit(self._read, layer)
        found = self._waited_for(self._reading.pop(layer))
        following = self._after(layer)
        if following != layer:
            self._reading[following] = self._pool.submit(self._read, following)
        return found

    def _waited_for(self, coming: "Future[Any]") -> Any:
        """What is being read or copied; counts how long the device has nothing to do meanwhile."""
        idle_since: float | None = None
        while not wait([coming], _LOOK).done:
            if idle_since is None and all(result.is_ready() for _, result in self._working):
                idle_since = time.perf_counter()
        if idle_since is not None:
            self.waited += time.perf_counter() - idle_since
        return coming.result()


def load_blocks(loader: ArrayLoader, kept: Sequence[str], device: Any) -> StreamedBlocks:
    """Load the blocks that are kept on the device or in host memory; the others come from files.

    `kept` tells where each block is kept: "resident" (on the device), "host" or "disk".
    """
    resident: dict[int, Block] = {}
    hosted: dict[int, tuple[Block, Any]] = {}  # with its shardings on the device
    kept_here = [layer for layer, where in enumerate(kept) if where != "disk"]
    for layer, block in zip(kept_here, loader.copied_blocks(kept_here), strict=True):
        if device.platform == "cpu":  # whose memory is the host's
            resident[layer] = loader.unpacked(block)
        elif kept[layer] == "resident":
            resident[layer] = block
        else:  # through the device: what is kept is what will be copied back
            there = jax.device_put(block, jax.tree.map(_on_host, block))
            hosted[layer] = there, jax.tree.map(lambda array: array.sharding, block)
            jax.block_until_ready(there)  # and the device's copy is freed

    streamed = [layer for layer in range(len(kept)) if layer not in resident]

    def read(layer: int) -> Any:
        return None if layer in hosted else loader.host_block(layer)

    def put(layer: int, found: Any) -> Block:
        return jax.device_put(*hosted[layer]) if layer in hosted else loader.put_block(layer, found)

    from_files = len(hosted) < len(streamed)
    copied = device.platform != "cpu"
    return StreamedBlocks(
        resident,
        streamed,
        put,
        read if from_files else None,
        unpack=loader.unpacked,
        copied=copied,
    )


def _on_host(array: jax.Array) -> Any:
    if isinstance(array.sharding, SingleDeviceSharding):
        (device,) = array.sharding.device_set
        return SingleDeviceSharding(device, memory_kind=PINNED)
    return array.sharding.with_memory_kind(PINNED)


class EmbeddingRows:
    """Rows of a model's embedding, looked up in host memory or in the file."""

    def __init__(self, checkpoint: Checkpoint, loader: ArrayLoader) -> None:
        spec = next(s for s in outer_specs(checkpoint.arch) if s.name == "embed")
        self._dtype, self._table = loader.held_dtype("embed"), None
        self._found = _in_file(checkpoint, spec)
        if self._found is None:
            self._table = loader.on_host(spec)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        if self._table is not None:
            return self._table[tokens]
        assert self._found
        file, info = self._found
        ids, places = np.unique(tokens, return_inverse=True)
        rows = np.empty((len(ids), info.shape[1]), info.dtype)
        size = rows.itemsize * info.shape[1]
        bytes_of = rows.view(np.uint8)
        for row, number in enumerate(ids):
            file.read_into(info.start + int(number) * size, memoryview(bytes_of[row]))
        return rows.astype(self._dtype)[places.reshape(tokens.shape)]


def _in_file(checkpoint: Checkpoint, spec: ParamSpec) -> tuple[OpenedFile, TensorInfo] | None:
    """Return the file and the place of an array that is stored there unchanged."""
    (name,) = checkpoint.names(spec)
    changed = checkpoint.adapter is not None and name in checkpoint.adapter.targets
    if changed or name not in checkpoint.tensors:
        return None
    file, info = checkpoint.tensors[name]
    return (file, info) if isinstance(file, OpenedFile) else None


@dataclass(frozen=True)
class SweptModel:
    """A model that runs block by block."""

    blocks: StreamedBlocks
    outer: WeightArrays  # used before and after the blocks
    embedding: EmbeddingRows | None = None  # None: the embedding is in `outer`
    # Raises if the files have changed; to be called when a walk has read what it needs.
    check: Callable[[], None] = lambda: None


@dataclass
class Passing:
    """A batch on its way through the blocks, with the values that later blocks need."""

    stream: Any = None
    own: dict[int, Any] = field(default_factory=dict[int, Any])  # embeddings of blocks to come
    lent: dict[int | None, Any] = field(default_factory=dict["int | None", Any])  # by window
    done: Any = None  # ready when the device has finished all work on the batch so far

    def beside(self, stage: int, kind: Layer | str) -> Beside:
        """Return what a stage reads besides the stream."""
        borrowed = self.lent[kind.window] if isinstance(kind, Layer) and kind.borrows else None
        return self.own.pop(stage, None), borrowed

    def keep(self, kind: Layer | str, onward: Any) -> None:
        """Keep what a stage has computed for later ones."""
        if isinstance(kind, Layer):
            self.lent |= {} if onward is None else {kind.window: onward}
        elif onward is not None:
            self.own = dict(enumerate(onward))


@dataclass(frozen=True)
class SpilledStreams:
    """Keeps the streams of all but a few batches in host memory between blocks."""

    device: Sharding
    host: Sharding

    def fetch(self, passing: Sequence[Passing], number: int) -> None:
        """Bring a batch's stream to the device, and begin to bring the next one's."""
        for each in (passing[number], passing[(number + 1) % len(passing)]):
            if each.stream is not None:
                each.stream = jax.device_put(each.stream, self.device)

    def spill(self, passing: Sequence[Passing], number: int) -> None:
        """Begin to move a batch's stream to the host; wait for the one before the last."""
        each = passing[number]
        each.stream = jax.device_put(each.stream, self.host)
        jax.block_until_ready(passing[(number - 2) % len(passing)].stream)


_Batch = TypeVar("_Batch", bound=Passing)


def walk(
    kinds: Sequence[Layer | str],
    model: SweptModel,
    batches: Iterable[_Batch],
    run: Callable[[int, Any, Beside, _Batch], tuple[Any, Any, Any]],
    spilled: SpilledStreams | None = None,
    cancellation: Cancellation = NEVER,
) -> list[_Batch]:
    """Take batches through the stages of a model, all of them through one before the next.

    Args:
        kinds: the stages, as `stage_kinds` returns them, as far as the walk should go.
        run: runs a stage for a batch. It takes the stage's number (-1: before the blocks), its
            weights, what it reads besides the stream, and the batch. It returns the next stream,
            what later stages need, and an array that is ready when the stage is.
        spilled: moves streams between device and host; None: they stay on the device.
        cancellation: checked between blocks.
    """
    passing: list[_Batch] = []

    def advance(stage: int, weights: Any, number: int) -> None:
        kind, each = kinds[stage + 1], passing[number]
        beside = each.beside(stage, kind)
        each.stream, onward, each.done = run(stage, weights, beside, each)
        each.keep(kind, onward)
        if stage + 2 == len(kinds):
            each.stream = None
            each.lent.clear()
        elif spilled:
            spilled.spill(passing, number)

    for number, batch in enumerate(batches):
        passing.append(batch)
        advance(-1, model.outer, number)
    for stage, kind in enumerate(kinds[1:]):
        weights = model.outer
        if isinstance(kind, Layer):
            cancellation.check()
            weights = model.blocks.take(stage)
        for number in range(len(passing)):
            if spilled:
                spilled.fetch(passing, number)
            advance(stage, weights, number)
        if isinstance(kind, Layer):
            model.blocks.used(stage, passing[-1].done)
        del weights  # or the block would stay in memory while the next one comes
    return passing

"""Shards: safetensors files whose header is written first and whose rows stream after it.

That is possible because the number of rows is known before the forward pass runs. The file is
hashed as it is written; nothing is held back but the bytes in hand.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from spile.errors import CorruptError
from spile.objects import Objects
from spile.tensors import TensorInfo, as_bytes, build_header, header_size, map_tensor, parse_header

TensorSpec = tuple[str, npt.DTypeLike, tuple[int, ...]]


class ShardWriter:
    """One file being written. Tensors follow in the order declared, in as many pieces as come."""

    def __init__(self, objects: Objects, key: str, tensors: Sequence[TensorSpec]) -> None:
        self.key = key
        self._stream = objects.stream(key)
        self._digest = xxhash.xxh3_128()
        self.size = 0
        header = build_header(tensors)
        self._expected = len(header) + sum(
            np.dtype(dtype).itemsize * int(np.prod(shape)) for _, dtype, shape in tensors
        )
        self._write(header)

    def _write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.size += len(data)

    def write(self, array: np.ndarray) -> None:
        self._write(as_bytes(array))

    def close(self) -> tuple[int, str]:
        """Make the file durable; returns its size and hash."""
        if self.size != self._expected:
            raise AssertionError(f"{self.key}: wrote {self.size} of {self._expected} bytes")
        self._stream.close()
        return self.size, self._digest.hexdigest()

    def abandon(self) -> None:
        self._stream.abandon()


def read_shard_header(objects: Objects, key: str) -> dict[str, TensorInfo]:
    """The tensors of a stored shard."""
    try:
        size = objects.size(key)
        head = objects.get_range(key, 0, min(size, 1 << 16))
        needed = header_size(key, head[:8], size)
        if needed > len(head):
            head = objects.get_range(key, 0, needed)
    except FileNotFoundError:
        raise CorruptError(key, "is missing") from None
    return parse_header(key, head, size)


def open_tensor(objects: Objects, key: str, info: TensorInfo) -> np.ndarray:
    """One tensor of a shard: a memory map where the object is a local file."""
    path = objects.local_path(key)
    if path is not None:
        return map_tensor(path, info)
    data = objects.get_range(key, info.start, info.stop)
    return np.frombuffer(data, info.dtype).reshape(info.shape)

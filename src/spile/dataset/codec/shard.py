"""Shards: safetensors files whose header is written first and whose rows stream after it.

This is possible because the number of rows is known before the forward pass runs. The file is
hashed as it is written, and only the current bytes are held in memory. A key that ends in `.zst`
holds the same file compressed in blocks, and is read like any other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from spile.core.errors import CorruptError
from spile.core.index import INDEX_DTYPE
from spile.core.tensors import (
    TensorInfo,
    as_bytes,
    build_header,
    map_tensor,
    map_tensors,
    parse_header,
    read_header_from,
)
from spile.dataset.codec.compression import PlaneReader, PlaneWriter
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import COMPRESSED, SCALE_DTYPE, TapInfo, scale_name
from spile.objects import Objects

TensorSpec = tuple[str, npt.DTypeLike, tuple[int, ...]]


# -- the tensors in the files of a unit ----------------------------------------------------------


def tap_tensors(tap: str, rows: int, info: TapInfo) -> list[TensorSpec]:
    """Return the tensors of a shard: the rows, and the scale of each if it is stored."""
    specs: list[TensorSpec] = [(tap, info.storage, (rows, *info.shape))]
    if info.scaled_by == "row":
        specs.append((scale_name(tap), SCALE_DTYPE, (rows,)))
    return specs


def index_tensors(rows: int, dtype: np.dtype[Any] = INDEX_DTYPE) -> list[TensorSpec]:
    """Return the tensors of an index: one for each column of its dtype."""
    return [(name, dtype[name], (rows,)) for name in dtype.names or ()]


def statistics_tensors(stats: Mapping[str, TapStats]) -> dict[str, np.ndarray]:
    """Return the tensors of a statistics file."""
    return {
        name: array for tap, each in stats.items() for name, array in each.to_tensors(tap).items()
    }


def specs_of(tensors: Mapping[str, np.ndarray]) -> list[TensorSpec]:
    """Return the names, dtypes and shapes of tensors."""
    return [(name, array.dtype, array.shape) for name, array in tensors.items()]


def contains_exactly(header: Mapping[str, TensorInfo], specs: Iterable[TensorSpec]) -> bool:
    """Return whether a file holds these tensors and no others."""
    found = {name: (info.dtype, info.shape) for name, info in header.items()}
    return found == {name: (np.dtype(dtype), shape) for name, dtype, shape in specs}


# -- writing ----------------------------------------------------------------------------------


class ShardWriter:
    """One file being written. Tensors follow in the declared order, in any number of pieces."""

    def __init__(self, objects: Objects, key: str, tensors: Sequence[TensorSpec]) -> None:
        self.key = key
        self._stream = objects.stream(key)
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._planes = PlaneWriter(self._write) if key.endswith(COMPRESSED) else None
        header = build_header(tensors)
        self._missing = len(header) + sum(
            np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape in tensors
        )
        try:
            self._put(header, 1)
        except BaseException:
            self._stream.abandon()  # nobody else knows of it yet
            raise

    def write(self, array: np.ndarray) -> None:
        self._put(as_bytes(array), array.itemsize)

    def _put(self, data: bytes | memoryview, itemsize: int) -> None:
        self._missing -= len(data)
        if self._planes:
            self._planes.write(data, itemsize)
        else:
            self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self._size += len(data)

    def close(self) -> tuple[int, str, str]:
        """Make the file durable; return its size, its hash, and its etag if it has one."""
        if self._missing:
            raise AssertionError(f"{self.key}: {self._missing} bytes were not written")
        if self._planes:
            self._planes.close()
        etag = self._stream.close()
        return self._size, self._digest.hexdigest(), etag

    def abandon(self) -> None:
        self._stream.abandon()


# -- reading ----------------------------------------------------------------------------------


def read_shard_header(objects: Objects, key: str) -> dict[str, TensorInfo]:
    """Return the tensors of a stored shard."""
    try:
        if not key.endswith(COMPRESSED):
            return read_header_from(
                lambda start, length: objects.get_range(key, start, start + length),
                objects.size(key),
                key,
            )
        planes = _planes(objects, key)
        return read_header_from(
            lambda start, length: bytes(planes.read(start, start + length, itemsize=1)),
            planes.size,
            key,
            first=8,  # rows, which have another item size, follow the header
        )
    except FileNotFoundError:
        raise CorruptError(key, "is missing") from None


class RangedRows:
    """A tensor of a remote object, fetched when sliced."""

    def __init__(self, objects: Objects, key: str, info: TensorInfo) -> None:
        self.dtype, self.shape = info.dtype, info.shape
        self._objects, self._key, self._start = objects, key, info.start

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop = _byte_range(self, rows)
        data = self._objects.get_range(self._key, self._start + start, self._start + stop)
        if len(data) != stop - start:
            raise CorruptError(self._key, "is shorter than its header says")
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])


class CompressedRows:
    """A tensor that is decompressed when sliced."""

    def __init__(self, planes: PlaneReader, info: TensorInfo) -> None:
        self.dtype, self.shape = info.dtype, info.shape
        self._planes, self._start = planes, info.start

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop = _byte_range(self, rows)
        data = self._planes.read(self._start + start, self._start + stop, self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])


def _byte_range(tensor: RangedRows | CompressedRows, rows: slice) -> tuple[int, int]:
    first, last, _ = rows.indices(len(tensor))
    each = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    return first * each, max(first, last) * each


def open_tensor(objects: Objects, key: str, info: TensorInfo) -> Any:
    """Return one tensor of a shard, to be sliced: a memory map if the object is a local file."""
    if key.endswith(COMPRESSED):
        return CompressedRows(_planes(objects, key), info)
    path = objects.local_path(key)
    if path is not None:
        return map_tensor(path, info)
    return RangedRows(objects, key, info)


def read_tensors(objects: Objects, key: str) -> dict[str, np.ndarray]:
    """Return every tensor of a small file (an index, statistics), mapped or fetched at once."""
    path = objects.local_path(key)
    if path is not None:
        return map_tensors(path, read_shard_header(objects, key))
    try:
        data = objects.get(key)
    except FileNotFoundError:
        raise CorruptError(key, "is missing") from None
    return {
        name: np.frombuffer(data[info.start : info.stop], info.dtype).reshape(info.shape)
        for name, info in parse_header(key, data, len(data)).items()
    }


def _planes(objects: Objects, key: str) -> PlaneReader:
    return PlaneReader(key, objects.size(key), partial(objects.get_range, key))

"""The safetensors container: parse and build headers, locate tensors.

Reading weights and writing shards both need byte ranges, which the official package does not give.
Its API also has two traps, which we avoid by never calling it: it writes a non-contiguous array in
the wrong element order, and `load(bytes)` fails on BF16.

A header is untrusted data: sizes, counts, shapes and offsets are checked before anything is
allocated.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spile.core.bounded_json import JsonError, parse_json_object
from spile.core.errors import CorruptError

MAX_HEADER_BYTES = 100 << 20  # the official limit
MAX_TENSORS = 1 << 20  # a parsed entry takes up to twenty times its size in memory
# Rows begin on a page boundary, so that a memory map of them is aligned.
HEADER_ALIGN = 4096

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Keyed by the names that recipes use. They are numpy's, except that numpy calls this kind of e4m3
# `float8_e4m3fn`.
DTYPES_BY_NAME = {dtype.name.removesuffix("fn"): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its type, and its byte range (offsets from the file's start)."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int
    strides: tuple[int, ...] | None = None  # in bytes, unless the values are in C order


def build_header(
    tensors: Iterable[tuple[str, npt.DTypeLike, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the header for tensors that follow in the given order, without gaps."""
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(metadata)
    offset = 0
    for name, dtype_like, shape in tensors:
        dtype = np.dtype(dtype_like)
        size = dtype.itemsize * math.prod(shape)
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    body = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    total = -(-(8 + len(body)) // HEADER_ALIGN) * HEADER_ALIGN
    return struct.pack("<Q", total - 8) + body.ljust(total - 8, b" ")


def parse_header(where: str, head: bytes, file_size: int) -> dict[str, TensorInfo]:
    """Check and decode the start of a file (8 bytes plus the header, or more).

    Raises:
        CorruptError: if the header is invalid or does not fit this file.
    """
    body_size = header_size(where, head[:8], file_size) - 8
    if len(head) < 8 + body_size:
        raise CorruptError(where, "the safetensors header is cut short")
    body = head[8 : 8 + body_size]
    # An entry is an object with two lists.
    if body.count(b"{") + body.count(b"[") > 3 * MAX_TENSORS:
        raise CorruptError(where, f"the safetensors header holds more than {MAX_TENSORS} tensors")
    try:
        table = parse_json_object(body, max_depth=None)
    except JsonError as error:
        reason = "an object" if error.problem == "type" else "JSON"
        raise CorruptError(where, f"the safetensors header is not {reason}") from error
    table.pop("__metadata__", None)
    data_start = 8 + body_size
    found = [_tensor_info(where, name, entry, data_start) for name, entry in table.items()]
    expected = data_start
    for info in sorted(found, key=lambda t: (t.start, t.stop)):
        if info.start != expected:
            raise CorruptError(where, f"tensor {info.name!r} leaves a gap or overlaps another")
        expected = info.stop
    if expected != file_size:
        raise CorruptError(
            where, f"holds {file_size} bytes where its header promises {expected} (truncated?)"
        )
    return {info.name: info for info in found}


def header_size(where: str, first8: bytes, file_size: int) -> int:
    """Return the number of bytes before the first tensor, from the first eight of a file."""
    if len(first8) < 8:
        raise CorruptError(where, "too short to be a safetensors file")
    (size,) = struct.unpack("<Q", first8)
    if size > min(MAX_HEADER_BYTES, file_size - 8):
        raise CorruptError(where, "not a safetensors file, or truncated (impossible header size)")
    return 8 + size


def read_header_from(
    read: Callable[[int, int], bytes | memoryview], size: int, where: str, *, first: int = 1 << 16
) -> dict[str, TensorInfo]:
    """Read and check the header of a file of `size` bytes, through a function that reads a range.

    Args:
        read: takes a start and a length, returns that many bytes of the file (fewer if it ends).
        where: the name of the file in errors.
        first: bytes to request at first, so that most headers take one request.

    Raises:
        CorruptError: if the header is invalid or does not fit this file. At most `MAX_HEADER_BYTES`
            are requested.
    """
    head = bytes(read(0, min(size, max(first, 8))))
    needed = header_size(where, head[:8], size)
    if needed > len(head):
        head += bytes(read(len(head), needed - len(head)))
    return parse_header(where, head, size)


def read_header(path: Path, where: str | None = None) -> dict[str, TensorInfo]:
    """Return the tensors of a local file."""
    with path.open("rb") as file:

        def read(start: int, length: int) -> bytes:
            file.seek(start)
            return file.read(length)

        return read_header_from(read, path.stat().st_size, where or str(path))


def map_tensor(file: Path | int, info: TensorInfo) -> np.ndarray:
    """Return a read-only memory map of one tensor: no bytes are read until they are touched.

    `file`: its path, or its descriptor if it is open.

    (`np.memmap` resolves the path each time and makes every slice several times as slow.)
    """
    if info.start == info.stop:
        return np.empty(info.shape, info.dtype)
    skipped = info.start % mmap.ALLOCATIONGRANULARITY
    mapped = _map(file, info.start - skipped, info.stop)
    return np.ndarray(info.shape, info.dtype, mapped, skipped, info.strides)


def map_tensors(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, np.ndarray]:
    """Return read-only views of tensors of one file; they share one memory map, the costly part."""
    stop = max((info.stop for info in infos.values() if info.stop > info.start), default=0)
    if not stop:
        return {name: np.empty(info.shape, info.dtype) for name, info in infos.items()}
    mapped = _map(path, 0, stop)
    return {
        name: np.ndarray(info.shape, info.dtype, mapped, info.start) for name, info in infos.items()
    }


def _map(file: Path | int, start: int, stop: int) -> mmap.mmap:
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return _map(opened.fileno(), start, stop)
    return mmap.mmap(file, stop - start, access=mmap.ACCESS_READ, offset=start)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a whole file at once. (Shards are streamed instead.)"""
    with path.open("xb") as file:
        file.write(build_header((name, a.dtype, a.shape) for name, a in tensors.items()))
        for array in tensors.values():
            file.write(as_bytes(array))


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the array's bytes in C order, without a copy if it is contiguous already."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


def _tensor_info(where: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        start, stop = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(where, f"tensor {name!r} has an unreadable header entry") from error
    possible, size = len(shape) <= 8, dtype.itemsize
    for number in (*shape, start, stop):
        possible = possible and type(number) is int and 0 <= number < 1 << 62
    for number in shape if possible else ():
        size *= number or 1  # numpy limits the other axes of an empty array in the same way
    if not possible or size >= 1 << 62:
        raise CorruptError(where, f"tensor {name!r} has an impossible shape or offset")
    if stop - start != (0 if 0 in shape else size):
        raise CorruptError(where, f"tensor {name!r} has a size that does not fit its shape")
    return TensorInfo(name, dtype, shape, data_start + start, data_start + stop)

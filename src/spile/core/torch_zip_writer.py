"""Write files that `torch.load(weights_only=True)` opens: plain values and arrays, without torch.

`torch_zip` describes the container. Only dictionaries, lists, strings, numbers, None and arrays are
written, opcode by opcode; equal values give equal bytes.
"""

import struct
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np

from spile.core.tensors import as_bytes
from spile.core.torch_zip import STORAGES

_FOLDER = "archive"
_VERSION = b"3\n"  # of torch's container
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip archive can hold: files do not tell when
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
_LARGE = 1 << 30  # from here on, an entry's sizes have 64 bits
_MARK, _TUPLE, _REDUCE = b"(", b"t", b"R"


def write_torch_zip(stream: BinaryIO, value: Any) -> None:
    """Write what `torch.save(value, stream)` would, for plain values and numpy arrays.

    Args:
        stream: can seek.

    Raises:
        TypeError: if a value is of another kind, or an array of a dtype that torch lacks.
    """
    arrays: list[np.ndarray] = []
    pickled = b"".join((b"\x80\x02", *_pickled(value, arrays), b"."))
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", _VERSION)):
            archive.writestr(_entry(name), data)
        for number, array in enumerate(arrays):
            data = as_bytes(np.ascontiguousarray(array))
            with archive.open(
                _entry(f"data/{number}"), "w", force_zip64=len(data) >= _LARGE
            ) as out:
                out.write(data)


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{_FOLDER}/{name}", _DATE)


def _pickled(value: Any, arrays: list[np.ndarray]) -> Iterator[bytes]:
    """Yield the opcodes that make a value; arrays are appended to `arrays`."""
    if value is None:
        yield b"N"
    elif isinstance(value, bool):
        yield b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        yield _integer(value)
    elif isinstance(value, float):
        yield b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        yield _text(value)
    elif isinstance(value, list):
        yield b"]" + _MARK
        for each in cast(list[Any], value):
            yield from _pickled(each, arrays)
        yield b"e"
    elif isinstance(value, dict):
        yield b"}"
        for key, each in cast(dict[Any, Any], value).items():
            yield from _pickled(key, arrays)
            yield from _pickled(each, arrays)
            yield b"s"
    else:
        array: np.ndarray = np.asarray(value)
        if not isinstance(value, np.ndarray) or array.dtype not in _STORAGE_OF:
            kind = array.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"cannot write a value of type {kind} to a file of torch")
        yield _tensor(array, len(arrays))
        arrays.append(array)


def _tensor(array: np.ndarray, number: int) -> bytes:
    """Return the opcodes that rebuild an array from a storage of its own."""
    storage = (
        _MARK, _text("storage"), _global("torch", _STORAGE_OF[array.dtype]), _text(str(number)),
        _text("cpu"), _integer(array.size), _TUPLE, b"Q",
    )  # fmt: skip
    strides = [1] * array.ndim
    for axis in range(array.ndim - 1, 0, -1):
        strides[axis - 1] = strides[axis] * array.shape[axis]
    hooks = _global("collections", "OrderedDict") + b")" + _REDUCE
    return b"".join((
        _global("torch._utils", "_rebuild_tensor_v2"), _MARK, *storage, _integer(0),
        _integers(array.shape), _integers(strides), b"\x89", hooks, _TUPLE, _REDUCE,
    ))  # fmt: skip


def _integers(values: Any) -> bytes:
    return _MARK + b"".join(map(_integer, values)) + _TUPLE


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + struct.pack("<B", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(data)) + data


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()

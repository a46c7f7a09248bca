"""The zip container of `torch.save`: read plain values and tensors without unpickling.

The archive holds `data.pkl`, a pickle, and one uncompressed entry for each tensor's
storage. Python's unpickler would run any program that the pickle names. This reader interprets the
few opcodes of which `torch.save` makes dictionaries, lists, tuples, strings, numbers and tensors.
It knows these names: `OrderedDict`, the functions that rebuild a tensor and a parameter, and the
types of storages. It imports and calls none of them, and refuses all others by name.

A file is untrusted data: sizes, counts, shapes, strides and offsets are checked before anything is
allocated. No tensor is read here: `TensorInfo` says where it lies.
"""

import math
import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import ml_dtypes
import numpy as np

from spile.core.errors import InputError
from spile.core.tensors import TensorInfo

_Read = Callable[
    [int, int], bytes | memoryview
]  # start, length -> the bytes that the file has there

MAX_PICKLE_BYTES = 16 << 20  # a parsed opcode takes up to sixty times its size in memory
_MAX_DIRECTORY_BYTES = 16 << 20
_MAX_AXES, _MAX_DEPTH = 8, 32
_MAX_SIZE = 1 << 62

STORAGES: dict[str, np.dtype[Any]] = {
    "BoolStorage": np.dtype(np.bool_),
    "ByteStorage": np.dtype(np.uint8),
    "CharStorage": np.dtype(np.int8),
    "ShortStorage": np.dtype(np.int16),
    "IntStorage": np.dtype(np.int32),
    "LongStorage": np.dtype(np.int64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
}
_ORDERED, _TENSOR, _PARAMETER = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)
_GLOBALS = {_ORDERED, _TENSOR, _PARAMETER, *(f"torch.{name}" for name in STORAGES)}


def read_torch_zip(read: _Read, size: int, where: str) -> Any:
    """Return what `torch.save` was given: plain values, with a `TensorInfo` for each tensor.

    Args:
        read: takes a start and a length, returns that many bytes of the file (fewer if it ends).
        where: the name of the file in errors.

    Raises:
        InputError: if the file is not such an archive, or holds anything but plain values.
    """
    entries = _Archive(read, size, where).entries()
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    folder = pickles[0].removesuffix("data.pkl") if len(pickles) == 1 else ""
    if not folder or "/" in folder[:-1]:
        raise InputError(f"{where}: not a file of torch.save (it has no single data.pkl)")
    if f"{folder}constants.pkl" in entries:
        raise InputError(f"{where}: a TorchScript program; save its state_dict() instead")
    order = entries.get(f"{folder}byteorder")
    if order and bytes(read(order.start, min(order.size, 16))) != b"little":
        raise InputError(f"{where}: its numbers are big-endian; save it on a little-endian machine")
    pickled = entries[pickles[0]]
    if pickled.size > MAX_PICKLE_BYTES:
        raise InputError(
            f"{where}: data.pkl has {pickled.size} bytes, more than {MAX_PICKLE_BYTES}"
        )
    storages = {
        name.removeprefix(f"{folder}data/"): entry
        for name, entry in entries.items()
        if name.startswith(f"{folder}data/")
    }
    return _Interpreter(bytes(read(pickled.start, pickled.size)), storages, where).run()


# -- the archive -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """The bytes of one file in the archive."""

    start: int
    size: int


_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_CENTRAL, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_ENCRYPTED, _FULL16, _FULL32 = 1, 0xFFFF, 0xFFFFFFFF
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how torch's format before version 1.6 begins


class _Archive:
    """A zip archive whose entries are neither compressed, encrypted nor overlapping."""

    def __init__(self, read: _Read, size: int, where: str) -> None:
        self._read, self._size, self._where = read, size, where

    def entries(self) -> dict[str, _Entry]:
        """Return all entries by name.

        A local header and its data must lie between the previous entry and the next one.
        """
        start, length, count = self._directory()
        told: list[tuple[int, int, bytes]] = []  # offset of the local header, size, name
        table, at = self._bytes(start, length), 0
        for _ in range(count):
            if table[at : at + 4] != _CENTRAL or at + 46 > length:
                self._refuse("its directory is damaged")
            flags, method = struct.unpack_from("<HH", table, at + 8)
            packed, plain, named, extra, comment = struct.unpack_from("<IIHHH", table, at + 20)
            (offset,) = struct.unpack_from("<I", table, at + 42)
            name = table[at + 46 : at + 46 + named]
            if method or flags & _ENCRYPTED:
                self._refuse(f"entry {_shown(name)} is compressed or encrypted")
            fields = table[at + 46 + named : at + 46 + named + extra]
            plain, packed, offset = self._wide(fields, plain, packed, offset)
            if packed != plain:
                self._refuse(f"entry {_shown(name)} has two sizes, {packed} and {plain}")
            told.append((offset, plain, name))
            at += 46 + named + extra + comment
        if at != length:
            self._refuse("its directory is damaged")
        found: dict[str, _Entry] = {}
        free = 0  # the first byte after the last entry
        for offset, plain, name in sorted(told):
            entry = self._entry(offset, plain, name)
            if offset < free or entry.start + plain > start:
                self._refuse(f"entry {_shown(name)} overlaps another, or the directory")
            free = entry.start + plain
            found[_shown(name)] = entry
        if len(found) != count:
            self._refuse("two entries have one name")
        return found

    def _directory(self) -> tuple[int, int, int]:
        """Return start, length and number of entries of the central directory."""
        if self._size < 22 or self._bytes(0, 2) != b"PK":
            old = self._bytes(0, len(_OLD)) == _OLD if self._size > len(_OLD) else False
            self._refuse(
                "it has torch's format of before version 1.6, a plain pickle; save it again with "
                "torch.save" if old else "it does not begin as a zip archive"
            )  # fmt: skip
        end = self._size - 22
        last = self._bytes(end, 22)
        if last[:4] != _END:
            self._refuse("it does not end as a zip archive; is it truncated?")
        count, length, start, comment = struct.unpack_from("<HIIH", last, 10)
        if end >= 76 and self._bytes(end - 20, 4) == _LOCATOR:
            end -= 76
            wide = self._bytes(end, 56)
            if wide[:4] != _END64 or struct.unpack_from("<Q", wide, 4)[0] != 44:
                self._refuse("its 64-bit directory is damaged")
            count, length, start = struct.unpack_from("<QQQ", wide, 32)
        if (
            comment
            or start + length != end
            or length > _MAX_DIRECTORY_BYTES
            or count > length // 46
        ):
            self._refuse("its directory is damaged")
        return start, length, count

    def _wide(self, fields: bytes, plain: int, packed: int, offset: int) -> tuple[int, int, int]:
        """Return sizes and offset; those that do not fit 32 bits are in a field of their own."""
        if _FULL32 not in (plain, packed, offset):
            return plain, packed, offset
        at = 0
        while at + 4 <= len(fields):
            kind, length = struct.unpack_from("<HH", fields, at)
            if kind == 1:
                numbers = list(struct.iter_unpack("<Q", fields[at + 4 : at + 4 + length // 8 * 8]))
                given = [plain, packed, offset]
                for place, value in enumerate(given):
                    if value == _FULL32 and numbers:
                        given[place] = int(numbers.pop(0)[0])
                return given[0], given[1], given[2]
            at += 4 + length
        return plain, packed, offset

    def _entry(self, offset: int, size: int, name: bytes) -> _Entry:
        head = self._bytes(offset, 30)
        if head[:4] != _LOCAL or struct.unpack_from("<H", head, 8)[0]:
            self._refuse(f"entry {_shown(name)} does not lie where the directory says")
        named, extra = struct.unpack_from("<HH", head, 26)
        if self._bytes(offset + 30, named) != name:
            self._refuse(f"entry {_shown(name)} has another name in the directory")
        return _Entry(offset + 30 + named + extra, size)

    def _bytes(self, start: int, length: int) -> bytes:
        if start + length > self._size:
            self._refuse("it is cut short")
        found = bytes(self._read(start, length))
        if len(found) != length:
            self._refuse("it is cut short")
        return found

    def _refuse(self, reason: str) -> NoReturn:
        raise InputError(f"{self._where}: not a file of torch.save ({reason})")


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


# -- the pickle ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Global:
    """A name that the pickle mentions. It stands for itself: nothing is imported."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """The values that tensors are views of."""

    key: str
    dtype: np.dtype[Any]
    start: int  # offset in the file
    count: int


def _is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def _holds(value: Any) -> list[Any]:
    """Return the values that a container holds; none if it is no container."""
    if _is_dict(value):
        return list(value.values())
    return list(value) if _is_tuple(value) or _is_list(value) else []


_NAMES = {ord(each.code): each.name for each in pickletools.opcodes}


class _Interpreter:
    """Runs the opcodes that build plain values, and no others.

    A list or dictionary is referred to once, so values neither contain themselves nor grow beyond
    the size of the pickle.
    """

    def __init__(self, data: bytes, storages: Mapping[str, _Entry], where: str) -> None:
        self._data, self._at = data, 0
        self._storages, self._where = storages, where
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._nested: dict[int, tuple[Any, ...]] = {}  # by id: tuples that hold other containers

    def run(self) -> Any:
        if self._take(2) != b"\x80\x02":
            self._refuse("is not a pickle of protocol 2, which torch.save writes")
        while (code := self._take(1)) != b".":
            operation = _OPERATIONS.get(code)
            if operation is None:
                self._refuse(f"has the opcode {_NAMES.get(code[0], code[0])}")
            operation(self)
        if self._at != len(self._data) or len(self._stack) != 1 or self._marks:
            self._refuse("does not end with one value")
        self._check_plain(self._stack[0])
        return self._stack[0]

    def _refuse(self, reason: str) -> NoReturn:
        raise InputError(
            f"{self._where}: data.pkl {reason}; only plain tensors, dictionaries, lists, "
            "numbers and strings are read, and nothing was executed"
        )

    def _check_plain(self, value: Any) -> None:
        level, seen = [value], set[int]()
        for _ in range(_MAX_DEPTH):
            inner: list[Any] = []
            for each in level:
                if isinstance(each, _Global | _Storage):
                    name = each.name if isinstance(each, _Global) else "a storage"
                    self._refuse(f"holds {name} by itself")
                if id(each) not in seen:
                    seen.add(id(each))
                    inner += _holds(each)
            if not inner:
                return
            level = inner
        self._refuse(f"nests values more than {_MAX_DEPTH} deep")

    # -- reading and the stack ---------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) != count:
            self._refuse("is cut short")
        self._at += count
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        stop = self._data.find(b"\n", self._at, self._at + 200)
        if stop < 0:
            self._refuse("has a name without an end")
        return self._take(stop + 1 - self._at)[:-1].decode("utf-8", "backslashreplace")

    def pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._refuse("takes a value that is not there")
        return self._stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self._marks:
            self._refuse("takes values that are not there")
        first = self._marks.pop()
        found = self._stack[first:]
        del self._stack[first:]
        return found

    def push(self, value: Any) -> None:
        self._stack.append(value)

    # -- opcodes -----------------------------------------------------------------------------------

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def text(self) -> None:
        try:
            self.push(self._take(self.number("<I")).decode())
        except UnicodeDecodeError:
            self._refuse("has a string that is not UTF-8")

    def integer(self) -> None:
        size = self.number("<B")
        if size > 8:
            self._refuse(f"has a number of {size} bytes")
        self.push(int.from_bytes(self._take(size), "little", signed=True))

    def keep(self, key: int) -> None:
        if not self._stack:
            self._refuse("takes a value that is not there")
        self._memo[key] = self._stack[-1]

    def again(self, key: int) -> None:
        if key not in self._memo:
            self._refuse("refers to a value that it does not have")
        value = self._memo[key]
        if isinstance(value, dict | list) or id(value) in self._nested:
            self._refuse("refers to one list or dictionary twice")
        self.push(value)

    def group(self, count: int | None) -> None:
        found = self.pop_to_mark() if count is None else [self.pop() for _ in range(count)][::-1]
        made = tuple(found)
        if any(isinstance(each, dict | list | tuple) for each in made):
            self._nested[id(made)] = made  # (held, so that no other value gets its id)
        self.push(made)

    def append(self, values: Sequence[Any]) -> None:
        into = self.pop()
        if not _is_list(into):
            self._refuse("appends to a value that is not a list")
        into += values
        self.push(into)

    def set_items(self, values: Sequence[Any]) -> None:
        into = self.pop()
        if not _is_dict(into) or len(values) % 2:
            self._refuse("sets an item of a value that is not a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str) and not (type(key) is int and abs(key) < 1 << 31):
                self._refuse(f"has a key of type {type(key).__name__}")
            into[key] = value
        self.push(into)

    def name(self) -> None:
        name = f"{self._line()}.{self._line()}"
        if name not in _GLOBALS:
            self._refuse(f"names {name}")
        self.push(_Global(name))

    def build(self) -> None:
        """Drop the attribute `_metadata`, which state_dict() sets on its dictionary."""
        state, target = self.pop(), self.pop()
        if not _is_dict(target) or not _is_dict(state) or {*state} != {"_metadata"}:
            self._refuse("sets attributes (the opcode BUILD)")
        self.push(target)

    def persistent(self) -> None:
        told: Any = self.pop()
        kinds: list[type[Any]] = [type(each) for each in _holds(told)]
        if not _is_tuple(told) or kinds != [str, _Global, str, str, int] or told[0] != "storage":
            self._refuse("refers to something that is not a storage of torch")
        dtype = STORAGES.get(told[1].name.removeprefix("torch."))
        if dtype is None:
            self._refuse(f"has a storage of type {told[1].name}")
        key, count = told[2], told[4]
        entry = self._storages.get(key)
        if entry is None or count < 0 or entry.size != count * dtype.itemsize:
            size = f"has {entry.size} bytes" if entry else "is not there"
            self._refuse(f"expects {count} values of {dtype} in data/{key[:100]}, which {size}")
        self.push(_Storage(key, dtype, entry.start, count))

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, _Global) or not _is_tuple(arguments):
            self._refuse("calls something that is not a function (the opcode REDUCE)")
        if called.name == _ORDERED and not arguments:
            self.push({})
        elif called.name == _TENSOR and len(arguments) in (6, 7):
            self.push(self._tensor(*arguments))
        elif called.name == _PARAMETER and len(arguments) == 3:
            if not isinstance(arguments[0], TensorInfo) or arguments[2] != {}:
                self._refuse("has a parameter that is not a plain tensor")
            self.push(arguments[0])
        else:
            self._refuse(f"calls {called.name} with {len(arguments)} arguments")

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, strides: Any, _: Any, hooks: Any,
        metadata: Any = None,
    ) -> TensorInfo:  # fmt: skip
        if not isinstance(storage, _Storage) or hooks != {} or metadata not in (None, {}):
            self._refuse("has a tensor that is not plain")
        if not _is_tuple(shape) or not _is_tuple(strides):
            self._refuse("has a tensor of an impossible shape")
        if len(shape) != len(strides) or len(shape) > _MAX_AXES or not all(
            type(number) is int and 0 <= number < _MAX_SIZE for number in (*shape, *strides, offset)
        ):  # fmt: skip
            self._refuse("has a tensor of an impossible shape")
        count = math.prod(shape)
        stop = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if count and stop > storage.count:
            self._refuse(
                f"has a tensor of shape {list(shape)} and strides {list(strides)} that does not "
                f"fit the {storage.count} values of data/{storage.key[:100]}"
            )
        if count > storage.count:
            self._refuse(f"has a tensor of shape {list(shape)} that repeats its values")
        size = storage.dtype.itemsize
        if math.prod(max(n, 1) for n in shape) * size >= _MAX_SIZE:
            self._refuse("has a tensor of an impossible shape")
        first, last = (offset, stop) if count else (0, 0)
        return TensorInfo(
            storage.key, storage.dtype, shape, storage.start + first * size,
            storage.start + last * size,
            tuple(step * size if n > 1 else 0 for n, step in zip(shape, strides, strict=True)),
        )  # fmt: skip


# The opcodes of plain values, by their bytes.
_OPERATIONS: dict[bytes, Callable[[_Interpreter], None]] = {
    b"(": _Interpreter.mark,
    b"N": lambda self: self.push(None),
    b"\x88": lambda self: self.push(True),
    b"\x89": lambda self: self.push(False),
    b"K": lambda self: self.push(self.number("<B")),
    b"M": lambda self: self.push(self.number("<H")),
    b"J": lambda self: self.push(self.number("<i")),
    b"\x8a": _Interpreter.integer,
    b"G": lambda self: self.push(self.number(">d")),
    b"X": _Interpreter.text,
    b"]": lambda self: self.push([]),
    b"}": lambda self: self.push({}),
    b")": lambda self: self.push(()),
    b"\x85": lambda self: self.group(1),
    b"\x86": lambda self: self.group(2),
    b"\x87": lambda self: self.group(3),
    b"t": lambda self: self.group(None),
    b"a": lambda self: self.append([self.pop()]),
    b"e": lambda self: self.append(self.pop_to_mark()),
    b"s": lambda self: self.set_items([self.pop(), self.pop()][::-1]),
    b"u": lambda self: self.set_items(self.pop_to_mark()),
    b"q": lambda self: self.keep(self.number("<B")),
    b"r": lambda self: self.keep(self.number("<I")),
    b"h": lambda self: self.again(self.number("<B")),
    b"j": lambda self: self.again(self.number("<I")),
    b"c": _Interpreter.name,
    b"Q": _Interpreter.persistent,
    b"R": _Interpreter.reduce,
    b"b": _Interpreter.build,
}

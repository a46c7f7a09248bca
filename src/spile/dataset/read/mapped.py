"""Rows of many files as one array, so that one call takes rows from all of them.

Files are mapped into one stretch of addresses, each where its first row falls on a multiple of a
row's bytes. What lies between them is never touched, and takes addresses but no memory.
"""

import ctypes
import errno
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spile.core.errors import CorruptError
from spile.core.tensors import TensorInfo

Part = tuple[Path, TensorInfo, int]  # a file, where in it rows lie, and the number of the first

_MOST_FILES = 1 << 14  # a process has 65,530 maps on Linux, for everything
_MOST_BYTES = 1 << 45  # of addresses, of which there are 1 << 47
_FIXED, _WILL_NEED = 0x10, 3
_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                       ctypes.c_int, ctypes.c_long]  # fmt: skip
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedRows:
    """One array over the rows of files, and which of its rows are whose."""

    def __init__(self, parts: Sequence[Part], row_bytes: int) -> None:
        """Use `map_rows`, which knows what can be mapped."""
        self._row_bytes = row_bytes
        self._firsts = np.array([first for _, _, first in parts], np.int64)
        places = _places([info for _, info, _ in parts], row_bytes)
        self._shifts = np.array(places, np.int64) - self._firsts
        last = parts[-1][1]
        size = _up(places[-1] * row_bytes + last.stop - last.start, mmap.PAGESIZE)
        base = _mmap(None, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0, protect=0)
        held = (ctypes.c_ubyte * size).from_address(base)
        weakref.finalize(held, _LIBC.munmap, base, size)
        for (path, info, _), place in zip(parts, places, strict=True):
            at = info.start % mmap.PAGESIZE
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if os.fstat(descriptor).st_size < info.stop:
                    raise CorruptError(str(path), "is shorter than its header says")
                address, length = base + place * row_bytes - at, at + info.stop - info.start
                _mmap(address, length, mmap.MAP_SHARED | _FIXED, descriptor, info.start - at)
            finally:
                os.close(descriptor)
        self._base = base
        whole: npt.NDArray[np.uint8] = np.frombuffer(memoryview(held), np.uint8)
        self.table = whole[: size // row_bytes * row_bytes].reshape(-1, row_bytes)
        self.table.flags.writeable = False

    def numbers(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where ascending rows of the dataset lie in the table."""
        cuts = np.searchsorted(rows, self._firsts[1:])
        counts = np.diff(cuts, prepend=0, append=len(rows))
        return rows + np.repeat(self._shifts, counts)

    def expect(self, numbers: npt.NDArray[np.int64], bounds: Sequence[int]) -> None:
        """Let the disk read what is needed soon: runs of the table's rows, between bounds."""
        for low, high in zip(bounds, bounds[1:], strict=False):
            start = self._base + int(numbers[low]) * self._row_bytes
            stop = self._base + (int(numbers[high - 1]) + 1) * self._row_bytes
            start -= start % mmap.PAGESIZE
            _LIBC.madvise(start, stop - start, _WILL_NEED)  # advice: it may fail


def map_rows(parts: Sequence[Part], row_bytes: int) -> MappedRows | None:
    """Such an array, where the system and the files' layout allow it."""
    if not sys.platform.startswith("linux") or not 0 < len(parts) <= _MOST_FILES:
        return None
    common = math.gcd(row_bytes, mmap.PAGESIZE)
    if any(info.start % mmap.PAGESIZE % common for _, info, _ in parts):
        return None
    most = sum(info.stop - info.start + row_bytes * mmap.PAGESIZE for _, info, _ in parts)
    if most >= _MOST_BYTES:
        return None
    try:
        return MappedRows(parts, row_bytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:  # other taps, or other libraries, have the maps there are
            raise
        return None


def _places(infos: Sequence[TensorInfo], row_bytes: int) -> list[int]:
    """The row of the table that each begins with: as its page allows, after those before it."""
    page = mmap.PAGESIZE
    common = math.gcd(row_bytes, page)
    inverse = pow(row_bytes // common, -1, page // common) if page > common else 0
    places: list[int] = []
    end = 0
    for info in infos:
        at = info.start % page
        period = page // common  # row numbers whose address lies as far into a page as the file's
        wanted = at // common * inverse % period
        least = -(-(end + at) // row_bytes)
        places.append(least + (wanted - least) % period)
        end = _up(places[-1] * row_bytes + info.stop - info.start, page)
    return places


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _mmap(
    address: int | None, size: int, flags: int, descriptor: int, offset: int, protect: int = 1
) -> int:
    found = _LIBC.mmap(address, size, protect, flags, descriptor, offset)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping rows: {os.strerror(number)}")
    return found

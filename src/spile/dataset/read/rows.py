"""Read rows of a dataset by number, from memory maps of files or ranges of remote objects.

Rows requested in ascending order are read as few, long stretches, several at a time.
"""

import ctypes
import errno
import math
import mmap
import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from spile.core.errors import CorruptError
from spile.core.tensors import TensorInfo, map_tensors
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.shard import (
    TensorSpec,
    index_tensors,
    open_tensor,
    read_shard_header,
    tap_tensors,
)
from spile.dataset.format import SCALE_DTYPE, Done, Shard
from spile.dataset.read.dtypes import convert
from spile.dataset.records.segments import Catalog
from spile.dataset.records.table import Table
from spile.objects import Objects

_COLUMNS = 4  # columns of indexes to keep whole in memory
_OPEN_FILES = 512  # kept mapped, or with their headers; of a million, only those in use
_HEADERS = 1 << 14  # of remote files, kept so that random reads request only rows
_STRETCH_BYTES = 8 << 20  # of one read: long for a disk or a request, yet several fit in memory
_COPIERS = 4  # threads: one core does not saturate the memory bandwidth
_GAP_BYTES = 256 << 10  # a smaller gap is fetched and discarded to save a request
_LONG_RUN = 4  # mean rows in a run from which copying runs beats taking single rows

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
ReadJob = Callable[[], None]


MappedFile = tuple[Path, TensorInfo, int]  # a file, a tensor in it, the number of its first row

_MOST_MAPPED_FILES = 1 << 14  # Linux allows 65,530 maps per process, for everything
_MOST_MAPPED_BYTES = 1 << 45  # the address space has 1 << 47 bytes
_MAP_FIXED, _MADV_WILLNEED = 0x10, 3
_MAP_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class _Source:
    """A tensor to read from. The reading thread opens it, since that may take a request."""

    opened: Callable[[], Any]  # a memory map, or an object that returns an array when sliced
    row_bytes: int
    mapped: bool


class StoredRows:
    """The rows of the finished units, in stored order."""

    def __init__(
        self,
        objects: Objects,
        table: Table,
        units: Catalog,
        scales: Mapping[str, np.ndarray],
    ) -> None:
        self.objects, self.table, self.units, self.scales = objects, table, units, scales
        self.starts = units.starts
        # Any key will do: a store keeps either all of its objects in files, or none.
        self.is_local = objects.local_path(fmt.MANIFEST) is not None
        self._header = lru_cache(_HEADERS)(self._read_header)
        self._file = lru_cache(_OPEN_FILES)(self._open)
        self.mapped = lru_cache(None)(self._map)
        self.column = lru_cache(_COLUMNS)(self._read_column)

    @property
    def count(self) -> int:
        return int(self.starts[-1])

    # -- ranges ------------------------------------------------------------------------------

    def pieces(self, tap: str, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
        """Yield the shards that hold a range of rows, and the range within each."""
        for position, low, high, _ in self._unit_ranges(start, stop):
            shards = self._shards_of(self.units[position], tap)
            at = bisect_right(shards, low, key=lambda s: s.first) - 1
            while at < len(shards) and shards[at].first < high:
                shard = shards[at]
                yield shard, max(low - shard.first, 0), min(high - shard.first, shard.count)
                at += 1

    def fill(self, tap: str, pieces: Iterable[tuple[Shard, int, int]], out: np.ndarray) -> None:
        """Convert pieces to the dtype of a buffer, several stretches at a time."""
        step = max(1, _STRETCH_BYTES // self.table.taps[tap].row_bytes)
        jobs: list[ReadJob] = []
        filled = 0
        for shard, a, b in pieces:
            for low in range(a, b, step):
                high = min(low + step, b)
                target = out[filled : filled + high - low]
                jobs.append(partial(self._fill, tap, shard, low, high, target))
                filled += high - low
        run_jobs(jobs, self._threads)

    def _fill(self, tap: str, shard: Shard, a: int, b: int, out: np.ndarray) -> None:
        scale = self.scales.get(tap)
        if self.table.taps[tap].scaled_by == "row":
            scale = self.scale(shard)[a:b]
        convert(self.tensor(shard)[a:b], out, scale)

    @property
    def _threads(self) -> int:
        """How many threads read ranges: they copy from a disk's cache, and wait for a bucket."""
        return min(_COPIERS, os.cpu_count() or 1) if self.is_local else self.objects.parallel

    def index(self, start: int, stop: int) -> np.ndarray:
        """Return the index entries of a range of rows."""
        ranges = list(self._unit_ranges(start, stop))
        for position, *_ in ranges:
            for name in self.table.index_dtype.names or ():
                self._entries(self.units[position], name)
        out = np.empty(max(0, stop - start), self.table.index_dtype)
        for position, low, high, at in ranges:
            for name in self.table.index_dtype.names or ():
                column = self._entries(self.units[position], name)
                out[name][at : at + high - low] = column[low:high]
        return out

    # -- chosen rows -------------------------------------------------------------------------

    def jobs(self, tap: str, rows: Rows, out: Bytes) -> Iterator[ReadJob]:
        """Yield jobs, to run in any order, that copy a tap's bytes of ascending rows."""
        for shard, chosen, at in self._parts(tap, rows):
            source = _Source(partial(self.tensor, shard), out.shape[1], self._is_mapped(shard))
            yield from _reads(source, chosen, out[at : at + len(chosen)])

    def scale_jobs(self, tap: str, rows: Rows, out: np.ndarray) -> Iterator[ReadJob]:
        """Yield jobs that copy the scale of each row, if rows have one."""
        for shard, chosen, at in self._parts(tap, rows):
            source = _Source(partial(self.scale, shard), out.itemsize, self._is_mapped(shard))
            yield from _reads(source, chosen, out[at : at + len(chosen)])

    def take(self, tap: str, rows: Rows, out: np.ndarray) -> None:
        """Decode chosen rows, in ascending order, into a buffer."""
        info = self.table.taps[tap]
        stored: Bytes = np.empty((len(rows), info.width * info.storage.itemsize), np.uint8)
        jobs = [*self.jobs(tap, rows, stored)]
        scale = self.scales.get(tap)
        if info.scaled_by == "row":
            scale = np.empty(len(rows), SCALE_DTYPE)
            jobs += self.scale_jobs(tap, rows, scale)
        run_jobs(jobs, 1 if self.is_local else self.objects.parallel)
        convert(stored.view(info.storage).reshape(len(rows), *info.shape), out, scale)

    def forget(self) -> None:
        """Drop the files and headers that are kept open or in memory; they are opened again."""
        for kept in (self._header, self._file, self.mapped, self.column):
            kept.cache_clear()

    def index_jobs(self, rows: Rows, out: np.ndarray) -> Iterator[ReadJob]:
        """Yield jobs that copy the index entries of the rows."""
        for unit, chosen, part in self._units_of(rows):
            if self._is_mapped(unit.index):
                yield partial(self._copy_entries, unit, chosen, out[part])
                continue
            for name in self.table.index_dtype.names or ():
                opened = partial(self._entries, unit, name)
                source = _Source(opened, out.dtype[name].itemsize, False)
                yield from _reads(source, chosen, out[name][part])

    def _units_of(self, rows: Rows) -> Iterator[tuple[Done, Rows, slice]]:
        """Yield each unit, the ascending rows within it, and their place among all."""
        positions = np.searchsorted(self.starts, rows, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(positions)) + 1).tolist(), len(rows)]
        for low, high in zip(cuts, cuts[1:], strict=False):
            if low < high:
                position = int(positions[low])
                chosen = rows[low:high] - self.starts[position]
                yield self.units[position], chosen, slice(low, high)

    def _copy_entries(self, unit: Done, rows: Rows, out: np.ndarray) -> None:
        for name in self.table.index_dtype.names or ():
            out[name] = np.take(self._entries(unit, name), rows)

    def _parts(self, tap: str, rows: Rows) -> Iterator[tuple[Shard, Rows, int]]:
        """Yield each shard, its part of ascending rows, and the number of rows before them."""
        for unit, inside, part in self._units_of(rows):
            shards = self._shards_of(unit, tap)
            cuts = np.searchsorted(inside, [*(shard.first for shard in shards), unit.rows])
            for number in np.flatnonzero(np.diff(cuts)).tolist():
                shard = shards[number]
                chosen = inside[cuts[number] : cuts[number + 1]] - shard.first
                yield shard, chosen, part.start + int(cuts[number])

    def _map(self, tap: str) -> "MappedRows | None":
        """Map all rows of a tap as one array; None if they do not lie in few, plain files."""
        if not self.is_local or np.count_nonzero(self.units.rows) > _MOST_MAPPED_FILES:
            return None
        parts: list[MappedFile] = []
        for position, unit in enumerate(self.units):
            for shard in self._shards_of(unit, tap) if unit.rows else ():
                path = self.objects.local_path(shard.key)
                if path is None or not self._is_mapped(shard) or len(parts) >= _MOST_MAPPED_FILES:
                    return None
                self.tensor(shard)  # checks it against the record
                first = int(self.starts[position]) + shard.first
                parts.append((path, self._header(shard.key)[tap], first))
        info = self.table.taps[tap]
        return map_rows(parts, info.width * info.storage.itemsize)

    # -- files -------------------------------------------------------------------------------

    def tensor(self, shard: Shard) -> Any:
        """Return a shard's rows, to be sliced."""
        rows, *_ = tap_tensors(shard.tap, shard.count, self.table.taps[shard.tap])
        return self._checked(shard, rows)

    def scale(self, shard: Shard) -> Any:
        """Return the scale of each of a shard's rows."""
        _, scale = tap_tensors(shard.tap, shard.count, self.table.taps[shard.tap])
        return self._checked(shard, scale)

    def _entries(self, unit: Done, name: str) -> Any:
        columns = index_tensors(unit.index.count, self.table.index_dtype)
        return self._checked(unit.index, next(spec for spec in columns if spec[0] == name))

    def _is_mapped(self, file: Shard) -> bool:
        return not file.key.endswith(fmt.COMPRESSED) and self.is_local

    def _checked(self, file: Shard, spec: TensorSpec) -> Any:
        """Open a tensor and check that it matches the record and the table."""
        name, dtype, shape = spec
        tensor = self._opened(file.key, name)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise CorruptError(file.key, f"does not hold {file.count} rows of {name}")
        return tensor

    def _opened(self, key: str, name: str) -> Any:
        tensors = self._file(key)
        if name not in tensors:
            raise CorruptError(key, f"holds no tensor {name!r}")
        return tensors[name]

    def _open(self, key: str) -> Mapping[str, Any]:
        """Open the tensors of a file: through one memory map, if it can be mapped."""
        header, path = self._header(key), None
        if not key.endswith(fmt.COMPRESSED):
            path = self.objects.local_path(key)
        if path is not None:
            return map_tensors(path, header)
        return {name: open_tensor(self.objects, key, info) for name, info in header.items()}

    def _read_header(self, key: str) -> Mapping[str, TensorInfo]:
        return read_shard_header(self.objects, key)

    def _read_column(self, key: str, name: str) -> np.ndarray:
        return self._opened(key, name)[:]

    def _shards_of(self, unit: Done, tap: str) -> list[Shard]:
        shards = [shard for shard in unit.shards if shard.tap == tap]
        if not shards and unit.rows:
            key = self.table.layout.done_key(unit.unit)
            raise CorruptError(key, f"names no rows of {tap}")
        return shards

    def _unit_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Cover a range by (unit position, first and last row within it, offset from `start`)."""
        position = int(np.searchsorted(self.starts, start, side="right")) - 1
        while position < len(self.units) and self.starts[position] < stop:
            base, end = self.starts[position : position + 2].tolist()
            low, high = max(start - base, 0), min(stop, end) - base
            if high > low:
                yield position, low, high, base + low - start
            position += 1


def runs(rows: np.ndarray) -> list[int]:
    """Return where runs of consecutive row numbers begin, then the end of the last."""
    return [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]


def run_jobs(jobs: Iterable[ReadJob], threads: int) -> None:
    """Run jobs by threads; one thread is this one."""
    called = map(_call, jobs) if threads == 1 else mapped(_call, jobs, threads)
    for _ in called:
        pass


def _call(job: ReadJob) -> None:
    job()


def _reads(source: "_Source", rows: Rows, out: np.ndarray) -> Iterator[ReadJob]:
    """Split ascending rows of one tensor into reads, at wide gaps and at a maximal length.

    In a memory map gaps are not read, so only the rows themselves count.
    """
    most = max(1, _STRETCH_BYTES // source.row_bytes)
    if source.mapped:
        for low in range(0, len(rows), most):
            yield partial(_read, source, rows[low : low + most], out[low : low + most])
        return
    breaks = np.flatnonzero(np.diff(rows) > 1 + _GAP_BYTES // source.row_bytes) + 1
    for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
        while low < high:
            cut = min(high, int(np.searchsorted(rows, int(rows[low]) + most)))
            yield partial(_read, source, rows[low:cut], out[low:cut])
            low = cut


def _read(source: "_Source", rows: Rows, out: np.ndarray) -> None:
    first, last = int(rows[0]), int(rows[-1]) + 1
    opened = source.opened()
    if source.mapped:
        opened = cast(Any, np.asarray(opened))
    stored = cast(np.ndarray, opened[first:last])
    if out.ndim == 1:  # a column; in the index its values are not contiguous
        out[...] = stored[rows - first]
        return
    stored = stored.reshape(last - first, -1).view(np.uint8)
    bounds = runs(rows)
    if len(rows) < _LONG_RUN * (len(bounds) - 1):
        np.take(stored, rows - first, axis=0, out=out, mode="clip")
        return
    for low, high in zip(bounds, bounds[1:], strict=False):
        begin = int(rows[low]) - first
        out[low:high] = stored[begin : begin + high - low]


# -- many files as one array -------------------------------------------------------------------


class MappedRows:
    """One array over the rows of many files, so that one call takes rows from all of them.

    Files are mapped into one range of addresses, each so that its first row falls on a multiple of
    the row size. The gaps between them are never touched; they take addresses but no memory.
    """

    def __init__(self, parts: Sequence[MappedFile], row_bytes: int) -> None:
        """Map files; call `map_rows` instead, which checks whether they can be mapped."""
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
                _mmap(address, length, mmap.MAP_SHARED | _MAP_FIXED, descriptor, info.start - at)
            finally:
                os.close(descriptor)
        self._base = base
        whole: Bytes = np.frombuffer(memoryview(held), np.uint8)
        self.table = whole[: size // row_bytes * row_bytes].reshape(-1, row_bytes)
        self.table.flags.writeable = False

    def numbers(self, rows: Rows) -> Rows:
        """Return the row numbers in the table of ascending rows of the dataset."""
        cuts = np.searchsorted(rows, self._firsts[1:])
        counts = np.diff(cuts, prepend=0, append=len(rows))
        return rows + np.repeat(self._shifts, counts)

    def expect(self, numbers: Rows, bounds: Sequence[int]) -> None:
        """Ask the kernel to read ahead runs of the table's rows, delimited by bounds."""
        for low, high in zip(bounds, bounds[1:], strict=False):
            start = self._base + int(numbers[low]) * self._row_bytes
            stop = self._base + (int(numbers[high - 1]) + 1) * self._row_bytes
            start -= start % mmap.PAGESIZE
            _LIBC.madvise(start, stop - start, _MADV_WILLNEED)  # only advice: it may fail


def map_rows(parts: Sequence[MappedFile], row_bytes: int) -> MappedRows | None:
    """Map files into one array; None if the system or the layout of the files does not allow it."""
    if not sys.platform.startswith("linux") or not 0 < len(parts) <= _MOST_MAPPED_FILES:
        return None
    common = math.gcd(row_bytes, mmap.PAGESIZE)
    if any(info.start % mmap.PAGESIZE % common for _, info, _ in parts):
        return None
    most = sum(info.stop - info.start + row_bytes * mmap.PAGESIZE for _, info, _ in parts)
    if most >= _MOST_MAPPED_BYTES:
        return None
    try:
        return MappedRows(parts, row_bytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:  # other taps or libraries have used up the maps
            raise
        return None


def _places(infos: Sequence[TensorInfo], row_bytes: int) -> list[int]:
    """Return the table row where each file begins: after the previous one, aligned to its page."""
    page = mmap.PAGESIZE
    common = math.gcd(row_bytes, page)
    inverse = pow(row_bytes // common, -1, page // common) if page > common else 0
    places: list[int] = []
    end = 0
    for info in infos:
        at = info.start % page
        period = page // common  # distance of row numbers with the file's offset within a page
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
    if found is None or found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping rows: {os.strerror(number)}")
    return found

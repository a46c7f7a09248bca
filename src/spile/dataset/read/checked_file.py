"""Files that are compared with their records while they are read.

A copy gets its own checksums, so damage in the source would become undetectable: anything that
copies rows must read them through this module.
"""

import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from spile.core.errors import CorruptError
from spile.core.tensors import TensorInfo
from spile.dataset.codec.compression import PlaneReader
from spile.dataset.codec.shard import read_shard_header
from spile.dataset.format import COMPRESSED, Shard
from spile.objects import Objects

WINDOW_BYTES = 16 << 20  # read at a time


class CheckedFile:
    """One file of a unit. Bytes are hashed in their order, mostly as they are read."""

    def __init__(self, objects: Objects, file: Shard, *, ask_size: bool = True) -> None:
        """`ask_size`: whether to compare the size first, which in a bucket is one more request."""
        self._objects, self._file = objects, file
        self._digest = xxhash.xxh3_128()
        self._hashed = 0
        if not ask_size:
            return
        try:
            size = objects.size(file.key)
        except FileNotFoundError:
            raise CorruptError(file.key, "is missing") from None
        if size != file.bytes:
            raise CorruptError(file.key, f"has {size} bytes, {file.bytes} were written")

    @cached_property
    def header(self) -> dict[str, TensorInfo]:
        return read_shard_header(self._objects, self._file.key)

    @cached_property
    def _planes(self) -> PlaneReader | None:
        key = self._file.key
        return PlaneReader(key, self._file.bytes, self._fetch) if key.endswith(COMPRESSED) else None

    def rows(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return rows first..last of a tensor; all by default."""
        info = self.header[name]
        last = info.shape[0] if last is None else last
        if not self._hashed:  # the bytes before the rows are read and hashed first
            self._read(0, min(each.start for each in self.header.values()), 1)
        each = (info.stop - info.start) // max(1, info.shape[0])
        start, stop = info.start + first * each, info.start + last * each
        data = self._read(start, stop, info.dtype.itemsize)
        return np.frombuffer(data, info.dtype).reshape(last - first, *info.shape[1:])

    def pieces(self, window: int = WINDOW_BYTES) -> Iterator[bytes | memoryview]:
        """Yield the bytes not hashed yet (all, if nothing was read), then compare the hash.

        Args:
            window: most bytes of a piece.

        Raises:
            CorruptError: if the file is not the one that was written.
        """
        while self._hashed < self._file.bytes:
            yield self._fetch(self._hashed, min(self._hashed + window, self._file.bytes))
        if self._digest.hexdigest() != self._file.digest:
            raise CorruptError(
                self._file.key, "checksum does not match (damaged, or another file in its place)"
            )

    def check(self) -> None:
        """Hash the rest, and compare."""
        for _ in self.pieces():
            pass

    def _read(self, start: int, stop: int, itemsize: int) -> bytes | memoryview:
        """Read a range of the file, decompressed."""
        if self._planes:
            return self._planes.read(start, stop, itemsize)
        return self._fetch(start, stop)

    def _fetch(self, start: int, stop: int) -> bytes | memoryview:
        try:
            data = self._objects.get_range(self._file.key, start, stop)
        except FileNotFoundError:
            raise CorruptError(self._file.key, "is missing") from None
        if len(data) != stop - start:
            raise CorruptError(self._file.key, f"gave {len(data)} of {stop - start} bytes")
        if start <= self._hashed < stop:
            self._digest.update(memoryview(data)[self._hashed - start :])
            self._hashed = stop
        return data


class CheckedObjects:
    """A store whose files are hashed once, before any of their bytes are returned."""

    def __init__(self, objects: Objects, find: Callable[[str], Shard | None]) -> None:
        """`find`: returns the record of a file by its key; None for an object of another kind."""
        self.objects, self._find = objects, find
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock | None] = {}  # by key; None once it is found valid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objects, name)

    def get(self, key: str) -> bytes:
        self._check(key)
        return self.objects.get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes | memoryview:
        self._check(key)
        return self.objects.get_range(key, start, stop)

    def local_path(self, key: str) -> Path | None:
        self._check(key)
        return self.objects.local_path(key)

    def _check(self, key: str) -> None:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        if lock is None:
            return
        with lock:
            if self._locks[key] is not None:
                file = self._find(key)
                if file is not None:
                    CheckedFile(self.objects, file).check()
                self._locks[key] = None

"""A least-recently-used cache of ranges of another store's objects, on a local disk.

Only ranges are cached. They belong to shards, which never change under their keys. Records are read
whole, and requested each time. Several processes may share a folder.
"""

import contextlib
import os
import secrets
import threading
from pathlib import Path
from typing import Any, cast

import xxhash

from spile.core.errors import ConfigError, StoreError
from spile.objects.protocol import Objects

_PIECE = 1 << 20
_DIGEST = 8  # bytes after each piece: after a power loss a piece may be incomplete
_SUFFIX = ".piece"


def cached(objects: Objects, folder: Path, most: int) -> Objects:
    """Return the same objects, with at most `most` bytes of them cached in a folder."""
    if objects.local_path("any") is not None:
        raise ConfigError(f"{objects.url} is on a local disk; a cache is for buckets")
    if most < _PIECE:
        raise ConfigError(f"a cache of {most} bytes is too small; give at least 1MiB")
    return cast(Objects, CachedObjects(objects, folder, most))


class CachedObjects:
    """A store with cached ranges; everything else is passed on to the store."""

    def __init__(self, objects: Objects, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self._objects = objects
        self._own = folder / xxhash.xxh3_64_hexdigest(objects.url.encode())
        self._lock = threading.Lock()
        self._held: int | None = None  # bytes, approximately: other processes also write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return bytes(self._objects.get_range(key, start, stop))
        first, last = start // _PIECE, -(-stop // _PIECE)
        pieces = {number: self._find(key, number) for number in range(first, last)}
        missing = [number for number, piece in pieces.items() if piece is None]
        while missing:  # adjacent pieces in one request
            count = 1
            while count < len(missing) and missing[count] == missing[0] + count:
                count += 1
            begin = missing[0] * _PIECE
            data = bytes(self._objects.get_range(key, begin, begin + count * _PIECE))
            for number in missing[:count]:
                at = number * _PIECE - begin
                pieces[number] = data[at : at + _PIECE]
                self._keep(key, number, data[at : at + _PIECE])
            missing = missing[count:]
        found = b"".join(piece or b"" for piece in pieces.values())
        return found[start - first * _PIECE : stop - first * _PIECE]

    def _path(self, key: str, number: int) -> Path:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        return self._own / name[:2] / f"{name[2:]}-{number}{_SUFFIX}"

    def _find(self, key: str, number: int) -> bytes | None:
        path = self._path(key, number)
        try:
            stored = path.read_bytes()
            os.utime(path)  # mark as used
        except OSError:
            return None
        piece = stored[:-_DIGEST]
        return piece if xxhash.xxh3_64_digest(piece) == stored[-_DIGEST:] else None

    def _keep(self, key: str, number: int, piece: bytes) -> None:
        path = self._path(key, number)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(piece + xxhash.xxh3_64_digest(piece))
            with self._lock:
                self._make_room(len(piece) + _DIGEST)
                temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise StoreError(f"keeping rows in {self.folder}: {error}") from error

    def _make_room(self, size: int) -> None:
        if self._held is not None and self._held + size <= self.most:
            self._held += size
            return
        pieces: list[tuple[float, int, Path]] = []
        for path in self.folder.rglob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                pieces.append((status.st_mtime, status.st_size, path))
        held = size + sum(found for _, found, _ in pieces)
        if held > self.most:
            # Free a tenth more than needed: scanning all pieces takes a while.
            for _, found, path in sorted(pieces):
                if held <= 0.9 * self.most:
                    break
                path.unlink(missing_ok=True)
                held -= found
        self._held = held

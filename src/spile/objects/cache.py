"""A least-recently-used cache of ranges of another store's objects, on a local disk.

Only ranges are cached, of files whose digest a record names: a piece belongs to that digest, not to
the key, under which a later dataset at the same URL may have another file. Records are read whole,
and requested each time. Several processes may share a folder.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import xxhash

from spile.core.errors import ConfigError, StoreError
from spile.objects.protocol import Objects

_PIECE = 1 << 20
_DIGEST = 8  # bytes after each piece: after a power loss a piece may be incomplete
_SUFFIX = ".piece"
_KNOWN = 1 << 16  # digests kept by key: finding one may decode the record of a unit


def cached(
    objects: Objects, folder: Path, most: int, digest_of: Callable[[str], str | None]
) -> Objects:
    """Return the same objects, with at most `most` bytes of them cached in a folder.

    Args:
        digest_of: returns the digest of a file by its key; None for an object whose content is not
            known, which is not cached.
    """
    if objects.local_path("any") is not None:
        raise ConfigError(f"{objects.url} is on a local disk; a cache is for buckets")
    if most < _PIECE:
        raise ConfigError(f"a cache of {most} bytes is too small; give at least 1MiB")
    return cast(Objects, CachedObjects(objects, folder, most, digest_of))


class CachedObjects:
    """A store with cached ranges; everything else is passed on to the store."""

    def __init__(
        self, objects: Objects, folder: Path, most: int, digest_of: Callable[[str], str | None]
    ) -> None:
        self.folder, self.most = folder, most
        self._objects, self._digest_of = objects, lru_cache(_KNOWN)(digest_of)
        self._own = folder / xxhash.xxh3_64_hexdigest(objects.url.encode())
        self._lock = threading.Lock()
        self._held: int | None = None  # bytes, approximately: other processes also write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        digest = self._digest_of(key) if start < stop else None
        if digest is None:
            return bytes(self._objects.get_range(key, start, stop))
        first, last = start // _PIECE, -(-stop // _PIECE)
        pieces = {number: self._find(digest, number) for number in range(first, last)}
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
                self._keep(digest, number, data[at : at + _PIECE])
            missing = missing[count:]
        found = b"".join(piece or b"" for piece in pieces.values())
        return found[start - first * _PIECE : stop - first * _PIECE]

    def _path(self, digest: str, number: int) -> Path:
        return self._own / digest[:2] / f"{digest[2:]}-{number}{_SUFFIX}"

    def _find(self, digest: str, number: int) -> bytes | None:
        path = self._path(digest, number)
        try:
            stored = path.read_bytes()
            os.utime(path)  # mark as used
        except OSError:
            return None
        piece = stored[:-_DIGEST]
        return piece if xxhash.xxh3_64_digest(piece) == stored[-_DIGEST:] else None

    def _keep(self, digest: str, number: int, piece: bytes) -> None:
        path = self._path(digest, number)
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

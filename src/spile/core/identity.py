"""Cheap identity of a file: its size and a hash of sampled blocks.

Reading terabytes to learn whether they changed takes too long, and names and dates prove nothing.
Files up to a megabyte are hashed whole. In larger files sixteen blocks are hashed, spread evenly
from the first to the last. A full hash is also compared where all bytes are read anyway (weights
while loading, line files while indexing).
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Literal, Protocol

import xxhash

_BLOCK = 1 << 16
_BLOCKS = 16
_THREADS = 16  # a bucket has high latency, but serves many requests at once


class ReadablePath(Protocol):
    """A path, or an object that can be read like one."""

    def open(self, mode: Literal["rb"], buffering: int) -> BinaryIO: ...

    def read_bytes(self) -> bytes: ...


def sampled_digest(path: ReadablePath) -> str:
    """Return `SIZE-HASH` of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb", _BLOCK) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= _BLOCK * _BLOCKS:
            digest.update(file.read())
        else:
            for i in range(_BLOCKS):
                file.seek((size - _BLOCK) * i // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return f"{size}-{digest.hexdigest()}"


def sampled_digests(paths: Iterable[ReadablePath]) -> list[str]:
    """Return the sampled digests of several files, computed in parallel."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(sampled_digest, paths))


def full_digest(*paths: ReadablePath) -> str:
    """Return one SHA-256 over several small files."""
    return contents_digest(path.read_bytes() for path in paths)


def contents_digest(contents: Iterable[bytes]) -> str:
    """Return one SHA-256 over the contents of several small files."""
    digest = hashlib.sha256()
    for data in contents:
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def summed_digest(hashes: Iterable[int]) -> str:
    """Return the sum of 128-bit hashes, in any order, as 32 hexadecimal digits."""
    return f"{sum(hashes) % (1 << 128):032x}"

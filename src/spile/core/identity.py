"""What a file is, cheaply: its size and sampled blocks of it.

Reading terabytes to learn whether they changed is no answer, and trusting names or dates is none
either. Files up to a megabyte are hashed whole; of larger ones sixteen blocks are, spread evenly
with both ends included. A full hash follows when the bytes are read anyway (weights while
loading, line files while indexing), and is compared too.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Literal, Protocol

import xxhash

_BLOCK = 1 << 16
_BLOCKS = 16
_THREADS = 16  # a bucket answers late, but many at once


class ReadablePath(Protocol):
    """A path, or what can be read like one."""

    def open(self, mode: Literal["rb"], buffering: int) -> BinaryIO: ...

    def read_bytes(self) -> bytes: ...


def sampled_digest(path: ReadablePath) -> str:
    """`SIZE-HASH` of a file."""
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
    """Those of several files, some at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(sampled_digest, paths))


def full_digest(*paths: ReadablePath) -> str:
    """SHA-256 of small files, together."""
    digest = hashlib.sha256()
    for path in paths:
        data = path.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()

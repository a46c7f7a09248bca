"""What a store of objects is, whatever it is made of.

Two kinds of object exist, and the difference is the whole safety of the store:
  * a *stream* is written once under a key nobody else uses (shards), durable when closed;
  * a *record* is small and created exclusively: of two writers one wins, and both know it.
Heartbeats, which nothing depends on, are the only objects ever replaced.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from spile.errors import StoreError


class Stream(Protocol):
    """An object being written."""

    def write(self, data: bytes | memoryview) -> None: ...

    def close(self) -> None:
        """Make the object durable; only then may a record name it."""
        ...

    def abandon(self) -> None:
        """Stop writing; the object is removed if that is possible."""
        ...


class Objects(Protocol):
    """A store of objects. Keys are relative, with forward slashes."""

    url: str
    most_streamed: int | None  # bytes that one stream should hold, where it holds them in memory

    def get(self, key: str) -> bytes:
        """The whole object. Raises FileNotFoundError if there is none."""
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes: ...

    def size(self, key: str) -> int:
        """Bytes in the object. Raises FileNotFoundError if there is none."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create the record durably; False, changing nothing, if the key exists."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite, atomically but not durably."""
        ...

    def stream(self, key: str) -> Stream: ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys under a prefix that ends in a slash (or all), in no particular order."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is no error."""
        ...

    def leftover_of(self, key: str) -> str | None:
        """The key whose interrupted creation left this object behind; None for any other."""
        ...

    def local_path(self, key: str) -> Path | None:
        """The object's file, where it has one: for memory maps."""
        ...

    def free_bytes(self) -> int | None:
        """Room left, where that is known."""
        ...


def exists(objects: Objects, key: str) -> bool:
    """Whether there is such an object."""
    try:
        objects.size(key)
    except FileNotFoundError:
        return False
    return True


def check_key(url: str, key: str) -> list[str]:
    """The parts of a key, none of which leads out of the store."""
    parts = key.split("/")
    if key.startswith("/") or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"{url}: {key!r} is not a key inside the store")
    return parts

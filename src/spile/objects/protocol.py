"""The protocol of a store of objects, whatever it is made of.

There are two kinds of object, and the safety of the store rests on the difference:
  * a *stream* is written once under a key nobody else uses (shards), durable when closed;
  * a *record* is small and created exclusively: if two writers try, one wins and both know it.
Only heartbeats are ever replaced, and nothing depends on them.
"""

import contextlib
import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from spile.core.errors import StoreError
from spile.core.retry import Retrying
from spile.core.system import system
from spile.metrics.counters import Counters

PROBES = "probes/"
# Counters of this process over all stores: retries and uploaded bytes in total; objects uploading
# and spooled at present.
COUNTED = Counters()
MOST_HELD = 4 << 30  # limit on an object that is read whole: no file of ours is as large
MOST_RECORD = 256 << 20  # the same of a record: JSON takes many times its size once it is parsed


@dataclass(frozen=True)
class Entry:
    """The entry of an object in a listing."""

    key: str
    size: int
    etag: str  # changes with the object's content; empty if the store has none


class Stream(Protocol):
    """An object being written."""

    def write(self, data: bytes | memoryview) -> None: ...

    def close(self) -> str:
        """Make the object durable; only then may a record name it. Returns its etag."""
        ...

    def abandon(self) -> None:
        """Stop writing, and remove the object if possible."""
        ...


class Objects(Protocol):
    """A store of objects. Keys are relative, with forward slashes."""

    url: str
    endpoint: str  # of a bucket's server, if it is not the cloud's own
    most_streamed: int | None  # most bytes in one stream; None if unlimited
    parallel: int  # number of requests worth making in parallel
    most_closing: int  # streams that may be closing at a time; each is held until it is closed

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises FileNotFoundError if there is none.

        An object larger than `MOST_HELD`, or a record than `MOST_RECORD`, is refused before memory
        is allocated.
        """
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes | memoryview:
        """Return these bytes, or fewer if the object ends before; a view saves a copy."""
        ...

    def size(self, key: str) -> int:
        """Return the object's size in bytes. Raises FileNotFoundError if there is none."""
        ...

    def entry(self, key: str) -> Entry:
        """Return what a listing would say of the object, as it is now. Raises FileNotFoundError."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create the record durably; return False, changing nothing, if the key exists.

        The existing record is durable, too, whoever created it.

        Raises:
            NotCreatedError: if it certainly was not created.
            StoreError: if it may have been, or may yet be.
        """
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite, atomically but not durably."""
        ...

    def move(self, key: str, to: str) -> None:
        """Move a record to a new key, durably; `key` can then be created again.

        A kill in between may leave both. Raises FileNotFoundError if there is no such record.
        """
        ...

    def stream(self, key: str) -> Stream: ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys under a prefix that ends in a slash (or all), in no particular order."""
        ...

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the same objects as `list`, with sizes."""
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the folders directly under a prefix that ends in a slash."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is not an error."""
        ...

    def leftover_of(self, key: str) -> str | None:
        """Return the key whose interrupted creation left this object; None if it is no leftover."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Return the object's file, if it has one, for memory maps."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free space, if it is known."""
        ...


class FilelessObjects:
    """Base of stores without files on a local disk."""

    url: str
    endpoint = ""
    most_streamed: int | None = None

    def size(self, key: str) -> int:
        raise NotImplementedError

    def entry(self, key: str) -> Entry:
        return Entry(key, self.size(key), "")

    def list(self, prefix: str = "") -> Iterator[str]:
        raise NotImplementedError

    def folders(self, prefix: str) -> Iterator[str]:
        rest = (key[len(prefix) :] for key in self.list(prefix))
        yield from dict.fromkeys(key.partition("/")[0] for key in rest if "/" in key)

    def leftover_of(self, key: str) -> str | None:
        return None

    def local_path(self, key: str) -> Path | None:
        check_key(self.url, key)
        return None

    def free_bytes(self) -> int | None:
        return None


def exists(objects: Objects, key: str) -> bool:
    """Return whether an object exists."""
    try:
        objects.size(key)
    except FileNotFoundError:
        return False
    return True


def check_held(url: str, key: str, size: int) -> None:
    """Refuse an object that is too large to be read whole."""
    if size > (MOST_RECORD if key.endswith(".json") else MOST_HELD):
        raise StoreError(f"{url}/{key}: is too large for a record ({size:,} bytes)")


def check_creates_once(objects: Objects) -> None:
    """Refuse a store that overwrites existing objects on create: commits could be lost there.

    Some servers that implement S3 ignore preconditions silently.
    """
    key = f"{PROBES}{system().token(8)}"
    try:
        # (Nobody else uses this key. If it "exists already" with these bytes, a proxy has sent our
        # request twice.)
        created = objects.create(key, b"first")
        with contextlib.suppress(FileNotFoundError):
            created = created or objects.get(key) == b"first"
        if not created or objects.create(key, b"second"):
            raise StoreError(
                f"{objects.url}: the server ignores preconditions (it overwrote an object that it "
                "was told to create only if absent), so two workers could both commit a unit; use "
                "another one for --out"
            )
    finally:
        objects.delete(key)


def check_key(url: str, key: str) -> list[str]:
    """Return the parts of a key; refuse one that leads out of the store."""
    parts = key.split("/")
    if key.startswith("/") or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"{url}: {key!r} is not a key inside the store")
    return parts


def matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a key or path, split into names, matches a pattern.

    As in `glob`, `*` stays within a name, and does not match a leading dot. `**` matches any number
    of folders; at the end it also matches everything in them.
    """
    # Lengths of the prefixes of `names` that the parts so far match. So the cost of a pattern with
    # many `**` is only the number of its parts times that of the names.
    reached = {0}
    for number, part in enumerate(pattern):
        if part != "**":
            reached = {
                at + 1
                for at in reached
                if at < len(names)
                and (part.startswith(".") or not names[at].startswith("."))
                and fnmatchcase(names[at], part)
            }
            continue
        further: set[int] = set()
        for at in reached:
            stop = at
            while stop < len(names) and not names[stop].startswith("."):
                stop += 1
                further.add(stop)
        reached = further if number == len(pattern) - 1 else reached | further
    return len(names) in reached


def plain_depth(pattern: Sequence[str]) -> int:
    """Return how many leading folders of a pattern contain no wildcard."""
    depth = 0
    while depth + 1 < len(pattern) and not glob.has_magic(pattern[depth]):
        depth += 1
    return depth


def retrying(what: str, patience: float) -> Retrying:
    """Return the attempts of one request; retries are counted."""
    return Retrying(what, patience, lambda: COUNTED.add(retries=1))

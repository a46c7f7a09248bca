"""What a store of objects is, whatever it is made of.

Two kinds of object exist, and the difference is the whole safety of the store:
  * a *stream* is written once under a key nobody else uses (shards), durable when closed;
  * a *record* is small and created exclusively: of two writers one wins, and both know it.
Heartbeats, which nothing depends on, are the only objects ever replaced.
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
# What this process asks of buckets and sites, all together: retries; uploaded, in bytes; uploading
# and spooled, as they are now.
COUNTED = Counters()
MOST_HELD = 4 << 30  # bytes of an object that is read whole: no record of ours is as large


@dataclass(frozen=True)
class Entry:
    """What a listing says of an object."""

    key: str
    size: int
    etag: str  # changes with the object's content; empty where the store has none


class Stream(Protocol):
    """An object being written."""

    def write(self, data: bytes | memoryview) -> None: ...

    def close(self) -> str:
        """Make the object durable; only then may a record name it. Returns its etag."""
        ...

    def abandon(self) -> None:
        """Stop writing; the object is removed if that is possible."""
        ...


class Objects(Protocol):
    """A store of objects. Keys are relative, with forward slashes."""

    url: str
    most_streamed: int | None  # bytes that one stream should hold, where that is bounded
    parallel: int  # requests that are worth making side by side
    most_closing: int  # streams that may be closed or wait for it, each held until it is

    def get(self, key: str) -> bytes:
        """The whole object. Raises FileNotFoundError if there is none.

        One larger than `MOST_HELD` is refused before memory is taken for it.
        """
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes: ...

    def size(self, key: str) -> int:
        """Bytes in the object. Raises FileNotFoundError if there is none."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create the record durably; False, changing nothing, if the key exists.

        Raises:
            NotCreatedError: if it certainly was not created.
            StoreError: if it may have been, or may yet be.
        """
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite, atomically but not durably."""
        ...

    def move(self, key: str, to: str) -> None:
        """Give a record another key, durably: `key` can be created again. `to` must be new.

        A kill in between may leave both. Raises FileNotFoundError if there is none.
        """
        ...

    def stream(self, key: str) -> Stream: ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys under a prefix that ends in a slash (or all), in no particular order."""
        ...

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """What `list` lists, with sizes."""
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


def check_held(url: str, key: str, size: int) -> None:
    """Refuse what is too large to be read whole."""
    if size > MOST_HELD:
        raise StoreError(f"{url}/{key}: has {size:,} bytes, which no record of ours has")


def check_creates_once(objects: Objects) -> None:
    """Refuse a store that overwrites where it should refuse: commits could be lost there.

    Some servers that speak like S3 ignore preconditions without a word.
    """
    key = f"{PROBES}{system().token(8)}"
    try:
        # (Nobody else has this key: what "exists already" with these bytes was just created, by a
        # request that a proxy has sent twice.)
        created = objects.create(key, b"first")
        with contextlib.suppress(FileNotFoundError):
            created = created or objects.get(key) == b"first"
        if not created or objects.create(key, b"second"):
            raise StoreError(
                f"{objects.url}: the server does not honour preconditions (a create that must "
                "fail because the object exists did not), and without them two workers could both "
                "commit a unit; use another one for --out"
            )
    finally:
        objects.delete(key)


def check_key(url: str, key: str) -> list[str]:
    """The parts of a key, none of which leads out of the store."""
    parts = key.split("/")
    if key.startswith("/") or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise StoreError(f"{url}: {key!r} is not a key inside the store")
    return parts


def matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a key (or a path), cut into names, is found by a pattern.

    As `glob` does: `*` stays within a name, and finds none that begins with a dot; `**` is any
    number of folders, and at the end whatever lies in them.
    """
    # Which beginnings of the names the pattern's parts so far have matched: a pattern with many
    # `**` costs no more than its parts times the names.
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
    """How many folders a pattern names plainly before it begins to match."""
    depth = 0
    while depth + 1 < len(pattern) and not glob.has_magic(pattern[depth]):
        depth += 1
    return depth


def retrying(what: str, patience: float) -> Retrying:
    """The attempts of one request; retries are counted."""
    return Retrying(what, patience, lambda: COUNTED.add(retries=1))

"""Files to read, wherever they lie: on a disk, in a bucket, on the Hub or on a web server.

A local file is a `pathlib.Path`. A file behind a URL is a `RemotePath`, which has the methods of
`Path` that find and read files, so code that takes an `AnyPath` works with both. A `RemotePath`
fetches only the ranges that are read.
"""

import contextlib
import glob
import io
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, Protocol, cast

from spile.core.bounded_json import MAX_BYTES, JsonError, check_size, parse_json_object
from spile.core.errors import InputError
from spile.objects import open_objects
from spile.objects.http import WebObjects, split_url
from spile.objects.hub.names import open_named
from spile.objects.protocol import Objects, exists, matches, plain_depth

_AHEAD = 1 << 20  # read-ahead for small reads
_PIECE = 8 << 20  # size of the parts of a large range, which are fetched in parallel
_FETCHERS = ThreadPoolExecutor(16, "fetch")  # one per process, so that memory is bounded


class RemotePath:
    """A file, or a folder, among the objects of a store."""

    def __init__(self, objects: Objects, key: str) -> None:
        self.objects, self.key = objects, key

    def __str__(self) -> str:
        return f"{self.objects.url}/{self.key}".removesuffix("/")

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.objects, f"{self.key}/{name}".removeprefix("/"))

    @property
    def parts(self) -> tuple[str, ...]:
        return PurePosixPath(self.key).parts

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.key).suffixes

    def is_file(self) -> bool:
        return bool(self.key) and exists(self.objects, self.key)

    def is_dir(self) -> bool:
        return any(True for _ in self.below())

    def below(self) -> Iterator["RemotePath"]:
        """Yield all files of a folder and its subfolders, in no particular order."""
        for key in self.objects.list(f"{self.key}/" if self.key else ""):
            yield RemotePath(self.objects, key)

    def above(self, depth: int) -> "RemotePath":
        """Return the folder made of the first `depth` names."""
        return RemotePath(self.objects, "/".join(self.parts[:depth]))

    def size(self) -> int:
        return self.objects.size(self.key)

    def read_bytes(self) -> bytes:
        return self.objects.get(self.key)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return exactly these bytes; raise InputError if the file changed."""
        try:
            data = self.objects.get_range(self.key, start, stop)
        except FileNotFoundError:
            raise InputError(f"{self}: was removed while it was read") from None
        if len(data) != stop - start:
            raise InputError(f"{self}: became shorter while it was read")
        return bytes(data)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on, in pieces that are fetched in parallel."""

        def fetch(low: int) -> None:
            high = min(low + _PIECE, len(out))
            out[low:high] = self.read_range(start + low, start + high)

        list(_FETCHERS.map(fetch, range(0, len(out), _PIECE)))

    def open(self, mode: Literal["rb"] = "rb", buffering: int = _AHEAD) -> BinaryIO:
        """Open a seekable stream; `buffering` bytes are read ahead, or none if it is 0."""
        return open_ranges(self, buffering)


AnyPath = Path | RemotePath


class Ranged(Protocol):
    """A file that is read by ranges."""

    def size(self) -> int: ...

    def read_range(self, start: int, stop: int) -> bytes: ...


def open_ranges(file: Ranged, buffering: int) -> BinaryIO:
    """Return a seekable stream of such a file; `buffering` bytes are read ahead, or none if 0."""
    raw = _RangedStream(file)
    return cast(BinaryIO, io.BufferedReader(raw, buffering) if buffering else raw)


class _RangedStream(io.RawIOBase):
    """A stream in which every read is one range."""

    def __init__(self, file: Ranged) -> None:
        self._file, self._size, self._position = file, file.size(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        data = self._next(len(out))
        out[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._next(self._size)

    def _next(self, size: int) -> bytes:
        start, stop = self._position, min(self._position + size, self._size)
        if stop <= start:
            return b""
        self._position = stop
        return self._file.read_range(start, stop)


def path_of(where: str) -> AnyPath:
    """Return the path that a path or a URL names, whether it exists or not."""
    scheme, separator, rest = where.partition("://")
    if not separator:
        return Path(where)
    if scheme == "file":
        return Path(rest)
    if scheme == "hf":
        return RemotePath(*open_named(where))
    if scheme in ("http", "https"):
        server, key, query = split_url(where)
        return RemotePath(WebObjects(server, query), key)
    bucket, _, key = rest.partition("/")
    return RemotePath(open_objects(f"{scheme}://{bucket}"), key.strip("/"))


def size_of(path: AnyPath) -> int:
    return path.stat().st_size if isinstance(path, Path) else path.size()


def read_json(
    path: AnyPath, *, max_bytes: int = MAX_BYTES, missing_ok: bool = False
) -> dict[str, Any]:
    """Return the JSON object in an untrusted file.

    Args:
        max_bytes: a larger file is refused before it is read.
        missing_ok: return an empty object if there is no such file.

    Raises:
        InputError: if the file cannot be read, or holds something else.
    """
    try:
        check_size(size_of(path), max_bytes)
        return parse_json_object(path.read_bytes(), max_bytes=max_bytes)
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except JsonError as error:
        raise InputError(f"{path}: {error}") from None


def files_below(folder: AnyPath) -> list[AnyPath]:
    """Return all files below a folder, sorted; names that begin with . or _ are skipped."""
    paths = folder.rglob("*") if isinstance(folder, Path) else folder.below()
    depth = len(folder.parts)
    shown = (p for p in paths if not any(part[0] in "._" for part in p.parts[depth:]))
    # A listing contains only files.
    return _sorted(p for p in shown if isinstance(p, RemotePath) or p.is_file())


def _walked(pattern: Path) -> Iterator[Path]:
    """Yield the local files that match a pattern, in one walk."""
    top = Path(*pattern.parts[: plain_depth(pattern.parts)])
    for folder, _, names in os.walk(top):
        for name in names:
            found = Path(folder, name)
            if matches(found.parts, pattern.parts):
                yield found


def files_matching(pattern: str) -> list[AnyPath]:
    """Return the files that match a glob, sorted; `**` is any number of folders."""
    path = path_of(pattern)
    if isinstance(path, Path):
        if path.parts.count("**") > 1:  # the library would walk once for each way to match
            return _sorted(_walked(path))
        return _sorted({Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p)})
    top = path.above(plain_depth(path.parts))
    return _sorted(p for p in top.below() if matches(p.parts, path.parts))


def _sorted(paths: Iterable[AnyPath]) -> list[AnyPath]:
    return sorted(paths, key=lambda path: path.parts)  # by folder, wherever they are


@contextlib.contextmanager
def local_copy(folder: AnyPath) -> Generator[Path, None, None]:
    """Provide a folder on a local disk: the folder itself, or a temporary copy of it."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="spile-") as scratch:
        for path in folder.below():
            if len(path.parts) == len(folder.parts) + 1:
                with path.open() as source, (Path(scratch) / path.name).open("xb") as copy:
                    shutil.copyfileobj(source, copy, _PIECE)
        yield Path(scratch)

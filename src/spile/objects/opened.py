"""Files that are opened once and read again and again, such as the weights of a streamed model.

A path may name another file tomorrow, and a run may last for days. All bytes of an opened file come
from the file that was there when it was opened, and `check` tells whether that one has changed.
"""

import logging
import os
import weakref
from pathlib import Path
from typing import BinaryIO, Literal

from spile.core.errors import DataError, InputError
from spile.objects.paths import AnyPath, RemotePath, open_ranges

_AHEAD = 1 << 16

_log = logging.getLogger("spile.objects")


class OpenedFile:
    """A local file that stays open: it is read even if its path names another one by then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
            self._first = os.fstat(self._descriptor)
        except OSError as error:
            raise InputError(f"{path}: cannot be opened ({error.strerror or error})") from error
        self._told = False

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def fileno(self) -> int:
        return self._descriptor

    def size(self) -> int:
        return self._first.st_size

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._descriptor, [out[done:]], start + done)
            except OSError as error:
                raise InputError(f"{self}: cannot be read ({error.strerror or error})") from error
            if not count:
                raise changed(self, "it became shorter")
            done += count

    def read_range(self, start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        self.read_into(start, memoryview(out))
        return bytes(out)

    def read_bytes(self) -> bytes:
        return self.read_range(0, self.size())

    def open(self, mode: Literal["rb"] = "rb", buffering: int = _AHEAD) -> BinaryIO:
        """Return a stream with a position of its own."""
        return open_ranges(self, buffering)

    def check(self, *, loading: bool = False) -> None:
        """Raise DataError if the file was written to; say once that its path names another.

        Times are those of its contents. (Removing a name changes the other one, `st_ctime`.)

        Args:
            loading: raise for that as well, because files that are read later may belong to
                another model, which is just replacing this one.
        """
        try:
            now = os.fstat(self._descriptor)
        except OSError as error:
            raise changed(self, error.strerror or str(error)) from error
        if (now.st_size, now.st_mtime_ns) != (self._first.st_size, self._first.st_mtime_ns):
            raise changed(self, "it was written to")
        try:
            there = os.stat(self.path)
            replaced = not os.path.samestat(there, now)
        except OSError:
            replaced = True
        if replaced and loading:
            raise changed(self, "another file was put in its place")
        if replaced and not self._told:
            self._told = True
            _log.warning(
                "%s: another file was put in its place; this run continues with the one that it "
                "opened, but a later run will be refused unless the contents are the same",
                self,
            )


class OpenedRemote(RemotePath):
    """A file behind a URL, with the size and the etag that it had at first."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__(path.objects, path.key)
        self._first = self.objects.entry(self.key)

    def size(self) -> int:
        return self._first.size

    def read_range(self, start: int, stop: int) -> bytes:
        try:
            return super().read_range(start, stop)
        except InputError as error:
            raise changed(self, "it became shorter, or was removed") from error

    def check(self, *, loading: bool = False) -> None:
        """Raise DataError if the server has another file now; this takes a request."""
        try:
            now = self.objects.entry(self.key)
        except FileNotFoundError:
            raise changed(self, "it was removed") from None
        if now != self._first:
            raise changed(self, "its size or its etag is another")


Opened = OpenedFile | OpenedRemote


def opened(path: AnyPath) -> Opened:
    """Open a file, to read it for as long as the returned object is kept."""
    return OpenedFile(path) if isinstance(path, Path) else OpenedRemote(path)


def changed(file: object, why: str) -> DataError:
    """Return the error that ends a run whose file has changed."""
    return DataError(
        f"{file}: changed while the run read it ({why}); no unit was made from that: run the same "
        "command again, which continues if the contents are those of the finished units"
    )

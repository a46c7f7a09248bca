"""Objects as files of a local disk."""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spile.errors import CorruptError, StoreError
from spile.objects.protocol import Entry, check_held, check_key

_TEMPORARY = ".tmp-"
_PAGE = 4096
_DIRECT_BYTES = 32 << 20  # written at once past the page cache: smaller ones were slower


def _explain(action: str, path: Path, error: OSError) -> StoreError:
    if error.errno == errno.ENOSPC:
        return StoreError(
            f"disk full while {action} {path}; what is committed stays valid: "
            "free some space and run the same command again"
        )
    return StoreError(f"{action} {path}: {error.strerror or error}")


class LocalObjects:
    """Objects as files under a directory.

    A record is written beside its key, synced, and hard-linked to it: the link is exclusive, so
    a record is either whole or absent, and never two. Directories are synced after they change.
    """

    most_streamed: int | None = None
    parallel, most_closing = 4, 8  # a sync may take as long as writing many rows

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._inside: set[Path] = set()  # folders that are known to lie in it
        self.url = str(root)

    def _path(self, key: str) -> Path:
        path = self.root.joinpath(*check_key(self.url, key))
        # A dataset may come from a stranger: where it leads is not ours to read or to delete.
        if path.is_symlink() or not self._leads_inside(path.parent):
            raise CorruptError(key, f"a symbolic link leads out of {self.url} there; remove it")
        return path

    def _leads_inside(self, folder: Path) -> bool:
        if folder not in self._inside:
            if not folder.resolve().is_relative_to(self.root.resolve()):
                return False
            if folder.is_dir():
                self._inside.add(folder)
        return True

    def get(self, key: str) -> bytes:
        check_held(self.url, key, self.size(key))
        with _absence():
            return self._path(key).read_bytes()

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        with _absence(), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def size(self, key: str) -> int:
        with _absence():
            return self._path(key).stat().st_size

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = path.with_name(f"{path.name}{_TEMPORARY}{uuid.uuid4().hex[:12]}")
        try:
            with self._open_new(temporary) as file:
                _write_all(file, data)
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # `gc` removes a leftover only when its key exists: then ours came second.
                if path.exists():
                    return False
                raise
            sync(path.parent)
            return True
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise StoreError(
                    f"{self.url} does not support hard links, which exclusive commits need; "
                    "use a local file system for --out"
                ) from error
            raise _explain("creating", path, error) from error
        finally:
            with contextlib.suppress(OSError):  # never hides why the creation failed
                temporary.unlink()

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        temporary = path.with_name(f"{path.name}{_TEMPORARY}{uuid.uuid4().hex[:12]}")
        try:
            with self._open_new(temporary) as file:
                _write_all(file, data)
            # `gc` may take the file for a leftover; the next heartbeat replaces it anyway.
            with contextlib.suppress(FileNotFoundError):
                os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise _explain("writing", path, error) from error

    def stream(self, key: str) -> "LocalStream":
        path = self._path(key)
        try:
            return LocalStream(path, self._open_new(path))
        except OSError as error:
            raise _explain("creating", path, error) from error

    def list(self, prefix: str = "") -> Iterator[str]:
        start = self._path(prefix.removesuffix("/")) if prefix else self.root
        for folder, _, names in os.walk(start):
            base = Path(folder).relative_to(self.root)
            for name in names:
                yield (base / name).as_posix()

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        for key in self.list(prefix):
            with contextlib.suppress(FileNotFoundError):  # it went while we looked
                yield Entry(key, self.size(key), "")

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            folder = path.parent
            while folder != self.root:  # empty folders go with their last file
                folder.rmdir()
                folder = folder.parent
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
                raise _explain("deleting", path, error) from error

    def leftover_of(self, key: str) -> str | None:
        base, separator, _ = key.rpartition(_TEMPORARY)
        whole = separator and not base.endswith("/") and "/" not in key[len(base) :]
        return base if base and whole else None

    def local_path(self, key: str) -> Path:
        return self._path(key)

    def free_bytes(self) -> int | None:
        folder = self.root
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _open_new(self, path: Path) -> BinaryIO:
        """Open a file that must not exist, making its folders; `gc` may be removing them."""
        for attempt in range(100):
            try:
                _make_directories(path.parent, self.root)
                return path.open("xb", buffering=0)
            except FileNotFoundError:
                if attempt == 99:
                    raise
        raise AssertionError


class LocalStream:
    """A file being written, in large pieces.

    Those pass by the page cache where the file system allows it: a disk takes them as fast, at a
    tenth of the processor time, and what others keep in memory stays there.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._written = 0
        self._aligned: np.ndarray | None = None  # the buffer that direct writes need
        self._filled = 0
        self._may_bypass = hasattr(os, "O_DIRECT")

    def write(self, data: bytes | memoryview) -> None:
        try:
            if self._may_bypass and self._aligned is None and len(data) >= _DIRECT_BYTES:
                self._bypass_cache()
            if self._aligned is None:
                _write_all(self._file, data)
                self._written += len(data)
            else:
                self._write_aligned(self._aligned, np.frombuffer(data, np.uint8))
        except OSError as error:
            raise _explain("writing", self._path, error) from error

    def _bypass_cache(self) -> None:
        self._may_bypass = self._written % _PAGE == 0 and not _in_memory(self._file)
        if self._may_bypass:
            try:
                buffer = np.frombuffer(mmap.mmap(-1, _DIRECT_BYTES), np.uint8)
                self._set_direct(True)
                self._aligned = buffer  # (only now: without it no write may be direct)
            except OSError:
                self._may_bypass = False  # some file systems cannot

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))

    def _write_aligned(self, buffer: np.ndarray, data: np.ndarray) -> None:
        while len(data):
            taken = data[: len(buffer) - self._filled]
            buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[len(taken) :]
            if self._filled == len(buffer):
                self._filled = 0
                self._flush(buffer.data)

    def _flush(self, data: memoryview) -> None:
        start = self._file.tell()
        try:
            _write_all(self._file, data)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._set_direct(False)  # the flag was accepted, but not what follows from it
            _write_all(self._file, data[self._file.tell() - start :])

    def close(self) -> str:
        try:
            if self._aligned is not None and self._filled:
                self._set_direct(False)  # the last piece may have any length
                _write_all(self._file, self._aligned[: self._filled].data)
            os.fsync(self._file.fileno())
            self._file.close()
            sync(self._path.parent)
        except FileNotFoundError:
            pass  # the folder is gone: `gc` saw the unit done by another attempt than this one
        except OSError as error:
            raise _explain("writing", self._path, error) from error
        return ""

    def abandon(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def _in_memory(file: BinaryIO) -> bool:
    """Whether there is no disk behind a file, so that there is no cache to pass by either."""
    device = os.fstat(file.fileno()).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number]
    return "tmpfs" in kinds


@contextlib.contextmanager
def _absence() -> Iterator[None]:
    """Below a file there is nothing: that is absence too."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from error


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Unbuffered files may take less than they are given: a nearly full disk does."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def _make_directories(folder: Path, root: Path) -> None:
    """Like makedirs, but each new directory's entry is synced into its parent."""
    if folder.is_dir():
        return
    if folder != root and root in folder.parents:
        _make_directories(folder.parent, root)
    elif not folder.parent.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync(path: Path) -> None:
    """A file's bytes, or a directory's entries, survive a crash from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Objects as files of a local disk."""

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from spile.core.errors import CorruptError, NotCreatedError, StoreError
from spile.objects.protocol import Entry, Objects, check_held, check_key

_TEMPORARY = ".tmp-"
_SYNC_BYTES = 64 << 20  # bytes of a file after which they are made durable
_KNOWN_FOLDERS = 1 << 12  # most folders to remember; checking again is cheap
_SYNCS = 8  # files to sync at once: one for each tap that is being written


# A link that fails with one of these errors was not made.
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMLINK}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


def _disk_error(
    action: str, path: Path, error: OSError, kind: type[StoreError] = StoreError
) -> StoreError:
    if error.errno == errno.ENOSPC:
        return kind(
            f"disk full while {action} {path}; what is committed stays valid: "
            "free some space and run the same command again"
        )
    return kind(f"{action} {path}: {error.strerror or error}")


class LocalObjects:
    """Objects as files under a directory.

    A record is written beside its key, synced, and hard-linked to it. The link is exclusive, so a
    record is either complete or absent, and never written twice. Directories are synced after they
    change.
    """

    endpoint = ""
    most_streamed: int | None = None
    parallel, most_closing = 4, 8  # a sync may take as long as writing many rows

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._inside: set[Path] = set()  # folders known to lie inside the root
        self._durable: set[Path] = set()  # folders whose entries this process has synced
        self.url = str(root)

    @cached_property
    def _syncs(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_SYNCS, "sync")

    def _path(self, key: str) -> Path:
        path = self.root.joinpath(*check_key(self.url, key))
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            mode = stat.S_IFREG
        # A dataset may be untrusted: its links must not make us read or delete elsewhere.
        if stat.S_ISLNK(mode) or not self._leads_inside(path.parent):
            raise CorruptError(key, f"is a symbolic link that leads out of {self.url}; remove it")
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would block
            raise CorruptError(key, f"is not a regular file in {self.url}; remove it")
        return path

    def _leads_inside(self, folder: Path) -> bool:
        if folder in self._inside:
            return True
        try:
            mode = folder.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            mode = 0
        # Only links are resolved: any other folder lies inside if its parent does.
        if stat.S_ISLNK(mode):
            inside = folder.resolve().is_relative_to(self.root.resolve())
        else:
            inside = folder == self.root or self._leads_inside(folder.parent)
        if inside and folder.is_dir():
            _forget_many(self._inside)
            self._inside.add(folder)
        return inside

    def get(self, key: str) -> bytes:
        with _absence():
            path = self._path(key)
            check_held(self.url, key, path.stat().st_size)
            return path.read_bytes()

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        with _absence(), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def size(self, key: str) -> int:
        with _absence():
            return self._path(key).stat().st_size

    def entry(self, key: str) -> Entry:
        return Entry(key, self.size(key), "")

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        temporary = path.with_name(f"{path.name}{_TEMPORARY}{uuid.uuid4().hex[:12]}")
        is_there: bool | None = False  # None: unknown
        try:
            with self._open_new(temporary) as file:
                _write_all(file, data)
                os.fsync(file.fileno())
            is_there = None
            created = True
            try:
                os.link(temporary, path)
            except FileExistsError:
                created = False
            except FileNotFoundError:
                # `gc` has removed our temporary file, which it does only if the key exists already.
                if not path.exists():
                    raise
                created = False
            is_there = True
            sync(path.parent)  # of others' records, too: whoever created it may have been killed
            return created
        except OSError as error:
            if is_there is None and error.errno in _NO_LINKS:
                raise NotCreatedError(
                    f"{self.url} does not support hard links, which exclusive commits need; "
                    "use a local file system for --out"
                ) from error
            absent = is_there is False or (is_there is None and error.errno in _REFUSED)
            kind = NotCreatedError if absent else StoreError
            raise _disk_error("creating", path, error, kind) from error
        finally:
            with contextlib.suppress(OSError):  # must not hide why the creation failed
                temporary.unlink()

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        temporary = path.with_name(f"{path.name}{_TEMPORARY}{uuid.uuid4().hex[:12]}")
        try:
            with self._open_new(temporary) as file:
                _write_all(file, data)
            # `gc` may remove the file as a leftover; the next heartbeat replaces it anyway.
            with contextlib.suppress(FileNotFoundError):
                os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise _disk_error("writing", path, error) from error

    def move(self, key: str, to: str) -> None:
        path, target = self._path(key), self._path(to)
        try:
            for attempt in range(100):
                make_folder(target.parent, self._durable, self.root)
                try:
                    os.rename(path, target)
                    break
                except FileNotFoundError:
                    self._durable.clear()  # `gc` may be removing the folder
                    if attempt == 99 or not path.exists():
                        raise
            sync(target.parent)
            sync(path.parent)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _disk_error("moving", path, error) from error

    def stream(self, key: str) -> "LocalStream":
        path = self._path(key)
        try:
            return LocalStream(path, self._open_new(path), self._syncs)
        except OSError as error:
            raise _disk_error("creating", path, error) from error

    def list(self, prefix: str = "") -> Iterator[str]:
        start = self._path(prefix.removesuffix("/")) if prefix else self.root
        for folder, _, names in os.walk(start):
            base = Path(folder).relative_to(self.root).as_posix()
            prefix = "" if base == "." else f"{base}/"
            yield from (prefix + name for name in names)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        for key in self.list(prefix):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                yield self.entry(key)

    def folders(self, prefix: str) -> Iterator[str]:
        try:
            with os.scandir(self._path(prefix.removesuffix("/"))) as found:
                yield from (entry.name for entry in found if entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            folder = path.parent
            while folder != self.root:  # remove empty folders, too
                folder.rmdir()
                folder = folder.parent
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
                raise _disk_error("deleting", path, error) from error

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
        """Open a file that must not exist, and make its folders, which `gc` may be removing."""
        for attempt in range(100):
            try:
                _forget_many(self._durable)
                make_folder(path.parent, self._durable, self.root)
                return path.open("xb", buffering=0)
            except FileNotFoundError:
                self._durable.clear()
                if attempt == 99:
                    raise
        raise AssertionError


def _forget_many(folders: set[Path]) -> None:
    """Empty a set of known folders that has grown: a dataset has two for each unit."""
    if len(folders) >= _KNOWN_FOLDERS:
        folders.clear()


class LocalStream:
    """A file being written, synced by a thread at regular intervals.

    So the disk is never idle, closing takes little time, and the synced bytes leave the page cache
    to other processes.
    """

    def __init__(self, path: Path, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self._path, self._file, self._pool = path, file, pool
        self._since = 0  # bytes written since the last sync
        self._syncing: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        try:
            _write_all(self._file, data)
            self._since += len(data)
            if self._since >= _SYNC_BYTES:
                self._settle()
                self._syncing = self._pool.submit(_make_durable, self._file.fileno())
                self._since = 0
        except OSError as error:
            raise _disk_error("writing", self._path, error) from error

    def _settle(self) -> None:
        """Wait for the sync. (The disk reports a late error once; this raises it every time.)"""
        if self._syncing is not None:
            self._syncing.result()

    def close(self) -> str:
        try:
            self._settle()
            os.fsync(self._file.fileno())
            self._file.close()
            sync(self._path.parent)
        except FileNotFoundError:
            pass  # the folder is gone: `gc` saw that another attempt had finished the unit
        except OSError as error:
            raise _disk_error("writing", self._path, error) from error
        return ""

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._settle()  # once closed, its descriptor may belong to another file
        self._file.close()
        self._path.unlink(missing_ok=True)


def _make_durable(descriptor: int) -> None:
    """Sync the bytes written so far and drop them from memory. (macOS has neither call.)"""
    getattr(os, "fdatasync", os.fsync)(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _absence() -> Generator[None, None, None]:
    """Treat a path below a file as absent."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from error


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all bytes: an unbuffered file may accept fewer, for example on a nearly full disk."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def make_folder(folder: Path, durable: set[Path], root: Path | None = None) -> None:
    """Make a folder and its parents, and make the entry of each durable.

    A process may have been killed after it made a folder and before it synced the entry. Every
    process that writes into a folder therefore syncs its entry once.

    Args:
        durable: folders already synced; new ones are added.
        root: entries above this folder that cannot be read, and so not synced, are ignored.
    """
    if folder in durable:
        return
    if folder.parent != folder:
        make_folder(folder.parent, durable, root)
    made = not folder.is_dir()
    if made:
        folder.mkdir(exist_ok=True)
    try:
        sync(folder.parent)
    except PermissionError:
        if made or (root is not None and folder.is_relative_to(root)):
            raise
    durable.add(folder)


def settle(objects: Objects, *keys: str) -> None:
    """Make the objects beside these keys durable, whoever created them.

    A process that is killed between creating a record and syncing its folder leaves a record that
    others build upon. (In a bucket there is nothing to do.)
    """
    for folder in {path.parent for key in keys if (path := objects.local_path(key)) is not None}:
        try:
            sync(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _disk_error("syncing", folder, error) from error


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

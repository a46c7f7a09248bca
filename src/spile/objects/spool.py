"""A folder on a local disk where objects wait for their upload: `--spool DIR`.

It lets the device continue while the network is slow, as long as the disk has room. Nothing in it
is needed later: an object exists once it is in the bucket, and the next process removes the files
that a killed one left.
"""

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from spile.core.errors import ConfigError, StoreError
from spile.objects.protocol import COUNTED

_PREFIX = "spile-spool-"
_LOCK = "lock"
_KEPT_FREE = 1 << 30  # space to leave for others: with less, writers wait
_POLL = 0.2


class Spool:
    """This process's own folder below `root`."""

    def __init__(self, root: Path, kept_free: int = _KEPT_FREE) -> None:
        self._kept_free = kept_free
        self._files = 0
        self._lock = threading.Lock()
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _alone(root):
                _sweep(root)
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
                self._locked = _locked(self.folder)
        except OSError as error:
            raise ConfigError(f"--spool {root}: {error.strerror or error}") from error

    def close(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._locked.close()

    def file(self) -> "SpooledFile":
        """Return a new file; wait until there is room for one."""
        while shutil.disk_usage(self.folder).free < self._kept_free:
            if not self._files:
                raise StoreError(
                    f"--spool {self.folder.parent}: less than {self._kept_free / 1e9:.1f} GB are "
                    "free, and no pending upload will free more; what is committed stays valid: "
                    "free some space and run the same command again"
                )
            time.sleep(_POLL)
        self.count(1)
        return SpooledFile(self)

    def count(self, change: int) -> None:
        with self._lock:
            self._files += change
        COUNTED.add(spooled=change)


class SpooledFile:
    """The bytes of an object, on disk until they are uploaded."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        try:
            descriptor, self._name = tempfile.mkstemp(dir=spool.folder)
        except OSError as error:
            raise StoreError(f"--spool {spool.folder}: {error.strerror or error}") from error
        self._file = os.fdopen(descriptor, "w+b", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while len(view):
                view = view[self._file.write(view) :]
        except OSError as error:
            raise StoreError(
                f"--spool {self._spool.folder}: {error.strerror or error}; what is committed stays "
                "valid: run the same command again"
            ) from error

    @contextlib.contextmanager
    def content(self) -> Generator[Any, None, None]:
        if not self._file.tell():
            yield b""
            return
        # (Unmapped with the last reference: a request that timed out may still hold one.)
        yield mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def release(self) -> None:
        """Remove the file, once it is uploaded or no longer wanted."""
        if not self._file.closed:
            self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._name)
            self._spool.count(-1)


@contextlib.contextmanager
def _alone(root: Path) -> Generator[None, None, None]:
    """Lock the root, so that no other process sweeps a folder that was just made."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _locked(folder: Path) -> Any:
    """Lock the folder until this process ends, however it ends."""
    file = (folder / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _sweep(root: Path) -> None:
    """Remove the folders of processes that have ended."""
    for folder in root.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError), _locked(folder):
            shutil.rmtree(folder, ignore_errors=True)

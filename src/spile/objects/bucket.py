"""Objects in a bucket: gs:// and s3:// (and what speaks like it), through obstore.

Every object goes up by a single put, which is atomic: a process that is killed leaves nothing
behind, neither half an object nor parts of one that nobody lists and everybody pays for. So a
stream is held in memory until it is closed, and shards of buckets are small.

A create whose answer is lost may have happened. It is tried again, and what then "exists already"
is read back: the same bytes are our own.
"""

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import GCSStore, S3Store

from spile.errors import ConfigError, StoreError
from spile.objects.protocol import check_key

T = TypeVar("T")

_log = logging.getLogger("spile")
_TRIES = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0  # seconds
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_HOPELESS = (
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
)
_TIMEOUT = timedelta(seconds=60)  # of one request, and for a connection to say anything


def open_bucket(url: str) -> "BucketObjects":
    """The store under a URL such as `gs://bucket/some/prefix`."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{url}: names no bucket; a store is e.g. {scheme}://BUCKET/PREFIX")
    settings: dict[str, Any] = {
        "prefix": prefix.strip("/") or None,
        "client_options": {"timeout": _TIMEOUT, "allow_http": True},
        # What may be repeated is repeated here, where it is known what a lost answer means.
        "retry_config": {"max_retries": 0, "retry_timeout": _TIMEOUT},
    }
    try:
        if scheme == "gs":
            return BucketObjects(url, GCSStore(bucket, **settings))
        return BucketObjects(url, S3Store(bucket, conditional_put="etag", **settings))
    except Exception as error:
        raise ConfigError(f"{url}: {_line(error)}") from None


class BucketObjects:
    """Objects under a prefix of a bucket."""

    most_streamed: int | None = 64 << 20

    def __init__(self, url: str, store: Any) -> None:
        self.url, self._store = url.rstrip("/"), store

    def get(self, key: str) -> bytes:
        return bytes(self._read(key, lambda: obstore.get(self._store, key).bytes()))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if stop <= start:
            self.size(key)
            return b""
        size = self.size(key) if stop - start > 1 << 20 else None
        end = stop if size is None else min(stop, size)
        if end <= start:
            return b""
        return bytes(
            self._read(key, lambda: obstore.get_range(self._store, key, start=start, end=end))
        )

    def size(self, key: str) -> int:
        return int(self._read(key, lambda: obstore.head(self._store, key))["size"])

    def create(self, key: str, data: bytes | bytearray) -> bool:
        check_key(self.url, key)
        unsure = False
        for attempt in range(_TRIES):
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
                return True
            except exceptions.AlreadyExistsError:
                return unsure and self.get(key) == data
            except Exception as error:
                self._pause("creating", key, error, attempt)
                unsure = True
        raise AssertionError

    def replace(self, key: str, data: bytes) -> None:
        check_key(self.url, key)
        self._retry(
            "writing", key, lambda: obstore.put(self._store, key, data, use_multipart=False)
        )

    def stream(self, key: str) -> "BucketStream":
        check_key(self.url, key)
        return BucketStream(self, key)

    def list(self, prefix: str = "") -> Iterator[str]:
        if prefix:
            check_key(self.url, prefix.removesuffix("/"))

        def listed() -> list[str]:
            found = obstore.list(self._store, prefix=prefix.removesuffix("/") or None)
            return [entry["path"] for page in found for entry in page]

        yield from self._retry("listing", prefix, listed)

    def delete(self, key: str) -> None:
        check_key(self.url, key)
        with contextlib.suppress(FileNotFoundError):
            self._retry("deleting", key, lambda: obstore.delete(self._store, key))

    def leftover_of(self, key: str) -> str | None:
        return None

    def local_path(self, key: str) -> Path | None:
        check_key(self.url, key)
        return None

    def free_bytes(self) -> int | None:
        return None

    # -- requests ----------------------------------------------------------------------------

    def _read(self, key: str, request: Callable[[], T]) -> T:
        check_key(self.url, key)
        return self._retry("reading", key, request)

    def _retry(self, action: str, key: str, request: Callable[[], T]) -> T:
        """A request that may be repeated: reading, or writing what is the same every time."""
        for attempt in range(_TRIES):
            try:
                return request()
            except FileNotFoundError:
                if action != "writing":
                    raise FileNotFoundError(f"{self.url}: no {key}") from None
                raise StoreError(f"{self.url}: there is no such bucket") from None
            except Exception as error:
                self._pause(action, key, error, attempt)
        raise AssertionError

    def _pause(self, action: str, key: str, error: Exception, attempt: int) -> None:
        """Wait before another try; what will not get better is raised at once."""
        what = f"{action} {self.url}/{key}: {_line(error)}"
        if isinstance(error, FileNotFoundError):
            raise StoreError(f"{self.url}: there is no such bucket") from error
        if isinstance(error, _REFUSED):
            raise StoreError(f"{what}; check the credentials and their rights") from error
        if isinstance(error, _HOPELESS):
            raise StoreError(what) from error
        if attempt == _TRIES - 1:
            raise StoreError(
                f"{what} (after {_TRIES} tries); what is committed stays valid: run the same "
                "command again"
            ) from error
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)
        _log.debug("%s; again in %.1f s", what, pause)
        time.sleep(pause)


class BucketStream:
    """An object that is put when it is closed."""

    def __init__(self, objects: BucketObjects, key: str) -> None:
        self._objects, self._key = objects, key
        self._data = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def close(self) -> None:
        data, self._data = self._data, bytearray()
        if not self._objects.create(self._key, data):
            raise StoreError(f"{self._objects.url}/{self._key}: exists already")

    def abandon(self) -> None:
        self._data = bytearray()


def _line(error: Exception) -> str:
    """The first line of a message; obstore adds a trace of its own below."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

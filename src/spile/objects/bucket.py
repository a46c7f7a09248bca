"""Objects in a bucket: gs:// and s3:// (and what speaks like it), through obstore.

Every object goes up by a single put, which is atomic: a process that is killed leaves nothing
behind, neither half an object nor parts of one that nobody lists and everybody pays for. So a
stream is held until it is closed, in memory or in a spool, and shards of buckets are small.

A create whose answer is lost may have happened. It is tried again, and what then "exists already"
is read back: the same bytes are our own.
"""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from obstore import exceptions
from obstore.store import GCSStore, S3Store

from spile.core.errors import ConfigError, StoreError
from spile.core.retry import PASSING, PATIENCE, PATIENCE_AT_FIRST, Retrying
from spile.objects.protocol import COUNTED, Entry, check_held, check_key, retrying
from spile.objects.spool import Spool, SpooledFile

T = TypeVar("T")

_log = logging.getLogger("spile")
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_HOPELESS = (
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
)
_STREAMED = 64 << 20
_ROOM = _STREAMED + (1 << 20)  # with a header
_TIMEOUT = timedelta(seconds=60)  # of one request, and for a connection to say anything


def open_bucket(url: str, spool: Spool | None = None) -> "BucketObjects":
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
            return BucketObjects(url, GCSStore(bucket, **settings), spool)
        # A body that TLS guards need not be hashed and signed as well.
        unsigned = not os.environ.get("AWS_ENDPOINT_URL", "https:").startswith("http:")
        store = S3Store(bucket, conditional_put="etag", unsigned_payload=unsigned, **settings)
        return BucketObjects(url, store, spool)
    except Exception as error:
        raise ConfigError(f"{url}: {_line(error)}") from None


class BucketObjects:
    """Objects under a prefix of a bucket."""

    most_streamed: int | None = _STREAMED
    parallel = 16  # a single connection is far slower than the network

    def __init__(self, url: str, store: Any, spool: Spool | None = None) -> None:
        self.url, self._store, self._spool = url.rstrip("/"), store, spool
        self.most_closing = 1 << 20 if spool else self.parallel
        self._answered = False  # whether there has been any success
        self._etags_are_md5 = True  # until one is not: with some encryptions they are no digest

    def get(self, key: str) -> bytes:
        def whole() -> bytes:
            found = self._store.get(key)
            check_held(self.url, key, int(found.meta["size"]))
            return bytes(found.bytes())

        return self._read(key, whole)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if stop <= start:
            self.size(key)
            return b""

        def ranged() -> bytes:
            try:
                return bytes(self._store.get_range(key, start=start, end=stop))
            except exceptions.GenericError as error:
                if "416" in str(error) and self.size(key) <= start:
                    return b""
                raise

        return self._read(key, ranged)

    def size(self, key: str) -> int:
        return int(self._read(key, lambda: self._store.head(key))["size"])

    def create(self, key: str, data: bytes | bytearray) -> bool:
        return self._create(key, data) is not None

    def replace(self, key: str, data: bytes) -> None:
        check_key(self.url, key)
        self._retry("writing", key, lambda: self._store.put(key, data, use_multipart=False))

    def move(self, key: str, to: str) -> None:
        self.create(to, self.get(key))
        self.delete(key)

    def stream(self, key: str) -> "BucketStream":
        check_key(self.url, key)
        return BucketStream(self, key, self._spool.file() if self._spool else _Held())

    def list(self, prefix: str = "") -> Iterator[str]:
        return (entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        """In order, and after a failure from where it stood: long listings have many requests."""
        if prefix:
            check_key(self.url, prefix.removesuffix("/"))
        trying, last = self._trying("listing", prefix), ""
        while True:
            try:
                pages = self._store.list(
                    prefix=prefix.removesuffix("/") or None, offset=last or None
                )
                for page in pages:
                    for found in page:
                        if found["path"] > last:
                            last = found["path"]
                            yield Entry(last, found["size"], _plain(found["e_tag"]))
                    trying = self._trying("listing", prefix)
                self._answered = True
                return
            except Exception as error:
                self._failed(trying, error)

    def delete(self, key: str) -> None:
        check_key(self.url, key)
        with contextlib.suppress(FileNotFoundError):
            self._retry("deleting", key, lambda: self._store.delete(key))

    def leftover_of(self, key: str) -> str | None:
        return None

    def local_path(self, key: str) -> Path | None:
        check_key(self.url, key)
        return None

    def free_bytes(self) -> int | None:
        return None

    # -- writing -----------------------------------------------------------------------------

    def upload(self, key: str, data: Any) -> str:
        """Put what a stream held under its own key; returns the object's etag.

        On its way it is guarded by TLS, or by the hash it is signed with. What lies in a spool may
        be changed before that, by a disk: there the MD5 of what was sent is compared, too.
        """
        # Nobody else writes under this key: what is there with the same bytes is our own, such as
        # where a proxy has sent the request twice and the second answer came.
        etag = self._create(key, data, unsure=True)
        if etag is None:
            raise StoreError(f"{self.url}/{key}: exists already")
        if self._spool:
            self._confirm(key, data, etag)
        return etag

    def _confirm(self, key: str, data: Any, etag: str) -> None:
        """That what arrived is what was sent."""
        if self._etags_are_md5 and hashlib.md5(data, usedforsecurity=False).hexdigest() != etag:
            if memoryview(self.get(key)) != memoryview(data):
                raise StoreError(
                    f"{self.url}/{key}: what arrived is not what was sent; run the same command "
                    "again"
                )
            _log.info("%s: etags are no MD5 digests there; sizes alone are compared", self.url)
            self._etags_are_md5 = False
        if not self._etags_are_md5 and self.size(key) != len(data):
            raise StoreError(f"{self.url}/{key}: is not as long as what was sent")

    def _create(self, key: str, data: Any, *, unsure: bool = False) -> str | None:
        """The etag of the object, if it is ours.

        Args:
            unsure: whether an object with the same bytes may be our own.
        """
        check_key(self.url, key)
        trying = self._trying("creating", key)
        while True:
            try:
                put = self._store.put(key, data, mode="create", use_multipart=False)
                self._answered = True
                return _plain(put["e_tag"])
            except exceptions.AlreadyExistsError as error:
                try:
                    there = self._read(key, lambda: self._store.head(key))
                    ours = unsure and memoryview(self.get(key)) == memoryview(data)
                except FileNotFoundError:
                    # Not 412 but 409: another request for this key was under way, and has failed.
                    # Or `gc` has just removed it, since another attempt was committed.
                    trying.again(_line(error), error)
                    continue
                return _plain(there["e_tag"]) if ours else None
            except Exception as error:
                self._failed(trying, error)
                unsure = True

    # -- requests ----------------------------------------------------------------------------

    def _read(self, key: str, request: Callable[[], T]) -> T:
        check_key(self.url, key)
        return self._retry("reading", key, request)

    def _retry(self, action: str, key: str, request: Callable[[], T]) -> T:
        """A request that may be repeated: reading, or writing what is the same every time."""
        trying = self._trying(action, key)
        while True:
            try:
                answer = request()
                self._answered = True
                return answer
            except FileNotFoundError:
                if action != "writing":
                    raise FileNotFoundError(f"{self.url}: no {key}") from None
                raise StoreError(f"{self.url}: there is no such bucket") from None
            except Exception as error:
                self._failed(trying, error)

    def _trying(self, action: str, key: str) -> Retrying:
        patience = PATIENCE if self._answered else PATIENCE_AT_FIRST
        return retrying(f"{action} {self.url}/{key}", patience)

    def _failed(self, trying: Retrying, error: Exception) -> None:
        """Wait before another try; what will not get better is raised at once."""
        what = f"{trying.what}: {_line(error)}"
        if isinstance(error, StoreError):
            raise error
        found = re.search(r"status code: (4\d\d)", str(error))
        status = int(found[1]) if found else None
        if isinstance(error, FileNotFoundError) or status == 404:
            raise StoreError(f"{self.url}: there is no such bucket") from error
        if isinstance(error, _REFUSED) or "<Code>ExpiredToken<" in str(error):
            raise StoreError(f"{what}; check the credentials and their rights") from error
        passing = status in PASSING or "<Code>RequestTimeout<" in str(
            error
        )  # (which S3 says by 400)
        if isinstance(error, _HOPELESS) or (status and not passing):
            raise StoreError(what) from error
        trying.again(_line(error), error)


class BucketStream:
    """An object that is put when it is closed."""

    def __init__(self, objects: BucketObjects, key: str, held: "_Held | SpooledFile") -> None:
        self._objects, self._key, self._held = objects, key, held

    def write(self, data: bytes | memoryview) -> None:
        self._held.write(data)

    def close(self) -> str:
        COUNTED.add(uploading=1)
        try:
            with self._held.content() as data:
                etag = self._objects.upload(self._key, data)
                COUNTED.add(uploaded=len(data))
        finally:
            COUNTED.add(uploading=-1)
        self._held.release()
        return etag

    def abandon(self) -> None:
        self._held.release()


class _Held:
    """An object's bytes in memory until they are put."""

    def __init__(self) -> None:
        # Room that is not written to takes no memory; growing by pieces would copy them.
        self._buffer, self._filled = np.empty(_ROOM, np.uint8), 0

    def write(self, data: bytes | memoryview) -> None:
        end = self._filled + len(data)
        if end > len(self._buffer):
            larger = np.empty(2 * end, np.uint8)
            larger[: self._filled] = self._buffer[: self._filled]
            self._buffer = larger
        self._buffer[self._filled : end] = np.frombuffer(data, np.uint8)
        self._filled = end

    @contextlib.contextmanager
    def content(self) -> Generator[memoryview, None, None]:
        yield self._buffer[: self._filled].data

    def release(self) -> None:
        self._buffer, self._filled = np.empty(0, np.uint8), 0


def _plain(etag: str | None) -> str:
    return (etag or "").removeprefix("W/").strip('"')


def _line(error: Exception) -> str:
    """The first line of a message; obstore adds a trace of its own below."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

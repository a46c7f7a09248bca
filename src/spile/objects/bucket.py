"""Objects in a bucket: gs:// and s3:// (and compatible servers), through obstore.

Every object is uploaded by a single put, which is atomic: a killed process leaves neither a partial
object nor the parts of one, which no listing shows but which still cost money. (obstore can upload
in parts, but cannot list or remove the parts that a killed process left.) A stream is therefore
held until it is closed, in memory or in a spool. Shards in buckets are small for that reason, or
medium-sized in very large datasets (`Table.shard_limit`).

A create whose answer is lost may have succeeded. It is retried, and if the object then "exists
already", it is read back: if the bytes are the same, the object is our own.
"""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
from obstore import Bytes, exceptions
from obstore.store import GCSStore, S3Store

from spile.core.errors import ConfigError, StoreError, first_line
from spile.core.retry import PASSING, PATIENCE, PATIENCE_AT_FIRST, Retrying
from spile.objects.protocol import (
    COUNTED,
    Entry,
    FilelessObjects,
    check_held,
    check_key,
    retrying,
)
from spile.objects.spool import Spool, SpooledFile

T = TypeVar("T")

_log = logging.getLogger("spile.objects")
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_HOPELESS = (
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
)
_AWS = "https://s3.{}.amazonaws.com"
# The client's settings, named as the variables that it reads.
_AWS_ENDPOINTS = ("aws_endpoint_url_s3", "aws_endpoint_url", "aws_endpoint")
_AWS_PAIR = {"aws_access_key_id", "aws_secret_access_key"}
_AWS_KEYS = _AWS_PAIR | {"aws_session_token", "aws_token"}
_GOOGLE_KEYS = {
    f"google_{name}"
    for name in ("service_account", "service_account_path", "service_account_key",
                 "application_credentials", "bearer_token", "base_url")
}  # fmt: skip
_STREAMED = 256 << 20
_LARGE = 65 << 20  # size of most shards, with a header; a larger put gets more time
_LARGE_READ = 16 << 20  # a larger range also gets more time
_VIEWED = 1 << 20  # at least this size: the client's answer owns its memory, aligned for arrays
_ROOM = _LARGE
_TIMEOUT, _LARGE_TIMEOUT = timedelta(seconds=60), timedelta(seconds=240)  # for one request


def open_bucket(url: str, spool: Spool | None = None, variables: str = "") -> "BucketObjects":
    """Open the store under a URL such as `gs://bucket/some/prefix`.

    Args:
        variables: the prefix of environment variables that hold its own credentials.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{url}: names no bucket; a store is e.g. {scheme}://BUCKET/PREFIX")

    own = _own_settings(scheme, variables)
    endpoint = own.get("endpoint", "" if own else os.environ.get("AWS_ENDPOINT_URL", ""))

    def store(timeout: timedelta) -> Any:
        settings: dict[str, Any] = {
            "prefix": prefix.strip("/") or None,
            "client_options": {"timeout": timeout, "allow_http": True},
            # Requests are retried here, where the meaning of a lost answer is known.
            "retry_config": {"max_retries": 0, "retry_timeout": timeout},
            **own,
        }
        if scheme == "gs":
            return GCSStore(bucket, **settings)
        # TLS already protects the body, so it need not be hashed and signed.
        settings["unsigned_payload"] = not endpoint.startswith("http:")
        return S3Store(bucket, conditional_put="etag", **settings)

    try:
        objects = BucketObjects(url, store(_TIMEOUT), spool, store(_LARGE_TIMEOUT))
    except Exception as error:
        raise ConfigError(f"{url}: {first_line(error)}") from None
    if scheme == "s3" and endpoint != _AWS.format(own.get("region")):
        objects.endpoint = endpoint.rstrip("/")
    return objects


def _own_settings(scheme: str, prefix: str) -> dict[str, Any]:
    """Return the client's settings from the variables with a prefix; empty if none are set.

    The client also reads the usual variables. A mixture of two accounts' variables (one's session
    token, the other's endpoint) would be refused by the server, or lead elsewhere. So keys,
    endpoint and region are passed explicitly, and variables that this cannot override are refused.
    """
    cloud = {"gs": "GOOGLE_", "s3": "AWS_"}[scheme]
    names = [name for name in os.environ if prefix and name.startswith(prefix + cloud)]
    own: dict[str, Any] = {name.removeprefix(prefix).lower(): os.environ[name] for name in names}
    if not own:
        return {}
    if scheme == "s3" and own.keys() >= _AWS_PAIR:
        keys = {name: own.pop(name, None) for name in _AWS_KEYS}
        credentials = {name.removeprefix("aws_"): key for name, key in keys.items()}
        credentials["token"] = credentials.pop("session_token") or credentials["token"]
        own["credential_provider"] = lambda: {**credentials, "expires_at": None}
    elif f"{cloud.lower()}skip_signature" not in own:
        keys = {name.upper() for name in (_GOOGLE_KEYS if scheme == "gs" else _AWS_KEYS) - {*own}}
        for name in sorted(keys & os.environ.keys()):
            raise ConfigError(f"{name} is set, but not {prefix}{name}: set both, or unset {name}")
    if scheme == "s3":
        regions: list[str] = [own.pop(name, "") for name in ("aws_region", "aws_default_region")]
        own["region"] = next((name for name in regions if name), "us-east-1")
        endpoints: list[str] = [own.pop(name, "") for name in _AWS_ENDPOINTS]
        own["endpoint"] = next((url for url in endpoints if url), _AWS.format(own["region"]))
        own["aws_endpoint_url_s3"] = own["endpoint"]
    return own


class BucketObjects(FilelessObjects):
    """Objects under a prefix of a bucket."""

    most_streamed: int | None = _STREAMED
    parallel = 16  # a single connection is far slower than the network

    def __init__(
        self, url: str, store: Any, spool: Spool | None = None, patient: Any = None
    ) -> None:
        """`patient`: the same store, with a longer timeout."""
        self.url, self._store, self._spool = url.rstrip("/"), store, spool
        self._patient = patient or store
        self.most_closing = 1 << 20 if spool else self.parallel
        self._answered = False  # whether any request has succeeded
        self._etags_are_md5 = True  # until one is not: with some encryption etags are no digests

    def get(self, key: str) -> bytes:
        def whole() -> bytes:
            found = self._store.get(key)
            check_held(self.url, key, int(found.meta["size"]))
            return bytes(found.bytes())

        return self._read(key, whole)

    def get_range(self, key: str, start: int, stop: int) -> bytes | memoryview:
        if stop <= start:
            self.size(key)
            return b""

        store = self._patient if stop - start > _LARGE_READ else self._store

        def ranged() -> bytes | memoryview:
            try:
                data = store.get_range(key, start=start, end=stop)
                return memoryview(data) if len(data) >= _VIEWED else bytes(data)
            except exceptions.GenericError as error:
                if "416" in str(error) and self.size(key) <= start:
                    return b""
                raise

        return self._read(key, ranged)

    def size(self, key: str) -> int:
        return self.entry(key).size

    def entry(self, key: str) -> Entry:
        found = self._read(key, lambda: self._store.head(key))
        return Entry(key, int(found["size"]), _plain(found["e_tag"]))

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
        return (found["path"] for found in self._listed(prefix))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        for found in self._listed(prefix):
            yield Entry(found["path"], found["size"], _plain(found["e_tag"]))

    def _listed(self, prefix: str) -> Iterator[Any]:
        """Yield entries in order; after a failure, resume there: long listings take many pages."""
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
                            yield found
                    trying = self._trying("listing", prefix)
                self._answered = True
                return
            except Exception as error:
                self._failed(trying, error)

    def folders(self, prefix: str) -> Iterator[str]:
        check_key(self.url, prefix.removesuffix("/"))
        found = self._retry("listing", prefix, lambda: self._store.list_with_delimiter(prefix))
        yield from (str(folder).rpartition("/")[2] for folder in found["common_prefixes"])

    def delete(self, key: str) -> None:
        check_key(self.url, key)
        with contextlib.suppress(FileNotFoundError):
            self._retry("deleting", key, lambda: self._store.delete(key))

    # -- writing -----------------------------------------------------------------------------

    def upload(self, key: str, data: Any) -> str:
        """Put the contents of a stream under its own key; return the object's etag.

        In transit, TLS or the hash in the request's signature protects the data. A disk may have
        changed a spooled object before that, so its MD5 is compared as well.
        """
        # Nobody else writes under this key, so an object with the same bytes is our own: a proxy
        # may have sent the request twice and returned the second answer.
        etag = self._create(key, data, unsure=True)
        if etag is None:
            raise StoreError(f"{self.url}/{key}: exists already")
        if self._spool:
            self._confirm(key, data, etag)
        return etag

    def _confirm(self, key: str, data: Any, etag: str) -> None:
        """Check that the stored object is the one that was sent."""
        if self._etags_are_md5 and hashlib.md5(data, usedforsecurity=False).hexdigest() != etag:
            if memoryview(self.get(key)) != memoryview(data):
                raise StoreError(
                    f"{self.url}/{key}: the stored bytes differ from those sent; run the same "
                    "command again"
                )
            _log.info("%s: etags are not MD5 digests; only sizes are compared", self.url)
            self._etags_are_md5 = False
        if not self._etags_are_md5 and self.size(key) != len(data):
            raise StoreError(f"{self.url}/{key}: the stored size differs from the size sent")

    def _create(self, key: str, data: Any, *, unsure: bool = False) -> str | None:
        """Create an object; return its etag if it is ours, else None.

        Args:
            unsure: whether an object with the same bytes may be our own.
        """
        check_key(self.url, key)
        trying = self._trying("creating", key)
        store = self._patient if len(data) > _LARGE else self._store
        while True:
            try:
                put = store.put(key, data, mode="create", use_multipart=False)
                self._answered = True
                return _plain(put["e_tag"])
            except exceptions.AlreadyExistsError as error:
                try:
                    there = self._read(key, lambda: self._store.head(key))
                    ours = unsure and memoryview(self.get(key)) == memoryview(data)
                except FileNotFoundError:
                    # 409, not 412: another request for this key was under way and has failed. Or
                    # `gc` has just removed the object because another attempt was committed.
                    trying.again(first_line(error), error)
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
        """Run a request that may be repeated: a read, or an idempotent write."""
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
        """Pause before another try; raise permanent errors at once."""
        what = f"{trying.what}: {first_line(error)}"
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
        )  # (S3 reports this as 400)
        if isinstance(error, _HOPELESS) or (status and not passing):
            raise StoreError(what) from error
        trying.again(first_line(error), error)


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
    """The bytes of an object, in memory until they are uploaded."""

    def __init__(self) -> None:
        # Untouched space takes no memory. Growing would copy, so only large shards grow.
        self._buffer, self._filled = np.empty(_ROOM, np.uint8), 0
        self._whole: bytes | memoryview | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Keep the data; copy it unless it is the whole object and immutable."""
        if self._whole is None and not self._filled and _is_constant(data):
            self._whole = data
            return
        if self._whole is not None:
            first, self._whole = self._whole, None
            self._append(first)
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        end = self._filled + len(data)
        if end > len(self._buffer):
            larger = np.empty(2 * end, np.uint8)
            larger[: self._filled] = self._buffer[: self._filled]
            self._buffer = larger
        self._buffer[self._filled : end] = np.frombuffer(data, np.uint8)
        self._filled = end

    @contextlib.contextmanager
    def content(self) -> Generator[bytes | memoryview, None, None]:
        yield self._buffer[: self._filled].data if self._whole is None else self._whole

    def release(self) -> None:
        self._buffer, self._filled, self._whole = np.empty(0, np.uint8), 0, None


def _is_constant(data: bytes | memoryview) -> bool:
    return isinstance(data.obj if isinstance(data, memoryview) else data, bytes | Bytes)


def _plain(etag: str | None) -> str:
    return (etag or "").removeprefix("W/").strip('"')

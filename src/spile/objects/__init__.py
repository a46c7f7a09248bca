"""Bytes under keys. One protocol, so that what stands on it knows nothing of disks or buckets."""

import importlib
from pathlib import Path

from spile.errors import ConfigError
from spile.objects.local import LocalObjects, LocalStream
from spile.objects.memory import MemoryObjects
from spile.objects.protocol import Objects, Stream, exists

__all__ = ["LocalObjects", "LocalStream", "MemoryObjects", "Objects", "Stream", "exists",
           "open_objects"]  # fmt: skip

_BUCKETS = ("gs", "s3")
_memory: dict[str, MemoryObjects] = {}


def open_objects(url: str) -> Objects:
    """The store at a path or URL; nothing is created by opening it."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalObjects(Path(url))
    if scheme == "file":
        return LocalObjects(Path(rest))
    if scheme == "memory":
        return _memory.setdefault(url, MemoryObjects(url))
    if scheme in _BUCKETS:
        try:
            bucket = importlib.import_module("spile.objects.bucket")
        except ImportError:
            raise ConfigError(f"{url}: buckets need obstore: pip install 'spile[cloud]'") from None
        return bucket.open_bucket(url)
    raise ConfigError(
        f"{url}: a store is a directory or a URL of gs://, s3://, file:// or memory://, not "
        f"{scheme}://"
    )

"""Stores of bytes under keys, behind one protocol that hides disks and buckets."""

import importlib
from pathlib import Path

from spile.core.errors import ConfigError
from spile.core.libraries import import_library
from spile.objects.local import LocalObjects, LocalStream
from spile.objects.memory import MemoryObjects
from spile.objects.protocol import PROBES, Entry, Objects, Stream, check_creates_once, exists
from spile.objects.spool import Spool

__all__ = ["PROBES", "Entry", "LocalObjects", "LocalStream", "MemoryObjects", "Objects", "Spool",
           "Stream", "check_creates_once", "exists", "is_bucket", "open_objects"]  # fmt: skip

_BUCKETS = ("gs", "s3")
_memory: dict[str, MemoryObjects] = {}


def is_bucket(url: str) -> bool:
    return url.partition("://")[0] in _BUCKETS


def open_objects(url: str, spool: Spool | None = None, *, prefix: str = "") -> Objects:
    """Open the store at a path or URL; nothing is created.

    Args:
        spool: where objects for a bucket wait for their upload, instead of in memory.
        prefix: prefix of environment variables that hold a bucket's credentials. If any are set,
            they replace the usual ones: `SPILE_DEST_` for `SPILE_DEST_AWS_ACCESS_KEY_ID`.
    """
    scheme, separator, rest = url.partition("://")
    if spool and not is_bucket(url):
        raise ConfigError(f"--spool is for buckets; {url} needs none")
    if not separator:
        return LocalObjects(Path(url))
    if scheme == "file":
        return LocalObjects(Path(rest))
    if scheme == "memory":
        return _memory.setdefault(url, MemoryObjects(url))
    if scheme in _BUCKETS:
        import_library("obstore", f"{url}: a bucket", "'spile[cloud]'")
        bucket = importlib.import_module("spile.objects.bucket")
        return bucket.open_bucket(url, spool, prefix)
    if scheme in ("http", "https"):
        return importlib.import_module("spile.objects.http").WebObjects(url)
    if scheme == "hf":
        objects, key = importlib.import_module("spile.objects.hub.names").open_named(url)
        if key:
            raise ConfigError(f"{url}: give the whole repository, without {key}")
        return objects
    raise ConfigError(
        f"{url}: {scheme}:// is not supported; give a path, or a gs://, s3://, hf://, https://, "
        "file:// or memory:// URL"
    )

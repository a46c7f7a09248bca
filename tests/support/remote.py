"""Files in buckets, for tests."""

from collections.abc import Callable
from pathlib import Path

from spile.objects import MemoryObjects, open_objects
from spile.objects.paths import RemotePath
from support import servers

BUCKETS: dict[str, Callable[[], str]] = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}


class Counting(MemoryObjects):
    """Objects that record which ranges are read."""

    def __init__(self) -> None:
        super().__init__("memory://counted")
        self.ranges: list[tuple[int, int]] = []

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self.ranges.append((start, stop))
        return super().get_range(key, start, stop)

    @property
    def fetched(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def counted(data: bytes, name: str) -> tuple[Counting, RemotePath]:
    """One file among such objects."""
    objects = Counting()
    objects.create(name, data)
    return objects, RemotePath(objects, name)


def upload(source: Path, url: str) -> str:
    """Upload a file, or the files of a folder, to a URL; return its new URL."""
    objects = open_objects(url)
    if source.is_file():
        objects.replace(source.name, source.read_bytes())
        return f"{url}/{source.name}"
    for path in source.rglob("*"):
        if path.is_file():
            objects.replace(path.relative_to(source).as_posix(), path.read_bytes())
    return url

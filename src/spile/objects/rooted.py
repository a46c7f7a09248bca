"""The objects under a prefix of a store, as a store of their own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from spile.objects.protocol import Entry, Objects, Stream


class RootedObjects:
    """A store whose keys begin below a prefix of another store."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        """`prefix` ends in a slash."""
        self._objects, self._prefix = objects, prefix
        self.url = f"{objects.url.rstrip('/')}/{prefix.removesuffix('/')}"
        self.endpoint, self.most_streamed = objects.endpoint, objects.most_streamed
        self.parallel, self.most_closing = objects.parallel, objects.most_closing

    def get(self, key: str) -> bytes:
        return self._objects.get(self._prefix + key)

    def get_range(self, key: str, start: int, stop: int) -> bytes | memoryview:
        return self._objects.get_range(self._prefix + key, start, stop)

    def size(self, key: str) -> int:
        return self._objects.size(self._prefix + key)

    def entry(self, key: str) -> Entry:
        return replace(self._objects.entry(self._prefix + key), key=key)

    def create(self, key: str, data: bytes) -> bool:
        return self._objects.create(self._prefix + key, data)

    def replace(self, key: str, data: bytes) -> None:
        self._objects.replace(self._prefix + key, data)

    def move(self, key: str, to: str) -> None:
        self._objects.move(self._prefix + key, self._prefix + to)

    def stream(self, key: str) -> Stream:
        return self._objects.stream(self._prefix + key)

    def list(self, prefix: str = "") -> Iterator[str]:
        return (self._inside(key) for key in self._objects.list(self._prefix + prefix))

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        found = self._objects.entries(self._prefix + prefix)
        return (replace(entry, key=self._inside(entry.key)) for entry in found)

    def folders(self, prefix: str) -> Iterator[str]:
        return self._objects.folders(self._prefix + prefix)

    def delete(self, key: str) -> None:
        self._objects.delete(self._prefix + key)

    def leftover_of(self, key: str) -> str | None:
        target = self._objects.leftover_of(self._prefix + key)
        return None if target is None else self._inside(target)

    def local_path(self, key: str) -> Path | None:
        return self._objects.local_path(self._prefix + key)

    def free_bytes(self) -> int | None:
        return self._objects.free_bytes()

    def _inside(self, key: str) -> str:
        return key[len(self._prefix) :]

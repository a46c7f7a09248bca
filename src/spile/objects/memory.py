"""Objects in this process's memory: for experiments, and for datasets that need no disk."""

import threading
from collections.abc import Iterator

from spile.core.errors import StoreError
from spile.objects.protocol import Entry, FilelessObjects, check_key


class MemoryObjects(FilelessObjects):
    """A dictionary of bytes."""

    parallel, most_closing = 1, 1

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        check_key(self.url, key)
        try:
            return self._values[key]
        except KeyError:
            raise FileNotFoundError(f"{self.url}: no {key}") from None

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self.get(key)[start:stop]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def create(self, key: str, data: bytes) -> bool:
        check_key(self.url, key)
        with self._lock:
            if key in self._values:
                return False
            self._values[key] = bytes(data)
            return True

    def replace(self, key: str, data: bytes) -> None:
        check_key(self.url, key)
        self._values[key] = bytes(data)

    def move(self, key: str, to: str) -> None:
        self.create(to, self.get(key))
        self.delete(key)

    def stream(self, key: str) -> "_MemoryStream":
        check_key(self.url, key)
        return _MemoryStream(self, key)

    def list(self, prefix: str = "") -> Iterator[str]:
        if prefix:
            check_key(self.url, prefix.removesuffix("/"))
        yield from [key for key in list(self._values) if key.startswith(prefix)]

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        yield from [Entry(key, len(self._values[key]), "") for key in self.list(prefix)]

    def delete(self, key: str) -> None:
        check_key(self.url, key)
        self._values.pop(key, None)


class _MemoryStream:
    def __init__(self, objects: MemoryObjects, key: str) -> None:
        self._objects, self._key = objects, key
        self._pieces: list[bytes] = []

    def write(self, data: bytes | memoryview) -> None:
        self._pieces.append(bytes(data))

    def close(self) -> str:
        if not self._objects.create(self._key, b"".join(self._pieces)):
            raise StoreError(f"{self._objects.url}/{self._key}: exists already")
        return ""

    def abandon(self) -> None:
        self._pieces.clear()

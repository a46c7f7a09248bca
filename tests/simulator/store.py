"""A bucket in simulated time, whose requests are delayed, refused, lost, late or done twice.

`Store` is what obstore's `S3Store` is to `BucketObjects`: the shipped code does all retrying and
reading back. What a request does happens in the bucket, whatever has become of whoever asked.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from obstore import exceptions
from sortedcontainers import SortedList

from simulator.scheduler import Process, Scheduler

PAGE = 20  # keys of one request of a listing
_STATUSES = {
    429: "429 Too Many Requests",
    500: "500 Internal Server Error",
    503: "503 Service Unavailable: SlowDown",
}
_TIMEOUT = 60.0


@dataclass
class Faults:
    """How likely it is that a request goes wrong, and how long those take that do not."""

    refused: float = 0.0  # 409, 429, 500, 503 or a reset; nothing was done
    lost: float = 0.0  # done, and the answer is lost
    late: float = 0.0  # no answer in time; it is done up to two minutes later
    twice: float = 0.0  # done, and once more later
    echoed: float = 0.0  # done twice at once, and the second time is answered
    denied: float = 0.0  # credentials have expired
    latency: float = 0.03  # seconds, on average
    outage: tuple[float, float] = (0.0, 0.0)  # nothing is answered but 503
    cut: float = 0.0  # whoever asked is killed or interrupted before the answer comes


class Bucket:
    """What the server holds."""

    def __init__(
        self,
        created: Callable[[str, bytes], None] = lambda key, data: None,
        deleted: Callable[[str], None] = lambda key: None,
        page: int = PAGE,
    ) -> None:
        """Args:
        created: told of every object that is created or replaced.
        deleted: told of every object that is removed.
        page: keys of one request of a listing.
        """
        self.objects: dict[str, tuple[bytes, str]] = {}
        self._entries: dict[str, dict[str, Any]] = {}  # in a listing, of those that were listed
        self._keys: Any = SortedList()
        self._created, self._deleted, self.page_size = created, deleted, page
        self._versions = 0

    def put(self, key: str, data: bytes, *, create: bool) -> dict[str, Any]:
        if create and key in self.objects:
            raise exceptions.AlreadyExistsError(f"{key}: 412 Precondition Failed")
        if key not in self.objects:
            self._keys.add(key)
        self._versions += 1
        self._entries.pop(key, None)
        self.objects[key] = data, f'"{self._versions:08x}"'
        self._created(key, data)
        return {"e_tag": self.objects[key][1]}

    def get(self, key: str) -> tuple[bytes, str]:
        try:
            return self.objects[key]
        except KeyError:
            raise FileNotFoundError(f"{key}: 404 Not Found") from None

    def delete(self, key: str) -> None:
        if key in self.objects:
            del self.objects[key]
            self._entries.pop(key, None)
            self._keys.remove(key)
            self._deleted(key)

    def restore(self, objects: Mapping[str, tuple[bytes, str]]) -> None:
        """Hold these objects instead; nobody is told of it."""
        self.objects, self._entries = dict(objects), {}
        self._keys = SortedList(objects)
        self._versions += 1 << 20  # (what is put from now on has other etags)

    def page(self, prefix: str, after: str) -> list[dict[str, Any]]:
        first = self._keys.bisect_right(max(prefix, after))  # no key is that of a folder
        stop = self._keys.bisect_left(prefix[:-1] + "0") if prefix else len(self._keys)
        keys = self._keys.islice(first, min(stop, first + self.page_size))
        return [self._entries.get(key) or self._entry(key) for key in keys]

    def _entry(self, key: str) -> dict[str, Any]:
        data, etag = self.objects[key]
        self._entries[key] = {"path": key, "size": len(data), "e_tag": etag}
        return self._entries[key]

    def folders(self, prefix: str) -> list[str]:
        found: list[str] = []
        after = prefix
        while (key := next(self._keys.irange(after, inclusive=(False, False)), "")).startswith(
            prefix
        ):
            name, slash, _ = key[len(prefix) :].partition("/")
            if slash:
                found.append(prefix + name)
            after = f"{prefix}{name}0" if slash else key  # "0" follows "/"
        return found


class Store:
    """A client's way to one bucket."""

    def __init__(
        self,
        scheduler: Scheduler,
        bucket: Bucket,
        faults: Faults,
        trace: Callable[[str], None] = lambda line: None,
        cut: Callable[[Process], None] = lambda process: None,
    ) -> None:
        """Args:
        trace: told of every request.
        cut: ends a process in some way.
        """
        self._scheduler, self._bucket, self._faults = scheduler, bucket, faults
        self._trace, self._cut = trace, cut

    def put(
        self, key: str, data: Any, *, mode: str = "overwrite", use_multipart: bool
    ) -> dict[str, Any]:
        create, held = mode == "create", bytes(data)
        kind = "create" if create else "replace"
        return self._ask(kind, key, lambda: self._bucket.put(key, held, create=create))

    def get(self, key: str) -> Any:
        data, etag = self._ask("get", key, lambda: self._bucket.get(key))
        return SimpleNamespace(meta={"size": len(data), "e_tag": etag}, bytes=lambda: data)

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        data, _ = self._ask("get", key, lambda: self._bucket.get(key))
        return data[start:end]

    def head(self, key: str) -> dict[str, Any]:
        data, etag = self._ask("head", key, lambda: self._bucket.get(key))
        return {"size": len(data), "e_tag": etag}

    def list(
        self, prefix: str | None = None, offset: str | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        folder, after = f"{prefix}/" if prefix else "", offset or ""
        while True:
            page = self._ask("list", folder, lambda after=after: self._bucket.page(folder, after))
            yield page
            if len(page) < self._bucket.page_size:
                return
            after = page[-1]["path"]

    def list_with_delimiter(self, prefix: str) -> dict[str, Any]:
        return {"common_prefixes": self._ask("list", prefix, lambda: self._bucket.folders(prefix))}

    def delete(self, key: str) -> None:
        self._ask("delete", key, lambda: self._bucket.delete(key))

    # -- requests ----------------------------------------------------------------------------

    def _ask(self, kind: str, key: str, do: Callable[[], Any]) -> Any:
        """Send a request and wait for its answer."""
        scheduler, random, faults = self._scheduler, self._scheduler.random, self._faults
        fate = self._fate(kind)
        there, back = (random.expovariate(1 / faults.latency) for _ in range(2))
        task = scheduler.task
        assert task is not None
        answer: list[tuple[Any, Exception | None]] = []

        def answered(value: Any, error: Exception | None) -> None:
            answer.append((value, error))
            task.resume(task.ticket, True)

        def arrive() -> None:
            value, error = None, None
            if fate in ("done", "lost", "twice", "echoed"):
                value, error = _outcome(do)
            if fate == "echoed":
                value, error = _outcome(do)
            if fate == "twice":
                scheduler.at(random.uniform(0, 30), lambda: _outcome(do))
            if fate == "late":
                scheduler.at(random.uniform(0, 120), lambda: _outcome(do))
            if fate in ("refused", "lost", "late", "denied"):
                value, error = None, self._error(kind, fate)
            said = type(error).__name__ if error else "ok"
            self._trace(f"{scheduler.now:.4f} {task.process.name} {kind} {key} {fate} {said}")
            if random.random() < faults.cut:
                scheduler.at(back / 2, lambda: self._cut(task.process))
            slow = _TIMEOUT if fate == "late" else 0.0
            scheduler.at(back + slow, lambda: answered(value, error))

        scheduler.at(there, arrive)
        while not answer:
            scheduler.block()
        value, error = answer[0]
        if error is not None:
            raise error
        return value

    def _fate(self, kind: str) -> str:
        faults, drawn = self._faults, self._scheduler.random.random()
        if faults.outage[0] <= self._scheduler.now < faults.outage[1]:
            return "refused"
        for fate in ("refused", "lost", "late", "twice", "echoed", "denied"):
            share = getattr(faults, fate)
            if drawn < share:
                return fate
            drawn -= share
        return "done"

    def _error(self, kind: str, fate: str) -> Exception:
        if fate == "denied":
            return exceptions.UnauthenticatedError("401 Unauthorized: the token has expired")
        if fate == "late":
            return exceptions.GenericError("Generic S3 error: operation timed out")
        chosen = self._scheduler.random.choice(["reset", 409, 429, 500, 503])
        if chosen == 409 and kind == "create" and fate == "refused":
            # As obstore maps it: the same error as 412.
            return exceptions.AlreadyExistsError("409 Conflict: ConditionalRequestConflict")
        if chosen in _STATUSES and fate == "refused":
            return exceptions.GenericError(f"Generic S3 error: status code: {_STATUSES[chosen]}")
        return exceptions.GenericError("Generic S3 error: connection reset by peer")


def _outcome(do: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return do(), None
    except (exceptions.BaseError, FileNotFoundError) as error:
        return None, error

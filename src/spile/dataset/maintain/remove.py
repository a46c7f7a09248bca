"""Remove a whole dataset: `spile rm`.

The unit table goes first. It moves to `removing.json`, so from then on no reader opens the dataset,
no run continues it, and every command says that it was removed in part. That record goes last: a
removal that was interrupted continues with the same command.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from spile.core.errors import ConfigError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.maintain.gc import by_group, is_of_dataset
from spile.dataset.records.heartbeat import working
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass, pass_names
from spile.objects import Objects, exists

_LISTINGS = 3  # what a worker wrote meanwhile is found by the next
_MOST_LEFT = 1000  # keys to name


@dataclass
class Removed:
    """What `remove` has deleted, and what it has left."""

    url: str
    files: int = 0
    bytes: int = 0
    left: list[str] = field(default_factory=list[str])  # keys that belong to no dataset


def check_removable(objects: Objects) -> None:
    """Refuse a place that holds no dataset, or one that a worker is active on."""
    ledger = Ledger(objects)
    if not exists(objects, fmt.REMOVING):
        ledger.table()
    for each in (objects, *(Pass(ledger, name).objects for name in pass_names(objects))):
        if busy := working(each):
            raise ConfigError(f"{objects.url}: {busy[0]} is at work on it; stop it first")


def remove(objects: Objects, *, progress: Callable[[int, int], None] | None = None) -> Removed:
    """Delete every record and file of a dataset, and nothing else.

    Args:
        progress: called with the number of files deleted, and of those found so far.

    Raises:
        ConfigError: if a worker is active on it.
        StoreError: if there is no dataset.
    """
    check_removable(objects)
    removed = Removed(objects.url)
    with suppress(FileNotFoundError):  # an earlier removal has moved it
        objects.move(fmt.UNITS, fmt.REMOVING)
    for _ in range(_LISTINGS):
        before = removed.files
        for keys in _of_dataset(objects, removed):
            sizes = mapped(partial(_delete, objects), keys, objects.parallel)
            for number, count in enumerate(sizes, 1):
                removed.files, removed.bytes = removed.files + 1, removed.bytes + count
                if progress:
                    progress(removed.files, removed.files + len(keys) - number)
        if removed.files == before:
            break
    removed.files, removed.bytes = removed.files + 1, removed.bytes + _delete(objects, fmt.REMOVING)
    path = objects.local_path(fmt.UNITS)
    if path is not None:
        with suppress(OSError):  # it holds what belongs to no dataset
            path.parent.rmdir()
    return removed


def _of_dataset(objects: Objects, removed: Removed) -> Iterator[list[str]]:
    """Yield the keys to delete, in portions; note the others."""
    removed.left = []
    for keys in by_group(objects.list()):
        own = [key for key in keys if is_of_dataset(objects, key)]
        others = sorted({*keys} - {*own})
        removed.left += others[: _MOST_LEFT - len(removed.left)]
        if wanted := [key for key in own if key != fmt.REMOVING]:
            yield wanted


def _delete(objects: Objects, key: str) -> int:
    """Delete an object; return its size."""
    try:
        count = objects.size(key)
    except FileNotFoundError:
        return 0
    objects.delete(key)
    return count

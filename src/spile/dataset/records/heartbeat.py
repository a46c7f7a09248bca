"""Heartbeats: which worker holds which unit. They save work; correctness does not need them.

A worker replaces its record every few seconds (in a bucket, where a write costs money, three times
in the time after which it is considered dead), with an increasing counter. An observer that has not
seen the counter move for a while *by its own clock* considers the worker dead; the clocks of
different machines are never compared. A worker on the same machine is known to be dead as soon as
its process has ended.

The record is stored under the groups whose units the worker holds, so that a worker that looks for
a unit sees only the few workers of that group. If it holds none, the record is beside all groups.
In a bucket the key names the units, too, and a listing shows by the etag whether a worker still
beats: so a look reads no heartbeat, except those of workers that seem dead or that want the same
unit.
"""

import contextlib
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from spile.core.errors import CorruptError, StoreError
from spile.core.system import system
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import CURRENT, KeyLayout
from spile.objects import Entry, Objects, is_bucket

_BEAT_SECONDS, _LONGEST_BEAT = 2.0, 30.0
_SETTLING_SECONDS, _SETTLED_SECONDS = 0.2, 4.0
_MISSED_BEATS = 3  # a worker that has missed so many is considered dead
_LAST_WORDS = ("done", "failed", "stopped")

_log = logging.getLogger("spile.dataset")
_unreadable: set[str] = set()  # heartbeats already reported as unreadable


class HeartbeatObserver:
    """Remembers when each worker's counter last moved, by this process's clock only."""

    def __init__(self, stale_after: float = math.inf) -> None:
        self._stale_after = stale_after
        # worker -> counter, when it last moved
        self._moved: dict[str, tuple[int | str, float]] = {}

    def note(self, name: str, counter: int | str) -> None:
        """Record the counter of a worker's current heartbeat, or an etag that changes with it."""
        known = self._moved.get(name)
        if known is None or known[0] != counter:
            self._moved[name] = (counter, system().monotonic())

    def silence(self, name: str) -> float | None:
        """Return the seconds since a worker's counter last moved; None if it was never noted."""
        known = self._moved.get(name)
        return None if known is None else system().monotonic() - known[1]

    def is_stale(self, name: str, beat: float = 0.0) -> bool:
        """Return whether a worker has been silent for so long that it is considered dead.

        Args:
            beat: the seconds between its heartbeats, if it says so.
        """
        return (self.silence(name) or 0.0) >= max(self._stale_after, _MISSED_BEATS * beat)


class Presence:
    """This worker's heartbeat, and its view of the others."""

    def __init__(
        self, objects: Objects, stale_after: float, layout: KeyLayout | None = None
    ) -> None:
        """`layout`: that of the dataset, if it exists already."""
        self.name = f"{socket.gethostname()}-{os.getpid()}-{system().token(2)}"
        self.objects, self._observer = objects, HeartbeatObserver(stale_after)
        self.layout = layout or CURRENT
        self._beat_seconds = _BEAT_SECONDS
        self._shows_units = is_bucket(objects.url)  # where each read costs a round trip
        if is_bucket(objects.url):
            longest = min(_LONGEST_BEAT, stale_after / _MISSED_BEATS)
            self._beat_seconds = max(_BEAT_SECONDS, longest)
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}  # key -> etag, record
        self._keys: list[str] = []  # where the last heartbeat lies
        self._left: set[str] = set()  # workers that have written their final record
        self._lock = system().lock()
        self._state: dict[str, Any] = {"state": "starting", "units": []}
        self._counter = 0
        self._progress: Callable[[], Mapping[str, Any]] = dict
        self._stop = system().event()
        self._thread = system().thread(self._beat, "heartbeat")

    def start(self) -> None:
        if not self._thread.is_alive():
            self._write()
            self._thread.start()

    def tell(self, **fields: Any) -> None:
        """Change the fields of the next heartbeat."""
        with self._lock:
            self._state |= fields

    def report(self, progress: Callable[[], Mapping[str, Any]]) -> None:
        """Set the function that every heartbeat calls for its `progress`, which is for display."""
        with self._lock:
            self._progress = progress

    def hold(self, unit: int) -> None:
        """Claim a unit, at once."""
        with self._lock:
            self._state["units"] = [*self._state["units"], unit]
        self._try_write()

    def claim(self, unit: int) -> bool:
        """Hold a unit unless another worker does; of simultaneous claims the first by name wins."""
        self.tell(wants=unit)
        self.hold(unit)
        kept = self._prevails(unit)
        if not kept:  # first: a beat that comes just now must not show a unit that is kept
            self.release(unit)
        self.tell(wants=None)  # written with the next beat
        if not kept:
            self._try_write()
        return kept

    def _prevails(self, unit: int) -> bool:
        limit = system().monotonic() + _SETTLED_SECONDS
        while True:
            rivals = self._rivals(unit)
            if any(
                wants is False or (wants and name < self.name) for name, wants in rivals.items()
            ):
                return False
            if not rivals:
                return True
            # A rival claimant either looked before us and keeps the unit, or gives way at once.
            if system().monotonic() > limit or self._stop.wait(_SETTLING_SECONDS):
                return False

    def _rivals(self, unit: int) -> dict[str, bool | None]:
        """Return the other workers that hold a unit, and whether they only want it.

        None: the heartbeat has gone since it was listed. Its worker may have given way, or holds
        more units and beats elsewhere; the next look tells.
        """
        found: dict[str, bool | None] = {}
        for name, units, entry in self._others(self.layout.workers_prefix(self.layout.group(unit))):
            if unit not in units:
                continue
            record = _read_worker(self.objects, entry, self._known)
            if record is None:
                found[name] = None
            elif unit in record["units"]:  # otherwise it gave way since it was listed
                found[name] = record.get("wants") == unit
        return found

    def release(self, unit: int) -> None:
        with self._lock:
            self._state["units"] = [u for u in self._state["units"] if u != unit]

    def close(self, state: str, **fields: Any) -> None:
        """Write the final record, if there was a first one."""
        self._stop.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        self.tell(state=state, units=[], **fields)
        self._try_write()

    def held_by_others(self) -> set[int]:
        """Return the units held by workers that seem alive, in all groups."""
        return {unit for units in self.holders().values() for unit in units}

    def holders(self, group: int | None = None) -> dict[str, set[int]]:
        """Return the units of other workers that seem alive, in one group or in all."""
        found: dict[str, set[int]] = {}
        prefix = fmt.WORKERS if group is None else self.layout.workers_prefix(group)
        for name, units, _ in self._others(prefix):
            if units:
                found.setdefault(name, set()).update(units)
        return found

    def occupied(self) -> Counter[int | None]:
        """Return the number of other workers by group; None: those that hold no unit.

        This uses only a listing, so it also counts workers that died silently. It serves only to
        fill groups evenly.
        """
        found = map(fmt.parse_worker_key, self.objects.list(fmt.WORKERS))
        without = {self.name, *self._left}
        return Counter(worker.group for worker in found if worker and worker.name not in without)

    def _others(self, prefix: str) -> Iterator[tuple[str, Collection[int], Entry]]:
        """Yield the other workers that seem alive: name, units, and where their heartbeat lies.

        A worker that moves to other units may be found twice.
        """
        without = {self.name, *self._left}
        found = ((fmt.parse_worker_key(entry.key), entry) for entry in self.objects.entries(prefix))
        others = [(key, entry) for key, entry in found if key and key.name not in without]
        unknown = list[tuple[fmt.WorkerKey, Entry]]()
        for key, entry in others:
            if self._beats(key, entry):
                yield key.name, key.units, entry
            else:
                unknown.append((key, entry))
        read = partial(_read_worker, self.objects, known=self._known)
        records = mapped(read, [entry for _, entry in unknown], self.objects.parallel)
        for (key, entry), record in zip(unknown, records, strict=True):
            if record is None or process_ended(record):
                continue
            if record.get("state") in _LAST_WORDS:
                self._left.add(key.name)
                continue
            self._observer.note(entry.key, entry.etag or record["counter"])
            if not self._observer.is_stale(entry.key, _beat_of(record)):
                yield key.name, record["units"], entry

    def _beats(self, key: fmt.WorkerKey, entry: Entry) -> bool:
        """Return whether a listing alone shows that a worker is alive, and its units."""
        if not key.units or not entry.etag or key.name.startswith(f"{_process()['host']}-"):
            return False  # on this machine a process is known to have ended before it is silent
        self._observer.note(entry.key, entry.etag)
        return not self._observer.is_stale(entry.key)

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            self._try_write()

    def _try_write(self) -> None:
        """Write a heartbeat and ignore errors: a full disk is reported when rows are written."""
        with contextlib.suppress(StoreError):
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._counter += 1
            body = {**self._state, "counter": self._counter, **_process()}
            body["beat"] = self._beat_seconds
            if progress := self._progress():
                body["progress"] = dict(progress)
            data = fmt.encode_record("worker", body)
            before, self._keys = self._keys, self._keys_now() or [fmt.idle_worker_key(self.name)]
            for key in self._keys:
                self.objects.replace(key, data)
            for key in before:  # after the new ones exist, so that others always see it
                if key not in self._keys:
                    self.objects.delete(key)

    def _keys_now(self) -> list[str]:
        """Return the keys of the next heartbeat: one for each group in which it holds units."""
        units: dict[int, list[int]] = {}
        for unit in sorted(self._state["units"]):
            units.setdefault(self.layout.group(unit), []).append(unit)
        return [
            self.layout.worker_key(self.name, group, held if self._shows_units else ())
            for group, held in units.items()
        ]


def read_workers(objects: Objects) -> dict[str, dict[str, Any]]:
    """Return every worker's last heartbeat; one that is being replaced may be missing.

    If a heartbeat cannot be read (perhaps another user's), its state is "unknown".
    """
    found = ((fmt.parse_worker_key(entry.key), entry) for entry in objects.entries(fmt.WORKERS))
    named = [(worker.name, entry) for worker, entry in found if worker]
    read = partial(_read_worker, objects, known={})
    records = mapped(read, [entry for _, entry in named], objects.parallel)
    last: dict[str, dict[str, Any]] = {}
    for (name, _), record in zip(named, records, strict=True):
        # A worker that moves to another group may be found in both.
        if record and record["counter"] >= last.get(name, {"counter": 0})["counter"]:
            last[name] = record
    return dict(sorted(last.items()))


def _read_worker(
    objects: Objects, entry: Entry, known: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Return a heartbeat; None if it has gone or is damaged.

    Args:
        known: heartbeats by key, with their etags: those that have not changed are not read again,
            and those that are read are added.
    """
    etag, record = known.get(entry.key, ("", {}))
    if etag and etag == entry.etag:
        return record
    try:
        record = fmt.decode_record(entry.key, objects.get(entry.key), "worker")
    except (FileNotFoundError, CorruptError):
        return None
    except OSError as error:
        warn_unreadable(objects, entry.key, error)
        return {"state": "unknown", "units": [], "counter": 0, "pid": 0}
    if not _sound(record):
        return None
    if entry.etag:
        known[entry.key] = entry.etag, record
    return record


def warn_unreadable(objects: Objects, key: str, error: OSError) -> None:
    """Warn once that a heartbeat cannot be read: its worker may or may not be alive."""
    where = f"{objects.url}/{key}"
    if where not in _unreadable:
        _unreadable.add(where)
        _log.warning(
            "%s: cannot be read (%s); whether that worker is alive is unknown",
            where,
            error.strerror or error,
        )


def working(objects: Objects, besides: str | None = None) -> list[str]:
    """Return the workers that are active on a dataset, as "NAME (HOST, process PID)".

    A worker on another machine that has not reported its end is watched for a few beats.

    Args:
        besides: the coordinator of a world whose processes do not count.
    """

    def unfinished() -> dict[str, dict[str, Any]]:
        return {
            name: record
            for name, record in read_workers(objects).items()
            if record.get("state") not in _LAST_WORDS
            and not process_ended(record)
            and not rebooted(record)
            and (besides is None or _coordinator(record) != besides)
        }

    before = now = unfinished()
    here = socket.gethostname()
    if any(record.get("host") != here for record in before.values()):
        system().sleep(_MISSED_BEATS * max(map(_beat_of, before.values())))
        now = unfinished()
    return [
        f"{name} ({record.get('host')}, process {record['pid']})"
        for name, record in now.items()
        if record.get("host") == here or record["counter"] != before.get(name, {}).get("counter")
    ]


def _coordinator(record: Mapping[str, Any]) -> str | None:
    """Return the coordinator of a worker's world."""
    world: dict[str, Any] = record.get("world") or {}
    return world.get("coordinator")


def _beat_of(record: Mapping[str, Any]) -> float:
    """Return the seconds between a worker's heartbeats."""
    beat: Any = record.get("beat")
    return min(beat, _LONGEST_BEAT) if fmt.is_amount(beat) else _BEAT_SECONDS


def _sound(record: Mapping[str, Any]) -> bool:
    """Return whether a record has the form of a heartbeat; others are ignored."""
    units: Any = record.get("units")
    world: Any = record.get("world") or {"process": 0}
    if not isinstance(units, list) or not isinstance(world, dict):
        return False
    counts = [record.get("counter"), record.get("pid"), *cast(list[Any], units)]
    counts += [cast(dict[str, Any], world).get("process"), record.get("wants") or 0]
    return all(map(fmt.is_count, counts))


def process_ended(record: Mapping[str, Any]) -> bool:
    """Return whether the worker ran on this machine since its last boot, and has ended."""
    mine = _process()
    if record.get("host") != mine["host"] or record.get("boot") != mine["boot"]:
        return False
    return _start_time(record["pid"]) != record.get("started")


def rebooted(record: Mapping[str, Any]) -> bool:
    """Return whether this machine, by name, has rebooted since the worker's last heartbeat."""
    mine = _process()
    return record.get("host") == mine["host"] and record.get("boot") != mine["boot"]


def _process() -> dict[str, Any]:
    return {**_fixed(os.getpid()), "parent": os.getppid()}


@cache
def _fixed(pid: int) -> dict[str, Any]:
    """Return the unchanging facts about this process; `pid` distinguishes it from a fork."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "pid": pid,
        "started": _start_time(pid),
    }


def _start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; it tells apart reuses of a process id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None

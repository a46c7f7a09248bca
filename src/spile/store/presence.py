"""Signs of life: which worker holds which unit. They save work; correctness needs none of this.

A worker replaces its record every few seconds, with a counter that grows. An observer that has
not seen the counter move for a while *by its own clock* takes the worker for gone; clocks of
different machines are never compared. A worker of this very machine whose process has ended is
known to be gone at once.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from spile.errors import CorruptError, StoreError
from spile.objects import Objects
from spile.store import format as fmt

_BEAT_SECONDS = 2.0


class Presence:
    """This worker's record, and what it sees of the others."""

    def __init__(self, objects: Objects, stale_after: float) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._objects, self._stale_after = objects, stale_after
        self._seen: dict[str, tuple[int, float]] = {}  # worker -> counter, when it last moved
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {"state": "starting", "units": []}
        self._counter = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._write()
            self._thread.start()

    def tell(self, **fields: Any) -> None:
        """Change what the next beat says."""
        with self._lock:
            self._state |= fields

    def hold(self, unit: int) -> None:
        """Claim a unit, at once."""
        with self._lock:
            self._state["units"] = [*self._state["units"], unit]
        self._try_write()

    def release(self, unit: int) -> None:
        with self._lock:
            self._state["units"] = [u for u in self._state["units"] if u != unit]

    def close(self, state: str, **fields: Any) -> None:
        """Say the last word, if there was a first one."""
        self._stop.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        self.tell(state=state, units=[], **fields)
        self._try_write()

    def held_by_others(self) -> set[int]:
        """Units that a worker which seems alive is working on."""
        held: set[int] = set()
        for name, record in read_workers(self._objects).items():
            if name != self.name and record.get("units") and self._alive(name, record):
                held.update(record["units"])
        return held

    def _alive(self, name: str, record: Mapping[str, Any]) -> bool:
        if process_ended(record):
            return False
        counter, now = record["counter"], time.monotonic()
        known = self._seen.get(name)
        if known is None or known[0] != counter:
            self._seen[name] = (counter, now)
            return True
        return now - known[1] < self._stale_after

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            self._try_write()

    def _try_write(self) -> None:
        """Nothing depends on a beat: a full or absent disk is reported by whoever writes rows."""
        with contextlib.suppress(StoreError):
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._counter += 1
            body = {**self._state, "counter": self._counter, **_process()}
            self._objects.replace(fmt.worker_key(self.name), fmt.encode_record("worker", body))


def read_workers(objects: Objects) -> dict[str, dict[str, Any]]:
    """Every worker's last word; a record being replaced right now may be left out."""
    workers: dict[str, dict[str, Any]] = {}
    for key in list(objects.list(fmt.WORKERS)):
        name = fmt.parse_worker_key(key)
        if name is None:
            continue
        try:
            record = fmt.decode_record(key, objects.get(key), "worker")
        except (FileNotFoundError, CorruptError):
            continue
        if _sound(record):
            workers[name] = record
    return workers


def _sound(record: Mapping[str, Any]) -> bool:
    """Whether a record says what ours say; one that does not is nobody's sign of life."""
    units: Any = record.get("units")
    world: Any = record.get("world") or {"process": 0}
    if not isinstance(units, list) or not isinstance(world, dict):
        return False
    counts = [record.get("counter"), record.get("pid"), *cast(list[Any], units)]
    return all(map(fmt.is_count, [*counts, cast(dict[str, Any], world).get("process")]))


def process_ended(record: Mapping[str, Any]) -> bool:
    """Whether the worker ran on this machine, as now booted, and its process is no more."""
    mine = _process()
    if record.get("host") != mine["host"] or record.get("boot") != mine["boot"]:
        return False
    return _start_time(record["pid"]) != record.get("started")


def rebooted(record: Mapping[str, Any]) -> bool:
    """Whether this machine, by its name, has been started anew since the worker's last word."""
    mine = _process()
    return record.get("host") == mine["host"] and record.get("boot") != mine["boot"]


def _process() -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
    }


def _start_time(pid: int) -> int | None:
    """A process's start, in clock ticks since boot; tells a process from a later one of its id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None

"""The workers of a dataset, from their heartbeats: the last report of each, and its state now.

A record gives a worker's state at the time of writing. Only an observer that has seen earlier
records can tell whether it still holds: a counter that does not move by the observer's own clock is
stale. The times in a record come from its writer's clock; an age is therefore displayed as "about",
and no decision depends on it.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from spile.core.bounded_json import Json
from spile.dataset import format as fmt
from spile.dataset.format import is_amount
from spile.dataset.records.heartbeat import HeartbeatObserver, process_ended, rebooted

_MOST_SHARES = 10_000  # a larger number is not genuine
ALIVE = ("running", "starting")
_KEPT = ("units", "units_done", "tokens", "error", "host", "pid", "counter", "world", "share")
_WORDS = ("error", "host", "share")
_PROGRESS = ("tokens", "documents", "units", "bytes", "durable", "rate", "average", "idle",
             "started", "updated")  # fmt: skip


def describe_workers(
    records: Mapping[str, Mapping[str, Any]], observer: HeartbeatObserver | None = None
) -> list[dict[str, Any]]:
    """Return one entry for each process, and one for each share that no worker has taken."""
    found = [_describe(name, record, observer) for name, record in sorted(records.items())]
    current = _without_earlier(found)
    leaders = [worker for worker in current if _leads(worker)]
    most = max((w["progress"].get("tokens", 0) for w in leaders), default=0)
    for worker in leaders:
        if worker["state"] in (*ALIVE, "stale"):
            worker["lag"] = int(most - worker["progress"].get("tokens", 0))
    return current + [
        {"name": f"share {share}", "state": "not started", "share": share, "progress": {}}
        for share in _untaken(current)
    ]


def rate_of(workers: Sequence[Mapping[str, Any]]) -> tuple[float | None, str | None]:
    """Return the tokens a second of all active workers, and the slowest of several."""
    rates = {
        worker["name"]: float(worker["progress"]["rate"])
        for worker in workers
        if worker["state"] == "running"
        and "rate" in worker["progress"]
        and _leads(worker)  # other processes count the same tokens
    }
    slowest = min(rates, key=lambda name: rates[name]) if len(rates) > 1 else None
    return (sum(rates.values()) if rates else None), slowest


def _leads(worker: Mapping[str, Any]) -> bool:
    """Return whether a worker reports for its world; one without a world reports for itself."""
    world: Mapping[str, Any] = worker.get("world") or {}
    return world.get("process", 0) == 0


def _describe(
    name: str, record: Mapping[str, Any], observer: HeartbeatObserver | None
) -> dict[str, Any]:
    state = record.get("state", "unknown")
    told = {k: record[k] for k in _KEPT if k in record}
    told |= {k: 0 for k in ("units_done", "tokens") if k in told and not fmt.is_count(told[k])}
    # Terminals obey control characters, so text is escaped.
    shown = {k: fmt.shown(v) if k in _WORDS else v for k, v in told.items()}
    progress = _progress(record)
    worker: dict[str, Any] = {"name": name, "state": fmt.shown(state), **shown}
    worker["progress"] = progress
    if state in ALIVE:
        if process_ended(record) or rebooted(record):
            worker["state"] = "dead"
        elif observer is not None:
            observer.note(name, record["counter"])
            worker["unmoved_seconds"] = observer.silence(name)
            if observer.is_stale(name):
                worker["state"] = "stale"
    if "updated" in progress:
        worker["beat_age_seconds"] = max(0.0, time.time() - progress["updated"])
    return worker


def _progress(record: Mapping[str, Any]) -> dict[str, float]:
    told: Json = record.get("progress")
    if not isinstance(told, dict):
        return {}
    return {name: told[name] for name in _PROGRESS if is_amount(told.get(name))}


def _without_earlier(workers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the last worker of a share, or of a place in a world, that was started several times."""
    by_place: dict[str, list[dict[str, Any]]] = {}
    for worker in workers:
        share, world = worker.get("share"), worker.get("world")
        where = f"{share} {world and (world.get('coordinator'), world['process'])}"
        by_place.setdefault(where if share or world else worker["name"], []).append(worker)
    kept: list[dict[str, Any]] = []
    for several in by_place.values():
        # A live worker is preferred; otherwise the one that began last, by its machine's clock.
        latest = max(
            several, key=lambda w: (w["state"] in ALIVE, w["progress"].get("started", 0.0))
        )
        kept.append({**latest, "earlier": len(several) - 1} if len(several) > 1 else latest)
    return sorted(kept, key=lambda worker: worker["name"])


def _untaken(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the shares that no worker has taken, if all workers agree on their number."""
    taken: dict[int, set[int]] = {}
    for worker in workers:
        index, _, count = str(worker.get("share") or "").partition("/")
        if index.isdecimal() and count.isdecimal() and int(count) <= _MOST_SHARES:
            taken.setdefault(int(count), set()).add(int(index))
    if len(taken) != 1:  # none, or a run that was started with different numbers
        return []
    ((count, known),) = taken.items()
    return [f"{share}/{count}" for share in range(count) if share not in known]

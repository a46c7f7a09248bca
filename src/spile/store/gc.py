"""Garbage collection: what no finished unit needs, and nobody can still commit."""

from spile.errors import CorruptError
from spile.objects import Objects, exists
from spile.store import format as fmt
from spile.store.ledger import Ledger


def collect_garbage(objects: Objects, *, abandoned: bool = False) -> list[str]:
    """Delete what can never be committed; returns the keys.

    Safe beside live writers: only losing attempts of units that are done, and leftovers of
    records that exist. With `abandoned`, also attempts of unfinished units: on the user's word
    that nothing runs.
    """
    ledger = Ledger(objects)
    ledger.table()
    manifest = ledger.read_manifest() or {"units": []}
    # What readers open, even should a unit have been redone since: `verify` tells.
    listed = {
        file["key"]
        for unit in manifest["units"]
        for file in (*unit["shards"], unit["index"], unit["statistics"])
    }
    removed: list[str] = []
    kept: dict[int, set[str] | None] = {}  # unit -> the winner's files; None while unfinished
    for key in sorted(objects.list()):
        target = objects.leftover_of(key)
        attempt = fmt.parse_attempt_key(key)
        if target is not None:
            # A heartbeat's leftover is never missed: the next beat writes anew.
            beat = key.startswith(fmt.WORKERS)
            doomed = abandoned or beat or exists(objects, target)
        elif attempt is not None:
            unit = attempt[0]
            if kept.get(unit) is None:
                done = ledger.read_done(unit)
                kept[unit] = {file.key for file in done.files()} if done else None
            files = kept[unit]
            doomed = key not in listed and (abandoned if files is None else key not in files)
        else:
            doomed = fmt.parse_worker_key(key) is not None and not _readable(objects, key)
        if doomed:
            objects.delete(key)
            removed.append(key)
    return removed


def _readable(objects: Objects, key: str) -> bool:
    """Whether a heartbeat is whole; one torn by a power cut is of no use to anyone."""
    try:
        fmt.decode_record(key, objects.get(key), "worker")
    except (FileNotFoundError, CorruptError):
        return False
    return True

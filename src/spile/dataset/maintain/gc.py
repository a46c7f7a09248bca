"""Garbage collection: what no finished unit needs, and nobody can still commit."""

from collections.abc import Callable

from spile.core.errors import CorruptError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.heartbeat import warn_unreadable
from spile.dataset.ledger import Ledger
from spile.objects import PROBES, Objects, exists


def collect_garbage(
    objects: Objects,
    *,
    abandoned: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Delete what can never be committed; returns the keys.

    Safe beside live writers: only losing attempts of units that are done, and leftovers of
    records that exist. With `abandoned`, also attempts of unfinished units: on the user's word
    that nothing runs.
    """
    ledger = Ledger(objects)
    ledger.table()
    manifest = ledger.read_manifest() or {"units": []}
    # What readers open, even should a unit have been redone since: `verify` tells.
    listed = {file["key"] for unit in manifest["units"] for file in fmt.listed_files(unit)}
    keys = sorted(objects.list())
    attempts = {key: found[0] for key in keys if (found := fmt.parse_attempt_key(key))}
    units = sorted({*attempts.values()})
    records = mapped(ledger.read_done, units, objects.parallel)
    winners = {
        done.unit: {file.key for file in done.files()} for done in records if done is not None
    }

    def doomed(key: str) -> bool:
        target = objects.leftover_of(key)
        if target is not None and not key.startswith(fmt.SCRATCH):
            # A heartbeat's leftover is never missed, for the next beat writes anew; nor is that of
            # a prediction, which no run fails for.
            missed = not (key.startswith(fmt.WORKERS) or target == fmt.PREDICTION)
            return abandoned or not missed or probe(key) or exists(objects, target)
        if key in attempts:
            files = winners.get(attempts[key])  # None while unfinished
            return key not in listed and (abandoned if files is None else key not in files)
        aside = fmt.parse_damaged_key(key)
        if aside is not None:  # by `verify --repair`, until there is a sound one again
            return abandoned or aside == fmt.PREDICTION or exists(objects, aside)
        if key.startswith(fmt.SCRATCH):
            return True  # `shuffle` makes the table last, which we have read
        if fmt.parse_worker_key(key) is not None:
            return not _readable(objects, key)
        return probe(key)

    def probe(key: str) -> bool:
        # Whoever makes a dataset probes its store before there is a table.
        return key.startswith(PROBES) and (abandoned or bool(manifest["units"]))

    def remove(key: str) -> str:
        objects.delete(key)
        return key

    removed: list[str] = []
    chosen = [key for key in keys if doomed(key)]
    for key in mapped(remove, chosen, objects.parallel):
        removed.append(key)
        if progress:
            progress(len(removed), len(chosen))
    return removed


def _readable(objects: Objects, key: str) -> bool:
    """Whether a heartbeat is whole; one torn by a power cut is of no use to anyone."""
    try:
        fmt.decode_record(key, objects.get(key), "worker")
    except (FileNotFoundError, CorruptError):
        return False
    except OSError as error:  # another user's, perhaps: not ours to judge
        warn_unreadable(objects, key, error)
    return True

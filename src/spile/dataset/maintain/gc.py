"""Deletion of files that no record names or can still name, and of a dataset without rows."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from spile.core.errors import ConfigError, CorruptError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.maintain.features import collect_features
from spile.dataset.records.heartbeat import warn_unreadable, working
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import named_by, named_files
from spile.dataset.records.passes import Pass, pass_names, readable_passes
from spile.dataset.records.segments import SegmentFile, read_segment
from spile.objects import PROBES, Objects, exists

_GROUP = re.compile(r"\d{6}")  # the folder of one


def collect_garbage(
    objects: Objects,
    *,
    abandoned: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Delete files that can never be committed; return their keys.

    This is safe beside live writers: it deletes only losing attempts of units that are done and not
    being repaired, and leftovers of records that exist. With `abandoned`, it also deletes attempts
    of unfinished units: the user must be sure that nothing runs.

    It deletes all of a dropped pass and of dropped features, except the record that they are
    dropped, and parts of features that a summary has taken in.

    The keys of one group are held at a time.
    """
    ledger, removed = Ledger(objects), list[str]()

    def note(found: Iterable[str], expected: int) -> None:
        before = len(removed)
        for key in found:
            removed.append(key)
            if progress:
                progress(len(removed), before + expected)

    keys = (key for key in objects.list() if not key.startswith(fmt.PASSES))
    _collect(ledger, keys, abandoned, note)
    collect_features(ledger, lambda key: note([_delete(objects, key)], 1))
    sound = {each.name for each, _ in readable_passes(ledger, ledger.table())}
    for name in pass_names(objects):
        each = Pass(ledger, name)

        def inside(found: Iterable[str], expected: int, prefix: str = each.prefix) -> None:
            note((prefix + key for key in found), expected)

        if each.is_dropped:
            for keys in by_group(each.objects.list()):
                gone = [key for key in keys if key != fmt.DROPPED]
                inside(mapped(partial(_delete, each.objects), gone, objects.parallel), len(gone))
        elif name in sound:
            _collect(each.ledger, each.objects.list(), abandoned, inside)
    return sorted(removed)


def _delete(objects: Objects, key: str) -> str:
    objects.delete(key)
    return key


def _collect(
    ledger: Ledger,
    keys: Iterable[str],
    abandoned: bool,
    note: Callable[[Iterable[str], int], None],
) -> None:
    """Delete what a dataset, or a pass, does not need; `note` the keys while they are deleted."""
    objects = ledger.objects
    table = ledger.table()
    derived, complete = named_files(table), set[int]()
    segments: dict[int, dict[str, SegmentFile]] = {}  # by group, those that any manifest names
    for number, each in enumerate(table.every_generation()):
        manifest = ledger.derived.read_manifest(each.layout)
        if manifest is not None:
            complete.add(number)
            derived |= named_by(manifest)
            for part in manifest.segments:
                group = fmt.parse_segment_key(part.file.key) or 0
                segments.setdefault(group, {})[part.file.key] = part
    attempts: dict[str, int] = {}  # of the keys in hand: the unit of each
    listed, winners = set[str](), dict[int, set[str]]()
    condemned = set[int]()

    def look_at(keys: list[str]) -> None:
        nonlocal attempts, listed, winners, condemned
        attempts = {key: found[0] for key in keys if (found := fmt.parse_attempt_key(key))}
        if not attempts:
            return
        # After the listing, since a repair marks the record it will replace before it writes
        # anything; and before records are read, since the record may be the new one by then.
        condemned = _condemned(objects)
        units = sorted({*attempts.values()})
        records = mapped(ledger.read_done, units, objects.parallel)
        winners = {
            done.unit: {file.key for file in done.files()} for done in records if done is not None
        }
        # Readers open these files, even if a unit has been redone since: `verify` reports that.
        losers = {unit for key, unit in attempts.items() if key not in winners.get(unit, ())}
        losers -= condemned
        listed = set[str]()
        for group in {table.layout.group(unit) for unit in losers}:
            try:
                for part in segments.get(group, {}).values():
                    segment = read_segment(objects, part, table.layout)
                    chosen = np.flatnonzero(np.isin(segment.units, [*losers])).tolist()
                    listed.update(f.key for at in chosen for f in segment.done(at).files())
            except CorruptError:  # a repair of another unit has moved it aside: look again later
                condemned.update(table.layout.units_of(group, len(table.units)))

    def doomed(key: str) -> bool:
        target = objects.leftover_of(key)
        original = fmt.parse_damaged_key(target or key)
        if original is not None:
            return abandoned or _is_replaced(objects, key, original)
        if target is not None and not key.startswith(fmt.SCRATCH):
            # The leftover of a heartbeat is not needed, since the next beat writes a new record;
            # nor is that of a prediction, without which no run fails.
            missed = not (key.startswith(fmt.WORKERS) or target == fmt.PREDICTION)
            return abandoned or not missed or probe(key) or exists(objects, target)
        if key in attempts:
            files = winners.get(attempts[key])  # None while unfinished
            if key in listed or (files is not None and key in files):
                return False
            return abandoned or (files is not None and attempts[key] not in condemned)
        number = fmt.parse_generation(key)
        kind = key.removeprefix(fmt.generation_folder(number))
        # (The units of a generation that nobody has created yet are about to be.)
        settled = kind.startswith(fmt.UNIT_COLUMNS) and number <= len(table.generations)
        if settled or key.startswith(fmt.TOKENIZER):
            return key not in derived  # of a table that came second
        if kind.startswith(fmt.MANIFEST_COLUMNS) and number in complete:
            return key not in derived
        if key.startswith(fmt.SCRATCH):
            return True  # `shuffle` creates the table last, and it exists
        if fmt.parse_worker_key(key) is not None:
            return not _readable(objects, key)
        return probe(key)

    def probe(key: str) -> bool:
        # The maker of a dataset probes its store before the table exists.
        return key.startswith(PROBES) and (abandoned or bool(complete))

    for together in by_group(keys):
        look_at(together)
        chosen = [key for key in together if doomed(key)]
        note(mapped(partial(_delete, objects), chosen, objects.parallel), len(chosen))


def by_group(keys: Iterable[str]) -> Iterator[list[str]]:
    """Yield keys in portions, each sorted: those of a group of attempts or records together.

    Listings give the keys of a folder one after the other. The keys of a portion may be deleted
    before the next one is asked for.
    """

    def portion(key: str) -> str:
        first, _, rest = key.partition("/")
        group, slash, _ = rest.partition("/")
        return f"{first}/{group}" if slash and _GROUP.fullmatch(group) else first

    for _, together in itertools.groupby(keys, portion):
        yield sorted(together)


def discard_empty(objects: Objects, besides: str | None = None) -> list[str]:
    """Delete a dataset that holds no row yet, so that another recipe can begin in its place.

    Files that are not part of a dataset stay. Returns the deleted keys; none if there is no
    dataset.

    Args:
        besides: the coordinator of a world whose processes may be alive, waiting for this.

    Raises:
        ConfigError: if a unit with rows is committed, or a worker is active there.
    """
    ledger = Ledger(objects)
    if ledger.read_table() is None:
        return []
    if ledger.holds_rows():
        raise ConfigError(
            f"--restart: {objects.url} holds {len(ledger.done_units())} committed units, which "
            "would be lost; continue it without --restart, choose another --out, or delete it"
        )
    busy = working(objects, besides)
    if busy:
        raise ConfigError(f"--restart: {busy[0]} is at work on {objects.url}; stop it first")
    keys = [key for key in sorted(objects.list()) if is_of_dataset(objects, key)]
    # What is derived from records is deleted before them: no segment names a unit that is gone. The
    # table is deleted last: while it exists, the rest can be deleted the same way.
    derived = fmt.SEGMENTS, fmt.GENERATIONS
    for key in sorted(keys, key=lambda key: (key == fmt.UNITS, not key.startswith(derived))):
        objects.delete(key)
    return keys


def is_of_dataset(objects: Objects, key: str) -> bool:
    """Return whether a key is part of a dataset, or left over from writing one."""
    key = objects.leftover_of(key) or key
    return fmt.belongs(key) or key.startswith(PROBES)


def _condemned(objects: Objects) -> set[int]:
    """Return units whose record a repair is about to replace: another attempt may be committed."""
    found: set[int] = set()
    for key in sorted(objects.list(fmt.DAMAGED)):
        original = fmt.parse_damaged_key(key) or ""
        unit = fmt.parse_done_key(original)
        if unit is not None and not _is_replaced(objects, key, original):
            found.add(unit)
    return found


def _is_replaced(objects: Objects, key: str, original: str) -> bool:
    """Return whether another record has replaced one that a repair has moved aside."""
    try:
        return original == fmt.PREDICTION or objects.get(original) != objects.get(key)
    except FileNotFoundError:
        return False


def _readable(objects: Objects, key: str) -> bool:
    """Return whether a heartbeat is intact; one torn by a power cut is useless."""
    try:
        fmt.decode_record(key, objects.get(key), "worker")
    except (FileNotFoundError, CorruptError):
        return False
    except OSError as error:  # perhaps another user's: keep it
        warn_unreadable(objects, key, error)
    return True

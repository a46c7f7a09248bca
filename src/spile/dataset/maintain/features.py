"""Features in the care of a dataset: audited, collected, copied and dropped with it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from spile.core.errors import ConfigError, CorruptError, SpileError
from spile.core.options import listed
from spile.dataset import format as fmt
from spile.dataset.codec.columns import ColumnFile, read_columns
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.features import (
    FeatureFiles,
    FeatureSet,
    FeatureSpec,
    dead_sets,
    digest_of_units,
    live_sets,
    set_names,
)
from spile.dataset.records.ledger import Ledger
from spile.objects import Objects, exists


def audit_features(ledger: Ledger, *, quick: bool) -> tuple[list[str], list[str]]:
    """Return the faults of features, and the keys that nothing names.

    Args:
        quick: compare only the sizes of files.
    """
    faults: list[str] = []
    orphans: list[str] = []
    dead = {each.name for each in dead_sets(ledger)}
    for name in set_names(ledger.objects):
        features = FeatureSet(ledger.objects, name)
        if name in dead:
            keys = (key for key in features.objects.list() if key != fmt.DROPPED)
            orphans += [features.prefix + key for key in keys]
            continue
        try:
            found = listed_records(features)
            named = {file.key for file in found.files()}
            faults += _faults(ledger, features, found, quick)
        except SpileError as error:
            faults.append(f"{error}; `spile drop --features {name}` drops them")
            continue
        there = {*features.objects.list(fmt.FEATURE_COLUMNS)}
        # (Files of parts are written before their records, perhaps just now.)
        orphans += [features.prefix + key for key in sorted(there - named)]
    return faults, orphans


@dataclass(frozen=True)
class FeatureRecords:
    """The records that readers and later calls need, from one listing of each kind.

    Attributes:
        waiting: the parts that no summary covers.
    """

    spec: FeatureSpec
    summaries: dict[int, FeatureFiles]
    waiting: tuple[FeatureFiles, ...]
    logits: dict[int, ColumnFile]

    def files(self) -> Iterator[ColumnFile]:
        """Yield the files that they name."""
        if self.spec.vectors:
            yield self.spec.vectors
        for made in (*self.summaries.values(), *self.waiting):
            yield from made.named()
        yield from self.logits.values()

    def own_keys(self) -> Iterator[str]:
        """Yield the keys of the records."""
        yield fmt.FEATURE_SET
        yield from (fmt.numbered(fmt.SUMMARIES, units) for units in self.summaries)
        yield from (fmt.numbered(fmt.DONE, part.first) for part in self.waiting)
        yield from (fmt.numbered(fmt.LOGITS, block) for block in self.logits)


def listed_records(features: FeatureSet) -> FeatureRecords:
    """List the records of a set that readers and later calls need, and read them."""
    summaries = {n: made for n in features.summaries() if (made := features.summary(n))}
    waiting = _waiting(features, [*summaries])
    logits = {n: file for n in features.blocks() if (file := features.logits(n))}
    return FeatureRecords(features.spec(), summaries, (*waiting,), logits)


def _waiting(features: FeatureSet, summaries: Sequence[int]) -> Iterator[FeatureFiles]:
    """Yield the parts that no summary covers."""
    behind = summaries[-1] if summaries else 0
    for first in sorted(features.parts()):
        part = features.part(first) if first >= behind else None
        if part:
            yield part


def _faults(
    ledger: Ledger, features: FeatureSet, found: FeatureRecords, quick: bool
) -> Iterator[str]:
    for file in found.files():
        try:
            if not quick:
                read_columns(features.objects, file)
            elif features.objects.size(file.key) != file.bytes:
                raise CorruptError(file.key, "has another size than its record says")
        except FileNotFoundError:
            yield f"{features.prefix}{file.key}: is missing"
        except CorruptError as error:
            yield f"{features.prefix}{error}"
    if not quick and found.summaries:
        dataset = open_dataset(ledger.url, partial=True)
        for units, made in found.summaries.items():
            if units > dataset.num_units:
                continue
            rows = (dataset.record(unit) for unit in range(units))
            if digest_of_units(rows, found.spec.stored) != made.made_from:
                key = features.prefix + fmt.numbered(fmt.SUMMARIES, units)
                yield (
                    f"{key}: was counted from other rows, which a repair has made again; `spile "
                    f"drop --features {features.name}`, and count them again"
                )


def collect_features(ledger: Ledger, delete: Callable[[str], None]) -> None:
    """Delete what is left of dropped features, and the parts that a summary has taken in."""
    for features in dead_sets(ledger):
        features.drop()  # (if only its tap was: so that nobody continues it)
        for key in sorted(features.objects.list()):
            if key != fmt.DROPPED:
                delete(features.prefix + key)
    for features, _ in live_sets(ledger):
        summaries = features.summaries()
        behind = summaries[-1] if summaries else 0
        kept = {file.key for part in _waiting(features, summaries) for file in part.named()}
        for first in sorted(number for number in features.parts() if number < behind):
            part = features.part(first)
            delete(features.prefix + fmt.numbered(fmt.DONE, first))
            # (Parts without rows may have the same files as one that is being written.)
            for file in part.named() if part and part.rows else ():
                if file.key not in kept:
                    delete(features.prefix + file.key)


def copy_features(source: Ledger, dest: Objects, copied: Callable[[int], None]) -> None:
    """Copy features to a whole copy of a dataset, each record after the files that it names.

    Args:
        copied: called with the size of everything that was copied.

    Raises:
        ConfigError: if the destination has other features of that name.
    """

    def put(key: str, data: bytes) -> None:
        if dest.create(key, data):
            copied(len(data))
        elif dest.get(key) != data:
            raise ConfigError(
                f"{dest.url} has other features than {source.url} ({key}); drop them by `spile "
                "drop --features`, then copy again"
            )

    def put_file(features: FeatureSet, file: ColumnFile) -> None:
        key = features.prefix + file.key
        if exists(dest, key) and dest.size(key) == file.bytes:
            return
        data = source.objects.get(key)
        if xxhash.xxh3_128_hexdigest(data) != file.digest:
            raise CorruptError(key, "checksum does not match (damaged)")
        put(key, data)

    for features in dead_sets(source):
        if exists(dest, features.prefix + fmt.FEATURE_SET) and features.is_dropped:
            put(features.prefix + fmt.DROPPED, features.objects.get(fmt.DROPPED))
    for features, _ in live_sets(source):
        if exists(dest, features.prefix + fmt.DROPPED):
            continue  # what the destination has dropped stays dropped
        # (Listed once: another process may be counting, and a record must not go without files.)
        found = listed_records(features)
        for file in found.files():
            put_file(features, file)
        for key in found.own_keys():
            put(features.prefix + key, features.objects.get(key))


def drop_features(ledger: Ledger, names: Sequence[str]) -> dict[str, int]:
    """Drop sets of features by their names; return the bytes of each."""
    live = {
        name: each
        for name in set_names(ledger.objects)
        if not (each := FeatureSet(ledger.objects, name)).is_dropped
    }
    for name in names:
        if name not in live:
            there = listed(live)
            raise ConfigError(f"{ledger.url}: no features {name!r}; there are {there}")
    gone = {name: live[name].bytes for name in names}
    for name in names:
        live[name].drop()
    return gone

"""The ledger of a dataset: its done records. Every commit goes through here.

A unit exists when its done record does. Records are created exclusively. A worker that is told that
a record already exists reads it back, because a lost answer to its own request looks the same.

Anyone may create what follows from the done records: the segment of a group once all its units are
done (so that nobody lists or reads their records again), and the manifest once every group has its
segment. The worker that commits the last unit does it. The others, perhaps a thousand, do it only
if it has not been done after a while.
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import xxhash

from spile.core.config import canonical_json
from spile.core.errors import (
    ConfigError,
    CorruptError,
    DriftError,
    NotCreatedError,
    SpileError,
    StoreError,
)
from spile.core.system import system
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.columns import encode_columns
from spile.dataset.codec.quantization import scales_from_json, scales_to_json
from spile.dataset.format import CURRENT, Done, KeyLayout
from spile.dataset.records import generations
from spile.dataset.records import table as tables
from spile.dataset.records.manifest import Derived, ManifestSums
from spile.dataset.records.segments import (
    Catalog,
    Segment,
    SegmentFile,
    derive_segment,
    read_statistics,
    sealed_segment,
)
from spile.dataset.records.table import Table
from spile.objects import Objects, exists
from spile.objects.local import settle

if TYPE_CHECKING:
    from spile.dataset.records.passes import Pass

# How long to leave a manifest to the worker that committed the last unit, in seconds.
_PATIENCE, _SEALED_PER_SECOND, _LONGEST_PAUSE = 5.0, 100, 3.0


class Replacing(Protocol):
    """A repair, which replaces records through the ledger (`maintain/repair.py`)."""

    @property
    def condemned(self) -> Mapping[int, str]:
        """The units whose records will be replaced: they count as not done."""
        ...

    @property
    def unsound(self) -> Collection[int]:
        """The units whose records are missing or damaged: their segments do not count."""
        ...

    def before_weights(self, digests: Mapping[str, str]) -> None:
        """Called before the weights' hashes are recorded or compared."""
        ...

    def before_commit(self, done: Done) -> None:
        """Called before a record is created; its files exist. Raises if it must not be."""
        ...

    def after_commit(self, done: Done, committed: bool) -> None: ...

    def before_complete(self, table: Table) -> bool:
        """Called before the manifest is created; returns whether it may be."""
        ...


class Ledger:
    """The done records of a dataset, or of one of its passes."""

    def __init__(self, objects: Objects, of_pass: "Pass | None" = None) -> None:
        self.objects, self.of_pass = objects, of_pass
        self.derived = Derived(objects)
        self.repair: Replacing | None = None
        self._layout: KeyLayout | None = None
        self._units = 0  # in the table
        self._committed: set[int] = set()  # groups not looked at since a commit there
        self._made_with: dict[str, str] | None = None  # digests of the weights and scales

    @property
    def url(self) -> str:
        """The place of the dataset, as `spile.open` takes it."""
        return self.of_pass.dataset.url if self.of_pass else self.objects.url

    @property
    def prefix(self) -> str:
        """The folder of the pass; empty for the dataset itself."""
        return self.of_pass.prefix if self.of_pass else ""

    @property
    def layout(self) -> KeyLayout:
        """Where the records of units lie: as the table says, or as a new one would."""
        if self.of_pass:
            return self.of_pass.dataset.layout
        if self._layout is None:
            table = self.read_table()
            self._layout = table.layout if table else CURRENT
        return self._layout

    # -- the table ----------------------------------------------------------------------------

    def read_table(self) -> Table | None:
        """Return the unit table with all its generations, finished or not."""
        table = self.of_pass.read_table() if self.of_pass else tables.read_table(self.objects)
        if table is not None:
            self._layout, self._units = table.layout, len(table.units)
        return table

    def table(self) -> Table:
        """Return the unit table; raise StoreError if there is no dataset."""
        table = self.read_table()
        if table is None:
            self._refuse_removed(StoreError)
            wanted = (
                f"pass there (no {fmt.PASS})"
                if self.of_pass
                else (f"dataset there (no {fmt.UNITS})")
            )
            raise StoreError(f"{self.objects.url}: no {wanted}")
        return table

    def create_table(self, table: Table, tokenizer: Mapping[str, bytes] | None = None) -> Table:
        """Store the table, or return the one that came first; `tokenizer`: its files by name."""
        if self.of_pass:
            self.of_pass.create_table(table)
        else:
            self._refuse_removed(ConfigError)
            self.refuse_strays(0, fmt.UNITS)
            tables.create_table(self.objects, table, tokenizer)
        return self.table()

    def create_generation(self, table: Table) -> Table:
        """Store the newest generation of a table, or return the table with the one that came first.

        The file of its units is created before it, as that of a table is.
        """
        number, made = len(table.generations), table.generations[-1]
        self.refuse_strays(made.before, fmt.generation_key(number))
        units = table.units.part(made.before, len(table.units))
        generations.create_generation(self.objects, number, made, table.fingerprint, units)
        return self.table()

    def _refuse_removed(self, kind: type[SpileError]) -> None:
        """Raise if `spile rm` has removed the table, and perhaps not yet the rest."""
        if not self.of_pass and exists(self.objects, fmt.REMOVING):
            url = self.objects.url
            raise kind(
                f"{url}: was removed in part; `spile rm {shlex.quote(url)}` removes the rest"
            )

    def refuse_strays(self, first: int, key: str) -> None:
        """Refuse to create a record if units that it adds are done already, by others.

        Args:
            first: the first unit that the record at `key` adds.
        """
        begin = self.layout.group(first)
        groups = [int(name) for name in self.objects.folders(fmt.DONE) if name.isdecimal()]
        strays = {u for group in groups if group >= begin for u in self.done_in(group)}
        strays = {unit for unit in strays if unit >= first}
        if strays and not exists(self.objects, key):
            raise ConfigError(
                f"{self.objects.url} holds {self.layout.done_key(min(strays))}, a unit that no "
                "table names: a copy, merge or compaction was begun there, or another dataset was "
                "removed in part; finish that by the same command, remove the rest, or choose "
                "another place"
            )

    # -- the weights, and the scales of int8 --------------------------------------------------

    def check_weights(self, digests: Mapping[str, str]) -> None:
        """Record the weights' full hashes, or compare them with those recorded before.

        Those of a pass are also compared with the dataset's, as far as both read them.
        """
        if self.of_pass:
            known = self.of_pass.dataset.read_weights() or {}
            self._refuse_other_weights(known, digests, [n for n in known if n in digests])
        if self.repair:
            self.repair.before_weights(digests)
        body = {"tensors": dict(sorted(digests.items()))}
        if self.objects.create(fmt.MODEL, fmt.encode_record("model", body)):
            return
        stored = self.read_weights()
        if stored is None:
            raise self._unreadable(fmt.MODEL)
        self._refuse_other_weights(stored, digests, {*stored, *digests})

    def read_weights(self) -> dict[str, Any] | None:
        """Return the weights' full hashes by tensor; None if none are recorded yet."""
        found = fmt.read_record(self.objects, fmt.MODEL, "model")
        if found is None:
            return None
        record: Any = found.get("tensors", {})
        if not isinstance(record, dict):
            raise CorruptError(fmt.MODEL, "holds no hashes")
        return cast(dict[str, Any], record)

    def _refuse_other_weights(
        self, stored: Mapping[str, Any], digests: Mapping[str, str], names: Iterable[str]
    ) -> None:
        changed = {
            f"weights of {name}": (stored.get(name), digests.get(name))
            for name in sorted(names)
            if stored.get(name) != digests.get(name)
        }
        if changed:
            differences = dict(list(changed.items())[:3])
            raise DriftError(self.url, differences, holds_rows=self.holds_rows())

    def read_scales(self, table: Table) -> dict[str, np.ndarray] | None:
        """Return the scale of each channel, for taps that have them; None if not measured yet."""
        if all(info.scaled_by != "channel" for info in table.taps.values()):
            return {}
        body = fmt.read_record(self.objects, fmt.SCALES, "scales")
        return None if body is None else scales_from_json(body, table.taps)

    def create_scales(self, table: Table, measured: Mapping[str, np.ndarray]) -> None:
        """Store the scales, unless others came first: those apply to every worker."""
        body = scales_to_json(measured)
        scales_from_json(body, table.taps)  # an unreadable record would block every worker forever
        self.objects.create(fmt.SCALES, fmt.encode_record("scales", body))

    # -- what a unit is made from -------------------------------------------------------------

    def made_from(
        self, table: Table, unit: int, weights: Mapping[str, Any] | None = None
    ) -> str | None:
        """Return the digest of what a unit of a table is made from; its done record holds it.

        That is the recipe, the unit's row of the table, and the hashes of the weights and scales.
        None if those are not recorded, or damaged.

        Args:
            weights: hashes to use in place of the recorded ones.
        """
        made_with = self._made_with
        if made_with is None or weights is not None:
            made_with = self._read_made_with(table, weights)
        if made_with is None:
            return None
        if weights is None:
            self._made_with = made_with
        return xxhash.xxh3_128_hexdigest(canonical_json({**table.source_of(unit), **made_with}))

    def must_be_made_from(self, table: Table, unit: int) -> str:
        """Return the digest of what a unit is made from, for its done record."""
        made_from = self.made_from(table, unit)
        if made_from is None:
            raise CorruptError(fmt.MODEL, f"is missing or damaged in {self.objects.url}")
        return made_from

    def _read_made_with(
        self, table: Table, weights: Mapping[str, Any] | None
    ) -> dict[str, str] | None:
        try:
            weights = self.read_weights() if weights is None else weights
            scales = self.read_scales(table)
        except CorruptError:
            return None
        if weights is None or scales is None:
            return None
        found = {"weights": weights, "scales": scales_to_json(scales) if scales else {}}
        return {name: xxhash.xxh3_128_hexdigest(canonical_json(of)) for name, of in found.items()}

    def other_origin(self, table: Table, done: Done) -> str | None:
        """Return why a record is not one of a table's units; None if it is."""
        if done.fingerprint != table.fingerprint:
            return "belongs to another recipe"
        made_from = self.made_from(table, done.unit)
        if made_from is not None and done.made_from != made_from:
            return (
                f"was made from other documents or weights than unit {done.unit} of {fmt.UNITS}; "
                "`spile verify --repair` makes the unit again"
            )
        return None

    # -- the units that are done --------------------------------------------------------------

    def sealed_groups(self, layout: KeyLayout | None = None) -> set[int]:
        """Return the groups that have a segment, from a listing alone.

        Args:
            layout: that of an earlier generation, to look at the dataset as it was.
        """
        found = self.derived.sealed_groups(layout or self.layout)
        if self.repair:
            found -= {self.layout.group(unit) for unit in self.repair.unsound}
        return found

    def done_in(self, group: int) -> set[int]:
        """Return the units of a group that exist, from a listing alone."""
        prefix = self.layout.done_prefix(group)  # stripped: a worker does this for every unit
        names = (key[len(prefix) :] for key in self.objects.list(prefix))
        found = {int(name[:8]) for name in names if fmt.DONE_NAME.fullmatch(name)}
        return found - self.repair.condemned.keys() if self.repair else found

    def done_units(self) -> set[int]:
        """Return the units that exist, from listings alone."""
        sealed = self.sealed_groups()
        if sealed and not self._units and self.read_table() is None:
            sealed = set[int]()  # a copy gets its table last
        units = {u for group in sealed for u in self.layout.units_of(group, self._units)}
        open_groups = self._open_groups(sealed)
        return units.union(*mapped(self.done_in, open_groups, self.objects.parallel))

    def _open_groups(self, sealed: set[int]) -> list[int]:
        """Return the groups that have done records, and no segment."""
        names = self.objects.folders(fmt.DONE)
        return sorted({int(name) for name in names if name.isdecimal()} - sealed)

    def read_done(self, unit: int) -> Done | None:
        """Return the record of a unit; None if it is not done."""
        key = self.layout.done_key(unit)
        body = fmt.read_record(self.objects, key, "done")
        if body is None:
            return None
        done = Done.from_json(key, body, self.layout)
        if done.unit != unit:
            raise CorruptError(key, f"is the record of unit {done.unit}")
        return done

    def must_be_done(self, table: Table, unit: int) -> Done:
        """Return the record of a unit of a table; raise CorruptError if there is none."""
        done = self.read_done(unit)
        if done is None:
            raise CorruptError(self.layout.done_key(unit), "is missing")
        self._refuse_other(table, done)
        return done

    def _refuse_other(self, table: Table, done: Done) -> None:
        if why := self.other_origin(table, done):
            raise CorruptError(self.layout.done_key(done.unit), why)

    def holds_rows(self) -> bool:
        """Return whether a committed unit holds a row. An unreadable record counts as one.

        A pass always does: its rows are the dataset's.
        """
        if self.of_pass:
            return True
        for unit in sorted(self.done_units()):
            try:
                done = self.read_done(unit)
            except StoreError:
                return True
            if done is not None and done.rows:
                return True
        return False

    # -- commits ------------------------------------------------------------------------------

    def commit(self, done: Done) -> bool:
        """Create the done record; return False if another attempt came first.

        Raises:
            NotCreatedError: if the record was not and will not be created: a file that it would
                name has vanished, or the disk is full.
            StoreError: if the record may exist, now or later.
        """
        if self.of_pass:
            self.of_pass.refuse(done)
        committed = self._commit(done)
        if self.repair:
            self.repair.after_commit(done, committed)
        return committed

    def _commit(self, done: Done) -> bool:
        key = self.layout.done_key(done.unit)
        gone = self.missing_files(done)
        if gone:
            # `gc` deletes the files of an attempt that lost; nothing else may delete them.
            stored = self.read_done(done.unit)
            if stored is not None:
                return self._is_ours(done, stored)
            raise NotCreatedError(
                f"{self.objects.url}/{gone[0]}: vanished before unit {done.unit} was committed; "
                "nothing but spile may delete there (`gc --abandoned` only when nothing runs): "
                "run the same command again"
            )
        if self.repair:
            self.repair.before_commit(done)
        if not self.objects.create(key, fmt.encode_record("done", done.to_json())):
            stored = self.read_done(done.unit)
            if stored is None:
                raise self._unreadable(key)
            if not self._is_ours(done, stored):
                return False
        self._committed.add(self.layout.group(done.unit))
        return True

    def _is_ours(self, done: Done, stored: Done) -> bool:
        """Return whether the stored record is that of this attempt, or of one at the same unit."""
        if stored.made_from != done.made_from:
            raise CorruptError(
                self.layout.done_key(done.unit),
                "was made from something else than this run makes; `spile verify` names the cause",
            )
        return stored.attempt == done.attempt

    def missing_files(self, done: Done) -> list[str]:
        """Return the files that a record names but that are missing or of another size."""
        prefix = self.layout.attempt_prefix(done.unit, done.attempt)
        sizes = {entry.key: entry.size for entry in self.objects.entries(prefix)}
        return [file.key for file in done.files() if sizes.get(file.key) != file.bytes]

    def _unreadable(self, key: str) -> StoreError:
        return StoreError(
            f"{self.objects.url}/{key}: is said to exist, and cannot be read; "
            "run the same command again"
        )

    # -- sealing groups, and completing the dataset -------------------------------------------

    @property
    def committed_groups(self) -> set[int]:
        """The groups that have not been looked at since a unit was committed there."""
        return self._committed.copy()

    def looks_after_commit(self, group: int) -> bool:
        """Return whether a unit of a group was committed here since the last call.

        A worker that looks at a group after each of its commits finds it done if the last commit
        was its own, and then seals it.
        """
        found = group in self._committed
        self._committed.discard(group)
        return found

    def seal(self, table: Table, group: int) -> bool:
        """Create the segment of a group if all its units are done; return whether it exists."""
        layout = table.layout
        key, units = layout.segment_key(group), layout.units_of(group, len(table.units))
        if exists(self.objects, key):
            return True
        if not self._is_done(table, group):
            return False
        settle(self.objects, layout.done_key(units[0]))  # makes others' records durable, too
        must_be_done = partial(self.must_be_done, table)
        self.made_from(table, units[0])  # reads what all units need once, before threads ask
        records = list(mapped(must_be_done, units, self.objects.parallel))
        read = partial(read_statistics, self.objects, taps=table.taps)
        statistics = mapped(read, records, self.objects.parallel)
        self.objects.create(key, encode_columns(derive_segment(records, statistics)))
        return True

    def complete(self, table: Table, *, patient: bool = False) -> bool:
        """Create the manifest if every unit is done; return whether they are.

        A dataset without any row gets no manifest: it is useless to readers, and another recipe may
        replace it. A pass without a manifest gets none, and False is returned, if the dataset has
        a later generation than `table`.

        Args:
            patient: if the last unit was committed by another worker, leave the manifest to that
                one for a while: a fleet that ends would otherwise read all segments at once.
        """
        if self.repair and not self.repair.before_complete(table):
            return False
        layout, manifest = table.layout, table.layout.manifest_key
        if self._has_manifest(table):
            settle(self.objects, manifest)
            if self.of_pass:
                self._complete_earlier(table)  # (a process may have ended between them)
            return True
        own = [g for g in self.committed_groups if self.looks_after_commit(g)]
        is_last = any([self.seal(table, group) for group in own])
        there, groups = self.sealed_groups(layout), range(layout.groups(len(table.units)))
        if patient and not is_last:
            if not all(group in there or self._is_done(table, group) for group in groups):
                return False
            if self._appears(manifest, _PATIENCE + len(groups) / _SEALED_PER_SECOND):
                return self._has_manifest(table)
            there = self.sealed_groups(layout)
        if not all(group in there or self.seal(table, group) for group in groups):
            return False
        steps = [self._complete_earlier, self._create_manifest]
        if self.of_pass and not exists(self.objects, fmt.manifest_key(0)):
            # With only an earlier manifest, readers would lose the documents that came later. So
            # taps that are new get the newest first, and none if more units are to come.
            if self.of_pass.lacks_generation(table):
                return False
            steps.reverse()
        for step in steps:
            step(table)
        return True

    def _has_manifest(self, table: Table) -> bool:
        """Return whether a table has its manifest; raise CorruptError if it is another table's."""
        known = self.derived.read_manifest(table.layout)
        if known is not None and known.table != table.order:
            raise CorruptError(
                table.layout.manifest_key, f"belongs to another table than {fmt.UNITS}"
            )
        return known is not None

    def _complete_earlier(self, table: Table) -> None:
        """Create the missing manifests of earlier generations.

        They are created in order, so if a generation has one, those before it have theirs.
        """
        first = len(table.generations)  # (not their tables: those of thousands are large)
        while first and not exists(self.objects, fmt.manifest_key(first - 1)):
            first -= 1
        before = ManifestSums()
        for earlier in map(table.at, range(first, len(table.generations))):
            there = self.sealed_groups(earlier.layout)
            for group in range(earlier.layout.groups(len(earlier.units))):
                if group not in there:
                    self.seal(earlier, group)
            self._create_manifest(earlier, before)

    def _create_manifest(self, table: Table, before: ManifestSums | None = None) -> None:
        """Create the manifest of a table whose groups all have their segments."""
        manifest = table.layout.manifest_key
        settle(self.objects, table.layout.segment_key(0), manifest)
        body, file, columns = self.derived.derive(table, before)
        if body["rows"]:
            self.objects.create(file.key, columns)
            if not self.objects.create(manifest, fmt.encode_record("manifest", body)):
                self._has_manifest(table)

    def _is_done(self, table: Table, group: int) -> bool:
        return self.done_in(group).issuperset(table.layout.units_of(group, len(table.units)))

    def _appears(self, key: str, seconds: float) -> bool:
        """Wait for an object that another worker may create: up to four times so many seconds.

        The limit is drawn, so that not all of those that wait do it themselves.
        """
        limit, pause = system().monotonic() + system().uniform(seconds, 4 * seconds), 0.1
        while not exists(self.objects, key):
            if system().monotonic() > limit:
                return False
            system().sleep(pause)
            pause = min(_LONGEST_PAUSE, 1.5 * pause)
        return True

    # -- units of a dataset that may not be finished -------------------------------------------

    def segments_so_far(
        self, table: Table, besides: Collection[int] = ()
    ) -> Iterator[tuple[SegmentFile | None, Segment]]:
        """Yield the units that are done, by group: stored segments, or records where there is none.

        One segment is held at a time.

        Args:
            besides: groups to leave out.
        """
        layout, count = table.layout, len(table.units)
        sealed = self.sealed_groups(layout)
        there = sorted(sealed.union(self._open_groups(sealed)).difference(besides))
        groups = [group for group in there if group < layout.groups(count)]

        def read(group: int) -> tuple[SegmentFile | None, Segment]:
            if group in sealed:
                return sealed_segment(self.objects, layout.segment_key(group), layout)
            units = self.done_in(group).intersection(layout.units_of(group, count))
            found = mapped(self.read_done, sorted(units), self.objects.parallel)
            records = [done for done in found if done is not None]
            for done in records:
                self._refuse_other(table, done)
            return None, Segment.of(records, layout)

        return mapped(read, groups, self.objects.parallel)

    def catalog_so_far(self, table: Table) -> Catalog:
        """Return the units that are done."""
        parts, rows = list[SegmentFile | Segment](), [np.empty(0, np.int64)]
        for file, segment in self.segments_so_far(table):
            parts.append(file or segment)
            rows.append(segment.rows.copy())  # (a view would hold the whole segment)
        return Catalog(self.objects, self.layout, parts, np.concatenate(rows))

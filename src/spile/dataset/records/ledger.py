"""The records of a dataset: unit table, done records, manifest. Every commit goes through here.

A unit exists when its done record does. Records are created exclusively. A worker that is told that
a record already exists reads it back, because a lost answer to its own request looks the same.

What follows from the done records may be created by anyone: the segment of a group when all its
units are done (so that nobody lists or reads their records again), and the manifest when every
group has its segment. The worker that commits the last unit does it. Others, of which there may be
a thousand, do it only if it has not been done after a while.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from spile.core.errors import CorruptError, DriftError, NotCreatedError, StoreError
from spile.core.identity import contents_digest
from spile.core.index import INDEX_DTYPE
from spile.core.recipe import ResolvedRecipe
from spile.core.system import system
from spile.core.threads import mapped
from spile.dataset.codec.quantization import scales_from_json, scales_to_json
from spile.dataset.codec.shard import statistics_tensors
from spile.dataset.codec.statistics import TapStats
from spile.dataset.records import format as fmt
from spile.dataset.records.columns import (
    ColumnFile,
    Columns,
    column_file,
    columns_in,
    encode_columns,
    named_by_content,
    read_columns,
)
from spile.dataset.records.format import CURRENT, Done, KeyLayout, TapInfo
from spile.dataset.records.generations import Generation
from spile.dataset.records.segments import (
    Catalog,
    Segment,
    SegmentFile,
    Totals,
    columns_of,
    statistics_in,
)
from spile.dataset.records.unit_table import UnitColumns
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import Objects, exists
from spile.objects.local import settle

_SMALL_SHARD, _FEW_SHARDS = 64 << 20, 100_000
# How long to leave a manifest to the worker that committed the last unit, in seconds.
_PATIENCE, _SEALED_PER_SECOND, _LONGEST_PAUSE = 5.0, 100, 3.0


@dataclass(frozen=True)
class Table:
    """The unit table. `units` and `files` are JSON; corpus/ defines their meaning.

    Both are those of all generations; `recipe` and `fingerprint` are what the dataset began with.
    """

    recipe: ResolvedRecipe
    fingerprint: str
    taps: Mapping[str, TapInfo]
    files: tuple[Mapping[str, Any], ...]
    units: UnitColumns
    kept: float  # the share of tokens that become rows, estimated from a sample
    # For a shuffled dataset (`maintain/shuffle.py`), whose units no longer hold the rows of their
    # own documents: the seed, and the sum of all index entries (`maintain/scatter.py`).
    shuffled: Mapping[str, Any] | None = None
    tokenizer: Mapping[str, ColumnFile] = field(default_factory=dict[str, ColumnFile])
    # For a dataset made of units of others (`maintain/assemble.py`): each of those, and its units.
    made_of: tuple[Mapping[str, Any], ...] = ()
    generations: tuple[Generation, ...] = ()
    more_sources: tuple[str, ...] = ()  # of corpus files, beside the recipe's

    @property
    def layout(self) -> KeyLayout:
        return KeyLayout(tuple(each.before for each in self.generations))

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the files of the corpus were found."""
        if self.generations:
            return self.generations[-1].sources
        return (self.recipe.corpus_source, *self.more_sources)

    @property
    def whole_recipe(self) -> ResolvedRecipe:
        """The recipe with the files and the limits of all generations."""
        if not self.generations:
            return self.recipe
        newest = self.generations[-1]
        return replace(
            self.recipe,
            corpus_source=newest.sources[0],
            corpus=tuple(file["identity"] for file in self.files),
            max_docs=newest.max_docs,
            max_tokens=newest.max_tokens,
        )

    def at(self, generation: int) -> "Table":
        """Return the table as it was at a generation; 0: before the first."""
        if generation == len(self.generations):
            return self
        later = self.generations[generation:]
        return replace(
            self,
            files=self.files[: len(self.files) - sum(len(each.files) for each in later)],
            units=self.units.part(0, later[0].before),
            generations=self.generations[:generation],
        )

    def every_generation(self) -> "list[Table]":
        """Return the table as it was at each generation, the first of them before any."""
        return [self.at(number) for number in range(len(self.generations) + 1)]

    def grown(self, generation: Generation, units: UnitColumns) -> "Table":
        """Return the table with a generation's units and files after its own."""
        return replace(
            self,
            files=(*self.files, *generation.files),
            units=self.units.followed_by(units),
            generations=(*self.generations, generation),
        )

    def flattened(self) -> "Table":
        """Return the same units as one table, for a dataset that is made from this one."""
        if not self.generations:
            return self
        recipe = self.whole_recipe
        return replace(
            self,
            recipe=recipe,
            fingerprint=recipe.fingerprint(),
            generations=(),
            more_sources=self.sources[1:],
        )

    def to_json(self, units: ColumnFile) -> dict[str, Any]:
        """Return the record's body; `units`: the file that holds the units."""
        body: dict[str, Any] = {
            "recipe": self.recipe.to_json(),
            "fingerprint": self.fingerprint,
            "taps": {name: asdict(info) for name, info in self.taps.items()},
            "files": list(self.files),
            "units": {**units.to_json(), "count": len(self.units)},
            "kept": self.kept,
            "tokenizer": {name: file.to_json() for name, file in self.tokenizer.items()},
        }
        if self.more_sources:
            body["sources"] = list(self.sources)
        if self.shuffled:
            body["shuffled"] = dict(self.shuffled)
        if self.made_of:
            body["made_of"] = [dict(source) for source in self.made_of]
        return body

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: every tap and the index together."""
        return sum(info.row_bytes for info in self.taps.values()) + INDEX_DTYPE.itemsize

    def shard_limit(self, objects: Objects, wanted: int) -> int:
        """Return the largest size of a shard in a store.

        A bucket's client holds a shard until it is put whole. So shards are small there, and larger
        only where a dataset would otherwise have more than a hundred thousand of them.
        """
        if objects.most_streamed is None:
            return wanted
        expected = int(self.units.tokens.sum() * self.kept) * self.row_bytes
        return min(wanted, objects.most_streamed, max(_SMALL_SHARD, expected // _FEW_SHARDS))

    @property
    def order(self) -> str:
        """The identity of the order of the rows."""
        told = [self.fingerprint + "".join(f" +{each.before}" for each in self.generations)]
        if self.made_of:
            told.append(f"units {[source['units'] for source in self.made_of]}")
        if self.shuffled:
            told.append(f"shuffled {self.shuffled['seed']} {self.shuffled['drawn']}")
        return ", ".join(told)


@dataclass(frozen=True)
class Manifest:
    """The manifest, as stored: sums over all units, and the files that hold the units."""

    fingerprint: str
    totals: Totals
    segments: tuple[SegmentFile, ...]
    columns: ColumnFile


class Ledger:
    """The records of one dataset."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._layout: KeyLayout | None = None
        self._units = 0  # in the table
        self._committed: set[int] = set()  # groups not looked at since a commit there

    @property
    def url(self) -> str:
        """The place of the dataset, as `spile.open` takes it."""
        return self.objects.url

    def other_rows(self, done: Done, base: Done | None = None) -> str | None:
        """Return in what the rows of a unit differ from those it must have; None if in nothing.

        Only a pass knows what they must be: those of the dataset.

        Args:
            base: the dataset's record of the unit; read if it is not given.
        """
        return None

    @property
    def planned(self) -> Table | None:
        """The table to begin with, if it is known before a corpus is read: that of a pass."""
        return None

    @property
    def layout(self) -> KeyLayout:
        """Where the records of units lie: as the table says, or as a new one would."""
        if self._layout is None:
            table = self.read_table()
            self._layout = table.layout if table else CURRENT
        return self._layout

    def read_table(self) -> Table | None:
        """Return the unit table with all its generations, finished or not."""
        table = self._read_table()
        while table is not None and (more := self._read_generation(table)) is not None:
            table = more
        if table is not None:
            self._layout, self._units = table.layout, len(table.units)
        return table

    def _read_generation(self, table: Table) -> Table | None:
        """Return the table with the units of the next generation; None if there is none."""
        number = len(table.generations) + 1
        key = fmt.generation_key(number)
        body = self._read(key, "generation")
        if body is None:
            return None
        prefix = f"{fmt.generation_folder(number)}{fmt.UNIT_COLUMNS}"
        try:
            made = Generation.from_json(body, table.fingerprint, len(table.units), prefix)
            units = self._units_of(body["units"], prefix)
            if not len(units):
                raise ValueError("it adds no units")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptError(key, f"is not a generation ({fmt.shown(error)})") from error
        return table.grown(made, units)

    def _read_table(self) -> Table | None:
        body = self._read(fmt.UNITS, "units")
        if body is None:
            return None
        try:
            table = Table(
                recipe=ResolvedRecipe.from_json(body["recipe"]),
                fingerprint=body["fingerprint"],
                taps={n: TapInfo.from_json(info) for n, info in body["taps"].items()},
                files=tuple(body["files"]),
                units=self._units_of(body["units"], fmt.UNIT_COLUMNS),
                kept=float(body["kept"]),
                shuffled=body.get("shuffled"),
                tokenizer=_tokenizer_of(body.get("tokenizer", {})),
                made_of=tuple(body.get("made_of", ())),
                more_sources=tuple(body.get("sources", ())[1:]),
            )
            _audit_table(table)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptError(fmt.UNITS, f"is not a unit table ({fmt.shown(error)})") from error
        return table

    def _units_of(self, told: Any, prefix: str) -> UnitColumns:
        if not fmt.is_count(told["count"]):
            raise ValueError("the number of units is not a number")
        file = ColumnFile.from_json(told, prefix)
        return UnitColumns(told["count"], partial(read_columns, self.objects, file), file.key)

    def table(self) -> Table:
        """Return the unit table; raise StoreError if there is no dataset."""
        table = self.read_table()
        if table is None:
            raise StoreError(f"{self.objects.url}: no dataset there (no {fmt.UNITS})")
        return table

    def create_table(self, table: Table, tokenizer: Mapping[str, bytes] | None = None) -> Table:
        """Store the table, or return the one that came first.

        The files that it names are created before it. Their names follow from their content, so
        those of an interrupted try are used by the next one, or are removed by `gc`.

        Args:
            tokenizer: the tokenizer's files by name; by default, those that the table names, which
                must exist.
        """
        if not exists(self.objects, fmt.UNITS):
            if tokenizer:
                named = {name: _tokenizer_file(name, data) for name, data in tokenizer.items()}
                for name, data in tokenizer.items():
                    self.objects.create(named[name].key, data)
                table = replace(table, tokenizer=named)
            file, data = named_by_content(fmt.UNIT_COLUMNS, table.units.columns)
            self.objects.create(file.key, data)
            self.objects.create(fmt.UNITS, fmt.encode_record("units", table.to_json(file)))
        return self.table()

    def create_generation(self, table: Table) -> Table:
        """Store the newest generation of a table, or return the table with the one that came first.

        The file of its units is created before it, as that of a table is.
        """
        number, made = len(table.generations), table.generations[-1]
        units = table.units.part(made.before, len(table.units))
        prefix = f"{fmt.generation_folder(number)}{fmt.UNIT_COLUMNS}"
        file, data = named_by_content(prefix, units.columns)
        self.objects.create(file.key, data)
        body = made.to_json(table.fingerprint, file, len(units))
        self.objects.create(fmt.generation_key(number), fmt.encode_record("generation", body))
        return self.table()

    def read_tokenizer(self, table: Table) -> dict[str, bytes]:
        """Return the tokenizer's files by name; none if the dataset has none of its own.

        Raises:
            CorruptError: if a file is missing or damaged, or they are not the recipe's.
        """
        files = {name: self.tokenizer_data(name, file) for name, file in table.tokenizer.items()}
        wanted = table.recipe.model.get("tokenizer")
        known = [files[name] for name in fmt.TOKENIZER_FILES if name in files]
        if files and wanted is not None and contents_digest(known) != wanted:
            raise CorruptError(fmt.UNITS, "names another tokenizer than that of its recipe")
        return files

    def tokenizer_data(self, name: str, file: ColumnFile) -> bytes:
        """Return one of the tokenizer's files; raise CorruptError if it is missing or damaged."""
        advice = f"`spile verify --repair` restores it from the model's {name}"
        try:
            data = self.objects.get(file.key)
        except FileNotFoundError:
            raise CorruptError(file.key, f"is missing; {advice}") from None
        if column_file(file.key, data) != file:
            raise CorruptError(file.key, f"checksum does not match (damaged); {advice}")
        return data

    def check_weights(self, digests: Mapping[str, str]) -> None:
        """Record the weights' full hashes, or compare them with those recorded before."""
        body = {"tensors": dict(sorted(digests.items()))}
        if self.objects.create(fmt.MODEL, fmt.encode_record("model", body)):
            return
        stored = self.read_weights()
        if stored is None:
            raise self._unreadable(fmt.MODEL)
        self._refuse_other_weights(stored, digests, {*stored, *digests})

    def read_weights(self) -> dict[str, Any] | None:
        """Return the weights' full hashes by tensor; None if none are recorded yet."""
        found = self._read(fmt.MODEL, "model")
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
        body = self._read(fmt.SCALES, "scales")
        return None if body is None else scales_from_json(body, table.taps)

    def create_scales(self, table: Table, measured: Mapping[str, np.ndarray]) -> None:
        """Store the scales, unless others came first: those apply to every worker."""
        body = scales_to_json(measured)
        scales_from_json(body, table.taps)  # an unreadable record would block every worker forever
        self.objects.create(fmt.SCALES, fmt.encode_record("scales", body))

    def sealed_groups(self, layout: KeyLayout | None = None) -> set[int]:
        """Return the groups that have a segment, from a listing alone.

        Args:
            layout: that of an earlier generation, to look at the dataset as it was.
        """
        layout = layout or self.layout
        keys = {key for folder in layout.segment_folders for key in self.objects.list(folder)}
        found = {group for key in keys if (group := fmt.parse_segment_key(key)) is not None}
        return {group for group in found if layout.segment_key(group) in keys}

    def done_in(self, group: int) -> set[int]:
        """Return the units of a group that exist, from a listing alone."""
        prefix = self.layout.done_prefix(group)  # stripped: a worker does this for every unit
        names = (key[len(prefix) :] for key in self.objects.list(prefix))
        return {int(name[:8]) for name in names if fmt.DONE_NAME.fullmatch(name)}

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
        key = self.layout.done_key(unit)
        body = self._read(key, "done")
        if body is None:
            return None
        done = Done.from_json(key, body, self.layout)
        if done.unit != unit:
            raise CorruptError(key, f"is the record of unit {done.unit}")
        return done

    def holds_rows(self) -> bool:
        """Return whether a committed unit holds a row. An unreadable record counts as one."""
        for unit in sorted(self.done_units()):
            try:
                done = self.read_done(unit)
            except StoreError:
                return True
            if done is not None and done.rows:
                return True
        return False

    def commit(self, done: Done) -> bool:
        """Create the done record; return False if another attempt came first.

        Raises:
            NotCreatedError: if the record was not and will not be created: a file that it would
                name has vanished, or the disk is full.
            StoreError: if the record may exist, now or later.
        """
        key = self.layout.done_key(done.unit)
        gone = self.missing_files(done)
        if gone:
            # `gc` deletes the files of an attempt that lost; nothing else may delete them.
            stored = self.read_done(done.unit)
            if stored is not None:
                return stored.attempt == done.attempt
            raise NotCreatedError(
                f"{self.objects.url}/{gone[0]}: vanished before unit {done.unit} was committed; "
                "nothing but spile may delete there (`gc --abandoned` only when nothing runs): "
                "run the same command again"
            )
        if self.objects.create(key, fmt.encode_record("done", done.to_json())):
            self._committed.add(self.layout.group(done.unit))
            return True
        stored = self.read_done(done.unit)
        if stored is None:
            raise self._unreadable(key)
        if stored.attempt != done.attempt:
            return False
        self._committed.add(self.layout.group(done.unit))
        return True

    def missing_files(self, done: Done) -> list[str]:
        """Return the files that a record names but that are missing or of another size."""
        prefix = self.layout.attempt_prefix(done.unit, done.attempt)
        sizes = {entry.key: entry.size for entry in self.objects.entries(prefix)}
        return [file.key for file in done.files() if sizes.get(file.key) != file.bytes]

    # -- what follows from the done records ---------------------------------------------------

    @property
    def committed_groups(self) -> set[int]:
        """The groups that have not been looked at since a unit was committed there."""
        return self._committed.copy()

    def looks_after_commit(self, group: int) -> bool:
        """Return whether a unit of a group was committed here since the last call.

        Who looks at a group after each of its commits finds it done if the last one was its own,
        and is the one to seal it.
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
        must_be_done = partial(self._must_be_done, table)
        records = list(mapped(must_be_done, units, self.objects.parallel))
        read = partial(read_statistics, self.objects, taps=table.taps)
        statistics = mapped(read, records, self.objects.parallel)
        self.objects.create(key, encode_columns(derive_segment(records, statistics)))
        return True

    def complete(self, table: Table, *, patient: bool = False) -> bool:
        """Create the manifest if every unit is done; return whether they are.

        A dataset without any row gets no manifest: it is useless to readers, and another recipe may
        replace it.

        Args:
            patient: if the last unit was committed by another worker, leave the manifest to that
                one for a while: a fleet that ends would otherwise read all segments at once.
        """
        manifest = table.layout.manifest_key
        if exists(self.objects, manifest):
            return True
        own = [g for g in self.committed_groups if self.looks_after_commit(g)]
        is_last = any([self.seal(table, group) for group in own])
        layout = table.layout
        there, groups = self.sealed_groups(layout), range(layout.groups(len(table.units)))
        if patient and not is_last:
            if not all(group in there or self._is_done(table, group) for group in groups):
                return False
            if self._appears(manifest, _PATIENCE + len(groups) / _SEALED_PER_SECOND):
                return True
            there = self.sealed_groups(layout)
        if not all(group in there or self.seal(table, group) for group in groups):
            return False
        self._complete_earlier(table)
        settle(self.objects, layout.segment_key(0), manifest)
        body, file, columns = self._derived(table)
        if body["rows"]:
            self.objects.create(file.key, columns)
            self.objects.create(manifest, fmt.encode_record("manifest", body))
        return True

    def _complete_earlier(self, table: Table) -> None:
        """Create manifests of earlier generations that were never finished by themselves."""
        for earlier in table.every_generation()[:-1]:
            if not exists(self.objects, earlier.layout.manifest_key):
                self.complete(earlier)

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

    def _derived(self, table: Table) -> tuple[dict[str, Any], ColumnFile, bytes]:
        """Derive the manifest from all segments: its body, and the file of columns that it names.

        Statistics are merged unit by unit within a segment, and then segment by segment.
        """
        files, total = list[SegmentFile](), Totals()
        rows, statistics = list[np.ndarray](), dict[str, TapStats]()
        layout = table.layout
        keys = [layout.segment_key(group) for group in range(layout.groups(len(table.units)))]
        for file, segment in mapped(self._sealed, keys, self.objects.parallel):
            if segment.fingerprint != table.fingerprint:
                raise CorruptError(file.file.key, "belongs to another recipe")
            files.append(file)
            total.add(segment.totals())
            rows.append(segment.rows.copy())  # (a view would hold the whole segment)
            _merge(statistics, statistics_in(segment.columns, table.taps))
        columns = {"rows": np.concatenate(rows), **statistics_tensors(statistics)}
        file, data = named_by_content(layout.manifest_columns, columns)
        body = {
            "fingerprint": table.fingerprint,
            **asdict(total),
            "segments": [each.to_json() for each in files],
            "columns": file.to_json(),
        }
        return body, file, data

    def _sealed(self, key: str) -> tuple[SegmentFile, Segment]:
        data = self.objects.get(key)
        segment = Segment(key, columns_in(key, data), self.layout)
        file = column_file(key, data)
        return SegmentFile(file, len(segment), int(segment.rows.sum())), segment

    def manifests(self, table: Table) -> list[Manifest]:
        """Return the manifests of all generations that have one."""
        found = (self.read_manifest(each.layout) for each in table.every_generation())
        return [manifest for manifest in found if manifest is not None]

    def read_manifest(self, layout: KeyLayout | None = None) -> Manifest | None:
        """Return the manifest of the newest generation, or of the one that a layout is of."""
        layout = layout or self.layout
        body = self._read(layout.manifest_key, "manifest")
        return None if body is None else _manifest_of(body, layout)

    def catalog(self, table: Table, manifest: Manifest) -> Catalog:
        """Return the units of a finished dataset."""
        layout = table.layout
        groups = range(layout.groups(len(table.units)))
        wanted = [
            (layout.segment_key(g), len(layout.units_of(g, len(table.units)))) for g in groups
        ]
        if [(each.file.key, each.units) for each in manifest.segments] != wanted:
            raise CorruptError(layout.manifest_key, f"names other units than {fmt.UNITS}")
        rows = read_columns(self.objects, manifest.columns).get("rows")
        ends = np.cumsum([each.units for each in manifest.segments])[:-1]
        sums = [int(part.sum()) for part in np.split(rows, ends)] if rows is not None else []
        if rows is None or rows.dtype != np.int64 or sums != [e.rows for e in manifest.segments]:
            raise CorruptError(manifest.columns.key, "does not hold the rows of each unit")
        return Catalog(self.objects, layout, manifest.segments, rows)

    def segments_so_far(
        self, table: Table, besides: Collection[int] = ()
    ) -> Iterator[tuple[SegmentFile | None, Segment]]:
        """Yield the units that are done, by group: stored segments, or records where there is none.

        One segment is held at a time.

        Args:
            besides: groups to leave out.
        """
        layout = table.layout
        sealed = self.sealed_groups(layout)
        there = sorted(sealed.union(self._open_groups(sealed)).difference(besides))
        groups = [group for group in there if group < layout.groups(len(table.units))]

        def read(group: int) -> tuple[SegmentFile | None, Segment]:
            if group in sealed:
                return self._sealed(layout.segment_key(group))
            units = self.done_in(group).intersection(layout.units_of(group, len(table.units)))
            found = mapped(self.read_done, sorted(units), self.objects.parallel)
            records = [done for done in found if done is not None]
            for done in records:
                self._refuse_other(table, done)
            return None, Segment.of(records, self.layout)

        return mapped(read, groups, self.objects.parallel)

    def catalog_so_far(self, table: Table) -> Catalog:
        """Return the units that are done."""
        parts, rows = list[SegmentFile | Segment](), [np.empty(0, np.int64)]
        for file, segment in self.segments_so_far(table):
            parts.append(file or segment)
            rows.append(segment.rows.copy())  # (a view would hold the whole segment)
        return Catalog(self.objects, self.layout, parts, np.concatenate(rows))

    def manifest_follows(self, table: Table) -> bool:
        """Return whether the manifest follows from the segments."""
        return self._read(table.layout.manifest_key, "manifest") == self._derived(table)[0]

    def follows(self, table: Table, manifest: Manifest, records: Iterable[Done]) -> bool:
        """Return whether the manifest, and all that it names, follows from these records."""
        pairs = itertools.zip_longest(self.catalog(table, manifest), records)
        same = all(one and other and same_unit(one, other) for one, other in pairs)
        return same and self.manifest_follows(table)

    def _must_be_done(self, table: Table, unit: int) -> Done:
        done = self.read_done(unit)
        if done is None:
            raise CorruptError(self.layout.done_key(unit), "is missing")
        self._refuse_other(table, done)
        return done

    def _refuse_other(self, table: Table, done: Done) -> None:
        if done.fingerprint != table.fingerprint:
            raise CorruptError(self.layout.done_key(done.unit), "belongs to another recipe")

    # -- records in general -------------------------------------------------------------------

    def _unreadable(self, key: str) -> StoreError:
        return StoreError(
            f"{self.objects.url}/{key}: is said to exist, and cannot be read; "
            "run the same command again"
        )

    def _read(self, key: str, kind: str) -> dict[str, Any] | None:
        try:
            data = self.objects.get(key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.objects.url}/{key}: {error.strerror or error}") from error
        return fmt.decode_record(key, data, kind)


class Attempt:
    """The files of one attempt at a unit: removed, unless a record may name them.

    A commit that fails or is interrupted may still have created its record, or its request may
    still be on its way to a bucket. Removing the files then would lose a unit that exists. Files
    are therefore removed only in three cases: before the commit begins; when the record has been
    read back and names another attempt; or when it certainly was not created (`NotCreatedError`: a
    full disk). `gc` deletes any remaining files once the unit has a record; before that,
    `gc --abandoned` does. Nobody else calls `Ledger.commit` or `UnitWriter.discard`.

    with Attempt(ledger, writer) as attempt:
        writer.write(...)
        committed = attempt.commit(writer.finish(...))
    """

    def __init__(self, ledger: Ledger, writer: UnitWriter) -> None:
        self.writer, self._ledger = writer, ledger
        self._removable = True

    def commit(self, done: Done) -> bool:
        """Create the done record; if another came first, remove the files and return False."""
        self.release()
        try:
            if self._ledger.commit(done):
                return True
        except NotCreatedError:
            self._remove()
            raise
        self._remove()
        return False

    def release(self) -> None:
        """Keep the files from now on: a record may name them, whoever creates it."""
        self._removable = False

    def discard(self) -> None:
        """Remove the files, unless a record may name them."""
        if self._removable:
            self._removable = False
            self._remove()

    def _remove(self) -> None:
        # Cleaning up must not hide why an attempt ended.
        with contextlib.suppress(OSError, StoreError):
            self.writer.discard()

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _tokenizer_file(name: str, data: bytes) -> ColumnFile:
    digest = xxhash.xxh3_128_hexdigest(data)
    return ColumnFile(fmt.tokenizer_key(digest, name), len(data), digest)


def _tokenizer_of(told: Mapping[str, Any]) -> dict[str, ColumnFile]:
    files = {name: ColumnFile.from_json(file, fmt.TOKENIZER) for name, file in told.items()}
    for name, file in files.items():
        if file.key != fmt.tokenizer_key(file.digest, name):
            raise ValueError(f"not a file of a tokenizer: {file.key!r}")
    return files


def _audit_table(table: Table) -> None:
    if not all(isinstance(part, dict) for part in table.files):
        raise ValueError("a file is not an object")
    if not all(
        map(fmt.is_name, (table.fingerprint, *table.taps, *table.tokenizer, *table.sources))
    ):
        raise ValueError("a name is not a text")
    for source in table.made_of:
        runs = source["units"]
        numbers = [number for first, last in runs for number in (first, last)]
        if not all(map(fmt.is_count, (*numbers, source["first_doc"]))) or not all(
            map(fmt.is_name, (source["url"], source["fingerprint"]))
        ):
            raise ValueError("what it was made of is invalid")
    if table.shuffled is not None:
        told: dict[str, Any] = {**table.shuffled}
        if not fmt.is_count(told["seed"]) or not all(
            map(fmt.is_name, (told["entries"], told["drawn"]))
        ):
            raise ValueError("the order of its rows is invalid")


def _manifest_of(body: Mapping[str, Any], layout: KeyLayout) -> Manifest:
    key = layout.manifest_key
    try:
        counts = {name: body[name] for name in ("rows", "tokens", "documents", "bytes")}
        skipped: dict[str, Any] = body["skipped"]
        sound = all(map(fmt.is_count, (*counts.values(), *skipped.values())))
        sound = sound and all(map(fmt.is_name, (body["fingerprint"], *skipped)))
        segments = tuple(SegmentFile.from_json(each) for each in body["segments"])
        columns = ColumnFile.from_json(body["columns"], layout.manifest_columns)
        units, seconds = body["units"], body["seconds"]
        sound = sound and fmt.is_count(units) and fmt.is_amount(seconds)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(
            layout.manifest_key, f"is not a manifest ({fmt.shown(error)})"
        ) from error
    if not sound:
        raise CorruptError(key, "is not a manifest (a count or a name is invalid)")
    totals = Totals(units=units, seconds=float(seconds), skipped=skipped, **counts)
    return Manifest(body["fingerprint"], totals, segments, columns)


def named_files(table: Table, *manifests: Manifest) -> set[str]:
    """Return the keys of the files that hold the units of a table and of manifests."""
    keys = {table.units.key, *(file.key for file in table.tokenizer.values())}
    keys |= {each.columns.key for each in table.generations if each.columns}
    for manifest in manifests:
        keys |= {manifest.columns.key, *(each.file.key for each in manifest.segments)}
    return keys


def table_records(table: Table) -> dict[str, str]:
    """Return the keys of the records that a table and its generations have, and their kinds.

    A manifest need not exist.
    """
    numbers = range(1, len(table.generations) + 1)
    generations = {fmt.generation_key(number): "generation" for number in numbers}
    manifests = {each.layout.manifest_key: "manifest" for each in table.every_generation()}
    return {fmt.UNITS: "units", **generations, **manifests}


def same_unit(one: Done, other: Done) -> bool:
    """Return whether two records describe the same unit, whoever made it."""
    return all(
        vars(one)[name] == vars(other)[name]
        for name in vars(one)
        if name not in ("made_by", "fingerprint")
    )


def read_statistics(
    objects: Objects, done: Done, taps: Mapping[str, TapInfo]
) -> dict[str, TapStats]:
    """Return the statistics of a unit's rows, by tap; compare the file with its record."""
    file = done.statistics
    try:
        data = objects.get(file.key)
    except FileNotFoundError:
        raise CorruptError(file.key, "is missing") from None
    if len(data) != file.bytes:
        raise CorruptError(file.key, f"has {len(data)} bytes, {file.bytes} were written")
    if xxhash.xxh3_128_hexdigest(data) != file.digest:
        raise CorruptError(
            file.key, "checksum does not match (damaged, or another file in its place)"
        )
    return statistics_in(columns_in(file.key, data), taps)


def derive_segment(
    records: Sequence[Done], statistics: Iterable[Mapping[str, TapStats]]
) -> Columns:
    """Derive a segment from the done records of its group and the statistics that they name."""
    total: dict[str, TapStats] = {}
    for found in statistics:
        _merge(total, found)
    return {**columns_of(records), **statistics_tensors(total)}


def _merge(total: dict[str, TapStats], more: Mapping[str, TapStats]) -> None:
    for tap, stats in more.items():
        if tap in total:
            total[tap].merge(stats)
        else:
            total[tap] = replace(stats)


# -- predictions --------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The expected size and duration of a run, to compare with the actual ones.

    The first worker writes it, create-only, once its first steps have shown their speed. It is for
    people only: nothing else reads it, and a dataset without one is complete.
    """

    tokens: int
    rows: int
    bytes: int
    seconds: float | None  # for one slice like the first; None if its run was too short
    device: str
    mesh: str

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Prediction":
        try:
            found = cls(**body)
        except TypeError as error:
            raise CorruptError(fmt.PREDICTION, f"is none ({fmt.shown(error)})") from error
        counts = all(map(fmt.is_count, (found.tokens, found.rows, found.bytes)))
        if not counts or not all(map(fmt.is_name, (found.device, found.mesh))):
            raise CorruptError(fmt.PREDICTION, "is not a prediction (a count or a name is invalid)")
        if found.seconds is not None and not fmt.is_amount(found.seconds):
            raise CorruptError(fmt.PREDICTION, "is not a prediction (its seconds are not a number)")
        return found


def read_prediction(objects: Objects) -> Prediction | None:
    """Return the prediction; None if there is none or it is damaged (`verify` reports that)."""
    with contextlib.suppress(OSError, StoreError):
        data = objects.get(fmt.PREDICTION)
        return Prediction.from_json(fmt.decode_record(fmt.PREDICTION, data, "prediction"))
    return None


def create_prediction(objects: Objects, made: Prediction) -> None:
    """Store the prediction unless another came first. Errors are ignored."""
    with contextlib.suppress(StoreError):
        objects.create(fmt.PREDICTION, fmt.encode_record("prediction", asdict(made)))

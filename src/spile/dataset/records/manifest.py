"""The manifest, which names all segments: derived from them, and read.

It exists once every group has its segment. `Derived` reads what follows from the done records;
`Ledger.complete` creates it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from spile.core.errors import CorruptError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.columns import (
    ColumnFile,
    Ints,
    columns_in,
    named_by_content,
    read_columns,
)
from spile.dataset.codec.shard import statistics_tensors
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Done, KeyLayout, TapInfo
from spile.dataset.records.segments import (
    Catalog,
    Segment,
    SegmentFile,
    Totals,
    describes,
    merge_statistics,
    sealed_segment,
    statistics_in,
)
from spile.dataset.records.table import Table
from spile.objects import Objects, exists


@dataclass(frozen=True)
class Manifest:
    """The manifest, as stored: sums over all units, and the files that hold the units."""

    fingerprint: str
    table: str  # `Table.order` of its table
    totals: Totals
    segments: tuple[SegmentFile, ...]
    columns: ColumnFile


@dataclass
class ManifestSums:
    """The part of a manifest about the first segments of a table."""

    files: list[SegmentFile] = field(default_factory=list[SegmentFile])
    total: Totals = field(default_factory=Totals)
    rows: list[np.ndarray] = field(default_factory=list[np.ndarray])
    statistics: dict[str, TapStats] = field(default_factory=dict[str, TapStats])

    def add(self, file: SegmentFile, segment: Segment, taps: Mapping[str, TapInfo]) -> None:
        self.files.append(file)
        self.total.add(segment.totals())
        self.rows.append(segment.rows.copy())  # (a view would hold the whole segment)
        merge_statistics(self.statistics, statistics_in(segment.columns, taps))

    def copied(self) -> "ManifestSums":
        total = replace(self.total, skipped={**self.total.skipped})
        statistics = {tap: replace(stats) for tap, stats in self.statistics.items()}
        return ManifestSums([*self.files], total, [*self.rows], statistics)


class Derived:
    """What follows from the done records of a dataset: its segments and manifests."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def sealed_groups(self, layout: KeyLayout) -> set[int]:
        """Return the groups that have a segment, from a listing alone."""
        keys = {key for folder in layout.segment_folders for key in self._objects.list(folder)}
        found = {group for key in keys if (group := fmt.parse_segment_key(key)) is not None}
        return {group for group in found if layout.segment_key(group) in keys}

    def segments_of(self, table: Table, group: int) -> dict[str, Table]:
        """Return the keys of a group's segments that exist, each with its generation's table."""
        every = map(table.at, table.layout.generations_of(group))
        keys = {each.layout.segment_key(group): each for each in every}
        return {key: each for key, each in keys.items() if exists(self._objects, key)}

    def manifest_keys(self) -> set[str]:
        """Return the keys of all manifests that exist, even if they are no files."""
        found = {k for k in self._objects.list(fmt.GENERATIONS) if k.endswith(fmt.MANIFEST)}
        try:
            first = exists(self._objects, fmt.MANIFEST)
        except CorruptError:  # a pipe, for example
            first = True
        return found | ({fmt.MANIFEST} if first else set[str]())

    def read_manifest(self, layout: KeyLayout) -> Manifest | None:
        """Return the manifest of a layout's generation."""
        body = fmt.read_record(self._objects, layout.manifest_key, "manifest")
        return None if body is None else manifest_of(body, layout)

    def manifests(self, table: Table) -> list[Manifest]:
        """Return the manifests of all generations that have one."""
        found = (self.read_manifest(each.layout) for each in table.every_generation())
        return [manifest for manifest in found if manifest is not None]

    def catalog(self, table: Table, manifest: Manifest) -> Catalog:
        """Return the units of a finished dataset."""
        rows = self.rows_of_units(table, manifest)
        return Catalog(self._objects, table.layout, manifest.segments, rows)

    def rows_of_units(self, table: Table, manifest: Manifest) -> Ints:
        """Return the rows of each unit from a manifest; check that it belongs to the table."""
        if manifest.table != table.order:
            raise CorruptError(
                table.layout.manifest_key, f"belongs to another table than {fmt.UNITS}"
            )
        layout, count = table.layout, len(table.units)
        groups = range(layout.groups(count))
        wanted = [(layout.segment_key(g), len(layout.units_of(g, count))) for g in groups]
        if [(each.file.key, each.units) for each in manifest.segments] != wanted:
            raise CorruptError(layout.manifest_key, f"names other units than {fmt.UNITS}")
        rows = read_columns(self._objects, manifest.columns).get("rows")
        ends = np.cumsum([each.units for each in manifest.segments])[:-1]
        sums = [int(part.sum()) for part in np.split(rows, ends)] if rows is not None else []
        if rows is None or rows.dtype != np.int64 or sums != [e.rows for e in manifest.segments]:
            raise CorruptError(manifest.columns.key, "does not hold the rows of each unit")
        return rows

    def derive(
        self, table: Table, before: ManifestSums | None = None
    ) -> tuple[dict[str, Any], ColumnFile, bytes]:
        """Derive the manifest from all segments: its body, and the file of columns that it names.

        Statistics are merged unit by unit within a segment, and then segment by segment.

        Args:
            before: from the same call for an earlier generation. A generation changes the last
                groups alone, so that the sums of the others hold for it; those of all its groups
                but the last are added for the next.
        """
        layout = table.layout
        keys = [layout.segment_key(group) for group in range(layout.groups(len(table.units)))]
        known = [each.file.key for each in before.files] if before else []
        sums = before if before and known == keys[:-1][: len(known)] else ManifestSums()

        def read(key: str) -> tuple[SegmentFile, Segment]:
            return sealed_segment(self._objects, key, layout)

        left = keys[len(sums.files) :]
        for at, (file, segment) in enumerate(mapped(read, left, self._objects.parallel), 1):
            if segment.fingerprint != table.fingerprint:
                raise CorruptError(file.file.key, "belongs to another recipe")
            if at == len(left):  # the next generation may add units to this group
                sums = sums.copied()
            sums.add(file, segment, table.taps)
        columns = {"rows": np.concatenate(sums.rows), **statistics_tensors(sums.statistics)}
        file, data = named_by_content(layout.manifest_columns, columns)
        body = {
            "fingerprint": table.fingerprint,
            "table": table.order,
            **asdict(sums.total),
            "segments": [each.to_json() for each in sums.files],
            "columns": file.to_json(),
        }
        return body, file, data

    def manifest_follows(self, table: Table, before: ManifestSums | None = None) -> bool:
        """Return whether the manifest follows from the segments; `before` as in `derive`."""
        stored = fmt.read_record(self._objects, table.layout.manifest_key, "manifest")
        return stored == self.derive(table, before)[0]

    def unfounded(self, table: Table, read: Callable[[int], Done]) -> set[str]:
        """Return the keys of manifests that do not follow from the records of their units.

        Args:
            table: the newest; the manifests of all its generations are looked at.
            read: returns the record of a unit; each is read once.
        """
        whole = [
            number
            for number in range(len(table.generations) + 1)
            if exists(self._objects, fmt.manifest_key(number))
        ]
        newest, wrong = table.at(whole[-1] if whole else 0), set[str]()
        for group in range(newest.layout.groups(len(newest.units)) if whole else 0):
            units = newest.layout.units_of(group, len(newest.units))
            records = [*mapped(read, units, self._objects.parallel)]
            for each in map(table.at, newest.layout.generations_of(group)):
                had = len(each.layout.units_of(group, len(each.units)))
                key = each.layout.segment_key(group)
                wrong |= set[str]() if self._describes(key, records[:had]) else {key}
        before = ManifestSums()
        return {
            each.layout.manifest_key
            for each in map(table.at, whole)
            if not self._is_founded(each, wrong, before)
        }

    def _describes(self, key: str, records: Sequence[Done]) -> bool:
        """Return whether a segment follows from records, or is missing."""
        try:
            return describes(columns_in(key, self._objects.get(key)), records)
        except FileNotFoundError:
            return True  # as of a generation that was never completed
        except CorruptError:
            return False

    def _is_founded(self, table: Table, wrong: Collection[str], before: ManifestSums) -> bool:
        """Return whether a manifest follows from segments, none of which is wrong."""
        try:
            manifest = self.read_manifest(table.layout)
            if manifest is None or not named_by(manifest).isdisjoint(wrong):
                return False
            self.rows_of_units(table, manifest)
            return self.manifest_follows(table, before)
        except (CorruptError, FileNotFoundError):
            return False


def manifest_of(body: Mapping[str, Any], layout: KeyLayout) -> Manifest:
    """Return a manifest from the body of its record.

    Raises:
        CorruptError: if it is not one.
    """
    key = layout.manifest_key
    try:
        counts = {name: body[name] for name in ("rows", "tokens", "documents", "bytes")}
        skipped: dict[str, Any] = body["skipped"]
        sound = all(map(fmt.is_count, (*counts.values(), *skipped.values())))
        sound = sound and all(map(fmt.is_name, (body["fingerprint"], body["table"], *skipped)))
        segments = tuple(SegmentFile.from_json(each) for each in body["segments"])
        columns = ColumnFile.from_json(body["columns"], layout.manifest_columns)
        units, seconds = body["units"], body["seconds"]
        sound = sound and fmt.is_count(units) and fmt.is_amount(seconds)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(key, f"is not a manifest ({fmt.shown(error)})") from error
    if not sound:
        raise CorruptError(key, "is not a manifest (a count or a name is invalid)")
    totals = Totals(units=units, seconds=float(seconds), skipped=skipped, **counts)
    return Manifest(body["fingerprint"], body["table"], totals, segments, columns)


def named_files(table: Table, *manifests: Manifest) -> set[str]:
    """Return the keys of the files that hold the units of a table and of manifests."""
    keys = {table.units.key, *(file.key for file in table.tokenizer.values())}
    keys |= {each.columns.key for each in table.generations if each.columns}
    return keys.union(*map(named_by, manifests))


def named_by(manifest: Manifest) -> set[str]:
    """Return the keys of the files that a manifest names."""
    return {manifest.columns.key, *(each.file.key for each in manifest.segments)}


def same_unit(one: Done, other: Done) -> bool:
    """Return whether two records describe the same unit, whoever made it."""
    return all(
        vars(one)[name] == vars(other)[name]
        for name in vars(one)
        if name not in ("made_by", "fingerprint")
    )

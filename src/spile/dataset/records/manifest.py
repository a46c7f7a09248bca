"""The manifest, which names all segments: derived from them, and read.

It exists once every group has its segment. `Derived` reads what follows from the done records;
`Ledger.complete` creates it.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spile.core.errors import CorruptError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.columns import ColumnFile, named_by_content, read_columns
from spile.dataset.codec.shard import statistics_tensors
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Done, KeyLayout
from spile.dataset.records.segments import (
    Catalog,
    SegmentFile,
    Totals,
    merge_statistics,
    sealed_segment,
    statistics_in,
)
from spile.dataset.records.table import Table
from spile.objects import Objects


@dataclass(frozen=True)
class Manifest:
    """The manifest, as stored: sums over all units, and the files that hold the units."""

    fingerprint: str
    table: str  # `Table.order` of the table that it is of
    totals: Totals
    segments: tuple[SegmentFile, ...]
    columns: ColumnFile


class Derived:
    """What follows from the done records of a dataset: its segments and manifests."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def sealed_groups(self, layout: KeyLayout) -> set[int]:
        """Return the groups that have a segment, from a listing alone."""
        keys = {key for folder in layout.segment_folders for key in self._objects.list(folder)}
        found = {group for key in keys if (group := fmt.parse_segment_key(key)) is not None}
        return {group for group in found if layout.segment_key(group) in keys}

    def read_manifest(self, layout: KeyLayout) -> Manifest | None:
        """Return the manifest of the generation that a layout is of."""
        body = fmt.read_record(self._objects, layout.manifest_key, "manifest")
        return None if body is None else _manifest_of(body, layout)

    def manifests(self, table: Table) -> list[Manifest]:
        """Return the manifests of all generations that have one."""
        found = (self.read_manifest(each.layout) for each in table.every_generation())
        return [manifest for manifest in found if manifest is not None]

    def catalog(self, table: Table, manifest: Manifest) -> Catalog:
        """Return the units of a finished dataset."""
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
        return Catalog(self._objects, layout, manifest.segments, rows)

    def derive(self, table: Table) -> tuple[dict[str, Any], ColumnFile, bytes]:
        """Derive the manifest from all segments: its body, and the file of columns that it names.

        Statistics are merged unit by unit within a segment, and then segment by segment.
        """
        files, total = list[SegmentFile](), Totals()
        rows, statistics = list[np.ndarray](), dict[str, TapStats]()
        layout = table.layout
        keys = [layout.segment_key(group) for group in range(layout.groups(len(table.units)))]

        def read(key: str) -> tuple[SegmentFile, Any]:
            return sealed_segment(self._objects, key, layout)

        for file, segment in mapped(read, keys, self._objects.parallel):
            if segment.fingerprint != table.fingerprint:
                raise CorruptError(file.file.key, "belongs to another recipe")
            files.append(file)
            total.add(segment.totals())
            rows.append(segment.rows.copy())  # (a view would hold the whole segment)
            merge_statistics(statistics, statistics_in(segment.columns, table.taps))
        columns = {"rows": np.concatenate(rows), **statistics_tensors(statistics)}
        file, data = named_by_content(layout.manifest_columns, columns)
        body = {
            "fingerprint": table.fingerprint,
            "table": table.order,
            **asdict(total),
            "segments": [each.to_json() for each in files],
            "columns": file.to_json(),
        }
        return body, file, data

    def manifest_follows(self, table: Table) -> bool:
        """Return whether the manifest follows from the segments."""
        stored = fmt.read_record(self._objects, table.layout.manifest_key, "manifest")
        return stored == self.derive(table)[0]

    def follows(self, table: Table, manifest: Manifest, records: Iterable[Done]) -> bool:
        """Return whether the manifest, and all that it names, follows from these records."""
        pairs = itertools.zip_longest(self.catalog(table, manifest), records)
        same = all(one and other and same_unit(one, other) for one, other in pairs)
        return same and self.manifest_follows(table)


def _manifest_of(body: Mapping[str, Any], layout: KeyLayout) -> Manifest:
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
        raise CorruptError(
            layout.manifest_key, f"is not a manifest ({fmt.shown(error)})"
        ) from error
    if not sound:
        raise CorruptError(key, "is not a manifest (a count or a name is invalid)")
    totals = Totals(units=units, seconds=float(seconds), skipped=skipped, **counts)
    return Manifest(body["fingerprint"], body["table"], totals, segments, columns)


def named_files(table: Table, *manifests: Manifest) -> set[str]:
    """Return the keys of the files that hold the units of a table and of manifests."""
    keys = {table.units.key, *(file.key for file in table.tokenizer.values())}
    keys |= {each.columns.key for each in table.generations if each.columns}
    for manifest in manifests:
        keys |= {manifest.columns.key, *(each.file.key for each in manifest.segments)}
    return keys


def same_unit(one: Done, other: Done) -> bool:
    """Return whether two records describe the same unit, whoever made it."""
    return all(
        vars(one)[name] == vars(other)[name]
        for name in vars(one)
        if name not in ("made_by", "fingerprint")
    )

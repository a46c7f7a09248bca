"""The done records of a group of units, merged into columns, and all units of a dataset.

A segment follows from the done records of its group and from the statistics that they name, so any
worker that finds a group done may create it, and all would create the same bytes. `Catalog` gives
the units of a dataset one by one: it holds the rows of each, and loads a segment only when one of
its units is asked for.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from spile.core.errors import CorruptError
from spile.dataset import format as fmt
from spile.dataset.codec.columns import (
    ColumnFile,
    Columns,
    Ints,
    check_counts,
    check_ends,
    check_texts,
    column_file,
    columns_in,
    ends_of,
    ints,
    read_columns,
    run_of,
    text_at,
    text_columns,
    texts_at,
)
from spile.dataset.codec.shard import statistics_tensors
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Done, KeyLayout, Shard, TapInfo
from spile.objects import Objects

_COUNTS = ("unit", "rows", "tokens", "documents", "contexts")
_TEXTS = ("attempt", "made_from", "text_digest")
_FILE_COUNTS = ("first", "count", "bytes")
_FILE_TEXTS = ("tap", "name", "digest", "etag")
_OPEN_SEGMENTS = 64  # each a memory map, or half a megabyte
_KEPT_UNITS = 1 << 12  # records of units, once made
_TOGETHER = fmt.GROUP_UNITS  # records in memory are cut like groups


@dataclass
class Totals:
    """Sums over units."""

    units: int = 0
    rows: int = 0
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    seconds: float = 0.0  # that slices spent
    skipped: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, other: "Totals") -> None:
        for name in ("units", "rows", "tokens", "documents", "bytes", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count


@dataclass(frozen=True)
class TapFiles:
    """Sums over the files of a tap, or over those of one kind beside the shards."""

    units: int = 0  # that have such a file
    files: int = 0
    rows: int = 0
    bytes: int = 0

    def __add__(self, other: "TapFiles") -> "TapFiles":
        return TapFiles(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Segment:
    """The records of some units, as columns.

    What sums need is checked at once, and the rest when a record is asked for: whoever adds up a
    large dataset reads all of its segments.
    """

    def __init__(self, key: str, columns: Columns, layout: KeyLayout) -> None:
        """Check and take columns; `key` is their name in errors."""
        self._columns, self._key, self._layout = columns, key, layout
        unit = columns.get("unit")
        count = len(unit) if unit is not None and unit.ndim == 1 else 0
        check_counts(key, columns, _COUNTS, count)
        files = check_ends(key, columns, "ends/files", count)
        check_counts(key, columns, ["file/bytes"], files)
        skips = check_ends(key, columns, "ends/skipped", count)
        check_counts(key, columns, ["skipped/count"], skips)
        check_texts(key, columns, "skipped/reason", skips)
        for name in fmt.MADE_WHEN:
            found = columns.get(name)
            if found is None or found.dtype != np.float64 or found.shape != (count,):
                raise CorruptError(key, f"does not hold {name} of {count}")

    @classmethod
    def of(cls, records: Sequence[Done], layout: KeyLayout) -> "Segment":
        """Return records as a segment, without statistics."""
        return cls("records", columns_of(records), layout)

    @cached_property
    def columns(self) -> Columns:
        """All columns, checked."""
        key, columns, files = self._key, self._columns, len(self._columns["file/bytes"])
        for name in _TEXTS:
            check_texts(key, columns, name, len(self))
        check_texts(key, columns, "fingerprint", 1)
        check_counts(key, columns, [f"file/{name}" for name in _FILE_COUNTS], files)
        for name in _FILE_TEXTS:
            check_texts(key, columns, f"file/{name}", files)
        return columns

    def __len__(self) -> int:
        return len(self._columns["unit"])

    @property
    def units(self) -> Ints:
        return self._columns["unit"]

    @property
    def rows(self) -> Ints:
        return self._columns["rows"]

    @property
    def tokens(self) -> Ints:
        return self._columns["tokens"]

    @property
    def finished(self) -> npt.NDArray[np.float64]:
        """When each unit was done, in seconds since the epoch; NaN where it is not known."""
        return self._columns["finished_at"]

    @property
    def fingerprint(self) -> str:
        return text_at(self.columns, "fingerprint", 0)

    @property
    def index_digests(self) -> list[str]:
        """The digest of each unit's index file: the same bytes are the same rows."""
        columns = self.columns
        taps = texts_at(columns, "file/tap", slice(0, len(columns["file/bytes"])))
        files = (at for at, tap in enumerate(taps) if tap == "index")
        return [text_at(columns, "file/digest", at) for at in files]

    def done(self, at: int) -> Done:
        """Return the record of a unit by its place; its `made_by` has only the times."""
        columns = self.columns
        run = run_of(columns["ends/files"], at)
        counts = zip(*(columns[f"file/{n}"][run].tolist() for n in _FILE_COUNTS), strict=True)
        texts = zip(*(texts_at(columns, f"file/{n}", run) for n in _FILE_TEXTS), strict=True)
        unit, attempt = int(columns["unit"][at]), text_at(columns, "attempt", at)
        prefix = self._layout.attempt_prefix(unit, attempt)
        files = [
            Shard(tap, prefix + name, first, count, size, digest, etag)
            for (first, count, size), (tap, name, digest, etag) in zip(counts, texts, strict=True)
        ]
        beside = {file.tap: file for file in files if file.tap in fmt.BESIDE_TAPS}
        if len(beside) < len(fmt.BESIDE_TAPS):
            raise CorruptError(self._key, f"names no index, statistics or documents of unit {unit}")
        skips = run_of(columns["ends/skipped"], at)
        reasons = texts_at(columns, "skipped/reason", skips)
        when = {name: float(columns[name][at]) for name in fmt.MADE_WHEN}
        return Done(
            unit=unit,
            attempt=attempt,
            fingerprint=self.fingerprint,
            rows=int(columns["rows"][at]),
            tokens=int(columns["tokens"][at]),
            documents=int(columns["documents"][at]),
            contexts=int(columns["contexts"][at]),
            skipped=dict(zip(reasons, columns["skipped/count"][skips].tolist(), strict=True)),
            made_from=text_at(columns, "made_from", at),
            text_digest=text_at(columns, "text_digest", at),
            shards=tuple(file for file in files if file.tap not in beside),
            index=beside["index"],
            statistics=beside["statistics"],
            documents_table=beside["documents"],
            made_by={name: value for name, value in when.items() if not math.isnan(value)},
        ).checked(self._key, self._layout)

    def bytes_of_units(self, taps: Collection[str]) -> Ints:
        """Return the bytes of each unit's files, of some taps or kinds."""
        columns = self.columns
        size = columns["file/bytes"]
        names = texts_at(columns, "file/tap", slice(0, len(size)))
        chosen = np.array([name in taps for name in names], np.bool_)
        before = np.concatenate([[0], np.cumsum(np.where(chosen, size, 0))])
        return np.diff(before[columns["ends/files"]], prepend=0)

    def files_of_taps(self) -> dict[str, TapFiles]:
        """Return the totals of the files of each tap."""
        columns = self.columns
        taps = texts_at(columns, "file/tap", slice(0, len(columns["file/bytes"])))
        unit = np.repeat(np.arange(len(self)), np.diff(columns["ends/files"], prepend=0))
        found: dict[str, TapFiles] = {}
        for tap in dict.fromkeys(taps):
            chosen = np.array([each == tap for each in taps], np.bool_)
            found[tap] = TapFiles(
                units=len(np.unique(unit[chosen])),
                files=int(chosen.sum()),
                rows=int(columns["file/count"][chosen].sum()),
                bytes=int(columns["file/bytes"][chosen].sum()),
            )
        return found

    def totals(self) -> Totals:
        columns = self._columns
        skipped: dict[str, int] = {}
        reasons = texts_at(columns, "skipped/reason", slice(0, len(columns["skipped/count"])))
        for reason, count in zip(reasons, columns["skipped/count"].tolist(), strict=True):
            skipped[reason] = skipped.get(reason, 0) + count
        return Totals(
            units=len(self),
            rows=int(columns["rows"].sum()),
            tokens=int(columns["tokens"].sum()),
            documents=int(columns["documents"].sum()),
            bytes=int(columns["file/bytes"].sum()),
            seconds=float(np.nansum(columns["seconds"])),
            skipped=skipped,
        )


def columns_of(records: Sequence[Done]) -> dict[str, np.ndarray]:
    """Return records as columns."""
    files = [file for done in records for file in done.files()]
    skipped = [item for done in records for item in sorted(done.skipped.items())]
    columns: dict[str, np.ndarray] = {
        name: ints(getattr(done, name) for done in records) for name in _COUNTS
    }
    for name in _TEXTS:
        columns |= text_columns(name, [getattr(done, name) for done in records])
    columns |= text_columns("fingerprint", [records[0].fingerprint if records else ""])
    columns["ends/files"] = ends_of(len(done.files()) for done in records)
    for name in _FILE_COUNTS:
        columns[f"file/{name}"] = ints(getattr(file, name) for file in files)
    columns |= text_columns("file/name", [file.key.rpartition("/")[2] for file in files])
    for name in ("tap", "digest", "etag"):
        columns |= text_columns(f"file/{name}", [getattr(file, name) for file in files])
    columns["ends/skipped"] = ends_of(len(done.skipped) for done in records)
    columns["skipped/count"] = ints(count for _, count in skipped)
    columns |= text_columns("skipped/reason", [reason for reason, _ in skipped])
    for name in fmt.MADE_WHEN:
        told = (done.made_by.get(name) for done in records)
        columns[name] = np.array([t if fmt.is_amount(t) else np.nan for t in told], np.float64)
    return columns


def statistics_in(columns: Columns, taps: Mapping[str, Any]) -> dict[str, TapStats]:
    """Return the statistics that a segment, or the manifest's columns, hold."""
    return {tap: TapStats.from_tensors(tap, columns, info.channels) for tap, info in taps.items()}


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
        merge_statistics(total, found)
    return {**columns_of(records), **statistics_tensors(total)}


def describes(columns: Columns, records: Sequence[Done]) -> bool:
    """Return whether a segment follows from the records of its units, statistics aside."""
    return all(
        name in columns and np.array_equal(columns[name], column, equal_nan=True)
        for name, column in columns_of(records).items()
    )


def merge_statistics(total: dict[str, TapStats], more: Mapping[str, TapStats]) -> None:
    """Add statistics to totals, by tap."""
    for tap, stats in more.items():
        if tap in total:
            total[tap].merge(stats)
        else:
            total[tap] = replace(stats)


# -- all units ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentFile:
    """A stored segment, as the manifest names it."""

    file: ColumnFile
    units: int
    rows: int

    def to_json(self) -> dict[str, Any]:
        return {**self.file.to_json(), "units": self.units, "rows": self.rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "SegmentFile":
        if not fmt.is_count(value["units"]) or not fmt.is_count(value["rows"]):
            raise ValueError(f"not a segment: {value!r}")
        file = ColumnFile.from_json(value, "")
        if fmt.parse_segment_key(file.key) is None:
            raise ValueError(f"not a segment: {value!r}")
        return cls(file, value["units"], value["rows"])


class Catalog(Sequence[Done]):
    """The units of a dataset that are done, in order, by their place among those."""

    def __init__(
        self,
        objects: Objects,
        layout: KeyLayout,
        parts: Sequence[SegmentFile | Segment],
        rows: Ints | None = None,
    ) -> None:
        """Args:
        rows: those of each unit; taken from the segments if they are not given.
        """
        self.objects, self.layout, self.parts = objects, layout, list(parts)
        self._passes: Mapping[str, Catalog] = {}
        self._segment = lru_cache(_OPEN_SEGMENTS)(self._load)
        self._done = lru_cache(_KEPT_UNITS)(self._read)
        counts = (part.units if isinstance(part, SegmentFile) else len(part) for part in parts)
        self._ends = ends_of(counts)
        if rows is None:
            none = np.empty(0, np.int64)
            rows = np.concatenate([none, *(segment.rows for segment in self.segments())])
        if len(rows) != len(self):
            raise CorruptError(fmt.MANIFEST, "does not hold the rows of each of its units")
        if len(self.parts) <= _OPEN_SEGMENTS:
            # Damage is found at once, and a repair beside a reader takes nothing away from it.
            for _ in self.segments():
                pass
        self.rows = rows
        self.starts: Ints = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])

    @classmethod
    def of(cls, objects: Objects, layout: KeyLayout, records: Iterable[Done]) -> "Catalog":
        """Return a catalog of records in memory."""
        known = list(records)
        groups = (known[at : at + _TOGETHER] for at in range(0, len(known), _TOGETHER))
        return cls(objects, layout, [Segment.of(group, layout) for group in groups])

    def with_passes(self, passes: "Mapping[str, Catalog]") -> "Catalog":
        """Return the same units, each with the shards of passes as well.

        A shard of a pass has a key of the dataset. All other files of a unit are the dataset's own.

        Args:
            passes: by folder; they hold the same units, in the same order.
        """
        for prefix, units in passes.items():
            pairs = (units.units, self.units), (units.rows, self.rows)
            if not all(np.array_equal(mine, theirs) for mine, theirs in pairs):
                raise CorruptError(prefix + fmt.MANIFEST, "has other rows than the dataset")
        joined = copy.copy(self)  # (what this one has loaded is not loaded again)
        joined._passes, joined._done = passes, lru_cache(_KEPT_UNITS)(joined._read)
        return joined

    def segments(self) -> Iterator[Segment]:
        """Yield the segments in order, each loaded when it is its turn."""
        return (self._segment(number) for number in range(len(self.parts)))

    @cached_property
    def units(self) -> Ints:
        """The id of each unit, ascending."""
        return np.concatenate([np.empty(0, np.int64), *map(_units_of, self.parts)])

    def find(self, unit: int) -> int | None:
        """Return the place of a unit; None if it is not done."""
        at = int(np.searchsorted(self.units, unit))
        return at if at < len(self) and self.units[at] == unit else None

    def only(self, wanted: Ints) -> "Catalog":
        """Return some of the units, by their ids, which ascend and are done."""
        if np.array_equal(wanted, self.units):
            return self
        places = np.searchsorted(self.units, wanted).tolist()
        return Catalog.of(self.objects, self.layout, map(self.__getitem__, places))

    def totals(self) -> Totals:
        total = Totals()
        for segment in self.segments():
            total.add(segment.totals())
        total.bytes += sum(units.totals().bytes for units in self._passes.values())
        return total

    def files_of_taps(self) -> dict[str, TapFiles]:
        """Return the totals of the files of each tap, in the order of a unit's files."""
        total: dict[str, TapFiles] = {}
        for segment in self.segments():
            for tap, more in segment.files_of_taps().items():
                total[tap] = total.get(tap, TapFiles()) + more
        return total

    def bytes_of(self, wanted: Callable[[str], bool]) -> int:
        """Return the bytes of files, chosen by their tap."""
        own = sum(of.bytes for tap, of in self.files_of_taps().items() if wanted(tap))
        return own + sum(units.bytes_of(wanted) for units in self._passes.values())

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, at: int) -> Done: ...
    @overload
    def __getitem__(self, at: slice) -> list[Done]: ...
    def __getitem__(self, at: int | slice) -> Done | list[Done]:
        if isinstance(at, slice):
            return [self._done(number) for number in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return self._done(at % len(self))

    def __iter__(self) -> Iterator[Done]:
        own = (segment.done(at) for segment in self.segments() for at in range(len(segment)))
        return map(self._joined, own, *self._passes.values())

    def _read(self, at: int) -> Done:
        number = int(np.searchsorted(self._ends, at, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        done = self._segment(number).done(at - before)
        if done.rows != self.rows[at]:
            raise CorruptError(fmt.MANIFEST, f"says another number of rows of unit {done.unit}")
        return self._joined(done, *(units[at] for units in self._passes.values()))

    def _joined(self, done: Done, *others: Done) -> Done:
        """Return the record of a unit with the shards of its records in passes."""
        if not others:
            return done
        shards = [
            replace(shard, key=prefix + shard.key)
            for prefix, other in zip(self._passes, others, strict=True)
            for shard in other.shards
        ]
        return replace(done, shards=(*done.shards, *shards))

    def _load(self, number: int) -> Segment:
        part = self.parts[number]
        if isinstance(part, Segment):
            return part
        return read_segment(self.objects, part, self.layout)


def _units_of(part: SegmentFile | Segment) -> Ints:
    if isinstance(part, Segment):
        return part.units
    first = (fmt.parse_segment_key(part.file.key) or 0) * fmt.GROUP_UNITS
    return np.arange(first, first + part.units)


def read_segment(objects: Objects, part: SegmentFile, layout: KeyLayout) -> Segment:
    """Read a segment, and check that it holds the units of its group."""
    key = part.file.key
    try:
        columns = read_columns(objects, part.file)
    except CorruptError as error:
        why = str(error).removeprefix(f"{key}: ")
        raise CorruptError(
            key, f"{why}; if a repair has replaced it, open the dataset again"
        ) from error
    segment = Segment(key, columns, layout)
    if not np.array_equal(segment.units, _units_of(part)):
        raise CorruptError(key, "holds other units than those of its group")
    if int(segment.rows.sum()) != part.rows:
        raise CorruptError(key, "does not hold as many rows as the manifest says")
    return segment


def sealed_segment(objects: Objects, key: str, layout: KeyLayout) -> tuple[SegmentFile, Segment]:
    """Read a segment that no manifest names yet; return it as a manifest would name it, too."""
    data = objects.get(key)
    segment = Segment(key, columns_in(key, data), layout)
    return SegmentFile(column_file(key, data), len(segment), int(segment.rows.sum())), segment

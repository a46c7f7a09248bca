"""The units of a table as columns: a million of them open at once and are looked up by search.

`UnitColumns` is a sequence of units, each made when it is asked for. Code that needs a number of
every unit uses the column.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, overload

import numpy as np

from spile.core.errors import CorruptError
from spile.core.threads import mapped
from spile.core.units import Span, Unit
from spile.dataset import format as fmt
from spile.dataset.codec.columns import (
    ColumnFile,
    Columns,
    Ints,
    check_counts,
    check_ends,
    check_texts,
    ends_of,
    ints,
    named_by_content,
    read_columns,
    run_of,
    text_columns,
    texts_at,
)
from spile.objects import Objects

_COUNTS = ("first_doc", "num_docs", "tokens")
_SPAN = ("file", "first", "count", "start", "stop", "before")
_LISTS = ("skip", "packed")  # columns with any number of entries a unit
_NONE = -1  # stored for a span that has no `doc`


class UnitColumns(Sequence[Unit]):
    """The units of a table. A unit's id is its place."""

    def __init__(self, count: int, load: Callable[[], Columns], key: str = fmt.UNITS) -> None:
        """Args:
        load: returns the columns; called when one is first needed.
        key: the name of their file in errors.
        """
        self._count, self._load, self.key = count, load, key
        self._columns: Columns | None = None

    @classmethod
    def of(cls, units: Sequence[Unit], first: int = 0) -> "UnitColumns":
        """Return units as columns; raise ValueError if one is invalid.

        Args:
            first: the id of the first; that of a generation's units follows those before.
        """
        if isinstance(units, UnitColumns):
            return units
        columns = _columns_of(units, first)
        return cls(len(units), lambda: columns)

    @classmethod
    def joined(cls, parts: "Sequence[UnitColumns]", parallel: int = 1) -> "UnitColumns":
        """Return units one after the other, as one table.

        Args:
            parallel: how many parts are loaded at a time.
        """

        def load() -> Columns:
            return _joined([*mapped(UnitColumns._loaded, parts, parallel)])

        return cls(sum(map(len, parts)), load, parts[0].key)

    def part(self, first: int, stop: int) -> "UnitColumns":
        """Return consecutive units; their ids are counted from 0."""
        return UnitColumns(stop - first, lambda: _part(self.columns, first, stop), self.key)

    def merged(self, ends: Ints) -> "UnitColumns":
        """Return one unit for each run of consecutive units.

        Args:
            ends: where each run ends; units after the last run are left out.
        """
        taken = self.part(0, int(ends[-1]) if len(ends) else 0)
        return UnitColumns(len(ends), lambda: _merged(taken, ends), self.key)

    def stored(self) -> "UnitColumns":
        """Return the same units, named by the key of the file that will hold them."""
        file, _ = named_by_content(fmt.UNIT_COLUMNS, self.columns)
        return UnitColumns(self._count, lambda: self.columns, file.key)

    def moved(self, docs: int, files: int) -> "UnitColumns":
        """Return the units of a corpus that follows another of so many documents and files."""
        columns = dict(self.columns)
        for name, by in (("first_doc", docs), ("skip", docs), ("span/file", files)):
            columns[name] = columns[name] + by
        own = columns["span/doc"]
        columns["span/doc"] = np.where(own == _NONE, own, own + docs)
        return UnitColumns(len(self), lambda: columns, self.key)

    @property
    def columns(self) -> Columns:
        if self._columns is None:
            self._columns = self._loaded()
        return self._columns

    def _loaded(self) -> Columns:
        """Return the columns, and do not keep them: they are needed once, to be joined."""
        if self._columns is not None:
            return self._columns
        columns = self._load()
        _check(self.key, columns, self._count)
        return columns

    @property
    def first_doc(self) -> Ints:
        """The ordinal of the first document of each unit."""
        return self.columns["first_doc"]

    @property
    def num_docs(self) -> Ints:
        return self.columns["num_docs"]

    @property
    def tokens(self) -> Ints:
        """The estimated tokens of each unit."""
        return self.columns["tokens"]

    @cached_property
    def doc_runs(self) -> tuple[Ints, Ints, Ints]:
        """The runs of documents of all units: the unit, first document and length of each."""
        if not (self.columns["span/doc"] >= 0).any():
            return np.arange(self._count), self.first_doc, self.num_docs
        runs = [(unit.id, *run) for unit in self for run in unit.doc_runs]
        unit, first, count = (ints(each) for each in zip(*runs, strict=True))
        return unit, first, count

    @property
    def stop_doc(self) -> Ints:
        """The ordinal after the last document of each unit."""
        stop = self.first_doc + self.num_docs
        spans = np.diff(self.columns["ends/spans"], prepend=0)
        unit = np.repeat(np.arange(self._count), spans)
        for number in map(int, np.unique(unit[self.columns["span/doc"] != _NONE])):
            first, count = self[number].doc_runs[-1]
            stop[number] = first + count
        return stop

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Unit: ...
    @overload
    def __getitem__(self, at: slice) -> list[Unit]: ...
    def __getitem__(self, at: int | slice) -> Unit | list[Unit]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(self._count))]
        if not -self._count <= at < self._count:
            raise IndexError(at)
        number, columns = at % self._count, self.columns
        run = run_of(columns["ends/spans"], number)
        lists = (columns[n][run_of(columns[f"ends/{n}"], number)].tolist() for n in _LISTS)
        digests = texts_at(columns, "span/digest", run)
        first_docs = columns["span/doc"][run].tolist()
        parts = zip(*(columns[f"span/{name}"][run].tolist() for name in _SPAN), strict=True)
        spans = tuple(
            Span(
                **dict(zip(_SPAN, values, strict=True)),
                digest=digest,
                doc=None if doc == _NONE else doc,
            )
            for values, digest, doc in zip(parts, digests, first_docs, strict=True)
        )
        first, docs, tokens = (int(columns[name][number]) for name in _COUNTS)
        return Unit(number, first, docs, tokens, spans, *map(tuple, lists))

    def __iter__(self) -> Iterator[Unit]:
        return (self[number] for number in range(self._count))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnitColumns) or len(self) != len(other):
            return NotImplemented if not isinstance(other, UnitColumns) else False
        mine, theirs = self.columns, other.columns
        return mine.keys() == theirs.keys() and all(
            np.array_equal(mine[name], theirs[name]) for name in mine
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _again, (self._count, {k: np.array(v) for k, v in self.columns.items()}, self.key)


def _again(count: int, columns: Columns, key: str) -> UnitColumns:
    return UnitColumns(count, lambda: columns, key)


# The columns that say where each unit's runs end, or each span's text; and what they count.
_ENDS = {
    "ends/spans": "span/first",
    **{f"ends/{name}": name for name in _LISTS},
    "ends/span/digest": "span/digest",
}


def _joined(parts: Sequence[Columns]) -> dict[str, np.ndarray]:
    """Return columns one after the other; where runs end is counted through all of them."""
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name, counted in _ENDS.items():
        before = np.cumsum([0, *(len(part[counted]) for part in parts[:-1])], dtype=np.int64)
        joined[name] += np.repeat(before, [len(part[name]) for part in parts])
    return joined


def _part(columns: Columns, first: int, stop: int) -> dict[str, np.ndarray]:
    """Return the columns of consecutive units; where runs end is counted from their first."""

    def run(ends: str, of: slice) -> slice:
        before, last = (int(columns[ends][at - 1]) if at else 0 for at in (of.start, of.stop))
        return slice(before, last)

    units = slice(first, stop)
    spans = run("ends/spans", units)
    texts = run("ends/span/digest", spans)
    runs = {name: spans for name in columns if name.startswith(("span/", "ends/span/"))}
    runs |= {"span/digest": texts, **{name: run(f"ends/{name}", units) for name in _LISTS}}
    starts = {name: runs[counted].start for name, counted in _ENDS.items()}
    return {
        name: column[runs.get(name, units)] - starts[name]
        if name in starts
        else column[runs.get(name, units)]
        for name, column in columns.items()
    }


def _merged(units: UnitColumns, ends: Ints) -> dict[str, np.ndarray]:
    """Return the columns of runs of units: sums, and the spans and skips of all of a run."""
    columns, starts = units.columns, np.concatenate([[0], ends])[:-1].astype(np.int64)
    # In a permuted corpus, a unit's documents need not follow those of the unit before.
    spans = np.concatenate([[0], columns["ends/spans"]]).astype(np.int64)
    moved = np.ones(len(units), np.bool_)
    moved[1:] = units.first_doc[1:] != units.stop_doc[:-1]
    moved[starts] = False
    moved &= np.diff(spans) > 0
    docs = columns["span/doc"].copy()
    docs[spans[:-1][moved]] = units.first_doc[moved]
    sums = {name: np.add.reduceat(columns[name], starts) for name in ("num_docs", "tokens")}
    of_last = {name: columns[name][ends - 1] for name in ("ends/spans", "ends/skip")}
    first = {"first_doc": columns["first_doc"][starts]}
    packed, packs = _packed_apart(columns, ends)
    return {
        **columns,
        **first,
        **sums,
        **of_last,
        "span/doc": docs,
        "packed": packed,
        "ends/packed": packs,
    }


def _packed_apart(columns: Columns, merged: Ints) -> tuple[Ints, Ints]:
    """Return the column `packed` of merged units, and its ends.

    Args:
        merged: where the run of each merged unit ends.
    """
    ends, docs = columns["ends/packed"], columns["num_docs"]
    counts = np.diff(ends, prepend=0)
    alone = counts == 0  # a unit that was not merged before is packed as one
    places = np.repeat(np.arange(len(docs)), np.maximum(counts, 1))
    packed = np.empty(len(places), np.int64)
    packed[alone[places]] = docs[alone]
    packed[~alone[places]] = columns["packed"]
    packs = np.diff(np.cumsum(np.maximum(counts, 1))[merged - 1], prepend=0)
    several = packs > 1  # (one alone is as it was)
    packed = packed[: int(packs.sum())][np.repeat(several, packs)]
    return packed, np.cumsum(np.where(several, packs, 0), dtype=np.int64)


def _columns_of(units: Sequence[Unit], first: int) -> dict[str, np.ndarray]:
    for number, unit in enumerate(units, first):
        counts = [unit.first_doc, unit.num_docs, unit.tokens, *unit.skip, *unit.packed]
        counts += [count for span in unit.spans for count in (span.count, span.doc or 0)]
        if not all(map(fmt.is_count, counts)) or unit.id != number:
            raise ValueError(f"unit {number} has a count that is not a number, or another id")
    spans = [span for unit in units for span in unit.spans]
    columns = {name: ints(getattr(unit, name) for unit in units) for name in _COUNTS}
    columns["ends/spans"] = ends_of(len(unit.spans) for unit in units)
    columns |= {f"span/{name}": ints(getattr(span, name) for span in spans) for name in _SPAN}
    columns["span/doc"] = ints(_NONE if span.doc is None else span.doc for span in spans)
    columns |= text_columns("span/digest", [span.digest for span in spans])
    for name in _LISTS:
        columns[f"ends/{name}"] = ends_of(len(getattr(unit, name)) for unit in units)
        columns[name] = ints(count for unit in units for count in getattr(unit, name))
    return columns


def _check(key: str, columns: Columns, count: int) -> None:
    check_counts(key, columns, _COUNTS, count)
    spans = check_ends(key, columns, "ends/spans", count)
    check_counts(key, columns, [f"span/{name}" for name in _SPAN], spans)
    check_texts(key, columns, "span/digest", spans)
    for name in _LISTS:
        check_counts(key, columns, [name], check_ends(key, columns, f"ends/{name}", count))
    docs = columns.get("span/doc")
    if docs is None or docs.dtype != np.int64 or docs.shape != (spans,) or (docs < _NONE).any():
        raise CorruptError(key, f"does not hold span/doc of {spans}")


def read_units(objects: Objects, told: Any, prefix: str) -> UnitColumns:
    """Return the units in the file that a record names; they are read when first needed.

    Args:
        told: `units` of the record.
        prefix: that of the file's key.
    """
    if not fmt.is_count(told["count"]) or told["count"] > fmt.MOST_UNITS:
        raise ValueError("the number of units is not one that a table can have")
    file = ColumnFile.from_json(told, prefix)
    return UnitColumns(told["count"], partial(read_columns, objects, file), file.key)

"""The units of a table as columns: a million of them open at once and are looked up by search.

`UnitColumns` is a sequence of units in the form of JSON, each made when it is asked for. Whoever
needs a number of every unit takes the column.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

from spile.core.errors import CorruptError
from spile.dataset import format as fmt
from spile.dataset.columns import (
    Columns,
    Ints,
    check_counts,
    check_ends,
    check_texts,
    ends_of,
    ints,
    run_of,
    text_columns,
    texts_at,
)

UnitJson = Mapping[str, Any]

_COUNTS = ("first_doc", "num_docs", "tokens")
_SPAN = ("file", "first", "count", "start", "stop", "before")
_NONE = -1  # stored for a span that has no `doc`


class UnitColumns(Sequence[UnitJson]):
    """The units of a table. A unit's id is its place."""

    def __init__(self, count: int, load: Callable[[], Columns], key: str = fmt.UNITS) -> None:
        """Args:
        load: returns the columns; called when one is first needed.
        key: the name of their file in errors.
        """
        self._count, self._load, self.key = count, load, key

    @classmethod
    def of(cls, units: Sequence[UnitJson]) -> "UnitColumns":
        """Return units given as JSON as columns; raise ValueError if one is invalid."""
        if isinstance(units, UnitColumns):
            return units
        columns = _columns_of(units)
        return cls(len(units), lambda: columns)

    @cached_property
    def columns(self) -> Columns:
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
        runs = [(unit["id"], *run) for unit in self for run in fmt.doc_runs(unit)]
        unit, first, count = (ints(each) for each in zip(*runs, strict=True))
        return unit, first, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> UnitJson: ...
    @overload
    def __getitem__(self, at: slice) -> list[UnitJson]: ...
    def __getitem__(self, at: int | slice) -> UnitJson | list[UnitJson]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(self._count))]
        if not -self._count <= at < self._count:
            raise IndexError(at)
        number, columns = at % self._count, self.columns
        run, skips = run_of(columns["ends/spans"], number), run_of(columns["ends/skip"], number)
        spans: list[dict[str, Any]] = []
        digests = texts_at(columns, "span/digest", run)
        docs = columns["span/doc"][run].tolist()
        parts = zip(*(columns[f"span/{name}"][run].tolist() for name in _SPAN), strict=True)
        for values, digest, doc in zip(parts, digests, docs, strict=True):
            span: dict[str, Any] = dict(zip(_SPAN, values, strict=True))
            spans.append({**span, "digest": digest, "doc": None if doc == _NONE else doc})
        return {
            "id": number,
            **{name: int(columns[name][number]) for name in _COUNTS},
            "spans": spans,
            "skip": columns["skip"][skips].tolist(),
        }

    def __iter__(self) -> Iterator[UnitJson]:
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


def _columns_of(units: Sequence[UnitJson]) -> dict[str, np.ndarray]:
    for number, unit in enumerate(units):
        counts = [unit["id"], *(unit[name] for name in _COUNTS), *unit.get("skip", ())]
        if not all(map(fmt.is_count, counts)) or unit["id"] != number:
            raise ValueError(f"unit {number} has a count that is not a number, or another id")
        fmt.doc_runs(unit)
    spans = [span for unit in units for span in unit["spans"]]
    docs = [span.get("doc") for span in spans]
    columns = {name: ints(unit[name] for unit in units) for name in _COUNTS}
    columns["ends/spans"] = ends_of(len(unit["spans"]) for unit in units)
    columns |= {f"span/{name}": ints(span.get(name, 0) for span in spans) for name in _SPAN}
    columns["span/doc"] = ints(_NONE if doc is None else doc for doc in docs)
    columns |= text_columns("span/digest", [span.get("digest", "") for span in spans])
    columns["ends/skip"] = ends_of(len(unit.get("skip", ())) for unit in units)
    columns["skip"] = ints(doc for unit in units for doc in unit.get("skip", ()))
    return columns


def _check(key: str, columns: Columns, count: int) -> None:
    check_counts(key, columns, _COUNTS, count)
    spans = check_ends(key, columns, "ends/spans", count)
    check_counts(key, columns, [f"span/{name}" for name in _SPAN], spans)
    check_texts(key, columns, "span/digest", spans)
    check_counts(key, columns, ["skip"], check_ends(key, columns, "ends/skip", count))
    docs = columns.get("span/doc")
    if docs is None or docs.dtype != np.int64 or docs.shape != (spans,) or (docs < _NONE).any():
        raise CorruptError(key, f"does not hold span/doc of {spans}")

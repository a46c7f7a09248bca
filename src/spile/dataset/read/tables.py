"""A dataset's documents and its index as Arrow tables, and kept columns as numpy arrays."""

import importlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.index import DOCUMENT_COLUMNS, NAMED_FLAGS
from spile.core.options import listed
from spile.core.threads import mapped
from spile.dataset.codec.documents import joined, read_documents
from spile.dataset.format import Done, Shard
from spile.dataset.records.segments import Catalog
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import Objects

_TABLES = 2  # documents tables to keep, for consecutive requests
_ID = "id"  # the kept column whose values name documents


class DocumentTables:
    """The documents tables of the units that are done.

    Attributes:
        columns: the names of their columns.
    """

    def __init__(
        self, objects: Objects, units: Catalog, ranges: UnitColumns, keep: Sequence[str]
    ) -> None:
        """Args:
        units: those that are done.
        ranges: the unit table, which knows the documents of each.
        keep: the columns of the corpus that were kept.
        """
        self._objects, self._units, self._ranges, self._keep = objects, units, ranges, tuple(keep)
        self.columns = [*DOCUMENT_COLUMNS, *keep]
        self._kept_in_memory = lru_cache(_TABLES)(self._read)

    def table(self, columns: Sequence[str] | None = None, unit: int | None = None) -> Any:
        """Return the documents of all units or of one, as a pyarrow.Table."""
        chosen = self._known(self.columns if columns is None else columns)
        if unit is not None:
            place = self._units.find(unit)
            if place is None:
                raise ConfigError(
                    f"{self._objects.url}: unit {unit} does not exist, or is not done"
                )
            return self._of_unit(self._units[place]).select(chosen)
        return joined(table.select(chosen) for table in self._every())

    def arrays(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return columns of the documents that have rows, by ascending ordinal."""
        table = self.table([*dict.fromkeys(["doc", "rows", *names])])
        (stored,) = np.nonzero(table["rows"].to_numpy())
        doc = table["doc"].to_numpy()
        order = stored[np.argsort(doc[stored], kind="stable")]
        return {name: table[name].to_numpy()[order] for name in names}

    def about(self, doc: int) -> dict[str, Any]:
        """Return a document's entry; a skipped one has the reason."""
        for _, unit, place in self.units_with(doc):
            row = self._of_unit(unit).slice(place, 1).to_pylist()
            if not row or row[0]["doc"] != doc:
                raise CorruptError(unit.documents_table.key, f"does not name document {doc}")
            return row[0]
        raise StoreError(f"{self._objects.url}: no unit that is done has a document {doc}")

    def find(self, **columns: Any) -> list[int]:
        """Return the ordinals of documents with these values; one unit's are held at a time."""
        self._known(columns)
        ordinals: list[int] = []
        for table in self._every():
            found = np.ones(table.num_rows, bool)
            for name, wanted in columns.items():
                found &= np.array([value == wanted for value in table[name].to_pylist()], bool)
            ordinals += (int(doc) for doc in table["doc"].to_numpy()[found])
        return ordinals

    def ordinal(self, doc: int | str) -> int:
        """Return the ordinal of a document that may be given by its value of the column `id`."""
        url, kept = self._objects.url, listed(self._keep)
        if not isinstance(doc, str):
            try:
                return operator.index(doc)
            except TypeError:
                raise ConfigError(
                    f"a document is given by its ordinal or its id, not by {doc!r}"
                ) from None
        if _ID not in self._keep:
            raise ConfigError(
                f"{url}: document {doc!r}: no column {_ID!r} was kept, only {kept}; "
                "ds.find(COLUMN=VALUE) returns the ordinals of documents"
            )
        found = self.find(**{_ID: doc})
        if not found:
            raise ConfigError(
                f"{url}: no document has the id {doc!r}; kept columns are {kept}, and "
                "ds.find(COLUMN=VALUE) returns the ordinals of documents"
            )
        if len(found) > 1:
            raise ConfigError(
                f"{url}: {len(found)} documents have the id {doc!r}; choose one by its ordinal: "
                f"{listed(map(str, found))}"
            )
        return found[0]

    def units_with(self, doc: int) -> Iterator[tuple[int, Done, int]]:
        """Yield a document's unit by position and record, and the document's place in the unit."""
        unit, first, count = self._ranges.doc_runs
        for run in np.flatnonzero((first <= doc) & (doc < first + count)).tolist():
            position = self._units.find(int(unit[run]))
            if position is not None:
                # (Of a merged unit, the documents of earlier runs come before.)
                begin = int(np.searchsorted(unit, int(unit[run])))
                before = int(count[begin:run].sum())
                yield position, self._units[position], before + doc - int(first[run])

    def forget(self) -> None:
        """Drop the tables in memory."""
        self._kept_in_memory.cache_clear()

    def _known(self, names: Iterable[str]) -> list[str]:
        for name in names:
            if name not in self.columns:
                known = ", ".join(self.columns)
                raise ConfigError(f"no column {name!r} of documents; there are {known}")
        return list(names)

    def _every(self) -> Iterator[Any]:
        """Yield the table of each unit; a few are read ahead."""
        files = (done.documents_table for done in self._units)
        return mapped(self._read, files, self._objects.parallel)

    def _of_unit(self, unit: Done) -> Any:
        return self._kept_in_memory(unit.documents_table)

    def _read(self, file: Shard) -> Any:
        return read_documents(self._objects, file, self._keep)


def index_table(entries: np.ndarray, start: int) -> Any:
    """Return index entries as a pyarrow.Table: row numbers, columns, and flags as booleans."""
    pa: Any = importlib.import_module("pyarrow")  # on first use: a slow import
    columns = {"row": np.arange(start, start + len(entries))}
    for name in entries.dtype.names or ():
        if name != "flags":
            columns[name] = np.ascontiguousarray(entries[name])
    for name, bits in NAMED_FLAGS.items():
        columns[name] = entries["flags"] & bits != 0
    return pa.table({name: pa.array(values) for name, values in columns.items()})

"""Listing documents, and finding them: by their preview, their kept columns, or their tokens.

A search of a large dataset stops when its time is up, and says where to go on.
"""

import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spile.dataset.read.dataset import Dataset
from spile.serve.explore import Explorer, around
from spile.serve.kept import Bounded

MOST_LISTED = 100
_KEPT_BYTES = 192 << 20  # of tokens, and as many of tables, so that no search reads them again
_SECONDS = 0.12  # of one request


class Finder:
    """Documents by number and by text."""

    def __init__(self, explorer: Explorer, documents: Mapping[int, int]) -> None:
        """`documents`: how many each unit has, read or skipped."""
        self._explorer, self._counts = explorer, documents
        self._tokens, self._tables = Bounded(_KEPT_BYTES), Bounded(_KEPT_BYTES)
        # Its first array takes a second (it looks for pandas): whoever asks first need not wait.
        importlib.import_module("pyarrow.compute")
        importlib.import_module("pyarrow").array(np.zeros(1))

    def listed(self, start: int, count: int) -> dict[str, Any]:
        """Documents in stored order, read or skipped, from one on."""
        dataset = self._explorer.dataset
        counts = {unit: self._counts[unit] for unit in dataset.units}
        found: list[dict[str, Any]] = []
        before = 0
        for unit, held in counts.items():
            low, high = max(start - before, 0), min(start + count - before, held)
            if low < high:
                table = self._table(dataset, unit).slice(low, high - low)
                found += [_shown(row) for row in table.to_pylist()]
            before += held
        return {"documents": found, "start": start, "total": sum(counts.values())}

    def find(self, text: str, after: int, count: int) -> dict[str, Any]:
        """Documents that hold a text.

        Args:
            after: units to pass over: `next` of the answer before.
        """
        dataset = self._explorer.dataset
        spellings = self._explorer.texts.spellings(text)
        limit = time.monotonic() + _SECONDS
        found: list[dict[str, Any]] = []
        units = dataset.units
        for number in range(after, len(units)):
            if len(found) >= count or (number > after and time.monotonic() > limit):
                return {"documents": found, "next": number, "units": len(units)}
            found += self._find_in(dataset, number, text, spellings, count)
        return {"documents": found, "next": None, "units": len(units)}

    def _find_in(
        self, dataset: Dataset, number: int, text: str, spellings: Sequence[Sequence[int]],
        count: int,
    ) -> list[dict[str, Any]]:  # fmt: skip
        table = self._table(dataset, dataset.units[number])
        rows = _matching(table, text)[:count]
        found = {row["doc"]: _shown(row) for row in table.take(rows).to_pylist()}
        if spellings and len(found) < count:
            tokens, docs = self._tokens_of(dataset, number)
            for ids in spellings:
                hits = sequences(tokens, docs, ids)
                docs_hit, firsts = np.unique(docs[hits], return_index=True)
                new = [
                    (int(doc), int(hits[first]))
                    for doc, first in zip(docs_hit, firsts, strict=True)
                    if int(doc) not in found
                ]
                for doc, row in new[: count - len(found)]:
                    found[doc] = {
                        **_shown(dataset.about(doc)),
                        **self._snippet(dataset, number, row),
                    }
        return [found[doc] for doc in sorted(found)]

    def _snippet(self, dataset: Dataset, number: int, row: int) -> dict[str, Any]:
        _, entries, at = around(dataset, dataset.units[number], row)
        pieces = self._explorer.texts.pieces(entries["token_id"].tolist())
        return {"offset": int(entries["offset"][at]), "snippet": "".join(pieces)}

    def _table(self, dataset: Dataset, unit: int) -> Any:
        def read() -> tuple[Any, int]:
            table = dataset.documents(unit=unit)
            return table, table.nbytes

        return self._tables.get(unit, read)

    def _tokens_of(self, dataset: Dataset, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a unit's rows, and their documents."""

        def read() -> tuple[tuple[np.ndarray, np.ndarray], int]:
            entries = dataset.index(*dataset.unit_starts[number : number + 2])
            ids, docs = (np.ascontiguousarray(entries[name]) for name in ("token_id", "doc"))
            return (ids, docs), ids.nbytes + docs.nbytes

        return self._tokens.get(dataset.units[number], read)


def sequences(tokens: np.ndarray, docs: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Where some tokens follow one another in one document."""
    hits = np.flatnonzero(tokens[: max(0, len(tokens) - len(ids) + 1)] == ids[0])
    for step, token in enumerate(ids[1:], 1):
        hits = hits[(tokens[hits + step] == token) & (docs[hits + step] == docs[hits])]
    return hits


def _matching(table: Any, text: str) -> np.ndarray:
    """Rows of a table of documents that name a text in any of their columns."""
    pa = importlib.import_module("pyarrow")
    compute: Any = importlib.import_module("pyarrow.compute")
    hit: Any = None
    for column in table.columns:
        if column.type == pa.string():
            found = compute.match_substring(column, text, ignore_case=True)
            found = compute.fill_null(found, False)
            hit = found if hit is None else compute.or_(hit, found)
    if text.isdecimal() and len(text) < 18:
        found = compute.equal(table["doc"], int(text))
        hit = found if hit is None else compute.or_(hit, found)
    return np.flatnonzero(hit.to_numpy()) if hit is not None else np.zeros(0, np.int64)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("doc", "tokens", "rows", "skipped", "preview")
    return {name: row[name] for name in names}

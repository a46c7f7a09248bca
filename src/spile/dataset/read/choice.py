"""The rows that a condition chooses: by their index entries, and by columns of their documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from spile.core.errors import ConfigError
from spile.core.expressions import DocumentFilter, RowFilter, split_condition

_MATCHED = 4096  # documents that a condition is applied to at a time


@dataclass(frozen=True)
class RowChoice:
    """The rows to return, chosen by a condition on rows, by their documents, or both."""

    where: str
    rows: RowFilter | None
    documents: np.ndarray | None = None  # ordinals, ascending

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which rows are returned, as JSON."""
        if self.documents is None:
            return self.rows.identity if self.rows else {"where": None}
        digest = xxhash.xxh3_64_hexdigest(self.documents.astype("<i8").tobytes())
        return {"where": self.where, "documents": digest}

    def mask(self, index: np.ndarray) -> np.ndarray:
        """Return a mask of the chosen entries."""
        kept = np.ones(len(index), bool) if self.rows is None else self.rows.mask(index)
        return kept if self.documents is None else kept & np.isin(index["doc"], self.documents)


def row_choice(
    where: str, url: str, columns: Sequence[str], read: Callable[[Sequence[str]], Any]
) -> RowChoice:
    """Return the rows of a dataset that a condition chooses.

    Args:
        where: a condition with the syntax of `extract --where`, which may also name columns.
        columns: the columns of documents.
        read: a function that returns the documents as an Arrow table with these columns.

    Raises:
        ConfigError: if the condition is invalid, or no document matches it.
    """
    rows, documents = split_condition(where, columns)
    if documents is None:
        return RowChoice(where, RowFilter(where, None))
    condition = DocumentFilter(documents, "where")
    for name in condition.columns:
        if name not in columns:
            raise ConfigError(condition.missing(url, name, columns))
    table = read([*dict.fromkeys(["doc", *condition.columns])])
    # (A column with values of several types in the corpus is stored as text.)
    found = [
        row["doc"]
        for batch in table.to_batches(_MATCHED)
        for row in batch.to_pylist()
        if condition.matches(row, untyped=True)
    ]
    if not found:
        raise ConfigError(f"where {where!r}: matches no document of {url}")
    chosen = RowFilter(rows, None) if rows else None
    return RowChoice(where, chosen, np.sort(np.asarray(found, np.int64)))

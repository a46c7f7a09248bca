"""Which kept tokens of a packed unit make one row together: a function of recipe and unit alone.

A span is a document, or a part of one. Its tokens may lie in several contexts, and those in several
packed rows, in any order. The device reduces each packed row by itself, to one *part* for each span
that has kept tokens there; the host merges the parts of a span. Pooled rows are stored in the order
of their last parts, so that they can be written while the unit is computed, and only spans of
documents that were cut stay open.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from spile.core.index import POOLED_INDEX_DTYPE
from spile.core.pool import Pool


@dataclass(frozen=True)
class PooledSpans:
    """The pooled rows of a unit.

    Attributes:
        index: an entry for each row. Its first columns are those of the span's last token by its
            place in the document; for "first", those of its first.
        entries: the index entries of the kept tokens, in packed order.
        rows: the row that each kept token belongs to.
        shown: for each row, the token whose columns it has.
        places: the packed row of each kept token.
    """

    index: np.ndarray
    entries: np.ndarray
    rows: np.ndarray
    shown: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, entries: np.ndarray, spans: np.ndarray, places: np.ndarray, pool: Pool) -> Self:
        """Group kept tokens, given in packed order.

        Args:
            spans: the number of each token's span in its document; with labels, in the unit.
            places: the packed row of each token.
        """
        within = entries["doc"] if pool.labels is None else np.zeros(len(entries), np.int64)
        order = np.lexsort((entries["offset"], spans, within))
        doc, span = within[order], spans[order]
        new = np.ones(len(order), np.bool_)
        new[1:] = (np.diff(doc) | np.diff(span)) != 0
        (begins,) = np.nonzero(new)
        counts = np.diff(begins, append=len(order))
        first, last = order[begins], order[begins + counts - 1]
        shown = ends = first if pool.by == "first" else last
        if pool.sums:
            group = np.empty(len(order), np.int64)
            group[order] = np.repeat(np.arange(len(begins)), counts)
            _, met = np.unique(places * max(1, len(begins)) + group, return_index=True)
            ends = np.zeros(len(begins), np.int64)  # the first token of each span's last part
            np.maximum.at(ends, group[met], met)
        by_end = np.argsort(ends)
        rank = np.empty(len(begins), np.int64)
        rank[by_end] = np.arange(len(begins))
        rows = np.empty(len(order), np.int64)
        rows[order] = np.repeat(rank, counts)

        index = np.empty(len(begins), POOLED_INDEX_DTYPE)
        for name in entries.dtype.names or ():
            index[name] = entries[name][shown[by_end]]
        index["span"] = span[begins[by_end]]
        index["start"] = entries["offset"][first[by_end]]
        index["count"] = counts[by_end]
        return cls(index, entries, rows, shown[by_end], places)

    @cached_property
    def parts(self) -> np.ndarray:
        """The row of each part, in packed order: those of the first packed row, and so on."""
        return self.rows[self._met[0]]

    @cached_property
    def part_places(self) -> np.ndarray:
        """The packed row of each part."""
        return self.places[self._met[0]]

    @cached_property
    def part_counts(self) -> np.ndarray:
        """The number of kept tokens of each part."""
        return np.bincount(self._met[1], minlength=len(self.parts))

    @cached_property
    def ends(self) -> np.ndarray:
        """Whether each part is the last of its row."""
        last = np.zeros(len(self.index), np.int64)
        np.maximum.at(last, self.parts, np.arange(len(self.parts)))
        return last[self.parts] == np.arange(len(self.parts))

    @cached_property
    def alone(self) -> np.ndarray:
        """Whether each row has one part only."""
        return np.bincount(self.parts, minlength=len(self.index)) == 1

    @cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray]:
        """For each kept token its part's number in the packed row, from 1; and for each packed row
        that has one, how many parts it has."""
        first, part = self._met
        of_rows = self.part_places
        before = np.searchsorted(of_rows, of_rows)  # parts of earlier packed rows
        slots = np.arange(len(first)) - before + 1
        return slots[part].astype(np.int32), np.bincount(of_rows)

    def slots_of_rows(self, width: int) -> np.ndarray:
        """Return [packed rows that have parts, width]: the slot of each row's part there, or 0."""
        _, of_parts = np.unique(self.part_places, return_inverse=True)
        before = np.searchsorted(of_parts, of_parts)
        found = np.zeros((int(of_parts.max(initial=-1)) + 1, width), np.int32)
        found[of_parts, self.parts] = np.arange(len(of_parts)) - before + 1
        return found

    @cached_property
    def _met(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each part, ascending, and the part of each token."""
        key = self.places * max(1, len(self.index)) + self.rows
        _, first, part = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return first[order], rank[part]

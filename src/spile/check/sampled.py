"""What `spile check` recomputes of a document: contexts, and the tokens of each of their rows."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from spile.check.load import Taps
from spile.core.errors import StoreError
from spile.core.pool import reduces
from spile.corpus.pack import PackedUnit
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.document import Document

_CONTEXTS_PER_DOCUMENT = 2
_BEGINNING = 2048  # tokens of an ingested document that are recomputed, which is one context
_ROWS_OF_DOCUMENT = 8  # pooled rows that are recomputed of each


@dataclass(frozen=True)
class SampledRows:
    """Some rows of a document.

    Attributes:
        contexts: the token ids to recompute.
        rows: the document's rows that are compared.
        places: of each of them, the token among those of all contexts.
        members: if values were pooled, the tokens of each row instead.
        by: "mean" or "max"; None if values were not pooled.
    """

    contexts: Sequence[np.ndarray]
    rows: np.ndarray
    places: np.ndarray
    members: Sequence[np.ndarray] = ()
    by: str | None = None

    @classmethod
    def of_context(cls, offsets: np.ndarray, tokens: np.ndarray, start: int, seq_len: int) -> Self:
        """Return the rows of one context; `offsets` are those of all rows of its document."""
        context = tokens[start : start + seq_len]
        rows = np.flatnonzero((offsets >= start) & (offsets < start + len(context)))
        return cls([context], rows, offsets[rows] - start)

    @classmethod
    def of_spans(
        cls, document: Document, tokens: np.ndarray, packed: PackedUnit, by: str, seq_len: int
    ) -> Self:
        """Return pooled rows, and the contexts that hold their tokens.

        Args:
            packed: the unit of the document, packed again.

        Raises:
            StoreError: if its spans are not those of the index.
        """
        spans = packed.pooled
        assert spans is not None
        entries = spans.entries
        own = np.flatnonzero(spans.index["doc"] == document.doc)
        own = own[np.argsort(spans.index["offset"][own], kind="stable")]
        if not np.array_equal(spans.index[own], document.index):
            raise StoreError(f"document {document.doc}: its spans differ from the corpus's")
        chosen = own[:_ROWS_OF_DOCUMENT]
        offsets = [entries["offset"][spans.rows == row].astype(np.int64) for row in chosen]
        read = np.unique(np.concatenate(offsets) // seq_len)
        contexts = [tokens[at * seq_len : (at + 1) * seq_len] for at in read.tolist()]
        before = np.cumsum([0, *map(len, contexts)])
        members = [
            before[np.searchsorted(read, each // seq_len)] + each % seq_len for each in offsets
        ]
        return cls(contexts, np.arange(len(chosen)), np.arange(len(chosen)), members, by)

    @property
    def count(self) -> int:
        """The number of rows that the contexts make: of tokens, or of spans."""
        return len(self.members) if self.by else sum(map(len, self.contexts))

    def before(self, decided: int) -> "SampledRows":
        """Return the rows that the first `decided` tokens of all contexts make alone."""
        if self.by is None:
            left = self.places < decided
        else:
            left = np.array([int(each.max()) < decided for each in self.members], np.bool_)
        return SampledRows(self.contexts, self.rows[left], self.places[left], self.members, self.by)

    def taps(self, taps: Taps, names: Collection[str], **noise: int) -> dict[str, np.ndarray]:
        """Compute taps of all contexts, one after another, by token."""
        found = [taps(context, names, **noise) for context in self.contexts]
        if len(found) == 1:
            return found[0]
        return {name: _joined([each[name] for each in found]) for name in found[0]}

    def pooled(self, values: np.ndarray) -> np.ndarray:
        """Return the rows that tokens' values make, in float64 if they are pooled."""
        if self.by is None:
            return values
        reduce = np.mean if self.by == "mean" else np.max
        return np.stack([reduce(values[each].astype(np.float64), axis=0) for each in self.members])

    def another(self, values: np.ndarray) -> np.ndarray:
        """Return rows that are surely wrong: those of the token before, or of the first alone."""
        if self.by is None:
            return np.roll(values, 1, axis=0)
        return np.stack([values[each[0]] for each in self.members])


def ingested_documents(
    dataset: Dataset, units: Sequence[int]
) -> Iterator[tuple[Document, np.ndarray, None]]:
    """Yield a document of each unit, and its tokens: every one of them has a row.

    Args:
        units: some of the dataset's, in any number.
    """
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    for unit in units:
        first, last = dataset.rows_of_unit(unit) or (0, 0)
        row = int(rng.integers(first, last)) if last > first else -1
        doc = int(dataset.index(row, row + 1)["doc"][0]) if row >= 0 else -1
        if doc >= 0 and doc not in seen:
            seen.add(doc)
            document = dataset.document(doc)
            yield document, document.index["token_id"].astype(np.int32), None


def sampled_rows(
    document: Document,
    tokens: np.ndarray,
    packed: PackedUnit | None,
    pool: str | None,
    seq_len: int,
) -> list[SampledRows]:
    """Return the rows of a document to compare, context by context, or all of its spans.

    Args:
        packed: the document's unit; None if its rows were ingested.
    """
    if packed is None:
        offsets = document.index["offset"]
        return [SampledRows.of_context(offsets, tokens, 0, min(seq_len, _BEGINNING))]
    by = reduces(pool)
    if by:
        return [SampledRows.of_spans(document, tokens, packed, by, seq_len)]
    offsets = document.index["offset"]
    starts = np.unique(offsets // seq_len)[:_CONTEXTS_PER_DOCUMENT] * seq_len
    return [SampledRows.of_context(offsets, tokens, start, seq_len) for start in starts.tolist()]


def _joined(values: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate values of contexts; attention patterns are as wide as their context."""
    shape = np.max([each.shape[1:] for each in values], axis=0)
    out = np.zeros((sum(map(len, values)), *shape), values[0].dtype)
    done = 0
    for each in values:
        out[(slice(done, done + len(each)), *map(slice, each.shape[1:]))] = each
        done += len(each)
    return out

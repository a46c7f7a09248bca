"""What `spile check` recomputes: contexts of documents, and the tokens of each of their rows.

Sums by label are over whole units, so it recomputes some small units whole.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from spile.check.backward import UnitBackward
from spile.check.load import Taps
from spile.core.errors import ConfigError, StoreError
from spile.core.pool import COVARIANCE, JACOBIAN, MOMENTS, beside, reduces
from spile.corpus.pack import PackedUnit
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.document import Document
from spile.plan.job import ExtractionJob, prepare_unit

_CONTEXTS_PER_DOCUMENT = 2
_BEGINNING = 2048  # tokens of an ingested document that are recomputed, which is one context
_ROWS_OF_DOCUMENT = 8  # pooled rows that are recomputed of each
_BY_THEMSELVES = ("router_logits", "logits")  # they show how sure the reference is
_MOST_TOKENS = 1 << 16  # of the units whose sums are recomputed; all of their values are held


@dataclass(frozen=True)
class SampledRows:
    """Some rows of a document.

    Attributes:
        contexts: the token ids to recompute.
        rows: the document's rows that are compared.
        places: of each of them, the token among those of all contexts.
        members: if values were pooled, the tokens of each row instead.
        by: how: `core.pool.reduces`; None if values were not pooled.
        beside: the tap whose values follow those of each other tap, as `--reduce cov:TAP` has it.
        docs: the document of each context.
        starts: the first token of each context in its document.
        backward: how gradients are made, if there are any.
    """

    contexts: Sequence[np.ndarray]
    rows: np.ndarray
    places: np.ndarray
    members: Sequence[np.ndarray] = ()
    by: str | None = None
    beside: str | None = None
    docs: Sequence[int] = ()
    starts: Sequence[int] = ()
    backward: UnitBackward | None = None

    @classmethod
    def of_context(cls, offsets: np.ndarray, tokens: np.ndarray, start: int, seq_len: int) -> Self:
        """Return the rows of one context; `offsets` are those of all rows of its document."""
        context = tokens[start : start + seq_len]
        rows = np.flatnonzero((offsets >= start) & (offsets < start + len(context)))
        return cls([context], rows, offsets[rows] - start, starts=[start])

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
        places = np.arange(len(chosen))
        starts = (read * seq_len).tolist()
        docs = [document.doc] * len(contexts)
        return cls(contexts, places, places, members, by, docs=docs, starts=starts)

    @classmethod
    def of_labels(
        cls, rows: Document, tokens: Mapping[int, np.ndarray], packed: PackedUnit, by: str, seq: int
    ) -> Self:
        """Return the sums of a unit, and the contexts that hold tokens with labels.

        Args:
            rows: those of the unit.
            tokens: of each document of the unit.
            packed: the unit, packed again.
            seq: the tokens of a context.

        Raises:
            StoreError: if its labels are not those of the index.
        """
        spans = packed.pooled
        assert spans is not None
        if not np.array_equal(spans.index, rows.index):
            raise StoreError(
                f"document {rows.doc}: the labels of its unit differ from the corpus's"
            )
        offsets = spans.entries["offset"].astype(np.int64)
        cuts = np.stack([spans.entries["doc"], offsets // seq], axis=1)
        read, which = np.unique(cuts, axis=0, return_inverse=True)
        contexts = [tokens[doc][at * seq : (at + 1) * seq] for doc, at in read.tolist()]
        before = np.cumsum([0, *map(len, contexts)])
        places = before[which.reshape(-1)] + offsets % seq
        members = [np.sort(places[spans.rows == row]) for row in range(len(rows.index))]
        every = np.arange(len(members))
        docs, starts = read[:, 0].tolist(), (read[:, 1] * seq).tolist()
        return cls(contexts, every, every, members, by, docs=docs, starts=starts)

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
        return replace(self, rows=self.rows[left], places=self.places[left])

    def taps(self, taps: Taps, names: Collection[str], **noise: int) -> dict[str, np.ndarray]:
        """Compute taps of all contexts, one after another, by token."""
        both = {*names, self.beside} if self.beside else names
        each = [
            taps(context, both, **noise, **self._options_of(number))
            for number, context in enumerate(self.contexts)
        ]
        found = each[0]
        if len(each) > 1:
            found = {name: _joined([some[name] for some in each]) for name in found}
        if self.beside is None:
            return found
        other = found[self.beside]
        other = other.reshape(len(other), -1)
        return {
            name: values
            if name in _BY_THEMSELVES
            else np.concatenate([values.reshape(len(other), -1), other], axis=1)
            for name, values in found.items()
        }

    def _options_of(self, number: int) -> dict[str, Any]:
        """Return how a context's gradients are made, if it has them."""
        if not self.backward:
            return {}
        start = self.starts[number]
        stop = start + len(self.contexts[number])
        return {"backward": self.backward.of_context(self.docs[number], start, stop)}

    def pooled(self, values: np.ndarray) -> np.ndarray:
        """Return the rows that tokens' values make, in float64 if they are pooled."""
        if self.by is None:
            return values
        return np.stack([self._row(values[each].astype(np.float64)) for each in self.members])

    def _row(self, values: np.ndarray) -> np.ndarray:
        """Pool the values of one span."""
        if self.by == "max":
            return values.max(axis=0)
        mean = values.mean(axis=0)
        if self.by == MOMENTS:
            return np.stack([mean, values.var(axis=0)], axis=-1)
        if self.by != COVARIANCE:
            return mean
        apart = (values - mean).reshape(len(values), -1)
        covariance = apart.T @ apart / len(values)
        return np.concatenate([mean.reshape(-1), covariance[np.triu_indices(apart.shape[1])]])

    @property
    def spreads(self) -> bool:
        """Whether rows hold variances beside means."""
        return self.by in (MOMENTS, COVARIANCE)

    def balanced(self, rows: np.ndarray, truth: np.ndarray, channels: int) -> np.ndarray:
        """Return rows in which variances weigh as means do, being in the unit of a mean.

        Args:
            truth: the exact rows, whose variances set the scale.
            channels: of a mean.
        """
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for each in (rows, truth):
            flat = each.reshape(len(each), -1)
            if self.by == MOMENTS:
                flat = np.concatenate([flat[:, ::2], flat[:, 1::2]], axis=1)
            parts.append((flat[:, :channels], flat[:, channels:]))
        scale = np.sqrt(np.linalg.norm(parts[1][1], axis=1, keepdims=True))
        return np.concatenate([parts[0][0], parts[0][1] / np.where(scale > 0, scale, 1)], axis=1)

    def another(self, values: np.ndarray) -> np.ndarray:
        """Return rows that are wrong for sure: those of the token before, or of the first alone."""
        if self.by is None:
            return np.roll(values, 1, axis=0)
        return np.stack([self._row(values[each[:1]].astype(np.float64)) for each in self.members])


def sampled_units(
    dataset: Dataset, job: ExtractionJob, samples: int
) -> Iterator[tuple[Document, SampledRows, int]]:
    """Yield the sums of the smallest units, what they are of, and how many documents that is.

    Raises:
        ConfigError: if no unit is small enough, or each was joined from several.
    """
    by, units = reduces(job.recipe.pool), job.units
    assert by
    if by == JACOBIAN:
        raise ConfigError(
            f"{dataset.url}: holds Jacobians, which check does not recompute; check rows of the "
            "same taps instead"
        )
    whole = [unit for unit in dataset.units if len(units[unit].packed) <= 1]
    whole.sort(key=lambda unit: (units[unit].tokens, unit))
    if dataset.units and not whole:
        raise ConfigError(
            f"{dataset.url}: its units were joined, so that their sums cannot be recomputed; check "
            "the dataset that it was made from"
        )
    left = _MOST_TOKENS
    with closing(job.reader()) as reader:
        for number, unit in enumerate(whole[:samples]):
            prepared = prepare_unit(job, reader, units[unit], with_table=False)
            left -= prepared.packed.num_tokens
            if left < 0 and number:
                return
            if left < 0:
                raise ConfigError(
                    f"{dataset.url}: holds sums over whole units, and the smallest has "
                    f"{prepared.packed.num_tokens:,} tokens; check recomputes at most "
                    f"{_MOST_TOKENS:,}: extract a few documents with --unit-tokens "
                    f"{_MOST_TOKENS // 2}, or with --pool mean and without --reduce, and check "
                    "those"
                )
            first, last = dataset.rows_of_unit(unit) or (0, 0)
            if last == first:
                continue
            rows = Document(dataset.index(first, last), dataset, np.arange(first, last))
            tokens, packed = prepared.tokens, prepared.packed
            sampled = SampledRows.of_labels(rows, tokens, packed, by, job.recipe.seq_len)
            backward = UnitBackward.of(job, prepared)
            sampled = replace(sampled, beside=beside(job.recipe.pool), backward=backward)
            yield rows, sampled, packed.num_docs


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
    backward: UnitBackward | None = None,
) -> list[SampledRows]:
    """Return the rows of a document to compare, context by context, or all of its spans.

    Args:
        packed: the document's unit; None if its rows were ingested.
        backward: how the unit's gradients are made, if it has them.
    """
    if packed is None:
        offsets = document.index["offset"]
        return [SampledRows.of_context(offsets, tokens, 0, min(seq_len, _BEGINNING))]
    by = reduces(pool)
    if by:
        found = SampledRows.of_spans(document, tokens, packed, by, seq_len)
        return [replace(found, backward=backward)]
    offsets = document.index["offset"]
    starts = np.unique(offsets // seq_len)[:_CONTEXTS_PER_DOCUMENT] * seq_len
    each = [SampledRows.of_context(offsets, tokens, start, seq_len) for start in starts.tolist()]
    return [replace(some, docs=[document.doc], backward=backward) for some in each]


def _joined(values: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate values of contexts; attention patterns are as wide as their context."""
    shape = np.max([each.shape[1:] for each in values], axis=0)
    out = np.zeros((sum(map(len, values)), *shape), values[0].dtype)
    done = 0
    for each in values:
        out[(slice(done, done + len(each)), *map(slice, each.shape[1:]))] = each
        done += len(each)
    return out

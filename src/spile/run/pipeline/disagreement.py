"""Disagreement of a unit's documents with the engine that sampled them, and the warnings of it."""

import logging

import numpy as np

from spile.core.disagreement import COMPARED, LARGEST_GAP, MEAN, is_within
from spile.core.humanize import plural

_log = logging.getLogger("spile.run")
_SEE = "docs/rollouts.md says what each cause looks like"


class DocumentGaps:
    """Adds up, document by document, how far an engine's log-probabilities are from the model's."""

    def __init__(self, docs: np.ndarray) -> None:
        """`docs`: the ordinals of the unit's documents."""
        self._docs, self._order = docs, np.argsort(docs)
        self.tokens = np.zeros(len(docs), np.int64)
        self.total = np.zeros(len(docs))
        self._largest = np.zeros(len(docs))

    def add(self, docs: np.ndarray, gaps: np.ndarray) -> None:
        """Add distances, each with the ordinal of its document."""
        at = self._order[np.searchsorted(self._docs, docs, sorter=self._order)]
        np.add.at(self.tokens, at, 1)
        np.add.at(self.total, at, gaps.astype(np.float64))
        with np.errstate(invalid="ignore"):  # NaN is larger than everything
            np.maximum.at(self._largest, at, gaps.astype(np.float64))

    def columns(self) -> dict[str, list[int | float | None]]:
        """Return the columns of the documents table."""
        known = (self.tokens > 0).tolist()
        mean = self.total / np.maximum(self.tokens, 1)
        columns = {MEAN: mean, LARGEST_GAP: self._largest, COMPARED: self.tokens}
        return {
            name: [each if there else None for each, there in zip(of.tolist(), known, strict=True)]
            for name, of in columns.items()
        }

    def told(self, doc: int) -> str:
        """Say how far off a document is."""
        at = int(np.flatnonzero(self._docs == doc)[0])
        mean, largest = self.total[at] / self.tokens[at], self._largest[at]
        return (
            f"the engine's log-probabilities of {plural(int(self.tokens[at]), 'token')} are "
            f"{mean:.2g} from the model's on average, and up to {largest:.2g}"
        )

    def beyond(self, bound: float) -> list[int]:
        """Return the ordinals of documents that rounding does not explain."""
        each = zip(self._docs.tolist(), self.tokens.tolist(), self.total.tolist(), strict=True)
        return [doc for doc, count, total in each if count and not is_within(bound, count, total)]


class DisagreementWatch:
    """Warns of documents beyond the bound: of the first at once, of all at the end."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._compared = self._beyond = self._tokens = 0
        self._total = 0.0

    def add(self, gaps: DocumentGaps) -> None:
        """Add the documents of a unit."""
        beyond = gaps.beyond(self._bound)
        if beyond and not self._beyond:
            _log.warning("disagreement: document %d: %s; %s", beyond[0], gaps.told(beyond[0]), _SEE)
        self._beyond += len(beyond)
        self._compared += int(np.count_nonzero(gaps.tokens))
        self._tokens += int(gaps.tokens.sum())
        self._total += float(gaps.total.sum())

    def tell(self) -> None:
        """Say once how many documents of this run are beyond the bound."""
        if not self._tokens or (
            not self._beyond and is_within(self._bound, self._tokens, self._total)
        ):
            return
        _log.warning(
            "disagreement: %s of %s beyond %g; the engine's log-probabilities are %.2g from the "
            "model's on average, over %s tokens; %s",
            f"{self._beyond:,}", plural(self._compared, "document"), self._bound,
            self._total / self._tokens, f"{self._tokens:,}", _SEE,
        )  # fmt: skip
        self._tokens = 0

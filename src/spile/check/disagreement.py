"""What the documents table says of an engine's log-probabilities, against the bound."""

# Strict, but for values that pyarrow's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from dataclasses import dataclass

import numpy as np

from spile.core.disagreement import COMPARED, LARGEST_GAP, MEAN, is_within
from spile.core.errors import StoreError
from spile.dataset.read.dataset import Dataset

_NAMED = 5  # documents to name


@dataclass(frozen=True)
class Disagreement:
    """How far an engine's log-probabilities are from the model's, over all documents."""

    documents: int  # that have some
    tokens: int
    mean: float
    largest: float
    bound: float
    beyond: int  # documents that rounding does not explain
    first: tuple[int, ...]  # the first of those
    ok: bool


def disagreement_of(dataset: Dataset, bound: float) -> Disagreement | None:
    """Return the disagreement of a dataset's documents; None if nothing was compared."""
    if MEAN not in dataset.document_columns:
        return None
    documents = tokens = beyond = 0
    total = largest = 0.0
    first: list[int] = []
    for unit in dataset.units:
        told = dataset.documents(["doc", MEAN, LARGEST_GAP, COMPARED], unit=unit).to_pylist()
        for each in told:
            if (count := each[COMPARED]) is None:
                continue
            numbers = count, each[MEAN], each[LARGEST_GAP]
            if any(isinstance(value, str | None) for value in numbers):
                where = f"document {each['doc']}"
                raise StoreError(f"{dataset.url}: {where}: its disagreement is no number")
            documents, tokens = documents + 1, tokens + int(count)
            own = each[MEAN] * count
            total, largest = total + own, float(np.maximum(largest, each[LARGEST_GAP]))  # or NaN
            if not is_within(bound, count, own):
                beyond += 1
                first += [each["doc"]] if len(first) < _NAMED else []
    if not documents:
        return None
    ok = not beyond and is_within(bound, tokens, total)
    return Disagreement(documents, tokens, total / tokens, largest, bound, beyond, tuple(first), ok)

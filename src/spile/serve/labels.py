"""Documents by the labels that were kept of the corpus: directions between two, and probes.

Both use the mean row of each of some documents, drawn evenly from all that have one of the labels,
so that a large dataset costs a limited number of bytes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.pool import reduces
from spile.dataset.read.dataset import Dataset

_MOST_BYTES = 1 << 30  # of rows, in float32, read for one answer
_MOST_DOCUMENTS = 400
_LONGEST = 4096  # rows of one document
_VALUES = 50  # of a column, listed
_ENDS = 12  # documents shown at each end of a direction
_BARS = 20  # of a histogram
_RIDGES = np.geomspace(1e-4, 10, 11)  # in mean squared lengths of centred rows


def columns_of(dataset: Dataset) -> list[dict[str, Any]]:
    """Return the kept columns in which two values occur twice, with their most frequent values."""
    found: list[dict[str, Any]] = []
    for name in dataset.recipe.keep:
        counts = Counter(map(_shown, dataset.columns(name).tolist()))
        common = counts.most_common(_VALUES)
        if len(common) > 1 and common[1][1] > 1:
            listed = [{"value": value, "documents": count} for value, count in common]
            found.append({"name": name, "values": listed, "distinct": len(counts)})
    return sorted(found, key=lambda column: column["distinct"])


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


@dataclass(frozen=True)
class MeanRows:
    """Documents with either of two labels, and the mean row of each.

    Attributes:
        docs: their ordinals.
        positive: whether a document has the first label.
        rows: [documents, width] by tap.
        of: how many documents have either label.
        first: whether the first token of a context is part of the means, since there is no other.
    """

    docs: np.ndarray
    positive: np.ndarray
    rows: dict[str, np.ndarray]
    of: int
    first: bool


def mean_rows(
    dataset: Dataset, taps: Sequence[str], column: str, positive: str, negative: str
) -> MeanRows:
    """Read the mean row of documents with either label, without the first token of contexts.

    Pooled rows are all used, and count as `spile.direction` counts them.

    Raises:
        ConfigError: if a label does not occur.
    """
    labels = np.array([_shown(value) for value in dataset.columns(column).tolist()], object)
    for label in (positive, negative):
        if not (labels == label).any():
            raise ConfigError(f"no document has {column} {label!r}")
    if positive == negative:
        raise ConfigError(f"both labels are {positive!r}")
    (known,) = np.nonzero((labels == positive) | (labels == negative))
    budget = _MOST_BYTES // (4 * sum(dataset.width(tap) for tap in taps))
    means: dict[str, list[np.ndarray]] = {tap: [] for tap in taps}
    docs: list[int] = []
    sides: list[bool] = []
    order = known[np.random.default_rng(0).permutation(len(known))][:_MOST_DOCUMENTS]
    every, read = dataset.columns("doc"), 0
    pool = dataset.recipe.pool
    later = not pool and (dataset.index(0, min(len(dataset), _LONGEST))["pos"] > 0).any()
    for place in order.tolist():
        whole = dataset.document(int(every[place]))
        chosen = np.flatnonzero(whole.index["pos"] >= later)[:_LONGEST]
        if not len(chosen):
            continue
        found = replace(whole, index=whole.index[chosen], rows=whole.rows[chosen])
        weights = found.index["count"] if reduces(pool) == "mean" else np.ones(len(chosen))
        for tap in taps:
            rows = found.read(tap).reshape(len(chosen), -1)
            means[tap].append(weights @ rows.astype(np.float64) / weights.sum())
        docs.append(found.doc)
        sides.append(labels[place] == positive)
        read += len(chosen)
        if read >= budget:
            break
    rows = {tap: np.array(each) for tap, each in means.items()}
    return MeanRows(np.array(docs), np.array(sides, bool), rows, len(known), not later)


def direction_between(dataset: Dataset, means: MeanRows, tap: str) -> dict[str, Any]:
    """Return the difference of the means of both labels, and where documents lie along it."""
    rows, positive = means.rows[tap], means.positive
    if positive.all() or not positive.any():
        raise ConfigError("no document of one of the labels was read")
    sides = [rows[positive].mean(axis=0), rows[~positive].mean(axis=0)]
    difference = sides[0] - sides[1]
    length = float(np.linalg.norm(difference))
    if not 0 < length < np.inf:
        raise ConfigError(f"{tap}: the means of both labels are equal, or not finite")
    along = (rows - (sides[0] + sides[1]) / 2) @ (difference / length)
    order = np.argsort(-along)
    edges = np.histogram_bin_edges(along, _BARS)
    counts = [np.histogram(along[side], edges)[0] for side in (positive, ~positive)]

    def listed(places: np.ndarray) -> list[dict[str, Any]]:
        return [
            {
                "doc": int(means.docs[place]),
                "value": along[place],
                "positive": bool(positive[place]),
                "preview": dataset.about(int(means.docs[place]))["preview"],
            }
            for place in places.tolist()
        ]

    return {
        "length": length,
        "row": float(np.linalg.norm(rows, axis=1).mean()),
        "documents": [int(positive.sum()), int((~positive).sum())],
        "of": means.of,
        "first": means.first,
        "centres": (edges[:-1] + edges[1:]) / 2,
        "counts": [each.tolist() for each in counts],
        "right": float((positive == (along > 0)).mean()),
        "high": listed(order[:_ENDS]),
        "low": listed(order[::-1][:_ENDS]),
        "values": (difference / length).astype(np.float32),
    }


def accuracies(means: MeanRows) -> dict[str, Any]:
    """Return, for each tap, how many held-out documents a linear probe classifies correctly.

    Half of the documents of each label are held out.
    """
    order = np.argsort(~means.positive, kind="stable")  # one label after the other
    held = np.zeros(len(order), bool)
    held[order[1::2]] = True
    truth = means.positive[held]
    if len({*means.positive[~held].tolist()}) < 2 or len({*truth.tolist()}) < 2:
        raise ConfigError("a probe needs at least three documents of each label")
    taps = [
        {"tap": tap, "accuracy": float((_told(rows, means.positive, held) == truth).mean())}
        for tap, rows in means.rows.items()
    ]
    usual = float(max(truth.mean(), 1 - truth.mean()))
    return {
        "taps": taps,
        "usual": usual,
        "trained": int((~held).sum()),
        "held": int(held.sum()),
        "of": means.of,
    }


def _told(rows: np.ndarray, positive: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Predict the held-out documents by ridge regression on the others.

    The penalty is the one of least squared error when each document is left out in turn.
    """
    centre = rows[~held].mean(axis=0)
    own, others = rows[~held] - centre, rows[held] - centre
    scale = float(np.square(own).sum(axis=1).mean()) or 1.0
    products = np.asarray(own @ own.T / scale, np.float64)
    wanted = np.where(positive[~held], 1.0, -1.0)
    usual, one = float(wanted.mean()), np.eye(len(own))
    best, weights = np.inf, wanted
    for ridge in (_RIDGES * len(own)).tolist():
        inverse = np.linalg.solve(products + float(ridge) * one, one)
        found = inverse @ (wanted - usual)
        error = float(np.square(found / np.diag(inverse)).sum())
        if error < best:
            best, weights = error, found
    return others @ own.T @ weights / scale + usual > 0

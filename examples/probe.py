"""A linear probe: predict a label of a document from single rows of a tap.

    spile extract --model demo --corpus demo --taps resid_post:9 --out acts/demo
    python examples/probe.py acts/demo --tap resid_post.9 --label 'year >= 1900'

The label is a condition over the columns kept from the corpus, written as for --filter:
`topic == 'law' and year >= 1900`. The probe is logistic regression on single rows, by Newton's
method; every fifth document is held out, with all its rows.
"""

import argparse

import numpy as np

import spile
from spile.core.errors import SpileError
from spile.core.expressions import DocumentFilter

HELD_OUT = 5  # every fifth document is held out


def labels(ds: spile.Dataset, label: str) -> np.ndarray:
    """Return the label of every document of the corpus: 1 or 0."""
    condition = DocumentFilter(label, "--label")
    for name in condition.columns:
        if name not in ds.document_columns:
            raise SpileError(condition.missing(ds.url, name, ds.document_columns))
    documents = ds.documents([*dict.fromkeys(["doc", *condition.columns])]).to_pylist()
    found = np.zeros(max(row["doc"] for row in documents) + 1, np.float32)
    for row in documents:
        found[row["doc"]] = condition.matches(row, untyped=True)  # "7" is a number, as in CSV
    return found


def rows(
    ds: spile.Dataset, tap: str, where: str, most: int, of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, with a column of ones, and the label of each."""
    batch = next(ds.batches([tap], most, where=where, shuffle="full", normalize="std"))
    flat = batch[tap].reshape(len(batch["index"]), -1)
    return np.pad(flat, ((0, 0), (0, 1)), constant_values=1.0), of[batch["index"]["doc"]]


def fitted(x: np.ndarray, y: np.ndarray, ridge: float, turns: int = 12) -> np.ndarray:
    """Return the weights of a logistic model with an L2 penalty of `ridge`."""
    weights = np.zeros(x.shape[1], np.float64)
    for _ in range(turns):
        chance = _chance(x, weights)
        slope = x.T @ (chance - y) + ridge * weights
        bend = (x * (chance * (1 - chance))[:, None]).T @ x + ridge * np.eye(x.shape[1])
        weights -= np.linalg.solve(bend, slope)
    return weights


def _chance(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("--tap", required=True)
    parser.add_argument("--label", required=True, help="a condition, e.g. 'year >= 1900'")
    parser.add_argument("--rows", type=int, default=20_000, help="trained on, at most")
    parser.add_argument("--ridge", type=float, default=100.0)
    args = parser.parse_args()
    try:
        ds = spile.open(args.dataset)
        of = labels(ds, args.label)
    except SpileError as error:
        raise SystemExit(str(error)) from None
    held = f"pos >= 1 and doc % {HELD_OUT} == 0"
    x, y = rows(ds, args.tap, f"pos >= 1 and doc % {HELD_OUT} != 0", args.rows, of)
    tested, truth = rows(ds, args.tap, held, args.rows // HELD_OUT, of)
    weights = fitted(x, y, args.ridge)
    accuracy = np.mean((_chance(tested, weights) > 0.5) == truth)
    usual = max(truth.mean(), 1 - truth.mean())
    print(
        f"{accuracy:.3f} of {len(truth):,} held-out rows are right; always one answer: {usual:.3f}"
    )


if __name__ == "__main__":
    main()

"""Parts of spans become rows, the same however they arrive."""

import numpy as np
import pytest

from spile.core.index import INDEX_DTYPE
from spile.core.pool import MOMENTS, Pool
from spile.corpus.pooled_spans import PooledSpans
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import TapInfo
from spile.run.pipeline.merging import CovarianceMerger, SpanMerger

INFO = TapInfo((3,), "float32")
# (document, packed row) of each token: documents 0 and 2 have parts in two packed rows.
TOKENS = [(0, 0), (0, 0), (1, 0), (2, 1), (0, 1), (2, 2), (3, 2), (2, 2)]


@pytest.fixture(scope="module")
def spans() -> PooledSpans:
    entries = np.zeros(len(TOKENS), INDEX_DTYPE)
    entries["doc"] = [doc for doc, _ in TOKENS]
    entries["offset"] = range(len(TOKENS))
    places = np.array([row for _, row in TOKENS])
    return PooledSpans.of(entries, np.zeros(len(TOKENS), np.int64), places, Pool("mean"))


VALUES = np.random.default_rng(0).standard_normal((len(TOKENS), 3)).astype(np.float32)
# Tokens of each part, in packed order, by packed row.
PARTS = [[[0, 1], [2]], [[3], [4]], [[5, 7], [6]]]
DOCS = [1, 0, 2, 3]  # in the order of their last parts


def parts(by: str, rows: list[int]) -> np.ndarray:
    reduce = np.sum if by == "mean" else np.max
    return np.stack([reduce(VALUES[each], axis=0) for row in rows for each in PARTS[row]])


@pytest.mark.parametrize("by", ["mean", "max"])
@pytest.mark.parametrize("steps", [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]])
def test_rows_and_statistics_are_those_of_numpy(
    by: str, steps: list[list[int]], spans: PooledSpans
) -> None:
    assert spans.index["doc"].tolist() == DOCS
    merger = SpanMerger(spans, by, INFO)
    found = [merger.add(parts(by, rows)) for rows in steps]
    rows = np.concatenate([rows for rows, _ in found])
    assert rows.dtype == np.float32
    for row, doc in zip(rows, DOCS, strict=True):
        own = VALUES[[n for n, (of, _) in enumerate(TOKENS) if of == doc]].astype(np.float64)
        wanted = own.mean(axis=0) if by == "mean" else own.max(axis=0)
        np.testing.assert_allclose(row, wanted, rtol=1e-6)
    # Statistics come by packed row, whatever a step holds: 1 completes document 0, and so on.
    stats = [each for _, group in found for each in group]
    assert [each.count for each in stats] == [1, 1, 2]
    total = TapStats.empty(3)
    for each in stats:
        total.merge(each)
    np.testing.assert_allclose(total.mean, rows.astype(np.float64).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(total.variance, rows.astype(np.float64).var(axis=0), rtol=1e-12)


@pytest.mark.parametrize("steps", [[[0, 1, 2]], [[0], [1], [2]]])
def test_moments_are_numpys_mean_and_variance(steps: list[list[int]], spans: PooledSpans) -> None:
    def moments(rows: list[int]) -> np.ndarray:
        own = [VALUES[each] for row in rows for each in PARTS[row]]
        sums = [each.sum(axis=0) for each in own]
        apart = [((each - each.mean(axis=0)) ** 2).sum(axis=0) for each in own]
        return np.stack([np.stack(sums), np.stack(apart)], axis=-1)

    merger = SpanMerger(spans, MOMENTS, TapInfo((3, 2), "float64"))
    rows = np.concatenate([merger.add(moments(step))[0] for step in steps])
    assert rows.dtype == np.float64
    for row, doc in zip(rows, DOCS, strict=True):
        own = VALUES[[n for n, (of, _) in enumerate(TOKENS) if of == doc]].astype(np.float64)
        np.testing.assert_allclose(row[:, 0], own.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(row[:, 1], own.var(axis=0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("steps", [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]]])
def test_covariances_are_numpys_whatever_a_step_holds(
    steps: list[list[int]], spans: PooledSpans
) -> None:
    def products(rows: list[int]) -> np.ndarray:
        found = np.zeros((4, 3, 3), np.float32)
        tokens = [n for row in rows for part in PARTS[row] for n in part]
        for number, doc in enumerate(DOCS):
            own = VALUES[[n for n in tokens if TOKENS[n][0] == doc]]
            apart = own - own.mean(axis=0) if len(own) else own
            found[number] = apart.T @ apart
        return found

    merger = CovarianceMerger(spans, TapInfo((9,), "float64", covariance_of=(3,)), "tap")
    found = [merger.add(parts("mean", step), [products(step) / 2] * 2) for step in steps]
    rows = [row for group, _ in found for row in group]
    stats = [each for _, group in found for each in group]
    for row, each, doc in zip(rows, stats, DOCS, strict=True):
        own = VALUES[[n for n, (of, _) in enumerate(TOKENS) if of == doc]].astype(np.float64)
        covariance = np.cov(own.T, bias=True)
        np.testing.assert_allclose(row[:3], own.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(row[3:], covariance[np.triu_indices(3)], rtol=1e-5, atol=1e-7)
        assert each.count == 1 and each.mean.tolist() == row[:3].tolist()


def test_rows_are_rounded_to_what_is_stored(spans: PooledSpans) -> None:
    merger = SpanMerger(spans, "mean", TapInfo((3,), "bfloat16"))
    rows, stats = merger.add(parts("mean", [0, 1, 2]))
    assert rows.dtype.name == "bfloat16"
    assert stats[0].mean.tolist() == rows[0].astype(np.float64).tolist()

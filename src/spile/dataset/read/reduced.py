"""What `--reduce` stored for each label: the number of tokens, their mean, variance, covariance.

A unit stores sums for each of its labels. Here they are merged in float64, in stored order, so the
result has the same bits whoever made the units.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.humanize import plural
from spile.core.index import ROLES
from spile.core.options import listed
from spile.core.pool import JACOBIAN, MOMENTS, ROLE, SPEAKERS, Pool
from spile.dataset.read.rows import StoredRows
from spile.dataset.read.tables import DocumentTables

_WINDOW_BYTES = 32 << 20  # of stored sums, read at a time

LabelValue = Any  # of a column, or a tuple of the values of several


class ReducedRows:
    """One entry for each label, in ascending order.

    `reduced[label]` is the mean of a label, and `reduced.means[i]` that of `reduced.labels[i]`.

    Attributes:
        labels: the values of the column; of several columns, tuples; without --by, (None,).
        counts: how many tokens each has; of Jacobians, how many prompts.
        means: [labels, width] in float64; with the axes of a row, if it has several. Of
            `--reduce jacobian:TAP`, [1, width of TAP, width]: the mean Jacobian of all prompts.
        variances: the same for the population variance of each channel; None unless `var` or `cov`
            was asked for.
        covariances: [labels, width, width]: the population covariance; None without `cov`. The axes
            of a row count as one, of `width` values.
    """

    def __init__(
        self,
        labels: Sequence[LabelValue],
        counts: np.ndarray,
        means: np.ndarray,
        variances: np.ndarray | None,
        covariances: np.ndarray | None,
        told: str,
    ) -> None:
        """`told`: what was reduced, in words."""
        self.labels, self.counts = tuple(labels), counts
        self.means, self.variances, self.covariances = means, variances, covariances
        self._told = told

    @property
    def second_moments(self) -> np.ndarray:
        """[labels, width, width]: the mean of the outer product of a row with itself."""
        if self.covariances is None:
            raise ConfigError(f"{self._told}: second moments need --reduce mean,cov")
        means = self.means.reshape(len(self), -1)
        return self.covariances + means[:, :, None] * means[:, None, :]

    def __getitem__(self, label: LabelValue) -> np.ndarray:
        """Return the mean of a label's tokens."""
        if label not in self.labels:
            raise ConfigError(
                f"no label {label!r} in {self._told}; there are {listed(map(repr, self.labels))}"
            )
        return self.means[self.labels.index(label)]

    __iter__ = None  # (or Python would try reduced[0], reduced[1], …)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = " x ".join(f"{size:,}" for size in self.means.shape[1:])
        return (
            f"<{self._told}: {plural(len(self.labels), 'label')} "
            f"({listed(map(repr, self.labels))}), means of {shape} over "
            f"{plural(int(self.counts.sum()), 'token')}>"
        )


def reduced(stored: StoredRows, tables: DocumentTables, tap: str) -> ReducedRows:
    """Merge the sums of a tap over all units."""
    text = stored.table.recipe.pool
    pool = Pool.parse(text) if text else None
    url = stored.objects.url
    if pool is None or pool.labels is None:
        raise ConfigError(
            f"{url}: holds rows, not sums of --reduce; ds.pooled(tap) returns a mean for each "
            "document, and ds.statistics(tap) the mean over all rows"
        )
    if pool.by == JACOBIAN:
        return _jacobian(stored, tap, f"{tap} of {url}, {text}")
    index = stored.index(0, stored.count)
    labels, place = _labels_of(pool, tables, index)
    info = stored.table.taps[tap]
    counts = np.zeros(len(labels), np.int64)
    sums = np.zeros((len(labels), *info.shape), np.float64)
    upper = np.triu_indices(info.channels) if info.covariance_of is not None else None
    step = max(1, _WINDOW_BYTES // info.row_bytes)
    for start in range(0, len(index), step):
        stop = min(start + step, len(index))
        rows = np.empty((stop - start, *info.shape), np.float64)
        stored.fill(tap, list(stored.pieces(tap, start, stop)), rows)
        for row, at, count in zip(
            rows, place[start:].tolist(), index["count"][start:].tolist(), strict=False
        ):
            share = count / (int(counts[at]) + count)
            if pool.by == MOMENTS:
                _merge(sums[at, ..., :1], sums[at, ..., 1:], row[..., :1], row[..., 1:], share)
            elif upper is not None:
                (means, spread), (own, more) = (
                    np.split(each, [info.channels]) for each in (sums[at], row)
                )
                _merge(means, spread, own, more, share, upper)
            else:
                sums[at] += (row - sums[at]) * share
            counts[at] += count
    told = f"{tap} of {url}, {text}"
    if pool.by == MOMENTS:
        return ReducedRows(labels, counts, sums[..., 0], sums[..., 1], None, told)
    if upper is None:
        return ReducedRows(labels, counts, sums, None, None, told)
    covariances = np.empty((len(labels), info.channels, info.channels))
    for full, own in zip(covariances, sums[:, info.channels :], strict=True):
        full[upper] = full.T[upper] = own
    shape = (len(labels), *(info.covariance_of or ()))
    means = sums[:, : info.channels].reshape(shape)
    variances = np.diagonal(covariances, axis1=1, axis2=2).reshape(shape)
    return ReducedRows(labels, counts, means, variances, covariances, told)


def _jacobian(stored: StoredRows, tap: str, told: str) -> ReducedRows:
    """Merge the mean Jacobians of all units; each weighs as its prompts."""
    info = stored.table.taps[tap]
    assert info.jacobian_of
    prompts, mean = 0, np.zeros(info.width - 1)
    for at in range(stored.count):
        row = np.empty((1, info.width), np.float64)
        stored.fill(tap, list(stored.pieces(tap, at, at + 1)), row)
        prompts += int(row[0, 0])
        mean += (row[0, 1:] - mean) * (row[0, 0] / max(1, prompts))
    means = mean.reshape(1, *info.jacobian_of)
    return ReducedRows((None,), np.array([prompts]), means, None, None, told)


def _merge(
    mean: np.ndarray,
    spread: np.ndarray,
    more_mean: np.ndarray,
    more_spread: np.ndarray,
    share: float,
    pairs: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Add more tokens to a mean and variance (Chan's update).

    Args:
        share: that of the new tokens among all.
        pairs: the two channels of each value of a covariance; None: `spread` is of variances.
    """
    apart = more_mean - mean
    squares = apart * apart if pairs is None else apart[pairs[0]] * apart[pairs[1]]
    spread += (more_spread - spread) * share + squares * (share * (1 - share))
    mean += apart * share


def _labels_of(
    pool: Pool, tables: DocumentTables, index: np.ndarray
) -> tuple[list[LabelValue], np.ndarray]:
    """Return the labels in ascending order, and the place of each row's label among them."""
    names = pool.label_columns
    # (By Arrow, since numpy has no integers with missing values, and other documents miss some.)
    documents = tables.table(["doc", *names])
    doc = documents["doc"].to_numpy()
    order = np.argsort(doc, kind="stable")
    at = order[np.searchsorted(doc, index["doc"], sorter=order)]
    columns: list[list[LabelValue]] = [documents[name].take(at).to_pylist() for name in names]
    if ROLE in (pool.labels or ()):
        columns.append([_speaker(flags) for flags in index["flags"].tolist()])
    values: list[LabelValue] = [None] * len(index)
    if columns:
        values = columns[0] if len(columns) == 1 else [*zip(*columns, strict=True)]
    labels: list[LabelValue] = sorted({*values}, key=_in_order)
    places = {label: number for number, label in enumerate(labels)}
    numbers = [places[value] for value in values]
    return labels, np.array(numbers, np.int64)


def _in_order(label: LabelValue) -> tuple[str, LabelValue]:
    return label.__class__.__name__, label  # (values of a column may be of several types)


def _speaker(flags: int) -> str:
    return next(role for role in SPEAKERS if flags & ROLES[role])

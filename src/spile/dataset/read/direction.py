"""A direction between two groups of labelled documents: the difference of their means, or LDA.

ds = spile.open("acts/labelled")
refusal = spile.direction(ds, "refusal", "harmless", "resid_post.9")
np.save("refusal.npy", refusal)  # for --splice steer:resid_post.9=refusal.npy*4
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from spile.core.errors import ConfigError, DataError
from spile.core.options import listed
from spile.core.pool import Pool, is_reduced, reduces
from spile.dataset.codec.quantization import DECODED
from spile.dataset.read.choice import RowChoice, row_choice
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.rows import Rows

_WINDOW_BYTES = 32 << 20  # of rows in float32, read at a time
_SCANNED = 1 << 20  # rows whose index is read at a time
_VALUES = 8  # values of a column that an error lists
_ROUNDING = 1e-12  # of sums in float64: a smaller difference of means is noise
_SIDES = 2  # the positive documents, and the negative ones

Label = str | int | float | bool
MeanOver = Literal["documents", "tokens"]


class Direction(NDArrayOperatorsMixin):
    """A vector from one group of documents to another; numpy takes it as an array.

    `np.save(path, direction)` writes what `--splice steer:` reads; `4 * direction` and
    `rows @ direction` are arrays.

    Attributes:
        values: the vector in float32, in the shape of a row. Adding it once moves a row along the
            direction by the distance between the means of the two groups.
        tap: where its rows come from.
        documents: how many documents were used, by label; none if the dataset holds sums.
        rows: how many rows, by label; if it holds sums, how many tokens.
        shrinkage: of the covariance, from 0 to 1; None without `whiten`.
    """

    def __init__(
        self,
        values: np.ndarray,
        tap: str,
        documents: dict[Label, int],
        rows: dict[Label, int],
        shrinkage: float | None,
    ) -> None:
        self.values, self.tap, self.shrinkage = values, tap, shrinkage
        self.documents, self.rows = documents, rows

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute with the values, and return what numpy returns for them."""
        arrays = (each.values if isinstance(each, Direction) else each for each in inputs)
        return getattr(ufunc, method)(*arrays, **options)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        sides = [
            f"{label!r} ({self.documents[label]:,} documents, {rows:,} rows)"
            if label in self.documents
            else f"{label!r} ({rows:,} tokens)"
            for label, rows in self.rows.items()
        ]
        length = float(np.linalg.norm(self.values))
        return f"<spile direction: {self.tap}, {' minus '.join(sides)}, length {length:.4g}>"


def direction(
    ds: Dataset,
    positive: Label,
    negative: Label,
    tap: str,
    *,
    by: str | Sequence[Label] | np.ndarray | None = None,
    over: MeanOver | None = None,
    where: str | None = None,
    whiten: bool = False,
) -> Direction:
    """Return the direction from the documents labelled `negative` to those labelled `positive`.

    It is the difference of the means of the two groups, in float64. The rows are read once, in
    stored order (with `whiten`, twice), and never held.

    Args:
        by: the kept column that holds the labels; or one label for each document that has rows, in
            the order of `ds.columns`, as in `by=ds.columns("year") >= 1900`. It may be left out if
            exactly one kept column has both values.
        over: what the means are over. "documents", the default: each document counts once, with
            the mean of its tokens. "tokens": each token counts once, so that long documents count
            for more. Rows of a dataset made with `--pool mean` count as the tokens that they stand
            for, and those of `max`, `last` and `first` as one. The sums of `--reduce` are over
            tokens, and take no `where`.
        where: the rows to use, as in `ds.batches`: "not special and pos >= 1".
        whiten: return the direction of linear discriminant analysis: the inverse of the covariance
            within the groups, times the difference. The covariance is shrunk by the formula of
            Ledoit and Wolf (2004); `_whitened` has it. Sums need covariances (`--reduce mean,cov`),
            which are shrunk by OAS (Chen and others, 2010).

    Raises:
        ConfigError: if no document has one of the labels, or the column cannot be determined.
        DataError: if rows hold NaN or infinity.
    """
    tap = ds.name(tap)
    if ds.num_latents(tap) or ds.dtype(tap).kind == "i":
        raise ConfigError(
            f"{tap}: place k of a row is its k-th largest, whichever that is, so that a mean over "
            "rows has no meaning"
        )
    if is_reduced(ds.recipe.pool):
        if where:
            raise ConfigError(f"{ds.url}: holds sums by label, not rows to choose; leave out where")
        return _of_sums(ds, positive, negative, tap, by, over, whiten=whiten)
    over = over or "documents"
    if over not in get_args(MeanOver):
        raise ConfigError(f"means are over 'documents' or 'tokens', not over {over!r}")
    if ds.recipe.pool and over == "tokens" and (whiten or reduces(ds.recipe.pool) != "mean"):
        raise ConfigError(
            f"{ds.url}: was made with --pool {ds.recipe.pool}, so that tokens have no "
            + ("covariance" if whiten else "mean")
            + "; use over='documents'"
        )
    groups = _groups(ds, positive, negative, by, where)
    means = _means(ds, tap, groups, over)
    difference = _difference(means, f"{ds.url}: {tap}", positive, negative)
    shrinkage = None
    if whiten:
        difference, shrinkage = _whitened(difference, _samples(ds, tap, groups, over, means), tap)
    labels = (positive, negative)
    return Direction(
        difference.astype(DECODED).reshape(ds.shape(tap)),
        tap,
        {label: int(np.count_nonzero(groups.side == n)) for n, label in enumerate(labels)},
        {label: int(groups.rows[groups.side == n].sum()) for n, label in enumerate(labels)},
        shrinkage,
    )


def _difference(means: np.ndarray, where: str, positive: Label, negative: Label) -> np.ndarray:
    found = means[0] - means[1]
    if not np.isfinite(found).all():
        raise DataError(f"{where}: rows hold NaN or infinity, and so would the mean")
    if np.abs(found).max() <= _ROUNDING * np.abs(means).max():
        raise ConfigError(f"{where}: the means of {positive!r} and {negative!r} are equal")
    return found


def _of_sums(
    ds: Dataset,
    positive: Label,
    negative: Label,
    tap: str,
    by: object,
    over: str | None,
    *,
    whiten: bool,
) -> Direction:
    """Return the difference of two means that `--reduce` stored, or LDA by their covariances."""
    columns = ",".join(Pool.parse(ds.recipe.pool or "").labels or ())
    named = by is None or (isinstance(by, str) and by == columns)
    if not named or over not in (None, "tokens"):
        raise ConfigError(
            f"{ds.url}: holds sums by label, over tokens; leave out by and over, or extract with "
            "--pool mean"
        )
    sums = ds.reduced(tap)
    if whiten and sums.covariances is None:
        raise ConfigError(
            f"{ds.url}: holds no covariances, which whiten needs; extract with --reduce mean,cov"
        )
    means = np.stack([sums[positive], sums[negative]])
    found = _difference(means, f"{ds.url}: {tap}", positive, negative)
    counts = dict(zip(sums.labels, sums.counts.tolist(), strict=True))
    rows = {label: counts[label] for label in (positive, negative)}
    shrinkage = None
    if whiten and sums.covariances is not None:
        shares = [counts[label] / sum(rows.values()) for label in rows]
        own = [sums.covariances[sums.labels.index(label)] for label in rows]
        covariance = sum(share * each for share, each in zip(shares, own, strict=True))
        shrinkage = _oracle_shrinkage(np.asarray(covariance), sum(rows.values()), tap)
        flat = _solved(np.asarray(covariance), shrinkage, found.reshape(-1), tap)
        found = flat.reshape(found.shape)
    return Direction(found.astype(DECODED), tap, {}, rows, shrinkage)


@dataclass(frozen=True)
class _Groups:
    """The documents of both groups that have rows.

    Attributes:
        doc: their ordinals, ascending.
        side: 0 for a positive document, 1 for a negative one.
        rows: how many rows were chosen of each.
        tokens: how many tokens these stand for.
        choice: the rows to use.
        pooled: whether a row is the mean of `count` tokens.
    """

    doc: Rows
    side: Rows
    rows: Rows
    tokens: Rows
    choice: RowChoice | None
    pooled: bool

    def find(self, entries: np.ndarray) -> tuple[Rows, Rows, Rows]:
        """Return which entries are used, the place of each one's document, and its tokens."""
        places = np.minimum(np.searchsorted(self.doc, entries["doc"]), len(self.doc) - 1)
        used = self.doc[places] == entries["doc"]
        if self.choice is not None:
            used &= self.choice.mask(entries)
        tokens = entries["count"] if self.pooled else np.ones(len(entries), np.int64)
        return np.flatnonzero(used), places[used], tokens[used]


def _groups(
    ds: Dataset,
    positive: Label,
    negative: Label,
    by: str | Sequence[Label] | np.ndarray | None,
    where: str | None,
) -> _Groups:
    """Find the documents with either label, and count their rows."""
    choice = where and row_choice(where, ds.url, ds.document_columns, ds.documents)
    if positive == negative:
        raise ConfigError(f"both labels are {positive!r}; a direction leads from one to another")
    named, labels = _labels(ds, positive, negative, by)
    sides = [np.array([value == label for value in labels], bool) for label in (positive, negative)]
    for label, chosen in zip((positive, negative), sides, strict=True):
        if not chosen.any():
            raise ConfigError(
                f"{ds.url}: no document has {named} {label!r}; there are {_told(labels)}"
            )
    used = sides[0] | sides[1]
    nothing = np.zeros(int(used.sum()), np.int64)
    found = _Groups(
        doc=ds.columns("doc")[used],
        side=np.where(sides[0][used], 0, 1),
        rows=nothing,
        tokens=nothing.copy(),
        choice=choice or None,
        pooled=reduces(ds.recipe.pool) == "mean",
    )
    for low in range(0, ds.num_tokens, _SCANNED):
        _, places, tokens = found.find(ds.index(low, min(low + _SCANNED, ds.num_tokens)))
        np.add.at(found.rows, places, 1)
        np.add.at(found.tokens, places, tokens)
    kept = found.rows > 0
    for side, label in enumerate((positive, negative)):
        if not kept[found.side == side].any():
            chosen = f"where {where!r}: " if where else ""
            raise ConfigError(f"{chosen}no row of {ds.url} belongs to {named} {label!r}")
    columns = {name: getattr(found, name)[kept] for name in ("doc", "side", "rows", "tokens")}
    return replace(found, **columns)


def _labels(
    ds: Dataset,
    positive: Label,
    negative: Label,
    by: str | Sequence[Label] | np.ndarray | None,
) -> tuple[str, list[Any]]:
    """Return the name of the labels, and the label of each document that has rows."""
    if isinstance(by, str):
        return by, ds.columns(by).tolist()
    if by is not None:
        given, count = np.asarray(by), len(ds.columns("doc"))
        if given.shape != (count,):
            raise ConfigError(
                f"by: {list(given.shape)} labels for {count:,} documents with rows; give one for "
                "each, in the order of ds.columns('doc')"
            )
        return "the label", given.tolist()
    columns = {name: ds.columns(name).tolist() for name in ds.recipe.keep}
    both = [name for name, values in columns.items() if positive in values and negative in values]
    if len(both) == 1:
        return both[0], columns[both[0]]
    if both:
        raise ConfigError(
            f"{ds.url}: {listed(both)} have both {positive!r} and {negative!r}; name one: "
            f"by={both[0]!r}"
        )
    told = "; ".join(f"{name} has {_told(values)}" for name, values in columns.items())
    raise ConfigError(
        f"{ds.url}: no kept column has both {positive!r} and {negative!r}; "
        + (told or "no column was kept: extract with --keep COLUMN, or give labels as by=")
    )


def _told(labels: Sequence[Any]) -> str:
    """Return the values that occur, the most frequent first, with the number of documents."""
    counts = Counter(labels).most_common()
    shown = ", ".join(f"{value!r} ({count:,})" for value, count in counts[:_VALUES])
    more = f", and {len(counts) - _VALUES:,} others" if len(counts) > _VALUES else ""
    return f"{shown}{more}"


def _windows(ds: Dataset, tap: str, groups: _Groups) -> Iterator[tuple[np.ndarray, Rows, Rows]]:
    """Yield rows [any, width] of the groups, the place of each one's document, and its tokens."""
    width = ds.width(tap)
    most = max(1, _WINDOW_BYTES // (width * DECODED.itemsize))
    window = np.empty((min(most, ds.num_tokens), *ds.shape(tap)), DECODED)
    for low in range(0, ds.num_tokens, len(window)):
        high = min(low + len(window), ds.num_tokens)
        used, places, tokens = groups.find(ds.index(low, high))
        if len(used):
            ds.read_into(tap, low, window[: high - low])
            yield window.reshape(len(window), width)[used], places, tokens


def _means(ds: Dataset, tap: str, groups: _Groups, over: MeanOver) -> np.ndarray:
    """Return the mean of each group, [2, width]."""
    each = 1 / groups.tokens if over == "documents" else np.ones(len(groups.tokens))
    sums = np.zeros((_SIDES, ds.width(tap)))
    for rows, places, tokens in _windows(ds, tap, groups):
        weights = np.zeros((_SIDES, len(rows)))
        weights[groups.side[places], np.arange(len(rows))] = each[places] * tokens
        with np.errstate(invalid="ignore"):  # of infinity; `direction` refuses the sum
            sums += weights @ rows.astype(np.float64)
    counts = np.ones(len(groups.tokens)) if over == "documents" else groups.tokens
    return sums / np.bincount(groups.side, counts, _SIDES)[:, None]


def _samples(
    ds: Dataset, tap: str, groups: _Groups, over: MeanOver, means: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the samples of the covariance (documents or tokens), minus their group's mean."""
    begun: dict[int, tuple[np.ndarray, int]] = {}  # sums of documents, and how many rows they hold
    for rows, places, tokens in _windows(ds, tap, groups):
        wide = rows.astype(np.float64)
        if over == "tokens":
            yield wide - means[groups.side[places]]
            continue
        wide *= tokens[:, None]
        begins = np.flatnonzero(np.diff(places, prepend=-1)).tolist()
        whole: list[np.ndarray] = []
        for first, last in zip(begins, [*begins[1:], len(places)], strict=True):
            place = int(places[first])
            total, count = wide[first:last].sum(axis=0), last - first
            if place in begun:
                before = begun.pop(place)
                total, count = total + before[0], count + before[1]
            if count < groups.rows[place]:
                begun[place] = total, count
            else:
                whole.append(total / groups.tokens[place] - means[groups.side[place]])
        if whole:
            yield np.array(whole)


def _whitened(
    difference: np.ndarray, samples: Iterator[np.ndarray], tap: str
) -> tuple[np.ndarray, float]:
    """Return the direction of LDA and the shrinkage of the covariance (Ledoit and Wolf, 2004).

    With centred samples x of n, and S their covariance (1/n) sum x x', of trace p m, the estimate
    is (1 - g) S + g m I with g = min(1, b / d): d = |S - m I|^2 is how far S is from a multiple of
    the identity, b = (1/n^2) sum |x x' - S|^2 how far samples scatter around it.
    """
    width, count, fourth = len(difference), 0, 0.0
    covariance = np.zeros((width, width))
    for rows in samples:
        covariance += rows.T @ rows
        fourth += float(np.square(np.square(rows).sum(axis=1)).sum())
        count += len(rows)
    covariance /= count
    mean = float(np.trace(covariance)) / width
    _refuse_no_spread(mean, count, tap)
    size = float(np.square(covariance).sum())
    apart, scatter = size - width * mean**2, (fourth / count - size) / count
    shrinkage = min(1.0, max(0.0, scatter / apart)) if apart > 0 else 1.0
    return _solved(covariance, shrinkage, difference, tap), shrinkage


def _refuse_no_spread(mean: float, count: int, tap: str) -> None:
    if count <= _SIDES or mean == 0:
        raise ConfigError(
            f"{tap}: whiten needs a group with two documents that differ; within each group all "
            "rows are equal"
        )


def _oracle_shrinkage(covariance: np.ndarray, count: int, tap: str) -> float:
    """Return the shrinkage of a covariance of `count` samples (OAS: Chen and others, 2010).

    It needs no moments beyond the covariance, unlike that of Ledoit and Wolf. (It is their formula
    for normal samples.)
    """
    width = len(covariance)
    mean = float(np.trace(covariance)) / width
    _refuse_no_spread(mean, count, tap)
    size = float(np.square(covariance).mean())
    apart = (count + 1) * (size - mean**2 / width)
    return min(1.0, (size + mean**2) / apart) if apart > 0 else 1.0


def _solved(
    covariance: np.ndarray, shrinkage: float, difference: np.ndarray, tap: str
) -> np.ndarray:
    """Return the direction of LDA, as long as the difference is along it; changes `covariance`."""
    width = len(difference)
    mean = float(np.trace(covariance)) / width
    covariance *= 1 - shrinkage
    covariance.flat[:: width + 1] += shrinkage * mean
    try:
        found = np.linalg.solve(covariance, difference)
    except np.linalg.LinAlgError:
        raise ConfigError(f"{tap}: the covariance within the groups is singular") from None
    unit = found / np.linalg.norm(found)
    return unit * (unit @ difference)

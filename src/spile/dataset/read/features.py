"""Features: what `spile features` has counted of a tap's latents, or of directions, to be read.

features = spile.open("acts/latents").features("resid_post.9")
features.density[17], features.top(17).values

Counts, sums and histograms are exact, and so are the top rows. Quantiles and the examples of each
band come from a sample that was drawn by a hash: with n drawn of more rows, the rank of a quantile
q has a standard error of sqrt(q (1 - q) / n). A latent with at most n active rows has all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spile.core.errors import ConfigError, CorruptError
from spile.dataset.codec.coactivation import nearest_latents
from spile.dataset.codec.columns import ColumnFile, read_columns
from spile.dataset.codec.features import LatentCounts, bin_edges
from spile.dataset.read.rows import Rows
from spile.dataset.records.features import (
    FeatureFiles,
    FeatureSet,
    FeatureSpec,
    digest_of_units,
    live_sets,
)
from spile.dataset.records.ledger import Ledger
from spile.objects import Objects

BANDS = 5


class FeatureRows(Protocol):
    """The part of `Dataset` that features need."""

    @property
    def url(self) -> str: ...
    @property
    def units(self) -> list[int]: ...
    @property
    def unit_starts(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def index_dtype(self) -> np.dtype[Any]: ...
    def read_at(self, tap: str, rows: Rows) -> np.ndarray: ...
    def index_at(self, rows: Rows) -> np.ndarray: ...
    def pass_of(self, tap: str) -> str: ...
    def record(self, unit: int) -> Any: ...


@dataclass(frozen=True)
class Examples:
    """Rows in which a latent is active, the largest first.

    Attributes:
        rows: row numbers in the dataset.
        values: the latent's activations there, in float32.
        tokens: the token ids of the rows.
    """

    rows: Rows
    values: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Band:
    """A random sample of the active rows whose activations lie between two quantiles.

    Attributes:
        low, high: the smallest and the largest activation drawn in the band.
        share: the share of all active rows that the band stands for.
    """

    low: float
    high: float
    share: float
    examples: Examples


@dataclass(frozen=True)
class NearestLatents:
    """For each latent, the nearest ones of another encoder, over a sample of rows.

    Attributes:
        ids, near: [latents, count]: −1, and 0, where there is none.
        rows: how many rows the sample has.
        seen: whether a latent is active in one of them.
    """

    ids: np.ndarray
    near: np.ndarray
    rows: int
    seen: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TokenWindows:
    """The rows around examples, [examples, before + 1 + after].

    Attributes:
        rows: row numbers; undefined where `there` is false.
        there: whether there is such a row in the same context.
        tokens: token ids, 0 where there is no row.
        values: the latent's activations.
    """

    rows: Rows
    there: npt.NDArray[np.bool_]
    tokens: np.ndarray
    values: np.ndarray


class Features:
    """What was counted of every latent of a tap.

    Attributes:
        tap: the encoded tap by its name in the model, or the dense tap of directions.
        names: of directions, their names; none of latents.
        num_latents: how many there are.
        rows: how many rows were counted; `units`: how many units of the dataset, from the first.
        examples: how many rows are kept of each latent, at the top and in each band.
        drawn: how many active rows are drawn of each latent.
        sampled_rows: how many rows were drawn to find neighbours.
    """

    def __init__(
        self, dataset: FeatureRows, features: FeatureSet, spec: FeatureSpec, made: FeatureFiles
    ) -> None:
        self._dataset, self._set, self._spec, self._made = dataset, features, spec, made
        self.tap, self.names, self.num_latents = spec.tap, spec.names, spec.latents
        self.rows, self.units = made.rows, made.units
        self.examples, self.drawn = spec.options.examples, spec.options.drawn
        self._range = lru_cache(None)(self._read_range)

    def __len__(self) -> int:
        return self.num_latents

    def __repr__(self) -> str:
        kind = "directions" if self.names else "latents"
        return (
            f"<spile features: {self.num_latents:,} {kind} of {self.tap}, {self.rows:,} rows of "
            f"{self._dataset.url}>"
        )

    @property
    def name(self) -> str:
        """The name of the set, as `spile drop --features` takes it."""
        return self._set.name

    @property
    def stored_taps(self) -> tuple[str, ...]:
        """The taps of the dataset that they are made from."""
        return self._spec.stored

    @property
    def is_signed(self) -> bool:
        """Whether values may be negative: those of directions."""
        return bool(self.names)

    # -- all latents -------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> np.ndarray:
        """How many rows each latent is active in."""
        return self._column("count")

    @property
    def density(self) -> np.ndarray:
        """The share of rows that each latent is active in."""
        return self.counts / max(1, self.rows)

    @cached_property
    def means(self) -> np.ndarray:
        """The mean activation over the rows that each latent is active in; NaN without any."""
        with np.errstate(invalid="ignore"):
            return self._column("sum") / self.counts

    @cached_property
    def largest(self) -> np.ndarray:
        """The largest activation of each latent; NaN if it is never active."""
        found = np.full(self.num_latents, np.nan, np.float32)
        for low, part in self._ranges():
            ends = part["top/ends"]
            starts = np.concatenate([[0], ends[:-1]])
            some = np.flatnonzero(ends > starts)
            found[low + some] = part["top/value"][starts[some]]
        return found

    def with_token(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the latents that are active at these tokens, and the share of their drawn rows
        that have one of them; the largest share first.

        Among equal shares, the latent with more such rows comes first.

        Raises:
            ConfigError: if a number cannot be a token id.
        """
        most = int(np.iinfo(np.int32).max)
        for token in tokens:
            if not 0 <= token <= most:
                raise ConfigError(f"token ids are from 0 to {most}, not {token}")
        wanted = np.array([*tokens], np.int64)
        shares = np.zeros(self.num_latents)
        counts = np.zeros(self.num_latents, np.int64)
        for low, part in self._ranges():
            hits = np.isin(part["drawn/token"], wanted)
            latents = part.latents_of("drawn")[hits]
            found = np.bincount(latents, minlength=part.latents)
            all_drawn = np.diff(part["drawn/ends"], prepend=0)
            counts[low : low + part.latents] = found
            shares[low : low + part.latents] = found / np.maximum(all_drawn, 1)
        some = np.flatnonzero(counts)
        order = some[np.lexsort((some, -counts[some], -shares[some]))]
        return order, shares[order]

    # -- one latent --------------------------------------------------------------------------------

    def histogram(self, latent: int) -> tuple[np.ndarray, np.ndarray]:
        """Return edges, and how many activations lie in each bin.

        Bins divide each power of two into four. The first and the last also hold all that lies
        beyond their edges.
        """
        part, at = self._of(latent)
        edges = bin_edges(signed=self.is_signed)
        counts = np.zeros(len(edges) - 1, np.int64)
        run = part.run("hist", at)
        counts[part["hist/bin"][run]] = part["hist/count"][run]
        return edges, counts

    def quantiles(self, latent: int, q: npt.ArrayLike) -> np.ndarray:
        """Return quantiles of the drawn activations; NaN if the latent is never active."""
        part, at = self._of(latent)
        values = part["drawn/value"][part.run("drawn", at)]
        wanted = np.asarray(q, np.float64)
        if not len(values):
            return np.full(wanted.shape, np.nan)
        return np.asarray(np.quantile(values, wanted, method="inverted_cdf"))

    def top(self, latent: int) -> Examples:
        """Return the rows in which a latent is largest; among equal ones, the first."""
        part, at = self._of(latent)
        return self._examples(part, "top", np.arange(*_bounds(part.run("top", at))))

    def bands(self, latent: int, count: int = BANDS) -> list[Band]:
        """Return bands with equally many active rows each, the largest activations first."""
        part, at = self._of(latent)
        low, high = _bounds(part.run("drawn", at))
        values = part["drawn/value"][low:high]
        order = np.argsort(-values, kind="stable")
        found: list[Band] = []
        for ranks in np.array_split(order, count) if len(order) else ():
            if not len(ranks):
                continue
            # (Entries are stored in the order in which they were drawn.)
            chosen = np.sort(ranks)[: self.examples]
            chosen = chosen[np.argsort(-values[chosen], kind="stable")]
            found.append(
                Band(
                    float(values[ranks[-1]]),
                    float(values[ranks[0]]),
                    len(ranks) / len(order),
                    self._examples(part, "drawn", low + chosen),
                )
            )
        return found

    def neighbours(self, latent: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the latents that are active in the same rows, and how near each is.

        Nearness is the cosine of activity over the drawn rows: the number in which both are active,
        divided by the geometric mean of the numbers in which each is.
        """
        self._check(latent)
        near = self._near
        if near is None:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        ids, scores = near["ids"][latent], near["score"][latent]
        return ids[ids >= 0], scores[ids >= 0]

    @cached_property
    def logit_blocks(self) -> tuple[int, ...]:
        """The blocks of latents whose logits were there when this was first asked for."""
        return (*self._set.blocks(),)

    @property
    def sampled_rows(self) -> int:
        """How many rows were drawn to find neighbours."""
        return min(self._spec.options.rows, self.rows)

    def nearest_in(self, other: "Features", count: int = 1) -> "NearestLatents":
        """Return, for each latent, the nearest ones of another encoder of the same rows.

        Nearness is as in `neighbours`. Two sets with the same `--neighbour-rows` have the same
        drawn rows; otherwise, those that both have are compared.
        """
        mine, theirs = self._drawn_rows, other._drawn_rows
        places, here, there = np.intersect1d(mine[0], theirs[0], return_indices=True)
        if not len(places):
            raise ConfigError(f"{self.name} and {other.name} have no drawn row in common")
        rows = mine[1][here]
        found = nearest_latents(rows, self.num_latents, theirs[1][there], other.num_latents, count)
        seen = np.zeros(self.num_latents, bool)
        seen[rows[rows >= 0]] = True
        return NearestLatents(*found, len(places), seen)

    @cached_property
    def _drawn_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The places of the drawn rows, and the ids of their active latents."""
        file = self._made.sampled
        found = self._columns(file)
        unit, row, ids = (found.get(name) for name in ("unit", "row", "ids"))
        if unit is None or row is None or ids is None or not len(unit) == len(row) == len(ids):
            raise CorruptError(file.key, "does not hold drawn rows")
        if ids.ndim != 2 or (ids.size and int(ids.max()) >= self.num_latents):
            raise CorruptError(file.key, f"does not hold rows of {self.num_latents} latents")
        return unit.astype(np.int64) << 32 | row, ids

    def logits(self, latent: int) -> "TokenLogits | None":
        """Return the tokens whose logits a latent raises and lowers most; None if not computed."""
        self._check(latent)
        for first, columns in self._logits:
            at = latent - first
            if 0 <= at < len(columns["raised/ids"]):
                found = (
                    columns[f"{name}/{each}"][at]
                    for name in ("raised", "lowered")
                    for each in ("ids", "value")
                )
                return TokenLogits(*found)
        return None

    def windows(self, latent: int, rows: Rows, before: int, after: int) -> TokenWindows:
        """Return the tokens around rows in their context, and the latent's activations there."""
        dataset, count = self._dataset, self._dataset.num_tokens
        offsets = np.arange(-before, after + 1)
        wanted = rows[:, None] + offsets
        inside = (wanted >= 0) & (wanted < count)
        places = np.where(inside, wanted, rows[:, None])
        unique, back = np.unique(places, return_inverse=True)
        back = back.reshape(places.shape)
        index = dataset.index_at(unique)
        # (A context begins at one place of its document, and its rows lie together.)
        doc, begin = index["doc"][back], (index["offset"] - index["pos"])[back]
        own = slice(before, before + 1)
        same = inside & (doc == doc[:, own]) & (begin == begin[:, own])
        values = self.values_at(latent, unique)[back]
        return TokenWindows(
            places, same, np.where(same, index["token_id"][back], 0), np.where(same, values, 0)
        )

    def values_at(self, latent: int, rows: Rows) -> np.ndarray:
        """Return a latent's activations in rows, given in ascending order."""
        stored = self._spec.stored
        if self.names:
            wide = self._dataset.read_at(stored[0], rows).reshape(len(rows), -1)
            return np.asarray(wide @ self.vectors[latent])
        values, ids = (self._dataset.read_at(tap, rows) for tap in stored)
        return np.where(ids == latent, values, 0).max(axis=1, initial=0).astype(np.float32)

    @cached_property
    def vectors(self) -> np.ndarray:
        """The directions, [directions, width]; an error for latents."""
        if self._spec.vectors is None:
            raise ConfigError(f"{self.tap}: features of latents; they have no vectors here")
        found = self._columns(self._spec.vectors).get("directions")
        if found is None or found.ndim != 2 or len(found) != self.num_latents:
            raise CorruptError(self._spec.vectors.key, f"does not hold {self.num_latents} vectors")
        return found

    # -- files -------------------------------------------------------------------------------------

    def follows_from_rows(self) -> bool:
        """Return whether the rows are those that were counted: a repair may have made others."""
        records = (self._dataset.record(unit) for unit in range(self.units))
        return digest_of_units(records, self._spec.stored) == self._made.made_from

    def _examples(self, part: LatentCounts, name: str, chosen: np.ndarray) -> Examples:
        units = part[f"{name}/unit"][chosen]
        starts, known = np.array(self._dataset.unit_starts), np.array(self._dataset.units)
        rows = starts[np.searchsorted(known, units)] + part[f"{name}/row"][chosen]
        if len(rows) and rows.max() >= self._dataset.num_tokens:
            raise CorruptError(part.key, "names rows that do not exist")
        return Examples(rows, part[f"{name}/value"][chosen], part[f"{name}/token"][chosen])

    def _of(self, latent: int) -> tuple[LatentCounts, int]:
        self._check(latent)
        at = int(np.searchsorted(self._spec.bounds, latent, side="right")) - 1
        return self._range(at), latent - self._spec.bounds[at]

    def _check(self, latent: int) -> None:
        if not 0 <= latent < self.num_latents:
            raise ConfigError(f"{self.tap} has latents 0 to {self.num_latents - 1}, not {latent}")

    def _ranges(self) -> "list[tuple[int, LatentCounts]]":
        bounds = self._spec.bounds
        return [(low, self._range(at)) for at, low in enumerate(bounds[:-1])]

    def _column(self, name: str) -> np.ndarray:
        return np.concatenate([part[name] for _, part in self._ranges()])

    def _read_range(self, at: int) -> LatentCounts:
        file, bounds = self._made.files[at], self._spec.bounds
        found = LatentCounts(file.key, self._columns(file), bounds[at + 1] - bounds[at])
        found.check_places(self.units)
        return found

    @cached_property
    def _near(self) -> dict[str, np.ndarray] | None:
        file = self._made.neighbours
        if file is None:
            return None
        found = self._columns(file)
        ids, scores = found.get("ids"), found.get("score")
        if ids is None or scores is None or ids.shape != scores.shape or ids.ndim != 2:
            raise CorruptError(file.key, "does not hold neighbours")
        if len(ids) != self.num_latents or (ids.size and int(ids.max()) >= self.num_latents):
            raise CorruptError(file.key, f"does not hold neighbours of {self.num_latents} latents")
        return found

    @cached_property
    def _logits(self) -> list[tuple[int, dict[str, np.ndarray]]]:
        found: list[tuple[int, dict[str, np.ndarray]]] = []
        first = 0
        for number, block in enumerate(self.logit_blocks):
            file = self._set.logits(block) if number == block else None
            if file is None:
                break  # (logits are written block by block: later ones do not exist yet)
            columns = self._columns(file)
            names = [f"{n}/{e}" for n in ("raised", "lowered") for e in ("ids", "value")]
            shapes = {columns[name].shape for name in names if name in columns}
            if len(shapes) != 1 or not all(name in columns for name in names):
                raise CorruptError(file.key, "does not hold logits")
            found.append((first, columns))
            first += len(columns["raised/ids"])
        return found

    def _columns(self, file: ColumnFile) -> dict[str, np.ndarray]:
        return read_columns(self._set.objects, file)


@dataclass(frozen=True)
class TokenLogits:
    """The tokens that a latent raises most and lowers most, and by how much, beside the mean."""

    raised: np.ndarray
    raised_by: np.ndarray
    lowered: np.ndarray
    lowered_by: np.ndarray


def feature_sets(dataset: FeatureRows, objects: Objects, taps: Sequence[str]) -> list[Features]:
    """Return the features that have a summary, of the taps that are open, by name."""
    found: list[Features] = []
    for features, spec in live_sets(Ledger(objects)):
        if not all(tap in taps and dataset.pass_of(tap) == spec.of for tap in spec.stored):
            continue
        made = features.newest(len(dataset.units))
        if made is not None and [*dataset.units[: made.units]] == [*range(made.units)]:
            found.append(Features(dataset, features, spec, made))
    return found


def choose_features(found: Sequence[Features], tap: str, url: str) -> Features:
    """Return the features of a tap, or of a direction: `resid_post.9:refusal`.

    Raises:
        ConfigError: if there are none.
    """
    base, _, direction = tap.partition(":")
    names = {base, *_encoded_names(found, base)}
    for each in reversed(found):
        if each.tap in names and (not direction or direction in each.names):
            return each
        if each.name == tap:
            return each
    there = ", ".join(each.name for each in found) or "none"
    raise ConfigError(
        f"no features of {tap!r} in {url}; there are {there}: `spile features {url}` makes them"
    )


def _encoded_names(found: Sequence[Features], tap: str) -> list[str]:
    """Return the encoded taps that have a stored tap of this name."""
    return [each.tap for each in found if tap in each.stored_taps]


def _bounds(run: slice) -> tuple[int, int]:
    return run.start, run.stop

"""Answers to the requests of the page: numbers and texts, ready for JSON."""

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from spile.core.errors import ConfigError, StoreError
from spile.core.pool import COVARIANCE, reduces
from spile.core.tap_order import sorted_taps
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.latents import pair_of
from spile.objects import Objects
from spile.serve.beside import attended, has_next, keys, next_tokens
from spile.serve.digest import Digest, Moments
from spile.serve.documents import (
    MOST_LISTED,
    MOST_TOKENS,
    Colour,
    Explorer,
    Finder,
    PageTexts,
    described,
)
from spile.serve.features import FeaturePages, version_of
from spile.serve.labels import accuracies, columns_of, direction_between, mean_rows
from spile.serve.pooled_rows import listed, nearest
from spile.serve.projection import has_umap, pca, similarities, umap
from spile.serve.run_history import RunHistory

Parameters = Mapping[str, str]

_CHANNELS = 60  # channels or latents listed of a tap
_BARS = 24  # bars of a histogram of latents
_POINTS = 2000  # points of a projection
_FIRST_POSITIONS = 16  # positions shown one by one; later ones are grouped
_LONGEST_QUERY = 200
_LARGE = 1 << 53
_MOST_CACHED = 64

_log = logging.getLogger("spile.serve")


class Answers:
    """Answers all requests about one dataset while it is served."""

    def __init__(
        self,
        objects: Objects,
        opened: Callable[[], Dataset],
        *,
        tokenizer: str | None,
        most_bytes: int,
    ) -> None:
        """`opened` opens the dataset as it is now, finished or not."""
        self._opened, self._most_bytes = opened, most_bytes
        dataset = opened()
        if reduces(dataset.recipe.pool) == COVARIANCE:
            raise ConfigError(
                f"{dataset.url}: holds covariances by label, and no rows to show; read them with "
                "ds.reduced(TAP)"
            )
        self.digest = Digest(dataset, most_bytes)
        own = {} if tokenizer else dataset.tokenizer_files()
        self.explorer = Explorer(dataset, PageTexts(dataset.recipe, tokenizer, own), self.digest)
        self._finder = Finder(self.explorer)
        self._feature_pages = FeaturePages(self.explorer, self._finder)
        self._cache = BackgroundCache()
        self.history = RunHistory(objects, self._reopen)
        self.routes: dict[str, Callable[[Parameters], Any]] = {
            "run": lambda asked: self.history.told(),
            "dataset": self._dataset,
            "documents": self._documents,
            "document": self._document,
            "layers": self._layers,
            "positions": self._positions,
            "channels": self._channels,
            "latents": self._latents,
            "token": self._token,
            "next": self._next,
            "keys": self._keys,
            "top": self._top,
            "similarity": self._similarity,
            "projection": self._projection,
            "labels": self._labels,
            "direction": self._direction,
            "probe": self._probe,
            "rows": self._rows,
            "nearest": self._nearest,
            "features": self._features,
            "feature": self._feature,
            "feature-search": self._feature_search,
            "feature-comparison": self._feature_comparison,
        }

    def start(self) -> None:
        self.digest.start()
        self.history.start()

    def close(self) -> None:
        for part in (self.history, self.digest, self._cache):
            part.close()

    def add_direction(self, name: str, data: bytes) -> dict[str, Any]:
        dataset = self.explorer.dataset
        widths = {dataset.width(tap) for tap in self.digest.moments}
        if not widths:
            raise ConfigError(
                "every tap of this dataset holds latents; a direction needs a dense tap"
            )
        number = self.explorer.directions.add(name, data, widths)
        return {"id": number, "directions": self.explorer.directions.listed()}

    def _reopen(self) -> None:
        dataset = self._opened()
        if dataset.taps == self.explorer.dataset.taps:
            self.explorer.see(dataset)
            self.digest.see(dataset)
            return
        # Taps were added or dropped: read all rows again, because the sample has the same rows of
        # every tap.
        before, self.digest = self.digest, Digest(dataset, self._most_bytes)
        self.explorer.digest = self.digest
        self.explorer.see(dataset)
        before.close()
        self.digest.start()

    def _dataset(self, asked: Parameters) -> dict[str, Any]:
        dataset, texts = self.explorer.dataset, self.explorer.texts
        return {
            "url": dataset.url,
            "taps": [
                {
                    "name": tap,
                    "shape": list(dataset.shape(tap)),
                    "width": dataset.width(tap),
                    "dtype": dataset.stored_dtype(tap),
                    "latents": dataset.num_latents(tap) or None,
                }
                for tap in dataset.taps
                if tap in self.digest.moments or tap in self.digest.latents
            ],
            "where": dataset.recipe.where,
            "every": dataset.recipe.every,
            "rows": dataset.num_tokens,
            "documents": dataset.num_documents,
            "columns": list(dataset.recipe.keep),
            "pool": dataset.recipe.pool,
            "next": has_next(dataset),
            "attended": attended(dataset),
            "finished": self.history.status.over and dataset.num_tokens > 0,
            "model": dataset.recipe.model_source,
            "corpus": dataset.recipe.corpus_source,
            "no_text": texts.missing,
            "note": texts.note,
            "directions": self.explorer.directions.listed(),
            "umap": has_umap(),
            "features": self._feature_pages.told(),
            "read": self._read(),
        }

    def _read(self) -> dict[str, Any]:
        """Return how many rows the shown statistics cover."""
        digest = self.digest
        rows = self.explorer.dataset.num_tokens
        return {
            "rows": digest.rows_read,
            "wanted": digest.rows_wanted,
            "all": rows,
            "at_work": digest.at_work,
            "sample": len(digest.sample),
            "error": digest.error,
        }

    def _documents(self, asked: Parameters) -> dict[str, Any]:
        count = number(asked, "count", 50, 1, MOST_LISTED)
        text = asked.get("q", "").strip()[:_LONGEST_QUERY]
        if text:
            return self._finder.find(text, number(asked, "after", 0), count)
        return self._finder.listed(number(asked, "start", 0), count)

    def _document(self, asked: Parameters) -> dict[str, Any]:
        colour = Colour(
            self._tap(asked),
            asked.get("by", "norm"),
            number(asked, "channel", 0),
            number(asked, "direction", 0),
            number(asked, "latent", 0),
        )
        return self.explorer.document(
            number(asked, "doc", None),
            number(asked, "start", None) if "start" in asked else None,
            number(asked, "count", MOST_TOKENS, 1, MOST_TOKENS),
            colour,
            number(asked, "token", 0),
        )

    def _token(self, asked: Parameters) -> dict[str, Any]:
        tap = self._latent_tap(asked)
        where = number(asked, "doc", None), number(asked, "token", None)
        return self.explorer.latents_of(tap, *where)

    def _next(self, asked: Parameters) -> dict[str, Any]:
        dataset, found = self.explorer.document_of(number(asked, "doc", None))
        return next_tokens(dataset, self.explorer.texts, found, number(asked, "token", None))

    def _keys(self, asked: Parameters) -> dict[str, Any]:
        dataset, found = self.explorer.document_of(number(asked, "doc", None))
        where = number(asked, "token", None), asked.get("tap", ""), number(asked, "head", None)
        return keys(dataset, self.explorer.texts, found, *where)

    def _layers(self, asked: Parameters) -> dict[str, Any]:
        taps: list[dict[str, Any]] = []
        with self.digest.lock:
            every = {**self.digest.moments, **self.digest.latents}
            for tap in sorted_taps(every):
                found = every[tap]
                dense = found if isinstance(found, Moments) else None  # the others store ranks
                taps.append(
                    {
                        "tap": tap,
                        "norm": found.norm,
                        "kurtosis": dense and dense.kurtosis,
                        "largest": found.largest.max(initial=0),
                        "deviation": dense and np.sqrt(np.mean(dense.deviation**2)),
                        "nonfinite": found.nonfinite,
                    }
                )
        return {"taps": taps, "read": self._read()}

    def _positions(self, asked: Parameters) -> dict[str, Any]:
        tap = self._tap(asked)
        with self.digest.lock:
            moments = {**self.digest.moments, **self.digest.latents}.get(tap)
            if moments is None:
                raise ConfigError(f"{tap} holds ranks, which have no norms")
            norms, rows = moments.norms_at.copy(), moments.rows_at.copy()
        edges = _edges(int(np.flatnonzero(rows)[-1]) + 1 if rows.any() else 0)
        bins = [
            {
                "from": low,
                "to": high - 1,
                "rows": int(rows[low:high].sum()),
                "norm": norms[low:high].sum() / max(1, rows[low:high].sum()),
            }
            for low, high in zip(edges, edges[1:], strict=False)
        ]
        return {"tap": tap, "bins": [each for each in bins if each["rows"]], "read": self._read()}

    def _channels(self, asked: Parameters) -> dict[str, Any]:
        tap = self._dense_tap(asked)
        with self.digest.lock:
            moments = self.digest.moments[tap]
            columns = {
                "largest": moments.largest.astype(np.float64),
                "mean": moments.mean,
                "deviation": moments.deviation,
                "kurtosis": moments.kurtosis_of_channels,
            }
        by = asked.get("by", "largest")
        if by not in columns:
            raise ConfigError(f"channels are ordered by {', '.join(columns)}")
        order = np.argsort(-np.nan_to_num(np.abs(columns[by]), nan=-1), kind="stable")[:_CHANNELS]
        return {
            "tap": tap,
            "by": by,
            "channels": [
                {"channel": int(each), **{name: values[each] for name, values in columns.items()}}
                for each in order
            ],
            "typical": np.median(columns["largest"]),
            "read": self._read(),
        }

    def _latents(self, asked: Parameters) -> dict[str, Any]:
        tap = self._latent_tap(asked)
        with self.digest.lock:
            moments = self.digest.latents[tap]
            columns = {
                "largest": moments.largest.astype(np.float64),
                "fires": moments.fires.astype(np.float64),
                "mean": np.nan_to_num(moments.mean),
            }
            by = asked.get("by", "largest")
            if by not in columns:
                raise ConfigError(f"latents are ordered by {', '.join(columns)}")
            fired = np.flatnonzero(moments.fires)
            order = fired[np.argsort(-columns[by][fired], kind="stable")[:_CHANNELS]]
            listed = [described(moments, each) for each in order.tolist()]
            counts, read, active = moments.fires[fired], moments.count, moments.active
            kept = moments.high.kept
        dataset = self.explorer.dataset

        def truncated() -> Ready:
            return Ready(dataset.statistics(tap).truncated)

        # Each unit's file holds a part: read them once, in the background, when the dataset is
        # complete.
        complete, units = dataset.is_complete, dataset.num_units
        cut = self._cache.ask(("truncated", tap), units, truncated)["value"] if complete else None
        return {
            "tap": tap,
            "by": by,
            "latents": listed,
            "total": dataset.num_latents(tap),
            "stored": dataset.width(tap),
            "active": active,
            "silent": dataset.num_latents(tap) - len(fired),
            "shares": _histogram(counts / max(1, read)),
            "truncated": cut,
            "kept": kept,
            "rows_read": read,
            "read": self._read(),
        }

    def _top(self, asked: Parameters) -> dict[str, Any]:
        if self._tap(asked) in self.digest.latents:
            tap, latent = self._latent_tap(asked), number(asked, "latent", 0)
            return {**self.explorer.top_of_latent(tap, latent), "read": self._read()}
        tap, channel = self._dense_tap(asked), number(asked, "channel", 0)
        end = asked.get("end", "high")
        return {**self.explorer.top(tap, channel, end), "end": end, "read": self._read()}

    def _similarity(self, asked: Parameters) -> dict[str, Any]:
        sample = self.digest.sample

        def make() -> Ready:
            values = {tap: sample.values[tap] for tap in self.digest.moments}
            found = similarities(values)
            return Ready(plain({"taps": list(values), "rows": len(sample), **found}))

        return {**self._cache.ask("similarity", self.digest.version, make), "read": self._read()}

    def _projection(self, asked: Parameters) -> dict[str, Any]:
        tap, method = self._dense_tap(asked), asked.get("method", "pca")
        later = asked.get("first", "with") == "without"
        if method not in ("pca", "umap") or (method == "umap" and not has_umap()):
            raise ConfigError("UMAP needs umap-learn: pip install umap-learn")
        sample = self.digest.sample

        def make() -> Ready:
            chosen = np.flatnonzero(sample.index["pos"] >= later)[:_POINTS]
            rows, index = sample.values[tap][chosen], sample.index[chosen]
            places, shares = pca(rows, 2) if method == "pca" else (umap(rows), np.zeros(0))
            made = {
                "x": places[:, 0] if places.shape[1] else np.zeros(len(places)),
                "y": places[:, 1] if places.shape[1] > 1 else np.zeros(len(places)),
                "shares": shares,
                "norm": np.linalg.norm(rows, axis=1),
                "position": index["pos"],
                "doc": index["doc"],
                "unit": sample.units[chosen],
                "offset": index["offset"],
                "id": index["token_id"],
                "piece": [self.explorer.texts.pieces([int(each)])[0] for each in index["token_id"]],
            }
            return Ready(plain(made))

        key = ("projection", tap, method, later)
        made = self._cache.ask(key, self.digest.version, make)
        told = {**made, "tap": tap, "method": method, "read": self._read()}
        column = asked.get("column")
        return {**told, "kept": self._kept(column, made["value"])} if column else told

    def _kept(self, column: str, made: "Ready | None") -> dict[str, Any]:
        """Return the values of a kept column for the points of a projection."""
        column = self._kept_column(column)
        units, docs = (tuple(made.value[name]) if made else () for name in ("unit", "doc"))

        def make() -> Ready:
            return Ready(plain(self._finder.kept(column, np.array(units), np.array(docs))))

        found = self._cache.ask(("kept", column), (units, docs), make)
        return {**found, "value": None if found["making"] else found["value"]}

    def _labels(self, asked: Parameters) -> dict[str, Any]:
        dataset = self.explorer.dataset

        def make() -> Ready:
            return Ready(plain(columns_of(dataset)))

        return self._cache.ask("labels", dataset.num_units, make)

    def _direction(self, asked: Parameters) -> dict[str, Any]:
        dataset, tap = self.explorer.dataset, self._dense_tap(asked)
        labels = self._two_labels(asked)

        def make() -> Ready:
            found = direction_between(dataset, mean_rows(dataset, [tap], *labels), tap)
            column, positive, negative = labels
            name = f"{column}: {positive} minus {negative}, {tap}"
            number = self.explorer.directions.keep(name, found.pop("values"))
            return Ready(plain({**found, "id": number}))

        made = self._cache.ask(("direction", tap, *labels), dataset.num_units, make)
        return {**made, "tap": tap, "directions": self.explorer.directions.listed()}

    def _probe(self, asked: Parameters) -> dict[str, Any]:
        dataset, labels = self.explorer.dataset, self._two_labels(asked)
        taps = [tap for tap in self.digest.moments if dataset.dtype(tap).kind == "f"]

        def make() -> Ready:
            return Ready(plain(accuracies(mean_rows(dataset, taps, *labels))))

        return self._cache.ask(("probe", *labels), (tuple(taps), dataset.num_units), make)

    def _rows(self, asked: Parameters) -> dict[str, Any]:
        dataset = self._pooled_dataset()
        start = number(asked, "start", 0), number(asked, "count", 50, 1, MOST_LISTED)
        return listed(dataset, self._finder.kept, *start)

    def _nearest(self, asked: Parameters) -> dict[str, Any]:
        dataset, tap = self._pooled_dataset(), self._dense_tap(asked)
        row = number(asked, "unit", None), number(asked, "row", None)
        with self.digest.lock:
            moments = self.digest.moments[tap].mean, self.digest.moments[tap].deviation
        sample = self.digest.sample
        found = nearest(dataset, self._finder.kept, sample, moments, tap, *row)
        return {**found, "read": self._read()}

    def _features(self, asked: Parameters) -> dict[str, Any]:
        by = asked.get("by", "density")
        return self._feature_pages.listed(asked.get("set", ""), by, number(asked, "start", 0))

    def _feature(self, asked: Parameters) -> dict[str, Any]:
        return self._feature_pages.shown(asked.get("set", ""), number(asked, "feature", None))

    def _feature_search(self, asked: Parameters) -> dict[str, Any]:
        text = asked.get("q", "")[:_LONGEST_QUERY]
        return self._feature_pages.found(asked.get("set", ""), asked.get("how", ""), text)

    def _feature_comparison(self, asked: Parameters) -> dict[str, Any]:
        pages, latent = self._feature_pages, None
        names = [pages.chosen(asked.get(each, "")) for each in ("set", "other")]
        if any(each.is_signed for each in names):
            raise ConfigError("comparisons are of latents; every row has a value along a direction")
        if "feature" in asked:
            latent = number(asked, "feature", None)

        def make() -> Ready:
            return Ready(plain(pages.compared(names[0].name, names[1].name, latent)))

        versions = tuple(map(version_of, names))
        return self._cache.ask(("comparison", latent, *versions), versions, make)

    def _pooled_dataset(self) -> Dataset:
        dataset = self.explorer.dataset
        if not dataset.recipe.pool:
            raise ConfigError("the rows of this dataset are tokens; see the page Documents")
        return dataset

    def _two_labels(self, asked: Parameters) -> tuple[str, str, str]:
        column = self._kept_column(asked.get("column", ""))
        return column, asked.get("positive", ""), asked.get("negative", "")

    def _kept_column(self, column: str) -> str:
        kept = self.explorer.dataset.recipe.keep
        if column not in kept:
            known = ", ".join(kept) or "none"
            raise ConfigError(f"no column {column!r} was kept; there are: {known}")
        return column

    def _tap(self, asked: Parameters) -> str:
        """Return the requested tap, or the first; for an encoded tap, the tap of its values."""
        dataset = self.explorer.dataset
        every = {**self.digest.moments, **self.digest.latents}
        tap = asked.get("tap") or next(tap for tap in dataset.taps if tap in every)
        pair = pair_of(dataset, tap)
        return pair[0] if pair else dataset.name(tap)

    def _dense_tap(self, asked: Parameters) -> str:
        dense = self.digest.moments
        tap = self._tap(asked) if asked.get("tap") else next(iter(dense), self._tap(asked))
        if tap not in dense:
            latents = tap in self.digest.latents
            told = "latents, which have no channels; see the page Latents"
            raise ConfigError(f"{tap} holds {told if latents else 'ranks, which have no channels'}")
        return tap

    def _latent_tap(self, asked: Parameters) -> str:
        latents = self.digest.latents
        tap = self._tap(asked) if asked.get("tap") else next(iter(latents), self._tap(asked))
        if tap not in latents:
            raise ConfigError(
                f"{tap} holds no latents; taps that do: {', '.join(latents) or 'none'}"
            )
        return tap


@dataclass
class _Entry:
    version: Hashable = None  # of `value`
    value: Any = None
    error: str | None = None
    making: bool = False


class BackgroundCache:
    """A cache whose values are computed in the background, and again when outdated."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "making")

    def ask(self, key: Hashable, version: Hashable, make: Callable[[], Any]) -> dict[str, Any]:
        """Return the latest value, perhaps outdated, and whether a newer one is being computed.

        A version that failed is not tried again: its error is returned.
        """
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if entry.version != version and not entry.making:
                entry.making = True
                self._pool.submit(self._make, entry, version, make)
            while len(self._entries) > _MOST_CACHED:
                self._entries.popitem(last=False)
            return {"value": entry.value, "making": entry.making, "error": entry.error}

    def _make(self, entry: _Entry, version: Hashable, make: Callable[[], Any]) -> None:
        value, error = entry.value, None
        try:
            value = make()
        except Exception as failure:
            _log.exception("making what was asked for")
            error = str(failure) or type(failure).__name__
        with self._lock:
            entry.version, entry.value, entry.error = version, value, error
            entry.making = False

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def number(
    asked: Parameters, name: str, default: int | None, least: int = 0, most: int = _LARGE
) -> int:
    """Parse a parameter that must be a whole number within bounds."""
    text = asked.get(name)
    if text is None and default is not None:
        return default
    if not text or not text.isascii() or not text.isdecimal() or len(text) > 16:
        raise ConfigError(f"{name} must be a whole number")
    value = int(text)
    if not least <= value <= most:
        raise ConfigError(f"{name} must be from {least} to {most}")
    return value


@dataclass(frozen=True)
class Ready:
    """A value that is already plain JSON, so that it is converted only once."""

    value: Any


def plain(value: Any) -> Any:
    """Convert to plain JSON: nonfinite values become null, and floats keep six digits."""
    if isinstance(value, Ready):
        return value.value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(key): plain(each) for key, each in items}
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray", value)
        if array.dtype.kind in "iu":
            return array.tolist()
        value = array.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in cast("Sequence[Any]", value)]
    if isinstance(value, np.generic):
        value = cast("np.generic[Any]", value).item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    raise StoreError(f"a {type(value).__name__} cannot be shown")


def _edges(count: int) -> list[int]:
    """Return the edges of groups of positions: single positions first, then wider groups."""
    edges = [*range(min(count, _FIRST_POSITIONS) + 1)]
    while edges[-1] < count:
        edges.append(min(count, math.ceil(edges[-1] * 1.18)))
    return edges


def _histogram(shares: np.ndarray) -> list[dict[str, Any]]:
    """Count numbers in (0, 1] in bins of equal width on a logarithmic scale."""
    if not len(shares):
        return []
    low = math.floor(math.log10(shares.min()))
    counts, edges = np.histogram(np.log10(shares), _BARS, (min(low, -1), 0))
    steps = (10.0**edges).tolist()
    return [
        {"from": low, "to": high, "latents": int(count)}
        for low, high, count in zip(steps, steps[1:], counts, strict=False)
    ]

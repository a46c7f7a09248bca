"""Pages of features: all of them in order, one of them, those that a search finds; comparisons.

Everything shown was counted by `spile features`. Only the tokens around examples, and the latents
of found rows, are read from the rows when they are asked for.
"""

import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.threads import mapped
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.features import Examples, Features, TokenLogits, choose_features
from spile.dataset.read.latents import pair_of
from spile.serve.documents import Explorer, Finder

LISTED = 60  # features of a page
_SETTLED = 10.0  # seconds for which the list of sets is kept: others may be counted meanwhile
_FOUND_ROWS = 512  # rows of a text that are read
_SHOWN_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_ORDERS = ("density", "largest", "mean", "id")
_BARS = 24
_NEAR = 0.5  # a cosine from which a feature counts as found in another encoder


class FeaturePages:
    """Answers requests about the features of the dataset that is served."""

    def __init__(self, explorer: Explorer, finder: Finder) -> None:
        self._explorer, self._finder = explorer, finder
        self._lock = threading.Lock()
        self._sets: tuple[Dataset | None, float, list[Features]] = (None, 0.0, [])

    def sets(self) -> list[Features]:
        """Return the features of the dataset as it is now."""
        dataset = self._explorer.dataset
        with self._lock:
            of, at, found = self._sets
            if of is not dataset or time.monotonic() - at > _SETTLED:
                known = {version_of(each): each for each in found if of is dataset}
                # (Those that are open keep what they have read.)
                now = [known.get(version_of(each), each) for each in dataset.feature_sets]
                self._sets = dataset, time.monotonic(), now
            return self._sets[2]

    def told(self) -> list[dict[str, Any]]:
        """Return what there is, for the choice of a set."""
        return [
            {
                "name": each.name,
                "tap": each.tap,
                "features": each.num_latents,
                "directions": each.is_signed,
                "rows": each.rows,
            }
            for each in self.sets()
        ]

    def chosen(self, name: str) -> Features:
        """Return a set by its name, or the first."""
        sets = self.sets()
        if not sets:
            raise ConfigError("this dataset has no features: `spile features` counts them")
        return choose_features(sets, name, self._explorer.dataset.url) if name else sets[0]

    # -- lists -----------------------------------------------------------------------------------

    def listed(self, name: str, by: str, start: int) -> dict[str, Any]:
        """Return a page of the list of all features.

        Args:
            by: density, largest, mean or id; features that are never active come last.
        """
        if by not in _ORDERS:
            raise ConfigError(f"features are ordered by {', '.join(_ORDERS)}")
        features = self.chosen(name)
        active = np.flatnonzero(features.counts)
        columns = {"density": features.counts, "largest": features.largest, "mean": features.means}
        order = active
        if by != "id":
            order = active[np.argsort(-columns[by][active], kind="stable")]
        shares = features.density[active]
        page = order[start : start + LISTED].tolist()
        return {
            **self._about(features),
            "by": by,
            "start": start,
            "listed": len(order),
            "features": [self._row(features, each) for each in page],
            "shares": _on_logarithmic_bins(shares),
        }

    def found(self, name: str, how: str, text: str) -> dict[str, Any]:
        """Return the features that a search finds, the most fitting first.

        Args:
            how: token: those active at the tokens of a text, by the share of their active rows
                there. text: those active at the end of a text, wherever the dataset has it.
                document: those active in a document, by its number.
        """
        features = self.chosen(name)
        ways = {"token": self._at_token, "text": self._after_text, "document": self._in_document}
        if how not in ways:
            raise ConfigError(f"features are found by {', '.join(ways)}")
        if features.is_signed:
            raise ConfigError("searches are of latents; directions are all listed")
        return {**self._about(features), **ways[how](features, text.strip())}

    def _at_token(self, features: Features, text: str) -> dict[str, Any]:
        spellings = self._explorer.texts.spellings(text)
        tokens = [ids[0] for ids in spellings if len(ids) == 1]
        if text.isascii() and text.isdecimal() and not tokens:
            tokens = [int(text)]
        if not tokens:
            raise ConfigError(f"{text!r} is not one token; search for it as a text")
        order, shares = features.with_token(tokens)
        rows = zip(order[:LISTED].tolist(), shares[:LISTED].tolist(), strict=True)
        return {
            "told": "share of the drawn rows at this token",
            "features": [{**self._row(features, each), "score": share} for each, share in rows],
        }

    def _after_text(self, features: Features, text: str) -> dict[str, Any]:
        if not text:
            raise ConfigError("what text should they be active at?")
        rows = self._finder.rows_with(text, _FOUND_ROWS)
        return self._active_in(features, rows, f"share of {len(rows):,} places of the text")

    def _in_document(self, features: Features, text: str) -> dict[str, Any]:
        if not text.isascii() or not text.isdecimal():
            raise ConfigError("give the number of a document")
        _, document = self._explorer.document_of(int(text))
        told = f"share of the {len(document.rows):,} rows of document {text}"
        return self._active_in(features, np.sort(document.rows), told)

    def _active_in(self, features: Features, rows: np.ndarray, told: str) -> dict[str, Any]:
        """Rank latents by how much more often they are active in some rows than elsewhere."""
        dataset = self._explorer.dataset
        pair = pair_of(dataset, features.tap)
        if pair is None or not len(rows):
            return {"told": told, "features": []}
        values, ids = (dataset.read_at(tap, rows) for tap in pair)
        active = values > 0
        found, counts = np.unique(ids[active], return_counts=True)
        sums = np.bincount(ids[active], values[active], minlength=features.num_latents)[found]
        share = counts / len(rows)
        # (As a likelihood ratio weighs it: often here, and rare elsewhere.)
        score = share * np.log(share / np.maximum(features.density[found], 1e-12))
        best = np.argsort(-score, kind="stable")[:LISTED]
        return {
            "told": told,
            "features": [
                {
                    **self._row(features, int(found[at])),
                    "score": float(share[at]),
                    "here": float(sums[at] / counts[at]),
                }
                for at in best.tolist()
            ],
        }

    def compared(self, name: str, other: str, latent: int | None) -> dict[str, Any]:
        """Compare two encoders by the rows in which their latents are active.

        Args:
            latent: of the first set; its nearest ones in the other are told. None: the nearest of
                each that is active in the sampled rows, those without a near one first.
        """
        mine, theirs = self.chosen(name), self.chosen(other)
        nearest = mine.nearest_in(theirs, 10 if latent is not None else 1)
        ids, near = nearest.ids, nearest.near
        told = {**self._about(mine), "other": self._about(theirs), "sampled": nearest.rows}
        if latent is not None:
            if not 0 <= latent < mine.num_latents:
                raise ConfigError(f"{mine.name} has latents 0 to {mine.num_latents - 1}")
            some = ids[latent] >= 0
            pairs = zip(ids[latent][some].tolist(), near[latent][some].tolist(), strict=True)
            return {**told, "latent": latent, "nearest": [
                {**self._row(theirs, each), "near": score} for each, score in pairs]}  # fmt: skip
        active = np.flatnonzero(nearest.seen)
        best = near[active, 0]
        counts, edges = np.histogram(np.asarray(best), 20, (0, 1))
        order = active[np.argsort(best, kind="stable")]
        return {
            **told,
            "seen": len(active),
            "bins": [
                {"from": low, "latents": count}
                for low, count in zip(edges.tolist(), counts.tolist(), strict=False)
            ],
            "shared": np.count_nonzero(best >= _NEAR) / max(1, len(best)),
            "apart": [
                {
                    **self._row(mine, each),
                    "nearest": int(ids[each, 0]) if ids[each, 0] >= 0 else None,
                    "near": float(near[each, 0]),
                }
                for each in order[:LISTED].tolist()
            ],
        }

    # -- one feature ------------------------------------------------------------------------------

    def shown(self, name: str, latent: int) -> dict[str, Any]:
        """Return everything about one feature."""
        features = self.chosen(name)
        edges, counts = features.histogram(latent)
        used = np.flatnonzero(counts)
        bins = range(int(used[0]), int(used[-1]) + 1) if len(used) else range(0)
        bands = features.bands(latent)
        near = zip(*(each.tolist() for each in features.neighbours(latent)), strict=True)
        logits = features.logits(latent)
        largest = features.largest[latent]
        low = float(edges[used[0]]) if len(used) and features.is_signed else 0.0
        high = max(float(np.nan_to_num(largest)), -low, 1e-12)
        return {
            **self._about(features),
            **self._row(features, latent),
            "scale": {"low": low and -high, "high": high, "signed": low < 0},
            "quantiles": [
                {"q": q, "value": value}
                for q, value in zip(
                    _SHOWN_QUANTILES,
                    features.quantiles(latent, _SHOWN_QUANTILES).tolist(),
                    strict=True,
                )
            ],
            "drawn": min(features.drawn, int(features.counts[latent])),
            "histogram": [
                {"from": float(edges[at]), "to": float(edges[at + 1]), "rows": int(counts[at])}
                for at in bins
            ],
            "top": self._hits(features, latent, features.top(latent)),
            "bands": [
                {
                    "low": band.low,
                    "high": band.high,
                    "share": band.share,
                    "hits": self._hits(features, latent, band.examples),
                }
                for band in bands
            ],
            "neighbours": [{**self._row(features, each), "near": score} for each, score in near],
            "sampled": features.sampled_rows,
            "logits": logits and self._tokens(logits),
        }

    def _tokens(self, logits: TokenLogits) -> dict[str, Any]:
        def listed(ids: np.ndarray, values: np.ndarray) -> list[dict[str, Any]]:
            pieces = [self._explorer.texts.pieces([int(each)])[0] for each in ids]
            return [
                {"piece": piece, "value": float(value)}
                for piece, value in zip(pieces, values, strict=True)
            ]

        return {
            "raised": listed(logits.raised, logits.raised_by),
            "lowered": listed(logits.lowered, logits.lowered_by),
        }

    def _hits(self, features: Features, latent: int, examples: Examples) -> list[dict[str, Any]]:
        dataset = self._explorer.dataset
        starts = np.array(dataset.unit_starts)
        units = np.searchsorted(starts, examples.rows, side="right") - 1

        def hit(each: tuple[int, int, float]) -> dict[str, Any]:
            at, row, value = each
            unit = dataset.units[at]
            found, rows = self._explorer.in_context(dataset, unit, row - int(starts[at]))
            return {**found, "value": value, "values": features.values_at(latent, rows)}

        wanted = zip(units.tolist(), examples.rows.tolist(), examples.values.tolist(), strict=True)
        return [*mapped(hit, wanted, 4)]

    # -- parts of answers --------------------------------------------------------------------------

    def _about(self, features: Features) -> dict[str, Any]:
        dataset = self._explorer.dataset
        return {
            "set": features.name,
            "tap": features.tap,
            "total": features.num_latents,
            "directions": features.is_signed,
            "active": int(np.count_nonzero(features.counts)),
            "rows": features.rows,
            "behind": dataset.num_units - features.units,
        }

    def _row(self, features: Features, latent: int) -> dict[str, Any]:
        top = features.top(latent)
        return {
            "feature": latent,
            "name": features.names[latent] if features.names else None,
            "count": features.counts[latent],
            "density": features.density[latent],
            "mean": features.means[latent],
            "largest": features.largest[latent],
            "piece": self._pieces(top.tokens[:1])[0] if len(top) else None,
        }

    def _pieces(self, tokens: np.ndarray) -> Sequence[str]:
        return [self._explorer.texts.pieces([int(each)])[0] for each in tokens]


def version_of(features: Features) -> tuple[Hashable, ...]:
    """Return what changes when more was counted of a set, or more logits were computed."""
    return features.name, features.units, features.logit_blocks


def _on_logarithmic_bins(shares: np.ndarray) -> list[dict[str, Any]]:
    """Count shares in (0, 1] in bins of equal width on a logarithmic scale."""
    if not len(shares):
        return []
    low = min(int(np.floor(np.log10(shares.min()))), -1)
    counts, edges = np.histogram(np.log10(shares), _BARS, (low, 0))
    steps = (10.0**edges).tolist()
    return [
        {"from": a, "to": b, "latents": count}
        for a, b, count in zip(steps, steps[1:], counts.tolist(), strict=False)
    ]

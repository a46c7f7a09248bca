"""Counting the latents of rows: sums, histograms, and the rows that stand for each.

A tally is of a range of latents, so that its memory is bounded: a unit with more latents is read
again for the next range. Tallies of consecutive units merge into that of all of them; `count` and
`hist` are integers, `sum` is added in the order of units, and ties go to the earlier row, so the
result has the same bits whoever counted which unit.
"""

import numpy as np
import numpy.typing as npt

from spile.dataset.codec.features import (
    BINS,
    LatentCounts,
    bins_of,
    ends_of_latents,
    flat_histogram,
)
from spile.dataset.records.features import FeatureOptions
from spile.features.ranked import (
    U32,
    Entries,
    Ranked,
    descending,
    drawn_keys,
    hashes,
    values_of,
)

MEMORY = 2 << 30  # bytes that counting takes, about, at most
_OF_LATENTS = np.uint64(1 << 63)  # tells the hashes of latents from those of places


def range_bounds(latents: int, options: FeatureOptions, *, signed: bool) -> tuple[int, ...]:
    """Return the ranges of latents that are counted at a time."""
    bins = BINS * (2 if signed else 1)
    kept = options.examples + options.drawn
    # (Measured: entries of 24 bytes are sorted beside half as many candidates, and then merged.)
    each = 8 * bins + 9 * kept * 24
    ranges = max(1, -(-latents * each // MEMORY))
    cuts = {latents * number // ranges for number in range(ranges + 1)}
    return tuple(sorted(cuts))


class Tally:
    """What is counted of latents first..last of consecutive rows."""

    def __init__(self, first: int, last: int, options: FeatureOptions, *, signed: bool) -> None:
        """`signed`: whether values may be negative, as those of directions are."""
        self.first, self.last, self._signed = first, last, signed
        count = last - first
        self._bins = BINS * (2 if signed else 1)
        self._hist = np.zeros(count * self._bins, np.int64)
        self._sum = np.zeros(count, np.float64)
        self._top = Ranked(count, options.examples)
        self._drawn = Ranked(count, options.drawn)
        self._hashes = hashes(np.arange(first, last).astype(np.uint64) | _OF_LATENTS)

    def __len__(self) -> int:
        return self.last - self.first

    def add(
        self,
        latents: npt.NDArray[np.int64],
        values: npt.NDArray[np.float32],
        rows: npt.NDArray[np.int64],
        places: np.ndarray,
        hashed: U32,
        tokens: np.ndarray,
    ) -> None:
        """Add active latents, in ascending order of rows.

        Args:
            latents: counted from the first of the range.
            rows: of each active latent, the index of its row in the arrays that follow.
            places: of each row; `hashed`: its hash; `tokens`: its token.
        """
        key = latents * self._bins
        key += bins_of(values, signed=self._signed)
        np.add.at(self._hist, key, 1)
        self._sum += np.bincount(latents, values, minlength=len(self))
        keys = drawn_keys(hashed[rows], np.take(self._hashes, latents))

        def entries(chosen: np.ndarray, keys: U32) -> Entries:
            at = rows[chosen]
            found = latents[chosen].astype(np.int32), keys, places[at], values[chosen], tokens[at]
            return Entries(*found)

        # (Of equal values the earlier row comes first, so a later one must be larger.)
        floor = values_of(self._top.threshold)
        floor[self._top.threshold == np.iinfo(np.uint32).max] = -np.inf
        chosen = np.flatnonzero(values > np.take(floor, latents))
        self._top.add(entries(chosen, descending(values[chosen])))
        chosen = np.flatnonzero(keys <= np.take(self._drawn.threshold, latents))
        self._drawn.add(entries(chosen, keys[chosen]))

    def merge(self, part: LatentCounts) -> None:
        """Add what was counted of the rows that follow."""
        latent = part.latents_of("hist")
        np.add.at(self._hist, latent * self._bins + part["hist/bin"], part["hist/count"])
        self._sum += part["sum"]
        for name, ranked in (("top", self._top), ("drawn", self._drawn)):
            latent = part.latents_of(name)
            place = part[f"{name}/unit"].astype(np.int64) << 32 | part[f"{name}/row"]
            values = part[f"{name}/value"]
            if name == "top":
                keys = descending(values)
            else:
                keys = drawn_keys(hashes(place), np.take(self._hashes, latent))
            found = Entries(latent.astype(np.int32), keys, place, values, part[f"{name}/token"])
            ranked.add(found[np.flatnonzero(keys <= np.take(ranked.threshold, latent))])

    def columns(self) -> dict[str, np.ndarray]:
        """Return what was counted, as a part or a summary holds it."""
        hist = self._hist.reshape(len(self), self._bins)
        found = {"count": hist.sum(axis=1), "sum": self._sum, **flat_histogram(hist)}
        for name, ranked in (("top", self._top), ("drawn", self._drawn)):
            entries = ranked.entries()
            found |= {
                f"{name}/ends": ends_of_latents(entries.latent, len(self)),
                f"{name}/value": entries.value,
                f"{name}/unit": (entries.place >> 32).astype(np.int32),
                f"{name}/row": (entries.place & 0xFFFFFFFF).astype(np.int32),
                f"{name}/token": entries.token,
            }
        return found

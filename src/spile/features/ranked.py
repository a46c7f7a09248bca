"""The entries of each latent that come first in an order: the largest values, or a drawn sample.

An entry is an active latent of a row. Its place names the row by unit, so that it stays the same
while a dataset grows. A sample is drawn by a hash of latent and place: the entries with the
smallest hashes are a uniform sample of all entries, whoever looked at them, in any order.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

_ODD = np.uint32(0x9E3779B1)
_SIGN = np.uint32(1 << 31)
_BUFFERED = 1 << 20  # candidates, at least, that are sorted together


@dataclass(frozen=True)
class Entries:
    """Active latents of rows; one element of each array for each.

    Attributes:
        latent: int32.
        key: what they are ordered by, the smallest first.
        place: the unit, times 2^32, plus the row within the unit.
        value: float32.
        token: the row's token id.
    """

    latent: np.ndarray
    key: U32
    place: np.ndarray
    value: np.ndarray
    token: np.ndarray

    def __len__(self) -> int:
        return len(self.latent)

    def __getitem__(self, chosen: np.ndarray) -> "Entries":
        return Entries(*(array[chosen] for array in vars(self).values()))

    @classmethod
    def none(cls) -> "Entries":
        return cls(
            np.zeros(0, np.int32),
            np.zeros(0, np.uint32),
            np.zeros(0, np.int64),
            np.zeros(0, np.float32),
            np.zeros(0, np.int32),
        )

    def joined(self, others: "list[Entries]") -> "Entries":
        every = [self, *others]
        return Entries(*(np.concatenate([getattr(e, name) for e in every]) for name in vars(self)))


class Ranked:
    """The first entries of each latent by key; among equal keys, the one that was added first.

    Entries must be added in ascending order of their places.

    Attributes:
        threshold: the key of each latent's last entry, once it has all that are kept: an entry with
            a larger key need not be added.
    """

    def __init__(self, latents: int, most: int) -> None:
        self._latents, self._most = latents, most
        self._sorted, self._added, self._waiting = Entries.none(), list[Entries](), 0
        self.threshold = np.full(latents, np.iinfo(np.uint32).max, np.uint32)

    def add(self, entries: Entries) -> None:
        self._added.append(entries)
        self._waiting += len(entries)
        if self._waiting > max(_BUFFERED, len(self._sorted) // 2):
            self._sort()

    def entries(self) -> Entries:
        """Return the entries, by latent and then by key."""
        self._sort()
        return self._sorted

    def _sort(self) -> None:
        if not self._waiting:
            return
        every = self._sorted.joined(self._added)
        keys = every.latent.astype(np.uint64) << np.uint64(32) | every.key
        order = np.argsort(keys, kind="stable")
        latent = every.latent[order]
        counts = np.bincount(latent, minlength=self._latents)
        starts = np.cumsum(counts) - counts
        rank = np.arange(len(latent)) - starts[latent]
        self._sorted = every[order[rank < self._most]]
        self._added, self._waiting = [], 0
        full = np.flatnonzero(counts >= self._most)
        kept = np.minimum(counts, self._most)
        self.threshold[full] = self._sorted.key[np.cumsum(kept)[full] - 1]


def hashes(numbers: np.ndarray) -> U32:
    """Return the upper half of SplitMix64 of each number."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def drawn_keys(places: U32, latents: U32) -> U32:
    """Return the keys by which a sample is drawn, from the hashes of places and of latents."""
    keys = np.bitwise_xor(places, latents)
    keys *= _ODD
    return keys


def descending(values: np.ndarray) -> U32:
    """Return keys that order float32 values, the largest first."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.where(bits & _SIGN, bits, ~(bits | _SIGN))


def values_of(keys: U32) -> np.ndarray:
    """Return the values with these keys: the inverse of `descending`."""
    return np.where(keys & _SIGN, keys, ~keys & ~_SIGN).view(np.float32)

"""Sums of rows that say whether two datasets hold the same ones, in whatever order.

Each row is hashed with its index entry, so that rows which have changed places without their
entries are noticed; hashes are added, which forgets the order and nothing else.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from spile.dataset.read.rows import Bytes

_ENTRIES = "index"
_MODULUS = 1 << 64

Hashes = npt.NDArray[np.uint64]


def entry_hashes(index: np.ndarray) -> Hashes:
    """A hash of each entry of an index."""
    found = np.zeros(len(index), np.uint64)
    for name in index.dtype.names or ():
        found = _mixed(found ^ index[name].astype(np.int64).view(np.uint64))
    return found


def entries_sum(index: np.ndarray) -> int:
    return int(entry_hashes(index).sum(dtype=np.uint64))


def _mixed(values: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of the value (splitmix64's last steps)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Sums:
    """Of the index, and of each tap."""

    def __init__(self, values: Mapping[str, int] | None = None) -> None:
        self._values: dict[str, int] = dict(values or {})

    def add_entries(self, index: np.ndarray) -> None:
        self._add(_ENTRIES, entries_sum(index))

    def add_rows(
        self, tap: str, rows: Bytes, scales: np.ndarray | None, entries: Iterable[int]
    ) -> None:
        """Args:
        rows: their bytes.
        entries: the hash of each one's entry.
        """
        digest = xxhash.xxh3_64_intdigest
        if scales is None:
            found = sum(map(digest, rows, entries))
        else:
            beside = scales.view(np.uint32).tolist()
            each = zip(rows, entries, beside, strict=True)
            found = sum(digest(row, entry ^ scale) for row, entry, scale in each)
        self._add(tap, found)

    def merge(self, other: "Sums") -> None:
        for name, value in other._values.items():
            self._add(name, value)

    def _add(self, name: str, value: int) -> None:
        self._values[name] = (self._values.get(name, 0) + value) % _MODULUS

    @property
    def entries(self) -> int:
        return self._values.get(_ENTRIES, 0)

    def to_json(self) -> dict[str, str]:
        return {name: f"{value:016x}" for name, value in sorted(self._values.items())}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Sums":
        return cls({name: int(value, 16) for name, value in body.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sums) and self._values == other._values

"""Questions about a dataset's documents and rows, answered a page at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import FIRST, FLAGS
from spile.core.threads import mapped
from spile.dataset.read.dataset import Dataset, Document
from spile.dataset.read.rows import runs
from spile.serve.digest import Digest
from spile.serve.directions import Directions
from spile.serve.rows import channels, read_rows
from spile.serve.texts import Texts

MOST_TOKENS = 2048  # of a page
_AROUND = 14  # tokens on each side of one that is shown in context
_DOCUMENTS = 8  # kept, for those who page through one
_FEW = 64  # sampled rows, under which a scale is taken from the page itself


@dataclass(frozen=True)
class Colour:
    """What a token's number is."""

    tap: str
    by: str  # norm | channel | direction
    channel: int = 0
    direction: int = 0


class Explorer:
    """Reads a dataset as it is now; `see` hands it a later one."""

    def __init__(self, dataset: Dataset, texts: Texts, digest: Digest) -> None:
        self.texts, self.digest, self.directions = texts, digest, Directions()
        self.see(dataset)

    def see(self, dataset: Dataset) -> None:
        # Together: numbers of rows are one dataset's, and whoever asks meanwhile keeps to his.
        self._now = dataset, lru_cache(_DOCUMENTS)(dataset.document)

    @property
    def dataset(self) -> Dataset:
        return self._now[0]

    def document(self, doc: int, start: int, count: int, colour: Colour) -> dict[str, Any]:
        """Some of a document's tokens, in reading order, with a number for each."""
        dataset, document_of = self._now
        found: Document = document_of(doc)
        page = slice(start, start + min(count, MOST_TOKENS))
        entries, rows = found.index[page], found.rows[page]
        values = self.numbers(_read(dataset, colour.tap, rows), colour)
        return {
            "doc": doc,
            "about": found.about,
            "tokens": len(found),
            "start": start,
            "pieces": self.texts.pieces(entries["token_id"].tolist()),
            "ids": entries["token_id"],
            "offsets": entries["offset"],
            "positions": entries["pos"],
            "flags": [_flags(int(flags)) for flags in entries["flags"]],
            "values": values,
            "scale": self.scale(colour, values),
        }

    def numbers(self, rows: np.ndarray, colour: Colour) -> np.ndarray:
        """A number for each row: its length, one of its values, or how far it goes in a
        direction."""
        width = channels(self.dataset, colour.tap)
        if colour.by == "norm":
            return np.sqrt(np.einsum("ij,ij->i", rows, rows))
        if colour.by == "channel":
            return rows[:, self.checked_channel(colour.tap, colour.channel)]
        if colour.by == "direction":
            return rows @ self.directions.get(colour.direction, width)
        raise ConfigError("tokens are coloured by norm, channel or direction")

    def checked_channel(self, tap: str, channel: int) -> int:
        width = channels(self.dataset, tap)
        if not 0 <= channel < width:
            raise ConfigError(f"{tap} has channels 0 to {width - 1}, not {channel}")
        return channel

    def scale(self, colour: Colour, values: np.ndarray) -> dict[str, Any]:
        """What the palest and the deepest colour stand for: of the sample, if there is one."""
        sample = self.digest.sample.values.get(self.dataset.name(colour.tap))
        of_sample = sample is not None and len(sample) >= _FEW
        known = self.numbers(sample, colour) if of_sample and sample is not None else values
        known = known[np.isfinite(known)]
        if colour.by == "norm":
            low, high = np.quantile(known, [0.02, 0.98]) if len(known) else (0, 1)
        else:
            high = np.quantile(np.abs(known), 0.995) if len(known) else 1
            low = -high
        return {"low": low, "high": max(high, low + 1e-12), "signed": colour.by != "norm"}

    def top(self, tap: str, channel: int, end: str) -> dict[str, Any]:
        """The rows at which a channel is largest, or least, of those read so far; in context."""
        if end not in ("high", "low"):
            raise ConfigError("a channel has a high and a low end")
        dataset = self.dataset
        tap = dataset.name(tap)
        channel = self.checked_channel(tap, channel)
        with self.digest.lock:
            moments = self.digest.moments[tap]
            hits = getattr(moments, end).of(channel)
            read = moments.count
        sign = 1 if end == "high" else -1
        colour = Colour(tap, "channel", channel)
        shown = mapped(lambda hit: self._hit(dataset, colour, sign * hit[0], *hit[1:]), hits, 8)
        found = [hit for hit in shown if hit is not None]
        return {
            "tap": tap, "channel": channel, "hits": found, "rows_read": read,
            "scale": self.scale(colour, np.array([hit["value"] for hit in found])),
        }  # fmt: skip

    def _hit(
        self, dataset: Dataset, colour: Colour, value: float, unit: int, row: int
    ) -> dict[str, Any] | None:
        if unit not in dataset.units:
            return None
        start, entries, at = around(dataset, unit, row)
        rows = np.arange(start, start + len(entries))
        return {
            "doc": int(entries["doc"][at]),
            "offset": int(entries["offset"][at]),
            "position": int(entries["pos"][at]),
            "id": int(entries["token_id"][at]),
            "at": at,
            "value": value,
            "pieces": self.texts.pieces(entries["token_id"].tolist()),
            "values": self.numbers(_read(dataset, colour.tap, rows), colour),
        }


def around(dataset: Dataset, unit: int, row: int) -> tuple[int, np.ndarray, int]:
    """The first of the rows beside one, their index, and its place: of its context alone."""
    starts = dataset.unit_starts
    number = dataset.units.index(unit)
    row += starts[number]
    low, high = max(row - _AROUND, starts[number]), min(row + _AROUND + 1, starts[number + 1])
    entries = dataset.index(low, high)
    at = row - low
    # A context lies together, and begins with a token that says so, unless it was left out.
    same = (entries["doc"] == entries["doc"][at]) & (
        np.sign(entries["pos"] - entries["pos"][at]) == np.sign(np.arange(len(entries)) - at)
    )
    first = max([0, *(np.flatnonzero(~same[:at]) + 1).tolist()])
    begins = np.flatnonzero(entries["flags"][: at + 1] & FIRST)
    first = max(first, int(begins[-1]) if len(begins) else 0)
    after = np.flatnonzero(~same[at:])
    last = at + int(after[0]) if len(after) else len(entries)
    return low + first, entries[first:last], at - first


def _read(dataset: Dataset, tap: str, rows: np.ndarray) -> np.ndarray:
    """Chosen rows as float32, flat; as few reads as they have runs."""
    out = np.empty((len(rows), channels(dataset, tap)), np.float32)
    bounds = runs(rows)
    for low, high in zip(bounds, bounds[1:], strict=False):
        first = int(rows[low]) if high > low else 0
        out[low:high] = read_rows(dataset, tap, first, first + high - low)
    return out


def _flags(flags: int) -> Sequence[str]:
    return [name for name, bit in FLAGS.items() if flags & bit]

"""Documents and their tokens: read a page at a time, listed, and found by their text.

`Explorer` reads a document or a row in context, with a number for each token, and shows where
tokens are missing because their rows are not stored. `Finder` lists documents and searches their
previews, kept columns and tokens; a search of a large dataset stops when its time is up, and
returns where to continue. `PageTexts` turns token ids into text, and text into token ids.
"""

import importlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import FIRST, FLAGS
from spile.core.recipe import ResolvedRecipe
from spile.core.threads import mapped
from spile.corpus.tokenize import TextTokenizer
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.document import Document
from spile.dataset.read.latents import pair_of
from spile.dataset.read.rows import Rows, runs
from spile.dataset.read.texts import Texts
from spile.serve.digest import Digest, LatentMoments, read_rows
from spile.serve.directions import Directions

MOST_TOKENS = 2048  # of a page
_AROUND = 14  # tokens on each side of one shown in context
_DOCUMENTS = 8  # kept in memory, for paging through them
_LONGEST_BEGINNING = 16_384  # characters of a preview that are tokenized
_FEW = 64  # with fewer sampled rows, the page itself determines the colour scale
MOST_LISTED = 100
_KEPT_BYTES = 192 << 20  # for tokens cached between searches, and as many for tables
_SECONDS = 0.12  # per request


class PageTexts(Texts):
    """Converts a dataset's tokens to text, and text to tokens."""

    def __init__(
        self,
        recipe: ResolvedRecipe,
        given: str | None,
        own: Mapping[str, bytes] | None = None,
    ) -> None:
        """Args:
            given: the directory or URL of `--tokenizer`.
            own: the files that the dataset holds, by name.

        Raises:
            ConfigError: if it holds no tokenizer.
        """
        try:
            super().__init__(recipe, given, own)
        except ConfigError as error:
            raise ConfigError(f"--tokenizer {error}") from error
        if self.missing:
            self.missing += ": give --tokenizer"
        self._policy = recipe.special_tokens
        self._encoder: TextTokenizer | None = None

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a document with this text, including special tokens; none if the
        dataset's own tokenizer is not available."""
        if self.tokenizer is None or self.note is not None:
            return []
        try:
            if self._encoder is None:
                self._encoder = TextTokenizer(self.folder, self._policy)
            return self._encoder.encode([text])[0].tolist()
        except Exception:  # the Rust library raises bare Exception
            return []

    def spellings(self, text: str) -> list[list[int]]:
        """Return the token ids of a text at the beginning of a document, and after a space."""
        if self.tokenizer is None:
            return []
        tokenizer = self.tokenizer
        found = [
            tokenizer.encode(before + text, add_special_tokens=False).ids for before in ("", " ")
        ]
        return [ids for number, ids in enumerate(found) if ids and ids not in found[:number]]


@dataclass(frozen=True)
class Colour:
    """The number that colours a token."""

    tap: str
    by: str  # norm | channel | direction; for latents: norm | latent | active
    channel: int = 0
    direction: int = 0
    latent: int = 0


@dataclass(frozen=True)
class Gap:
    """Tokens of a document without stored rows, before the row at a place of a page."""

    at: int
    count: int
    ids: Sequence[int] | None = None  # None: unknown


class Explorer:
    """Reads a dataset as it is now; `see` replaces it by a later state."""

    def __init__(self, dataset: Dataset, texts: PageTexts, digest: Digest) -> None:
        self.texts, self.digest, self.directions = texts, digest, Directions()
        self.see(dataset)

    def see(self, dataset: Dataset) -> None:
        # Replace both at once: row numbers belong to one state, which a running request keeps.
        self._now = dataset, lru_cache(_DOCUMENTS)(dataset.document)

    @property
    def dataset(self) -> Dataset:
        return self._now[0]

    def document_of(self, doc: int) -> tuple[Dataset, Document]:
        """Return the dataset as it is now, and one of its documents."""
        dataset, document_of = self._now
        return dataset, document_of(doc)

    def document(
        self, doc: int, start: int | None, count: int, colour: Colour, offset: int = 0
    ) -> dict[str, Any]:
        """Return some of a document's tokens, in reading order, with a number for each.

        If `start` is None, they are those of the page that holds the token at `offset`."""
        dataset, found = self.document_of(doc)
        count = min(count, MOST_TOKENS)
        if start is None:
            place = int(np.searchsorted(found.index["offset"], offset))
            start = min(place, len(found) - 1) // count * count
        page = slice(start, start + count)
        entries, rows = found.index[page], found.rows[page]
        values = self._values(dataset, rows, colour)
        about = found.about
        gaps = self._gaps(found, start, len(entries), about) if len(entries) else []
        pieces, missing = self._pieces(entries["token_id"].tolist(), gaps)
        return {
            "doc": doc,
            "about": about,
            "tokens": len(found),
            "start": start,
            "pieces": pieces,
            "gaps": [
                {"at": gap.at, "count": gap.count, "pieces": text}
                for gap, text in zip(gaps, missing, strict=True)
            ],
            "ids": entries["token_id"],
            "offsets": entries["offset"],
            "positions": entries["pos"],
            "flags": [_flags(int(flags)) for flags in entries["flags"]],
            "values": values,
            "scale": self.scale(colour, values),
        }

    def _gaps(self, found: Document, start: int, count: int, about: Mapping[str, Any]) -> list[Gap]:
        """Return the gaps before each row of a page, and after the document's last row."""
        offsets = found.index["offset"].astype(np.int64)
        if len(found) >= about["tokens"]:
            return []
        stop = start + count
        bounds = np.concatenate([[-1], offsets, [about["tokens"]]])
        missing = np.diff(bounds)[start : stop + (stop == len(found))] - 1
        known = self._known(found, about)
        gaps: list[Gap] = []
        for at in np.flatnonzero(missing > 0).tolist():
            first, number = int(bounds[start + at]) + 1, int(missing[at])
            ids = known[first : first + number]
            gaps.append(Gap(at, number, ids if len(ids) == number else None))
        return gaps

    def _known(self, found: Document, about: Mapping[str, Any]) -> list[int]:
        """Return the ids of a document's first tokens, stored or not, from its preview: up to the
        last stored token that agrees with it."""
        preview = str(about["preview"] or "")
        ids = self.texts.encoded(preview[:_LONGEST_BEGINNING])
        offsets = found.index["offset"]
        within = int(np.searchsorted(offsets, len(ids)))
        agree = np.array(ids, np.int64)[offsets[:within]] == found.index["token_id"][:within]
        if agree.all() and len(ids) == about["tokens"]:
            shorter = min(self.dataset.recipe.preview, _LONGEST_BEGINNING)
            if len(preview) < shorter:
                return ids  # the preview is the whole text
        right = within if agree.all() else int(np.argmin(agree))
        return ids[: int(offsets[right - 1]) + 1] if right else []

    def _pieces(
        self, ids: Sequence[int], gaps: Sequence[Gap]
    ) -> tuple[list[str], list[list[str] | None]]:
        """Return the texts of the rows' tokens, and of those in each gap; only tokens that are
        neighbours in the document are decoded together."""
        pieces: list[str] = []
        missing: list[list[str] | None] = []
        waiting: list[tuple[Gap | None, Sequence[int]]] = []  # consecutive runs

        def flush() -> None:
            texts = iter(self.texts.pieces([each for _, run in waiting for each in run]))
            for gap, run in waiting:
                own = [next(texts) for _ in run]
                if gap is None:
                    pieces.extend(own)
                else:
                    missing.append(own)
            waiting.clear()

        done = 0
        for gap in gaps:
            waiting.append((None, ids[done : gap.at]))
            done = gap.at
            if gap.ids is None:
                flush()
                missing.append(None)
            else:
                waiting.append((gap, gap.ids))
        waiting.append((None, ids[done:]))
        flush()
        return pieces, missing

    def _values(self, dataset: Dataset, rows: np.ndarray, colour: Colour) -> np.ndarray:
        """Return the number that colours each row."""
        pair = pair_of(dataset, colour.tap)
        if pair is None:
            return self.numbers(_read(dataset, colour.tap, rows), colour)
        values = _read(dataset, pair[0], rows)
        if colour.by != "latent":
            return self.numbers(values, colour)
        latent = self.checked_latent(pair[0], colour.latent)
        own = _read(dataset, pair[1], rows, np.int64) == latent
        return np.where(own, values, np.float32(0)).sum(axis=1)

    def numbers(self, rows: np.ndarray, colour: Colour) -> np.ndarray:
        """Return a number for each row: its norm, the sum of its values, one of them, its
        projection on a direction, or the number of active latents."""
        latents = bool(self.dataset.num_latents(colour.tap))
        if colour.by == "norm":
            return np.sqrt(np.einsum("ij,ij->i", rows, rows))
        if colour.by == "active" and latents:
            return np.count_nonzero(rows, axis=1).astype(np.float32)
        if colour.by == "sum" and not latents:
            return rows.sum(axis=1)
        if colour.by == "channel" and not latents:
            return rows[:, self.checked_channel(colour.tap, colour.channel)]
        if colour.by == "direction" and not latents:
            width = self.dataset.width(colour.tap)
            return rows @ self.directions.get(colour.direction, width)
        ways = "latent, active or norm" if latents else "norm, sum, channel or direction"
        raise ConfigError(f"tokens of {colour.tap} can be coloured by {ways}")

    def checked_latent(self, tap: str, latent: int) -> int:
        most = self.dataset.num_latents(tap)
        if not 0 <= latent < most:
            raise ConfigError(f"{tap} has latents 0 to {most - 1}, not {latent}")
        return latent

    def checked_channel(self, tap: str, channel: int) -> int:
        width = self.dataset.width(tap)
        if not 0 <= channel < width:
            raise ConfigError(f"{tap} has channels 0 to {width - 1}, not {channel}")
        return channel

    def scale(self, colour: Colour, values: np.ndarray) -> dict[str, Any]:
        """Return the values of the palest and the deepest colour, from the sample if there is one;
        for a latent, 0 and the largest known value."""
        if colour.by == "latent":
            with self.digest.lock:
                largest = float(self.digest.latents[colour.tap].largest[colour.latent])
            high = max(largest, float(np.nan_to_num(values).max(initial=0)))
            return {"low": 0, "high": high or 1, "signed": False}
        sample = self.digest.sample.values.get(self.dataset.name(colour.tap))
        of_sample = sample is not None and len(sample) >= _FEW
        known = self.numbers(sample, colour) if of_sample and sample is not None else values
        known = known[np.isfinite(known)]
        if colour.by in ("norm", "active"):
            low, high = np.quantile(known, [0.02, 0.98]) if len(known) else (0, 1)
        else:
            high = np.quantile(np.abs(known), 0.995) if len(known) else 1
            low = -high
        return {"low": low, "high": max(high, low + 1e-12), "signed": low < 0}

    def top(self, tap: str, channel: int, end: str) -> dict[str, Any]:
        """Return the rows read so far at which a channel is largest or smallest, in context."""
        if end not in ("high", "low"):
            raise ConfigError("end must be high or low")
        dataset = self.dataset
        tap = dataset.name(tap)
        channel = self.checked_channel(tap, channel)
        with self.digest.lock:
            moments = self.digest.moments[tap]
            hits = getattr(moments, end).of(channel)
            read = moments.count
        sign = 1 if end == "high" else -1
        colour = Colour(tap, "channel", channel)
        found = self._hits(dataset, colour, [(sign * value, *where) for value, *where in hits])
        return {"tap": tap, "channel": channel, "rows_read": read, **found}

    def top_of_latent(self, tap: str, latent: int) -> dict[str, Any]:
        """Return the rows read so far in which a latent is largest, and how often it fires."""
        dataset = self.dataset
        with self.digest.lock:
            moments = self.digest.latents[tap]
            latent = self.checked_latent(tap, latent)
            hits = moments.high.of(latent)
            told = {**described(moments, latent), "rows_read": moments.count}
        found = self._hits(dataset, Colour(tap, "latent", latent=latent), hits)
        return {"tap": tap, **told, **found}

    def latents_of(self, tap: str, doc: int, offset: int) -> dict[str, Any]:
        """Return the stored latents of one token, the largest first, and how often each fires."""
        dataset, found = self.document_of(doc)
        place = int(np.searchsorted(found.index["offset"], offset))
        if place == len(found) or found.index["offset"][place] != offset:
            raise ConfigError(f"document {doc} has no row for the token at offset {offset}")
        row = int(found.rows[place])
        active = dataset.latents(tap, row, row + 1)
        with self.digest.lock:
            moments = self.digest.latents[tap]
            latents = [
                {"value": value, **described(moments, latent)}
                for latent, value in zip(
                    active.ids.tolist(), active.values.astype(np.float32).tolist(), strict=True
                )
            ]
        return {
            "tap": tap,
            "doc": doc,
            "offset": offset,
            "latents": latents,
            "kept": dataset.width(tap),
        }

    def _hits(
        self, dataset: Dataset, colour: Colour, hits: Sequence[tuple[float, int, int]]
    ) -> dict[str, Any]:
        shown = mapped(lambda hit: self._hit(dataset, colour, *hit), hits, 8)
        found = [hit for hit in shown if hit is not None]
        values = np.array([hit["value"] for hit in found])
        return {"hits": found, "scale": self.scale(colour, values)}

    def _hit(
        self, dataset: Dataset, colour: Colour, value: float, unit: int, row: int
    ) -> dict[str, Any] | None:
        if dataset.rows_of_unit(unit) is None:
            return None
        found, rows = self.in_context(dataset, unit, row)
        return {**found, "value": value, "values": self._values(dataset, rows, colour)}

    def in_context(self, dataset: Dataset, unit: int, row: int) -> tuple[dict[str, Any], Rows]:
        """Return the tokens around a row in its context, and the numbers of their rows."""
        start, entries, at = around(dataset, unit, row)
        gaps = gaps_between(entries["offset"])
        return {
            "doc": int(entries["doc"][at]),
            "offset": int(entries["offset"][at]),
            "position": int(entries["pos"][at]),
            "id": int(entries["token_id"][at]),
            "at": at,
            "pieces": self._pieces(entries["token_id"].tolist(), gaps)[0],
            "gaps": [{"at": gap.at, "count": gap.count} for gap in gaps],
        }, np.arange(start, start + len(entries))

    def snippet(self, entries: np.ndarray) -> str:
        """Return the text of consecutive rows; ⋯ marks missing tokens."""
        gaps = gaps_between(entries["offset"])
        pieces = self._pieces(entries["token_id"].tolist(), gaps)[0]
        for gap in gaps:
            pieces[gap.at] = f" ⋯ {pieces[gap.at]}"
        return "".join(pieces)


def described(moments: LatentMoments, latent: int) -> dict[str, Any]:
    """Return how often and how strongly a latent fires in the rows read so far."""
    fires = int(moments.fires[latent])
    return {
        "latent": latent,
        "fires": fires,
        "share": fires / max(1, moments.count),
        "mean": moments.total(latent) / fires if fires else None,
        "largest": moments.largest[latent] if fires else None,
    }


def gaps_between(offsets: np.ndarray) -> list[Gap]:
    """Return the gaps between consecutive rows that are not neighbours in their document."""
    steps = np.diff(offsets.astype(np.int64)) - 1
    return [Gap(at + 1, int(steps[at])) for at in np.flatnonzero(steps > 0).tolist()]


def around(dataset: Dataset, unit: int, row: int) -> tuple[int, np.ndarray, int]:
    """Return the rows around a row, within its context: the first, their index, its place."""
    rows = dataset.rows_of_unit(unit)
    assert rows  # (a unit that was done stays done)
    row += rows[0]
    low, high = max(row - _AROUND, rows[0]), min(row + _AROUND + 1, rows[1])
    entries = dataset.index(low, high)
    at = row - low
    # The rows of a context are stored together; its first token has a flag, if it has a row.
    same = (entries["doc"] == entries["doc"][at]) & (
        np.sign(entries["pos"] - entries["pos"][at]) == np.sign(np.arange(len(entries)) - at)
    )
    first = max([0, *(np.flatnonzero(~same[:at]) + 1).tolist()])
    begins = np.flatnonzero(entries["flags"][: at + 1] & FIRST)
    first = max(first, int(begins[-1]) if len(begins) else 0)
    after = np.flatnonzero(~same[at:])
    last = at + int(after[0]) if len(after) else len(entries)
    return low + first, entries[first:last], at - first


def _read(
    dataset: Dataset, tap: str, rows: np.ndarray, dtype: type[np.generic] = np.float32
) -> np.ndarray:
    """Read chosen rows, flattened; each run of consecutive rows takes one read."""
    out = np.empty((len(rows), dataset.width(tap)), dtype)
    bounds = runs(rows)
    for low, high in zip(bounds, bounds[1:], strict=False):
        first = int(rows[low]) if high > low else 0
        out[low:high] = read_rows(dataset, tap, first, first + high - low, dtype)
    return out


def _flags(flags: int) -> Sequence[str]:
    return [name for name, bit in FLAGS.items() if flags & bit]


class Finder:
    """Finds documents by number and by text."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer = explorer
        self._tokens, self._tables = BoundedCache(_KEPT_BYTES), BoundedCache(_KEPT_BYTES)
        # pyarrow's first array takes a second (it looks for pandas): make it before any request.
        importlib.import_module("pyarrow.compute")
        importlib.import_module("pyarrow").array(np.zeros(1))

    def listed(self, start: int, count: int) -> dict[str, Any]:
        """Return documents in stored order, read or skipped, from `start` on."""
        dataset = self._explorer.dataset
        units = np.asarray(dataset.units, np.int64)
        ends = np.cumsum(dataset.unit_documents)
        found: list[dict[str, Any]] = []
        for number in range(int(np.searchsorted(ends, start, side="right")), len(units)):
            before = int(ends[number - 1]) if number else 0
            if before >= start + count:
                break
            table = self._table(dataset, int(units[number]))
            low, high = max(start - before, 0), start + count - before
            found += [_shown(row) for row in table.slice(low, high - low).to_pylist()]
        return {"documents": found, "start": start, "total": int(ends[-1]) if len(ends) else 0}

    def find(self, text: str, after: int, count: int) -> dict[str, Any]:
        """Find documents that contain a text.

        Args:
            after: number of units to skip: `next` of the previous answer.
        """
        dataset = self._explorer.dataset
        spellings = self._explorer.texts.spellings(text)
        limit = time.monotonic() + _SECONDS
        found: list[dict[str, Any]] = []
        units = dataset.units
        for number in range(after, len(units)):
            if len(found) >= count or (number > after and time.monotonic() > limit):
                return {"documents": found, "next": number, "units": len(units)}
            found += self._find_in(dataset, units[number], text, spellings, count)
        return {"documents": found, "next": None, "units": len(units)}

    def kept(self, column: str, units: np.ndarray, docs: np.ndarray) -> list[Any]:
        """Return the value of a kept column for each of some documents.

        Args:
            units: the unit in which each document's row lies.
        """
        dataset, found = self._explorer.dataset, [None] * len(docs)
        for unit in np.unique(units).tolist():
            table, places = self._table(dataset, unit), np.flatnonzero(units == unit)
            own = table["doc"].to_numpy()
            order = np.argsort(own)  # a merged unit of a permuted corpus is not sorted
            rows = order[np.searchsorted(own, docs[places], sorter=order)]
            values: list[Any] = table[column].take(rows).to_pylist()
            for place, value in zip(places.tolist(), values, strict=True):
                found[place] = value
        return found

    def rows_with(self, text: str, most: int) -> np.ndarray:
        """Return rows at the last token of a text, at most so many, within a few seconds."""
        dataset, spellings = self._explorer.dataset, self._explorer.texts.spellings(text)
        limit = time.monotonic() + _SECONDS
        found: list[np.ndarray] = [np.zeros(0, np.int64)]
        for unit in dataset.units:
            rows = dataset.rows_of_unit(unit)
            for ids in spellings if rows else ():
                hits = sequences(*self._tokens_of(dataset, unit), ids) + len(ids) - 1
                found.append(hits + (rows[0] if rows else 0))
            if sum(map(len, found)) >= most or time.monotonic() > limit:
                break
        return np.unique(np.concatenate(found))[:most]

    def _find_in(
        self,
        dataset: Dataset,
        unit: int,
        text: str,
        spellings: Sequence[Sequence[int]],
        count: int,
    ) -> list[dict[str, Any]]:
        table = self._table(dataset, unit)
        rows = _matching(table, text)[:count]
        found = {row["doc"]: _shown(row) for row in table.take(rows).to_pylist()}
        if spellings and len(found) < count:
            tokens, docs, offsets = self._tokens_of(dataset, unit)
            for ids in spellings:
                hits = sequences(tokens, docs, offsets, ids)
                docs_hit, firsts = np.unique(docs[hits], return_index=True)
                new = [
                    (int(doc), int(hits[first]))
                    for doc, first in zip(docs_hit, firsts, strict=True)
                    if int(doc) not in found
                ]
                for doc, row in new[: count - len(found)]:
                    found[doc] = {
                        **_shown(dataset.about(doc)),
                        **self._snippet(dataset, unit, row),
                    }
        return [found[doc] for doc in sorted(found)]

    def _snippet(self, dataset: Dataset, unit: int, row: int) -> dict[str, Any]:
        _, entries, at = around(dataset, unit, row)
        return {
            "offset": int(entries["offset"][at]),
            "snippet": self._explorer.snippet(entries),
        }

    def _table(self, dataset: Dataset, unit: int) -> Any:
        def read() -> tuple[Any, int]:
            table = dataset.documents(unit=unit)
            return table, table.nbytes

        return self._tables.get(unit, read)

    def _tokens_of(self, dataset: Dataset, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens of a unit's rows, with their documents and offsets."""

        def read() -> tuple[tuple[np.ndarray, ...], int]:
            rows = dataset.rows_of_unit(unit)
            assert rows  # (a unit that was done stays done)
            entries = dataset.index(*rows)
            columns = ("token_id", "doc", "offset")
            found = tuple(np.ascontiguousarray(entries[name]) for name in columns)
            return found, sum(each.nbytes for each in found)

        return self._tokens.get(unit, read)


def sequences(
    tokens: np.ndarray, docs: np.ndarray, offsets: np.ndarray, ids: Sequence[int]
) -> np.ndarray:
    """Return the rows at which the tokens `ids` begin, consecutive in one document."""
    hits = np.flatnonzero(tokens[: max(0, len(tokens) - len(ids) + 1)] == ids[0])
    for step, token in enumerate(ids[1:], 1):
        follows = (docs[hits + step] == docs[hits]) & (offsets[hits + step] == offsets[hits] + step)
        hits = hits[(tokens[hits + step] == token) & follows]
    return hits


def _matching(table: Any, text: str) -> np.ndarray:
    """Return the rows of a documents table that contain a text in any column."""
    pa = importlib.import_module("pyarrow")
    compute: Any = importlib.import_module("pyarrow.compute")
    hit: Any = None
    for column in table.columns:
        if column.type == pa.string():
            found = compute.match_substring(column, text, ignore_case=True)
            found = compute.fill_null(found, False)
            hit = found if hit is None else compute.or_(hit, found)
    if text.isdecimal() and len(text) < 18:
        found = compute.equal(table["doc"], int(text))
        hit = found if hit is None else compute.or_(hit, found)
    return np.flatnonzero(hit.to_numpy()) if hit is not None else np.zeros(0, np.int64)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("doc", "tokens", "rows", "skipped", "preview")
    return {name: row[name] for name in names}


class BoundedCache:
    """A cache of values by key; the least recently used are dropped first."""

    def __init__(self, most: int) -> None:
        """`most`: limit on the sum of the sizes."""
        self._most, self._held = most, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
        """Return the value of a key; `make` returns the value and its size."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = (value, size)
                self._held += size
            while self._held > self._most and len(self._values) > 1:
                self._held -= self._values.popitem(last=False)[1][1]
        return value

"""Documents and their tokens: read a page at a time, listed, and found by their text.

`Explorer` reads a document or a row in context, with a number for each token. `Finder` lists
documents and searches their previews, kept columns and tokens; a search of a large dataset stops
when its time is up, and says where to go on. `Texts` turns token ids into text.
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
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from spile.core.errors import ConfigError, SpileError
from spile.core.identity import full_digest
from spile.core.index import FIRST, FLAGS
from spile.core.recipe import ResolvedRecipe
from spile.core.threads import mapped
from spile.dataset.read.dataset import Dataset, Document
from spile.dataset.read.rows import runs
from spile.models.files.demo import demo_directory
from spile.objects.paths import AnyPath, path_of
from spile.serve.digest import Digest, read_rows
from spile.serve.directions import Directions

MOST_TOKENS = 2048  # of a page
_AROUND = 14  # tokens on each side of one that is shown in context
_DOCUMENTS = 8  # kept, for those who page through one
_FEW = 64  # sampled rows, under which a scale is taken from the page itself
MOST_LISTED = 100
_KEPT_BYTES = 192 << 20  # of tokens, and as many of tables, so that no search reads them again
_SECONDS = 0.12  # of one request
_FILES = ("tokenizer.json", "tokenizer_config.json")  # what a recipe's digest is of
_CUT = "\ufffd"  # what is left of a character whose last token is missing


class Texts:
    """A dataset's tokens, as they are read.

    Attributes:
        missing: why there is no tokenizer; None if there is one.
        note: what is to be known of the one that is used.
    """

    def __init__(self, recipe: ResolvedRecipe, given: str | None) -> None:
        """`given`: the directory or URL of `--tokenizer`.

        Raises:
            ConfigError: if that holds no tokenizer.
        """
        self._tokenizer: Tokenizer | None = None
        self.missing: str | None = None
        self.note: str | None = None
        source = given or recipe.model_source
        # A store is a stranger's: what it names is read of this machine, and never fetched.
        if not given and "://" in source:
            self.missing = f"the model is not on this machine ({source}): give --tokenizer"
            return
        folder = demo_directory() if source == "demo" else path_of(source)
        try:
            self._tokenizer = Tokenizer.from_buffer((folder / _FILES[0]).read_bytes())
        except Exception as error:  # the Rust library raises bare Exception
            if given:
                raise ConfigError(f"--tokenizer {given}: no usable tokenizer.json there") from error
            self.missing = f"no usable tokenizer.json in {source}: give --tokenizer"
            return
        if _differs(folder, recipe):
            self.note = "this tokenizer is not the one that the dataset was made with"
            if not given:
                self._tokenizer = None
                self.missing = f"{source} holds another tokenizer by now: give --tokenizer"

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; a character of several tokens is its last one's."""
        if self._tokenizer is None:
            return [str(token) for token in ids]
        pieces: list[str] = []
        waiting: list[int] = []  # places of tokens whose character has not ended
        stream = DecodeStream(skip_special_tokens=False)
        for place, token in enumerate(ids):
            if self._tokenizer.id_to_token(token) is None:
                pieces.append(f"⟨{token}⟩")
                continue
            try:
                piece = stream.step(self._tokenizer, token)
            except Exception:  # a sequence that no text has: such tokens stand alone
                stream = DecodeStream(skip_special_tokens=False)
                piece = self._tokenizer.decode([token], skip_special_tokens=False)
            waiting = [] if piece is not None else [*waiting, place]
            pieces.append(piece or "")
        for place in waiting:
            pieces[place] = _CUT
        return pieces

    def spellings(self, text: str) -> list[list[int]]:
        """Token ids that a text has at the beginning of a document, and after a space."""
        if self._tokenizer is None:
            return []
        tokenizer = self._tokenizer
        found = [
            tokenizer.encode(before + text, add_special_tokens=False).ids for before in ("", " ")
        ]
        return [ids for number, ids in enumerate(found) if ids and ids not in found[:number]]


def _differs(folder: AnyPath, recipe: ResolvedRecipe) -> bool:
    known = recipe.model.get("tokenizer")
    if known is None:
        return False
    try:
        return full_digest(*(p for p in (folder / name for name in _FILES) if p.is_file())) != known
    except (OSError, SpileError):
        return True


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
        width = self.dataset.width(colour.tap)
        if colour.by == "norm":
            return np.sqrt(np.einsum("ij,ij->i", rows, rows))
        if colour.by == "channel":
            return rows[:, self.checked_channel(colour.tap, colour.channel)]
        if colour.by == "direction":
            return rows @ self.directions.get(colour.direction, width)
        raise ConfigError("tokens are coloured by norm, channel or direction")

    def checked_channel(self, tap: str, channel: int) -> int:
        width = self.dataset.width(tap)
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
            "tap": tap,
            "channel": channel,
            "hits": found,
            "rows_read": read,
            "scale": self.scale(colour, np.array([hit["value"] for hit in found])),
        }

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
    out = np.empty((len(rows), dataset.width(tap)), np.float32)
    bounds = runs(rows)
    for low, high in zip(bounds, bounds[1:], strict=False):
        first = int(rows[low]) if high > low else 0
        out[low:high] = read_rows(dataset, tap, first, first + high - low)
    return out


def _flags(flags: int) -> Sequence[str]:
    return [name for name, bit in FLAGS.items() if flags & bit]


class Finder:
    """Documents by number and by text."""

    def __init__(self, explorer: Explorer, documents: Mapping[int, int]) -> None:
        """`documents`: how many each unit has, read or skipped."""
        self._explorer, self._counts = explorer, documents
        self._tokens, self._tables = BoundedCache(_KEPT_BYTES), BoundedCache(_KEPT_BYTES)
        # Its first array takes a second (it looks for pandas): whoever asks first need not wait.
        importlib.import_module("pyarrow.compute")
        importlib.import_module("pyarrow").array(np.zeros(1))

    def listed(self, start: int, count: int) -> dict[str, Any]:
        """Documents in stored order, read or skipped, from one on."""
        dataset = self._explorer.dataset
        counts = {unit: self._counts[unit] for unit in dataset.units}
        found: list[dict[str, Any]] = []
        before = 0
        for unit, held in counts.items():
            low, high = max(start - before, 0), min(start + count - before, held)
            if low < high:
                table = self._table(dataset, unit).slice(low, high - low)
                found += [_shown(row) for row in table.to_pylist()]
            before += held
        return {"documents": found, "start": start, "total": sum(counts.values())}

    def find(self, text: str, after: int, count: int) -> dict[str, Any]:
        """Documents that hold a text.

        Args:
            after: units to pass over: `next` of the answer before.
        """
        dataset = self._explorer.dataset
        spellings = self._explorer.texts.spellings(text)
        limit = time.monotonic() + _SECONDS
        found: list[dict[str, Any]] = []
        units = dataset.units
        for number in range(after, len(units)):
            if len(found) >= count or (number > after and time.monotonic() > limit):
                return {"documents": found, "next": number, "units": len(units)}
            found += self._find_in(dataset, number, text, spellings, count)
        return {"documents": found, "next": None, "units": len(units)}

    def _find_in(
        self,
        dataset: Dataset,
        number: int,
        text: str,
        spellings: Sequence[Sequence[int]],
        count: int,
    ) -> list[dict[str, Any]]:
        table = self._table(dataset, dataset.units[number])
        rows = _matching(table, text)[:count]
        found = {row["doc"]: _shown(row) for row in table.take(rows).to_pylist()}
        if spellings and len(found) < count:
            tokens, docs = self._tokens_of(dataset, number)
            for ids in spellings:
                hits = sequences(tokens, docs, ids)
                docs_hit, firsts = np.unique(docs[hits], return_index=True)
                new = [
                    (int(doc), int(hits[first]))
                    for doc, first in zip(docs_hit, firsts, strict=True)
                    if int(doc) not in found
                ]
                for doc, row in new[: count - len(found)]:
                    found[doc] = {
                        **_shown(dataset.about(doc)),
                        **self._snippet(dataset, number, row),
                    }
        return [found[doc] for doc in sorted(found)]

    def _snippet(self, dataset: Dataset, number: int, row: int) -> dict[str, Any]:
        _, entries, at = around(dataset, dataset.units[number], row)
        pieces = self._explorer.texts.pieces(entries["token_id"].tolist())
        return {"offset": int(entries["offset"][at]), "snippet": "".join(pieces)}

    def _table(self, dataset: Dataset, unit: int) -> Any:
        def read() -> tuple[Any, int]:
            table = dataset.documents(unit=unit)
            return table, table.nbytes

        return self._tables.get(unit, read)

    def _tokens_of(self, dataset: Dataset, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a unit's rows, and their documents."""

        def read() -> tuple[tuple[np.ndarray, np.ndarray], int]:
            entries = dataset.index(*dataset.unit_starts[number : number + 2])
            ids, docs = (np.ascontiguousarray(entries[name]) for name in ("token_id", "doc"))
            return (ids, docs), ids.nbytes + docs.nbytes

        return self._tokens.get(dataset.units[number], read)


def sequences(tokens: np.ndarray, docs: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Where some tokens follow one another in one document."""
    hits = np.flatnonzero(tokens[: max(0, len(tokens) - len(ids) + 1)] == ids[0])
    for step, token in enumerate(ids[1:], 1):
        hits = hits[(tokens[hits + step] == token) & (docs[hits + step] == docs[hits])]
    return hits


def _matching(table: Any, text: str) -> np.ndarray:
    """Rows of a table of documents that name a text in any of their columns."""
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
    """Values by key, made by whoever asks first; what was used longest ago makes room."""

    def __init__(self, most: int) -> None:
        """`most`: of their sizes, together."""
        self._most, self._held = most, 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
        """`make` gives the value and its size."""
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

"""Reading a dataset: numpy in, numpy out, memory maps where the store is a local disk. No jax.

Row numbers count the dataset's rows in stored order: unit by unit, and within a unit as packed.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from spile.background import mapped
from spile.config import ResolvedRecipe
from spile.errors import ConfigError, CorruptError, StoreError
from spile.index import INDEX_DTYPE
from spile.objects import Objects, open_objects
from spile.store import format as fmt
from spile.store.format import Done, Shard
from spile.store.ledger import Ledger, Table
from spile.store.quant import DECODED, decode, encode
from spile.store.shard import open_tensor, read_shard_header, read_tensors
from spile.store.shuffle import Batches
from spile.store.stats import TapStats, merged

_COLUMNS = 4  # of indexes, kept whole
_OPEN_SHARDS = 512  # memory maps kept; each holds a file descriptor's worth of address space


@dataclass(frozen=True)
class Document:
    """One document in reading order: its index, and its rows of any tap."""

    index: np.ndarray
    _dataset: "Dataset"
    _rows: np.ndarray

    def read(self, tap: str) -> np.ndarray:
        """The document's rows of a tap, in reading order."""
        shape, dtype = self._dataset.shape(tap), self._dataset.dtype(tap)
        out = np.empty((len(self._rows), *shape), dtype)
        for start, stop in _runs(self._rows):
            first = int(self._rows[start])
            out[start:stop] = self._dataset.read(tap, first, first + stop - start)
        return out

    __getitem__ = read

    def __len__(self) -> int:
        return len(self._rows)


class Dataset:
    """A stored dataset, open for reading."""

    def __init__(
        self,
        objects: Objects,
        table: Table,
        units: Sequence[Done],
        scales: Mapping[str, np.ndarray],
    ) -> None:
        self._objects, self._table, self._units = objects, table, list(units)
        self._scales = scales  # of each channel, for taps that are stored with them
        self._starts = [0]
        for unit in self._units:
            self._starts.append(self._starts[-1] + unit.rows)
        self._shards: dict[tuple[int, str], list[Shard]] = {}
        for position, unit in enumerate(self._units):
            for shard in unit.shards:
                self._shards.setdefault((position, shard.tap), []).append(shard)
        self._tensor = lru_cache(_OPEN_SHARDS)(self._open)
        self._column = lru_cache(_COLUMNS)(self._read_column)
        self._aliases = {alias: tap for tap, info in table.taps.items() for alias in info.aliases}

    @property
    def taps(self) -> list[str]:
        return list(self.recipe.taps)

    @property
    def num_tokens(self) -> int:
        """Rows of every tap: one for each token that was kept."""
        return self._starts[-1]

    @property
    def num_documents(self) -> int:
        return sum(unit.documents for unit in self._units)

    @property
    def recipe(self) -> ResolvedRecipe:
        return self._table.recipe

    @property
    def fingerprint(self) -> str:
        return self._table.fingerprint

    def name(self, tap: str) -> str:
        """The canonical name of a tap, which may be given by another tool's name for it."""
        tap = self._aliases.get(tap, tap)
        if tap not in self._table.taps:
            raise ConfigError(
                f"no tap {tap!r} in {self._objects.url}; it has {', '.join(self.taps)}"
            )
        return tap

    def aliases(self, tap: str) -> tuple[str, ...]:
        """What other tools call a tap."""
        return self._table.taps[self.name(tap)].aliases

    def dtype(self, tap: str) -> np.dtype[Any]:
        """Of what `read` gives: as stored, but float32 where values are stored with scales."""
        info = self._table.taps[self.name(tap)]
        return DECODED if info.scaled_by else info.storage

    def stored_dtype(self, tap: str) -> str:
        """As `--store-dtype` names it."""
        return self._table.taps[self.name(tap)].dtype

    def as_stored(self, tap: str, values: np.ndarray) -> np.ndarray:
        """Values as they would read back, had they been stored."""
        tap = self.name(tap)
        scale = self._scales.get(tap)
        if scale is not None:  # of attention patterns only as wide as their context
            scale = scale[tuple(map(slice, values.shape[1:]))]
        return encode(values, self._table.taps[tap], scale)

    def shape(self, tap: str) -> tuple[int, ...]:
        """Of one row: (width,), with an axis of heads (heads, dim), or () for a single number."""
        return self._table.taps[self.name(tap)].shape

    def width(self, tap: str) -> int:
        """Values in one row."""
        return self._table.taps[self.name(tap)].width

    def read(self, tap: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of a tap; a view of the file if one shard holds them as they are."""
        tap = self.name(tap)
        start, stop, _ = slice(start, stop).indices(self.num_tokens)
        pieces = list(self._pieces(tap, start, stop))
        for shard, _, _ in pieces:
            self._rows(shard)  # so that no more is allocated than there is
        if len(pieces) == 1 and not self._table.taps[tap].scaled_by:
            shard, a, b = pieces[0]
            return self._rows(shard)[a:b]
        out = np.empty((max(0, stop - start), *self.shape(tap)), self.dtype(tap))
        self._fill(tap, pieces, out)
        return out

    def read_into(self, tap: str, start: int, out: np.ndarray) -> None:
        """Copy rows from `start` on into a buffer, without a temporary."""
        tap = self.name(tap)
        if not 0 <= start <= self.num_tokens - len(out):
            raise ConfigError(
                f"rows {start} to {start + len(out)} of {self.num_tokens} do not exist"
            )
        self._fill(tap, self._pieces(tap, start, start + len(out)), out)

    def _fill(self, tap: str, pieces: Iterable[tuple[Shard, int, int]], out: np.ndarray) -> None:
        scaled_by = self._table.taps[tap].scaled_by
        filled = 0
        for shard, a, b in pieces:
            stored, target = self._rows(shard)[a:b], out[filled : filled + b - a]
            if scaled_by is None:
                target[...] = stored
            elif scaled_by == "row":
                decode(stored, self._scale(shard)[a:b], target)
            else:
                decode(stored, self._scales[tap], target)
            filled += b - a

    def index(self, start: int, stop: int) -> np.ndarray:
        """Index entries of rows start..stop: token_id, doc, offset, pos, flags."""
        start, stop, _ = slice(start, stop).indices(self.num_tokens)
        ranges = list(self._unit_ranges(start, stop))
        for position, *_ in ranges:
            for name in INDEX_DTYPE.names or ():
                self._entries(self._units[position], name)
        out = np.empty(max(0, stop - start), INDEX_DTYPE)
        for position, low, high, at in ranges:
            for name in INDEX_DTYPE.names or ():
                column = self._entries(self._units[position], name)
                out[name][at : at + high - low] = column[low:high]
        return out

    @property
    def url(self) -> str:
        return self._objects.url

    def has_document(self, doc: int) -> bool:
        """Whether any row of a document is stored."""
        return any(
            (self._column(unit.index.key, "doc") == doc).any() for _, unit in self._units_with(doc)
        )

    def document(self, doc: int) -> Document:
        """One document by its ordinal in the corpus."""
        for position, unit in self._units_with(doc):
            docs = self._column(unit.index.key, "doc")
            rows = np.flatnonzero(docs == doc)
            if len(rows):
                order = np.argsort(self._column(unit.index.key, "offset")[rows], kind="stable")
                rows = rows[order] + self._starts[position]
                first = int(rows.min())
                entries = self.index(first, int(rows.max()) + 1)[rows - first]
                return Document(entries, self, rows)
        raise StoreError(
            f"{self._objects.url}: document {doc} is not in the dataset (out of range, skipped as "
            "unusable, none of it kept by --where, or its unit is not done)"
        )

    def statistics(self, tap: str) -> TapStats:
        """Count, mean, variance, norms and extremes of a tap over the whole dataset."""
        tap = self.name(tap)

        def parts() -> Iterator[TapStats]:
            for unit in self._units:
                tensors = read_tensors(self._objects, unit.statistics.key)
                yield TapStats.from_tensors(tap, tensors)

        return merged(parts(), self.width(tap))

    def batches(
        self,
        taps: str | Sequence[str],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        window: int = 1 << 16,
        drop_last: bool = False,
    ) -> Batches:
        """One shuffled epoch of `{tap: rows, "index": entries}`; resumable (`state_dict`)."""
        taps = [taps] if isinstance(taps, str) else list(taps)
        for tap in taps:
            self.name(tap)
        return Batches(
            self, taps, batch_size, seed=seed, shuffle=shuffle, window=window, drop_last=drop_last
        )

    def _open(self, key: str, name: str) -> np.ndarray:
        header = read_shard_header(self._objects, key)
        if name not in header:
            raise CorruptError(key, f"holds no tensor {name!r}")
        return open_tensor(self._objects, key, header[name])

    def _read_column(self, key: str, name: str) -> np.ndarray:
        return self._tensor(key, name)[:]

    def _rows(self, shard: Shard) -> Any:
        info = self._table.taps[shard.tap]
        return self._checked(shard, shard.tap, info.storage, info.shape)

    def _scale(self, shard: Shard) -> Any:
        return self._checked(shard, fmt.scale_name(shard.tap), fmt.SCALE_DTYPE, ())

    def _entries(self, unit: Done, name: str) -> Any:
        return self._checked(unit.index, name, INDEX_DTYPE[name], ())

    def _checked(self, file: Shard, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """A tensor that is what the record and the table say of it."""
        tensor = self._tensor(file.key, name)
        if tensor.dtype != dtype or tensor.shape != (file.count, *shape):
            raise CorruptError(file.key, f"does not hold {file.count} rows of {name}")
        return tensor

    def _unit_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(unit position, first and last row within it, offset from `start`) covering a range."""
        position = bisect_right(self._starts, start) - 1
        while start < stop and position < len(self._units):
            base = self._starts[position]
            high = min(stop - base, self._units[position].rows)
            low = max(start - base, 0)
            if high > low:
                yield position, low, high, base + low - start
            position += 1
            if self._starts[position] >= stop:
                return

    def _pieces(self, tap: str, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
        for position, low, high, _ in self._unit_ranges(start, stop):
            shards = self._shards.get((position, tap))
            if shards is None:
                unit = self._units[position].unit
                raise CorruptError(fmt.done_key(unit), f"names no rows of {tap}")
            at = bisect_right(shards, low, key=lambda s: s.first) - 1
            while at < len(shards) and shards[at].first < high:
                shard = shards[at]
                yield shard, max(low - shard.first, 0), min(high - shard.first, shard.count)
                at += 1

    def _units_with(self, doc: int) -> Iterator[tuple[int, Done]]:
        ranges = {
            u["id"]: (u["first_doc"], u["first_doc"] + u["num_docs"]) for u in self._table.units
        }
        for position, unit in enumerate(self._units):
            first, last = ranges[unit.unit]
            if first <= doc < last and unit.rows:
                yield position, unit


def open_dataset(url: str, *, partial: bool = False) -> Dataset:
    """Open a finished dataset; with `partial`, whatever units are done so far.

    Raises:
        StoreError: if there is no dataset, or it is unfinished and `partial` is not given.
    """
    objects = open_objects(str(url))
    ledger = Ledger(objects)
    table = ledger.table()
    manifest = ledger.read_manifest()
    scales = ledger.read_scales(table)
    if manifest is not None:
        units = [_done_from_manifest(table, unit) for unit in manifest["units"]]
        known = [unit["id"] for unit in table.units]
        if [unit.unit for unit in units] != known or len({*known}) != len(known):
            raise CorruptError(fmt.MANIFEST, f"names other units than {fmt.UNITS}")
        return Dataset(objects, table, units, _needed(scales))
    done = sorted(ledger.done_units() & {int(unit["id"]) for unit in table.units})
    if not partial and len(done) < len(table.units):
        raise StoreError(
            f"{objects.url}: {len(done)} of {len(table.units)} units are done; finish with the "
            "same `spile extract`, or open with partial=True"
        )
    found = mapped(ledger.read_done, done, objects.parallel)
    records = [record for record in found if record is not None]
    for record in records:
        if record.fingerprint != table.fingerprint:
            raise CorruptError(fmt.done_key(record.unit), "belongs to another recipe")
    return Dataset(objects, table, records, _needed(scales) if records else {})


def _needed(scales: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    if scales is None:
        raise CorruptError(fmt.SCALES, "is missing, and without it int8 rows cannot be read")
    return scales


def _done_from_manifest(table: Table, unit: Mapping[str, Any]) -> Done:
    body: dict[str, Any] = {**unit, "made_by": {}, "fingerprint": table.fingerprint}
    return Done.from_json(fmt.MANIFEST, body)


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Maximal stretches of consecutive row numbers."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [0, *breaks.tolist(), len(rows)]
    yield from zip(bounds, bounds[1:], strict=False)

"""One pass of an external shuffle: scatter rows into parts of the new dataset.

The rows of the new dataset are cut into parts that fit into memory. Every row draws a random place
among all rows, and belongs to the part with that place, so the number of rows in a part is random.
Each part is then permuted at random, and the parts are concatenated. The result is a permutation,
and every permutation is equally likely.

A pass reads as many rows as fit into memory, sorts them by part and writes them as a run. So the
rows of a part are read later in one piece from each run. With too many parts, these pieces would be
too short to read at full speed: the pass then sorts by groups of parts (nodes), and the next pass
splits each node. Runs are units of a separate store, and are committed like units.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from spile.core.errors import CorruptError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Done, TapInfo
from spile.dataset.maintain.copy import NewDataset, read_index, read_rows, refuse_strangers
from spile.dataset.maintain.finished import FinishedRecords
from spile.dataset.read.checked_file import WINDOW_BYTES
from spile.dataset.read.rows import Bytes, ReadJob, Rows, StoredRows
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.segments import Catalog
from spile.dataset.records.table import Table
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.objects import PROBES, Objects
from spile.objects.local import settle

OWNER = "owner.json"  # the origin of the runs
WHOLE = "whole.json"  # written when a pass is finished and its rows match those of the pass before
SHUFFLED = "shuffled"

_INDEX_SUM = "index"
_SUM_MODULUS = 1 << 64

Hashes = npt.NDArray[np.uint64]


# -- comparing the rows of two datasets --------------------------------------------------------


def entry_hashes(index: np.ndarray) -> Hashes:
    """Return a hash of each index entry."""
    found = np.zeros(len(index), np.uint64)
    for name in index.dtype.names or ():
        found = _mixed(found ^ index[name].astype(np.int64).view(np.uint64))
    return found


def entries_sum(index: np.ndarray) -> int:
    return int(entry_hashes(index).sum(dtype=np.uint64))


def _mixed(values: Hashes) -> Hashes:
    """Mix each value so that every bit of the result depends on every bit of it (splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class RowSums:
    """Sums of row hashes, which are equal if two datasets hold the same rows in any order.

    There is one sum for the index, and one for each tap. Each row is hashed with its index entry,
    so that rows separated from their entries are noticed. Addition discards the order and nothing
    else.
    """

    def __init__(self, values: Mapping[str, int] | None = None) -> None:
        self._values: dict[str, int] = dict(values or {})

    def add_entries(self, index: np.ndarray) -> None:
        self._add(_INDEX_SUM, entries_sum(index))

    def add_rows(
        self, tap: str, rows: Bytes, scales: np.ndarray | None, entries: Iterable[int]
    ) -> None:
        """Args:
        rows: the bytes of the rows.
        entries: the hash of each row's index entry.
        """
        digest = xxhash.xxh3_64_intdigest
        if scales is None:
            found = sum(map(digest, rows, entries))
        else:
            beside = scales.view(np.uint32).tolist()
            each = zip(rows, entries, beside, strict=True)
            found = sum(digest(row, entry ^ scale) for row, entry, scale in each)
        self._add(tap, found)

    def merge(self, other: "RowSums") -> None:
        for name, value in other._values.items():
            self._add(name, value)

    def _add(self, name: str, value: int) -> None:
        self._values[name] = (self._values.get(name, 0) + value) % _SUM_MODULUS

    @property
    def entries(self) -> int:
        return self._values.get(_INDEX_SUM, 0)

    def to_json(self) -> dict[str, str]:
        return {name: f"{value:016x}" for name, value in sorted(self._values.items())}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "RowSums":
        return cls({name: int(value, 16) for name, value in body.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSums) and self._values == other._values


# -- scattering rows ----------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetPart:
    """Rows first..last of a dataset: a part of one unit, or several whole units."""

    first: int
    last: int
    units: tuple[int, int]  # the first, and the one after the last


@dataclass(frozen=True)
class NodePiece:
    """Rows first..last of a node, which are read together."""

    node: int
    first: int
    last: int


class NodeRows(Protocol):
    """A source of rows, node by node."""

    sums: RowSums

    def pieces(self, capacity: int) -> list[NodePiece]: ...

    def index(self, piece: NodePiece) -> np.ndarray: ...

    def fill(self, tap: str, piece: NodePiece, rows: Bytes, scales: np.ndarray | None) -> None:
        """Copy a tap's bytes, and the scale of each row if they have one."""
        ...


class TapBuffer:
    """Reusable memory for the rows of a tap, in stored form."""

    def __init__(self, info: TapInfo, count: int) -> None:
        self._info = info
        self.rows = np.empty((count, info.width * info.storage.itemsize), np.uint8)
        self.scales = np.empty(count, fmt.SCALE_DTYPE) if info.scaled_by == "row" else None

    def taken(self, order: Rows) -> Iterator[tuple[Rows, Bytes, np.ndarray | None]]:
        """Yield rows in a given order, a window at a time."""
        step = max(1, WINDOW_BYTES // max(1, self.rows.shape[1]))
        for at in range(0, len(order), step):
            chosen = order[at : at + step]
            scales = None if self.scales is None else self.scales[chosen]
            yield chosen, self.rows[chosen], scales

    def values(self, rows: Bytes) -> np.ndarray:
        return rows.view(self._info.storage).reshape(len(rows), *self._info.shape)


class SourceRows:
    """A dataset as one node; every file is checked as it is read."""

    def __init__(self, objects: Objects, table: Table, records: FinishedRecords) -> None:
        self._objects, self._table, self._units = objects, table, records.catalog
        self.sums = RowSums()  # empty: a source's sums are unknown

    def parts(self, capacity: int) -> list[DatasetPart]:
        """Group small units; cut a large one at shard ends of its widest tap, if possible."""
        widest = max(self._table.taps, key=lambda tap: self._table.taps[tap].row_bytes)
        parts: list[DatasetPart] = []
        begun = begin = last = 0  # the next part's first unit and row; the end of the unit's rows
        for unit, rows in enumerate(map(int, self._units.rows)):
            first, last = last, last + rows
            if unit > begun and last - begin > capacity:
                parts.append(DatasetPart(begin, first, (begun, unit)))
                begun, begin = unit, first
            if rows <= capacity:
                continue
            shards = self._units[unit].shards
            ends = [first + s.first + s.count for s in shards if s.tap == widest]
            while first < last:
                near = [end for end in ends if first < end <= first + capacity]
                stop = max(near, default=min(first + capacity, last))
                parts.append(DatasetPart(first, stop, (unit, unit + 1)))
                first = stop
            begun, begin = unit + 1, last
        if begun < len(self._units):
            parts.append(DatasetPart(begin, last, (begun, len(self._units))))
        return parts

    def pieces(self, capacity: int) -> list[NodePiece]:
        return [NodePiece(0, part.first, part.last) for part in self.parts(capacity)]

    def index(self, piece: NodePiece) -> np.ndarray:
        found = [
            read_index(self._objects, self._table, done, low, high)
            for done, low, high in self._taken(piece)
        ]
        return np.concatenate([np.empty(0, self._table.index_dtype), *found])

    def fill(self, tap: str, piece: NodePiece, rows: Bytes, scales: np.ndarray | None) -> None:
        info, at = self._table.taps[tap], 0
        for done, low, high in self._taken(piece):
            for shard in done.shards:
                first, last = max(low - shard.first, 0), min(high - shard.first, shard.count)
                if shard.tap != tap or first >= last:
                    continue
                for values, beside in read_rows(self._objects, shard, info, first, last):
                    part = slice(at, at + len(values))
                    rows[part] = (
                        np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
                    )
                    if scales is not None and beside is not None:
                        scales[part] = beside
                    at += len(values)

    def _taken(self, piece: NodePiece) -> Iterator[tuple[Done, int, int]]:
        """Yield the units that overlap a piece, and their first and last row in it."""
        starts = self._units.starts
        unit = int(np.searchsorted(starts, piece.first, side="right")) - 1
        while unit < len(self._units) and starts[unit] < piece.last:
            done, start = self._units[unit], int(starts[unit])
            low, high = max(piece.first - start, 0), min(piece.last - start, done.rows)
            if low < high:
                yield done, low, high
            unit += 1


class ScatteredRows:
    """The output of a pass: runs, each sorted by the node of its rows.

    The rows of a node lie in some of the runs, contiguous in each.
    """

    def __init__(self, objects: Objects, table: Table, records: Sequence[Done]) -> None:
        self._objects, self._taps = objects, table.taps
        units = Catalog.of(objects, Ledger(objects).layout, records)
        self._stored = StoredRows(objects, table, units, {})
        self._segments: dict[int, list[tuple[int, int]]] = {}  # first row, and the number of rows
        self.sums = RowSums()
        for done, start in zip(records, self._stored.starts.tolist(), strict=False):
            told = done.made_by[SHUFFLED]
            for child, count in enumerate(told["counts"]):
                self._segments.setdefault(told["children"] + child, []).append((start, count))
                start += count
            self.sums.merge(RowSums.from_json(told["sums"]))

    def count(self, node: int) -> int:
        """Return the number of rows of a node."""
        return sum(count for _, count in self._segments.get(node, ()))

    def pieces(self, capacity: int) -> list[NodePiece]:
        return [
            NodePiece(node, first, min(first + capacity, self.count(node)))
            for node in sorted(self._segments)
            for first in range(0, self.count(node), capacity)
        ]

    def index(self, piece: NodePiece) -> np.ndarray:
        rows, entries = self._rows(piece), self._stored.table.index_dtype
        out = np.empty(piece.last - piece.first, entries)
        self._run(self._stored.index_jobs(rows, out) if len(rows) else ())
        return out

    def fill(self, tap: str, piece: NodePiece, rows: Bytes, scales: np.ndarray | None) -> None:
        wanted = self._rows(piece)
        if not len(wanted):
            return
        self._run(self._stored.jobs(tap, wanted, rows))
        if scales is not None:
            self._run(self._stored.scale_jobs(tap, wanted, scales))

    def _rows(self, piece: NodePiece) -> Rows:
        """Return the numbers of a piece's rows among all rows, ascending."""
        found: list[Rows] = [np.empty(0, np.int64)]
        before = 0
        for start, count in self._segments.get(piece.node, ()):
            low, high = max(piece.first - before, 0), min(piece.last - before, count)
            if low < high:
                found.append(np.arange(start + low, start + high))
            before += count
        return np.concatenate(found)

    def _run(self, jobs: Iterable[ReadJob]) -> None:
        for _ in mapped(lambda job: job(), jobs, self._objects.parallel):
            pass


@dataclass(frozen=True)
class ScatterPass:
    """One pass, which draws a node for each row of `before`.

    Attributes:
        bounds: the places in the new dataset where the new nodes begin, and the end of the last.
        children: for each node of `before`, the first new node made from it; then the number of new
            nodes.
    """

    number: int
    seed: int
    origin: Mapping[str, Any]
    table: Table
    bounds: Sequence[int]
    children: Sequence[int]
    shard_bytes: int

    def run(self, before: NodeRows, objects: Objects, capacity: int) -> ScatteredRows:
        """Write the missing runs."""
        refuse_strangers(objects, [OWNER, WHOLE])
        new = new_shuffle(objects, self.table)
        if not objects.create(OWNER, self._owner()) and not self._owns(objects):
            raise new.other_dataset_error()
        there = new.ledger.done_units()
        records: list[Done] = []
        for run, piece in enumerate(before.pieces(capacity)):
            if run not in there:
                self._write(new.ledger, run, before, piece)
            records.append(new.ours(run, self.origin))
        level = ScatteredRows(objects, self.table, records)
        if isinstance(before, ScatteredRows) and level.sums != before.sums:
            raise lost_rows_error(objects)
        settle(objects, *(new.ledger.layout.done_key(each.unit) for each in records))
        objects.create(WHOLE, fmt.encode_record("runs", {**self.origin, "runs": len(records)}))
        return level

    def found(self, objects: Objects) -> ScatteredRows | None:
        """Return the finished output of an earlier process, if any."""
        try:
            body = fmt.decode_record(WHOLE, objects.get(WHOLE), "runs")
        except FileNotFoundError:
            return None
        new = new_shuffle(objects, self.table)
        records = [new.ours(run, self.origin) for run in range(int(body["runs"]))]
        return ScatteredRows(objects, self.table, records)

    def clear(self, objects: Objects) -> None:
        """Remove the runs if they belong to this shuffle; leave anything else."""
        if self._owns(objects):
            # Records before the files they name, so that no record names a deleted file.
            for runs in (WHOLE, fmt.DONE, fmt.ATTEMPTS, PROBES):
                for key in [*objects.list()]:
                    if (objects.leftover_of(key) or key).startswith(runs):
                        objects.delete(key)
            objects.delete(OWNER)

    def _owner(self) -> bytes:
        return fmt.encode_record("owner", dict(self.origin))

    def _owns(self, objects: Objects) -> bool:
        try:
            return objects.get(OWNER) == self._owner()
        except FileNotFoundError:
            return False

    def _write(self, ledger: Ledger, run: int, before: NodeRows, piece: NodePiece) -> None:
        taps, count = self.table.taps, piece.last - piece.first
        index = before.index(piece)
        entries = entry_hashes(index).tolist()
        first, last = self.children[piece.node], self.children[piece.node + 1]
        bounds = np.asarray(self.bounds[first : last + 1])
        random = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence((self.seed, self.number, run)))
        )
        places = random.integers(bounds[0], max(bounds[-1], bounds[0] + 1), count)
        drawn = np.searchsorted(bounds, places, side="right") - 1
        order = np.argsort(drawn, kind="stable")
        sums = RowSums()
        sums.add_entries(index)
        writer = UnitWriter(
            ledger.objects, run, index[order], taps, self.shard_bytes, layout=ledger.layout
        )
        with Attempt(ledger, writer) as attempt:
            for tap, info in taps.items():
                buffer = TapBuffer(info, count)
                before.fill(tap, piece, buffer.rows, buffer.scales)
                sums.add_rows(tap, buffer.rows, buffer.scales, entries)
                for _, rows, scales in buffer.taken(order):
                    writer.write(tap, buffer.values(rows), scales)
            told = {
                "origin": self.origin,
                "children": first,
                "counts": np.bincount(drawn, minlength=last - first).tolist(),
                "sums": sums.to_json(),
            }
            done = writer.finish(
                table={"doc": np.empty(0, np.int64)},
                fingerprint=self.table.fingerprint,
                made_from="",
                tokens=0,
                documents=0,
                contexts=0,
                skipped={},
                text_digest="",
                made_by={SHUFFLED: told},
            )
            attempt.commit(done)


def lost_rows_error(objects: Objects) -> CorruptError:
    return CorruptError(
        objects.url,
        "its rows differ from those that were read; remove it and run the command again",
    )


def new_shuffle(objects: Objects, table: Table) -> NewDataset:
    """Return the shuffled dataset, or the runs of a pass, at a place."""
    other = "this one shuffled with another --seed or --memory"
    return NewDataset(Ledger(objects), table, SHUFFLED, other)

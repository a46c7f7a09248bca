"""One pass of an external shuffle: rows drawn into parts of the dataset to be made.

The new dataset's rows are cut into parts that fit into memory. Every row draws a place among all
of them, and belongs to the part that place lies in: so many rows as chance gives it. When a part's
rows are put in a drawn order and the parts one after another, that is a permutation, and each is
as likely as any other.

A pass reads as many rows as fit into memory, sorts them by part and writes them as a run: what a
part needs of a run then lies together. Where parts are so many that this would be little, the pass
sorts by groups of parts instead (nodes), and the next one goes on with each of those. Runs are
units of a store of their own, committed as units are.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from spile.core.errors import ConfigError, CorruptError
from spile.core.index import INDEX_DTYPE
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Done, TapInfo
from spile.dataset.ledger import Attempt, Ledger, Table
from spile.dataset.maintain.copy import (
    read_index,
    read_rows,
    refuse_missing,
    refuse_strangers,
)
from spile.dataset.read.checked_file import WINDOW_BYTES
from spile.dataset.read.rows import Bytes, ReadJob, Rows, StoredRows
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import PROBES, Objects
from spile.objects.local import settle

OWNER = "owner.json"  # what the runs there are made from; they are nobody else's
WHOLE = "whole.json"  # a pass is finished, and its rows are those of the pass before
SHUFFLED = "shuffled"

_INDEX_SUM = "index"
_SUM_MODULUS = 1 << 64

Hashes = npt.NDArray[np.uint64]


# -- whether two datasets hold the same rows ---------------------------------------------------


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


class RowSums:
    """Sums of row hashes, which say whether two datasets hold the same rows in whatever order.

    There is one of the index, and one of each tap. Each row is hashed with its index entry, so that
    rows which have changed places without their entries are noticed; hashes are added, which
    forgets the order and nothing else.
    """

    def __init__(self, values: Mapping[str, int] | None = None) -> None:
        self._values: dict[str, int] = dict(values or {})

    def add_entries(self, index: np.ndarray) -> None:
        self._add(_INDEX_SUM, entries_sum(index))

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
    """Rows first..last of a dataset: of one unit, or of several whole ones."""

    first: int
    last: int
    units: tuple[int, int]  # the first, and the one after the last


@dataclass(frozen=True)
class NodePiece:
    """Rows first..last of a node, that are read together."""

    node: int
    first: int
    last: int


class NodeRows(Protocol):
    """Rows, node by node."""

    sums: RowSums

    def pieces(self, capacity: int) -> list[NodePiece]: ...

    def index(self, piece: NodePiece) -> np.ndarray: ...

    def fill(self, tap: str, piece: NodePiece, rows: Bytes, scales: np.ndarray | None) -> None:
        """Copy a tap's bytes, and the scale of each row where they have them."""
        ...


class TapBuffer:
    """Memory for the rows of a tap, as they are stored; used again."""

    def __init__(self, info: TapInfo, count: int) -> None:
        self._info = info
        self.rows = np.empty((count, info.width * info.storage.itemsize), np.uint8)
        self.scales = np.empty(count, fmt.SCALE_DTYPE) if info.scaled_by == "row" else None

    def taken(self, order: Rows) -> Iterator[tuple[Rows, Bytes, np.ndarray | None]]:
        """Rows in an order, a window at a time."""
        step = max(1, WINDOW_BYTES // max(1, self.rows.shape[1]))
        for at in range(0, len(order), step):
            chosen = order[at : at + step]
            scales = None if self.scales is None else self.scales[chosen]
            yield chosen, self.rows[chosen], scales

    def values(self, rows: Bytes) -> np.ndarray:
        return rows.view(self._info.storage).reshape(len(rows), *self._info.shape)


class SourceRows:
    """A dataset, as one node; every file is checked as it is read."""

    def __init__(self, objects: Objects, table: Table, records: Sequence[Done]) -> None:
        self._objects, self._table, self._records = objects, table, records
        self._starts = np.cumsum([0, *(done.rows for done in records)]).tolist()
        self.sums = RowSums()  # nothing is known before it is read

    def parts(self, capacity: int) -> list[DatasetPart]:
        """Small units together; a large one cut where its widest tap's shards end, if possible."""
        widest = max(self._table.taps, key=lambda tap: self._table.taps[tap].row_bytes)
        parts: list[DatasetPart] = []
        begun = 0
        for unit, done in enumerate(self._records):
            first, last = self._starts[unit], self._starts[unit + 1]
            if unit > begun and last - self._starts[begun] > capacity:
                parts.append(DatasetPart(self._starts[begun], first, (begun, unit)))
                begun = unit
            if done.rows <= capacity:
                continue
            ends = [first + s.first + s.count for s in done.shards if s.tap == widest]
            while first < last:
                near = [end for end in ends if first < end <= first + capacity]
                stop = max(near, default=min(first + capacity, last))
                parts.append(DatasetPart(first, stop, (unit, unit + 1)))
                first = stop
            begun = unit + 1
        if begun < len(self._records):
            parts.append(
                DatasetPart(self._starts[begun], self._starts[-1], (begun, len(self._records)))
            )
        return parts

    def pieces(self, capacity: int) -> list[NodePiece]:
        return [NodePiece(0, part.first, part.last) for part in self.parts(capacity)]

    def index(self, piece: NodePiece) -> np.ndarray:
        found = [
            read_index(self._objects, done, low, high) for done, low, high in self._units(piece)
        ]
        return np.concatenate([np.empty(0, INDEX_DTYPE), *found])

    def fill(self, tap: str, piece: NodePiece, rows: Bytes, scales: np.ndarray | None) -> None:
        info, at = self._table.taps[tap], 0
        for done, low, high in self._units(piece):
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

    def _units(self, piece: NodePiece) -> Iterator[tuple[Done, int, int]]:
        unit = bisect_right(self._starts, piece.first) - 1
        while unit < len(self._records) and self._starts[unit] < piece.last:
            done, start = self._records[unit], self._starts[unit]
            low, high = max(piece.first - start, 0), min(piece.last - start, done.rows)
            if low < high:
                yield done, low, high
            unit += 1


class ScatteredRows:
    """What a pass has written: runs, each sorted by the nodes its rows are of.

    Of every node, the rows lie in some of the runs, together in each.
    """

    def __init__(self, objects: Objects, table: Table, records: Sequence[Done]) -> None:
        self._objects, self._taps = objects, table.taps
        self._stored = StoredRows(objects, table, records, {})
        self._segments: dict[int, list[tuple[int, int]]] = {}  # first row, and how many
        self.sums = RowSums()
        for done, start in zip(records, self._stored.starts, strict=False):
            told = done.made_by[SHUFFLED]
            for child, count in enumerate(told["counts"]):
                self._segments.setdefault(told["children"] + child, []).append((start, count))
                start += count
            self.sums.merge(RowSums.from_json(told["sums"]))

    def count(self, node: int) -> int:
        """Rows of a node."""
        return sum(count for _, count in self._segments.get(node, ()))

    def pieces(self, capacity: int) -> list[NodePiece]:
        return [
            NodePiece(node, first, min(first + capacity, self.count(node)))
            for node in sorted(self._segments)
            for first in range(0, self.count(node), capacity)
        ]

    def index(self, piece: NodePiece) -> np.ndarray:
        out, rows = np.empty(piece.last - piece.first, INDEX_DTYPE), self._rows(piece)
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
        """Which of all rows those of a piece are, ascending."""
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
    """What is drawn: of each row of `before`, the node it belongs to.

    Attributes:
        bounds: where the nodes to be made begin among the new dataset's places, and their end.
        children: of each node of `before`, the first node that is made of it; and their number.
    """

    number: int
    seed: int
    origin: Mapping[str, Any]
    table: Table
    bounds: Sequence[int]
    children: Sequence[int]
    shard_bytes: int

    def run(self, before: NodeRows, objects: Objects, capacity: int) -> ScatteredRows:
        """Write the runs that are not there yet."""
        refuse_strangers(objects, [OWNER, WHOLE])
        if not objects.create(OWNER, self._owner()) and not self._owns(objects):
            raise other_dataset_error(objects)
        ledger = Ledger(objects)
        there = ledger.done_units()
        records: list[Done] = []
        for run, piece in enumerate(before.pieces(capacity)):
            if run not in there:
                self._write(ledger, run, before, piece)
            records.append(self._ours(ledger, run))
        level = ScatteredRows(objects, self.table, records)
        if isinstance(before, ScatteredRows) and level.sums != before.sums:
            raise lost_rows_error(objects)
        settle(objects, fmt.done_key(0))
        objects.create(WHOLE, fmt.encode_record("runs", {**self.origin, "runs": len(records)}))
        return level

    def found(self, objects: Objects) -> ScatteredRows | None:
        """What an earlier process has finished."""
        try:
            body = fmt.decode_record(WHOLE, objects.get(WHOLE), "runs")
        except FileNotFoundError:
            return None
        ledger = Ledger(objects)
        records = [self._ours(ledger, run) for run in range(int(body["runs"]))]
        return ScatteredRows(objects, self.table, records)

    def clear(self, objects: Objects) -> None:
        """Remove the runs, if they are this shuffle's; anything else there is a stranger's."""
        if self._owns(objects):
            # Records before what they name, so that none ever names what is gone.
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

    def _ours(self, ledger: Ledger, run: int) -> Done:
        done = ledger.read_done(run)
        if done is None:
            raise CorruptError(fmt.done_key(run), f"is missing from {ledger.objects.url}")
        if done.made_by.get(SHUFFLED, {}).get("origin") != self.origin:
            raise other_dataset_error(ledger.objects)
        refuse_missing(ledger, done)
        return done

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
        writer = UnitWriter(ledger.objects, run, index[order], taps, self.shard_bytes)
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
        objects.url, "its rows are not those that were read; remove it and run the command again"
    )


def other_dataset_error(objects: Objects) -> ConfigError:
    return ConfigError(
        f"{objects.url} holds another dataset, or this one shuffled with another --seed or "
        "--memory; choose an empty place"
    )

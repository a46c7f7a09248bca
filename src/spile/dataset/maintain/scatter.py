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

from spile.core.errors import ConfigError, CorruptError
from spile.core.index import INDEX_DTYPE
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Done, TapInfo
from spile.dataset.ledger import Ledger, Table
from spile.dataset.maintain.copy import WINDOW_BYTES
from spile.dataset.maintain.rewrite import read_index, read_rows, refuse_strangers
from spile.dataset.maintain.sums import Sums, entry_hashes
from spile.dataset.read.rows import Bytes, Job, Rows, StoredRows
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import Objects

WHOLE = "whole.json"  # a pass is finished, and its rows are those of the pass before
SHUFFLED = "shuffled"


@dataclass(frozen=True)
class Part:
    """Rows first..last of a dataset: of one unit, or of several whole ones."""

    first: int
    last: int
    units: tuple[int, int]  # the first, and the one after the last


@dataclass(frozen=True)
class Piece:
    """Rows first..last of a node, that are read together."""

    node: int
    first: int
    last: int


class Rowset(Protocol):
    """Rows, node by node."""

    sums: Sums

    def pieces(self, capacity: int) -> list[Piece]: ...

    def index(self, piece: Piece) -> np.ndarray: ...

    def fill(self, tap: str, piece: Piece, rows: Bytes, scales: np.ndarray | None) -> None:
        """Copy a tap's bytes, and the scale of each row where they have them."""
        ...


class Room:
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


class Source:
    """A dataset, as one node; every file is checked as it is read."""

    def __init__(self, objects: Objects, table: Table, records: Sequence[Done]) -> None:
        self._objects, self._table, self._records = objects, table, records
        self._starts = np.cumsum([0, *(done.rows for done in records)]).tolist()
        self.sums = Sums()  # nothing is known before it is read

    def parts(self, capacity: int) -> list[Part]:
        """Small units together; a large one cut where its widest tap's shards end, if possible."""
        widest = max(self._table.taps, key=lambda tap: self._table.taps[tap].row_bytes)
        parts: list[Part] = []
        begun = 0
        for unit, done in enumerate(self._records):
            first, last = self._starts[unit], self._starts[unit + 1]
            if unit > begun and last - self._starts[begun] > capacity:
                parts.append(Part(self._starts[begun], first, (begun, unit)))
                begun = unit
            if done.rows <= capacity:
                continue
            ends = [first + s.first + s.count for s in done.shards if s.tap == widest]
            while first < last:
                near = [end for end in ends if first < end <= first + capacity]
                stop = max(near, default=min(first + capacity, last))
                parts.append(Part(first, stop, (unit, unit + 1)))
                first = stop
            begun = unit + 1
        if begun < len(self._records):
            parts.append(Part(self._starts[begun], self._starts[-1], (begun, len(self._records))))
        return parts

    def pieces(self, capacity: int) -> list[Piece]:
        return [Piece(0, part.first, part.last) for part in self.parts(capacity)]

    def index(self, piece: Piece) -> np.ndarray:
        found = [
            read_index(self._objects, done, low, high)
            for done, low, high in self._units(piece)
        ]  # fmt: skip
        return np.concatenate([np.empty(0, INDEX_DTYPE), *found])

    def fill(self, tap: str, piece: Piece, rows: Bytes, scales: np.ndarray | None) -> None:
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

    def _units(self, piece: Piece) -> Iterator[tuple[Done, int, int]]:
        unit = bisect_right(self._starts, piece.first) - 1
        while unit < len(self._records) and self._starts[unit] < piece.last:
            done, start = self._records[unit], self._starts[unit]
            low, high = max(piece.first - start, 0), min(piece.last - start, done.rows)
            if low < high:
                yield done, low, high
            unit += 1


class Level:
    """What a pass has written: runs, each sorted by the nodes its rows are of.

    Of every node, the rows lie in some of the runs, together in each.
    """

    def __init__(self, objects: Objects, table: Table, records: Sequence[Done]) -> None:
        self._objects, self._taps = objects, table.taps
        self._stored = StoredRows(objects, table, records, {})
        self._segments: dict[int, list[tuple[int, int]]] = {}  # first row, and how many
        self.sums = Sums()
        for done, start in zip(records, self._stored.starts, strict=False):
            told = done.made_by[SHUFFLED]
            for child, count in enumerate(told["counts"]):
                self._segments.setdefault(told["children"] + child, []).append((start, count))
                start += count
            self.sums.merge(Sums.from_json(told["sums"]))

    def count(self, node: int) -> int:
        """Rows of a node."""
        return sum(count for _, count in self._segments.get(node, ()))

    def pieces(self, capacity: int) -> list[Piece]:
        return [
            Piece(node, first, min(first + capacity, self.count(node)))
            for node in sorted(self._segments)
            for first in range(0, self.count(node), capacity)
        ]

    def index(self, piece: Piece) -> np.ndarray:
        out, rows = np.empty(piece.last - piece.first, INDEX_DTYPE), self._rows(piece)
        self._run(self._stored.index_jobs(rows, out) if len(rows) else ())
        return out

    def fill(self, tap: str, piece: Piece, rows: Bytes, scales: np.ndarray | None) -> None:
        wanted = self._rows(piece)
        if not len(wanted):
            return
        self._run(self._stored.jobs(tap, wanted, rows))
        if scales is not None:
            self._run(self._stored.scale_jobs(tap, wanted, scales))

    def _rows(self, piece: Piece) -> Rows:
        """Which of all rows those of a piece are, ascending."""
        found: list[Rows] = [np.empty(0, np.int64)]
        before = 0
        for start, count in self._segments.get(piece.node, ()):
            low, high = max(piece.first - before, 0), min(piece.last - before, count)
            if low < high:
                found.append(np.arange(start + low, start + high))
            before += count
        return np.concatenate(found)

    def _run(self, jobs: Iterable[Job]) -> None:
        for _ in mapped(lambda job: job(), jobs, self._objects.parallel):
            pass


@dataclass(frozen=True)
class Pass:
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

    def run(self, before: Rowset, objects: Objects, capacity: int) -> Level:
        """Write the runs that are not there yet."""
        refuse_strangers(objects, [WHOLE])
        ledger = Ledger(objects)
        there = ledger.done_units()
        records: list[Done] = []
        for run, piece in enumerate(before.pieces(capacity)):
            if run not in there:
                self._write(ledger, run, before, piece)
            records.append(self._ours(ledger, run))
        level = Level(objects, self.table, records)
        if isinstance(before, Level) and level.sums != before.sums:
            raise lost(objects)
        objects.create(WHOLE, fmt.encode_record("runs", {**self.origin, "runs": len(records)}))
        return level

    def found(self, objects: Objects) -> Level | None:
        """What an earlier process has finished."""
        try:
            body = fmt.decode_record(WHOLE, objects.get(WHOLE), "runs")
        except FileNotFoundError:
            return None
        ledger = Ledger(objects)
        records = [self._ours(ledger, run) for run in range(int(body["runs"]))]
        return Level(objects, self.table, records)

    def _ours(self, ledger: Ledger, run: int) -> Done:
        done = ledger.read_done(run)
        if done is None:
            raise CorruptError(fmt.done_key(run), f"is missing from {ledger.objects.url}")
        if done.made_by.get(SHUFFLED, {}).get("origin") != self.origin:
            raise other(ledger.objects)
        return done

    def _write(self, ledger: Ledger, run: int, before: Rowset, piece: Piece) -> None:
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
        sums = Sums()
        sums.add_entries(index)
        writer = UnitWriter(ledger.objects, run, index[order], taps, self.shard_bytes)
        try:
            for tap, info in taps.items():
                room = Room(info, count)
                before.fill(tap, piece, room.rows, room.scales)
                sums.add_rows(tap, room.rows, room.scales, entries)
                for _, rows, scales in room.taken(order):
                    writer.write(tap, room.values(rows), scales)
            told = {
                "origin": self.origin,
                "children": first,
                "counts": np.bincount(drawn, minlength=last - first).tolist(),
                "sums": sums.to_json(),
            }
            done = writer.finish(
                table={"doc": np.empty(0, np.int64)}, fingerprint=self.table.fingerprint,
                tokens=0, documents=0, contexts=0, skipped={}, text_digest="",
                made_by={SHUFFLED: told},
            )  # fmt: skip
            committed = ledger.commit(done)
        except BaseException:
            writer.discard()
            raise
        if not committed:
            writer.discard()


def lost(objects: Objects) -> CorruptError:
    return CorruptError(
        objects.url, "its rows are not those that were read; remove it and run the command again"
    )


def other(objects: Objects) -> ConfigError:
    return ConfigError(
        f"{objects.url} holds another dataset, or this one shuffled with another --seed or "
        "--memory; choose an empty place"
    )

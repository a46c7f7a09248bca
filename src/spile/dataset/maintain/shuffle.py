"""Shuffling: the same rows in random order, as a new dataset, with bounded memory and few passes.

Rows are scattered (`scatter.py`) into parts that fit into memory; each part is then permuted and
written. Units keep their numbers, their documents and the statistics of their documents' rows, so
that the totals stay the same; the rows in a unit are random.

The result does not open as a dataset until the sums of its rows (`RowSums`) equal the source's.
"""

import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import xxhash

from spile.core.config import canonical_json
from spile.core.errors import ConfigError, StoreError
from spile.dataset import format as fmt
from spile.dataset.codec.shard import read_tensors
from spile.dataset.format import Done
from spile.dataset.maintain.copy import (
    SHARD_BYTES,
    NewDataset,
    copy_check,
    refuse_if_too_large,
    refuse_nested,
)
from spile.dataset.maintain.finished import FinishedRecords, Sizes, read_finished
from spile.dataset.maintain.scatter import (
    SHUFFLED,
    DatasetPart,
    NodePiece,
    RowSums,
    ScatteredRows,
    ScatterPass,
    SourceRows,
    TapBuffer,
    entry_hashes,
    lost_rows_error,
    new_shuffle,
)
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.read.order import drawn, drawn_digest
from spile.dataset.records.table import Table
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.objects import Objects, check_creates_once, open_objects
from spile.objects.local import settle

MEMORY = 4 << 30

_BESIDE_ROW = 160  # bytes of memory for a row besides its widest tap: entry, place, hashes
_SEGMENT_BYTES = 128 << 10  # least size of a part in a run: shorter stretches are slow to read

_log = logging.getLogger("spile.dataset")


@dataclass(frozen=True)
class Shuffled:
    """The result of a shuffle."""

    dest: str
    rows: int  # in each tap
    units: int
    shards: int
    bytes: int
    passes: int  # over all rows: scattering passes, plus the last


def shuffle(
    source: Objects,
    dest: Objects,
    *,
    seed: int = 0,
    memory: int = MEMORY,
    scratch: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    compress: bool = False,
    taps: str | Sequence[str] | None = None,
) -> Shuffled:
    """Write a copy of a finished dataset with its rows in random order, or continue one.

    Args:
        taps: by default, all complete taps; as for `export`.
        memory: bytes for rows; the order depends on it.
        scratch: where to keep rows between passes; it needs as many bytes as the dataset has (for a
            while twice as many, if there are more than two passes) [in `dest`, until it is done].
    """
    if seed < 0:
        raise ConfigError(f"--seed must be 0 or more, got {seed}")
    refuse_nested(source, dest)
    table, records = read_finished(source, taps)
    work = _Shuffle(
        source,
        dest,
        table,
        records,
        seed,
        memory,
        scratch or f"{dest.url.rstrip('/')}/scratch",
        shard_bytes,
        compress,
    )
    return work.run()


@dataclass(frozen=True)
class _Shuffle:
    source: Objects
    dest: Objects
    table: Table
    records: FinishedRecords
    seed: int
    memory: int
    scratch: str
    shard_bytes: int
    compress: bool

    @property
    def capacity(self) -> int:
        """Rows held in memory at a time."""
        widest = max(info.row_bytes for info in self.table.taps.values())
        # A part may get more rows than its share: an eighth is reserved for that.
        return max(1, self.memory * 7 // 8 // (widest + _BESIDE_ROW))

    @property
    def fan_out(self) -> int:
        """The number of nodes a run may be sorted by."""
        widest = max(info.row_bytes for info in self.table.taps.values())
        return max(2, self.capacity * widest // _SEGMENT_BYTES)

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What determines the order: equal only for the same source and settings."""
        return {
            "records": self.records.whole().digest,
            "seed": self.seed,
            "capacity": self.capacity,
            "fan_out": self.fan_out,
            "drawn": drawn_digest(self.seed),
        }

    def run(self) -> Shuffled:
        new = self.new
        parts = SourceRows(self.source, self.table, self.records).parts(self.capacity)
        passes = self._passes(parts)
        made = _Made()
        there = new.units_there()
        for unit in sorted(there):
            made.add(new.ours(unit, self.origin))
        if len(there) < len(self.records):
            check_creates_once(self.dest)
            if not there and not self.compress:
                rows = int(self.records.catalog.starts[-1])
                inside = self.scratch.startswith(self.dest.url)
                refuse_if_too_large(self.dest, self.table, rows * (1 + inside))
        if not new.is_there():
            new.begin(self.source, self.records)
            copy_check(self.source, self.dest)
            try:
                level = self._scattered(passes)
                self._gathered(level, parts, there, made)
            except FileNotFoundError as error:
                raise StoreError(
                    f"{self.scratch}: its files vanished ({error}); another command has made a "
                    f"dataset at {self.dest.url}, or `gc` ran there: choose another place"
                ) from error
            if made.sums != level.sums:
                raise lost_rows_error(self.dest)
            entries = f"{made.sums.entries:016x}"
            new.finish(shuffled={"seed": self.seed, "entries": entries, "drawn": self._drawn()})
        else:
            layout, count = new.ledger.layout, len(self.records)
            groups = (layout.units_of(group, count) for group in range(layout.groups(count)))
            keys = (layout.done_key(units[0]) for units in groups)  # of each folder
            settle(self.dest, *keys, fmt.UNITS)  # before their sources are removed
        for each in passes:
            each.clear(self._store(each.number))
        return Shuffled(
            dest=self.dest.url,
            rows=made.sizes.rows,
            units=len(self.records),
            shards=made.sizes.shards,
            bytes=made.sizes.bytes,
            passes=len(passes) + 1,
        )

    @cached_property
    def new(self) -> NewDataset:
        table = replace(self.table, shuffled={"drawn": self._drawn()})
        return new_shuffle(self.dest, table)

    def _drawn(self) -> str:
        return xxhash.xxh3_64_hexdigest(canonical_json(self.origin))

    # -- scattering rows into parts ---------------------------------------------------------------

    def _passes(self, parts: Sequence[DatasetPart]) -> list[ScatterPass]:
        """Return the fewest passes that reach single parts, given the fan-out."""
        widths = [1]  # parts in a node, from the last pass to the first
        while widths[-1] * self.fan_out < len(parts):
            widths.append(widths[-1] * self.fan_out)
        above = len(parts)
        passes: list[ScatterPass] = []
        for number, width in enumerate(reversed(widths), 1):
            firsts = range(0, len(parts), width)
            bounds = [*(parts[first].first for first in firsts), parts[-1].last]
            nodes = len(range(0, len(parts), above))
            children = [min(node * (above // width), len(firsts)) for node in range(nodes)]
            passes.append(
                ScatterPass(
                    number,
                    self.seed,
                    self.origin,
                    self.table,
                    bounds,
                    [*children, len(firsts)],
                    self.table.shard_limit(self._store(number), self.shard_bytes),
                )
            )
            above = width
        return passes

    def _store(self, number: int) -> Objects:
        return open_objects(f"{self.scratch}/{number}")

    def _scattered(self, passes: Sequence[ScatterPass]) -> ScatteredRows:
        """Return the output of the last pass; earlier outputs are removed."""
        level: SourceRows | ScatteredRows = SourceRows(self.source, self.table, self.records)
        begin = 0
        for number in range(len(passes), 0, -1):
            found = passes[number - 1].found(self._store(number))
            if found is not None:
                level, begin = found, number
                break
        for each in passes[begin:]:
            _log.info("pass %d of %d: rows are scattered", each.number, len(passes) + 1)
            level = each.run(level, self._store(each.number), self.capacity)
            if each.number > 1:
                passes[each.number - 2].clear(self._store(each.number - 1))
        assert isinstance(level, ScatteredRows)
        return level

    # -- gathering parts into units ---------------------------------------------------------------

    def _gathered(
        self,
        level: ScatteredRows,
        parts: Sequence[DatasetPart],
        there: Collection[int],
        made: "_Made",
    ) -> None:
        numbered = enumerate(parts)
        for (first, stop), group in groupby(numbered, key=lambda item: item[1].units):
            missing = [unit for unit in range(first, stop) if unit not in there]
            if missing:
                nodes = [node for node, _ in group]
                for done in self._write(level, range(first, stop), missing, nodes):
                    made.add(done)
                _log.info("unit %d of %d", stop, len(self.records))

    def _write(
        self,
        level: ScatteredRows,
        units: range,
        missing: Sequence[int],
        nodes: Sequence[int],
    ) -> list[Done]:
        """Write the units made from some parts: several units of one part, or one of several."""
        pieces = [NodePiece(node, 0, level.count(node)) for node in nodes]
        orders = [drawn(piece.last, self.seed, 0, piece.node) for piece in pieces]
        index = np.concatenate(
            [level.index(piece)[order] for piece, order in zip(pieces, orders, strict=True)]
        )
        wanted = self.records.catalog.rows[units.start : units.stop].tolist()
        ends = _shares(len(index), wanted)
        writers = {
            unit: _Writer(self, units[place], index[ends[place] : ends[place + 1]])
            for place, unit in enumerate(units)
            if unit in missing
        }
        with contextlib.ExitStack() as held:
            for writer in writers.values():
                held.enter_context(writer.attempt)
            for tap, info in self.table.taps.items():
                at = 0
                for piece, order in zip(pieces, orders, strict=True):
                    buffer = TapBuffer(info, piece.last)
                    level.fill(tap, piece, buffer.rows, buffer.scales)
                    for _, rows, scales in buffer.taken(order):
                        for place, unit in enumerate(units):
                            low = max(ends[place] - at, 0)
                            high = min(ends[place + 1] - at, len(rows))
                            if low < high and unit in writers:
                                beside = None if scales is None else scales[low:high]
                                writers[unit].write(tap, buffer, rows[low:high], beside)
                        at += len(rows)
            return [writers[unit].commit() for unit in missing]


@dataclass
class _Made:
    """Sums over the units of the new dataset."""

    sizes: Sizes = field(default_factory=Sizes)
    sums: RowSums = field(default_factory=RowSums)

    def add(self, done: Done) -> None:
        self.sizes.add(done)
        self.sums.merge(RowSums.from_json(done.made_by[SHUFFLED]["sums"]))


class _Writer:
    """A unit of the new dataset being written."""

    def __init__(self, work: _Shuffle, unit: int, index: np.ndarray) -> None:
        self._work, self._source = work, work.records.catalog[unit]
        shard_bytes = work.table.shard_limit(work.dest, work.shard_bytes)
        self._writer = UnitWriter(
            work.dest,
            unit,
            index,
            work.table.taps,
            shard_bytes,
            layout=work.new.ledger.layout,
            compress=work.compress,
        )
        self.attempt = Attempt(work.new.ledger, self._writer)
        self._sums = RowSums()
        self._sums.add_entries(index)
        self._entries: list[int] = entry_hashes(index).tolist()
        self._written = dict.fromkeys(work.table.taps, 0)

    def write(
        self, tap: str, buffer: TapBuffer, rows: np.ndarray, scales: np.ndarray | None
    ) -> None:
        at = self._written[tap]
        self._sums.add_rows(tap, rows, scales, self._entries[at : at + len(rows)])
        self._written[tap] += len(rows)
        self._writer.write(tap, buffer.values(rows), scales)

    def commit(self) -> Done:
        work, done = self._work, self._source
        for tap, stats in work.records.statistics(done.unit).items():
            self._writer.stats[tap].merge(stats)
        return work.new.commit(
            self.attempt,
            done,
            documents=self._documents(),
            made_from={"origin": work.origin, "sums": self._sums.to_json()},
            makers=work.records.whole().makers,
        )

    def _documents(self) -> dict[str, np.ndarray]:
        """Return the source's documents table, without each document's first row."""
        source, file = self._work.source, self._source.documents_table
        CheckedFile(source, file).check()
        tensors = read_tensors(source, file.key)
        return {**tensors, "first_row": np.full(file.count, -1, np.int64)}


def _shares(rows: int, wanted: Sequence[int]) -> list[int]:
    """Divide rows among units in proportion to `wanted`; return where each unit begins and ends."""
    before = np.cumsum([0, *wanted]).tolist()
    return [rows * at // max(1, before[-1]) for at in before]

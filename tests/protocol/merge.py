"""The protocol of `merge` (and of `copy` with --taps or --units), as a model for the checker.

Unlike attempts, files have keys that follow from their source: two merges write the same bytes
under the same keys, and nobody removes them. A file is written in `scratch/` and moved to its key
when it is whole (in a bucket a put does both at once); so is never seen torn. The unit table comes
last; before it, nothing opens the dataset and `gc` is refused.

Several files of a unit are one, as in model.py; the source never changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from protocol.checker import in_order, replaced

LOOK = "look"  # Ledger.read_table, Ledger.done_units
TAKE = "take"  # _units: one unit after the other
WRITE = "write"  # FileCopier.copy
MOVE = "move"  # FileCopier._placing
COMMIT = "commit"  # Ledger.commit: files are looked for, and the record is created
OURS = "ours"  # NewDataset.ours: the record is there
MANIFEST = "manifest"  # Ledger.complete
TABLE = "table"  # Ledger.create_table
CLEAN = "clean"  # FileCopier.clean
EXITED = "exit 0"

NO, TORN, WHOLE, GONE = "no", "torn", "whole", "gone"

# What the actions stand for.
FUNCTIONS = (
    "spile.dataset.records.ledger:Ledger.done_units",
    "spile.dataset.maintain.assemble:_assemble",
    "spile.dataset.maintain.assemble:_units",
    "spile.dataset.maintain.assemble:_commit",
    "spile.dataset.maintain.copy:NewDataset.ours",
    "spile.dataset.maintain.copy:FileCopier.copy",
    "spile.dataset.maintain.copy:FileCopier._placing",
    "spile.dataset.maintain.copy:FileCopier.clean",
)


class Worker(NamedTuple):
    """A process that merges; it goes from unit to unit."""

    at: str = LOOK
    unit: int = 0
    there: int = 0  # units that were done when it began, as bits
    scratch: str = NO  # the file that it writes


class Unit(NamedTuple):
    files: str = NO  # under their keys
    done: bool = False
    late: bool = False  # a put of the record that nobody waits for is on its way


class State(NamedTuple):
    units: tuple[Unit, ...]
    workers: tuple[Worker, ...]
    manifest: bool = False
    table: bool = False


@dataclass(frozen=True)
class MergeBugs:
    """Rules that are left out, to see that the checker finds it."""

    writes_in_place: bool = False  # files are written under their keys
    table_first: bool = False  # the table is created before the units


@dataclass(frozen=True)
class MergeProtocol:
    """`workers` merges of the same `units` units into one place, with gc beside them."""

    workers: int = 2
    units: int = 1
    bugs: MergeBugs = MergeBugs()

    def first(self) -> State:
        return State((Unit(),) * self.units, (Worker(),) * self.workers)

    def fault(self, state: State) -> str | None:
        if any(unit.done and unit.files != WHOLE for unit in state.units):
            return "a record implies its files"
        if state.manifest and not all(unit.done for unit in state.units):
            return "a manifest implies every record"
        if state.table and not state.manifest:
            return "the table implies the manifest"
        if not state.table and any(worker.at == EXITED for worker in state.workers):
            return "exit 0 implies the table"
        return None

    def complete(self, state: State) -> bool:
        return state.table

    def canonical(self, state: State) -> tuple[State, tuple[int, ...]]:
        workers, order = in_order(state.workers)
        return state._replace(workers=workers), order

    def steps(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        for who, worker in enumerate(state.workers):
            if worker.at == EXITED:
                continue
            for action, after in self._step(state, who, worker):
                yield action, who, after
            if worker.at != LOOK:
                yield "is killed, and started again", who, _with(state, who, Worker())
        for number, unit in enumerate(state.units):
            if unit.late:
                arrived = _unit(state, number, unit._replace(done=True, late=False))
                yield f"a late put of unit {number}'s record takes effect", None, arrived
        if state.table:  # without one, gc is refused
            kept = [unit if unit.done else unit._replace(files=NO) for unit in state.units]
            yield "gc", None, _without_scratch(state)._replace(units=tuple(kept))

    def _step(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        unit = state.units[worker.unit] if worker.unit < self.units else Unit()

        def to(at: str, **changes: object) -> Worker:
            return worker._replace(at=at, **changes)

        def failed(said: str) -> tuple[str, State]:
            return f"{said}: exit 3", _with(state, who, Worker())

        match worker.at:
            case "look":
                there = sum(1 << n for n, each in enumerate(state.units) if each.done)
                begun = state._replace(table=state.table or self.bugs.table_first)
                yield f"finds {there.bit_count()} units", _with(begun, who, to(TAKE, there=there))
            case "take":
                if worker.unit == self.units:
                    yield "has come to the end", _with(state, who, to(MANIFEST))
                else:
                    at = OURS if worker.there >> worker.unit & 1 else WRITE
                    yield f"takes unit {worker.unit}", _with(state, who, to(at))
            case "write" if self.bugs.writes_in_place:
                torn = _unit(state, worker.unit, unit._replace(files=TORN))
                yield "writes a file under its key", _with(torn, who, to(MOVE, scratch=WHOLE))
            case "write":
                yield "writes a file in scratch/", _with(state, who, to(MOVE, scratch=WHOLE))
            case "move":
                if worker.scratch == GONE:
                    yield failed("its file has vanished")
                else:
                    whole = _unit(state, worker.unit, unit._replace(files=WHOLE))
                    yield "the file has its key", _with(whole, who, to(COMMIT, scratch=NO))
            case "commit":
                if unit.files != WHOLE:
                    yield failed("files are gone")
                elif unit.done:
                    yield "a record is there", _with(state, who, to(OURS))
                else:
                    made = _unit(state, worker.unit, unit._replace(done=True))
                    after = to(TAKE, unit=worker.unit + 1)
                    yield f"creates the record of unit {worker.unit}", _with(made, who, after)
                    yield "creates it, the answer is lost", _with(made, who, to(OURS))
                    late = _unit(state, worker.unit, unit._replace(late=True))
                    yield "puts it, and is killed on the way", _with(late, who, Worker())
            case "ours":
                if unit.files != WHOLE:
                    yield failed("files of a record are missing")
                else:
                    after = to(TAKE, unit=worker.unit + 1)
                    yield f"finds unit {worker.unit} done", _with(state, who, after)
            case "manifest":
                made = _with(state, who, to(TABLE))._replace(manifest=True)
                yield "creates the manifest", made
            case "table":
                yield "creates the table", _with(state, who, to(CLEAN))._replace(table=True)
            case "clean":
                yield "empties scratch/", _with(_without_scratch(state), who, to(EXITED))
            case _:
                raise AssertionError(worker.at)


def _with(state: State, who: int, worker: Worker) -> State:
    return state._replace(workers=replaced(state.workers, who, worker))


def _unit(state: State, number: int, unit: Unit) -> State:
    return state._replace(units=replaced(state.units, number, unit))


def _without_scratch(state: State) -> State:
    gone = [w._replace(scratch=GONE) if w.scratch == WHOLE else w for w in state.workers]
    return state._replace(workers=tuple(gone))

"""How units come to exist, as a model small enough to be looked at whole.

It holds what the store holds of each unit (its record, and the files of attempts a record may
name) and where each worker and one `gc` stand. Every action is one request to the store, or one
thing that may happen in between: a kill, an interrupt, an answer that is lost, a request that takes
effect long after whoever sent it has gone. Each names the function it stands for (`FUNCTIONS`: the
tests see to it that they exist).

What it leaves out, and why that is safe:
  * Claims and heartbeats: any unit that is not done may be taken at any time, by anybody.
  * Files of an attempt that nobody writes, that no record names and no request on its way would
    name: they can only be removed.
  * Other documents that two processes may want to add: the second then ends with an error.
  * That a worker writes one unit while it commits another: to the store that is two workers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from protocol.checker import Broken, in_order, replaced

# Files of an attempt.
NO, SOME, WHOLE, TORN = "no", "some", "whole", "torn"  # torn: files were removed

# Where a worker stands.
LOOK = "look"  # Extraction.extract, compact: what is done already? (Or it is not running at all.)
TAKE = "take"  # StorePicker.take
WRITE = "write"  # UnitWriter: shards, and at last `finish`
CHECK = "check"  # Ledger.commit: are the files still there?
SEND = "send"  # BucketObjects._create: the put of the done record
WAIT = "wait"  # its answer is on the way
EXISTS = "exists"  # the answer was "already exists": is it there?
BACK = "back"  # Ledger.commit: whose is the record?
LOST = "lost"  # Attempt.commit: another's; one's own files are removed
ALL_DONE = "all done?"  # Ledger.complete
MANIFEST = "manifest"  # it creates the manifest
TABLE = "table"  # compact: the unit table comes last
OUTCOME = "outcome"  # outcome_of
GROW = "grow"  # Ledger.create_generation: first the units' columns
GENERATION = "generation"  # and then the record
EXITED = "exit 0"

# Answers.
CREATED, PRECONDITION, CONFLICT, ERROR = "created", "412", "409", "error"

FUNCTIONS = (
    "spile.run.extract:Extraction.extract",
    "spile.run.extract:outcome_of",
    "spile.run.pipeline.pickers:StorePicker.take",
    "spile.plan.estimate:Budget.allows",
    "spile.plan.estimate:Budget.leaves_out",
    "spile.dataset.write.unit_writer:UnitWriter.write",
    "spile.dataset.write.unit_writer:UnitWriter.finish",
    "spile.dataset.write.unit_writer:UnitWriter.discard",
    "spile.dataset.records.ledger:Ledger._commit",
    "spile.dataset.records.ledger:Ledger.missing_files",
    "spile.dataset.records.ledger:Ledger.read_done",
    "spile.dataset.records.ledger:Ledger.complete",
    "spile.dataset.records.table:create_table",
    "spile.dataset.records.table:read_table",
    "spile.dataset.records.generations:create_generation",
    "spile.dataset.records.ledger:Ledger._complete_earlier",
    "spile.dataset.write.unit_writer:Attempt.commit",
    "spile.dataset.write.unit_writer:Attempt.release",
    "spile.dataset.write.unit_writer:Attempt.discard",
    "spile.objects.bucket:BucketObjects._create",
    "spile.core.retry:Retrying.again",
    "spile.dataset.maintain.gc:collect_garbage",
    "spile.dataset.maintain.compact:compact",
    "spile.dataset.maintain.copy:NewDataset.units_there",
    "spile.dataset.maintain.copy:NewDataset.ours",
    "spile.dataset.maintain.copy:refuse_missing",
)


class Worker(NamedTuple):
    """A process, and the attempt it has in hand."""

    at: str = LOOK
    unit: int = -1
    mine: int = 0  # units it will not take (again), as bits
    unsure: bool = False  # whether an earlier put of the record may have taken effect
    answer: str = ""
    files: str = NO
    late: bool = False  # a put of the record that nobody waits for is on its way
    named: bool = False  # the record of the unit names this attempt
    seen: int = 0  # by gc: 1 in its listing, 2 to be removed
    grown: bool = False  # whether it has read, or created, the generation


class Unit(NamedTuple):
    """What is known of a unit, but for attempts that a worker has in hand."""

    done: bool = False
    # Files of the attempt that the record names, and whether gc has seen them, once no worker
    # has that attempt in hand.
    files: str = ""
    seen: int = 0
    # Of attempts whose worker has gone and whose record is still on its way: what gc has seen.
    late: tuple[int, ...] = ()


class State(NamedTuple):
    units: tuple[Unit, ...]
    workers: tuple[Worker, ...]
    gc: int = -1  # units of which it has read the record; -1 while it does not run
    manifest: bool = False  # of all units
    table: bool = True
    # Of a dataset that grows: the file of the new units, the record that adds them, and the
    # manifest of those before.
    columns: bool = False
    generation: bool = False
    base_manifest: bool = False


@dataclass(frozen=True)
class Bugs:
    """Faults that are planted, to see that the checker finds them."""

    # An attempt that is interrupted while it commits removes its files.
    discards_while_committing: bool = False
    # "409 Conflict" means that the record exists; where nothing can be read back it is another
    # worker's, and what is missing in the end is taken for a byte budget that was spent.
    conflict_is_done: bool = False
    # "Exists already" is taken for another worker's record, also after an answer was lost.
    never_reads_back: bool = False
    # The record is created while files are still on their way.
    record_first: bool = False
    # A byte budget is spent by what others have in hand, though they may fail.
    budget_is_spent_in_hand: bool = False
    # gc removes attempts of units that are not done.
    gc_takes_unfinished: bool = False
    # gc removes the columns of a generation that is about to be created.
    gc_takes_columns: bool = False
    # A manifest of all units is created by who has seen only those of the table done.
    manifest_of_old_units: bool = False


@dataclass(frozen=True)
class Protocol:
    """`workers` extractions (or compactions) of `units` units into one store, and gc beside them.

    `budget` is `--max-bytes`, in units. `base`: so many of the units are in the table, and any
    worker may add the others as a generation (`--more`), at any time and as often as it likes.
    """

    workers: int = 2
    units: int = 1
    command: str = "extract"
    gc: bool = True
    budget: int | None = None
    base: int | None = None
    bugs: Bugs = Bugs()

    def first(self) -> State:
        return State(
            (Unit(),) * self.units,
            (Worker(),) * self.workers,
            table=self.command == "extract",
        )

    # -- what must be so ---------------------------------------------------------------------

    def fault(self, state: State) -> str | None:
        held = {w.unit: w.files for w in state.workers if w.named}
        for number, unit in enumerate(state.units):
            if unit.done and (unit.files or held[number]) != WHOLE:
                return "a record implies its files"
        done = _done(state)
        spent = self.budget is not None and done.bit_count() >= self.budget
        for worker in state.workers:
            if worker.at == EXITED and self._known(worker) & ~done and not spent:
                return "exit 0 implies complete or budget spent"
        if (state.manifest and done < self._all) or (state.base_manifest and ~done & self._table):
            return "a manifest implies every record"
        if state.generation and not state.columns:
            return "a generation implies its columns"
        if not state.generation and (state.manifest or done & ~self._table) and self.base:
            return "units are added by a generation"
        return None

    def complete(self, state: State) -> bool:
        if any(w.at == EXITED and self._known(w) == self._all for w in state.workers):
            return True
        return state.manifest and all(unit.done for unit in state.units)

    def canonical(self, state: State) -> tuple[State, tuple[int, ...]]:
        """Workers are alike: their order is of no matter."""
        workers, order = in_order(state.workers)
        return state._replace(workers=workers), order

    # -- what may happen ---------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        for who, worker in enumerate(state.workers):
            if worker.at == EXITED and self._known(worker) != self._all:
                yield "is started again, with --more", who, _with(state, who, Worker(GROW))
            if worker.at != EXITED:
                for action, after in self._step(state, who, worker):
                    yield action, who, after
                for action, after in self._ends(state, who, worker):
                    yield action, who, after
            if worker.late:  # (or it never does: then nothing changes)
                yield (
                    "a put of its record that was given up takes effect",
                    who,
                    self._arrives(state, who, worker),
                )
        for number, unit in enumerate(state.units):
            for seen in unit.late:
                yield (
                    f"a put of unit {number}'s record takes effect, long after its worker has gone",
                    None,
                    _unit(state, number, Unit(True, WHOLE, seen)),
                )
        if self.gc:
            yield from self._gc(state)

    def _step(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        unit = state.units[worker.unit]
        match worker.at:
            case "look":
                if self.base:
                    yield "begins to add documents", _with(state, who, Worker(GROW))
                    # Ledger.read_table: with the generation, if there is one.
                    worker = Worker(grown=state.generation)
                yield from self._look(state, who, worker)
            case "grow":
                # resolve: who finds the generation there has nothing to add.
                if state.generation:
                    after = Worker(TAKE, grown=True)
                    yield "finds the generation there", _with(state, who, after)
                made = _with(state, who, Worker(GENERATION))._replace(columns=True)
                yield "the columns of more units are durable", made
            case "generation":
                # (The same content has the same name; the record is created, or is there.)
                if state.generation:
                    after = Worker(TAKE, grown=True)
                    yield "the generation exists: the same", _with(state, who, after)
                else:
                    made = _with(state, who, Worker(TAKE, grown=True))._replace(generation=True)
                    yield "creates the generation", made
                    lost = state._replace(generation=True)
                    yield "creates the generation, the answer is lost", lost
            case "take":
                yield from self._take(state, who, worker)
            case "write":
                # UnitWriter.write: shards become durable one by one, under keys nobody else uses.
                if worker.files == NO:
                    after = worker._replace(files=SOME)
                    yield f"unit {worker.unit}: a file is durable", _with(state, who, after)
                else:
                    # UnitWriter.finish: every file is durable, unless gc took one meanwhile.
                    files = WHOLE if worker.files == SOME else TORN
                    after = worker._replace(at=CHECK, files=files)
                    yield f"unit {worker.unit}: every file is durable", _with(state, who, after)
                if self.bugs.record_first and worker.files == SOME:
                    after = worker._replace(at=SEND)
                    yield (
                        f"unit {worker.unit}: commits ahead of its files",
                        _with(state, who, after),
                    )
            case "check":
                # Ledger.commit, after Attempt.release: Ledger.missing_files lists the attempt.
                if worker.files == WHOLE:
                    said = f"unit {worker.unit}: its files are all there"
                    yield said, _with(state, who, worker._replace(at=SEND))
                elif unit.done:
                    said = f"unit {worker.unit}: files are gone, and a record is there"
                    yield said, _with(state, who, worker._replace(at=LOST))
                else:
                    said = f"unit {worker.unit}: files are gone, and there is no record: exit 3"
                    yield said, self._down(state, who, worker)
            case "send":
                yield from self._send(state, who, worker)
            case "wait":
                yield from self._answered(state, who, worker)
            case "exists":
                # BucketObjects._create: what "exists already" is asked for.
                if not unit.done and self.bugs.conflict_is_done:
                    said = "cannot read it, and takes it for another worker's"
                    yield said, _with(state, who, worker._replace(at=LOST))
                elif not unit.done:
                    said = "but it does not exist: the put is tried again"
                    yield said, _with(state, who, worker._replace(at=SEND))
                elif worker.unsure and worker.named:
                    yield "it is read back: our own", self._committed(state, who, worker)
                else:
                    said = "it is there: create answers False"
                    yield said, _with(state, who, worker._replace(at=BACK))
            case "back":
                # Ledger.commit: Ledger.read_done, and whose attempt it names.
                if worker.named and not self.bugs.never_reads_back:
                    yield (
                        "the record names this attempt: committed",
                        self._committed(state, who, worker),
                    )
                else:
                    said = "the record names another attempt"
                    yield said, _with(state, who, worker._replace(at=LOST))
            case "lost":
                # Attempt.commit, UnitWriter.discard: key by key, and an error there is no error.
                if worker.files in (SOME, WHOLE):
                    yield "removes one of its files", _with(state, who, worker._replace(files=TORN))
                yield (
                    "has removed its files; another worker did the unit",
                    self._next(state, who, worker),
                )
            case "all done?":
                # Ledger.complete: from a listing.
                all_done = not self._known(worker) & ~_done(state)
                after = worker._replace(at=MANIFEST if all_done else OUTCOME)
                yield (
                    f"lists the records: {'all' if all_done else 'not all'} are there",
                    _with(state, who, after),
                )
            case "manifest":
                # Ledger.complete: create-only, and everybody would create the same.
                if self.base and not state.base_manifest:
                    # Ledger._complete_earlier; who knows no generation creates no other.
                    at = MANIFEST if worker.grown else OUTCOME
                    made = _with(state, who, worker._replace(at=at))._replace(base_manifest=True)
                    yield "creates the manifest of the table", made
                    return
                if self.base and not worker.grown and not self.bugs.manifest_of_old_units:
                    yield "finds the manifest", _with(state, who, worker._replace(at=OUTCOME))
                    return
                at = TABLE if self.command == "compact" else OUTCOME
                made = _with(state, who, worker._replace(at=at))._replace(manifest=True)
                yield "creates the manifest", made
            case "table":
                # Ledger.create_table, at the end of compact.
                made = _with(state, who, worker._replace(at=OUTCOME))._replace(table=True)
                yield "creates the unit table", made
            case "outcome":
                yield from self._outcome(state, who, worker)
            case _:
                raise AssertionError(worker.at)

    def _look(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        done = _done(state)
        if self.command == "compact":
            # NewDataset.units_there: units that are done are not done again; refuse_missing.
            whole = all(unit.files in ("", WHOLE) for unit in state.units)
            if not whole:
                yield "finds files of a record missing: exit 3", _with(state, who, Worker())
            else:
                after = Worker(TAKE, mine=done)
                yield f"finds {done.bit_count()} units done", _with(state, who, after)
        elif not self._known(worker) & ~done:
            yield "finds every unit done", _with(state, who, worker._replace(at=MANIFEST))
        else:
            after = Worker(TAKE, grown=worker.grown)
            yield f"finds {done.bit_count()} units done", _with(state, who, after)

    def _take(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        """StorePicker.take; or compact, which does unit by unit."""
        done = _done(state)
        known = worker.mine if self.command == "compact" else done | worker.mine
        left = [n for n in range(self._known(worker).bit_length()) if not known >> n & 1]
        if not left:
            at = MANIFEST if self.command == "compact" and done == self._all else ALL_DONE
            after = Worker(at, mine=worker.mine, grown=worker.grown)
            yield "has nothing left to do", _with(state, who, after)
        for number in left[:1] if self.command == "compact" else left:
            if self.budget is not None:
                # Budget.allows: spent is what units that are done leave no room in. Where units in
                # hand do (one's own, or those of others whose heartbeats are seen), it is waited.
                spent = done | 1 << number
                if self.bugs.budget_is_spent_in_hand:
                    spent |= sum({1 << w.unit for w in state.workers if w.unit >= 0})
                if spent.bit_count() > self.budget:
                    after = Worker(ALL_DONE, mine=worker.mine)
                    yield "finds the byte budget spent", _with(state, who, after)
                if (known | 1 << number).bit_count() > self.budget:
                    continue
            mine = worker.mine if self.command == "compact" else worker.mine | 1 << number
            after = Worker(WRITE, number, mine, grown=worker.grown)
            yield f"takes unit {number}", _with(state, who, after)

    def _send(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        """BucketObjects._create: a put that creates, or answers that the key exists."""
        unit = state.units[worker.unit]
        said = f"unit {worker.unit}: puts the record"

        def waits(answer: str, **changes: Any) -> Worker:
            return worker._replace(at=WAIT, answer=answer, **changes)

        if unit.done:
            yield f"{said}: 412", _with(state, who, waits(PRECONDITION))
            yield f"{said}: it exists, the answer is lost", _with(state, who, waits(ERROR))
        else:
            made = _unit(state, worker.unit, Unit(True))
            yield f"{said}: created", _with(made, who, waits(CREATED, named=True))
            yield f"{said}: created, the answer is lost", _with(made, who, waits(ERROR, named=True))
        yield f"{said}: 409, another request is under way", _with(state, who, waits(CONFLICT))
        yield f"{said}: refused (429, 500, 503)", _with(state, who, waits(ERROR))
        if not worker.late and not unit.done:
            yield (
                f"{said}: no answer, it is still on its way",
                _with(state, who, waits(ERROR, late=True)),
            )

    def _answered(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        if worker.answer == CREATED:
            yield "hears that it is created: committed", self._committed(state, who, worker)
        elif worker.answer in (CONFLICT, PRECONDITION):
            yield (
                f'hears {worker.answer}, "already exists"',
                _with(state, who, worker._replace(at=EXISTS, answer="")),
            )
        else:
            # Retrying.again; that patience ends is among what `_ends` says.
            unsure = not self.bugs.never_reads_back
            yield (
                "hears of an error: the put is tried again",
                _with(state, who, worker._replace(at=SEND, answer="", unsure=unsure)),
            )

    def _outcome(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        done = _done(state)
        missing = (self._known(worker) & ~done).bit_count()
        exited = Worker(EXITED, grown=worker.grown)
        if self.command == "compact":
            # compact ends so: each unit was committed or found.
            yield "exits 0", _with(state, who, Worker(EXITED))
        elif state.manifest or not missing:
            yield "exits 0", _with(state, who, exited)
        elif self.bugs.conflict_is_done:
            yield "exits 0, as if a budget had been spent", _with(state, who, Worker(EXITED))
        elif self.bugs.budget_is_spent_in_hand and done:
            yield "exits 0, as if the byte budget were spent", _with(state, who, Worker(EXITED))
        elif self.budget is None or done.bit_count() < self.budget:
            # outcome_of: Budget.leaves_out none of what is missing.
            yield f"{missing} units are missing: exit 3", _with(state, who, Worker())
        else:
            yield "exits 0: the byte budget is spent", _with(state, who, Worker(EXITED))

    # -- ends ----------------------------------------------------------------------------------

    def _ends(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        """A kill; or an interrupt or an error, which leave through `Attempt`."""
        if worker.at == LOOK:
            return
        # Before the commit begins, Attempt.discard removes the files after an interrupt or an
        # error, and after a kill they lie there: no record can name them, so that is the same here.
        # From Attempt.release on they stay in any case, since the record may be on its way.
        yield "is killed, is interrupted or fails; is started again", self._down(state, who, worker)
        if self.bugs.discards_while_committing and worker.at in (CHECK, SEND, WAIT, EXISTS, BACK):
            gone = worker._replace(files=TORN)
            yield "is interrupted, and removes its files", self._down(state, who, gone)

    def _down(self, state: State, who: int, worker: Worker) -> State:
        return _with(self._left(state, worker), who, Worker())

    def _left(self, state: State, worker: Worker) -> State:
        """The attempt is in nobody's hands. Kept is what can still matter."""
        if worker.unit < 0:
            return state
        unit = state.units[worker.unit]
        if worker.named:
            return _unit(state, worker.unit, Unit(True, worker.files, worker.seen))
        if worker.late and not unit.done and worker.files != NO:
            # (One of a kind is as good as many: with the first that arrives the others are void.)
            return _unit(state, worker.unit, unit._replace(late=_kinds({*unit.late, worker.seen})))
        return state

    def _committed(self, state: State, who: int, worker: Worker) -> State:
        assert worker.named
        return self._next(state, who, worker)

    def _next(self, state: State, who: int, worker: Worker) -> State:
        """Picker.done; of compact: `_write` returned what it made, or `NewDataset.ours` found."""
        mine = worker.mine
        if self.command == "compact":
            # NewDataset.ours: where another was first, its record must be there.
            if not state.units[worker.unit].done:
                return self._down(state, who, worker)
            mine |= 1 << worker.unit
        after = Worker(TAKE, mine=mine, grown=worker.grown)
        return _with(self._left(state, worker), who, after)

    def _arrives(self, state: State, who: int, worker: Worker) -> State:
        after = worker._replace(late=False)
        if state.units[worker.unit].done:
            return _with(state, who, after)
        made = _unit(state, worker.unit, Unit(True))
        return _with(made, who, after._replace(named=True))

    # -- gc ------------------------------------------------------------------------------------

    def _gc(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        """collect_garbage: a listing, then each unit's record, then what is to be removed."""
        if state.gc < 0:
            if state.table:  # without one it is refused
                yield "gc: lists every key", None, _listed(state)
            if self.bugs.gc_takes_columns and state.columns and not state.generation:
                said = "gc: removes columns that no generation names"
                yield said, None, state._replace(columns=False)
            return
        yield "gc: is killed", None, _forgotten(state)
        if state.gc < self.units:
            number = state.gc
            unit = state.units[number]
            doomed = unit.done or self.bugs.gc_takes_unfinished

            def judged(seen: int, named: bool) -> int:
                return 2 if seen and doomed and not named else 0

            workers = tuple(
                w._replace(seen=judged(w.seen, w.named)) if w.unit == number else w
                for w in state.workers
            )
            late = _kinds({judged(seen, named=False) for seen in unit.late})
            after = _unit(state, number, unit._replace(seen=0, late=late))
            said = f"gc: reads unit {number}'s record: {'one is' if unit.done else 'none'} there"
            yield said, None, after._replace(workers=workers, gc=number + 1)
            return
        left = False
        for who, worker in enumerate(state.workers):
            if worker.seen == 2:
                left = True
                self._may_remove(state, worker.unit, worker.named)
                said = f"gc: removes a file of an attempt at unit {worker.unit}"
                yield said, None, _with(state, who, worker._replace(files=TORN, seen=0))
        for number, unit in enumerate(state.units):
            if 2 in unit.late or unit.seen == 2:
                left = True
                self._may_remove(state, number, named=unit.seen == 2)
        if not left:
            yield "gc: ends", None, _forgotten(state)

    def _may_remove(self, state: State, number: int, named: bool) -> None:
        if named or not state.units[number].done:
            said = f"gc: removes a file of an attempt at unit {number}"
            raise Broken(said, None, "gc removes nothing reachable")

    @property
    def _all(self) -> int:
        return (1 << self.units) - 1

    @property
    def _table(self) -> int:
        """The units of the table, without those of the generation."""
        return self._all if self.base is None else (1 << self.base) - 1

    def _known(self, worker: Worker) -> int:
        """The units that a worker knows of."""
        return self._all if worker.grown else self._table


def _with(state: State, who: int, worker: Worker) -> State:
    return state._replace(workers=replaced(state.workers, who, worker))


def _unit(state: State, number: int, unit: Unit) -> State:
    return state._replace(units=replaced(state.units, number, unit))


def _kinds(seen: set[int]) -> tuple[int, ...]:
    return tuple(sorted(seen))


def _done(state: State) -> int:
    return sum(1 << number for number, unit in enumerate(state.units) if unit.done)


def _listed(state: State) -> State:
    workers = tuple(w._replace(seen=1) if w.files != NO else w for w in state.workers)
    units = tuple(
        u._replace(seen=int(bool(u.files)), late=(1,) if u.late else ()) for u in state.units
    )
    return state._replace(units=units, workers=workers, gc=0)


def _forgotten(state: State) -> State:
    workers = tuple(w._replace(seen=0) if w.seen else w for w in state.workers)
    units = tuple(
        u._replace(seen=0, late=(0,) if u.late else ()) if u.seen or u.late else u
        for u in state.units
    )
    return state._replace(units=units, workers=workers, gc=-1)

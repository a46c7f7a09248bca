"""How taps are added and dropped, as a model small enough to be looked at whole.

Units of a pass come to exist as those of a dataset do, by the same functions (`model.py`). So a
pass has one unit here, and its files are one. What is looked at is the rest: the record of a pass,
other passes that want one of its taps, `drop`, and `gc` of what was dropped.

Every action is one request to the store, or a kill. A name is that of the wanted taps and a number;
`A` and `B` both have the tap `x`, so of a pass of A and one of B at most one may be read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from protocol.checker import in_order, replaced

NUMBERS = 2  # passes of the same taps: each time they were dropped, one more

# What there is of the unit of a pass.
NOTHING, FILES, DONE, WHOLE = range(4)  # whole: a manifest, too

# Where a worker stands.
NAME = "name"  # opened_for, _pass_of: the first number that is not dropped (or it does not run)
PRESENT = "present"  # _refuse_present: does another pass have a tap of ours?
CREATE = "create"  # Pass.create_table: the record
OTHERS = "others"  # once it is there, does another pass have a tap of ours?
GIVE_WAY = "give way"  # Pass.drop, of what it has created itself
WRITE = "write"  # UnitWriter
DROPPED = "dropped?"  # Pass.refuse
COMMIT = "commit"  # Ledger.commit
MANIFEST = "manifest"  # Ledger.complete
EXITED = "exit 0"
REFUSED = "exit 2"

FUNCTIONS = (
    "spile.plan.passes:opened_for",
    "spile.plan.passes:_pass_of",
    "spile.plan.passes:_refuse_present",
    "spile.dataset.records.passes:Pass.create_table",
    "spile.dataset.records.passes:Pass.refuse",
    "spile.dataset.records.passes:Pass.drop",
    "spile.dataset.records.passes:Pass.finished",
    "spile.dataset.records.passes:live_passes",
    "spile.dataset.records.passes:drop_taps",
    "spile.dataset.records.ledger:Ledger.complete",
    "spile.dataset.maintain.gc:collect_garbage",
)


class Worker(NamedTuple):
    """A process that adds taps."""

    wants: str
    at: str = NAME
    number: int = 0
    created: bool = False  # whether it has created the record of the pass


class Pass(NamedTuple):
    """What the store holds of a pass."""

    record: bool = False
    unit: int = NOTHING
    torn: bool = False  # gc has removed some of that
    dropped: bool = False

    @property
    def live(self) -> bool:
        """live_passes"""
        return self.record and not self.dropped

    @property
    def read(self) -> bool:
        """Pass.finished"""
        return self.live and self.unit == WHOLE


class State(NamedTuple):
    passes: tuple[tuple[Pass, ...], ...]  # by taps, by number
    workers: tuple[Worker, ...]
    gc: tuple[int, int] | None = None  # the dropped pass that it is removing


@dataclass(frozen=True)
class Bugs:
    """Faults that are planted, to see that the checker finds them."""

    # Only who has created the record of a pass looks for others: it may be killed before it does.
    joins_without_looking: bool = False
    # It looks for others before it creates the record, and not afterwards.
    never_looks_again: bool = False
    # gc removes the record that a pass is dropped with the rest, and may be killed after it.
    gc_takes_dropped: bool = False


@dataclass(frozen=True)
class AddingTaps:
    """One process for each letter of `wants`; a user who drops taps; gc beside them."""

    wants: str = "AB"
    gc: bool = True
    bugs: Bugs = Bugs()

    def first(self) -> State:
        return State(((Pass(),) * NUMBERS,) * 2, tuple(map(Worker, self.wants)))

    # -- what must be so ---------------------------------------------------------------------

    def fault(self, state: State) -> str | None:
        for each in (each for taps in state.passes for each in taps):
            if each.torn and not each.dropped:
                return "gc takes nothing of what is not dropped"
        if all(any(each.read for each in taps) for taps in state.passes):
            return "a tap is read from one pass"
        for worker in state.workers:
            found = _pass(state, worker)
            if worker.at == EXITED and found.unit < WHOLE and not found.torn:
                return "exit 0 implies complete"
        return None

    def complete(self, state: State) -> bool:
        """A process has come to its end; or it was tried as often as numbers go."""
        ended = any(worker.at == EXITED for worker in state.workers)
        return ended or any(all(each.dropped for each in taps) for taps in state.passes)

    def canonical(self, state: State) -> tuple[State, tuple[int, ...]]:
        """Workers that want the same are alike."""
        workers, order = in_order(state.workers)
        return state._replace(workers=workers), order

    # -- what may happen ---------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        for who, worker in enumerate(state.workers):
            for action, after in self._step(state, who, worker):
                yield action, who, after
            if worker.at not in (NAME, EXITED, REFUSED):
                again = _with(state, who, Worker(worker.wants))
                yield "is killed, and started again", who, again
        yield from self._drop(state)
        if self.gc:
            yield from self._gc(state)

    def _step(self, state: State, who: int, worker: Worker) -> Iterator[tuple[str, State]]:
        found = _pass(state, worker)
        match worker.at:
            case "name":
                own = state.passes[_taps(worker.wants)]
                free = [number for number, each in enumerate(own) if not each.dropped]
                if free:
                    after = worker._replace(at=PRESENT, number=free[0])
                    yield f"adds {worker.wants} as number {free[0]}", _with(state, who, after)
            case "present":
                yield from self._looks(state, who, worker, CREATE)
            case "create":
                at = OTHERS
                if self.bugs.never_looks_again or (
                    found.record and self.bugs.joins_without_looking
                ):
                    at = WRITE
                after = worker._replace(at=at, created=not found.record)
                made = _put(state, worker, found._replace(record=True))
                said = "finds the record there" if found.record else "creates the record"
                yield said, _with(made, who, after)
            case "others":
                yield from self._looks(state, who, worker, WRITE)
            case "give way":
                made = _put(state, worker, found._replace(dropped=True))
                yield "drops what it has begun", _refused(made, who, worker)
            case "write":
                made = _reached(state, worker, FILES)
                yield "its files are durable", _with(made, who, worker._replace(at=DROPPED))
            case "dropped?":
                if found.dropped:
                    yield "finds it dropped", _refused(state, who, worker)
                else:
                    yield "finds it not dropped", _with(state, who, worker._replace(at=COMMIT))
            case "commit":
                if found.torn:  # Ledger.missing_files
                    yield "its files are gone: exit 3", _with(state, who, Worker(worker.wants))
                else:
                    made = _reached(state, worker, DONE)
                    yield "commits", _with(made, who, worker._replace(at=MANIFEST))
            case "manifest":
                made = _reached(state, worker, WHOLE)
                yield "creates the manifest", _with(made, who, worker._replace(at=EXITED))
            case "exit 2":
                yield "is started again, by hand", _with(state, who, Worker(worker.wants))
            case _:
                return

    def _looks(
        self, state: State, who: int, worker: Worker, then: str
    ) -> Iterator[tuple[str, State]]:
        others = state.passes[1 - _taps(worker.wants)]
        if not any(each.live for each in others):
            yield "finds no other with its tap", _with(state, who, worker._replace(at=then))
        elif worker.created:
            after = worker._replace(at=GIVE_WAY)
            yield "finds another with its tap, and gives way", _with(state, who, after)
        else:
            yield "finds another with its tap: exit 2", _refused(state, who, worker)

    def _drop(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        """drop_taps: a user's, of any pass that is there, complete or not.

        It is also the way out where two passes have one tap, and those who began them were killed
        before they looked: the command is refused, and says so.
        """
        for taps, numbers in enumerate(state.passes):
            for number, each in enumerate(numbers):
                if each.live:
                    made = _set(state, taps, number, each._replace(dropped=True))
                    yield f"drop: {'AB'[taps]} {number}", None, made

    def _gc(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        """collect_garbage: what is dropped, in any order; it may be killed after each key."""
        if state.gc is None:
            for taps, numbers in enumerate(state.passes):
                for number, each in enumerate(numbers):
                    if each.dropped and (each.record or each.unit > NOTHING and not each.torn):
                        after = state._replace(gc=(taps, number))
                        yield f"gc: finds {'AB'[taps]} {number} dropped", None, after
            return
        yield "gc: ends, or is killed", None, state._replace(gc=None)
        each = state.passes[state.gc[0]][state.gc[1]]
        removed = {
            "record": (each.record, each._replace(record=False)),
            "unit": (each.unit > NOTHING, each._replace(torn=True)),
            "mark": (self.bugs.gc_takes_dropped, each._replace(dropped=False)),
        }
        for name, (is_there, made) in removed.items():
            if is_there and made != each:
                yield f"gc: removes its {name}", None, _set(state, *state.gc, made)


def _taps(wants: str) -> int:
    return "AB".index(wants)


def _pass(state: State, worker: Worker) -> Pass:
    return state.passes[_taps(worker.wants)][worker.number]


def _put(state: State, worker: Worker, made: Pass) -> State:
    return _set(state, _taps(worker.wants), worker.number, made)


def _set(state: State, taps: int, number: int, made: Pass) -> State:
    numbers = replaced(state.passes[taps], number, made)
    return state._replace(passes=replaced(state.passes, taps, numbers))


def _reached(state: State, worker: Worker, unit: int) -> State:
    found = _pass(state, worker)
    return _put(state, worker, found._replace(unit=max(found.unit, unit)))


def _with(state: State, who: int, worker: Worker) -> State:
    return state._replace(workers=replaced(state.workers, who, worker))


def _refused(state: State, who: int, worker: Worker) -> State:
    return _with(state, who, Worker(worker.wants, REFUSED))

"""Operations on datasets in combination: several at once, each killed anywhere and started again.

A combination is what the places hold in the beginning, and operations. Each of these begins at any
time, and again after its end, so that every order of them is there, too. An error that the
combination does not allow is a fault, like an invariant that does not hold.

What is complete in the end: readers get every row that the tables name, and what is repaired is
sound. A place without a table holds no dataset.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from protocol.checker import Broken, replaced
from protocol.copying import Merge
from protocol.maintaining import Repair
from protocol.operations import BEGIN, At, Operation, Step, World, Write
from protocol.places import HIDDEN, STRAY, Attempt, Place, Rules, Store

_DURABLE = ("file", "mark")  # kinds that nobody creates with a condition


class State(NamedTuple):
    places: tuple[Place, ...]
    processes: tuple[At, ...]
    late: frozenset[Write] = frozenset()  # requests whose processes are gone


@dataclass(frozen=True)
class Combination:
    """Operations on places, which are named by letters.

    Attributes:
        places: what each place holds in the beginning.
        allowed: why operations may end with an error.
        tolerated: what does not hold here, though `verify` names the damage.
        files: whether files are written apart from records.
        late: how many requests may be on their way at once whose processes were killed.
        serial: whether an operation begins only where no other is at work.
    """

    operations: tuple[Operation, ...]
    places: Mapping[str, Place]
    rules: Rules = Rules()
    allowed: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    files: bool = False
    late: int = 0
    serial: bool = False
    held: dict[Place, Store] = field(default_factory=dict[Place, Store], init=False)

    def first(self) -> State:
        there = self.places.values()
        if not self.files:
            there = (frozenset(i for i in place if i[0][1] != "file") for place in there)
        return State(tuple(there), (At(),) * len(self.operations))

    def fault(self, state: State) -> str | None:
        for name, store in self._stores(state).items():
            for fault in store.faults:
                # (The table of what is merged comes last.)
                if fault not in self.tolerated and not (fault == STRAY and self._is_made(name)):
                    return fault
        return None

    def _is_made(self, place: str) -> bool:
        return any(isinstance(each, Merge) and each.place == place for each in self.operations)

    def complete(self, state: State) -> bool:
        stores = {name: each for name, each in self._stores(state).items() if each.table}
        mended = {each.place for each in self.operations if isinstance(each, Repair)}
        whole = all(each.reads_whole for each in stores.values())
        return whole and all(stores[place].is_sound for place in mended & stores.keys())

    def canonical(self, state: State) -> tuple[State, tuple[int, ...]]:
        return state, ()

    # -- what may happen -----------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        world = World(self._stores(state), self.rules, self.files, self._used(state))
        busy = any(at.step != BEGIN for at in state.processes)
        for who, (operation, at) in enumerate(zip(self.operations, state.processes, strict=True)):
            if self.serial and busy and at.step == BEGIN:
                continue
            for step in operation.step(world, at):
                said = f"{operation.name}: {step.said}"
                if (why := self._forbidden(world, step)) is not None:
                    raise Broken(said, None, why)
                yield said, None, self._after(state, who, step.at, step.write)
                if len(state.late) < self.late and _is_request(world, step.write):
                    gone = state._replace(late=state.late.union([step.write]))
                    yield f"{said}, later: it is killed", None, self._after(gone, who, At())
            if at.step != BEGIN:
                yield f"{operation.name}: is killed", None, self._after(state, who, At())
        for write in state.late:
            gone = state._replace(late=state.late - {write})
            place, key, _ = write
            there = None if key in world.stores[place] else write
            after = self._stored(gone, there)
            yield f"a late request takes effect at {place}: {key}", None, self._tidied(after)

    def _forbidden(self, world: World, step: Step) -> str | None:
        if HIDDEN not in self.tolerated and step.write is not None:
            place, key, value = step.write
            if world.stores[place].hides(key, value):
                return HIDDEN
        if step.broken is not None and step.broken not in self.tolerated:
            return step.broken
        if step.refused is not None and step.refused not in self.allowed:
            return f"no reason for an error: {step.refused}"
        return None

    def _after(self, state: State, who: int, at: At, write: Write | None = None) -> State:
        processes = replaced(state.processes, who, at)
        return self._tidied(self._stored(state._replace(processes=processes), write))

    def _stored(self, state: State, write: Write | None) -> State:
        if write is None:
            return state
        place, key, value = write
        number = [*self.places].index(place)
        left = {k: v for k, v in self._held(state.places[number]).items() if k != key}
        after = frozenset((left if value is None else {**left, key: value}).items())
        return state._replace(places=replaced(state.places, number, after))

    def _stores(self, state: State) -> dict[str, Store]:
        return dict(zip(self.places, map(self._held, state.places), strict=True))

    def _held(self, place: Place) -> Store:
        if place not in self.held:
            self.held[place] = Store(place, self.rules, self.files)
        return self.held[place]

    # -- files -----------------------------------------------------------------------------------

    def _used(self, state: State) -> frozenset[Attempt]:
        """Return the attempts that anything refers to."""
        if not self.files:
            return frozenset()
        late = frozenset(value for _, _, value in state.late)
        return frozenset[Attempt]().union(*map(_attempts, (late, *state.processes, *state.places)))

    def _tidied(self, state: State) -> State:
        """Leave out files that nothing refers to: they can only be removed."""
        if not self.files:
            return state
        used = self._used(state)
        stored = (
            frozenset(i for i in place if i[0][1] != "file" or i[0][3] in used)
            for place in state.places
        )
        return state._replace(places=tuple(stored))


def _is_request(world: World, write: Write | None) -> bool:
    """Return whether this creates an object that is not there."""
    if write is None:
        return False
    place, key, value = write
    return value is not None and key not in world.stores[place] and key[1] not in _DURABLE


@lru_cache(1 << 17)
def _attempts(value: Any) -> frozenset[Attempt]:
    """Return the attempts that a place, or what a process remembers, refers to; files do not."""
    if isinstance(value, Attempt):
        return frozenset([value])
    if isinstance(value, frozenset):  # (of a place: the keys of its files do not count)
        value = tuple(i for i in value if not (isinstance(i[0], tuple) and i[0][1] == "file"))
    if isinstance(value, tuple):
        return frozenset[Attempt]().union(*map(_attempts, value))
    return frozenset()

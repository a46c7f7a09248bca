"""An exhaustive checker: every state a model can reach, the nearest fault, and what can still end.

A model gives its first state, the actions possible in a state, and what is wrong with a state.
States are visited breadth first, so that the trace to a fault is a shortest one. Afterwards the
graph is walked backwards from the states in which the work is complete: a state that is not met
on the way can never complete.
"""

import gc
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")
W = TypeVar("W", bound=tuple[Any, ...])


def replaced(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    """Return a tuple with another item at a place."""
    return (*items[:at], item, *items[at + 1 :])


def in_order(workers: tuple[W, ...]) -> tuple[tuple[W, ...], tuple[int, ...]]:
    """Return workers that are alike in order, and where each of them was."""
    order = sorted(range(len(workers)), key=workers.__getitem__)
    return tuple(workers[n] for n in order), tuple(order)


class Model(Protocol[S]):
    """What is checked."""

    def first(self) -> S: ...

    def steps(self, state: S) -> Iterator[tuple[str, int | None, S]]:
        """Every action possible: its words, who does it, and the state it leads to.

        Raises:
            Broken: where the action itself is forbidden.
        """
        ...

    def canonical(self, state: S) -> tuple[S, tuple[int, ...]]:
        """The state that stands for all that differ in names alone, and where each name went."""
        ...

    def fault(self, state: S) -> str | None:
        """The invariant that does not hold, if there is one."""
        ...

    def complete(self, state: S) -> bool: ...


class Broken(Exception):
    """An action that an invariant forbids."""

    def __init__(self, action: str, who: int | None, why: str) -> None:
        super().__init__(why)
        self.action, self.who = action, who


@dataclass
class Checked(Generic[S]):
    """What was found."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    fault: str | None = None
    trace: list[str] = field(default_factory=list[str])


def check(model: Model[S], *, ends: bool = True, most: int | None = None) -> Checked[S]:
    """Visit every state.

    Args:
        ends: whether every state must be able to reach a complete one.
        most: states after which it is an error not to have come to an end.
    """
    collecting = gc.isenabled()
    gc.disable()  # millions of tuples, none of which is garbage before the end
    try:
        return _check(model, ends, most)
    finally:
        if collecting:
            gc.enable()


def _check(model: Model[S], ends: bool, most: int | None) -> Checked[S]:
    start, _ = model.canonical(model.first())
    number: dict[S, int] = {start: 0}
    order: list[S] = [start]
    parent: array[int] = array("q", [-1])
    # The graph backwards, as pairs: who leads to whom.
    sources: array[int] = array("q")
    targets: array[int] = array("q")
    depths: array[int] = array("q", [0])
    found: Checked[S] = Checked(states=1)
    at = 0
    while at < len(order):
        state = order[at]
        if (why := model.fault(state)) is not None:
            found.fault, found.trace = why, _trace(model, order, parent, at)
            break
        try:
            for _, _, after in model.steps(state):
                found.steps += 1
                known, _ = model.canonical(after)
                if (place := number.get(known)) is None:
                    place = number[known] = len(order)
                    order.append(known)
                    parent.append(at)
                    depths.append(depths[at] + 1)
                    assert most is None or place < most, f"more than {most} states"
                sources.append(at)
                targets.append(place)
        except Broken as broken:
            found.fault = str(broken)
            found.trace = _trace(model, order, parent, at, broken)
            break
        at += 1
    found.states, found.depth = len(order), depths[-1]
    if found.fault is None and ends:
        stuck = _stuck(model, order, sources, targets)
        if stuck is not None:
            found.fault = "nothing that may still happen completes the work"
            found.trace = _trace(model, order, parent, stuck)
    return found


def _stuck(
    model: Model[S], order: list[S], sources: "array[int]", targets: "array[int]"
) -> int | None:
    """The nearest state from which no complete one can be reached."""
    count = len(order)
    begins = array("q", bytes(8 * (count + 1)))  # of each state's edges, in order of the target
    for target in targets:
        begins[target + 1] += 1
    for place in range(count):
        begins[place + 1] += begins[place]
    free, before = array("q", begins[:count]), array("q", bytes(8 * len(sources)))
    for source, target in zip(sources, targets, strict=True):
        before[free[target]] = source
        free[target] += 1
    met = bytearray(count)
    waiting = [place for place, state in enumerate(order) if model.complete(state)]
    for place in waiting:
        met[place] = 1
    while waiting:
        place = waiting.pop()
        for source in before[begins[place] : begins[place + 1]]:
            if not met[source]:
                met[source] = 1
                waiting.append(source)
    stuck = met.find(0)
    return None if stuck < 0 else stuck


def _trace(
    model: Model[S],
    order: list[S],
    parent: "array[int]",
    at: int,
    broken: Broken | None = None,
) -> list[str]:
    """The actions that lead to a state, with the same name for the same actor throughout."""
    path = [at]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    path.reverse()
    _, names = model.canonical(model.first())
    lines: list[str] = []
    for source, target in zip(path, path[1:], strict=False):
        for action, who, after in model.steps(order[source]):
            known, moved = model.canonical(after)
            if known == order[target]:
                lines.append(_said(action, who, names))
                names = tuple(names[place] for place in moved)
                break
    if broken:
        lines.append(_said(broken.action, broken.who, names))
    return lines


def _said(action: str, who: int | None, names: tuple[Any, ...]) -> str:
    return action if who is None else f"worker {'ABCDEFGH'[names[who]]}: {action}"

"""The checker itself: shortest traces, names that stay, states that cannot complete."""

from collections.abc import Iterator

from protocol.checker import Broken, check

State = tuple[int, ...]


class Counters:
    """Two counters that count to `goal`; nobody may pass `limit`, and `trap` has no way out."""

    def __init__(self, goal: int, *, limit: int = 99, trap: int = -1, forbidden: int = -1) -> None:
        self.goal, self.limit, self.trap, self.forbidden = goal, limit, trap, forbidden

    def first(self) -> State:
        return (0, 0)

    def steps(self, state: State) -> Iterator[tuple[str, int | None, State]]:
        for who, count in enumerate(state):
            if count == self.forbidden:
                raise Broken("goes on", who, "nobody goes on from here")
            if count < self.goal and count != self.trap:
                for more in (1, 2):
                    after = (*state[:who], count + more, *state[who + 1 :])
                    yield f"adds {more}", who, after

    def canonical(self, state: State) -> tuple[State, tuple[int, ...]]:
        order = sorted(range(len(state)), key=state.__getitem__)
        return tuple(state[n] for n in order), tuple(order)

    def fault(self, state: State) -> str | None:
        return "too much" if max(state) > self.limit else None

    def complete(self, state: State) -> bool:
        return min(state) >= self.goal


def test_states_that_differ_in_names_alone_are_one() -> None:
    found = check(Counters(2))
    # Of 0..3 each, in order: all pairs but those that nothing leads to.
    assert found.states == 10
    assert found.fault is None


def test_a_trace_is_a_shortest_one_and_keeps_names() -> None:
    found = check(Counters(9, limit=3))
    assert found.fault == "too much"
    assert found.trace == ["worker A: adds 2", "worker A: adds 2"]


def test_an_action_that_is_forbidden_ends_the_trace() -> None:
    found = check(Counters(9, forbidden=3))
    assert found.fault == "nobody goes on from here"
    assert found.trace == ["worker A: adds 1", "worker A: adds 2", "worker A: goes on"]


def test_a_state_that_cannot_complete_is_found_only_where_that_is_asked() -> None:
    found = check(Counters(4, trap=3))
    assert found.fault == "nothing that may still happen completes the work"
    assert sorted(found.trace) == ["worker A: adds 1", "worker A: adds 2"]
    assert check(Counters(4, trap=3), ends=False).fault is None

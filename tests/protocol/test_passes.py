"""Taps are added once, and read from one place, whoever is killed, drops them or cleans up."""

from collections.abc import Callable

import pytest

from protocol.checker import check
from protocol.passes import AddingTaps, Bugs

MOST = 5_000_000


@pytest.mark.parametrize(
    "adding",
    [
        pytest.param(AddingTaps("A"), id="dropped"),
        pytest.param(AddingTaps("AA", gc=False), id="the same taps"),
        pytest.param(AddingTaps("AB", gc=False), id="a tap of both", marks=pytest.mark.full),
        pytest.param(AddingTaps("AA"), id="the same taps, and gc", marks=pytest.mark.full),
    ],
)
def test_every_state_keeps_the_invariants_and_can_still_complete(
    adding: AddingTaps, record_property: Callable[[str, object], None]
) -> None:
    found = check(adding, most=MOST)
    record_property("states", found.states)
    record_property("steps", found.steps)
    assert (found.fault, found.trace) == (None, [])


@pytest.mark.parametrize(
    ("bug", "wants", "fault"),
    [
        pytest.param(
            *("joins_without_looking", "ABB", "a tap is read from one pass"), marks=pytest.mark.full
        ),
        ("never_looks_again", "AB", "a tap is read from one pass"),
        ("gc_takes_dropped", "A", "gc takes nothing of what is not dropped"),
    ],
)
def test_what_passes_stand_on_is_missed_where_it_is_left_out(
    bug: str, wants: str, fault: str
) -> None:
    found = check(AddingTaps(wants, gc=bug == "gc_takes_dropped", bugs=Bugs(**{bug: True})))
    assert found.fault == fault

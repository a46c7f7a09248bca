"""The protocol holds in every state it can reach, and would not without what holds it up."""

from collections.abc import Callable

import pytest

from protocol.checker import check
from protocol.model import Bugs, Protocol

FILES, EXIT, GC = (
    "a record implies its files",
    "exit 0 implies complete or budget spent",
    "gc removes nothing reachable",
)
MOST = 5_000_000  # states; a change that makes many more is to be looked at


@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param(Protocol(workers=2, units=1), id="two workers"),
        pytest.param(Protocol(workers=1, units=2), id="two units"),
        pytest.param(Protocol(workers=1, units=2, budget=1), id="a budget"),
        pytest.param(Protocol(workers=2, units=1, command="compact"), id="compact"),
        pytest.param(Protocol(workers=1, units=2, base=1), id="growing"),
        pytest.param(
            Protocol(workers=2, units=2, base=1, gc=False), id="two grow it", marks=pytest.mark.full
        ),
        pytest.param(
            Protocol(workers=2, units=2), id="two workers, two units", marks=pytest.mark.full
        ),
        pytest.param(Protocol(workers=3, units=1), id="three workers", marks=pytest.mark.full),
        pytest.param(
            Protocol(workers=2, units=3, gc=False), id="three units", marks=pytest.mark.full
        ),
        pytest.param(
            Protocol(workers=2, units=2, budget=1), id="two, a budget", marks=pytest.mark.full
        ),
        pytest.param(
            Protocol(workers=3, units=2, command="compact"),
            id="three compact",
            marks=pytest.mark.full,
        ),
    ],
)
def test_every_state_keeps_the_invariants_and_can_still_complete(
    protocol: Protocol, record_property: Callable[[str, object], None]
) -> None:
    found = check(protocol, most=MOST)
    record_property("states", found.states)
    record_property("steps", found.steps)
    assert (found.fault, found.trace) == (None, [])


def test_files_removed_while_their_record_is_created_are_found_missing() -> None:
    """compact and shuffle did so, when interrupted between the creation and the return."""
    for command in ("extract", "compact"):
        bugs = Bugs(discards_while_committing=True)
        found = check(Protocol(command=command, bugs=bugs))
        assert found.fault == FILES
        assert found.trace == [
            "worker A: finds 0 units done",
            "worker A: takes unit 0",
            "worker A: unit 0: a file is durable",
            "worker A: unit 0: every file is durable",
            "worker A: unit 0: its files are all there",
            "worker A: unit 0: puts the record: created",
            "worker A: is interrupted, and removes its files",
        ]


def test_a_conflict_mistaken_for_a_record_is_found_as_a_lost_unit() -> None:
    """One 409 of S3 lost a unit, and extract ended with exit code 0."""
    found = check(Protocol(bugs=Bugs(conflict_is_done=True)))
    assert found.fault == EXIT
    assert found.trace == [
        "worker A: finds 0 units done",
        "worker A: takes unit 0",
        "worker A: unit 0: a file is durable",
        "worker A: unit 0: every file is durable",
        "worker A: unit 0: its files are all there",
        "worker A: unit 0: puts the record: 409, another request is under way",
        'worker A: hears 409, "already exists"',
        "worker A: cannot read it, and takes it for another worker's",
        "worker A: has removed its files; another worker did the unit",
        "worker A: has nothing left to do",
        "worker A: lists the records: not all are there",
        "worker A: exits 0, as if a budget had been spent",
    ]


def test_a_budget_spent_by_units_that_fail_is_found_unspent() -> None:
    """A worker ended with 0 while others were at work on the rest, and they may fail."""
    bugs = Bugs(budget_is_spent_in_hand=True)
    found = check(Protocol(workers=2, units=3, budget=2, gc=False, bugs=bugs))
    assert found.fault == EXIT
    assert [line for line in found.trace if "takes" in line or "budget" in line] == [
        "worker B: takes unit 0",
        "worker A: takes unit 1",
        "worker B: finds the byte budget spent",
        "worker B: exits 0, as if the byte budget were spent",
    ]


@pytest.mark.parametrize(
    ("bug", "fault", "last"),
    [
        ("never_reads_back", FILES, "worker A: removes one of its files"),
        ("record_first", FILES, "worker A: unit 0: puts the record: created"),
        ("gc_takes_unfinished", GC, "gc: removes a file of an attempt at unit 0"),
    ],
)
def test_what_else_the_protocol_stands_on_is_missed_where_it_is_left_out(
    bug: str, fault: str, last: str
) -> None:
    found = check(Protocol(bugs=Bugs(**{bug: True})))
    assert found.fault == fault
    assert found.trace[-1] == last


@pytest.mark.parametrize(
    ("bug", "fault"),
    [
        ("gc_takes_columns", "a generation implies its columns"),
        ("manifest_of_old_units", "a manifest implies every record"),
    ],
)
def test_what_growing_stands_on_is_missed_where_it_is_left_out(bug: str, fault: str) -> None:
    assert check(Protocol(workers=1, units=2, base=1, bugs=Bugs(**{bug: True}))).fault == fault

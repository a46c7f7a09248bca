"""Datasets stay what they say while operations meet, each killed anywhere and started again."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import pytest

from protocol import operations as reasons
from protocol.checker import Checked, check
from protocol.combinations import Combination, State
from protocol.copying import Copy, Merge
from protocol.maintaining import AddTaps, CollectGarbage, Drop, Repair
from protocol.operations import (
    CHANGED,
    DAMAGE,
    DAMAGED_SOURCE,
    FILES_GONE,
    GROWING,
    HIDING,
    MISSING,
    NO_GENERATION,
    NO_TABLE,
    OTHER_DATASET,
    OTHER_GROWTH,
    OTHER_PASS,
    OTHER_RECORD,
    TAP_THERE,
    TWO_PARTS,
    Extract,
    Grow,
    Operation,
)
from protocol.places import (
    HIDDEN,
    NOTHING,
    ROWS,
    SOUND,
    STRAY,
    TWICE,
    TWO_PASSES,
    Place,
    Rules,
    changed,
    damaged,
    dataset,
    with_record,
)

MOST = 3_000_000  # states; a change that makes many more is to be looked at

COPIED_UNITS = "a copy has every unit that its manifest names"
COPIED_TAPS = "a copy has only taps that are live in its source"
ADDED_TAPS = "exit 0 implies the taps of every unit"

A, C, D = dataset("a0"), dataset("c0"), dataset("d0")
AB, GROWN = dataset("a0", "b1"), dataset("a0", grown=("b1",))
HALF, FULL = dataset("a0", taps="h"), dataset("a0", taps="f")  # the same tap in two dtypes

# The generation names file c, and the record of its unit was made from file b.
MIXED_UP = with_record(changed(dataset("a0", grown=("c1",)), {("", "manifest", 1): None}), 1, "b1")


def sealed(place: Place) -> Place:
    """Return a dataset with a manifest for its generation, whatever its records are."""
    kept, whole = dict(place), dict(dataset("a0", grown=("c1",)))["", "manifest", 1]
    dones = tuple(kept["", "done", unit] for unit in range(2))
    return changed(place, {("", "manifest", 1): whole._replace(dones=dones)})


def on(places: Mapping[str, Place], *operations: Operation, **more: object) -> Combination:
    return Combination(operations, places, **more)  # pyright: ignore[reportArgumentType]


MADE_AT_ONCE = (OTHER_DATASET, NO_TABLE, OTHER_RECORD, MISSING, DAMAGE)

SMALL = {
    "copy, the source and the copy grow": on(
        {"A": A, "B": NOTHING},
        *(Copy("A", "B"), Grow("A", "b"), Grow("B", "c")),
        allowed=(OTHER_DATASET, OTHER_GROWTH),
    ),
    "copy, extract continues it": on(
        {"A": AB, "B": NOTHING},
        *(Copy("A", "B"), Extract("B", ("a0", "b1"))),
        allowed=(OTHER_DATASET,),
        files=True,
    ),
    "merge and extract in one place, repair": on(
        {"A": A, "C": C, "B": NOTHING},
        *(Merge(("A", "C"), "B"), Extract("B", ("ac0",)), Repair("B")),
        allowed=MADE_AT_ONCE,
        tolerated=(STRAY,),
    ),
    "copy of units and extract in one place, repair": on(
        {"A": AB, "B": NOTHING},
        *(Merge(("A",), "B", (1,)), Extract("B", ("a0", "b1")), Repair("B")),
        allowed=MADE_AT_ONCE,
        tolerated=(STRAY,),
    ),
    "merge, a part grows": on(
        {"A": A, "C": C, "B": NOTHING},
        *(Merge(("A", "C"), "B"), Grow("A", "b")),
        allowed=(OTHER_DATASET,),
    ),
    "merge of one part twice": on(
        {"A": A, "C": C, "B": NOTHING}, Merge(("A", "C", "C"), "B"), allowed=(TWO_PARTS,)
    ),
    "two grow it, by files that overlap": on(
        {"A": A}, Grow("A", "b"), Grow("A", "abc", "more"), allowed=(OTHER_GROWTH,)
    ),
    "taps are added, it grows": on(
        {"A": A},
        *(AddTaps("A", "h"), Grow("A", "b")),
        allowed=(GROWING,),
        tolerated=(HIDDEN,),  # (the whole growth between the look and the manifest)
    ),
    "taps are dropped and added, copy": on(
        {"A": HALF, "B": HALF},
        *(Drop("A", "h"), AddTaps("A", "f"), Copy("A", "B")),
        allowed=(TAP_THERE,),
    ),
    "taps are dropped, gc, copy": on(
        {"A": HALF, "B": HALF},
        *(Drop("A", "h"), CollectGarbage("A"), Copy("A", "B")),
        allowed=(CHANGED,),
    ),
    "taps are added to both, copy": on(
        {"A": A, "B": A},
        *(AddTaps("A", "h"), AddTaps("B", "f"), Copy("A", "B")),
        allowed=(TAP_THERE, OTHER_PASS),
    ),
    "copy of taps, the copy grows": on(
        {"A": HALF, "B": A},
        *(Copy("A", "B"), Grow("B", "c"), AddTaps("B", "h")),
        allowed=(GROWING, HIDING),
        tolerated=(HIDDEN,),
    ),
    "one after the other: copy of taps, the copy grows": on(
        {"A": HALF, "B": A},
        *(Copy("A", "B"), Grow("B", "c"), AddTaps("B", "h")),
        allowed=(HIDING,),
        serial=True,
    ),
    "repair, copy": on(
        {"A": damaged(A, 0), "B": NOTHING},
        *(Repair("A"), Copy("A", "B")),
        allowed=(CHANGED, DAMAGED_SOURCE),
        files=True,
    ),
    "repair, gc": on({"A": damaged(A, 0)}, Repair("A"), CollectGarbage("A"), files=True),
    "repair, it grows": on(
        {"A": damaged(A, 0)},
        *(Repair("A"), Grow("A", "b")),
        allowed=(DAMAGE, MISSING),
        files=True,
    ),
    "two repairs": on({"A": damaged(A, 0)}, Repair("A"), Repair("A"), files=True),
    "repair of another's unit, copy": on(
        {"A": MIXED_UP, "B": NOTHING},
        *(Repair("A"), Copy("A", "B")),
        allowed=(OTHER_RECORD,),
        files=True,
    ),
    "repair of another's unit, merge": on(
        {"A": MIXED_UP, "D": D, "B": NOTHING}, Repair("A"), Merge(("A", "D"), "B"), files=True
    ),
    "repair of another's unit that was sealed, copy": on(
        {"A": sealed(MIXED_UP), "B": NOTHING},
        *(Repair("A"), Copy("A", "B")),
        allowed=(OTHER_RECORD, CHANGED),
        tolerated=(ROWS,),
    ),
    "repair of another's unit that was sealed, merge": on(
        {"A": sealed(MIXED_UP), "D": D, "B": NOTHING},
        *(Repair("A"), Merge(("A", "D"), "B")),
        allowed=(OTHER_RECORD,),
        tolerated=(ROWS,),
    ),
    "a stray record, it grows": on(
        {"A": with_record(A, 1, "b1")},
        Grow("A", "c"),
        allowed=(NO_GENERATION,),
        tolerated=(STRAY,),
    ),
    "a stray record, copy": on(
        {"A": GROWN, "B": with_record(A, 1, "c1")},
        Copy("A", "B"),
        allowed=(NO_GENERATION,),
        tolerated=(STRAY,),
    ),
    "copy to a place with another pass of the tap": on(
        {"A": HALF, "B": FULL}, Copy("A", "B"), allowed=(OTHER_PASS,)
    ),
    "two passes with one tap": on(
        {"A": HALF | {item for item in FULL if item[0][0]}},
        *(Drop("A", "f"), Repair("A")),
        allowed=(DAMAGE,),
        tolerated=(TWO_PASSES,),
    ),
    "one after the other: merge, extract in its place": on(
        {"A": A, "C": C, "B": NOTHING},
        *(Merge(("A", "C"), "B"), Extract("B", ("ac0",))),
        allowed=(OTHER_DATASET, NO_TABLE),
        serial=True,
    ),
    "one after the other: copies that grow, merge": on(
        {"A": A, "B": NOTHING, "D": D, "E": NOTHING},
        *(Grow("A", "b"), Copy("A", "B"), Grow("B", "c"), Extract("B", ("a0",))),
        Merge(("B", "D"), "E"),
        allowed=(OTHER_DATASET,),
        serial=True,
    ),
}
LARGE = {
    "two copies, it grows": on(
        {"A": A, "B": NOTHING}, Copy("A", "B"), Copy("A", "B"), Grow("A", "b")
    ),
    "copy, extract continues it, gc": on(
        {"A": AB, "B": NOTHING},
        *(Copy("A", "B"), Extract("B", ("a0", "b1")), CollectGarbage("B")),
        allowed=(OTHER_DATASET,),
        files=True,
    ),
    "copy, both grow, late requests": on(
        {"A": A, "B": NOTHING},
        *(Copy("A", "B"), Grow("A", "b"), Grow("B", "c")),
        allowed=(OTHER_DATASET, OTHER_GROWTH),
        late=1,
    ),
    "merge and copy in one place, repair": on(
        {"A": A, "C": C, "D": AB, "B": NOTHING},
        *(Merge(("A", "C"), "B"), Copy("D", "B"), Repair("B")),
        allowed=MADE_AT_ONCE,
        tolerated=(STRAY,),
    ),
    "merge and extract in one place, gc": on(
        {"A": A, "C": C, "B": NOTHING},
        *(Merge(("A", "C"), "B"), Extract("B", ("a0", "c1")), CollectGarbage("B")),
        allowed=(OTHER_DATASET, NO_TABLE, FILES_GONE),
        files=True,
    ),
    "taps are added, it grows, copy": on(
        {"A": A, "B": NOTHING},
        *(AddTaps("A", "h"), Grow("A", "b"), Copy("A", "B")),
        allowed=(GROWING, HIDING),
        tolerated=(HIDDEN,),
    ),
    "two add one tap, copy": on(
        {"A": A, "B": NOTHING},
        *(AddTaps("A", "h"), AddTaps("A", "f"), Copy("A", "B")),
        allowed=(TAP_THERE,),
    ),
    "taps are dropped and added, gc, copy": on(
        {"A": HALF, "B": NOTHING},
        *(Drop("A", "h"), AddTaps("A", "f"), CollectGarbage("A"), Copy("A", "B")),
        allowed=(TAP_THERE, CHANGED),
    ),
    "repair of the copy, copy, gc": on(
        {"A": A, "B": damaged(A, 0)},
        *(Repair("B"), Copy("A", "B"), CollectGarbage("B")),
        allowed=(CHANGED, OTHER_DATASET, DAMAGE),
        tolerated=(COPIED_UNITS,),
        files=True,
    ),
    "repair, extract, copy": on(
        {"A": damaged(A, 0), "B": NOTHING},
        *(Repair("A"), Extract("A", ("a0",)), Copy("A", "B")),
        allowed=(MISSING, CHANGED, DAMAGED_SOURCE),
        files=True,
    ),
    "repair, extract, gc": on(
        {"A": damaged(A, 0)},
        *(Repair("A"), Extract("A", ("a0",)), CollectGarbage("A")),
        allowed=(MISSING,),
        files=True,
    ),
    "repair, gc, late requests": on(
        {"A": damaged(A, 0)}, Repair("A"), CollectGarbage("A"), files=True, late=1
    ),
    "one after the other: both grow, taps": on(
        {"A": HALF, "B": NOTHING},
        *(Grow("A", "b"), Copy("A", "B"), Grow("B", "c"), Drop("A", "h"), AddTaps("A", "f")),
        *(AddTaps("B", "f"), AddTaps("B", "h")),
        allowed=(OTHER_DATASET, OTHER_PASS, TAP_THERE, HIDING),
        serial=True,
    ),
}
EVERY = {**SMALL, **LARGE}


@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(name, marks=pytest.mark.full) for name in LARGE)]
)
def test_every_state_keeps_the_invariants_and_can_still_complete(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    found = check(EVERY[name], most=MOST)
    record_property("states", found.states)
    record_property("steps", found.steps)
    assert (found.fault, found.trace) == (None, [])


# -- rules that are left out -----------------------------------------------------------------------

PLANTED = [
    (
        "adopts_compare",
        "merge and extract in one place, repair",
        ROWS,
        "extract ac0 at B: creates the table",
    ),
    (
        "seals_compare",
        "merge and extract in one place, repair",
        ROWS,
        "extract ac0 at B: creates manifest 0",
    ),
    (
        "copies_compare",
        "repair of another's unit that was sealed, copy",
        "a copy has the rows that its table names",
        "copy A B: exits 0",
    ),
    (
        "merges_compare",
        "repair of another's unit that was sealed, merge",
        SOUND,
        "merge A D B: creates the table",
    ),
    ("verify_compares", "repair of another's unit that was sealed, copy", SOUND, None),
    (
        "manifests_compare",
        "merge and copy in one place, repair",
        ROWS,
        "copy D B: creates table",
    ),
    (
        "tables_look_first",
        "one after the other: merge, extract in its place",
        f"no reason for an error: {OTHER_RECORD}",
        f"extract ac0 at B: ends: {OTHER_RECORD}",
    ),
    (
        "generations_look_first",
        "a stray record, it grows",
        f"no reason for an error: {OTHER_RECORD}",
        f"grow A by c: ends: {OTHER_RECORD}",
    ),
    (
        "copies_table_first",
        "copy, the source and the copy grow",
        STRAY,
        "copy A B: creates the record of unit 0",
    ),
    (
        "copies_known_units",
        "two copies, it grows",
        f"no reason for an error: {OTHER_RECORD}",
        f"copy A B: ends: {OTHER_RECORD}",
    ),
    ("copies_whole_manifests", "repair, extract, copy", COPIED_UNITS, "copy A B: exits 0"),
    ("copies_drops", "taps are dropped, gc, copy", COPIED_TAPS, "copy A B: exits 0"),
    (
        "copies_drops_first",
        "taps are dropped and added, copy",
        f"no reason for an error: {OTHER_PASS}",
        f"copy A B: ends: {OTHER_PASS}",
    ),
    (
        "copies_compare_passes",
        "copy to a place with another pass of the tap",
        TWO_PASSES,
        "copy A B: creates h0 manifest",
    ),
    (
        "merges_compare_every_pair",
        "merge of one part twice",
        TWICE,
        "merge A C C B: creates the table",
    ),
    (
        "grows_by_identity",
        "two grow it, by files that overlap",
        TWICE,
        "grow A by abc: creates generation 1",
    ),
    ("verify_compares_passes", "two passes with one tap", SOUND, None),
    (
        "passes_look_again",
        "taps are added, it grows",
        "exit 0 implies the taps of every unit",
        "add h to A: exits 0",
    ),
    (
        "copies_hide_nothing",
        "one after the other: copy of taps, the copy grows",
        HIDDEN,
        "copy A B: creates h0 manifest",
    ),
    (
        "passes_newest_first",
        "one after the other: copy of taps, the copy grows",
        HIDDEN,
        "add h to B: creates its manifest 0",
    ),
]


@pytest.mark.parametrize(("rule", "name", "fault", "last"), PLANTED)
def test_a_rule_that_is_left_out_is_missed(
    rule: str, name: str, fault: str, last: str | None
) -> None:
    found = check(replace(EVERY[name], rules=Rules().without(rule)), most=MOST)
    assert (found.fault, found.trace[-1:]) == (fault, [last] if last else [])


def test_every_rule_is_left_out_once() -> None:
    assert {rule for rule, *_ in PLANTED} == {field.name for field in fields(Rules)}


# -- the protocol without any of them --------------------------------------------------------------


def old(
    places: Mapping[str, Place], *operations: Operation, tolerated: tuple[str, ...] = ()
) -> Checked[State]:
    """Check commands one after the other, as a user gives them, with the rules of before."""
    every = tuple(value for name, value in vars(reasons).items() if name.isupper())
    return check(
        on(
            places,
            *operations,
            rules=Rules.old(),
            allowed=every,
            tolerated=tolerated,
            serial=True,
        )
    )


def test_before_a_merge_of_one_part_twice_doubled_its_documents() -> None:
    found = old({"A": A, "C": C, "B": NOTHING}, Merge(("A", "C", "C"), "B"))
    assert found.fault == TWICE
    assert found.trace == [
        "merge A C C B: reads its sources",
        "merge A C C B: comes to unit 0",
        "merge A C C B: creates the record of unit 0",
        "merge A C C B: comes to unit 1",
        "merge A C C B: creates the record of unit 1",
        "merge A C C B: comes to unit 2",
        "merge A C C B: creates the record of unit 2",
        "merge A C C B: has come to the end",
        "merge A C C B: creates the manifest",
        "merge A C C B: creates the table",
    ]


def test_before_a_source_that_overlaps_was_added_whole() -> None:
    found = old({"A": A}, Grow("A", "ab", "more"))
    assert found.fault == TWICE
    assert found.trace == ["grow A by ab: will add a1, b2", "grow A by ab: creates generation 1"]


def test_before_a_killed_copy_gave_its_rows_to_another_generation() -> None:
    found = old({"A": GROWN, "B": A}, Copy("A", "B"), Grow("B", "c"), tolerated=(STRAY,))
    assert found.fault == ROWS
    assert found.trace == [
        "copy A B: reads the table",
        "copy A B: reads what is beside the units",
        "copy A B: lists 2 units",
        "copy A B: reads the record of unit 0",
        "copy A B: finds the record of unit 0",
        "copy A B: reads the record of unit 1",
        "copy A B: creates the record of unit 1",
        "copy A B: is killed",
        "grow B by c: will add c1",
        "grow B by c: creates generation 1",
    ]


def test_before_a_copy_beside_growth_had_more_units_than_its_table() -> None:
    more = replace(EVERY["copy, the source and the copy grow"], rules=Rules.old())
    found = check(replace(more, operations=more.operations[:2], places={"A": A, "B": A}))
    assert found.fault == STRAY
    assert found.trace == [
        "copy A B: reads the table",
        "copy A B: reads what is beside the units",
        "grow A by b: will add b1",
        "grow A by b: creates generation 1",
        "grow A by b: takes unit 1",
        "grow A by b: creates the record of unit 1",
        "copy A B: lists 2 units",
        "copy A B: reads the record of unit 0",
        "copy A B: finds the record of unit 0",
        "copy A B: reads the record of unit 1",
        "copy A B: creates the record of unit 1",
    ]


def test_before_extract_took_over_the_units_of_a_killed_copy_of_a_part() -> None:
    part, whole = Merge(("A",), "B", (1,)), Extract("B", ("a0", "b1"))
    found = old({"A": AB, "B": NOTHING}, part, whole, tolerated=(STRAY,))
    assert found.fault == ROWS
    assert found.trace == [
        "copy units (1,) of A B: reads its sources",
        "copy units (1,) of A B: comes to unit 0",
        "copy units (1,) of A B: creates the record of unit 0",
        "copy units (1,) of A B: is killed",
        "extract a0+b1 at B: finds no table",
        "extract a0+b1 at B: creates the table",
    ]


def test_before_extract_took_over_the_units_of_a_killed_merge() -> None:
    both, one = Merge(("A", "C"), "B"), Extract("B", ("ac0",))  # in one unit, by the same recipe
    found = old({"A": A, "C": C, "B": NOTHING}, both, one, tolerated=(STRAY,))
    assert found.fault == ROWS
    assert found.trace == [
        "merge A C B: reads its sources",
        "merge A C B: comes to unit 0",
        "merge A C B: creates the record of unit 0",
        "merge A C B: is killed",
        "extract ac0 at B: finds no table",
        "extract ac0 at B: creates the table",
    ]


def test_before_drop_did_not_travel() -> None:
    found = old({"A": HALF, "B": HALF}, Drop("A", "h"), Copy("A", "B"))
    assert found.fault == COPIED_TAPS
    assert found.trace == [
        "drop h of A: drops h0",
        "copy A B: reads the table",
        "copy A B: reads what is beside the units",
        "copy A B: lists 1 units",
        "copy A B: reads the record of unit 0",
        "copy A B: finds the record of unit 0",
        "copy A B: finds manifest",
        "copy A B: finds table",
        "copy A B: exits 0",
    ]


def test_before_verify_was_content_with_two_passes_of_one_tap() -> None:
    operations = Drop("A", "h"), AddTaps("A", "f"), Copy("A", "B")
    found = old({"A": HALF, "B": HALF}, *operations, tolerated=(COPIED_TAPS, TWO_PASSES))
    assert found.fault == SOUND
    assert found.trace[0] == "drop h of A: drops h0"
    assert found.trace[-2:] == ["copy A B: creates f0 pass", "copy A B: creates f0 manifest"]


def test_before_taps_that_were_added_beside_growth_lacked_its_units() -> None:
    more = replace(EVERY["taps are added, it grows"], rules=Rules.old())
    found = check(more)
    assert found.fault == ADDED_TAPS
    assert found.trace == [
        "add h to A: will add h0",
        "add h to A: finds no other with its tap",
        "add h to A: creates h0",
        "add h to A: finds no other with its tap",
        "add h to A: takes unit 0",
        "add h to A: creates the record of unit 0",
        "add h to A: finds every unit done",
        "add h to A: creates its manifest 0",
        "grow A by b: will add b1",
        "grow A by b: creates generation 1",
        "grow A by b: takes unit 1",
        "grow A by b: creates the record of unit 1",
        "grow A by b: finds every unit done",
        "grow A by b: reads the records",
        "grow A by b: creates manifest 1",
        "add h to A: exits 0",
    ]

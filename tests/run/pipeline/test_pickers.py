"""Shares of the units: which worker has which units, helpers, and invalid shares."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spile.core.config import Runtime
from spile.core.errors import ConfigError, StoreError
from spile.core.units import Unit
from spile.dataset import format as fmt
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects
from spile.plan.estimate import Budget
from spile.run.extract import outcome_of
from spile.run.pipeline.pickers import StorePicker, UnitShare, find_share
from support import stored


def units(count: int) -> list[int]:
    return list(range(count))


def taken(share: UnitShare, free: list[int], count: int) -> list[int]:
    """Return the order in which one machine does all units."""
    left, order = list(free), []
    while (unit := share.next_of(left, count)) is not None:
        left.remove(unit)
        order.append(unit)
    return order


@pytest.mark.parametrize(("count", "machines"), [(10, 3), (32, 32), (5, 32), (1, 4), (97, 8)])
def test_every_unit_is_one_machines_and_runs_are_even(count: int, machines: int) -> None:
    work = units(count)
    owned = []
    for index in range(machines):
        first = index * count // machines
        size = (index + 1) * count // machines - first
        order = taken(UnitShare(index, machines), work, count)
        assert order[:size] == list(range(first, first + size))  # its own first, in order
        assert sorted(order) == list(range(count))  # and then all others
        owned.append(size)
    assert max(owned) - min(owned) <= 1


def test_help_begins_where_most_is_left_and_at_the_far_end() -> None:
    free = [u for u in units(12) if u in (3, 6, 7, 8, 10)]  # of 4 machines with 3 units each
    assert taken(UnitShare(0, 4), free, 12) == [8, 7, 3, 6, 10]
    assert taken(UnitShare(1, 4), free, 12)[:2] == [3, 8]


def test_helpers_of_equally_busy_machines_begin_at_different_ones() -> None:
    free = [u for u in units(16) if u >= 8]  # machines 2 and 3 of 4 have not begun
    first = [UnitShare(index, 4).next_of(free, 16) for index in (0, 1)]
    assert first == [11, 11]
    free = [u for u in units(16) if 4 <= u < 8 or u >= 12]
    first = [UnitShare(index, 4).next_of(free, 16) for index in (0, 2)]
    assert first == [7, 15]


def test_a_flag_goes_before_the_environment() -> None:
    environment = {"MACHINE_ID": "3", "TOTAL_MACHINES": "8"}
    assert find_share(Runtime(), environment) == UnitShare(3, 8)
    assert find_share(Runtime(share="0/2"), environment) == UnitShare(0, 2)
    assert str(find_share(Runtime(), environment)) == "3/8"


def test_without_a_number_of_machines_units_are_everybodys() -> None:
    assert find_share(Runtime(), {}) is None
    assert find_share(Runtime(), {"MACHINE_ID": "3"}) is None  # other programs use that name
    assert find_share(Runtime(), {"TOTAL_MACHINES": "1"}) == UnitShare(0, 1)


@pytest.mark.parametrize(
    ("share", "environment", "named"),
    [
        ("3", {}, "--share must be I/N"),
        ("a/b", {}, "--share must be I/N"),
        ("-1/4", {}, "--share must be I/N"),
        ("32/32", {}, "from 0/32 to 31/32"),
        ("0/0", {}, "out of range"),
        (None, {"MACHINE_ID": "8", "TOTAL_MACHINES": "8"}, "MACHINE_ID/TOTAL_MACHINES 8/8"),
        (None, {"MACHINE_ID": "x", "TOTAL_MACHINES": "8"}, "got 'x/8'"),
        (None, {"TOTAL_MACHINES": "8"}, "MACHINE_ID is not set"),
    ],
)
def test_what_is_no_share_is_refused(
    share: str | None, environment: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        find_share(Runtime(share=share), environment)


def test_all_machines_together_leave_nothing_out_whoever_is_gone() -> None:
    for gone in itertools.combinations(range(4), 2):
        left = units(13)
        while left:
            for index in set(range(4)) - set(gone):
                unit = UnitShare(index, 4).next_of(left, 13)
                if unit is not None:
                    left.remove(unit)


def test_a_worker_waits_while_units_of_others_may_still_spend_the_budget(
    tmp_path: Path,
) -> None:
    """A worker that ended here would exit 0 with units missing, or 2 before the first was done."""
    dataset = stored.build(tmp_path, ((6,), (6,), (6,)), commit=())
    each = Budget(dataset.table, dataset.ledger, None)._estimated[0]
    work = [Unit(number, number, 1, 6, ()) for number in range(3)]
    other = Presence(dataset.objects, 30)
    job = cast(Any, SimpleNamespace(units=work, table=dataset.table))

    def picker() -> StorePicker:
        stop = threading.Event()
        stop.set()  # so that nothing is waited for
        budget = Budget(dataset.table, dataset.ledger, int(1.5 * each))
        return StorePicker(job, dataset.ledger, Presence(dataset.objects, 30), budget, stop)

    mine = picker()
    other.hold(0)
    assert mine.take() == (None, True)
    other.release(0)  # it has failed
    other.hold(2)
    other.release(2)
    other.tell(state="stopped")
    other._try_write()
    assert mine.take() == (work[0], True)
    assert mine.take() == (None, True), "the one in hand may still turn out small"
    assert dataset.ledger.commit(dataset.attempt(0))
    assert mine.take() == (None, False)
    assert picker().take() == (None, False)


def test_units_that_would_fit_are_missing_and_not_left_out(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path, ((6,), (6,), (6,)), commit=[0])
    each = sum(file.bytes for file in dataset.done(0).files())
    for limit, ends in ((None, False), (int(2.5 * each), False), (int(1.5 * each), True)):
        runtime = Runtime(max_bytes=limit)
        if ends:
            outcome = outcome_of(dataset.ledger, dataset.table, cast(Any, None), runtime)
            assert (outcome.units, outcome.units_total) == (1, 3)
        else:
            with pytest.raises(StoreError, match="2 of 3 units are missing"):
                outcome_of(dataset.ledger, dataset.table, cast(Any, None), runtime)


# -- groups --------------------------------------------------------------------------------------


@pytest.fixture
def grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stored.Stored:
    """Nine units in three groups, none of them done."""
    monkeypatch.setattr(fmt, "GROUP_UNITS", 3)
    return stored.build(tmp_path / "out", ((2,),) * 9, commit=())


def picker_of(made: stored.Stored, name: str, share: UnitShare | None = None) -> StorePicker:
    job = SimpleNamespace(units=made.table.units, table=made.table)
    ledger = Ledger(made.objects)
    presence = Presence(made.objects, 30, ledger.layout)
    presence.name = name
    budget = Budget(made.table, ledger, None)
    return StorePicker(cast(Any, job), ledger, presence, budget, threading.Event(), share)


def took(picker: StorePicker) -> int:
    unit, _ = picker.take()
    assert unit is not None
    return unit.id


def test_a_worker_alone_takes_the_units_in_order_and_seals_what_is_done(
    grouped: stored.Stored,
) -> None:
    picker = picker_of(grouped, "a")
    for wanted in range(9):
        assert took(picker) == wanted
        picker._ledger.commit(grouped.attempt(wanted))
        picker.done(wanted)
        sealed = grouped.listed(fmt.SEGMENTS)
        assert sealed == [fmt.CURRENT.segment_key(group) for group in range(wanted // 3)]
    assert picker.take() == (None, False)
    assert len(grouped.listed(fmt.SEGMENTS)) == 3


def test_a_group_is_sealed_by_the_worker_that_commits_its_last_unit(
    grouped: stored.Stored,
) -> None:
    """Otherwise a thousand workers that find the group done would all read its records."""
    first, second = picker_of(grouped, "a"), picker_of(grouped, "b", UnitShare(0, 1))
    assert [took(first) for _ in range(4)] == [0, 1, 2, 3]  # it has left the first group
    for unit in (0, 1, 2):
        first._ledger.commit(grouped.attempt(unit))
        first.done(unit)
    assert took(second) == 4
    assert grouped.listed(fmt.SEGMENTS) == []
    assert took(first) == 5
    assert grouped.listed(fmt.SEGMENTS) == [fmt.CURRENT.segment_key(0)]


def test_workers_go_where_nobody_is(grouped: stored.Stored) -> None:
    first, second, third = (picker_of(grouped, name) for name in "abc")
    found = [took(picker) // 3 for picker in (first, second, third)]
    assert sorted(found) == [0, 1, 2]
    assert found[0] == 0
    keys = grouped.listed(fmt.WORKERS)
    assert keys == sorted(f"workers/{g:06d}/{n}.json" for g, n in zip(found, "abc", strict=True))


def test_workers_of_one_group_take_different_units(grouped: stored.Stored) -> None:
    pickers = [picker_of(grouped, name) for name in "abcdef"]
    units = [took(picker) for picker in pickers]
    assert len({*units}) == 6


def test_a_worker_asks_only_for_its_own_group(
    grouped: stored.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, picker = picker_of(grouped, "b"), picker_of(grouped, "a")
    for each in (others, picker):
        took(each)  # it has its place
    asked: list[str] = []
    listing = LocalObjects.list

    def listed(self: LocalObjects, prefix: str = "") -> Iterator[str]:
        asked.append(prefix)
        return listing(self, prefix)

    monkeypatch.setattr(LocalObjects, "list", listed)
    unit = took(picker)
    group = f"{unit // 3:06d}/"
    assert {*asked} == {f"done/{group}", f"workers/{group}"}
    assert len(asked) == 3, "done once, heartbeats before and after the claim"


def test_a_worker_that_joins_does_not_list_groups_that_have_a_segment(
    grouped: stored.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unit in range(7):
        grouped.ledger.commit(grouped.attempt(unit))
    assert grouped.ledger.complete(grouped.table) is False
    assert grouped.listed(fmt.SEGMENTS) == [fmt.CURRENT.segment_key(0), fmt.CURRENT.segment_key(1)]
    asked: list[str] = []
    listing = LocalObjects.list
    monkeypatch.setattr(
        LocalObjects, "list", lambda self, prefix="": asked.append(prefix) or listing(self, prefix)
    )
    picker = picker_of(grouped, "a")
    assert grouped.ledger.done_units() == {*range(7)}
    assert took(picker) == 7
    assert {prefix for prefix in asked if prefix.startswith("done/")} == {"done/000002/"}


def test_a_worker_that_moves_on_does_not_list_groups_others_finished(
    grouped: stored.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished groups have no workers, so a fleet would look into each of them first."""
    picker, other = picker_of(grouped, "a"), picker_of(grouped, "b")
    assert took(picker) == 0
    for unit in range(6):
        other._ledger.commit(grouped.attempt(unit))
    other._ledger.complete(grouped.table)
    asked: list[str] = []
    listing = LocalObjects.list
    monkeypatch.setattr(
        LocalObjects, "list", lambda self, prefix="": asked.append(prefix) or listing(self, prefix)
    )
    assert took(picker) == 6
    assert "done/000001/" not in asked


def test_shares_do_their_own_groups_and_then_help_at_the_far_end(grouped: stored.Stored) -> None:
    mine = picker_of(grouped, "a", UnitShare(1, 3))
    for wanted in (3, 4, 5):
        assert took(mine) == wanted
        grouped.ledger.commit(grouped.attempt(wanted))
        mine.done(wanted)
    assert took(mine) in (2, 8)


def test_a_worker_that_holds_units_of_two_groups_is_seen_in_both(grouped: stored.Stored) -> None:
    presence = Presence(grouped.objects, 30)
    presence.name = "a"
    presence.hold(2)
    presence.hold(3)
    other = Presence(grouped.objects, 30)
    assert [*other.holders(0)] == [*other.holders(1)] == ["a"]
    assert other.held_by_others() == {2, 3}
    presence.release(2)
    presence.hold(4)
    assert grouped.listed(fmt.WORKERS) == ["workers/000001/a.json"]
    presence.release(3)
    presence.release(4)
    presence.tell(tokens=1)
    presence.hold(8)
    presence.release(8)
    assert other.held_by_others() == {8}

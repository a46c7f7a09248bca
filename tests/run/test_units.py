"""Shares of the units: whose is whose, who helps where, and what is no share."""

import itertools

import pytest

from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.corpus.units import Unit
from spile.run.units import UnitShare, find_share


def units(count: int) -> list[Unit]:
    return [Unit(number, number, 1, 10, ()) for number in range(count)]


def taken(share: UnitShare, free: list[Unit], count: int) -> list[int]:
    """The order in which one machine does them all."""
    left, order = list(free), []
    while (unit := share.next_of(left, count)) is not None:
        left.remove(unit)
        order.append(unit.id)
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
    free = [u for u in units(12) if u.id in (3, 6, 7, 8, 10)]  # of 4 machines with 3 units each
    assert taken(UnitShare(0, 4), free, 12) == [8, 7, 3, 6, 10]
    assert taken(UnitShare(1, 4), free, 12)[:2] == [3, 8]


def test_helpers_of_equally_busy_machines_begin_at_different_ones() -> None:
    free = [u for u in units(16) if u.id >= 8]  # machines 2 and 3 of 4 have not begun
    first = [UnitShare(index, 4).next_of(free, 16) for index in (0, 1)]
    assert [unit and unit.id for unit in first] == [11, 11]
    free = [u for u in units(16) if 4 <= u.id < 8 or u.id >= 12]
    first = [UnitShare(index, 4).next_of(free, 16) for index in (0, 2)]
    assert [unit and unit.id for unit in first] == [7, 15]


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
        ("32/32", {}, "the last is 31/32"),
        ("0/0", {}, "out of range"),
        (None, {"MACHINE_ID": "8", "TOTAL_MACHINES": "8"}, "MACHINE_ID/TOTAL_MACHINES 8/8"),
        (None, {"MACHINE_ID": "x", "TOTAL_MACHINES": "8"}, "got 'x/8'"),
        (None, {"TOTAL_MACHINES": "8"}, "set MACHINE_ID"),
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

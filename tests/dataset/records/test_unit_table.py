"""Units as columns: the same values one by one and by column."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spile.core.errors import CorruptError
from spile.core.units import Span, Unit
from spile.dataset.records.unit_table import UnitColumns

SPAN = Span(file=0, first=3, count=2, start=5, stop=9, digest="ab", before=1)
UNITS = [
    Unit(0, 0, 2, 7, (SPAN,)),
    Unit(1, 2, 0, 1, (), (4, 5)),
    Unit(2, 2, 4, 9, (SPAN, replace(SPAN, doc=40, digest="")), (2,)),
]


def test_units_read_back_one_by_one() -> None:
    columns = UnitColumns.of(UNITS)
    assert [*columns] == UNITS
    assert (columns[-1], columns[1:]) == (UNITS[2], UNITS[1:])
    with pytest.raises(IndexError):
        columns[3]
    assert columns.tokens.tolist() == [7, 1, 9]
    assert pickle.loads(pickle.dumps(columns)) == columns == UnitColumns.of(UNITS)
    assert columns != UnitColumns.of(UNITS[:2])


def test_the_runs_of_documents_are_those_of_each_unit() -> None:
    unit, first, count = UnitColumns.of(UNITS).doc_runs
    assert [*zip(unit, first, count, strict=True)] == [(0, 0, 2), (1, 2, 0), (2, 2, 2), (2, 40, 2)]
    unit, first, count = UnitColumns.of(UNITS[:2]).doc_runs
    assert [*zip(unit, first, count, strict=True)] == [(0, 0, 2), (1, 2, 0)]


def test_tables_are_joined_one_after_the_other() -> None:
    parts = [UnitColumns.of(UNITS[:1]), UnitColumns.of(UNITS[1:], 1)]
    assert UnitColumns.joined(parts, parallel=2) == UnitColumns.of(UNITS)
    many = UnitColumns.joined([UnitColumns.of(UNITS)] * 2000)
    assert len(many) == 6000 and many[5999] == replace(UNITS[2], id=5999)
    assert many.part(3000, 3003) == UnitColumns.of(UNITS)


def test_units_are_merged_with_their_spans_and_skips() -> None:
    columns = UnitColumns.of([*UNITS, Unit(3, 10, 3, 5, (SPAN, SPAN), (11,))])
    following, moved = UNITS[2].spans, replace(SPAN, doc=10)
    assert [*columns.merged(np.array([4]))] == [
        Unit(0, 0, 9, 22, (SPAN, *following, moved, SPAN), (4, 5, 2, 11), (2, 0, 4, 3))
    ]
    # The documents of a unit that begins a merged one follow from that one's first.
    assert [*columns.merged(np.array([3, 4]))][1] == replace(columns[3], id=1)
    assert columns.merged(np.arange(1, 5)) == columns
    assert [*columns.merged(np.array([1, 3]))] == [
        UNITS[0],
        Unit(1, 2, 4, 10, following, (4, 5, 2), (0, 4)),
    ]
    assert [*columns.merged(np.array([], np.int64))] == []
    # What was merged before stays packed as it was.
    again = columns.merged(np.array([1, 3, 4])).merged(np.array([2, 3]))
    assert [unit.packed for unit in again] == [(2, 0, 4), ()]
    assert [unit.packed for unit in columns.merged(np.array([2, 4])).part(1, 2)] == [(4, 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"id": 1},
        {"tokens": -1},
        {"num_docs": 1.5},
        {"skip": ("a",)},
        {"first_doc": 1 << 60},
        {"spans": (Span(0, 0, -1),)},
        {"spans": (Span(0, 0, 1, doc=-1),)},
    ],
)
def test_an_invalid_unit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unit 0"):
        UnitColumns.of([replace(UNITS[0], **change)])


@pytest.mark.parametrize("name", [*UnitColumns.of(UNITS).columns])
def test_columns_that_do_not_fit_together_are_refused(name: str) -> None:
    good = UnitColumns.of([*UNITS[:2], replace(UNITS[2], packed=(1, 3))]).columns
    for spoilt in (good[name][:-1], good[name].astype(np.float32), None):
        columns = {**good, name: spoilt}
        broken = {key: column for key, column in columns.items() if column is not None}
        with pytest.raises(CorruptError, match="units/x"):
            UnitColumns(3, lambda broken=broken: broken, "units/x").tokens  # noqa: B018

"""Sizes, times and counts in few words."""

import pytest

from spile.core.humanize import clock, compared, lasting, plural, short


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0"), (7, "7"), (999, "999"), (999.7, "1.00k"), (1204, "1.20k"), (12_345, "12.3k"),
     (123_456, "123k"), (999_600, "1.00M"), (4_560_000, "4.56M"), (2e9, "2.00G"),
     (3.2e13, "32.00T")],
)  # fmt: skip
def test_a_count_takes_five_characters(count: float, said: str) -> None:
    assert short(count) == said


def test_times() -> None:
    assert [lasting(s) for s in (0.04, 9.9, 61, 600, 7000, 86400 * 3)] == [
        "0.0 s", "9.9 s", "61 s", "10.0 min", "1.9 h", "3.0 days",
    ]  # fmt: skip
    assert [clock(s) for s in (0, 7, 66, 3600 + 125, 500 * 3600)] == [
        "0:00", "0:07", "1:06", "1:02:05", "20d 20h",
    ]  # fmt: skip


def test_what_came_is_compared_with_what_was_expected() -> None:
    assert compared(100, 103) == "+3.0%" and compared(200, 150) == "-25.0%"
    assert compared(0, 0) == "0%" and compared(0, 5) == "expected 0"


def test_one_is_singular() -> None:
    assert [plural(n, "unit") for n in (0, 1, 2, 1024)] == [
        "0 units", "1 unit", "2 units", "1,024 units",
    ]  # fmt: skip

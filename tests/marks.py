"""Which of several cases of a kind the suite tries; `make chaos` tries them all."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """All cases; those that are not named here only with --chaos-full."""
    cases = list(cases)
    assert {*kept} <= {*cases}, "a case was renamed"
    return [case if case in kept else _left(case) for case in cases]


def _left(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)

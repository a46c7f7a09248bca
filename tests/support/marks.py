"""Choose which cases the suite tries; `make chaos` tries all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def some(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parametrize with all cases; without --chaos-full only `kept` run."""
    cases = list(cases)
    assert {*kept} <= {*cases}, "a case was renamed"
    return [case if case in kept else _left(case) for case in cases]


def _left(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)


def examples(count: int, **others: Any) -> Callable[[Any], Any]:
    """Let Hypothesis try `count` examples in `make chaos`, and a sixth of them in the suite."""
    if settings.get_current_profile_name() == "suite":
        count = min(count, max(8, count // 6))
    chosen = settings(**{"deadline": None, "max_examples": count, **others})
    return lambda test: pytest.mark.varied(chosen(test))

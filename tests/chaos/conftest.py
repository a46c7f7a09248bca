"""Check that no process outlives its test."""

from collections.abc import Iterator

import pytest

from chaos.harness import end_all


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture
def full(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--chaos-full"))

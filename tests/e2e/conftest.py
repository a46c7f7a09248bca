"""As in the chaos tests, no process is left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import quick
from chaos.conftest import full, no_process_is_left
from installing import build_wheel

__all__ = ["full", "no_process_is_left"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", autouse=True)
def programs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Most tests extract once more what others have extracted."""
    if pytestconfig.getoption("--chaos-full"):
        yield
        return
    with quick.shared_programs():
        yield

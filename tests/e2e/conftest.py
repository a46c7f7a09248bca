"""As in the chaos tests, no process is left behind."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import quick
from chaos.conftest import full, no_process_is_left
from installing import build_wheel

__all__ = ["full", "no_process_is_left"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all workers of a session."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "wheel"
        if not (made / "whole").exists():
            made.mkdir(exist_ok=True)
            build_wheel(made)
            (made / "whole").touch()
    (found,) = made.glob("*.whl")
    return found


@pytest.fixture(scope="module", autouse=True)
def programs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Most tests extract once more what others have extracted."""
    if pytestconfig.getoption("--chaos-full"):
        yield
        return
    with quick.shared_programs():
        yield

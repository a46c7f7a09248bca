"""As in the chaos tests, no process is left behind."""

from pathlib import Path

import pytest

from chaos.conftest import full, no_process_is_left
from support import quick
from support.installing import build_wheel

__all__ = ["full", "no_process_is_left"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all workers of a session."""
    (found,) = quick.made_once(tmp_path_factory, "wheel", _built).glob("*.whl")
    return found


def _built(folder: Path) -> None:
    folder.mkdir()
    build_wheel(folder)

"""As in the chaos tests, no process is left behind."""

from pathlib import Path

import pytest

from chaos.conftest import full, no_process_is_left
from installing import build_wheel

__all__ = ["full", "no_process_is_left"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))

"""Check, as the chaos tests do, that no process is left over."""

from pathlib import Path

import pytest

from chaos.conftest import full, no_process_is_left
from documented.scratch import Scratch, write_datasets, write_deep_model
from spile.core.cache_dir import cache_directory
from support import quick

__all__ = ["full", "no_process_is_left"]


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deep_model(tmp_path_factory.mktemp("deep") / "model")


@pytest.fixture(scope="session")
def dataset(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, by whichever of a session's processes comes first."""
    return quick.made_once(
        tmp_path_factory, "documented", lambda folder: write_datasets(deep, folder)
    )


@pytest.fixture
def scratch(deep: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPILE_CACHE", str(cache_directory()))  # the demo model is there
    monkeypatch.setenv("HOME", str(tmp_path))
    return Scratch.make(tmp_path, deep, dataset, monkeypatch)

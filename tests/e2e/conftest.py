"""Compiled programs are kept for the session: most of a short run is compilation."""

from collections.abc import Iterator

import pytest

from chaos.harness import cached_compilation, end_all


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cached_compilation(tmp_path_factory.mktemp("jax")):
        yield


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    end_all()

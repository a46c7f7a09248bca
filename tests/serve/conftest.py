"""Datasets that several of these tests show."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import web_page


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> web_page.Built:
    """A million tokens."""
    return web_page.build_large(tmp_path_factory.mktemp("large") / "out")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path) -> web_page.Built:
    """Thirty documents, one of them hostile."""
    out = tmp_path_factory.mktemp("web") / "out"
    return web_page.build_texts(out, model, web_page.texts(), keep=(*web_page.KEPT,))


@pytest.fixture(scope="module")
def server(built: web_page.Built) -> Iterator[web_page.Served]:
    with web_page.served(built.path) as found:
        web_page.read_all(found)
        yield found

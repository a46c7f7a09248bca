"""A Hub with a dataset of thirty files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import hub_server
from support.hub_server import FILES, Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    hub_server.use(server.url, tmp_path / "home", monkeypatch)
    card = b"---\nlicense: mit\n---\n"
    server.publish("me/texts", {**FILES, "README.md": card, "a b+c.txt": b"x"})
    yield server
    server.shutdown()
    server.server_close()

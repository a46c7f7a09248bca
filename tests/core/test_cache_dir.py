from pathlib import Path

import pytest

from spile.core.cache_dir import cache_directory


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "/home/a"}, "/home/a/.cache/spile"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/fast"}, "/fast/spile"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/fast", "SPILE_CACHE": "/own"}, "/own"),
        ({"HOME": "/home/a", "SPILE_CACHE": "~/own"}, "/home/a/own"),
        ({"HOME": "/home/a", "SPILE_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/a/.cache/spile"),
    ],
)
def test_the_nearest_variable_names_the_root(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPILE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)

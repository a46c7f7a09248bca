"""Libraries that only some uses need: imported, or refused with what to install."""

import json

import pytest

from spile.core.errors import ConfigError
from spile.core.libraries import import_library


def test_a_library_is_imported_or_the_error_says_what_to_install() -> None:
    assert import_library("json", "a test", "json") is json
    wanted = r"^--to x needs no_such_library \(No module .*\): pip install 'spile\[x\]'$"
    with pytest.raises(ConfigError, match=wanted):
        import_library("no_such_library", "--to x", "'spile[x]'")

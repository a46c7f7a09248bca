"""Libraries that only some uses need: imported when they are used."""

import importlib
from typing import Any

from spile.core.errors import ConfigError


def import_library(name: str, user: str, install: str) -> Any:
    """Import a library, or a module of it.

    Args:
        user: what needs the library, for the error.
        install: what pip installs.

    Raises:
        ConfigError: if it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{user} needs {name} ({error}): pip install {install}") from error

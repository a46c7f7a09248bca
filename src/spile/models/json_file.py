"""A JSON object from a file that a stranger wrote."""

import json
from pathlib import Path
from typing import Any

from spile.errors import InputError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        InputError: if there is no such file, or it holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value

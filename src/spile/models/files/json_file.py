"""A JSON object from a file that a stranger wrote."""

import json
from typing import Any

from spile.core.errors import InputError
from spile.objects.paths import AnyPath, size_of

_MAX_BYTES = 256 << 20  # the index of the largest checkpoints has a tenth of it
_MAX_DEPTH = 32


def read_json(path: AnyPath) -> dict[str, Any]:
    """The object in a file.

    Raises:
        InputError: if there is no such file, or it holds something else.
    """
    try:
        if size_of(path) > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [part for each in level for part in _parts(each)]
    if level:
        raise InputError(f"{path}: nested too deeply: {_MAX_DEPTH} levels at most")
    return value


def _parts(value: Any) -> list[Any]:
    """The objects and lists that are directly inside of one."""
    inside = value.values() if isinstance(value, dict) else value
    return [part for part in inside if isinstance(part, dict | list)]

"""Settings of an encoder in an untrusted file, JSON or YAML."""

import importlib
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from spile.core.errors import InputError
from spile.objects.paths import AnyPath, size_of

_MOST_YAML = 1 << 16


class SaeSettings:
    """Settings that record which of them were read.

    A key that is neither read nor known to leave the latents unchanged is refused: ignoring it
    might give latents other than the encoder's.
    """

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path, self.values, self._read = path, values, set[str]()

    def take(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self.values.get(name, default)

    def refuse(self, name: str, value: object, known: str) -> NoReturn:
        raise InputError(f"{self.path}: {name} is {str(value)[:100]}; known: {known}")

    def refuse_unknown(self, ignored: frozenset[str]) -> None:
        odd = sorted({*self.values} - self._read - ignored)
        if odd:
            raise InputError(
                f"{self.path}: unknown key {odd[0]!r}: whether it changes the latents is not "
                "known, so none are computed"
            )


def read_yaml(path: AnyPath) -> dict[str, Any]:
    """Return the mapping in an untrusted YAML file; empty if it holds anything else.

    Raises:
        InputError: if it is too large, or not YAML.
    """
    if (size := size_of(path)) > _MOST_YAML:
        raise InputError(f"{path}: has {size} bytes; at most {_MOST_YAML} are read")
    yaml: Any = importlib.import_module("yaml")  # (only when needed: a slow import)
    try:
        # Texts alone: without merge keys, a few lines cannot stand for gigabytes.
        found = yaml.load(path.read_bytes(), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: not YAML ({reason})") from None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

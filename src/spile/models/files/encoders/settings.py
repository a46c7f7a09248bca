"""Settings of an encoder in an untrusted JSON file."""

from collections.abc import Mapping
from typing import Any, NoReturn

from spile.core.errors import InputError


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

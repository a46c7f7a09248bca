"""The keys of a `config.json`, read through the row of its family: spellings, defaults, types."""

from collections.abc import Mapping
from typing import Any, cast

from spile.core.errors import InputError
from spile.models.config.family import Family
from spile.models.config.rope import positive

KINDS = ("full_attention", "sliding_attention")
MOST = 1 << 31  # larger than any number in a model: a config is untrusted


class ConfigKeys:
    """A config that records which of its keys are read."""

    def __init__(self, values: Mapping[str, Any], family: Family, where: str) -> None:
        self.values, self.family, self.where = values, family, where
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A key by its usual name, or the default of transformers if it is missing."""
        spelled = self.family.keys.get(key, key)
        names = (spelled,) if isinstance(spelled, str) else spelled
        self.seen.update(names)
        written = (self.values[name] for name in names if name in self.values)
        return next(written, self.family.defaults.get(key, default))

    def extra(self, key: str) -> Any:
        """A key that only some families read; the others refuse it."""
        return self.get(key) if key in self.family.reads else self.family.defaults.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < MOST:
            raise InputError(f"{self.where}: {key} must be a positive number, got {value!r}")
        return value

    def whole(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or not 0 <= value < MOST:
            raise InputError(f"{self.where}: {key} must be a number from 0, got {value!r}")
        return value

    def switch(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise InputError(f"{self.where}: {key} must be true or false, got {value!r}")
        return bool(value)

    def amount(self, key: str) -> float | None:
        value = self.extra(key)
        return None if value is None else positive(value, key, self.where)


def are_kinds(given: Any, kinds: tuple[Any, ...]) -> bool:
    return isinstance(given, list) and all(kind in kinds for kind in cast("list[Any]", given))

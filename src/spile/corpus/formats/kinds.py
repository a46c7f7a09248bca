"""What columns hold must be the same in every file of a corpus: found when it is cut, not later."""

from collections.abc import Mapping
from typing import Any

from spile.core.errors import InputError

NULL = "null"  # goes with every kind: whoever wrote the file saw no value


class ColumnKinds:
    """The columns of the files so far."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str, str]] = {}  # kind, as it is called there, where

    def check(self, where: str, columns: Mapping[str, tuple[str, str]]) -> None:
        """Compare a file's columns, each with its kind and what that is called there."""
        for name, (kind, called) in columns.items():
            if kind == NULL:
                continue
            known, before, first = self._known.setdefault(name, (kind, called, where))
            if kind != known:
                raise InputError(
                    f"{where}: {name!r} is {called} there, but {before} in {first}; a column must "
                    "be of one kind in all files: convert one of them, or give other files"
                )


def json_kind(value: Any) -> tuple[str, str]:
    """The kind of a JSON value, as of a column."""
    match value:
        case None:
            return NULL, NULL
        case bool():
            return "boolean", "boolean"
        case int() | float():
            return "number", "number"
        case str():
            return "text", "string"
        case list():
            return "list", "list"
        case _:
            return "struct", "object"


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """A row's value; `a.b` is b in the object under a, unless there is a key of that name."""
    if column in row or "." not in column:
        return row.get(column)
    head, _, rest = column.partition(".")
    inner = row.get(head)
    return value_at(inner, rest) if isinstance(inner, Mapping) else None  # pyright: ignore[reportUnknownArgumentType]

"""YAML as text: just what manifests need, so that writing one takes no library."""

from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}


def to_yaml(value: Mapping[str, Any]) -> str:
    """A document. Every text is quoted, so that none is mistaken for another kind."""
    return "\n".join(_block(value)) + "\n"


def _block(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        lines: list[str] = []
        for key, inner in value.items():  # type: ignore[reportUnknownVariableType]
            lines += _entry(f"{_key(str(key))}:", inner, nested="  ")  # type: ignore[reportUnknownArgumentType]
        return lines
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        lines = []
        for inner in value:  # type: ignore[reportUnknownVariableType]
            first, *rest = _block(inner)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        return lines
    return [_scalar(value)]


def _entry(key: str, value: Any, nested: str) -> list[str]:
    if isinstance(value, str) and _is_script(value):
        return [f"{key} |", *(nested + line for line in value.splitlines())]
    inner = _block(value)
    if len(inner) == 1 and not isinstance(value, Mapping | list | tuple) or not value:
        return [f"{key} {inner[0]}"]
    return [key, *(nested + line for line in inner)]


def _key(text: str) -> str:
    return text if text.isidentifier() and text.lower() not in _WORDS else _quoted(text)


_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, str):
        return _quoted(value)
    return "[]"


def _quoted(text: str) -> str:
    shown = (_PLAIN.get(c) or (c if c.isprintable() else _escaped(c)) for c in text)
    return f'"{"".join(shown)}"'


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\U{number:08x}"


def _is_script(text: str) -> bool:
    """Whether it can stand as lines: it ends with one newline, and nothing in it is special."""
    lines = text.split("\n")
    return (
        len(lines) > 2
        and lines[-1] == ""
        and lines[-2] != ""
        and not lines[0].startswith(" ")
        and all(line.isprintable() for line in lines)
        and bool(lines[0])
    )

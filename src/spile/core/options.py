"""Options: each is declared once, with its kind, bounds and help.

Flags, TOML keys, validation and `--help` all derive from that declaration.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar, cast

from spile.core.errors import ConfigError, name_parameters

_SUFFIXES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip

LIMIT = 1 << 63  # every number is smaller than this

_Class = TypeVar("_Class", bound=type[Any])
_FLAG = re.compile(r"`[^`]*`|--([a-z][a-z-]*)")  # a command as it is typed, or a flag


def option(
    help: str,
    *,
    default: Any = None,
    kind: str = "text",
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
    auto: bool = False,
    named: Mapping[str, int] | None = None,
    topic: str | None = None,
    common: bool = False,
) -> Any:
    """Declare one option.

    Kinds: text, list (texts joined by commas, or a list of texts; its flag may be given several
    times), count (an integer, `64k` allowed), size (bytes), share (above 0, to 1), switch.

    With `auto`, the value "auto" is allowed and means the default. `named`: words that are allowed
    in place of a number, and the number that each is stored as. `topic` begins a group of flags
    in the help, which the options after it belong to; `--help` explains `common` options, and
    `--help-all` every one.
    """
    meta = {"help": help, "kind": kind, "choices": choices, "minimum": minimum, "auto": auto}
    more = {"named": named or {}, "topic": topic, "common": common}
    return field(default=default, metadata={**meta, **more})


count = partial(option, kind="count", minimum=1)
switch = partial(option, kind="switch")


def flag_of(name: str) -> str:
    """Return the flag of a name: `seq_len` -> `--seq-len`."""
    return "--" + name.replace("_", "-")


def explained(options: _Class) -> _Class:
    """Add the help of each option to the docstring of their class, and name them in messages."""
    name_parameters(
        {
            f.name: None if f.metadata["kind"] == "switch" else f.metadata["choices"]
            for f in fields(options)
        }
    )
    told = [inspect.cleandoc(options.__doc__ or ""), "", "Args:"]
    for f in fields(options):
        text = _FLAG.sub(lambda m: m[1].replace("-", "_") if m[1] else m[0], f.metadata["help"])
        chosen = f", one of {', '.join(f.metadata['choices'])}" if f.metadata["choices"] else ""
        chosen += "; or a list of texts" if f.metadata["kind"] == "list" else ""
        told.append(
            textwrap.fill(
                f"{f.name}: {text}{chosen}",
                96,
                initial_indent="    ",
                subsequent_indent="        ",
                break_on_hyphens=False,
            )
        )
    options.__doc__ = "\n".join(told)
    return options


def parse_count(text: str) -> int:
    """Parse `4096`, `64k`, `1.5M` or `1GiB` into an integer."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    if not match or match[2].lower() not in _SUFFIXES:
        raise ValueError(text)
    suffix = match[2].lower()
    value = Fraction(match[1].replace("_", "")) * _SUFFIXES[suffix]
    if value.denominator != 1 and not suffix.endswith("ib"):  # 1.3GiB is not a whole number either
        raise ValueError(text)
    return int(value)


class Options:
    """Base of Recipe, Runtime and RayOptions: validates each field against its declaration."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value is not None:
                object.__setattr__(self, f.name, _checked(f, value))

    def __repr__(self) -> str:
        """Show the options that differ from their defaults."""
        given = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({', '.join(given)})"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def topics(cls) -> dict[str, list[dataclasses.Field[Any]]]:
        """Return the options by topic, in the order of their declaration."""
        found, topic = dict[str, list[dataclasses.Field[Any]]](), ""
        for f in fields(cls):  # type: ignore[arg-type]
            topic = f.metadata["topic"] or topic
            found.setdefault(topic, []).append(f)
        return found


def _checked(f: dataclasses.Field[Any], value: Any) -> Any:
    flag, meta = flag_of(f.name), f.metadata
    kind = meta["kind"]
    if value == "auto" and meta["auto"]:
        return None
    named = meta["named"]
    if isinstance(value, str) and value in named:
        return named[value]
    if type(value) is int and value in named.values():
        return value
    if kind in ("count", "size"):
        wanted = "a whole number such as 4096, 64k or 4M" if kind == "count" else "1GiB or 500MB"
        try:
            value = parse_count(value) if isinstance(value, str) else value
        except ValueError:
            raise ConfigError(f"{flag} must be {wanted}, got {shown(value)}") from None
        if type(value) is not int or not -LIMIT < value < LIMIT:
            raise ConfigError(f"{flag} must be {wanted}, got {shown(value)}")
        if meta["minimum"] is not None and value < meta["minimum"]:
            raise ConfigError(f"{flag} must be at least {meta['minimum']}, got {value}")
        return value
    if kind == "share":
        return _share(flag, value)
    if kind == "switch":
        if type(value) is not bool:
            raise ConfigError(f"{flag} must be true or false, got {shown(value)}")
        return value
    if kind == "list" and isinstance(value, list | tuple):
        texts = cast(list[Any], [*value])
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(f"{flag} must be a text or a list of texts, got {shown(value)}")
        return ",".join(texts)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{flag} must be a non-empty text, got {shown(value)}")
    if meta["choices"] and value not in meta["choices"]:
        chosen = ", ".join(meta["choices"])
        raise ConfigError(f"{flag} must be one of {chosen}; got {shown(value)}")
    return value


def _share(flag: str, value: Any) -> float:
    try:
        share = float(value) if type(value) in (str, int, float) else 0.0
    except (ValueError, OverflowError):
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{flag} must be a share above 0, at most 1, got {shown(value)}")
    return share


def shown(value: Any) -> str:
    """Format a value of any size as part of a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits for Python, or nested too deeply
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 200 else text[:199] + "…"


def listed(names: Iterable[str], otherwise: str = "none") -> str:
    """Format untrusted names as part of a line; at most the first 50."""
    every = [*names]
    some = [name if name.isprintable() and len(name) <= 100 else shown(name) for name in every[:50]]
    return ", ".join([*some, *(["…"] if len(every) > 50 else [])]) or otherwise

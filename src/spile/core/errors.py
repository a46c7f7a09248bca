"""Errors that Spile raises on purpose: one line for the user, an exit code for the script.

A message says what is wrong, where, and what to do. The command maps each class to its `exit_code`;
anything that is not a `SpileError` is a bug and keeps its traceback.

A message names an option by its flag, once (`--seq-len`). The command shows it so; Python shows the
parameter (`seq_len=`), because that is what its caller wrote.
"""

import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager

_LONGEST = 5000  # characters of a message
# Matches a command in backquotes, which stays as it is; or a flag with its value. A word after a
# flag is its value if it is quoted, a number or part of an example, or if a colon or verb follows.
_FLAG = re.compile(
    r"`[^`]*`"
    r"|(?P<example>e\.g\. |write )?(?<![\w-])--(?P<name>[a-z][a-z-]*[a-z])(?![\w-])"
    r"(?: (?P<quoted>'[^']*'|\"[^\"]*\"|\d[\d.,]*(?![\w.,]))"
    r"| (?P<value>(?!and |or )[^\s'\",]+(?=: | reads | --response-column ))"
    r"| (?P<word>[^\s'\",;]+)|(?P<colon>:))?"
)
_parameters: dict[str, Collection[str] | None] = {"out": ()}  # choices; None: a switch
_shows_flags = False  # of this process: a command runs


def name_parameters(parameters: Mapping[str, Collection[str] | None]) -> None:
    """Register parameters that Python has for flags, with their choices; None for a switch."""
    _parameters.update(parameters)


@contextmanager
def naming_flags() -> Generator[None, None, None]:
    """Show options in messages as flags, as a command does, and not as Python's parameters."""
    global _shows_flags
    before, _shows_flags = _shows_flags, True
    try:
        yield
    finally:
        _shows_flags = before


def for_python(message: str) -> str:
    """Name each option in a message as Python's parameter: `--seq-len 8` becomes `seq_len=8`."""
    return _FLAG.sub(_parameter, message)


def _parameter(found: re.Match[str]) -> str:
    name = (found["name"] or "").replace("-", "_")
    if name not in _parameters:
        return found[0]
    choices, word = _parameters[name], found["word"] or ""
    rest = f" {word}" if word else ""
    if choices is None:
        value, rest = "True", found[0].rpartition(f"--{found['name']}")[2]
    elif found["quoted"]:
        value = found["quoted"]
    elif found["value"] or word in choices or word[:1].isdigit() or (found["example"] and word):
        value, rest = f"{found['value'] or word!r}", ""
    elif found["colon"]:  # it is what the message is about
        return f"{found['example'] or ''}{name}:"
    else:
        value = ""
    return f"{found['example'] or ''}{name}={value}{rest}"


def printable(text: str) -> str:
    """Escape control characters, which untrusted text could use to drive the terminal."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


class SpileError(Exception):
    """Base of all deliberate errors.

    A very long message is cut in the middle, because its end says what to do.
    """

    exit_code = 3

    @property
    def message(self) -> str:
        """The message, which names options by their flags, whoever shows it."""
        return super().__str__()

    def __str__(self) -> str:
        text = self.message if _shows_flags else for_python(self.message)
        if len(text) <= _LONGEST:
            return text
        return f"{text[: _LONGEST - 1000]} … {text[-900:]}"


class ConfigError(SpileError):
    """A flag, a TOML value or a combination of them is not allowed."""

    exit_code = 2


class InputError(SpileError):
    """The model or the corpus cannot be used as it is."""

    exit_code = 2


class DriftError(SpileError):
    """The store was made by a different recipe than the one given.

    Attributes:
        differences: field name -> (value in the store, value given).
    """

    exit_code = 2

    def __init__(
        self,
        where: str,
        differences: Mapping[str, tuple[object, object]],
        *,
        holds_rows: bool = True,
        grows: bool = False,
        adds: Collection[str] = (),
    ) -> None:
        """Args:
        grows: whether --more would add the missing documents.
        adds: taps that --add-taps would add.
        """
        self.differences = dict(differences)
        diff = "; ".join(
            f"{name}: stored {old!r}, now {new!r}" for name, (old, new) in self.differences.items()
        )
        advice = "use the stored values or another --out"
        if grows:
            advice = "use the stored values, add documents with --more, or use another --out"
        elif adds and holds_rows:
            advice = (
                f"to add what is new to it, give --add-taps '{','.join(adds)}' in place of --taps; "
                "or use another --out"
            )
        elif not holds_rows:
            advice = (
                "no row is stored there yet: add --restart, or delete it, to begin with the new "
                "recipe"
            )
        super().__init__(f"{where} was made by another recipe ({diff}); {advice}")


class StoreError(SpileError):
    """The store cannot be read or written."""


class NotCreatedError(StoreError):
    """A record was not created, and this request can no longer create it.

    After any other error the record may exist: the answer may have been lost, or the request may
    still be under way.
    """


class CorruptError(StoreError):
    """Stored bytes are not what was written.

    Attributes:
        key: the object at fault.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        super().__init__(f"{key}: {reason}")


class DataError(SpileError):
    """The run produced or read values that it must not keep (a NaN, a changed file)."""


class LaunchError(SpileError):
    """A job could not be started, queried or stopped on other machines, at least in part."""


class Interrupted(SpileError):
    """A signal asked the run to stop; everything committed stays valid."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted; what is committed stays valid: run the same command again")


class WorldError(SpileError):
    """A process of the world failed, which ends the whole world.

    Attributes:
        process: the first process that failed.
    """

    def __init__(self, process: int, message: str, exit_code: int) -> None:
        self.process = process
        self.exit_code = exit_code
        super().__init__(message)

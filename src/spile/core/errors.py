"""Errors that Spile raises on purpose: one line for the user, an exit code for the script.

A message says what is wrong, where, and what to do. The command maps each class to its `exit_code`;
anything that is not a `SpileError` is a bug and keeps its traceback.
"""

from collections.abc import Mapping

_LONGEST = 5000  # characters of a message


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

    def __str__(self) -> str:
        text = super().__str__()
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
    ) -> None:
        """`grows`: whether --more would add the missing documents."""
        self.differences = dict(differences)
        diff = "; ".join(
            f"{name}: stored {old!r}, now {new!r}" for name, (old, new) in self.differences.items()
        )
        advice = "use the stored values or another --out"
        if grows:
            advice = "use the stored values, add documents with --more, or use another --out"
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

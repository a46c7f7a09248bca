"""Every error Spile raises on purpose: one line for the user, an exit code for the script.

A message says what is wrong, where, and what to do. The command maps each class to its
`exit_code`; anything that is not a `SpileError` is a bug and keeps its traceback.
"""

from collections.abc import Mapping


def printable(text: str) -> str:
    """A text in which nothing speaks to the terminal: it may hold a stranger's words."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


class SpileError(Exception):
    """Base of all deliberate errors."""

    exit_code = 3


class ConfigError(SpileError):
    """A flag, a TOML value or a combination of them is not allowed."""

    exit_code = 2


class InputError(SpileError):
    """The model or the corpus cannot be used as it is."""

    exit_code = 2


class DriftError(SpileError):
    """The store holds another recipe than the one asked for.

    Attributes:
        differences: field name -> (value in the store, value asked for).
    """

    exit_code = 2

    def __init__(
        self,
        where: str,
        differences: Mapping[str, tuple[object, object]],
        *,
        holds_rows: bool = True,
    ) -> None:
        self.differences = dict(differences)
        diff = "; ".join(
            f"{name}: stored {old!r}, now {new!r}" for name, (old, new) in self.differences.items()
        )
        advice = "use the stored values or another --out"
        if not holds_rows:
            advice = (
                "no row is stored there yet: add --restart, or delete it, to begin with the new "
                "recipe"
            )
        super().__init__(f"{where} was made by another recipe ({diff}); {advice}")


class StoreError(SpileError):
    """The store cannot be read or written."""


class NotCreatedError(StoreError):
    """A record was not created, and never will be by this request.

    Any other error may hide that it was: an answer can get lost, and a request can still be
    under way.
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
    """The run produced or met values it must not keep (a NaN, a changed file)."""


class LaunchError(SpileError):
    """What was to be started, asked or stopped elsewhere was not, or not all of it."""


class Interrupted(SpileError):
    """A signal asked the run to stop; everything committed stays valid."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("interrupted; what is committed stays valid: run the same command again")


class WorldError(SpileError):
    """A process of the world failed, and with it the world.

    Attributes:
        process: the one that failed first.
    """

    def __init__(self, process: int, message: str, exit_code: int) -> None:
        self.process = process
        self.exit_code = exit_code
        super().__init__(message)

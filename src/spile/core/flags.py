"""Declare the arguments of a command: each by its name and its help."""

import argparse
from typing import Any


class Flags:
    """Adds arguments to a parser, or to a group of one; `more` is as for `add_argument`."""

    def __init__(
        self,
        parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]
    ) -> None:
        self.parser = parser

    def group(self, title: str) -> "Flags":
        """Return a group of flags with a title of its own in the help."""
        return Flags(self.parser.add_argument_group(title))

    def either(self) -> "Flags":
        """Return a group of flags that exclude each other."""
        return Flags(self.parser.add_mutually_exclusive_group())

    def place(self, name: str, help: str | None = None, **more: Any) -> None:
        """Add an argument that is known by its place."""
        given: dict[str, Any] = {"metavar": name.upper(), **more}
        self.parser.add_argument(name, help=help, **given)

    def add(self, flag: str, help: str | None, metavar: str | None = None, **more: Any) -> None:
        """Add a flag with a value."""
        self.parser.add_argument(flag, help=help, metavar=metavar, **more)

    def number(self, flag: str, help: str, default: float | None = None, unit: str = "N") -> None:
        """Add a flag with a number: an integer, or SECONDS."""
        of = float if unit == "SECONDS" else int
        self.add(flag, help, unit, type=of, default=default)

    def many(
        self, flag: str, metavar: str, help: str | None = None, dest: str | None = None
    ) -> None:
        """Add a flag that may be given several times."""
        self.add(flag, help, metavar, action="append", default=[], dest=dest)

    def switch(self, flag: str, help: str, **more: Any) -> None:
        """Add a flag without a value: False unless it is given."""
        self.parser.add_argument(flag, action="store_true", help=help, **more)

"""What is kept of each document beside its rows: chosen columns, a preview, why it was left out.

Filled while a unit is read: first the row and the text, where there are any, then what became of
the document. Values are made fit for a table as they come, so that no large one is held.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from spile.core.errors import InputError
from spile.corpus.select import FILTERED

LONGEST = 4096  # characters of one value
MOST_CHARACTERS = 1 << 28  # of a unit
_INT64 = 1 << 63

_Item = TypeVar("_Item")


class About:
    """Of each document of a unit, in the order of reading."""

    def __init__(self, columns: tuple[str, ...] = (), preview: int = 0) -> None:
        """`preview`: how many characters of a text."""
        self.docs: list[int] = []
        self.skipped: list[str | None] = []  # why; None if it was read
        self.previews: list[str | None] = []
        self.values: dict[str, list[Any]] = {column: [] for column in columns}
        self._preview = preview
        self._characters = 0
        self._row: dict[str, Any] = {}
        self._rows: deque[dict[str, Any]] = deque()  # of documents that are being made
        self._text: str | None = None

    def saw_row(self, row: Mapping[str, Any]) -> None:
        """The row that the next document is made of."""
        self._row = {name: plain(row.get(name)) for name in self.values}

    def noted(self, found: Iterable[_Item]) -> Iterator[_Item]:
        """Each goes on with the row that was seen for it: some take long, and others follow."""
        for item in found:
            self._rows.append(self._row)
            self._row = {}
            yield item

    def forget(self) -> None:
        """The next document is not of this unit."""
        self._rows.popleft()
        self._text = None

    def saw_text(self, text: str) -> None:
        """The next document's text, read or not."""
        self._text = fitted(text[: self._preview]) if self._preview else None

    def add(self, doc: int, skipped: str | None) -> None:
        # Of what a filter leaves out many rows are never read: none of them says anything.
        kept = self._rows.popleft()
        row, text = ({}, None) if skipped == FILTERED else (kept, self._text)
        self.docs.append(doc)
        self.skipped.append(skipped)
        self.previews.append(text)
        for name, values in self.values.items():
            values.append(row.get(name))
        self._characters += sum(len(v) for v in (text, *row.values()) if isinstance(v, str))
        self._text = None
        if self._characters > MOST_CHARACTERS:
            raise InputError(
                f"what is kept of documents {self.docs[0]} to {doc} is more than "
                f"{MOST_CHARACTERS >> 20} million characters, too much for one unit: keep fewer "
                "columns with --keep, or a shorter --preview"
            )


class Names(About):
    """Only notes which columns rows have."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def saw_row(self, row: Mapping[str, Any]) -> None:
        self.found |= dict.fromkeys(row)


def plain(value: Any) -> bool | int | float | str | None:
    """A value as a column has it: what is nested or unknown becomes text, in JSON's spelling."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return value
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
        except (TypeError, ValueError, RecursionError):  # odd keys, or nested beyond all measure
            value = "…"
    return fitted(value if len(value) <= LONGEST else value[: LONGEST - 1] + "…")


def fitted(text: str) -> str:
    """Lone surrogates, which no table holds, become their escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

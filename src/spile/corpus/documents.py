"""One document of the corpus, on its way from the file to the packer.

Whatever belongs to a document travels with it in one record: its text or its token ids, who said
what, the columns of its row, a preview, or the reason why it is left out.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import xxhash

from spile.corpus.select import BLANK, EMPTY, FILTERED, TOO_LARGE

LONGEST = 4096  # characters of one value
_INT64 = 1 << 63

# Ranges of characters and the flag of whoever said them, in order.
Roles = tuple[tuple[int, int, int], ...]
# Where a row is from, for messages, and what it holds.
Row = tuple[str, Mapping[str, Any]]


class Oversized:
    """Stands for a text over --max-doc-bytes, of which nothing was read."""


OVERSIZED = Oversized()


@dataclass(slots=True)
class CorpusDocument:
    """A document, or the reason why there is none. Made once, and filled in on its way.

    Attributes:
        text: what the model will read; empty where the document came as token ids.
        roles: which characters of the text are whose.
        ids: token ids in int32, where the document came so.
        skipped: why it is left out; None if it is not.
        columns: the columns of its row, as the file has them; after `keep`, those that were asked
            for, fit for a table. None: it has no row.
        preview: the first characters of its text, left out or not; None if there is none.
        ordinal: its number in the corpus; in a sample, among those that are not left out.
        row: what its text is still to be made of.
        chat: the messages of which a template is still to make its text.
        where: the place it is from, where messages need it.
    """

    text: str = ""
    roles: Roles = ()
    ids: np.ndarray | None = None
    skipped: str | None = None
    columns: Mapping[str, Any] | None = field(default=None, compare=False)
    preview: str | None = None
    ordinal: int = -1
    row: Row | None = None
    chat: Sequence[Mapping[str, Any]] | None = None
    where: str = field(default="", compare=False)

    @classmethod
    def of_text(cls, text: str | None, columns: Mapping[str, Any] | None = None) -> Self:
        """A document of a plain text."""
        if text is None:
            return cls(skipped="null", columns=columns)
        if not text.strip():
            return cls(skipped=BLANK if text else EMPTY, columns=columns)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, as JSON escapes can spell
            return cls(skipped="not UTF-8", columns=columns)
        return cls(text, columns=columns)

    @classmethod
    def of_bytes(cls, data: bytes | Oversized | None, *, cut_mark: bool = False) -> Self:
        """A document of a text's bytes, as a line or a column has them.

        `cut_mark`: whether U+FEFF before it is a byte-order mark, and not a part of the text.
        """
        if data is None:
            return cls(skipped="null")
        if isinstance(data, Oversized):
            return cls(skipped=TOO_LARGE)
        try:
            text = data.decode("utf-8")
            return cls.of_text(text.removeprefix("\ufeff") if cut_mark else text)
        except UnicodeDecodeError:
            return cls(skipped="not UTF-8")

    @property
    def content(self) -> bytes:
        """What documents are told apart by: the text, or the ids."""
        return self.text.encode() if self.ids is None else self.ids.tobytes()

    @property
    def characters(self) -> int:
        """Of its preview and the values of its columns."""
        values = (self.preview, *(self.columns or {}).values())
        return sum(len(value) for value in values if isinstance(value, str))

    def with_columns(self, columns: Mapping[str, Any] | None) -> Self:
        """Itself, with the columns of the row that it was made of."""
        self.columns = columns
        return self

    def keep(self, columns: tuple[str, ...], preview: int) -> None:
        """Leave of its row only what is kept beside the dataset's rows.

        Args:
            columns: those that are kept.
            preview: how many characters of its text.
        """
        # A filter skips many rows unread: none of those that it leaves out says anything.
        row: Mapping[str, Any] = {} if self.skipped == FILTERED else self.columns or {}
        self.columns = {name: plain(row.get(name)) for name in columns} if columns else None
        if preview and self.skipped is None:
            self.preview = fitted(self.text[:preview])

    def skip(self, reason: str) -> None:
        """Leave it out, and hold nothing any longer of what the model would read."""
        self.text, self.roles, self.ids, self.row, self.chat = "", (), None, None, None
        self.skipped = reason


@dataclass(frozen=True)
class Documents:
    """The documents of a unit or of a sample, in the order of reading, left out or not."""

    every: list[CorpusDocument]
    columns: tuple[str, ...] = ()  # that are kept

    def first(self, count: int | None) -> "Documents":
        """The first usable ones alone; None: all."""
        return self if count is None else Documents(self.usable[:count], self.columns)

    @cached_property
    def usable(self) -> list[CorpusDocument]:
        return [document for document in self.every if document.skipped is None]

    @property
    def ordinals(self) -> list[int]:
        return [document.ordinal for document in self.usable]

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.usable]

    @property
    def ids(self) -> list[np.ndarray]:
        """Token ids of each usable document; empty where they are texts."""
        return [document.ids for document in self.usable if document.ids is not None]

    @property
    def skipped(self) -> Counter[str]:
        """How many are left out, by reason."""
        return Counter(d.skipped for d in self.every if d.skipped is not None)

    def kept(self, column: str) -> list[Any]:
        """The values of a column, of every document."""
        return [document.columns and document.columns[column] for document in self.every]

    def digest(self) -> str:
        """A hash of exactly what was read; stored with the unit."""
        digest = xxhash.xxh3_128()
        for document in self.usable:
            data = document.content
            digest.update(f"{document.ordinal} {len(data)}\n".encode() + data)
        return digest.hexdigest()


def plain(value: Any) -> bool | int | float | str | None:
    """A value as a column of a table has it: nested and unknown ones become text, as JSON."""
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

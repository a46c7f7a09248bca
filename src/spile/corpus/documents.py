"""One document of the corpus, on its way from the file to the packer.

Whatever belongs to a document travels with it in one record: its text or its token ids, who said
what, the columns of its row, a preview, or the reason why it is left out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from spile.corpus.select import FILTERED, TOO_LARGE

LONGEST = 4096  # characters of one value
_INT64 = 1 << 63

# Ranges of characters and the flag of whoever said them, in order.
Roles = tuple[tuple[int, int, int], ...]
# Where a row is from, for messages, and what it holds.
Row = tuple[str, Mapping[str, Any]]


class Oversized:
    """Stands for a text over --max-doc-bytes, of which nothing was read."""


OVERSIZED = Oversized()


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A document, or the reason why there is none.

    Attributes:
        text: what the model will read; empty where the document came as token ids.
        roles: which characters of the text are whose.
        ids: token ids in int32, where the document came so.
        skipped: why it is left out; None if it is not.
        columns: the columns of its row, as the file has them; once it is `kept`, those that were
            asked for, fit for a table.
        preview: the first characters of its text, left out or not; None if there is none.
        ordinal: its number in the corpus; in a sample, among those that are not left out.
        row: what its text is still to be made of.
    """

    text: str = ""
    roles: Roles = ()
    ids: np.ndarray | None = None
    skipped: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    preview: str | None = None
    ordinal: int = -1
    row: Row | None = None

    @classmethod
    def of_text(cls, text: str | None) -> "CorpusDocument":
        """A document of a plain text."""
        if text is None:
            return cls(skipped="null")
        if not text.strip():
            return cls(skipped="empty")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, as JSON escapes can spell
            return cls(skipped="not UTF-8")
        return cls(text)

    @classmethod
    def of_bytes(cls, data: bytes | Oversized | None) -> "CorpusDocument":
        """A document of a text's bytes, as a line or a column has them."""
        if data is None:
            return cls(skipped="null")
        if isinstance(data, Oversized):
            return cls(skipped=TOO_LARGE)
        try:
            return cls.of_text(data.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError:
            return cls(skipped="not UTF-8")

    @property
    def content(self) -> bytes:
        """What documents are told apart by: the text, or the ids."""
        return self.text.encode() if self.ids is None else self.ids.tobytes()

    def skip(self, reason: str) -> "CorpusDocument":
        """The same, left out: nothing of what the model would read is held any longer."""
        return replace(self, text="", roles=(), ids=None, row=None, skipped=reason)

    @property
    def characters(self) -> int:
        """Of its preview and the values of its columns."""
        values = (self.preview, *self.columns.values())
        return sum(len(value) for value in values if isinstance(value, str))

    def kept(self, ordinal: int, columns: tuple[str, ...], preview: int) -> "CorpusDocument":
        """The same, with its number and only what is kept beside its rows.

        Args:
            columns: those that are kept of its row.
            preview: how many characters of its text.
        """
        # A filter skips many rows unread: none of those that it leaves out says anything.
        read = self.skipped != FILTERED
        values = {name: plain(self.columns.get(name)) if read else None for name in columns}
        shown = fitted(self.text[:preview]) if preview and self.skipped is None else None
        return CorpusDocument(
            self.text,
            self.roles,
            self.ids,
            self.skipped,
            columns=values,
            preview=shown,
            ordinal=ordinal,
        )


@dataclass(frozen=True)
class Documents:
    """The documents of a unit or of a sample, in the order of reading, left out or not."""

    every: list[CorpusDocument]
    columns: tuple[str, ...] = ()  # that are kept

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

    def digest(self) -> str:
        """A hash of exactly what was read; stored with the unit."""
        digest = xxhash.xxh3_128()
        for document, data in zip(self.usable, self.contents(), strict=True):
            digest.update(f"{document.ordinal} {len(data)}\n".encode() + data)
        return digest.hexdigest()

    def contents(self) -> Iterator[bytes]:
        return (document.content for document in self.usable)


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

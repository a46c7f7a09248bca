"""One document of the corpus, on its way from the file to the packer.

One record holds everything about a document: its text or its token ids, the speaker of each span,
the columns of its row, a preview, or the reason it is skipped.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import xxhash

from spile.core.disagreement import DISAGREEMENT_COLUMNS
from spile.core.identity import summed_digest
from spile.core.index import DOCUMENT_COLUMNS
from spile.corpus.select import BLANK, EMPTY, FILTERED, TOO_LARGE

LONGEST = 4096  # characters of one value
NO_COLUMNS = "none"  # the value of --keep that keeps none
_INT64 = 1 << 63

# Ranges of characters (start, stop) in order, each with a number: of roles the speaker's flag, of
# spans the number of the span, which may have several ranges.
Roles = tuple[tuple[int, int, int], ...]
# The place of a row, for messages, and its values.
Row = tuple[str, Mapping[str, Any]]


class Oversized:
    """Placeholder for a text over --max-doc-bytes, which was not read."""


OVERSIZED = Oversized()


@dataclass(slots=True)
class CorpusDocument:
    """A document, or the reason it is skipped. Made once, and filled in on its way.

    Attributes:
        text: the text for the model; empty if the document came as token ids.
        roles: the speaker of each range of the text.
        spans: the ranges that a message has, or that a column gives, for `--pool`; None if they
            are not known.
        ids: token ids in int32, if the document came as such.
        said: the flag of each id's speaker, if it came with them.
        logprobs: an engine's log-probability of each id, or NaN, if it came with them.
        skipped: the reason it is skipped; None if it is not.
        columns: the columns of its row, as in the file; after `keep`, only the chosen ones, in
            types that fit a table. None if it has no row.
        preview: the first characters of its text, skipped or not; None if there is none.
        ordinal: its number in the corpus; in a sample, its number among those not skipped.
        row: the row its text is still to be made from.
        chat: the messages a template is still to render.
        tools: descriptions of tools, for the template to show with the messages.
        where: the place it came from, where messages need it.
        refusal: what the chat template said if it refused the chat.
        unshown: a tool that the chat names and the template left out.
    """

    text: str = ""
    roles: Roles = ()
    spans: Roles | None = None
    ids: np.ndarray | None = None
    said: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    skipped: str | None = None
    columns: Mapping[str, Any] | None = field(default=None, compare=False)
    preview: str | None = None
    ordinal: int = -1
    row: Row | None = None
    chat: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    where: str = field(default="", compare=False)
    refusal: str = field(default="", compare=False)
    unshown: str = field(default="", compare=False)

    @classmethod
    def of_text(cls, text: str | None, columns: Mapping[str, Any] | None = None) -> Self:
        """Make a document from a plain text."""
        if text is None:
            return cls(skipped="null", columns=columns)
        if not text.strip():
            return cls(skipped=BLANK if text else EMPTY, columns=columns)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which JSON escapes can spell
            return cls(skipped="not UTF-8", columns=columns)
        return cls(text, columns=columns)

    @classmethod
    def of_bytes(cls, data: bytes | Oversized | None, *, cut_mark: bool = False) -> Self:
        """Make a document from the bytes of a text, as a line or a column holds them.

        `cut_mark`: whether a leading U+FEFF is a byte-order mark, and not a part of the text.
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
        """The bytes that identify a document: its text, its ids, or a chat that is not rendered."""
        if self.chat is not None:
            return json.dumps([self.chat, self.tools], sort_keys=True, default=str).encode()
        return self.text.encode() if self.ids is None else self.ids.tobytes()

    @property
    def characters(self) -> int:
        """The number of characters in its preview and the values of its columns."""
        values = (self.preview, *(self.columns or {}).values())
        return sum(len(value) for value in values if isinstance(value, str))

    def with_columns(self, columns: Mapping[str, Any] | None) -> Self:
        """Set the columns of the row it was made from, and return the document."""
        self.columns = columns
        return self

    def keep(self, columns: tuple[str, ...], preview: int) -> None:
        """Reduce its row to the parts that are stored in the documents table.

        Args:
            columns: the columns to keep.
            preview: how many characters of its text to keep.
        """
        # A filter skips many rows unread, so no filtered document keeps any column.
        row: Mapping[str, Any] = {} if self.skipped == FILTERED else self.columns or {}
        self.columns = {name: plain(row.get(name)) for name in columns} if columns else None
        if preview and self.skipped is None:
            self.preview = fitted(self.text[:preview])

    def skip(self, reason: str) -> None:
        """Skip the document and drop everything the model would read."""
        self.text, self.roles, self.ids, self.row, self.chat = "", (), None, None, None
        self.spans = self.said = self.logprobs = None
        self.tools = None
        self.skipped = reason


@dataclass(frozen=True)
class Documents:
    """The documents of a unit or of a sample, in the order of reading, skipped or not."""

    every: list[CorpusDocument]
    columns: tuple[str, ...] = ()  # the kept columns

    def first(self, count: int | None) -> "Documents":
        """Return only the first `count` usable documents; all documents if it is None."""
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
        """Token ids of each usable document; empty if the documents are texts."""
        return [document.ids for document in self.usable if document.ids is not None]

    @property
    def skipped(self) -> Counter[str]:
        """The number of skipped documents, by reason."""
        return Counter(d.skipped for d in self.every if d.skipped is not None)

    def kept(self, column: str) -> list[Any]:
        """Return the values of a column, one for every document."""
        return [document.columns and document.columns[column] for document in self.every]

    def digest(self) -> str:
        """Return a hash of exactly the documents that were read; it is stored with the unit.

        It is the sum of their hashes, so that of a merged unit is the sum of those of its units.
        """
        hashes = (xxhash.xxh3_128_intdigest(document.content) for document in self.usable)
        return summed_digest(hashes)


def can_be_named(name: str) -> bool:
    """Return whether `--keep` could name a column: on resuming, the stored names are parsed so."""
    if name in ("", NO_COLUMNS, *DOCUMENT_COLUMNS, *DISAGREEMENT_COLUMNS):
        return False
    return name == name.strip() and name.isprintable() and "," not in name


def plain(value: Any) -> bool | int | float | str | None:
    """Convert a value for a column of a table: nested and unknown types become JSON text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return value
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
        except (TypeError, ValueError, RecursionError):  # odd keys, or nested too deeply
            value = "…"
    return fitted(value if len(value) <= LONGEST else value[: LONGEST - 1] + "…")


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return a row's value; `a.b` is key b of the object under a, unless a key `a.b` exists."""
    if column in row or "." not in column:
        return row.get(column)
    head, _, rest = column.partition(".")
    inner = row.get(head)
    return value_at(cast(Mapping[str, Any], inner), rest) if isinstance(inner, Mapping) else None


def fitted(text: str) -> str:
    """Replace lone surrogates, which no table can hold, by their escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

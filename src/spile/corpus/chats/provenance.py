"""Strings that track which message each of their characters came from.

A chat template cuts, joins and trims the texts of messages. If it is given the messages as
`OwnedText`, its output is an `OwnedText` too: it equals the plain text in every comparison, and
also holds the owner of each character. An operation that would lose an owner raises an error
instead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, cast

from spile.core.errors import InputError

Owner = tuple[int, int]  # the message, and the part of it; part 0 is everything without a number
OwnerRuns = tuple[tuple[int, int, Owner], ...]  # start, stop, owner: in order, none empty

# Methods a template may call on a text. Those of ASKED return a boolean or a number; those of
# FOLLOWED are implemented below.
# fmt: off
ASKED = frozenset({
    "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
    "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "rfind",
    "rindex", "startswith",
})
FOLLOWED = frozenset({
    "capitalize", "casefold", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rpartition", "rsplit", "rstrip", "split", "splitlines", "strip",
    "swapcase", "title", "upper",
})
# fmt: on


class OwnedText(str):
    """A text with the owners of its characters. Characters that no run covers have no owner."""

    __slots__ = ("_runs",)
    _runs: OwnerRuns

    def __new__(cls, text: str, runs: OwnerRuns = ()) -> "OwnedText":
        self = super().__new__(cls, text)
        self._runs = runs
        return self

    @property
    def runs(self) -> OwnerRuns:
        return self._runs

    def __str__(self) -> str:
        return self  # `str(text)` must not lose the owners

    def __getitem__(self, key: SupportsIndex | slice) -> "OwnedText":
        if not isinstance(key, slice):
            place = range(len(self))[key]
            key = slice(place, place + 1)
        start, stop, step = key.indices(len(self))
        if step != 1:
            return joined(self[place] for place in range(start, stop, step))
        return OwnedText(
            super().__getitem__(slice(start, stop)),
            tuple(
                (max(low, start) - start, min(high, stop) - start, owner)
                for low, high, owner in self._runs
                if low < stop and high > start and start < stop
            ),
        )

    def __iter__(self) -> Iterator["OwnedText"]:
        return (self[place] for place in range(len(self)))

    def __add__(self, other: str) -> "OwnedText":
        return joined((self, other))

    def __radd__(self, other: str) -> "OwnedText":
        return joined((other, self))

    def __mul__(self, count: SupportsIndex) -> str:
        return self.unowned("repeats").__mul__(count)

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def __mod__(self, value: Any) -> str:
        return self.unowned("formats").__mod__(value)

    def unowned(self, act: str) -> str:
        """Return the plain text for an operation that cannot be tracked; refuse an owned one."""
        if self._runs:
            raise InputError(
                f"it {act} a message's text, so its speaker cannot be determined; give a "
                "simpler template with --template"
            )
        return str.__str__(self)

    def lstrip(self, chars: str | None = None, /) -> "OwnedText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "OwnedText":
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> "OwnedText":
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> "OwnedText":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> "OwnedText":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines: list[str] = []
        start = 0
        for line, whole in zip(super().splitlines(keepends), super().splitlines(True), strict=True):
            lines.append(self[start : start + len(line)])
            start += len(whole)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head = len(super().partition(sep)[0])
        return self[:head], self[head : head + len(sep)], self[head + len(sep) :]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        tail = len(self) - len(super().rpartition(sep)[2])
        cut = max(tail - len(sep), 0)
        return self[:cut], self[cut:tail], self[tail:]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "OwnedText":
        if not old:
            return lifted(self.unowned("replaces nothing in").replace(old, new, count))
        return lifted(new).join(self.split(old, count))

    def join(self, parts: Iterable[str], /) -> "OwnedText":
        pieces: list[str] = []
        for part in parts:
            pieces += (self, part) if pieces else (part,)
        return joined(pieces)

    def capitalize(self) -> "OwnedText":
        return self._cased(str.capitalize)

    def casefold(self) -> "OwnedText":
        return self._cased(str.casefold)

    def lower(self) -> "OwnedText":
        return self._cased(str.lower)

    def swapcase(self) -> "OwnedText":
        return self._cased(str.swapcase)

    def title(self) -> "OwnedText":
        return self._cased(str.title)

    def upper(self) -> "OwnedText":
        return self._cased(str.upper)

    def _pieces(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        """Return slices of this text for pieces that were cut from it, one after the other."""
        found: list[str] = []
        start = 0
        for piece in pieces:
            if sep is None:  # any amount of white space separated them
                start = self.index(piece, start)
            found.append(self[start : start + len(piece)])
            start += len(piece) + len(sep or "")
        return found

    def _cased(self, change: Callable[[str], str]) -> "OwnedText":
        text = change(self)
        if len(text) == len(self):  # no character has a shorter other case, so positions stay
            return OwnedText(text, self._runs)
        owner = sole_owner([self], "changes the case of")
        return lifted(text) if owner is None else owned_whole(text, owner)


def owned_whole(text: str, owner: Owner) -> OwnedText:
    return OwnedText(text, ((0, len(text), owner),) if text else ())


def lifted(text: str) -> OwnedText:
    """Return the same text as `OwnedText`, so that owned texts can be joined to it."""
    return text if isinstance(text, OwnedText) else OwnedText(text)


def joined(parts: Iterable[str]) -> OwnedText:
    pieces = list(parts)
    runs: list[tuple[int, int, Owner]] = []
    place = 0
    for piece in pieces:
        for start, stop, owner in piece.runs if isinstance(piece, OwnedText) else ():
            if runs and runs[-1][1:] == (place + start, owner):
                start = runs.pop()[0] - place
            runs.append((place + start, place + stop, owner))
        place += len(piece)
    return OwnedText("".join(pieces), tuple(runs))


def owned(value: Any, owner: Owner) -> Any:
    """Return a JSON value in which every text has the given owner."""
    if isinstance(value, str):
        return owned_whole(value, owner)
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {owned(key, owner): owned(item, owner) for key, item in items}
    if isinstance(value, list):
        return [owned(item, owner) for item in cast(list[Any], value)]
    return value


def sole_owner(texts: Iterable[str], act: str) -> Owner | None:
    """Return the one owner of all owned texts; refuse partly owned texts, and two owners."""
    owners: set[Owner] = set()
    partly = False
    for text in texts:
        runs = text.runs if isinstance(text, OwnedText) else ()
        owners.update(owner for _, _, owner in runs)
        partly |= bool(runs) and sum(stop - start for start, stop, _ in runs) < len(text)
    messages = {message for message, _ in owners}
    if partly or len(messages) > 1:
        raise InputError(
            f"it {act} a text that belongs only in part to one message, so its speaker cannot "
            "be determined; give a simpler template with --template"
        )
    return owners.pop() if len(owners) == 1 else next(((message, 0) for message in messages), None)

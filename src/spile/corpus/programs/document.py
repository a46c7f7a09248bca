"""A document as a program gives it: checked, and in one spelling.

It is a text, or a mapping with one of `text`, `messages` (for a chat template) and `segments`
(pieces with roles, which joined are the text); the mapping's other keys are metadata.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import xxhash

from spile.core.config import canonical_json
from spile.core.errors import InputError
from spile.core.index import ROLES

_KINDS = {
    "text": "a text",
    "messages": "a list of mappings, each with a role",
    "segments": f"a list of [role, text], the role one of {', '.join(ROLES)}",
}
_MAX_DEPTH = 32
_LIMIT = 1 << 63
_SHOWN = 12  # of keys, in a message


@dataclass(frozen=True)
class Document:
    """What a program gave.

    Attributes:
        text: None where messages take its place, or where the program gave nothing.
        segments: role and text of each piece; joined they are the text. Empty if not given so.
        messages: a chat, of which the model's template makes a text. Empty if not given so.
        metadata: all other keys, as JSON has them.
    """

    text: str | None
    segments: tuple[tuple[str, str], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def roles(self) -> tuple[tuple[int, int, str], ...]:
        """Which characters of the text are whose: start, stop and role of each segment."""
        stops = list(itertools.accumulate(len(text) for _, text in self.segments))
        places = zip([0, *stops], stops, self.segments, strict=False)
        return tuple((start, stop, role) for start, stop, (role, _) in places)

    def canonical(self) -> bytes:
        """All of it, in the one spelling that hashes and sizes are of."""
        parts = [self.text, self.segments, self.messages, self.metadata]
        return canonical_json(parts)


def digest_of(documents: Iterable[Document]) -> str:
    """A hash of documents and their order."""
    digest = xxhash.xxh3_128()
    for document in documents:
        hash_into(digest, document)
    return digest.hexdigest()


def hash_into(digest: xxhash.xxh3_128, document: Document) -> int:
    """Add a document to a hash; returns its size in bytes."""
    data = document.canonical()
    digest.update(data + b"\n")  # which its JSON has nowhere
    return len(data)


def checked_document(
    where: str, value: Any, text_column: str | None = None, messages_column: str | None = None
) -> Document:
    """A document of what was given as one; a column's name chooses among a mapping's keys.

    Raises:
        InputError: begins with `where`.
    """
    if value is None or isinstance(value, str | bytes):
        return Document(clean(where, value))
    if not isinstance(value, Mapping):
        raise InputError(
            f"{where}: is {type(value).__name__}; a document is a text, or a mapping with "
            f"{', '.join(_KINDS)}"
        )
    fields: dict[str, Any] = clean(where, cast(Any, value))
    kind, key = _kind(where, fields, {"text": text_column, "messages": messages_column})
    content: Any = fields.pop(key)
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a text may be counted and left out; what describes it may not
        raise InputError(f"{where}: its metadata is not UTF-8 text; leave it out") from None
    if kind == "text" and (content is None or isinstance(content, str)):
        return Document(content, metadata=fields)
    if kind == "messages" and _are_messages(content):
        return Document(None, messages=tuple(content), metadata=fields)
    if kind == "segments" and _are_segments(content):
        segments = tuple((role, text) for role, text in content)
        return Document("".join(text for _, text in segments), segments, metadata=fields)
    raise InputError(f"{where}: {key!r} is not {_KINDS[kind]}")


def _kind(
    where: str, fields: Mapping[str, Any], columns: Mapping[str, str | None]
) -> tuple[str, str]:
    """Which of the three a mapping is, and the key that holds it."""
    found = [(kind, column) for kind, column in columns.items() if column]
    found = found or [(key, key) for key in _KINDS if key in fields]
    if len(found) == 1 and found[0][1] in fields:
        return found[0]
    has = ", ".join(map(repr, list(fields)[:_SHOWN])) or "no keys"
    wanted = repr(found[0][1]) if len(found) == 1 else f"one of {', '.join(_KINDS)}"
    raise InputError(
        f"{where}: has {has}; it must have {wanted}: choose with --text-column or --messages"
    )


def _are_messages(value: Any) -> bool:
    parts = cast(list[Any], value) if isinstance(value, list) else []
    return bool(parts) and all(
        isinstance(part, dict) and isinstance(cast(dict[str, Any], part).get("role"), str)
        for part in parts
    )


def _are_segments(value: Any) -> bool:
    parts = cast(list[Any], value) if isinstance(value, list) else [None]
    for part in parts:
        match part:
            case [str(role), str()] if role in ROLES:
                continue
            case _:
                return False
    return True


def clean(where: str, value: Any, depth: int = 0) -> Any:
    """A value as JSON has it: numpy's become Python's, bytes are UTF-8, tuples are lists.

    Bytes that are not UTF-8 become lone surrogates, as in a text that JSON spelled so.
    """
    if depth > _MAX_DEPTH:
        raise InputError(f"{where}: nested too deeply: {_MAX_DEPTH} levels at most")
    match value:
        case np.generic() | np.ndarray():
            return clean(where, cast(Any, value).tolist(), depth + 1)
        case None | bool() | str():
            return value
        case int() if -_LIMIT <= value < _LIMIT:
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case bytes():
            return value.decode("utf-8", "surrogateescape")
        case list() | tuple():
            return [clean(where, part, depth + 1) for part in cast(list[Any], value)]
        case Mapping():
            parts = cast(Mapping[Any, Any], value)
            if all(isinstance(key, str) for key in parts):
                return {
                    str(key): clean(f"{where}: {key!r}", part, depth + 1)
                    for key, part in parts.items()
                }
            raise InputError(f"{where}: has keys that are not texts")
        case _:
            raise InputError(
                f"{where}: holds {type(value).__name__} that JSON cannot: leave it out, or give "
                "text, numbers below 2**63, or lists and mappings of them"
            )

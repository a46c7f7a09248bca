"""Spans of characters, as a column of the corpus gives them, and the tokens that each has."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from spile.core.index import ROLES
from spile.corpus.documents import Roles

NO_SPANS = "unusable spans"  # the reason a document is skipped
NONE = -1  # the span of tokens that belong to none
_NAMES = (("begin", "end"), ("start", "end"), ("start", "stop"), ("begin", "stop"))
_MOST = 1 << 20  # spans of a document


def spans_in(value: Any, length: int) -> Roles | None:
    """Return the spans that a value gives, in the order of the text, with their numbers there.

    A span is a pair of offsets into the text, in characters, or an object with them under `begin`
    or `start` and `end` or `stop`. The value is a list of spans, one span, or either as JSON text;
    a missing value gives no spans. None if it is anything else, or if spans overlap or leave the
    text.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            return None
    if value is None:
        return ()
    given = cast(list[Any], value) if isinstance(value, list) else [value]
    if len(given) == 2 and all(type(each) is int for each in given):
        given = [given]
    if len(given) > _MOST:
        return None
    pairs = [_pair(each) for each in given]
    known = [pair for pair in pairs if pair is not None and 0 <= pair[0] <= pair[1] <= length]
    if len(known) < len(given):
        return None
    found = sorted((begin, end, n) for n, (begin, end) in enumerate(known) if begin < end)
    apart = all(before[1] <= after[0] for before, after in zip(found, found[1:], strict=False))
    return tuple(found) if apart else None


def _pair(span: Any) -> tuple[int, int] | None:
    if isinstance(span, Mapping):
        fields = cast(Mapping[str, Any], span)
        named = next((names for names in _NAMES if {*names} <= {*fields}), None)
        span = [fields[name] for name in named] if named else None
    if not isinstance(span, list | tuple) or len(cast(Sequence[Any], span)) != 2:
        return None
    begin, end = cast(Sequence[Any], span)
    return (begin, end) if type(begin) is int and type(end) is int else None


def spans_of_tokens(
    offsets: np.ndarray, spans: Roles, flags: np.ndarray | None = None
) -> np.ndarray:
    """Return the number of each token's span; `NONE` if it has no character of one.

    A token with characters of several spans belongs to the first of them; in a chat, to the last if
    it is the assistant's, as its flag says.

    Args:
        offsets: [tokens, 2], the characters of each token; an inserted token has none.
        flags: of the tokens, if they have speakers.
    """
    if not spans:
        return np.full(len(offsets), NONE, np.int64)
    begins, ends, numbers = np.array(spans, np.int64).T
    first = np.searchsorted(ends, offsets[:, 0], side="right")  # the first that ends behind it
    last = np.searchsorted(begins, offsets[:, 1], side="left") - 1  # that begins before its end
    chosen = first
    if flags is not None:
        chosen = np.where(flags & ROLES["assistant"] != 0, last, first)
    touched = (first <= last) & (offsets[:, 0] < offsets[:, 1])
    return np.where(touched, numbers[np.minimum(chosen, len(spans) - 1)], NONE)

"""Which tokens of an assistant are thinking, and which its answer: by the tokens that mark it."""

import re
from collections.abc import Sequence

import numpy as np

from spile.core.index import ANSWER, ROLES, THINKING

# Where thinking begins, and where it ends, as chat templates mark it. A pair counts for a tokenizer
# in which everything in brackets is a token of its own.
MARKS = (
    ("<think>", "</think>"),  # Qwen3, DeepSeek-R1, GLM, and most others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
)
BRACKETS = re.compile(r"<[^>]+>|\[[^\]]+\]")
_OTHERS = ROLES["system"] | ROLES["user"] | ROLES["tool"]

# The ids of the tokens that begin thinking, and of those that end it, for each pair.
ThinkingMarks = Sequence[tuple[Sequence[int], Sequence[int]]]


def thinking_flags(ids: np.ndarray, roles: np.ndarray, marks: ThinkingMarks) -> np.ndarray:
    """Return the flag THINKING or ANSWER of each token of the assistant, and 0 of the others.

    A prompt may have begun the thinking already, and an answer may end within it. Marks that the
    user or a tool wrote mark nothing.
    """
    others = (roles & _OTHERS) != 0
    ends = np.flatnonzero(np.diff(others.astype(np.int8), prepend=0) == 1)  # a turn of another's
    at, inside = [*ends.tolist()], [False] * len(ends)
    for opening, closing in marks:
        begun = _places(ids, opening)
        begun = begun[~others[begun]]
        closed = _places(ids, closing)
        closed = closed[~others[closed]] + len(closing)
        at += [*begun.tolist(), *closed.tolist()]
        inside += [True] * len(begun) + [False] * len(closed)
    order = np.argsort(at, kind="stable")
    last = np.searchsorted(np.array(at, np.int64)[order], np.arange(len(ids)), side="right")
    state = np.concatenate([[False], np.array(inside, np.bool_)[order]])[last]
    said = (roles & ROLES["assistant"]) != 0
    return np.where(said, np.where(state, THINKING, ANSWER), 0).astype(np.uint16)


def _places(ids: np.ndarray, sequence: Sequence[int]) -> np.ndarray:
    """Return where a sequence of ids begins."""
    found = np.flatnonzero(ids[: len(ids) - len(sequence) + 1] == sequence[0])
    for offset, token in enumerate(sequence[1:], 1):
        found = found[ids[found + offset] == token]
    return found

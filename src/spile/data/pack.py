"""Documents into rows of fixed length: a function of the recipe and the unit alone.

A document longer than a row becomes several contexts (or loses its tail, by choice). Contexts are
placed first-fit by decreasing length, so that short ones fill the gaps; each row then holds whole
contexts, one after another, and padding only at its end. Rows are stored in this order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spile.data.tokens import TextTokenizer
from spile.index import FIRST, INDEX_DTYPE, LAST


@dataclass(frozen=True)
class Batch:
    """Fixed-shape input of one device step; `lengths` counts each row's real tokens."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class PackedUnit:
    """A unit ready for the device. Arrays are [rows, seq_len]; segment 0 is padding."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    lengths: np.ndarray
    index: np.ndarray  # one entry per stored row, in stored order
    num_docs: int
    num_contexts: int

    @property
    def num_tokens(self) -> int:
        return len(self.index)

    def batches(self, rows: int) -> Iterator[Batch]:
        """Consecutive groups of rows; the last is padded with empty ones."""
        for first in range(0, len(self.lengths), rows):
            missing = max(0, first + rows - len(self.lengths))
            chosen = slice(first, first + rows)
            yield Batch(
                *(
                    np.pad(a[chosen], ((0, missing),) + ((0, 0),) * (a.ndim - 1))
                    for a in (self.tokens, self.positions, self.segments, self.lengths)
                )
            )


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of item numbers; the result depends on the lengths and their order alone."""
    room = np.empty(len(lengths), np.int64)
    bins: list[list[int]] = []
    for item in np.argsort(-lengths, kind="stable"):
        open_room = room[: len(bins)]
        fits = open_room >= lengths[item]
        chosen = int(fits.argmax()) if len(bins) else 0
        if not len(bins) or not fits[chosen]:
            chosen = len(bins)
            bins.append([])
            room[chosen] = capacity
        bins[chosen].append(int(item))
        room[chosen] -= lengths[item]
    return bins


def pack_unit(
    ordinals: list[int],
    documents: list[np.ndarray],
    tokenizer: TextTokenizer,
    *,
    seq_len: int,
    long_docs: str,
    pack: str,
) -> PackedUnit:
    """Cut documents into contexts, place those in rows, and index every token."""
    contexts: list[tuple[int, int, np.ndarray]] = []  # document, offset of its first token, tokens
    for ordinal, tokens in zip(ordinals, documents, strict=True):
        stop = min(len(tokens), seq_len) if long_docs == "truncate" else len(tokens)
        for offset in range(0, stop, seq_len):
            contexts.append((ordinal, offset, tokens[offset : min(offset + seq_len, stop)]))

    lengths = np.array([len(tokens) for _, _, tokens in contexts], np.int64)
    if pack == "none":
        bins = [[item] for item in range(len(contexts))]
    else:
        bins = first_fit_decreasing(lengths, seq_len)

    shape = (len(bins), seq_len)
    ids, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    filled = np.zeros(len(bins), np.int32)
    index = np.zeros(int(lengths.sum()), INDEX_DTYPE)
    done = 0
    for row, items in enumerate(bins):
        column = 0
        for segment, item in enumerate(items, 1):
            ordinal, offset, tokens = contexts[item]
            count = len(tokens)
            place = slice(column, column + count)
            ids[row, place] = tokens
            positions[row, place] = np.arange(count)
            segments[row, place] = segment
            entry = index[done : done + count]
            entry["token_id"] = tokens
            entry["doc"] = ordinal
            entry["offset"] = np.arange(offset, offset + count)
            entry["pos"] = positions[row, place]
            entry["flags"] = tokenizer.flags(tokens)
            entry["flags"][0] |= FIRST
            entry["flags"][-1] |= LAST
            column += count
            done += count
        filled[row] = column
    used = {ordinal for ordinal, _, _ in contexts}
    return PackedUnit(ids, positions, segments, filled, index, len(used), len(contexts))

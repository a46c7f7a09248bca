"""Pack documents into rows of fixed length: a function of the recipe and the unit alone.

A document longer than a row is split into several contexts (or, by choice, truncated). Contexts are
placed first-fit by decreasing length, so that short ones fill the gaps. Each row then holds whole
contexts, one after another, and padding only at its end. Tokens are stored in this order.

A filter chooses which tokens become stored rows. It never moves anything: all tokens are packed,
but rows without a chosen token are left out. `--pool` then makes one stored row of several tokens:
each packed row says which of its tokens belong together (`pooled_spans.py`).
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from spile.core.expressions import RowFilter
from spile.core.index import END, FIRST, INDEX_DTYPE, LAST
from spile.core.pool import COVARIANCE, Pool
from spile.corpus.pooled_spans import PooledSpans
from spile.corpus.tokenize import TextTokenizer

# Of the entries of an index, and which of them are kept: values of each [tokens, values].
OtherValues = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PackedRows:
    """Rows for the device. Arrays are [rows, seq_len]; segment 0 is padding."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    lengths: np.ndarray  # real tokens of each row
    columns: np.ndarray | None  # [rows, most]: positions of kept tokens, then 0; None: all are kept
    counts: np.ndarray  # kept tokens of each row
    # If values are pooled: the slot of each kept token, from 1, then 0; [rows, most]. And
    # [rows, slots]: how many tokens each slot has. A row's slots are used from the first on.
    slots: np.ndarray | None = field(default=None, kw_only=True)
    sizes: np.ndarray | None = field(default=None, kw_only=True)
    # If covariances are summed: [rows, labels of the unit]: the slot of each label, or 0.
    labels: np.ndarray | None = field(default=None, kw_only=True)
    # If an engine's log-probabilities are compared, [rows, most]: the positions of tokens whose
    # next token has one, then 0; what it is; and 1 + the ordinal of the document, then 0.
    scored: np.ndarray | None = field(default=None, kw_only=True)
    claimed: np.ndarray | None = field(default=None, kw_only=True)
    scored_docs: np.ndarray | None = field(default=None, kw_only=True)
    # Of an objective that does not count all tokens, [rows, seq_len]: 1 where a token counts. If it
    # compares logits, [rows, seq_len, 2]: those of which two tokens.
    aimed: np.ndarray | None = field(default=None, kw_only=True)
    answers: np.ndarray | None = field(default=None, kw_only=True)
    # If attributions are differences from other rows, [rows, seq_len, values]: those, in float32.
    beside: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def leaving(self) -> tuple[np.ndarray, int]:
        """How many values of each row leave the device, and the number of places for them."""
        if self.sizes is not None:
            return np.count_nonzero(self.sizes, axis=1), self.sizes.shape[1]
        return self.counts, (self.tokens if self.columns is None else self.columns).shape[1]

    def each(self, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        """Return the arrays by name, each changed in the same way."""
        arrays = {each.name: getattr(self, each.name) for each in fields(PackedRows)}
        return {name: None if a is None else change(a) for name, a in arrays.items()}


@dataclass(frozen=True)
class Batch(PackedRows):
    """The fixed-shape input of one device step."""

    contexts: int  # at least the number in any of its rows


@dataclass(frozen=True)
class PackedUnit(PackedRows):
    """A unit ready for the device.

    The counts of documents, contexts and tokens are those before the filter.
    """

    index: np.ndarray  # one entry per stored row, in stored order
    doc_tokens: Mapping[int, int]  # tokens of each document read
    num_contexts: int
    num_tokens: int
    pooled: PooledSpans | None = None  # if rows stand for spans

    @property
    def entries(self) -> np.ndarray:
        """An index entry for each kept token, in packed order."""
        return self.pooled.entries if self.pooled and self.sizes is not None else self.index

    @property
    def num_docs(self) -> int:
        return len(self.doc_tokens)

    @property
    def num_rows(self) -> int:
        """The number of stored rows: that of kept tokens, or of spans."""
        return len(self.index)

    def first(self, rows: int) -> "PackedUnit":
        """Return only the first packed rows. (Pooled ones may need others, too.)"""
        assert self.sizes is None
        cut = replace(self, **self.each(lambda array: array[:rows]))
        return replace(cut, index=self.index[: int(cut.counts.sum())])

    def run_of(self, part: int, parts: int) -> tuple[int, int]:
        """Return the first stored row of one of several equal parts, and the number of its rows.

        Pooled rows all belong to the first part: a span's tokens may lie in several.
        """
        if self.sizes is not None:
            return (0, len(self.index)) if part == 0 else (len(self.index), 0)
        share = -(-len(self.counts) // parts)
        before = int(self.counts[: part * share].sum())
        return before, int(self.counts[part * share : (part + 1) * share].sum())

    def batches(
        self, rows: int, fewest: int | None = None, *, parts: int = 1, quantum: int = 1
    ) -> Iterator[Batch]:
        """Yield groups of `rows` rows; the last one is padded with empty rows.

        The last group is first halved while it still holds the rest, but not below `fewest` rows
        (`rows` by default), and only to multiples of `quantum`, since each size must be compiled.
        With several `parts`, each part of the unit gets its share of every batch: consecutive rows
        of its own. Batches of pooled rows hold consecutive rows of the unit, so that the parts of
        spans come in packed order.
        """
        parts = 1 if self.sizes is not None else parts
        share, each = -(-len(self.lengths) // parts), rows // parts
        for first in range(0, share, each):
            while each // 2 * parts >= max(fewest or rows, (share - first) * parts) and (
                each // 2 * parts % quantum == 0
            ):
                each //= 2
            chosen = [
                slice(part * share + first, min(part * share + first + each, (part + 1) * share))
                for part in range(parts)
            ]
            arrays = self.each(partial(_group, chosen=chosen, each=each))
            contexts = _rounded_up(int(arrays["segments"].max(initial=0)))
            yield Batch(**arrays, contexts=contexts)


def _rounded_up(contexts: int) -> int:
    """Round up to 16, 64, 256, ...: kernels are compiled for each number of contexts."""
    return 4 ** max(2, -(-max(1, contexts - 1).bit_length() // 2))


def _group(array: np.ndarray, chosen: list[slice], each: int) -> np.ndarray:
    """Return the chosen rows, each slice padded to `each` rows."""
    parts = [array[rows] for rows in chosen]
    shape = array.shape[1:]
    empty = [np.zeros((each - len(part), *shape), array.dtype) for part in parts]
    return np.concatenate([piece for both in zip(parts, empty, strict=True) for piece in both])


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return bins of item numbers, which depend only on the lengths and their order."""
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
    rows: RowFilter | None = None,
    roles: Sequence[np.ndarray] = (),
    apart: Sequence[int] = (),
    pool: Pool | None = None,
    spans: Sequence[np.ndarray] = (),
    logprobs: Sequence[np.ndarray | None] | None = None,
    aims: "Aims | None" = None,
    beside: OtherValues | None = None,
) -> PackedUnit:
    """Cut documents into contexts, place the contexts in rows, and index every kept token.

    Args:
        apart: the number of documents in each run that is packed by itself; empty: all together.
        roles: flags of each document's tokens; empty if the documents have no speakers.
        pool: how tokens make one row together; None: each is a row.
        spans: the number of each token's span in its document, negative for tokens of none; empty
            if the document is the span.
        aims: the tokens that count to an objective; None: all of them, or there is none.
        beside: returns other values of each token; None: there are none.
        logprobs: an engine's log-probability of each document's tokens, NaN where it gave none;
            None if they are not compared.
    """
    contexts: list[tuple[int, int, np.ndarray]] = []  # document, offset of its first token, tokens
    ends: list[int] = []  # flags of each context's last token
    said: list[np.ndarray | int] = []  # flags of each context's tokens
    spanned: list[np.ndarray | int] = []  # their spans
    claims: list[np.ndarray | None] = []  # log-probabilities of them
    most = seq_len if long_docs == "truncate" else sys.maxsize
    stops = [min(len(tokens), most) for tokens in documents]
    for number, (ordinal, tokens, stop) in enumerate(zip(ordinals, documents, stops, strict=True)):
        for offset in range(0, stop, seq_len):
            contexts.append((ordinal, offset, tokens[offset : min(offset + seq_len, stop)]))
            ends.append(LAST if offset + seq_len < stop else LAST | END)
            said.append(roles[number][offset : min(offset + seq_len, stop)] if roles else 0)
            spanned.append(spans[number][offset : min(offset + seq_len, stop)] if spans else 0)
            # (In later contexts the model has not read what the engine had.)
            claims.append(logprobs[number] if logprobs is not None and offset == 0 else None)

    lengths = np.array([len(tokens) for _, _, tokens in contexts], np.int64)
    if pack == "none":
        bins = [[item] for item in range(len(contexts))]
    else:
        held = np.cumsum([0, *(-(-stop // seq_len) for stop in stops)])  # contexts before each
        runs = held[np.cumsum([0, *(apart or (len(documents),))])].tolist()
        bins = [
            [first + item for item in items]
            for first, last in itertools.pairwise(runs)
            for items in first_fit_decreasing(lengths[first:last], seq_len)
        ]

    shape = (len(bins), seq_len)
    ids, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    filled = np.zeros(len(bins), np.int32)
    index = np.zeros(int(lengths.sum()), INDEX_DTYPE)
    span_of = np.zeros(len(index), np.int64)
    claimed = np.full(shape if logprobs is not None else 0, np.nan, np.float32)
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
            entry["flags"] = tokenizer.flags(tokens) | said[item]
            entry["flags"][0] |= FIRST
            entry["flags"][-1] |= ends[item]
            span_of[done : done + count] = spanned[item]
            if (known := claims[item]) is not None:
                claimed[row, column : column + count - 1] = known[1:count]
            column += count
            done += count
        filled[row] = column
    doc_tokens: dict[int, int] = {}
    for ordinal, _, tokens in contexts:
        doc_tokens[ordinal] = doc_tokens.get(ordinal, 0) + len(tokens)
    unit = PackedUnit(
        tokens=ids,
        positions=positions,
        segments=segments,
        lengths=filled,
        columns=None,
        counts=filled,
        index=index,
        doc_tokens=doc_tokens,
        num_contexts=len(contexts),
        num_tokens=len(index),
    )
    if logprobs is not None:
        unit = _compared(unit, claimed)
    if aims is not None:
        unit = _aimed(unit, aims, ordinals)
    mask = np.ones(len(index), np.bool_) if rows is None else rows.mask(index)
    if beside is not None:
        found = beside(index, mask)
        laid = np.zeros((*shape, found.shape[1]), np.float32)
        laid[segments > 0] = found
        unit = replace(unit, beside=laid)
    return _filtered(unit, mask) if pool is None else _pooled(unit, mask, span_of, pool)


@dataclass(frozen=True)
class Aims:
    """The tokens that count to an objective: a role's, or each document's last."""

    role: int | None = None  # the flag of tokens that count when they are predicted
    answers: Sequence[tuple[int, int]] = ()  # of each document, two tokens that may follow it


def _aimed(unit: PackedUnit, aims: Aims, ordinals: Sequence[int]) -> PackedUnit:
    """Add which tokens of an unfiltered unit count: those before a role's, or the last ones."""
    flags, there = unit.index["flags"], unit.segments > 0
    counts = (flags & END) > 0
    if aims.role is not None:
        said = (flags & aims.role) > 0
        counts = np.append(said[1:], False) & ((flags & LAST) == 0)
    aimed = np.zeros(there.shape, np.int8)
    aimed[there] = counts
    if not aims.answers:
        return replace(unit, aimed=aimed)
    pairs = dict(zip(ordinals, aims.answers, strict=True))
    answers = np.zeros((*there.shape, 2), np.int32)
    answers[there & (aimed > 0)] = [pairs[doc] for doc in unit.index["doc"][counts].tolist()]
    return replace(unit, aimed=aimed, answers=answers)


def bucket(n: int, seq_len: int) -> int:
    """Round `n` up by less than a quarter, so that few shapes are compiled."""
    step = 1 << max(0, n.bit_length() - 3)
    return max(1, min(-(-n // step) * step, seq_len))


def _compared(unit: PackedUnit, claimed: np.ndarray) -> PackedUnit:
    """Add what is compared. `claimed`: what an engine says of the token after each, or NaN."""
    known = np.isfinite(claimed)
    counts = known.sum(axis=1)
    docs = np.zeros(known.shape, np.int64)
    docs[unit.segments > 0] = unit.index["doc"] + 1
    shape = len(known), bucket(int(counts.max(initial=0)), known.shape[1])
    inside = np.arange(shape[1]) < counts[:, None]

    def laid(values: np.ndarray) -> np.ndarray:
        out = np.zeros(shape, values.dtype)
        out[inside] = values
        return out

    scored = laid(np.nonzero(known)[1].astype(np.int32))
    return replace(unit, scored=scored, claimed=laid(claimed[known]), scored_docs=laid(docs[known]))


def _filtered(unit: PackedUnit, mask: np.ndarray) -> PackedUnit:
    """Drop entries of the index of an unfiltered unit."""
    if mask.all():
        return unit
    kept = np.zeros(unit.tokens.shape, np.bool_)
    kept[unit.segments > 0] = mask  # both are ordered by row, then by position in the row
    counts = kept.sum(axis=1, dtype=np.int32)
    full = counts > 0
    kept, counts = kept[full], counts[full]
    columns = np.zeros((len(counts), bucket(int(counts.max(initial=0)), kept.shape[1])), np.int32)
    columns[np.arange(columns.shape[1]) < counts[:, None]] = np.nonzero(kept)[1]
    rows = replace(unit, **unit.each(lambda array: array[full]))
    return replace(rows, columns=columns, counts=counts, index=unit.index[mask])


def _pooled(unit: PackedUnit, mask: np.ndarray, spans: np.ndarray, pool: Pool) -> PackedUnit:
    """Make one stored row of the kept tokens of each span of an unfiltered unit."""
    kept = mask & (spans >= 0)
    places = np.nonzero(unit.segments)[0][kept]
    found = PooledSpans.of(unit.index[kept], spans[kept], places, pool)
    if not pool.sums:  # each row is a token
        chosen = np.zeros(len(mask), np.bool_)
        chosen[np.flatnonzero(kept)[found.shown]] = True
        return replace(_filtered(unit, chosen), index=found.index, pooled=found)
    left = _filtered(unit, kept)
    slots, parts = found.slots
    used = parts[parts > 0]
    width = left.leaving[1]
    laid = np.zeros((len(used), width), np.int32)
    laid[np.arange(width) < left.counts[:, None]] = slots
    sizes = np.zeros((len(used), slots_for(int(used.max(initial=1)))), np.int32)
    sizes[np.arange(sizes.shape[1]) < used[:, None]] = np.bincount(
        np.repeat(np.cumsum(used) - used, left.counts) + slots - 1
    )
    labels = found.slots_of_rows(labels_for(len(found.index))) if pool.by == COVARIANCE else None
    return replace(left, slots=laid, sizes=sizes, labels=labels, index=found.index, pooled=found)


def labels_for(rows: int) -> int:
    """Round up to a power of 2: a step is compiled for each number of labels of a unit."""
    return 1 << max(0, rows - 1).bit_length()


def slots_for(parts: int) -> int:
    """Round up to 4, 16, 64, …: a step is compiled for each number of slots."""
    return 4 ** max(1, -(-max(1, parts - 1).bit_length() // 2))

"""Find the source of a NaN: the first tap that holds one, the document and the token.

A row that holds one does not tell which token it came from. Attention multiplies masked values by
zero, and zero times infinity is NaN, so one bad token also spoils other tokens and documents in its
row. To find it, the step is run again with ever fewer of its tokens.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spile.core.errors import DataError
from spile.core.recipe import latent_names
from spile.corpus.pack import Batch
from spile.dataset.codec.documents import kept_of
from spile.models.taps import Tap
from spile.plan.job import ExtractionJob, PreparedUnit
from spile.run.pipeline.overflow import Overflow
from spile.run.step.output import StepOutput
from spile.run.step.step import Step

_log = logging.getLogger("spile.run")
_LONGEST = 60  # characters shown of a value kept of a document
_NAMED = 8  # documents of a packed row that are named


@dataclass(frozen=True)
class Found:
    """A packed row with values that must not be stored."""

    tap: Tap
    stored: str  # its stored name: latents have one of their own
    prepared: PreparedUnit
    row: int  # index of the packed row in the unit
    int8: bool  # whether the tap is stored as int8
    float16: bool  # whether products take float16

    def told(self, where: str, overflow: Overflow | None) -> str:
        layer = "" if self.tap.layer is None else f", layer {self.tap.layer}"
        if self.float16:
            found = overflow.told if overflow else "float16 may be too small for it"
            return (
                f"{self.tap.name}: NaN or infinity in unit {self.prepared.unit}{layer}, {where}; "
                f"{found}: give --compute-dtype float32 (or bfloat16, where the GPU has it) "
                "and another --out"
            )
        keep = "which int8 cannot hold" if self.int8 else "or keep them with --allow-nonfinite"
        return (
            f"{self.tap.name}: NaN or infinity in unit {self.prepared.unit}{layer}, {where}; "
            f"check the weights and the dtypes, {keep}"
        )

    def candidates(self) -> str:
        docs = np.unique(self._kept(self.row)[1]["doc"])
        more = f" and {len(docs) - _NAMED} more" if len(docs) > _NAMED else ""
        return f"a packed row of documents {', '.join(map(str, docs[:_NAMED]))}{more}"

    def token(self, row: int, column: int) -> str | None:
        """The token at a place of a packed row; None if no token of its context is kept."""
        packed, (kept, entries) = self.prepared.packed, self._kept(row)
        same = np.flatnonzero(packed.segments[row][kept] == packed.segments[row, column])
        if not len(same):
            return None
        entry, pos = entries[same[0]], int(packed.positions[row, column])
        doc, offset = int(entry["doc"]), int(entry["offset"] - entry["pos"]) + pos
        return (
            f"document {doc}{_about(self.prepared.documents, doc)}, token {offset} "
            f"(id {packed.tokens[row, column]}, position {pos})"
        )

    def context(self, row: int, column: int) -> np.ndarray:
        """Token ids of the context of a place, as far as that place."""
        packed = self.prepared.packed
        start = column - int(packed.positions[row, column])
        return packed.tokens[row, start : column + 1]

    def _kept(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Columns of a packed row's kept tokens, and their index entries."""
        packed = self.prepared.packed
        count = int(packed.counts[row])
        end = int(packed.counts[: row + 1].sum())
        places = np.arange(count) if packed.columns is None else packed.columns[row, :count]
        return places, packed.entries[end - count : end]


class NonfiniteError(DataError):
    """A tap holds NaN or infinity.

    Attributes:
        found: where it is.
    """

    def __init__(
        self, found: Found, where: str | None = None, overflow: Overflow | None = None
    ) -> None:
        self.found = found
        super().__init__(found.told(where or found.candidates(), overflow))

    def traced(
        self, step: Step, batches: Iterator[Batch], find: Callable[[np.ndarray], Overflow | None]
    ) -> "NonfiniteError":
        """The same error with the token it came from, and what overflowed if float16 did.

        Args:
            batches: all of the unit, as run before.
            find: finds the overflow in a context's token ids.
        """
        where, overflow = None, None
        try:
            if place := _source(self.found, step, batches):
                where = self.found.token(*place)
                overflow = find(self.found.context(*place)) if self.found.float16 else None
        except Exception as error:  # the error being traced matters more than this one
            _log.warning("could not find what caused it: %s", error)
        return NonfiniteError(self.found, where, overflow)


@dataclass(frozen=True)
class FiniteTaps:
    """Taps that must not hold NaN or infinity; int8 has neither.

    Attributes:
        taps: by their stored names, in the order in which the model computes them: a value at one
            spreads to all that follow.
        int8: the stored names of those that are stored as int8.
        float16: whether products take float16.
    """

    taps: Mapping[str, Tap]
    int8: Collection[str]
    float16: bool

    @classmethod
    def of(cls, job: ExtractionJob, *, allow: bool) -> "FiniteTaps":
        """`allow`: --allow-nonfinite."""
        int8 = {name for name, info in job.table.taps.items() if info.dtype == "int8"}
        stored = {latent_names(t.name)[0] if t.name in job.encoders else t.name: t
                  for t in job.taps}  # fmt: skip
        given = {n: tap for n, tap in stored.items() if n in int8 or not allow}
        return cls(given, int8, job.recipe.compute_dtype == "float16")

    def check(self, output: StepOutput, prepared: PreparedUnit, first: int) -> None:
        """Raise for a step with values that must not be stored.

        Args:
            prepared: the unit that the step is part of.
            first: the number of the unit's rows, or parts of pooled rows, before the step.
        """
        for name, tap in self.taps.items():
            if output.nonfinite_of(name).any():
                part = int(np.argmax(output.nonfinite_of(name) > 0))
                place = first + int(output.counts[:part].sum())
                leaving, _ = prepared.packed.leaving
                row = int(np.searchsorted(np.cumsum(leaving), place, side="right"))
                found = Found(tap, name, prepared, row, name in self.int8, self.float16)
                raise NonfiniteError(found)


def _source(found: Found, step: Step, batches: Iterator[Batch]) -> tuple[int, int] | None:
    """Return the packed row and column of the first token that causes a nonfinite value."""
    first_row, batch = 0, next(batches)
    while first_row + len(batch.tokens) <= found.row:
        first_row, batch = first_row + len(batch.tokens), next(batches)
    rows, columns = np.nonzero(batch.segments)

    def bad(count: int) -> bool:
        kept = np.zeros(batch.segments.shape, np.bool_)
        kept[rows[:count], columns[:count]] = True
        return bool(step(_with(batch, kept)).nonfinite_of(found.stored).any())

    sound, spoilt = 0, len(rows)
    if not bad(spoilt):
        return None
    while spoilt - sound > 1:
        middle = (sound + spoilt) // 2
        sound, spoilt = (sound, middle) if bad(middle) else (middle, spoilt)
    return first_row + int(rows[sound]), int(columns[sound])


def _with(batch: Batch, kept: np.ndarray) -> Batch:
    """Keep some of a batch's tokens, and turn the others into padding, made of the first token.

    The same number of rows leaves the device, so nothing is compiled again. (Tokens that are pooled
    stay those that were.)
    """
    whole = {} if batch.sizes is not None else {"columns": None, "counts": batch.lengths}
    return replace(
        batch,
        tokens=np.where(kept, batch.tokens, batch.tokens[0, 0]),
        positions=np.where(kept, batch.positions, 0),
        segments=np.where(kept, batch.segments, 0),
        **whole,
    )


def _about(table: Mapping[str, np.ndarray], doc: int) -> str:
    """Return a document's kept columns on one line, shortened: they are untrusted text."""
    found = kept_of(table, doc) if table else {}
    said = [f"{name} {_short(value)}" for name, value in found.items() if value is not None]
    return f" ({', '.join(said)})" if said else ""


def _short(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")

"""Count the documents, tokens and bytes of a corpus, as far as time allows. No jax.

A random sample of the remaining units is read, tokenized and packed as in a run; done units are
counted by their records. For units that were not read, the table's estimate is scaled by the ratio
found in the sample. The error follows from how much that ratio varies between units.
"""

import importlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from typing import Any

import xxhash

from spile.core.config import Runtime
from spile.core.threads import mapped
from spile.core.units import Unit
from spile.dataset.codec.documents import kept_bytes
from spile.dataset.records.ledger import Ledger
from spile.dataset.write.unit_writer import unit_bytes
from spile.objects import Objects
from spile.plan.job import ExtractionJob, PreparedUnit, prepare_unit

SECONDS = 5.0  # time limit for reading, unless `exact`
_FEWEST = 4  # units to read, however long it takes: fewer do not show how units vary
_CONFIDENCE = 0.95  # probability that the total is within its error


@dataclass(frozen=True)
class Counted:
    """Counts of a unit, or of several."""

    tokens: float = 0.0
    rows: float = 0.0
    beside: float = 0.0  # bytes besides taps' rows and the index: headers, statistics
    packed: float = 0.0  # positions for tokens in the rows that the model reads
    kept: float = 0.0  # bytes of the columns that --keep names; part of `beside`

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Survey:
    """The counts, and the estimates that follow from them."""

    units_counted: int
    total: Counted  # of the whole dataset
    left: Counted  # of the units that are not done
    tokens_error: int | None  # half-width of the total's 95% confidence interval; None: unknown
    packing: float | None  # share of the packed positions that hold tokens

    @property
    def exact(self) -> bool:
        return self.tokens_error == 0


def survey(
    job: ExtractionJob, ledger: Ledger, runtime: Runtime, *, processes: int = 1, exact: bool = False
) -> Survey:
    """Count for a few seconds; with `exact`, count every unit."""
    done = _done(job, ledger)
    left = [unit for unit in job.units if unit.id not in done]
    counted: dict[int, Counted] = {}
    until = time.monotonic() + SECONDS
    with closing(job.reader()) as reader:
        for unit in _drawn(job, left):
            if not exact and len(counted) >= _FEWEST and time.monotonic() > until:
                break
            prepared = prepare_unit(job, reader, unit)
            counted[unit.id] = _count(job, prepared, runtime, ledger.objects, processes)
    return _concluded(left, done, counted)


def _drawn(job: ExtractionJob, units: Sequence[Unit]) -> list[Unit]:
    """Permute units so that the first few are a sample of all, unless files are read in order."""
    forward = any(file.is_forward or file.format.in_order for file in job.files)
    drawn = {unit.id: xxhash.xxh3_64_intdigest(f"survey {unit.id}".encode()) for unit in units}
    return list(units) if forward else sorted(units, key=lambda unit: drawn[unit.id])


def _done(job: ExtractionJob, ledger: Ledger) -> dict[int, Counted]:
    each = job.table.row_bytes
    records = mapped(ledger.read_done, sorted(ledger.done_units()), ledger.objects.parallel)
    return {
        done.unit: Counted(
            done.tokens, done.rows, sum(file.bytes for file in done.files()) - done.rows * each
        )
        for done in records
        if done is not None
    }


def _count(
    job: ExtractionJob, prepared: PreparedUnit, runtime: Runtime, objects: Objects, processes: int
) -> Counted:
    packed, table = prepared.packed, prepared.documents
    parts = [packed.run_of(part, processes)[1] for part in range(processes)]
    shard = job.table.shard_limit(objects, runtime.shard_bytes)
    taps, rows = job.table.taps, packed.num_rows
    whole = unit_bytes(taps, parts, table, shard, job.table.index_dtype)
    size = whole - rows * job.table.row_bytes
    return Counted(packed.num_tokens, rows, size, packed.tokens.size, kept_bytes(table))


def _concluded(
    left: Sequence[Unit], done: Mapping[int, Counted], counted: Mapping[int, Counted]
) -> Survey:
    seen = sum(counted.values(), Counted())
    guess = {unit.id: unit.tokens for unit in left}
    guessed = sum(guess[unit] for unit in counted)
    unread = sum(guess.values()) - guessed
    scale = unread / guessed if guessed else 0.0
    rest = Counted(*(scale * value for value in astuple(seen)))
    known = sum(done.values(), Counted())
    if seen.tokens:  # records do not say how many of their bytes are kept columns
        known = replace(known, kept=seen.kept * known.tokens / seen.tokens)
    fill = seen.tokens / seen.packed if seen.packed else None
    return Survey(
        units_counted=len(counted) + len(done),
        total=known + seen + rest,
        left=seen + rest,
        tokens_error=_error(guess, counted),
        # Packed rows without kept tokens never run, so with a filter the share would be wrong.
        packing=fill if seen.rows == seen.tokens else None,
    )


def _error(guess: Mapping[int, int], counted: Mapping[int, Counted]) -> int | None:
    """Return the error of a ratio estimate, from each unit's distance to the overall ratio."""
    count, everything = len(counted), len(guess)
    if count == everything:
        return 0
    if count < 2:
        return None
    ratio = sum(c.tokens for c in counted.values()) / sum(guess[unit] for unit in counted)
    squares = sum((c.tokens - ratio * guess[unit]) ** 2 for unit, c in counted.items())
    variance = everything**2 * (1 - count / everything) / count * squares / (count - 1)
    special: Any = importlib.import_module("scipy.special")  # (a slow import: only if needed)
    quantile = float(special.stdtrit(count - 1, (1 + _CONFIDENCE) / 2))  # of Student's t
    return math.ceil(quantile * math.sqrt(variance))

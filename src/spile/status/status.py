"""The state of a dataset, from its store alone: the workers themselves are not asked."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from spile.core.tap_order import sorted_taps
from spile.dataset.records.features import live_sets
from spile.dataset.records.heartbeat import HeartbeatObserver, read_workers
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import named, readable_passes
from spile.dataset.records.prediction import read_prediction
from spile.dataset.records.segments import Totals
from spile.dataset.records.table import Table
from spile.objects import Objects
from spile.status.workers import ALIVE, describe_workers, rate_of


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the units of some taps are, and who is at work on them."""

    state: str  # complete | running | unfinished | empty (every unit is done, without any row)
    taps: dict[str, list[int]]  # name -> shape of a row
    units: int
    units_done: int
    bytes: int
    rate: float | None  # tokens a second of all active workers
    eta_seconds: float | None
    slowest: str | None  # name of the slowest, if several workers are active
    workers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def done(self) -> bool:
        """Whether every unit is done."""
        return self.units_done == self.units


@dataclass(frozen=True, kw_only=True)
class PassStatus(Progress):
    """A snapshot of taps that were added to a dataset, or are being added."""

    name: str


@dataclass(frozen=True)
class FeatureStatus:
    """A set of features: what `spile features` has counted so far."""

    name: str
    tap: str
    latents: int
    units: int  # in the newest summary
    parts: int  # counted since
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Status(Progress):
    """A snapshot of a dataset's state: of the taps that it was made with, and of its passes."""

    recipe: dict[str, Any]
    fingerprint: str
    generations: int  # how often documents were added
    documents: int
    documents_total: int
    rows: int
    tokens: int
    tokens_estimated: int
    skipped: dict[str, int]
    seconds: float  # spent by slices on the finished units
    prediction: dict[str, Any] | None
    passes: list[PassStatus] = field(default_factory=list[PassStatus])
    features: list[FeatureStatus] = field(default_factory=list[FeatureStatus])

    @property
    def over(self) -> bool:
        """Whether every unit is done, and all taps that are being added are complete."""
        return self.done and all(each.state == "complete" for each in self.passes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_status(objects: Objects, observer: HeartbeatObserver | None = None) -> Status:
    """Add up the finished units, and describe the workers.

    `observer`: has seen earlier heartbeats, and so can tell which workers have not moved since.
    """
    ledger = Ledger(objects)
    table = ledger.table()
    done, progress = _progress(ledger, table, observer)
    # (It was made for the units that there were before any were added.)
    prediction = None if table.generations else read_prediction(objects)
    return Status(
        **progress,
        recipe=table.whole_recipe.to_json(),
        fingerprint=table.fingerprint,
        generations=len(table.generations),
        documents=done.documents,
        documents_total=int(table.units.num_docs.sum()),
        rows=done.rows,
        tokens=done.tokens,
        tokens_estimated=int(table.units.tokens.sum()),
        skipped=done.skipped,
        seconds=done.seconds,
        prediction=prediction and asdict(prediction),
        passes=list(_passes(ledger, table, observer)),
        features=list(_features(ledger)),
    )


def _features(ledger: Ledger) -> Iterator[FeatureStatus]:
    for each, spec in live_sets(ledger):
        summaries = each.summaries()
        behind = summaries[-1] if summaries else 0
        parts = sum(first >= behind for first in each.parts())
        yield FeatureStatus(each.name, spec.tap, spec.latents, behind, parts, each.bytes)


def _passes(
    ledger: Ledger, base: Table, observer: HeartbeatObserver | None
) -> Iterator[PassStatus]:
    for each, table in readable_passes(ledger, base):
        with named(each.name):
            yield PassStatus(name=each.name, **_progress(each.ledger, table, observer)[1])


def _progress(
    ledger: Ledger, table: Table, observer: HeartbeatObserver | None
) -> tuple[Totals, dict[str, Any]]:
    """Return the totals of a dataset's own units, or of a pass's, and the fields of `Progress`."""
    manifest = ledger.derived.read_manifest(ledger.layout)
    done, guessed = Totals(), 0
    if manifest is not None:
        done = manifest.totals
    else:
        for _, segment in ledger.segments_so_far(table):
            done.add(segment.totals())
            guessed += int(table.units.tokens[segment.units].sum())
    workers = describe_workers(read_workers(ledger.objects), observer)
    running = any(worker["state"] in ALIVE for worker in workers)
    complete = done.units == len(table.units)
    if ledger.of_pass:
        complete = manifest is not None  # before that, no reader shows its taps
    state = "complete" if done.rows else "empty"
    if not complete:
        state = "running" if running else "unfinished"
    rate, slowest = rate_of(workers)
    return done, {
        "state": state,
        "taps": {name: list(table.taps[name].shape) for name in sorted_taps(table.taps)},
        "units": len(table.units),
        "units_done": done.units,
        "bytes": done.bytes,
        "rate": rate,
        "eta_seconds": _left(table, guessed, done) / rate if rate and not complete else None,
        "slowest": slowest,
        "workers": workers,
    }


def _left(table: Table, guessed: int, done: Totals) -> float:
    """Return the tokens still to read: the estimate, scaled by how it turned out so far.

    Args:
        guessed: the estimate for the units that are done.
    """
    ratio = done.tokens / guessed if guessed else 1.0
    return (int(table.units.tokens.sum()) - guessed) * ratio

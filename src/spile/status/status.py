"""The state of a dataset, from its store alone: the workers themselves are not asked."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spile.core.threads import mapped
from spile.dataset.format import Done, is_amount
from spile.dataset.heartbeat import HeartbeatObserver, read_workers
from spile.dataset.ledger import Ledger, Table, read_prediction
from spile.objects import Objects
from spile.status.workers import ALIVE, describe_workers, rate_of


@dataclass(frozen=True)
class Status:
    """A snapshot of a dataset's state."""

    state: str  # complete | running | unfinished | empty (every unit is done, without any row)
    recipe: dict[str, Any]
    fingerprint: str
    taps: dict[str, list[int]]  # name -> shape of a row
    units: int
    units_done: int
    documents: int
    documents_total: int
    rows: int
    tokens: int
    tokens_estimated: int
    bytes: int
    skipped: dict[str, int]
    seconds: float  # spent by slices on the finished units
    prediction: dict[str, Any] | None
    rate: float | None  # tokens a second of all active workers
    eta_seconds: float | None
    slowest: str | None  # name of the slowest, if several workers are active
    workers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def over(self) -> bool:
        """Whether every unit is done."""
        return self.units_done == self.units

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_status(objects: Objects, observer: HeartbeatObserver | None = None) -> Status:
    """Add up the finished units, and describe the workers.

    `observer`: has seen earlier heartbeats, and so can tell which workers have not moved since.
    """
    ledger = Ledger(objects)
    table = ledger.table()
    records = mapped(ledger.read_done, sorted(ledger.done_units()), objects.parallel)
    done = [record for record in records if record is not None]
    skipped: dict[str, int] = {}
    for record in done:
        for reason, count in record.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    workers = describe_workers(read_workers(objects), observer)
    running = any(worker["state"] in ALIVE for worker in workers)
    rows = sum(record.rows for record in done)
    complete = len(done) == len(table.units)
    state = "complete" if rows else "empty"
    if not complete:
        state = "running" if running else "unfinished"
    rate, slowest = rate_of(workers)
    prediction = read_prediction(objects)
    return Status(
        state=state,
        recipe=table.recipe.to_json(),
        fingerprint=table.fingerprint,
        taps={name: list(info.shape) for name, info in table.taps.items()},
        units=len(table.units),
        units_done=len(done),
        documents=sum(record.documents for record in done),
        documents_total=sum(unit["num_docs"] for unit in table.units),
        rows=rows,
        tokens=sum(record.tokens for record in done),
        tokens_estimated=sum(unit["tokens"] for unit in table.units),
        bytes=sum(file.bytes for record in done for file in record.files()),
        skipped=skipped,
        seconds=sum(map(_seconds, done)),
        prediction=prediction and asdict(prediction),
        rate=rate,
        eta_seconds=_left(table, done) / rate if rate and not complete else None,
        slowest=slowest,
        workers=workers,
    )


def _seconds(done: Done) -> float:
    spent: Any = done.made_by.get("seconds")
    return float(spent) if is_amount(spent) else 0.0


def _left(table: Table, done: Sequence[Done]) -> float:
    """Return the tokens still to read: the estimate, scaled by how it turned out so far."""
    guess = {int(unit["id"]): int(unit["tokens"]) for unit in table.units}
    guessed = sum(guess.get(record.unit, 0) for record in done)
    ratio = sum(record.tokens for record in done) / guessed if guessed else 1.0
    return (sum(guess.values()) - guessed) * ratio

"""Where a dataset stands, from its store alone: nothing is asked of the workers themselves."""

from dataclasses import asdict, dataclass, field
from typing import Any

from spile.background import mapped
from spile.objects import Objects
from spile.store import format as fmt
from spile.store.ledger import Ledger
from spile.store.presence import process_ended, read_workers, rebooted


@dataclass(frozen=True)
class Status:
    """A snapshot."""

    state: str  # complete | running | unfinished
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
    workers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_status(objects: Objects) -> Status:
    """Add up what is done, and who is at work."""
    ledger = Ledger(objects)
    table = ledger.table()
    records = mapped(ledger.read_done, sorted(ledger.done_units()), objects.parallel)
    done = [record for record in records if record is not None]
    skipped: dict[str, int] = {}
    for record in done:
        for reason, count in record.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    workers = [_describe(name, record) for name, record in sorted(read_workers(objects).items())]
    running = any(worker["state"] in ("running", "starting") for worker in workers)
    complete = len(done) == len(table.units)
    return Status(
        state="complete" if complete else "running" if running else "unfinished",
        recipe=table.recipe.to_json(),
        fingerprint=table.fingerprint,
        taps={name: list(info.shape) for name, info in table.taps.items()},
        units=len(table.units),
        units_done=len(done),
        documents=sum(record.documents for record in done),
        documents_total=sum(unit["num_docs"] for unit in table.units),
        rows=sum(record.rows for record in done),
        tokens=sum(record.tokens for record in done),
        tokens_estimated=sum(unit["tokens"] for unit in table.units),
        bytes=sum(file.bytes for record in done for file in record.files()),
        skipped=skipped,
        workers=workers,
    )


def _describe(name: str, record: dict[str, Any]) -> dict[str, Any]:
    state = record.get("state", "unknown")
    if state in ("running", "starting") and (process_ended(record) or rebooted(record)):
        state = "dead"
    kept = ("units", "units_done", "tokens", "error", "host", "pid", "counter", "world")
    told = {k: record[k] for k in kept if k in record}
    # It is shown in terminals, and these obey control characters.
    return {
        k: fmt.shown(v) if isinstance(v, str) else v
        for k, v in {"name": name, "state": state, **told}.items()
    }

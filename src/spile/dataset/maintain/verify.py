"""The audit: every byte of every object, and whether together they are one complete dataset.

Names and the manifest are not trusted: records are checked against their own checksums, shards
against the records, rows against the index (`audit.py`), and the manifest against a fresh
derivation. Files that no record names are listed as orphans (`gc.py` removes those).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spile.core.cache_dir import cache_directory
from spile.core.errors import CorruptError, SpileError, StoreError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Done
from spile.dataset.heartbeat import warn_unreadable
from spile.dataset.ledger import Ledger, Prediction, Table, derive_manifest
from spile.dataset.maintain.audit import Audit, audit_listed, audit_unit
from spile.dataset.maintain.signature import SignedList, check_listed
from spile.dataset.write.quantization import scales_from_json
from spile.objects import Objects

_RECORDS = {
    fmt.MODEL: "model",
    fmt.SCALES: "scales",
    fmt.MANIFEST: "manifest",
    fmt.CHECK: "check",
    fmt.PREDICTION: "prediction",
}
Progress = Callable[[int, int], None]


class Journal:
    """The units that an unfinished audit has found valid, kept on this machine: `verify --resume`.

    An audit of many terabytes takes hours. An interrupted one continues from here; a finished one
    leaves nothing, and the next reads every byte again. Each unit has a line with the digest of its
    record, so a unit whose record has changed since is unknown.
    """

    def __init__(self, url: str, folder: Path | None = None, *, resume: bool) -> None:
        folder = folder or cache_directory() / "verify"
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._path = folder / f"{name}.jsonl"
        self._known: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume and self._path.exists():
                self._known = _read_journal(self._path)
            else:
                self._path.write_text("")
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror or error}") from error

    def knows(self, done: Done) -> bool:
        return record_digest(done) in self._known

    def note(self, done: Done) -> None:
        self._known.add(record_digest(done))
        with self._path.open("a") as file:
            file.write(json.dumps({"unit": done.unit, "record": record_digest(done)}) + "\n")

    def end(self) -> None:
        """End the audit, whatever it found."""
        self._path.unlink(missing_ok=True)


@dataclass
class Report:
    """The findings of an audit."""

    units: int = 0
    units_done: int = 0
    absent: int = 0
    rows: int = 0
    bytes: int = 0
    quick: bool = False  # by sizes and etags only
    resumed: int = 0  # units that an interrupted audit had found valid
    faults: list[str] = field(default_factory=list[str])
    orphans: list[str] = field(default_factory=list[str])
    missing: list[int] = field(default_factory=list[int])  # units without a record
    # Units with a fault in a file or in the record, and the SHA-256 of that record as it was found
    # (empty if it cannot be read): `repair.py` replaces exactly that record.
    damaged: dict[int, str] = field(default_factory=dict[int, str])
    beside: list[str] = field(default_factory=list[str])  # other records that are faulty or missing
    signed_by: str | None = None  # if requested
    unsigned: list[int] = field(
        default_factory=list[int]
    )  # units that the signature does not cover

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(
    objects: Objects,
    *,
    partial: bool = False,
    quick: bool = False,
    journal: Journal | None = None,
    progress: Progress | None = None,
    signed: SignedList | None = None,
) -> Report:
    """Audit a dataset, several units at once.

    Args:
        partial: whether unfinished units are allowed.
        quick: check sizes and etags, from a listing; only records are read.
        journal: records the units found valid; units it knows are not read again.
        progress: called with the number of units checked so far, and the total.
        signed: the signed list; everything there must be in it and match.
    """
    report = Report(quick=quick)
    ledger = Ledger(objects)
    try:
        table = ledger.table()
    except SpileError as error:
        report.faults.append(str(error))
        return report
    report.units = len(table.units)
    _check_table(table, report)
    records = list(_read_records(ledger, table, report))
    if signed:
        _check_signed(objects, table, records, signed, report)
    units = {int(unit["id"]): unit for unit in table.units}
    entries = {entry.key: entry for entry in objects.entries()} if quick else {}

    def audit(done: Done) -> Audit:
        if quick:
            return audit_listed(entries, done)
        if journal and journal.knows(done) and not table.shuffled:  # the sums need every unit
            return Audit(sum(file.bytes for file in done.files()), known=True)
        return audit_unit(objects, table, units[done.unit], done, signed and signed.digests)

    audits = mapped(audit, records, objects.parallel)
    total = Audit(0)
    for number, (done, found) in enumerate(zip(records, audits, strict=True)):
        if progress:
            progress(number, len(records))
        report.bytes += found.bytes
        report.resumed += found.known
        report.faults += found.faults
        if found.faults:
            report.damaged[done.unit] = record_digest(done)
        total.entries += found.entries
        total.off.update(found.off)
        if journal and not (found.faults or found.known):
            journal.note(done)
    report.units_done = len(records)
    report.rows = sum(done.rows for done in records)
    if report.absent and not partial:
        report.faults.append(f"{report.absent} of {report.units} units are not done")
    elif table.shuffled and not quick and report.ok:
        _check_sums(table, total, report)
    _check_records(ledger, table, records, report, partial)
    named = {file.key for done in records for file in done.files()}
    report.orphans = [key for key in sorted(objects.list()) if not _accounted(key, named, report)]
    if journal:
        journal.end()
    return report


def _check_signed(
    objects: Objects, table: Table, records: list[Done], signed: SignedList, report: Report
) -> None:
    faults, report.unsigned = check_listed(objects, table, records, signed)
    report.faults += faults
    report.signed_by = f"{signed.signer} ({signed.key})"
    if report.unsigned:
        shown = ", ".join(map(str, report.unsigned[:10]))
        more = len(report.unsigned) - 10
        report.faults.append(
            f"{fmt.SIGNED}: covers {len(records) - len(report.unsigned)} of {len(records)} units; "
            f"not signed: {shown}{f' and {more} more' if more > 0 else ''}; `spile sign` again"
        )


def _check_table(table: Table, report: Report) -> None:
    if table.fingerprint != table.recipe.fingerprint():
        report.faults.append(f"{fmt.UNITS}: fingerprint does not match its recipe")
    runs: list[tuple[int, int]] = []
    for number, unit in enumerate(table.units):
        mine = fmt.doc_runs(unit)
        if unit["id"] != number or sum(count for _, count in mine) != unit["num_docs"]:
            report.faults.append(f"{fmt.UNITS}: unit {number} is not what its place says")
        runs += mine
    # In a permuted corpus units come from everywhere, and with a limit some are missing.
    recipe = table.recipe
    drawn = recipe.shuffle_docs is not None
    gaps = drawn and (recipe.max_docs, recipe.max_tokens) != (None, None)
    next_doc = 0
    for first, count in sorted(runs) if drawn else runs:
        if first < next_doc or (first > next_doc and not gaps):
            report.faults.append(f"{fmt.UNITS}: document {first} does not follow the one before it")
        next_doc = first + count


def _check_sums(table: Table, total: Audit, report: Report) -> None:
    """Check properties that hold only over all units of a shuffled dataset together."""
    assert table.shuffled
    if f"{total.entries % (1 << 64):016x}" != table.shuffled["entries"]:
        report.faults.append(f"{fmt.UNITS}: its rows are not those that were shuffled")
    for what, difference in sorted(total.off.items()):
        if difference:
            report.faults.append(f"{fmt.UNITS}: {what}: {difference:+} where all units are added")


def _read_records(ledger: Ledger, table: Table, report: Report) -> Iterator[Done]:
    """Yield the done records that can be read; the others are faults."""

    def read(unit: Mapping[str, Any]) -> Done | SpileError | None:
        try:
            return ledger.read_done(int(unit["id"]))
        except SpileError as error:
            return error

    found = mapped(read, table.units, ledger.objects.parallel)
    for unit, done in zip(table.units, found, strict=True):
        if done is None:
            report.absent += 1
            report.missing.append(int(unit["id"]))
        elif isinstance(done, SpileError):
            report.faults.append(str(done))
            # (A server that does not answer is a fault, but not one of the record.)
            if isinstance(done, CorruptError) or isinstance(done.__cause__, OSError):
                report.damaged[int(unit["id"])] = _digest_of(ledger, fmt.done_key(int(unit["id"])))
        else:
            key = fmt.done_key(done.unit)
            before = len(report.faults)
            if done.fingerprint != table.fingerprint:
                report.faults.append(f"{key}: belongs to another recipe")
            if done.rows and {s.tap for s in done.shards} != set(table.taps):
                report.faults.append(f"{key}: does not hold exactly the taps of the recipe")
            if len(report.faults) > before:
                report.damaged[done.unit] = record_digest(done)
            yield done


def _check_records(
    ledger: Ledger, table: Table, records: list[Done], report: Report, partial: bool
) -> None:
    """Check the records beside the units: weights' hashes, heartbeats, the derived manifest."""
    for key in sorted(ledger.objects.list()):
        kind = _RECORDS.get(key)
        if fmt.parse_worker_key(key):
            kind = "worker"
        if kind is None:
            continue
        before = len(report.faults)
        body = _read_beside(ledger, key, kind, report)
        if body is not None:
            _check_beside(key, kind, body, table, records, report)
        if len(report.faults) > before:
            report.beside.append(key)
    present = set(ledger.objects.list())
    complete = len(records) == len(table.units) and any(done.rows for done in records)
    if complete and fmt.MANIFEST not in present and not partial:
        report.faults.append(f"{fmt.MANIFEST}: is missing; the same `spile extract` makes it")
        report.beside.append(fmt.MANIFEST)
    by_channel = any(info.scaled_by == "channel" for info in table.taps.values())
    for key in (fmt.MODEL, *([fmt.SCALES] if by_channel else [])):
        if records and key not in present:
            report.faults.append(f"{key}: is missing")
            report.beside.append(key)


def _read_beside(ledger: Ledger, key: str, kind: str, report: Report) -> dict[str, Any] | None:
    """Return a record's body; None if it does not exist, or is a fault."""
    try:
        return fmt.decode_record(key, ledger.objects.get(key), kind)
    except FileNotFoundError:
        pass
    except SpileError as error:
        report.faults.append(str(error))
    except OSError as error:
        if kind == "worker":  # perhaps another user's; no row depends on it
            warn_unreadable(ledger.objects, key, error)
        else:
            report.faults.append(f"{key}: cannot be read ({error.strerror or error})")
    return None


def _check_beside(
    key: str,
    kind: str,
    body: dict[str, Any],
    table: Table,
    records: list[Done],
    report: Report,
) -> None:
    try:
        if kind == "scales":
            scales_from_json(body, table.taps)
        elif kind == "prediction":
            Prediction.from_json(body)
    except SpileError as error:
        report.faults.append(str(error))
    if kind == "manifest":
        if len(records) < len(table.units):
            report.faults.append(
                f"{key}: says the dataset is whole, but done records are missing: "
                + _missing(table, records)
            )
        elif body != derive_manifest(table, records):
            report.faults.append(
                f"{key}: does not follow from the done records; delete it, and the same "
                "`spile extract` makes it anew"
            )


def _missing(table: Table, records: list[Done]) -> str:
    present = {done.unit for done in records}
    keys = [fmt.done_key(u["id"]) for u in table.units if u["id"] not in present]
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _accounted(key: str, named: set[str], report: Report) -> bool:
    if key in named or key in (fmt.UNITS, fmt.SIGNED, fmt.SIGNATURE) or key in _RECORDS:
        return True
    unit = fmt.parse_done_key(key)
    if unit is not None:
        if unit >= report.units:
            report.faults.append(f"{key}: is the record of a unit that does not exist")
        return True
    return fmt.parse_worker_key(key) is not None


def record_digest(done: Done) -> str:
    """Return the SHA-256 of a unit's record."""
    return hashlib.sha256(fmt.encode_record("done", done.to_json())).hexdigest()


def _digest_of(ledger: Ledger, key: str) -> str:
    try:
        return hashlib.sha256(ledger.objects.get(key)).hexdigest()
    except (OSError, SpileError):
        return ""


def _read_journal(path: Path) -> set[str]:
    found: set[str] = set()
    for line in path.read_text().splitlines():
        try:
            found.add(str(json.loads(line)["record"]))
        except (ValueError, KeyError, TypeError):
            continue  # a killed process may leave a partial last line
    return found

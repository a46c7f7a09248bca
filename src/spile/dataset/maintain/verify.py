"""The audit: every byte of every object, and whether together they are one complete dataset.

Names and the manifest are not trusted: records are checked against their own checksums, shards
against the records, rows against the index (`audit.py`), and the manifest against a fresh
derivation. Files that no record names are listed as orphans (`gc.py` removes those).
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.cache_dir import cache_directory
from spile.core.errors import CorruptError, SpileError, StoreError
from spile.core.threads import OnProgress, mapped
from spile.dataset import format as fmt
from spile.dataset.codec.columns import columns_in, encode_columns
from spile.dataset.codec.quantization import scales_from_json
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Done
from spile.dataset.maintain.audit import Audit, audit_listed, audit_unit
from spile.dataset.maintain.features import audit_features
from spile.dataset.maintain.signature import (
    SignedList,
    check_beside,
    check_units,
    refuse_another,
)
from spile.dataset.records.heartbeat import warn_unreadable
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import Manifest, ManifestSums, named_by, named_files
from spile.dataset.records.passes import Pass, live_passes, pass_names, readable_passes
from spile.dataset.records.prediction import Prediction
from spile.dataset.records.segments import derive_segment, describes, read_statistics
from spile.dataset.records.table import Table, read_tokenizer, table_records, tokenizer_data
from spile.objects import Entry, Objects

_RECORDS = {
    fmt.MODEL: "model",
    fmt.SCALES: "scales",
    fmt.CHECK: "check",
    fmt.PREDICTION: "prediction",
}


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
    # The audits of passes, by name. Their faults, orphans and bytes are among those above, too.
    passes: "dict[str, Report]" = field(default_factory=dict[str, "Report"])

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(
    objects: Objects,
    *,
    partial: bool = False,
    quick: bool = False,
    journal: Journal | None = None,
    progress: OnProgress | None = None,
    signed: SignedList | None = None,
) -> Report:
    """Audit a dataset and its passes, several units at once.

    A pass that is still being made is no fault: the dataset reads as before.

    Args:
        partial: whether unfinished units are allowed.
        quick: check sizes and etags, from a listing; only records are read.
        journal: records the units found valid; units it knows are not read again.
        progress: called with the number of units checked so far, and the total.
        signed: the signed list; everything there must be in it and match.
    """
    ledger = Ledger(objects)
    report = _audit_ledger(ledger, partial, quick, journal, progress, signed)
    if report.units:
        report.faults += _faulty_passes(ledger)
    for each in live_passes(ledger) if report.units else ():
        prefix = each.prefix
        found = _audit_ledger(each.ledger, True, quick, journal, progress, None)
        report.passes[each.name] = found
        report.faults += [f"{prefix}{fault.removeprefix(prefix)}" for fault in found.faults]
        report.orphans += [prefix + key for key in found.orphans]
        report.bytes += found.bytes
        if signed and found.units:
            taps = ", ".join(each.ledger.table().taps)
            report.faults.append(
                f"{prefix}{fmt.PASS}: {taps} were added, and a signature covers only the taps that "
                "a dataset was made with; `spile drop` them, or sign a copy by `spile compact`"
            )
    if report.units:
        faults, orphans = audit_features(ledger, quick=quick)
        report.faults += faults
        report.orphans += orphans
    if journal:
        journal.end()
    return report


def _faulty_passes(ledger: Ledger) -> Iterator[str]:
    """Yield the faults of passes that only show beside others, or without their own record."""
    live = live_passes(ledger)
    for name in pass_names(ledger.objects):
        each = Pass(ledger, name)
        if name not in {other.name for other in live} and not each.is_dropped and each.bytes:
            yield (
                f"{each.prefix}{fmt.PASS}: is missing; add its taps again by the same --add-taps, "
                f"which keeps its units, or `spile drop --taps {name}`"
            )
    base = ledger.table()
    holders = dict.fromkeys(base.taps, fmt.UNITS)
    for each, table in readable_passes(ledger, base):
        for tap in table.taps:
            if tap in holders:
                yield (
                    f"{each.prefix}{fmt.PASS}: holds {tap}, as {holders[tap]} does; "
                    f"`spile drop --taps {each.name}` removes it from here"
                )
            holders.setdefault(tap, each.prefix + fmt.PASS)


def _audit_ledger(
    ledger: Ledger,
    partial: bool,
    quick: bool,
    journal: Journal | None,
    progress: OnProgress | None,
    signed: SignedList | None,
) -> Report:
    """Audit a dataset without its passes, or one pass."""
    report, objects = Report(quick=quick), ledger.objects
    try:
        table = ledger.table()
        report.units = len(table.units)
        _check_table(table, report)
        if signed:
            refuse_another(objects, table, signed)
    except SpileError as error:
        report.faults.append(str(error))
        return report
    if signed:
        report.faults += check_beside(objects, table, signed)
        report.signed_by = f"{signed.signer} ({signed.key})"
    total, manifests = Audit(0), ledger.derived.manifest_keys()
    for group in range(table.layout.groups(report.units)):
        # One group at a time: memory does not grow with the dataset. What is derived from records
        # is looked for before them: it may appear while they are read.
        sealed = ledger.derived.segments_of(table, group)
        records = list(_read_records(ledger, table, group, report))
        if signed:
            faults, unsigned = check_units(table, group, records, signed)
            report.faults += faults
            report.unsigned += unsigned
        before, prefix = len(report.faults), table.layout.attempts_prefix(group)
        entries = {entry.key: entry for entry in objects.entries(prefix)} if quick else {}

        def audit(done: Done, entries: Mapping[str, Entry] = entries) -> Audit:
            if quick:
                return audit_listed(entries, done)
            if journal and journal.knows(done) and not table.shuffled:  # the sums need every unit
                return Audit(sum(file.bytes for file in done.files()), known=True)
            digests = signed.digests_of(done) if signed else None
            return audit_unit(objects, table, table.units[done.unit], done, digests)

        statistics: list[Mapping[str, TapStats] | None] = []
        audits = mapped(audit, records, objects.parallel)
        for done, found in zip(records, audits, strict=True):
            if progress:
                progress(report.units_done, report.units)
            report.units_done += 1
            statistics.append(found.statistics)
            report.rows += done.rows
            report.bytes += found.bytes
            report.resumed += found.known
            report.faults += found.faults
            if found.faults:
                report.damaged[done.unit] = record_digest(done)
            total.entries += found.entries
            total.off.update(found.off)
            if journal and not (found.faults or found.known):
                journal.note(done)
        if len(report.faults) == before:  # else it cannot be derived, or follows from damage
            _check_segments(ledger, table, sealed, records, statistics, report)
        named = {file.key for done in records for file in done.files()}
        report.orphans += sorted({*(entries or objects.list(prefix))} - named)
    if report.unsigned:
        report.faults.append(_unsigned(report, table))
    if report.absent and not partial:
        report.faults.append(f"{report.absent} of {report.units} units are not done")
    elif table.shuffled and not quick and report.ok:
        _check_sums(table, total, report)
    _check_records(ledger, table, report, partial, manifests)
    return report


def _unsigned(report: Report, table: Table) -> str:
    shown = ", ".join(map(str, report.unsigned[:10]))
    more = len(report.unsigned) - 10
    return (
        f"{fmt.SIGNED}: covers {report.units_done - len(report.unsigned)} of "
        f"{report.units_done} units; not signed: {shown}{f' and {more} more' if more > 0 else ''}; "
        "`spile sign` again"
    )


def _check_table(table: Table, report: Report) -> None:
    if table.fingerprint != table.recipe.fingerprint():
        report.faults.append(f"{fmt.UNITS}: fingerprint does not match its recipe")
    unit, first, count = table.units.doc_runs
    sums = np.bincount(unit, count, len(table.units)).astype(np.int64)
    for number in np.flatnonzero(sums != table.units.num_docs).tolist():
        report.faults.append(f"{fmt.UNITS}: unit {number} is not what its place says")
    # In a permuted corpus units come from everywhere, and with a limit some are missing. A copy may
    # hold some of the units.
    recipe = table.recipe
    drawn = recipe.shuffle_docs is not None
    gaps = drawn and (recipe.max_docs, recipe.max_tokens) != (None, None)
    gaps = gaps or bool(table.made_of)
    order = np.lexsort((count, first)) if drawn else np.arange(len(first))
    first, ends = first[order], np.concatenate([[0], (first + count)[order][:-1]])
    for run in np.flatnonzero((first < ends) | ((first > ends) & (not gaps))).tolist():
        report.faults.append(
            f"{fmt.UNITS}: document {first[run]} does not follow the one before it"
        )


Statistics = list[Mapping[str, TapStats] | None]


def _check_segments(
    ledger: Ledger,
    table: Table,
    sealed: Mapping[str, Table],
    records: list[Done],
    statistics: Statistics,
    report: Report,
) -> None:
    """Check that the segments of a group follow from its records: one for each generation of it.

    Args:
        sealed: the segments, by key, each with the table of its generation.
        statistics: those of each unit, as far as they were read.
    """
    for key, each in sealed.items():
        had = [done.unit < len(each.units) for done in records]
        these = [*itertools.compress(records, had)]
        of_these = [*itertools.compress(statistics, had)]
        _check_segment(ledger, each, key, these, of_these, report)


def _check_segment(
    ledger: Ledger,
    table: Table,
    key: str,
    records: list[Done],
    statistics: Statistics,
    report: Report,
) -> None:
    group = fmt.parse_segment_key(key) or 0
    if len(records) < len(table.layout.units_of(group, len(table.units))):
        fault = f"{key}: says that its units are done, but done records are missing or damaged"
    else:
        try:
            if report.quick:  # files are not read
                follows = describes(columns_in(key, ledger.objects.get(key)), records)
            else:
                found = (
                    known or read_statistics(ledger.objects, done, table.taps)
                    for done, known in zip(records, statistics, strict=True)
                )
                derived = encode_columns(derive_segment(records, found))
                follows = ledger.objects.get(key) == derived
        except SpileError:
            follows = False
        if follows:
            return
        fault = (
            f"{key}: does not follow from the done records; delete it and "
            f"{table.layout.manifest_key}, and the same `spile extract` makes them again"
        )
    report.faults.append(fault)
    report.beside.append(key)


def _check_sums(table: Table, total: Audit, report: Report) -> None:
    """Check properties that hold only over all units of a shuffled dataset together."""
    assert table.shuffled
    if f"{total.entries % (1 << 64):016x}" != table.shuffled["entries"]:
        report.faults.append(f"{fmt.UNITS}: its rows are not those that were shuffled")
    for what, difference in sorted(total.off.items()):
        if difference:
            report.faults.append(f"{fmt.UNITS}: {what}: {difference:+} where all units are added")


def _read_records(ledger: Ledger, table: Table, group: int, report: Report) -> Iterator[Done]:
    """Yield the done records of a group that can be read; the others are faults."""

    def read(unit: int) -> Done | SpileError | None:
        try:
            return ledger.read_done(unit)
        except SpileError as error:
            return error

    layout = table.layout
    units = layout.units_of(group, len(table.units))
    found = mapped(read, units, ledger.objects.parallel)
    for unit, done in zip(units, found, strict=True):
        key = layout.done_key(unit)
        if done is None:
            report.absent += 1
            report.missing.append(unit)
        elif isinstance(done, SpileError):
            report.faults.append(str(done))
            # (A server that does not answer is a fault, but not one of the record.)
            if isinstance(done, CorruptError) or isinstance(done.__cause__, OSError):
                report.damaged[unit] = _digest_of(ledger, key)
        else:
            before = len(report.faults)
            if why := ledger.other_origin(table, done):
                report.faults.append(f"{key}: {why}")
            if done.rows and {s.tap for s in done.shards} != set(table.taps):
                report.faults.append(f"{key}: does not hold exactly the taps of the recipe")
            if differs := _other_rows(ledger, done):
                report.faults.append(f"{key}: has other rows than the dataset ({differs})")
            if len(report.faults) > before:
                report.damaged[done.unit] = record_digest(done)
            yield done


def _other_rows(ledger: Ledger, done: Done) -> str | None:
    """Return how the rows of a pass's unit differ from the dataset's; None if they do not.

    A record of the dataset that cannot be read is a fault of the dataset alone.
    """
    with contextlib.suppress(SpileError):
        return ledger.of_pass and ledger.of_pass.other_rows(done)
    return None


def _check_records(
    ledger: Ledger, table: Table, report: Report, partial: bool, manifests: Collection[str]
) -> None:
    """Check everything beside the units: weights' hashes, heartbeats, the derived manifest.

    Args:
        manifests: those that were there before records of units were read.
    """
    present: set[str] = set()
    named = named_files(table)
    derived = {fmt.manifest_key(number): number for number in range(len(table.generations) + 1)}
    kinds, sums = {**_RECORDS, **dict.fromkeys(derived, "manifest")}, ManifestSums()
    for key in sorted(_others(ledger, table, report)):
        kind = "worker" if fmt.parse_worker_key(key) else kinds.get(key)
        if kind is None:
            continue
        present.add(key)
        before = len(report.faults)
        body = _read_beside(ledger, key, kind, report)
        if body is not None and kind == "manifest":
            is_later = key not in manifests
            found = _check_manifest(ledger, table.at(derived[key]), report, sums, is_later)
            named |= named_by(found) if found else set()
        elif body is not None:
            _check_beside(kind, body, table, report)
        if len(report.faults) > before:
            report.beside.append(key)
    complete, newest = report.units_done == report.units and report.rows, table.layout.manifest_key
    if complete and newest not in present and not partial:
        report.faults.append(f"{newest}: is missing; the same `spile extract` makes it")
        report.beside.append(newest)
    if ledger.of_pass and newest not in present:
        report.faults += _set_aside(ledger, table, report)
    by_channel = any(info.scaled_by == "channel" for info in table.taps.values())
    for key in (fmt.MODEL, *([fmt.SCALES] if by_channel else [])):
        if report.units_done and key not in present:
            report.faults.append(f"{key}: is missing")
            report.beside.append(key)
    _check_tokenizer(ledger, table, report)
    unsettled = tuple(  # (who creates a manifest creates its columns first)
        f"{fmt.generation_folder(number)}{fmt.MANIFEST_COLUMNS}"
        for key, number in derived.items()
        if key not in present
    )
    report.orphans = sorted(
        key for key in report.orphans if key not in named and not key.startswith(unsettled)
    )


def _set_aside(ledger: Ledger, table: Table, report: Report) -> list[str]:
    """Return as faults what a repair of a pass has moved aside, and not made again.

    A pass may be unfinished, but it was finished before that repair.
    """
    gone = {table.layout.manifest_key, *map(table.layout.done_key, report.missing)}
    aside = {key.split("/", 2)[-1] for key in ledger.objects.list(fmt.DAMAGED)}
    return [
        f"{key}: was moved aside by a repair that has not ended; `spile verify --repair` ends it"
        for key in sorted(gone & aside)
    ]


def _check_tokenizer(ledger: Ledger, table: Table, report: Report) -> None:
    """Check each file of the tokenizer, and that together they are the recipe's."""
    sound = True
    for name, file in table.tokenizer.items():
        try:
            tokenizer_data(ledger.objects, name, file)
        except SpileError as error:
            sound = False
            report.faults.append(str(error))
            report.beside.append(file.key)
    try:
        if sound:
            read_tokenizer(ledger.objects, table)
    except SpileError as error:
        report.faults.append(str(error))


def _others(ledger: Ledger, table: Table, report: Report) -> Iterator[str]:
    """Yield the keys beside the units; those that are part of no dataset are orphans.

    What belongs to generations that were added since the table was read is left out.
    """
    layout, records = table.layout, {**_RECORDS, **table_records(table)}
    passes = {each.prefix for each in live_passes(ledger)}
    beyond = dict[str, int]()  # keys of units that the table does not have
    later = dict[str, int]()  # keys of generations that it does not have
    for key in ledger.objects.list():
        if fmt.split_pass_key(key)[0] in passes or key.endswith(f"/{fmt.DROPPED}"):
            continue
        if key.startswith(fmt.FEATURES):
            continue  # (`features.py` looks at these)
        unit, attempt = fmt.parse_done_key(key), fmt.parse_attempt_key(key)
        if unit is not None and layout.done_key(unit) == key:
            beyond |= {key: unit} if unit >= report.units else {}
        elif attempt is not None and attempt[0] < report.units:
            expected = layout.attempt_prefix(attempt[0], attempt[1])
            if not key.startswith(expected):
                report.orphans.append(key)
        elif attempt is not None:
            beyond[key] = attempt[0]
        elif key in records or fmt.parse_worker_key(key):
            yield key
        elif key in (fmt.PASS, *fmt.SIGNATURES) or _is_segment(key, table):
            continue
        elif (generation := fmt.parse_generation(key)) > len(table.generations):
            later[key] = generation
        elif not key.startswith(fmt.DIGESTS):
            report.orphans.append(key)
    newest = ledger.table() if beyond or later else table
    report.orphans += [key for key, number in later.items() if number > len(newest.generations)]
    for key in [key for key, unit in beyond.items() if unit >= len(newest.units)]:
        if fmt.parse_done_key(key) is None:
            report.orphans.append(key)
        else:
            report.faults.append(f"{key}: is the record of a unit that does not exist")
            report.beside.append(key)


def _is_segment(key: str, table: Table) -> bool:
    group = fmt.parse_segment_key(key)
    if group is None or group >= table.layout.groups(len(table.units)):
        return False
    return fmt.parse_generation(key) in table.layout.generations_of(group)


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


def _check_beside(kind: str, body: dict[str, Any], table: Table, report: Report) -> None:
    try:
        if kind == "scales":
            scales_from_json(body, table.taps)
        elif kind == "prediction":
            Prediction.from_json(body)
    except SpileError as error:
        report.faults.append(str(error))


def _check_manifest(
    ledger: Ledger, table: Table, report: Report, before: ManifestSums, is_later: bool
) -> Manifest | None:
    """Check that the manifest follows from the done records, and from segments that do.

    Args:
        before: as in `Derived.derive`.
        is_later: whether it was created after records were read; some may have been missing then.
    """
    key = table.layout.manifest_key
    missing = [unit for unit in report.missing if unit < len(table.units)]
    damaged = [unit for unit in report.damaged if unit < len(table.units)]
    if is_later and missing:
        return ledger.derived.read_manifest(table.layout)
    if missing or (damaged and report.units_done < report.units):
        keys = [table.layout.done_key(unit) for unit in sorted({*missing, *damaged})]
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        report.faults.append(
            f"{key}: says the dataset is whole, but done records are missing or damaged: "
            + ", ".join(keys[:5])
            + more
        )
        return None
    try:
        manifest = ledger.derived.read_manifest(table.layout)
        if manifest is not None:
            ledger.derived.rows_of_units(table, manifest)
        follows = ledger.derived.manifest_follows(table, before)
    except SpileError as error:
        report.faults.append(str(error))
        return None
    if not follows:
        report.faults.append(
            f"{key}: does not follow from the done records; delete it, and the same "
            "`spile extract` makes it again"
        )
    return manifest


def record_digest(done: Done) -> str:
    """Return the SHA-256 of a unit's record, in a version of the format."""
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

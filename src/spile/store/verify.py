"""The audit: every byte of every object, and that together they are one whole dataset.

Nothing is assumed from names or from the manifest: records are checked against their own
checksums, shards against the records, rows against the index, the manifest against a fresh
derivation. What no record names is listed as an orphan (`gc.py` removes those).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from spile.errors import SpileError
from spile.index import INDEX_DTYPE
from spile.objects import Objects
from spile.store import format as fmt
from spile.store.format import Done, Shard
from spile.store.ledger import Ledger, Table, derive_manifest
from spile.store.quant import scales_from_json
from spile.store.shard import open_tensor, read_shard_header
from spile.store.stats import TapStats

_CHUNK = 1 << 24
_RECORDS = {
    fmt.MODEL: "model",
    fmt.SCALES: "scales",
    fmt.MANIFEST: "manifest",
    fmt.CHECK: "check",
}
Progress = Callable[[int, int], None]


@dataclass
class Report:
    """What an audit found."""

    units: int = 0
    units_done: int = 0
    absent: int = 0
    rows: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list[str])
    orphans: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(objects: Objects, *, partial: bool = False, progress: Progress | None = None) -> Report:
    """Audit a dataset. With `partial`, units that are not done yet are no fault."""
    report = Report()
    ledger = Ledger(objects)
    try:
        table = ledger.table()
    except SpileError as error:
        report.faults.append(str(error))
        return report
    report.units = len(table.units)
    _check_table(table, report)
    records: list[Done] = []
    named: set[str] = set()
    for number, unit in enumerate(table.units):
        if progress:
            progress(number, len(table.units))
        done = _check_unit(
            ledger, table, int(unit["id"]), unit["first_doc"], unit["num_docs"], report
        )
        if done is not None:
            records.append(done)
            named.update(file.key for file in done.files())
    report.units_done = len(records)
    report.rows = sum(done.rows for done in records)
    if report.absent and not partial:
        report.faults.append(f"{report.absent} of {report.units} units are not done")
    _check_records(ledger, table, records, report, partial)
    report.orphans = [key for key in sorted(objects.list()) if not _accounted(key, named, report)]
    return report


def _check_table(table: Table, report: Report) -> None:
    if table.fingerprint != table.recipe.fingerprint():
        report.faults.append(f"{fmt.UNITS}: fingerprint does not match its recipe")
    next_doc = 0
    for number, unit in enumerate(table.units):
        if unit["id"] != number or unit["first_doc"] != next_doc:
            report.faults.append(f"{fmt.UNITS}: unit {number} does not follow the one before it")
        next_doc = unit["first_doc"] + unit["num_docs"]


def _check_unit(
    ledger: Ledger, table: Table, unit: int, first_doc: int, num_docs: int, report: Report
) -> Done | None:
    try:
        done = ledger.read_done(unit)
    except SpileError as error:
        report.faults.append(str(error))
        return None
    if done is None:
        report.absent += 1
        return None
    key = fmt.done_key(unit)
    faults: list[str] = []
    if done.fingerprint != table.fingerprint:
        faults.append(f"{key}: belongs to another recipe")
    if done.rows and {s.tap for s in done.shards} != set(table.taps):
        faults.append(f"{key}: does not hold exactly the taps of the recipe")
    for file in done.files():
        report.bytes += file.bytes
        faults += _check_bytes(ledger.objects, file)
    # What the bytes mean is of no interest if they are not the ones that were written.
    if not faults:
        try:
            faults += _check_content(ledger.objects, table, done, first_doc, num_docs)
        except SpileError as error:
            faults.append(str(error))
    report.faults += faults
    return done


def _check_bytes(objects: Objects, file: Shard) -> Iterator[str]:
    digest = xxhash.xxh3_128()
    try:
        size = objects.size(file.key)
        if size != file.bytes:
            yield f"{file.key}: has {size} bytes, {file.bytes} were written"
            return
        for start in range(0, size, _CHUNK):
            digest.update(objects.get_range(file.key, start, min(start + _CHUNK, size)))
    except FileNotFoundError:
        yield f"{file.key}: is missing"
        return
    except OSError as error:
        yield f"{file.key}: cannot be read ({error.strerror or error})"
        return
    if digest.hexdigest() != file.digest:
        yield f"{file.key}: checksum does not match (damaged, or another file in its place)"


def _check_content(
    objects: Objects, table: Table, done: Done, first_doc: int, num_docs: int
) -> Iterator[str]:
    header = read_shard_header(objects, done.index.key)
    if {n: (i.dtype, i.shape) for n, i in header.items()} != {
        name: (INDEX_DTYPE[name], (done.rows,)) for name in INDEX_DTYPE.names or ()
    }:
        yield f"{done.index.key}: is not an index of {done.rows} rows"
        return
    columns = {n: open_tensor(objects, done.index.key, i) for n, i in header.items()}
    docs = columns["doc"]
    if done.rows and (docs.min() < first_doc or docs.max() >= first_doc + num_docs):
        yield f"{done.index.key}: names documents outside its unit"
        return
    order = np.lexsort((columns["offset"], docs))
    doc, offset = docs[order], columns["offset"][order]
    begins = np.flatnonzero(np.diff(doc, prepend=-1))
    expected = np.arange(done.rows) - np.repeat(begins, np.diff(begins, append=done.rows))
    if table.recipe.keeps_all:
        if not np.array_equal(offset, expected) or done.rows != done.tokens:
            yield f"{done.index.key}: a token is missing or doubled"
        if len(begins) != done.documents:
            yield f"{done.index.key}: {len(begins)} documents, the record says {done.documents}"
    elif not (np.diff(doc) | np.diff(offset)).all() or done.rows > done.tokens:
        yield f"{done.index.key}: a token is doubled"
    elif done.rows:
        # A kept token has all those before it in its document behind it.
        ends = np.append(begins[1:], done.rows) - 1
        read = int((offset[ends].astype(np.int64) + 1).sum())
        if offset.min() < 0 or read > done.tokens or len(begins) > done.documents:
            yield f"{done.index.key}: names tokens that were not read"
    if done.documents + sum(done.skipped.values()) != num_docs:
        yield f"{fmt.done_key(done.unit)}: not every document of the unit is accounted for"

    stats_header = read_shard_header(objects, done.statistics.key)
    tensors = {n: open_tensor(objects, done.statistics.key, i) for n, i in stats_header.items()}
    for tap, spec in table.taps.items():
        if not {*TapStats.empty(spec.width).to_tensors(tap)} <= {*tensors}:
            yield f"{done.statistics.key}: holds no statistics of {tap}"
            continue
        stats = TapStats.from_tensors(tap, tensors)
        nonfinite = 0
        for shard in done.shards:
            if shard.tap == tap:
                found = read_shard_header(objects, shard.key)
                wanted = {tap: (spec.storage, (shard.count, *spec.shape))}
                if spec.scaled_by == "row":
                    wanted[fmt.scale_name(tap)] = (fmt.SCALE_DTYPE, (shard.count,))
                if {n: (i.dtype, i.shape) for n, i in found.items()} != wanted:
                    yield f"{shard.key}: does not hold {shard.count} rows of {tap}"
                    continue
                nonfinite += _count_nonfinite(open_tensor(objects, shard.key, found[tap]))
                if spec.scaled_by == "row":
                    scale = open_tensor(objects, shard.key, found[fmt.scale_name(tap)])[:]
                    if not (np.isfinite(scale) & (scale > 0)).all():
                        yield f"{shard.key}: holds scales that are not positive"
        if stats.count != done.rows:
            yield f"{done.statistics.key}: counts {stats.count} rows of {tap}, not {done.rows}"
        # int8 has no code for them: there, only the statistics know.
        if nonfinite != stats.nonfinite and spec.scaled_by != "channel":
            yield (
                f"unit {done.unit}: {nonfinite} values of {tap} are not finite, "
                f"{stats.nonfinite} were when written"
            )


def _count_nonfinite(rows: np.ndarray) -> int:
    step = max(1, _CHUNK // max(1, rows[:1].nbytes))
    chunks = (rows[i : i + step] for i in range(0, len(rows), step))
    return sum(int(np.count_nonzero(~np.isfinite(chunk))) for chunk in chunks)


def _check_records(
    ledger: Ledger, table: Table, records: list[Done], report: Report, partial: bool
) -> None:
    """The records beside the units: weights' hashes, heartbeats, the derived manifest."""
    for key in sorted(ledger.objects.list()):
        kind = _RECORDS.get(key)
        if fmt.parse_worker_key(key):
            kind = "worker"
        if kind is None:
            continue
        try:
            body = fmt.decode_record(key, ledger.objects.get(key), kind)
        except FileNotFoundError:
            continue
        except SpileError as error:
            report.faults.append(str(error))
            continue
        if kind == "scales":
            try:
                scales_from_json(body, table.taps)
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
    present = set(ledger.objects.list())
    if len(records) == len(table.units) and fmt.MANIFEST not in present and not partial:
        report.faults.append(f"{fmt.MANIFEST}: is missing; the same `spile extract` makes it")
    by_channel = any(info.scaled_by == "channel" for info in table.taps.values())
    for key in (fmt.MODEL, *([fmt.SCALES] if by_channel else [])):
        if records and key not in present:
            report.faults.append(f"{key}: is missing")


def _missing(table: Table, records: list[Done]) -> str:
    present = {done.unit for done in records}
    keys = [fmt.done_key(u["id"]) for u in table.units if u["id"] not in present]
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _accounted(key: str, named: set[str], report: Report) -> bool:
    if key in named or key == fmt.UNITS or key in _RECORDS:
        return True
    unit = fmt.parse_done_key(key)
    if unit is not None:
        if unit >= report.units:
            report.faults.append(f"{key}: is the record of a unit that does not exist")
        return True
    return fmt.parse_worker_key(key) is not None

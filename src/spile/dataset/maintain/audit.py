"""The audit of one unit: its files hold the bytes that were written, and these are consistent.

Local files are read through memory maps. Remote files are fetched once, whole if they are small
enough, and both their bytes and their contents are checked.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from spile.core.errors import CorruptError, SpileError
from spile.core.units import Unit
from spile.dataset import format as fmt
from spile.dataset.codec.documents import read_documents, rows_of
from spile.dataset.codec.shard import (
    contains_exactly,
    index_tensors,
    open_tensor,
    read_shard_header,
    read_tensors,
    tap_tensors,
)
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Done, Shard, TapInfo
from spile.dataset.maintain.scatter import entries_sum
from spile.dataset.records.segments import statistics_in
from spile.dataset.records.table import Table
from spile.objects import Entry, MemoryObjects, Objects

_CHUNK = 1 << 24
_HELD = 256 << 20  # most bytes of a remote file to hold in memory


@dataclass
class Audit:
    """The findings about a unit's files."""

    bytes: int
    faults: list[str] = field(default_factory=list[str])
    known: bool = False  # from an earlier audit
    # For a unit of a shuffled dataset: the sum of its index entries, and differences that must add
    # up to zero over all units.
    entries: int = 0
    statistics: Mapping[str, TapStats] | None = None  # of the unit's rows, if they were read
    off: Counter[str] = field(default_factory=Counter[str])


def audit_listed(entries: Mapping[str, Entry], done: Done) -> Audit:
    """Check by a listing alone: each file exists, with the right size and the same etag."""
    audit = Audit(sum(file.bytes for file in done.files()))
    for file in done.files():
        entry = entries.get(file.key)
        if entry is None:
            audit.faults.append(f"{file.key}: is missing")
        elif entry.size != file.bytes:
            audit.faults.append(_wrong_size(file, entry.size))
        elif file.etag and entry.etag and file.etag != entry.etag:
            audit.faults.append(
                f"{file.key}: is not the object that was written (its etag is another); if the "
                "dataset was copied, `spile verify` without --quick tells more"
            )
    return audit


def audit_unit(
    objects: Objects,
    table: Table,
    unit: Unit,
    done: Done,
    signed: Mapping[str, str] | None = None,
) -> Audit:
    """Check every byte.

    Args:
        signed: SHA-256 that files must have, by key.
    """
    audit = Audit(sum(file.bytes for file in done.files()))
    content: list[str] = []
    nonfinite: dict[str, int] = dict.fromkeys(table.taps, 0)
    statistics: dict[str, np.ndarray] | None = None
    docs: np.ndarray | None = None  # the document of each row
    for file in done.files():
        try:
            held = _held(objects, file)
            audit.faults += _check_bytes(held, file, (signed or {}).get(file.key))
        except CorruptError as error:
            audit.faults.append(str(error))
            continue
        if audit.faults:
            continue
        try:
            if file is done.index and table.shuffled:
                content += _check_shuffled_index(held, table, done, audit)
            elif file is done.index:
                content += _check_index(held, table, done, unit.doc_runs)
                docs = None if content else read_tensors(held, file.key)["doc"]
            elif file is done.statistics:
                statistics = read_tensors(held, file.key)
            elif file is done.documents_table:
                documents = read_documents(held, file, table.recipe.table_columns)
                content += _check_documents(done, unit, documents, docs)
                audit.off["documents' rows"] += sum(documents["rows"].to_pylist()) - done.rows
            elif file.tap in table.taps:
                faults, count = _check_shard(held, file, table.taps[file.tap])
                content += faults
                nonfinite[file.tap] += count
        except SpileError as error:
            content.append(str(error))
    # The meaning of the bytes does not matter if they are not those that were written.
    if not audit.faults:
        if statistics is not None:
            content += _check_statistics(table, done, statistics, nonfinite, audit)
        if done.documents + sum(done.skipped.values()) != unit.num_docs:
            key = table.layout.done_key(done.unit)
            content.append(f"{key}: not every document of the unit is accounted for")
        audit.faults += content
        if statistics is not None and not audit.faults:
            audit.statistics = statistics_in(statistics, table.taps)
    return audit


def _held(objects: Objects, file: Shard) -> Objects:
    """Return a store that holds the file: this one, or one in memory with a fetched copy."""
    if objects.local_path(file.key) is not None or file.bytes > _HELD:
        return objects
    memory = MemoryObjects(objects.url)
    try:
        if objects.size(file.key) == file.bytes:  # (another object may have any size)
            memory.create(file.key, objects.get(file.key))
            return memory
    except FileNotFoundError:
        pass
    return objects


def _wrong_size(file: Shard, size: int) -> str:
    return f"{file.key}: has {size} bytes, {file.bytes} were written"


def _check_bytes(objects: Objects, file: Shard, signed: str | None = None) -> Iterator[str]:
    digest, sha256 = xxhash.xxh3_128(), hashlib.sha256()
    try:
        size = objects.size(file.key)
        if size != file.bytes:
            yield _wrong_size(file, size)
            return
        for start in range(0, size, _CHUNK):
            data = objects.get_range(file.key, start, min(start + _CHUNK, size))
            digest.update(data)
            if signed is not None:
                sha256.update(data)
    except FileNotFoundError:
        yield f"{file.key}: is missing"
        return
    except OSError as error:
        yield f"{file.key}: cannot be read ({error.strerror or error})"
        return
    if digest.hexdigest() != file.digest:
        yield f"{file.key}: checksum does not match (damaged, or another file in its place)"
    elif signed is not None and sha256.hexdigest() != signed:
        yield f"{file.key}: is not the file that was signed"


def _index_columns(objects: Objects, table: Table, done: Done) -> dict[str, np.ndarray] | None:
    header = read_shard_header(objects, done.index.key)
    if not contains_exactly(header, index_tensors(done.rows, table.index_dtype)):
        return None
    return read_tensors(objects, done.index.key)


def _check_shuffled_index(
    objects: Objects, table: Table, done: Done, audit: Audit
) -> Iterator[str]:
    """Check an index whose rows come from the whole corpus."""
    columns = _index_columns(objects, table, done)
    if columns is None:
        yield f"{done.index.key}: is not an index of {done.rows} rows"
        return
    order = np.lexsort((columns["offset"], columns["doc"]))
    doc, offset = columns["doc"][order], columns["offset"][order]
    if not (np.diff(doc) | np.diff(offset)).all():
        yield f"{done.index.key}: a token is doubled"
    index = np.empty(done.rows, table.index_dtype)
    for name, column in columns.items():
        index[name] = column
    audit.entries = entries_sum(index)


def _check_index(
    objects: Objects, table: Table, done: Done, runs: Sequence[tuple[int, int]]
) -> Iterator[str]:
    columns = _index_columns(objects, table, done)
    if columns is None:
        yield f"{done.index.key}: is not an index of {done.rows} rows"
        return
    docs = columns["doc"]
    starts, counts = (np.array(part, np.int64) for part in zip(*sorted(runs), strict=True))
    place = np.searchsorted(starts, docs, side="right") - 1
    if (place < 0).any() or (docs >= (starts + counts)[place]).any():
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
        # If a token is kept, all tokens before it in its document were read.
        ends = np.append(begins[1:], done.rows) - 1
        read = int((offset[ends].astype(np.int64) + 1).sum())
        if offset.min() < 0 or read > done.tokens or len(begins) > done.documents:
            yield f"{done.index.key}: names tokens that were not read"


def _check_documents(
    done: Done, unit: Unit, table: Any, docs_of_rows: np.ndarray | None
) -> Iterator[str]:
    """Check the documents table; `docs_of_rows` comes from the index, if that is valid."""
    key = done.documents_table.key
    docs, tokens, rows, first = (
        table[name].fill_null(-1).to_numpy() for name in ("doc", "tokens", "rows", "first_row")
    )
    runs = unit.doc_runs
    # Counts are untrusted: nothing is allocated before they match those of the table.
    if len(docs) != sum(count for _, count in runs) or not np.array_equal(
        docs, np.concatenate([np.arange(first, first + count) for first, count in runs])
    ):
        yield f"{key}: does not name each document of its unit once, in order"
        return
    reasons = table["skipped"].to_pylist()
    skipped = Counter(reason for reason in reasons if reason is not None)
    if skipped != Counter(done.skipped):
        yield f"{key}: other documents were left out than the record counts"
    was_read = np.array([reason is None for reason in reasons])
    if ((tokens > 0) != was_read).any() or int(tokens.sum(dtype=np.int64)) != done.tokens:
        yield f"{key}: its documents' tokens do not add up to {done.tokens}"
    if docs_of_rows is not None:
        counted, firsts = rows_of(docs, docs_of_rows)
        if not np.array_equal(rows, counted) or not np.array_equal(first, firsts):
            yield f"{key}: its documents' rows are not those of the index"


def _check_shard(objects: Objects, shard: Shard, spec: TapInfo) -> tuple[list[str], int]:
    """Return the faults of a shard, and the number of its values that are not finite."""
    header = read_shard_header(objects, shard.key)
    if not contains_exactly(header, tap_tensors(shard.tap, shard.count, spec)):
        return [f"{shard.key}: does not hold {shard.count} rows of {shard.tap}"], 0
    faults: list[str] = []
    if spec.scaled_by == "row":
        scale = open_tensor(objects, shard.key, header[fmt.scale_name(shard.tap)])[:]
        if not (np.isfinite(scale) & (scale > 0)).all():
            faults.append(f"{shard.key}: holds scales that are not positive")
    rows = open_tensor(objects, shard.key, header[shard.tap])
    holds_ids = spec.latents and spec.storage.kind == "i" and spec.scaled_by is None
    ids = _chunks(rows) if holds_ids else ()
    if not all((chunk >= 0).all() and (chunk < spec.latents).all() for chunk in ids):
        faults.append(f"{shard.key}: names latents that are not among {spec.latents}")
    return faults, sum(int(np.count_nonzero(~np.isfinite(chunk))) for chunk in _chunks(rows))


def _chunks(rows: Any) -> Iterator[np.ndarray]:
    step = max(1, _CHUNK // max(1, rows[:1].nbytes))
    return (rows[i : i + step] for i in range(0, len(rows), step))


def _check_statistics(
    table: Table,
    done: Done,
    tensors: Mapping[str, np.ndarray],
    nonfinite: Mapping[str, int],
    audit: Audit,
) -> Iterator[str]:
    key = done.statistics.key
    for tap, spec in table.taps.items():
        try:
            stats = TapStats.from_tensors(tap, tensors, spec.channels)
        except SpileError as error:
            yield f"{key}: {error}"
            continue
        if table.shuffled:  # they describe the rows of the unit's documents, wherever those lie
            audit.off[f"statistics of {tap}"] += stats.count - done.rows
            if spec.scaled_by != "channel":
                audit.off[f"values of {tap} that are not finite"] += (
                    stats.nonfinite - nonfinite[tap]
                )
            continue
        if stats.count != done.rows:
            yield f"{key}: counts {stats.count} rows of {tap}, not {done.rows}"
        # Integers have no code for them; only the statistics count them.
        if nonfinite[tap] != stats.nonfinite and spec.storage.kind != "i":
            yield (
                f"unit {done.unit}: {nonfinite[tap]} values of {tap} are not finite, "
                f"{stats.nonfinite} were when written"
            )

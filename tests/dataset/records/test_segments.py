"""Segments and catalogs: many units, few of them in memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import CorruptError
from spile.dataset import format as fmt
from spile.dataset.records import segments
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.segments import Catalog, Segment
from spile.objects import LocalObjects
from support import stored

UNITS = ((2,), (0,), (3, 1), (1,), (4,), (0,), (2,))


@pytest.fixture
def grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stored.Stored:
    """Seven units in three groups of at most three."""
    monkeypatch.setattr(fmt, "GROUP_UNITS", 3)
    return stored.build(tmp_path / "out", UNITS)


def test_a_dataset_of_several_groups_reads_as_one(grouped: stored.Stored) -> None:
    assert grouped.listed(fmt.SEGMENTS) == [fmt.CURRENT.segment_key(group) for group in range(3)]
    ds = spile.open(str(grouped.path))
    tap = next(iter(grouped.rows))
    assert np.array_equal(ds.read(tap, 0, ds.num_tokens), grouped.rows[tap])
    assert np.array_equal(ds.index(0, ds.num_tokens), grouped.index)
    assert (ds.units, ds.unit_starts) == ([*range(7)], grouped.starts)
    assert ds.rows_of_unit(4) == tuple(grouped.starts[4:6])
    assert ds.rows_of_unit(7) is None
    for doc in (0, 3, 5):
        assert np.array_equal(ds.document(doc).index["doc"], [doc] * len(ds.document(doc)))
    batches = [batch[tap] for batch in ds.batches(tap, 4, seed=3)]
    found, wanted = np.concatenate(batches), grouped.rows[tap]
    assert sorted(map(bytes, found)) == sorted(map(bytes, wanted))


def test_statistics_are_merged_once_and_stored(grouped: stored.Stored) -> None:
    ds, tap = spile.open(str(grouped.path)), next(iter(grouped.rows))
    whole, rows = ds.statistics(tap), grouped.rows[tap].astype(np.float64)
    assert whole.count == len(rows)
    np.testing.assert_allclose(whole.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(whole.variance, rows.var(axis=0), rtol=1e-6)
    for unit in range(7):  # nobody reads them again
        (grouped.path / grouped.done(unit).statistics.key).unlink()
    again = spile.open(str(grouped.path)).statistics(tap)
    assert again.mean.tobytes() == whole.mean.tobytes()


def test_units_come_from_segments_as_far_as_there_are_any(grouped: stored.Stored) -> None:
    (grouped.path / fmt.MANIFEST).unlink()
    (grouped.path / fmt.CURRENT.segment_key(1)).unlink()
    (grouped.path / fmt.CURRENT.done_key(4)).unlink()
    with pytest.raises(spile.StoreError, match="6 of 7 units are done"):
        spile.open(str(grouped.path))
    ds = spile.open(str(grouped.path), partial=True)
    assert ds.units == [0, 1, 2, 3, 5, 6]
    tap = next(iter(grouped.rows))
    missing = slice(grouped.starts[4], grouped.starts[5])
    wanted = np.delete(grouped.rows[tap], missing, axis=0)
    assert np.array_equal(ds.read(tap, 0, ds.num_tokens), wanted)
    assert ds.rows_of_unit(4) is None


def test_few_segments_are_held(grouped: stored.Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_OPEN_SEGMENTS", 1)
    read: list[str] = []
    real = segments.read_columns
    monkeypatch.setattr(
        segments, "read_columns", lambda objects, file: read.append(file.key) or real(objects, file)
    )
    ds = spile.open(str(grouped.path))
    assert read == [], "opening reads none"
    tap = next(iter(grouped.rows))
    ds.read(tap, ds.num_tokens - 1, ds.num_tokens)
    assert read == [fmt.CURRENT.segment_key(2)]


def test_a_segment_of_another_group_is_refused(grouped: stored.Stored) -> None:
    ledger = Ledger(LocalObjects(grouped.path))
    manifest = ledger.derived.read_manifest(ledger.layout)
    assert manifest
    first, second, _ = manifest.segments
    swapped = replace(first, file=replace(second.file, key=first.file.key))
    (grouped.path / first.file.key).write_bytes(grouped.objects.get(second.file.key))
    with pytest.raises(CorruptError, match="holds other units than those of its group"):
        segments.read_segment(grouped.objects, swapped, fmt.CURRENT)


def test_a_catalog_of_records_finds_units_by_search(grouped: stored.Stored) -> None:
    records = [grouped.done(unit) for unit in (1, 2, 6)]
    catalog = Catalog.of(grouped.objects, fmt.CURRENT, records)
    assert [catalog.find(unit) for unit in (0, 1, 2, 5, 6, 9)] == [None, 0, 1, None, 2, None]
    assert [*catalog] == [*catalog[:]] == [replace(r, made_by={}) for r in records]
    assert catalog.totals().rows == sum(record.rows for record in records)
    with pytest.raises(IndexError):
        catalog[3]
    assert len(Segment.of([], fmt.CURRENT)) == 0


@pytest.mark.parametrize(("column", "summed"), [("file/digest", True), ("rows", False)])
def test_sums_check_what_they_add_up_and_records_all(
    grouped: stored.Stored, column: str, summed: bool
) -> None:
    records = [grouped.done(unit) for unit in range(3)]
    columns = segments.columns_of(records)
    wrong = {**columns, column: ~np.zeros_like(columns[column])}
    if not summed:
        with pytest.raises(CorruptError, match="a rows that is not a count"):
            Segment("segment", wrong, fmt.CURRENT)
        return
    segment = Segment("segment", wrong, fmt.CURRENT)
    assert segment.totals().rows == sum(done.rows for done in records)
    for _ in range(2):
        with pytest.raises(CorruptError, match="file/digest holds a value that is not text"):
            segment.done(0)

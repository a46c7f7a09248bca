"""The manifest is made as soon as every unit is done, and only from sound records."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from spile.core.errors import (
    CorruptError,
    SpileError,
)
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects
from support import stored

UNITS = ((5, 3), (9,), (0, 4))


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", UNITS, commit=())


def test_the_dataset_is_complete_when_every_unit_is_done(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    for unit in (2, 0, 1):
        assert ledger.complete(unfinished.table) is False
        assert ledger.derived.read_manifest(ledger.layout) is None
        ledger.commit(unfinished.attempt(unit))
    assert ledger.complete(unfinished.table) is True
    manifest = ledger.derived.read_manifest(ledger.layout)
    assert manifest is not None
    assert [done.unit for done in ledger.derived.catalog(unfinished.table, manifest)] == [0, 1, 2]
    files = [f for unit in range(3) for f in unfinished.done(unit).files()]
    total = manifest.totals
    assert total.rows == len(unfinished.index) == 21
    assert (total.units, total.tokens, total.documents) == (3, 21, 4)
    assert total.skipped == {"no tokens": 1}
    assert total.bytes == sum(unfinished.objects.size(file.key) for file in files)
    assert manifest.fingerprint == unfinished.table.fingerprint


def test_the_manifest_counts_rows_kept_and_tokens_read(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, where="pos in (1, 2)")
    manifest = dataset.ledger.derived.read_manifest(dataset.ledger.layout)
    assert manifest is not None
    units = dataset.ledger.derived.catalog(dataset.table, manifest)
    assert [(done.rows, done.tokens) for done in units] == [(4, 8), (2, 9), (2, 4)]
    total = manifest.totals
    assert (total.rows, total.tokens, total.documents) == (8, 21, 4)
    assert [dataset.done(unit).tokens for unit in range(3)] == [8, 9, 4]


def test_completing_again_changes_nothing(unfinished: stored.Stored) -> None:
    for unit in range(3):
        unfinished.ledger.commit(unfinished.attempt(unit))
    unfinished.ledger.complete(unfinished.table)
    before = unfinished.objects.get(fmt.MANIFEST)
    assert unfinished.ledger.complete(unfinished.table) is True
    assert unfinished.objects.get(fmt.MANIFEST) == before


def test_the_manifest_follows_from_the_records_alone(
    unfinished: stored.Stored, tmp_path: Path
) -> None:
    records = [unfinished.attempt(unit) for unit in range(3)]
    manifests = set()
    for name, order in (("a", (0, 1, 2)), ("b", (2, 1, 0))):
        shutil.copytree(unfinished.path / "attempts", tmp_path / name / "attempts")
        ledger = Ledger(LocalObjects(tmp_path / name))
        for unit in order:
            made_by = {"host": name}
            ledger.commit(dataclasses.replace(records[unit], made_by=made_by))
        ledger.complete(unfinished.table)
        manifests.add(ledger.objects.get(fmt.MANIFEST))
    assert len(manifests) == 1
    ledger = Ledger(LocalObjects(tmp_path / "b"))
    assert ledger.derived.manifest_follows(unfinished.table)
    assert not ledger.derived.unfounded(unfinished.table, records.__getitem__)
    records[1] = dataclasses.replace(records[1], text_digest="07")
    assert ledger.derived.unfounded(unfinished.table, records.__getitem__) == {fmt.MANIFEST}


def test_a_segment_reads_back_as_the_records(unfinished: stored.Stored) -> None:
    records = [unfinished.attempt(unit, made_by={"seconds": 1.5}) for unit in range(3)]
    for done in records:
        unfinished.ledger.commit(done)
    assert unfinished.ledger.seal(unfinished.table, 0)
    assert [*unfinished.ledger.catalog_so_far(unfinished.table)] == records


def test_a_record_of_no_unit_does_not_stand_in_for_one_that_is_missing(
    unfinished: stored.Stored,
) -> None:
    ledger = unfinished.ledger
    ledger.commit(unfinished.attempt(0))
    ledger.commit(unfinished.attempt(2))
    unfinished.objects.create(fmt.CURRENT.done_key(99), b"copied here by mistake")
    assert ledger.complete(unfinished.table) is False
    ledger.commit(unfinished.attempt(1))
    assert ledger.complete(unfinished.table) is True


def test_no_manifest_is_made_of_another_recipes_records(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    ledger.commit(unfinished.attempt(0))
    ledger.commit(unfinished.attempt(1, fingerprint="of another dataset"))
    ledger.commit(unfinished.attempt(2))
    with pytest.raises(SpileError, match="done/000000/00000001.json"):
        ledger.complete(unfinished.table)
    assert ledger.derived.read_manifest(ledger.layout) is None


def test_no_manifest_is_made_of_damaged_records(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    for unit in range(2):
        ledger.commit(unfinished.attempt(unit))
    unfinished.objects.create(fmt.CURRENT.done_key(2), b"torn")
    with pytest.raises(CorruptError, match="done/000000/00000002.json"):
        ledger.complete(unfinished.table)
    assert ledger.derived.read_manifest(ledger.layout) is None


class Overtaken(LocalObjects):
    """A store where another dataset's manifest appears just before this one's is created."""

    def __init__(self, root: Path, other: bytes) -> None:
        super().__init__(root)
        self._other = other

    def create(self, key: str, data: bytes) -> bool:
        return super().create(key, self._other if key == fmt.MANIFEST else data) and (
            key != fmt.MANIFEST
        )


def test_a_manifest_of_another_table_does_not_complete_a_dataset(tmp_path: Path) -> None:
    other = stored.build(tmp_path / "other", ((3,),)).objects.get(fmt.MANIFEST)
    made = stored.build(tmp_path / "out", commit=range(4))
    made.ledger.commit(made.attempt(4))
    with pytest.raises(CorruptError, match="belongs to another table"):
        Ledger(Overtaken(made.path, other)).complete(made.table)

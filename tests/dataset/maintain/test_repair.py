"""A damaged unit is replaced as a whole: the store holds the old record, none, or the new one."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.repair import Repair
from spile.dataset.maintain.verify import Journal, verify
from spile.dataset.records.ledger import Ledger
from spile.dataset.write.unit_writer import Attempt
from spile.objects import LocalObjects, MemoryObjects, Objects, open_objects
from support import servers, stored

TAPS = {"resid_post.0": 4, "mlp_out.1": 2}
UNITS = ((5, 9), (9, 5), (0, 3), (12,))
DAMAGED = 1


@pytest.fixture
def dataset(tmp_path: Path) -> stored.Stored:
    return stored.copied(tmp_path / "out", units=UNITS, taps=TAPS, shard_bytes=128)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage(dataset: stored.Stored, unit: int = DAMAGED) -> None:
    flip(dataset.path / dataset.done(unit).shards[0].key)


def begin(objects: Objects) -> Repair:
    repair = Repair(verify(objects), Ledger(objects))
    repair.condemn()
    return repair


def made(dataset: stored.Stored, repair: Repair, unit: int = DAMAGED) -> bool:
    """Write the unit and commit it, as extraction does."""
    done = dataset.attempt(unit, shard_bytes=128, made_by={"spile": "repaired"})
    return repair.ledger.commit(done)


def rows_of(path: Path) -> dict[str, np.ndarray]:
    found = spile.open(str(path))
    return {tap: found.read(tap, 0, found.num_tokens) for tap in found.taps}


def check_whole(dataset: stored.Stored) -> None:
    """Check that it is sound, with its original rows, and that gc leaves nothing behind."""
    report = verify(dataset.objects)
    assert report.ok, report.faults
    for tap, rows in rows_of(dataset.path).items():
        assert np.array_equal(rows, dataset.rows[tap])
    collect_garbage(dataset.objects)
    report = verify(dataset.objects)
    assert report.ok and not report.orphans


def test_the_old_record_stands_until_the_new_one_is_there(dataset: stored.Stored) -> None:
    damage(dataset)
    old = dataset.objects.get(fmt.CURRENT.done_key(DAMAGED))
    repair = begin(dataset.objects)
    assert repair.units == [DAMAGED]
    done = dataset.attempt(DAMAGED, shard_bytes=128, made_by={"spile": "repaired"})
    assert dataset.objects.get(fmt.CURRENT.done_key(DAMAGED)) == old
    assert spile.open(str(dataset.path)).num_tokens == len(dataset.index)  # others are readable
    assert repair.ledger.complete(dataset.table) is False
    assert repair.ledger.commit(done)
    assert repair.units == [] and repair.ledger.complete(dataset.table)
    assert dataset.done(DAMAGED).made_by == {"spile": "repaired"}
    assert repair.repaired.units == repair.repaired.identical == [DAMAGED]
    asides = [key for key in dataset.listed(fmt.DAMAGED) if "done" in key]
    assert {dataset.objects.get(aside) for aside in asides} == {old}
    check_whole(dataset)


def test_sound_units_are_left_alone(dataset: stored.Stored) -> None:
    kept = {unit: dataset.objects.get(fmt.CURRENT.done_key(unit)) for unit in (0, 2, 3)}
    damage(dataset)
    repair = begin(dataset.objects)
    assert made(dataset, repair) and repair.ledger.complete(dataset.table)
    assert {unit: dataset.objects.get(fmt.CURRENT.done_key(unit)) for unit in kept} == kept


def lose_record(dataset: stored.Stored) -> None:
    (dataset.path / fmt.CURRENT.done_key(DAMAGED)).unlink()


def lose_file(dataset: stored.Stored) -> None:
    (dataset.path / dataset.done(DAMAGED).index.key).unlink()


def spoil_record(dataset: stored.Stored) -> None:
    flip(dataset.path / fmt.CURRENT.done_key(DAMAGED), 40)


def cut_file_short(dataset: stored.Stored) -> None:
    path = dataset.path / dataset.done(DAMAGED).statistics.key
    path.write_bytes(path.read_bytes()[:-9])


def lose_record_and_manifest(dataset: stored.Stored) -> None:
    lose_record(dataset)
    (dataset.path / fmt.MANIFEST).unlink()


@pytest.mark.parametrize(
    "harm", [lose_record, lose_file, spoil_record, cut_file_short, lose_record_and_manifest]
)
def test_whatever_was_lost_the_unit_is_made_again(dataset: stored.Stored, harm: Any) -> None:
    harm(dataset)
    repair = begin(dataset.objects)
    assert repair.units == [DAMAGED]
    assert made(dataset, repair) and repair.ledger.complete(dataset.table)
    check_whole(dataset)


@pytest.mark.parametrize("moment", ["before it is moved aside", "before the new one is created"])
def test_an_interrupted_commit_is_repeated(
    dataset: stored.Stored, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    damage(dataset)
    old, repair = dataset.done(DAMAGED), begin(dataset.objects)
    done_key, create, move = fmt.CURRENT.done_key(DAMAGED), LocalObjects.create, LocalObjects.move

    def interrupted(self: LocalObjects, key: str, data: Any) -> Any:
        if key == done_key:
            raise KeyboardInterrupt
        return move(self, key, data) if isinstance(data, str) else create(self, key, data)

    before = moment.startswith("before it is moved")
    monkeypatch.setattr(LocalObjects, "move" if before else "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(dataset, repair)
    monkeypatch.undo()
    assert (DAMAGED in dataset.ledger.done_units()) == before
    old_files = [f.key for f in old.files()]
    collect_garbage(dataset.objects)
    assert set(old_files) <= set(dataset.listed())
    known = spile.open(str(dataset.path), partial=True)  # a unit is missing, never half
    assert known.num_tokens == len(dataset.index) - (0 if before else old.rows)
    repair = begin(dataset.objects)
    assert repair.units == [DAMAGED]
    assert made(dataset, repair) and repair.ledger.complete(dataset.table)
    check_whole(dataset)


def test_what_is_made_must_be_that_unit(dataset: stored.Stored, tmp_path: Path) -> None:
    damage(dataset)
    old = dataset.objects.get(fmt.CURRENT.done_key(DAMAGED))
    repair = begin(dataset.objects)
    other = dataclasses.replace(dataset, read=[part[::-1].copy() for part in dataset.read])
    with pytest.raises(StoreError, match="unit 1, made again, is not the same .index"):
        made(other, repair)
    assert dataset.objects.get(fmt.CURRENT.done_key(DAMAGED)) == old
    (dataset.path / fmt.CURRENT.done_key(DAMAGED)).unlink()  # then the manifest tells its digest
    with pytest.raises(StoreError, match="unit 1, made again, is not the same .index"):
        made(other, begin(dataset.objects))


def test_what_an_interrupted_repair_has_set_aside_says_what_the_unit_was(
    dataset: stored.Stored,
) -> None:
    damage(dataset)
    began = begin(dataset.objects)
    began.withdraw()  # neither record nor manifest is there any more
    other = dataclasses.replace(dataset, read=[part[::-1].copy() for part in dataset.read])
    with pytest.raises(StoreError, match="unit 1, made again, is not the same .index"):
        made(other, begin(dataset.objects))
    for unit in (0, 2, 3):
        (dataset.path / fmt.CURRENT.done_key(unit)).unlink()
    assert begin(dataset.objects).made_by() == {"spile": "test"}


def test_of_two_repairs_the_first_to_commit_wins(dataset: stored.Stored) -> None:
    damage(dataset)
    first, second = begin(dataset.objects), begin(dataset.objects)
    assert made(dataset, first)
    record = dataset.objects.get(fmt.CURRENT.done_key(DAMAGED))
    assert made(dataset, second) is False
    assert dataset.objects.get(fmt.CURRENT.done_key(DAMAGED)) == record
    assert first.ledger.complete(dataset.table) and second.ledger.complete(dataset.table)
    check_whole(dataset)


def test_a_record_that_came_in_the_moment_between_is_put_back(
    dataset: stored.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(dataset)
    first, second = begin(dataset.objects), begin(dataset.objects)
    move = LocalObjects.move

    def overtaken(self: LocalObjects, key: str, to: str) -> None:
        if key == fmt.CURRENT.done_key(DAMAGED):
            monkeypatch.undo()
            assert made(dataset, first)
        move(self, key, to)

    monkeypatch.setattr(LocalObjects, "move", overtaken)
    assert made(dataset, second) is False
    assert dataset.done(DAMAGED).attempt in {
        parsed[1] for key in dataset.listed(fmt.ATTEMPTS) if (parsed := fmt.parse_attempt_key(key))
    }
    assert second.ledger.complete(dataset.table)
    check_whole(dataset)


def test_a_reader_and_gc_beside_it_do_no_harm(dataset: stored.Stored) -> None:
    damage(dataset)
    reader = spile.open(str(dataset.path), verify=True)
    first, last = dataset.starts[DAMAGED], dataset.starts[DAMAGED + 1]
    repair = begin(dataset.objects)
    done = dataset.attempt(DAMAGED, shard_bytes=128)
    assert collect_garbage(dataset.objects) == []  # neither the old files nor the new
    assert repair.ledger.commit(done) and repair.ledger.complete(dataset.table)
    assert np.array_equal(reader.read("mlp_out.1", 0, first), dataset.rows["mlp_out.1"][:first])
    with pytest.raises(CorruptError):
        reader.read("resid_post.0", first, last)
    collect_garbage(dataset.objects)
    with pytest.raises(CorruptError):  # the old files are gone; nothing else is read in their place
        reader.read("mlp_out.1", first, last)
    check_whole(dataset)


@pytest.mark.parametrize("moment", ["listed", "read"])
def test_a_repair_that_commits_while_gc_looks_keeps_its_files(
    dataset: stored.Stored, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    damage(dataset)
    repair = begin(dataset.objects)
    done = dataset.attempt(DAMAGED, shard_bytes=128)
    listing, get = LocalObjects.list, LocalObjects.get
    committed: list[bool] = []

    def commit() -> None:
        if not committed:
            committed.append(True)
            assert repair.ledger.commit(done)

    def listed(self: LocalObjects, prefix: str = "") -> Any:
        found = list(listing(self, prefix))
        if moment == "listed" and not prefix:
            commit()
        return iter(found)

    def read(self: LocalObjects, key: str) -> bytes:
        data = get(self, key)
        if moment == "read" and key == fmt.CURRENT.done_key(DAMAGED) and gc.objects is self:
            commit()
        return data

    gc = Ledger(dataset.objects)
    monkeypatch.setattr(LocalObjects, "list", listed)
    monkeypatch.setattr(LocalObjects, "get", read)
    collect_garbage(gc.objects)
    monkeypatch.undo()
    assert committed and not repair.ledger.missing_files(dataset.done(DAMAGED))
    assert repair.ledger.complete(dataset.table)
    check_whole(dataset)


def test_a_repair_that_is_given_up_leaves_what_was_there(dataset: stored.Stored) -> None:
    damage(dataset)
    before = dataset.listed()
    repair = begin(dataset.objects)
    dataset.attempt(DAMAGED)
    repair.pardon()
    collect_garbage(dataset.objects)
    assert dataset.listed() == before


def test_gc_spares_a_killed_repair_until_it_is_told_that_nothing_runs(
    dataset: stored.Stored,
) -> None:
    damage(dataset)
    before = dataset.listed()
    begin(dataset.objects)
    dataset.attempt(DAMAGED)
    assert collect_garbage(dataset.objects) == []
    collect_garbage(dataset.objects, abandoned=True)
    assert dataset.listed() == before


@pytest.mark.parametrize("harm", ["damaged", "lost", "another"])
def test_a_manifest_that_does_not_follow_is_made_again(dataset: stored.Stored, harm: str) -> None:
    path = dataset.path / fmt.MANIFEST
    whole = path.read_bytes()
    if harm == "damaged":
        flip(path, 100)
    elif harm == "lost":
        path.unlink()
    else:
        body = fmt.decode_record(fmt.MANIFEST, whole, "manifest")
        path.write_bytes(fmt.encode_record("manifest", {**body, "rows": 7}))
    repair = begin(dataset.objects)
    assert repair.units == [] and repair.ledger.complete(dataset.table)
    assert repair.repaired.records == [fmt.MANIFEST]
    assert path.read_bytes() == whole
    check_whole(dataset)


def test_a_manifest_is_compared_with_the_records_of_one_group_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "GROUP_UNITS", 10)
    dataset = stored.copied(tmp_path / "out", ((3,),) * 40)
    repair = begin(dataset.objects)
    held = stored.HeldRecords(dataset.objects.url, monkeypatch)
    assert repair.ledger.complete(dataset.table) and repair.repaired.records == []
    assert 0 < held.most <= 20


def test_the_weights_hashes_are_those_that_are_loaded(dataset: stored.Stored) -> None:
    whole = dataset.objects.get(fmt.MODEL)
    flip(dataset.path / fmt.MODEL, 30)
    repair = begin(dataset.objects)
    assert repair.ledger.complete(dataset.table) is False  # the model must be loaded
    repair.ledger.check_weights({"embed": "aa", "blocks": "bb"})
    assert repair.ledger.complete(dataset.table)
    assert dataset.objects.get(fmt.MODEL) == whole
    check_whole(dataset)


def test_scales_are_never_measured_again(tmp_path: Path) -> None:
    dataset = stored.copied(tmp_path / "out", taps=stored.SCALED)
    flip(dataset.path / fmt.SCALES, 30)
    with pytest.raises(StoreError, match=r"scales\.json: cannot be repaired.*take it from a copy"):
        begin(dataset.objects).refuse_impossible()


def test_what_no_row_depends_on_is_set_aside(dataset: stored.Stored) -> None:
    dataset.objects.create(fmt.CHECK, b"no record")
    dataset.objects.create(fmt.PREDICTION, b"no record")
    dataset.objects.create(fmt.CURRENT.worker_key("me", 0), b"no record")
    repair = begin(dataset.objects)
    repair.set_aside_beside()
    assert repair.ledger.complete(dataset.table)
    report = verify(dataset.objects)
    assert report.ok and sorted(key.split("/")[-1] for key in report.orphans) == [
        fmt.CHECK, fmt.PREDICTION,
    ]  # fmt: skip


def test_records_set_aside_leave_the_unit_to_the_next_extraction(dataset: stored.Stored) -> None:
    damage(dataset)
    repair = begin(dataset.objects)
    repair.withdraw()
    assert dataset.ledger.done_units() == {0, 2, 3}
    assert collect_garbage(dataset.objects) == []  # all of it is there until it is made again
    assert dataset.ledger.commit(dataset.attempt(DAMAGED))
    assert dataset.ledger.complete(dataset.table)
    check_whole(dataset)


def test_a_record_that_can_be_read_after_all_is_kept(
    dataset: stored.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = LocalObjects.get

    def failing(self: LocalObjects, key: str) -> bytes:
        if key == fmt.CURRENT.done_key(DAMAGED):
            raise OSError(5, "Input/output error")
        return get(self, key)

    monkeypatch.setattr(LocalObjects, "get", failing)
    repair = begin(dataset.objects)
    assert repair.units == [DAMAGED]
    monkeypatch.undo()
    with pytest.raises(StoreError, match="could not be read before, and can be now"):
        made(dataset, repair)
    assert dataset.ledger.done_units() == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "store", ["memory", *(pytest.param(name, marks=pytest.mark.full) for name in ("s3", "gs"))]
)
def test_a_store_without_renaming_is_repaired_too(dataset: stored.Stored, store: str) -> None:
    damage(dataset)
    made_at = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}
    objects: Any = open_objects(made_at[store]()) if store in made_at else MemoryObjects()
    for key in dataset.listed():
        objects.create(key, dataset.objects.get(key))
    repair = begin(objects)
    rows = slice(dataset.starts[DAMAGED], dataset.starts[DAMAGED + 1])
    values = {tap: array[rows] for tap, array in dataset.rows.items()}
    done, writer = stored.write_unit(
        objects, dataset.table, DAMAGED, dataset.read[DAMAGED], values, 128
    )
    assert collect_garbage(objects) == []
    with Attempt(repair.ledger, writer) as attempt:
        assert attempt.commit(done)
    assert repair.ledger.complete(dataset.table)
    assert verify(objects).ok
    collect_garbage(objects)
    assert verify(objects).orphans == []
    assert Ledger(objects).read_done(DAMAGED) == done


def test_what_was_found_sound_is_not_read_again(dataset: stored.Stored, tmp_path: Path) -> None:
    damage(dataset)
    journal = Journal(dataset.objects.url, tmp_path / "journal", resume=False)
    repair = Repair(verify(dataset.objects, journal=journal), Ledger(dataset.objects))
    assert made(dataset, repair) and repair.ledger.complete(dataset.table)
    report = verify(dataset.objects, journal=journal)
    assert report.ok and report.resumed == len(UNITS) - 1
    assert not list((tmp_path / "journal").iterdir())

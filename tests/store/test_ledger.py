"""The ledger: one table, one record per unit, one manifest, whoever comes first."""

import dataclasses
import shutil
import threading
from pathlib import Path

import pytest

import stored
from spile.errors import ConfigError, CorruptError, DriftError, SpileError, StoreError
from spile.objects import LocalObjects
from spile.store import format as fmt
from spile.store.format import Done
from spile.store.ledger import Ledger, Table, derive_manifest

UNITS = ((5, 3), (9,), (0, 4))


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", UNITS, commit=())


def empty(tmp_path: Path, name: str = "new") -> Ledger:
    return Ledger(LocalObjects(tmp_path / name))


# -- the table -------------------------------------------------------------------------------


def test_the_first_table_stays(tmp_path: Path) -> None:
    first, second = stored.make_table([[1]]), stored.make_table([[2], [3]], seq_len=16)
    ledger = empty(tmp_path)
    assert ledger.read_table() is None
    assert ledger.create_table(first) == first
    assert ledger.create_table(second) == first
    assert ledger.table() == first


def test_racing_creators_all_get_the_same_table(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    got: list[Table] = []

    def create(number: int) -> None:
        barrier.wait()
        table = stored.make_table([[number]], model_source=f"/models/{number}")
        got.append(empty(tmp_path).create_table(table))

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert all(table == got[0] for table in got)


def test_no_dataset_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere: no dataset there"):
        empty(tmp_path, "nowhere").table()
    assert not (tmp_path / "nowhere").exists()


def test_a_table_with_fields_missing_is_refused(tmp_path: Path) -> None:
    good = stored.make_table().to_json()
    for field in good:
        ledger = empty(tmp_path, field)
        body = {k: v for k, v in good.items() if k != field}
        ledger.objects.create(fmt.UNITS, fmt.encode_record("units", body))
        with pytest.raises(CorruptError, match="units.json"):
            ledger.table()


def test_a_recipe_with_unknown_fields_is_refused(tmp_path: Path) -> None:
    body = stored.make_table().to_json()
    body["recipe"]["temperature"] = 1
    ledger = empty(tmp_path)
    ledger.objects.create(fmt.UNITS, fmt.encode_record("units", body))
    with pytest.raises(ConfigError, match="temperature"):
        ledger.table()


# -- weights ---------------------------------------------------------------------------------


def test_weights_are_recorded_once_and_compared_after(tmp_path: Path) -> None:
    ledger = empty(tmp_path)
    ledger.check_weights({"embed": "aa", "block": "bb"})
    stored_bytes = ledger.objects.get(fmt.MODEL)
    ledger.check_weights({"block": "bb", "embed": "aa"})
    assert ledger.objects.get(fmt.MODEL) == stored_bytes


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({"embed": "aa", "block": "b0"}, {"weights of block": ("bb", "b0")}),
        ({"embed": "aa"}, {"weights of block": ("bb", None)}),
        ({"embed": "aa", "block": "bb", "head": "cc"}, {"weights of head": (None, "cc")}),
    ],
)
def test_other_weights_are_drift(
    tmp_path: Path, now: dict[str, str], difference: dict[str, tuple[str | None, str | None]]
) -> None:
    ledger = empty(tmp_path)
    ledger.check_weights({"embed": "aa", "block": "bb"})
    with pytest.raises(DriftError) as caught:
        ledger.check_weights(now)
    assert caught.value.differences == difference


# -- commits ---------------------------------------------------------------------------------


def test_the_first_attempt_wins_and_the_second_knows_it_lost(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    first, second = unfinished.attempt(1), unfinished.attempt(1)
    assert ledger.read_done(1) is None
    assert ledger.commit(first) is True
    assert ledger.commit(second) is False
    assert ledger.read_done(1) == first
    assert ledger.done_units() == {1}


def test_an_attempt_whose_answer_was_lost_has_won(unfinished: stored.Stored) -> None:
    done = unfinished.attempt(0)
    assert unfinished.ledger.commit(done)
    # the same request again, as after a lost answer, from a new process
    assert Ledger(LocalObjects(unfinished.path)).commit(done)


def test_of_eight_racing_attempts_exactly_one_wins(unfinished: stored.Stored) -> None:
    attempts = [unfinished.attempt(0) for _ in range(8)]
    barrier = threading.Barrier(8)
    won: list[Done] = []

    def commit(done: Done) -> None:
        barrier.wait()
        if unfinished.ledger.commit(done):
            won.append(done)

    threads = [threading.Thread(target=commit, args=(done,)) for done in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert unfinished.ledger.read_done(0) == won[0]


def test_a_record_under_another_units_key_is_refused(unfinished: stored.Stored) -> None:
    unfinished.ledger.commit(unfinished.attempt(0))
    objects = unfinished.objects
    objects.create(fmt.done_key(1), objects.get(fmt.done_key(0)))
    with pytest.raises(CorruptError, match="done/00000001.json: is the record of unit 0"):
        unfinished.ledger.read_done(1)


def test_losing_to_a_damaged_record_is_an_error_and_not_a_loss(unfinished: stored.Stored) -> None:
    unfinished.objects.create(fmt.done_key(0), b"{}")
    with pytest.raises(CorruptError, match="done/00000000.json"):
        unfinished.ledger.commit(unfinished.attempt(0))


def test_leftovers_and_strangers_are_no_done_units(unfinished: stored.Stored) -> None:
    for key in ("done/00000001.json.tmp-abc", "done/readme", "done/1.json"):
        unfinished.objects.create(key, b"")
    assert unfinished.ledger.done_units() == set()


# -- the manifest ----------------------------------------------------------------------------


def test_the_dataset_is_complete_when_every_unit_is_done(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    for unit in (2, 0, 1):
        assert ledger.complete(unfinished.table) is False
        assert ledger.read_manifest() is None
        ledger.commit(unfinished.attempt(unit))
    assert ledger.complete(unfinished.table) is True
    manifest = ledger.read_manifest()
    assert manifest is not None
    assert [unit["unit"] for unit in manifest["units"]] == [0, 1, 2]
    files = [f for unit in range(3) for f in unfinished.done(unit).files()]
    assert manifest["rows"] == len(unfinished.index) == 21
    assert manifest["documents"] == 4
    assert manifest["skipped"] == {"no tokens": 1}
    assert manifest["bytes"] == sum(unfinished.objects.size(file.key) for file in files)
    assert manifest["fingerprint"] == unfinished.table.fingerprint


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
        ledger = empty(tmp_path, name)
        for unit in order:
            made_by = {"host": name}
            ledger.commit(dataclasses.replace(records[unit], made_by=made_by))
        ledger.complete(unfinished.table)
        manifests.add(ledger.objects.get(fmt.MANIFEST))
    assert len(manifests) == 1
    other = dataclasses.replace(records[1], text_digest="changed")
    assert derive_manifest(unfinished.table, records) != derive_manifest(
        unfinished.table, [records[0], other, records[2]]
    )


def test_a_manifest_reads_back_as_derived(unfinished: stored.Stored) -> None:
    records = [unfinished.attempt(unit) for unit in range(3)]
    for done in records:
        unfinished.ledger.commit(done)
    unfinished.ledger.complete(unfinished.table)
    assert unfinished.ledger.read_manifest() == derive_manifest(unfinished.table, records)


def test_a_record_of_no_unit_does_not_stand_in_for_one_that_is_missing(
    unfinished: stored.Stored,
) -> None:
    ledger = unfinished.ledger
    ledger.commit(unfinished.attempt(0))
    ledger.commit(unfinished.attempt(2))
    unfinished.objects.create(fmt.done_key(99), b"copied here by mistake")
    assert ledger.complete(unfinished.table) is False
    ledger.commit(unfinished.attempt(1))
    assert ledger.complete(unfinished.table) is True


def test_no_manifest_is_made_of_another_recipes_records(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    ledger.commit(unfinished.attempt(0))
    ledger.commit(unfinished.attempt(1, fingerprint="of another dataset"))
    ledger.commit(unfinished.attempt(2))
    with pytest.raises(SpileError, match="done/00000001.json"):
        ledger.complete(unfinished.table)
    assert ledger.read_manifest() is None


def test_no_manifest_is_made_of_damaged_records(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    for unit in range(2):
        ledger.commit(unfinished.attempt(unit))
    unfinished.objects.create(fmt.done_key(2), b"torn")
    with pytest.raises(CorruptError, match="done/00000002.json"):
        ledger.complete(unfinished.table)
    assert ledger.read_manifest() is None


def test_a_record_is_never_created_for_files_that_are_gone(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", ((5, 9), (9, 5)), commit=(0,))
    ledger = Ledger(dataset.objects)
    attempt = dataset.attempt(1)
    dataset.objects.delete(attempt.shards[0].key)
    with pytest.raises(StoreError, match="vanished before unit 1"):
        ledger.commit(attempt)
    assert ledger.done_units() == {0}
    assert ledger.commit(dataset.attempt(1))
    assert ledger.commit(attempt) is False  # another has won meanwhile: a lost race, no error

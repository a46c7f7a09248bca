"""Garbage collection removes orphans, and no file that is or may still be committed."""

from pathlib import Path
from typing import Any

import pytest

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.gc import by_group, collect_garbage, discard_empty
from spile.dataset.maintain.verify import verify
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.table import read_tokenizer
from support import stored

TAPS = {"resid_post.0": 4, "mlp_out.1": 2}
UNITS = ((5, 9), (9, 5), (0, 3))


def build(path: Path, **options: Any) -> stored.Stored:
    return stored.build(path, UNITS, **{"taps": TAPS, "shard_bytes": 128, **options})


@pytest.fixture
def dataset(tmp_path: Path) -> stored.Stored:
    return build(tmp_path / "out")


def leave(dataset: stored.Stored) -> dict[str, set[str]]:
    """What kills and lost races leave behind, by its origin."""
    done = dataset.done(1)
    leavings = {
        "lost": {f.key for f in dataset.attempt(1).files()},
        "extra": {fmt.CURRENT.attempt_prefix(1, done.attempt) + "embed.00000.safetensors"},
        "record": {fmt.CURRENT.done_key(1) + ".tmp-0a1b", fmt.UNITS + ".tmp-2c3d"},
        "unfinished": {f.key for f in dataset.attempt(2).files()},
        "unfinished record": {fmt.CURRENT.done_key(2) + ".tmp-4e5f"},
    }
    for kind in ("extra", "record", "unfinished record"):
        for key in leavings[kind]:
            dataset.objects.create(key, b"half")
    return leavings


def test_orphans_are_listed_and_are_no_fault(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(0, 1))
    leavings = leave(dataset)
    report = verify(dataset.objects, partial=True)
    assert report.ok
    assert set(report.orphans) == set().union(*leavings.values())


def test_gc_removes_exactly_what_can_never_be_committed(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(0, 1))
    before = set(dataset.listed())
    leavings = leave(dataset)
    doomed = leavings["lost"] | leavings["extra"] | leavings["record"]
    assert set(collect_garbage(dataset.objects)) == doomed
    kept = leavings["unfinished"] | leavings["unfinished record"]
    assert set(dataset.listed()) == before | kept
    assert collect_garbage(dataset.objects) == []
    assert verify(dataset.objects, partial=True).ok


def test_an_attempt_that_gc_kept_can_still_be_committed(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(0, 1))
    attempt = dataset.attempt(2)
    collect_garbage(dataset.objects)
    assert dataset.ledger.commit(attempt)
    assert dataset.ledger.complete(dataset.table)
    assert verify(dataset.objects).ok


def test_gc_of_abandoned_work_leaves_only_the_dataset(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(0, 1))
    before = set(dataset.listed())
    leavings = leave(dataset)
    removed = collect_garbage(dataset.objects, abandoned=True)
    assert set(removed) == set().union(*leavings.values())
    assert set(dataset.listed()) == before


def test_gc_removes_probes_of_whole_datasets_and_torn_predictions(
    tmp_path: Path,
) -> None:
    left = ["prediction.json.tmp-0a1b", "probes/0123", "probes/4567.tmp-89ab"]
    for name, commit in {"whole": None, "begun": (0, 1)}.items():
        dataset = build(tmp_path / name, commit=commit)
        for key in left:
            dataset.objects.create(key, b"")
        taken = left if commit is None else left[:1]
        assert sorted(collect_garbage(dataset.objects)) == taken


@pytest.mark.parametrize("abandoned", [False, True])
def test_gc_leaves_a_clean_dataset_and_strangers_files_alone(
    dataset: stored.Stored, abandoned: bool
) -> None:
    strangers = {"notes.txt", ".tmp-notes", "workers/.tmp-x", "attempts/readme", "done/x.json"}
    strangers |= {fmt.CHECK}  # no stranger, but nothing to remove either
    for key in strangers:
        dataset.objects.create(key, b"mine")
    before = set(dataset.listed())
    assert collect_garbage(dataset.objects, abandoned=abandoned) == []
    assert set(dataset.listed()) == before


def test_gc_removes_nothing_of_a_unit_whose_record_is_damaged(dataset: stored.Stored) -> None:
    (dataset.path / fmt.CURRENT.done_key(1)).write_bytes(b"")
    before = set(dataset.listed("attempts/000000/00000001/"))
    with pytest.raises(CorruptError, match=fmt.CURRENT.done_key(1)):
        collect_garbage(dataset.objects, abandoned=True)
    assert set(dataset.listed("attempts/000000/00000001/")) == before


def test_gc_wants_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "attempts/000000/00000000/x").mkdir(parents=True)
    (tmp_path / "attempts/000000/00000000/x/y").write_bytes(b"")
    with pytest.raises(StoreError, match="no dataset"):
        collect_garbage(stored.LocalObjects(tmp_path), abandoned=True)
    assert (tmp_path / "attempts/000000/00000000/x/y").exists()


def test_gc_removes_a_torn_heartbeat_and_keeps_a_whole_one(dataset: stored.Stored) -> None:
    whole = fmt.encode_record("worker", {"counter": 1, "units": []})
    dataset.objects.create("workers/whole.json", whole)
    dataset.objects.create("workers/torn.json", whole[:-5])
    assert not verify(dataset.objects).ok
    assert collect_garbage(dataset.objects) == ["workers/torn.json"]
    assert verify(dataset.objects).ok


def test_gc_keeps_what_a_manifest_names_even_if_its_unit_was_redone(
    dataset: stored.Stored,
) -> None:
    first = {file.key for file in dataset.done(1).files()}
    again = dataset.attempt(1)
    (dataset.path / fmt.CURRENT.done_key(1)).write_bytes(fmt.encode_record("done", again.to_json()))
    assert any("delete it" in fault for fault in verify(dataset.objects).faults)
    assert collect_garbage(dataset.objects) == []
    assert first <= set(dataset.listed())


def test_a_dataset_without_rows_is_discarded_and_strangers_files_stay(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", ((0, 0), (0, 2)), taps=TAPS, commit=(0,))
    dataset.attempt(1)
    dataset.objects.create("done/000000/00000001.json.tmp-4e5f", b"half")
    dataset.objects.create("notes/mine.txt", b"mine")
    discard_empty(dataset.objects)
    assert dataset.listed() == ["notes/mine.txt"]
    assert discard_empty(dataset.objects) == []


def test_a_dataset_with_a_row_or_a_worker_is_never_discarded(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(2, 1))
    before = dataset.listed()
    with pytest.raises(ConfigError, match="holds 2 committed units, which would be lost"):
        discard_empty(dataset.objects)
    assert dataset.listed() == before
    begun = build(tmp_path / "begun", commit=())
    presence = Presence(begun.objects, 30)
    presence.hold(0)
    with pytest.raises(ConfigError, match=rf"{presence.name} .* is at work on .*; stop it first"):
        discard_empty(begun.objects)
    assert fmt.UNITS in begun.listed()


def test_a_killed_discard_leaves_no_segment_of_removed_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = stored.build(tmp_path / "out", ((0, 0),), taps=TAPS)
    assert dataset.listed(fmt.SEGMENTS) == [fmt.CURRENT.segment_key(0)]
    removed: list[str] = []
    monkeypatch.setattr(
        type(dataset.objects), "delete", lambda self, key: removed.append(key)
    )  # (nothing is deleted: the order is what matters)
    discard_empty(dataset.objects)
    assert removed[0] == fmt.CURRENT.segment_key(0)
    assert removed[-1] == fmt.UNITS


@pytest.mark.parametrize("abandoned", [False, True])
def test_the_tokenizer_stays_and_that_of_a_table_that_came_second_goes(
    tmp_path: Path, abandoned: bool
) -> None:
    dataset = build(tmp_path / "out", **stored.WITH_TOKENIZER)
    left = [fmt.tokenizer_key("0" * 32, "tokenizer.json"), f"{fmt.TOKENIZER}stray"]
    for key in left:
        dataset.objects.create(key, b"another")
    assert verify(dataset.objects).orphans == sorted(left)
    assert collect_garbage(dataset.objects, abandoned=abandoned) == sorted(left)
    assert read_tokenizer(dataset.ledger.objects, dataset.ledger.table()) == stored.TOKENIZER


def test_restarting_removes_the_tokenizer_too(tmp_path: Path) -> None:
    dataset = build(tmp_path / "out", commit=(), **stored.WITH_TOKENIZER)
    discard_empty(dataset.objects)
    assert dataset.listed() == []


def test_gc_holds_the_keys_of_one_group_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "GROUP_UNITS", 2)
    dataset = stored.build(tmp_path / "out", ((2,),) * 7, taps={"resid_post.0": 4})
    lost = {file.key for unit in (1, 6) for file in dataset.attempt(unit).files()}
    portions = [*by_group(dataset.objects.list())]
    tries = [[fmt.parse_attempt_key(key) for key in keys if key.startswith("attempts/")]
             for keys in portions]  # fmt: skip
    groups = [{each[0] // 2 for each in of_group if each} for of_group in tries]
    assert sorted(number for group in groups for number in group) == [0, 1, 2, 3]
    assert max(map(len, groups)) == 1
    assert sorted(key for keys in portions for key in keys) == sorted(dataset.listed())
    assert {*collect_garbage(dataset.objects)} == lost
    assert verify(dataset.objects).ok

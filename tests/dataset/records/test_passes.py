"""Passes: more taps of the same rows, in folders of their own; the dataset itself never changes."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, CorruptError, DriftError, StoreError
from spile.dataset import format as fmt
from spile.dataset.format import TapInfo
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.repair import Repair
from spile.dataset.maintain.verify import verify
from spile.dataset.read.opening import finished_taps
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass, drop_taps, live_passes
from support import stored

MORE: stored.Taps = {"q.0": TapInfo((2, 3), "int8"), "logprob": 1}


def all_rows(dataset: spile.Dataset) -> dict[str, np.ndarray]:
    return {tap: dataset.read(tap, 0, dataset.num_tokens) for tap in dataset.taps}


def test_a_dataset_has_the_taps_of_all_its_passes(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    before = {key: made.objects.get(key) for key in made.listed()}
    _, first = stored.add_pass(made, MORE)
    _, second = stored.add_pass(made, {"z.0": 4}, dtype="bfloat16")
    dataset = spile.open(made.path)
    assert {*dataset.taps} == {*made.rows, *first, *second}
    wanted = {**made.rows, **first, **second}
    for tap, rows in all_rows(dataset).items():
        np.testing.assert_array_equal(rows, wanted[tap])
        assert dataset.statistics(tap).count == len(made.index)
        np.testing.assert_allclose(
            dataset.statistics(tap).mean, stored.describe(rows).mean, rtol=1e-9, atol=1e-9
        )
    assert dataset.recipe_of("z.0").store_dtype == "bfloat16"
    assert dataset.recipe.store_dtype == "float32" and dataset.fingerprint == made.table.fingerprint
    # Batches of taps of several passes, of a dataset that was pickled, every file checked.
    again = pickle.loads(pickle.dumps(dataset)).verified()
    taps = ["z.0", "resid_post.0", "q.0"]
    for batch in again.batches(taps, 16, seed=3, shuffle="full"):
        at = [int(np.flatnonzero(made.index == entry)[0]) for entry in batch["index"]]
        for tap in taps:
            np.testing.assert_array_equal(batch[tap], wanted[tap][at])
    document = dataset.document(int(made.index["doc"][0]))
    np.testing.assert_array_equal(document["z.0"], wanted["z.0"][document.rows])
    # Nothing that was there before has changed.
    assert before == {key: made.objects.get(key) for key in before}
    assert {key.partition("/")[0] for key in made.listed() if key not in before} == {"passes"}


def test_until_a_pass_is_complete_the_dataset_reads_as_before(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=[0, 3])
    whole = spile.open(made.path)
    assert "z.0" not in whole.taps and whole.num_tokens == len(made.index)
    assert finished_taps(made.objects) == whole.taps
    part = spile.open(made.path, partial=True)
    assert "z.0" in part.taps and part.units == [0, 3]
    at = np.r_[made.starts[0] : made.starts[1], made.starts[3] : made.starts[4]]
    for tap, wanted in {**made.rows, **rows}.items():
        np.testing.assert_array_equal(part.read(tap, 0, part.num_tokens), wanted[at])
        assert part.statistics(tap).count == len(at)
    # Where the new tap is not asked for, all units are there.
    some = spile.open(made.path, partial=True, taps=["mlp_out.1"])
    assert some.taps == ["mlp_out.1"] and some.num_tokens == len(made.index)
    with pytest.raises(ConfigError, match="no tap 'z.9'"):
        spile.open(made.path, taps=["z.9"])
    assert added.ledger.derived.read_manifest(added.ledger.layout) is None


def test_taps_that_lack_documents_when_they_are_done_hide_none(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", grown=(3,))  # (which grew after its taps were begun)
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=range(3))
    begun = added.table_over(made.ledger.table().at(0))
    assert begun and not added.ledger.complete(begun)
    assert len(spile.open(made.path)) == len(made.index)
    for unit in (3, 4):
        assert added.ledger.commit(stored.write_added(made, added, unit, rows))
    assert added.ledger.complete(added.ledger.table())
    np.testing.assert_array_equal(all_rows(spile.open(made.path))["z.0"], rows["z.0"])


def test_taps_are_read_at_an_earlier_generation_by_its_manifest(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", grown=(3,))
    whole, _ = stored.add_pass(made, {"z.0": 4})
    whole.objects.delete(fmt.manifest_key(0))  # (its process ended before it created this one)
    assert {*spile.open(made.path).taps} == {*made.rows, "z.0"}
    behind, _ = stored.add_pass(made, {"z.1": 4}, commit=range(3))
    stored.complete_before_growth(behind)
    assert {*spile.open(made.path).taps} == {*made.rows, "z.1"}
    assert whole.ledger.complete(whole.ledger.table())
    assert {*spile.open(made.path).taps} == {*made.rows, "z.0", "z.1"}


def test_a_reader_is_not_disturbed_by_a_pass_that_grows(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    reader = spile.open(made.path)
    batches = iter(reader.batches(reader.taps, 16, seed=1))
    first = next(batches)
    stored.add_pass(made, MORE)
    rest = [first, *batches]
    assert sum(len(batch["index"]) for batch in rest) == len(made.index)
    assert "q.0" in spile.open(made.path).taps and "q.0" not in reader.taps


def test_a_unit_with_other_rows_than_the_datasets_is_not_committed(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=[0])
    table = added.ledger.table()
    values = {"z.0": rows["z.0"][made.starts[1] : made.starts[2]]}
    done, _ = stored.write_unit(added.objects, table, 1, made.read[1], values, 60, text_digest="07")
    with pytest.raises(StoreError, match="unit 1 has other rows than in the dataset.*text_digest"):
        added.ledger.commit(done)
    other = made.read[1].copy()
    other["token_id"][0] += 1
    done, _ = stored.write_unit(added.objects, table, 1, other, values, 60)
    with pytest.raises(StoreError, match=r"other rows than in the dataset \(index\)"):
        added.ledger.commit(done)
    assert added.ledger.done_units() == {0}


def test_other_weights_than_those_of_the_dataset_are_refused(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    ledger = Pass(made.ledger, "one-0").ledger
    with pytest.raises(DriftError, match="weights of embed"):
        ledger.check_weights({"embed": "changed", "head": "cc"})
    ledger.check_weights({"embed": "aa", "head": "cc"})  # (the head was not needed before)
    with pytest.raises(DriftError, match="weights of head"):
        ledger.check_weights({"embed": "aa", "head": "changed"})


def test_of_two_passes_begun_with_one_tap_the_later_gives_way(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4}, commit=[0])
    with pytest.raises(ConfigError, match="another process has begun to add z.0"):
        stored.add_pass(made, {"z.0": 4, "z.1": 4}, commit=[])
    assert [each.name for each in live_passes(made.ledger)] == [added.name]


def test_who_joins_a_pass_whose_beginner_died_looks_for_others_too(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    later, _ = stored.add_pass(made, {"z.0": 4, "z.1": 4}, commit=[])
    record = later.objects.get(fmt.PASS)
    later.objects.delete(fmt.PASS)
    stored.add_pass(made, {"z.0": 4}, commit=[0])
    later.objects.create(fmt.PASS, record)  # and its process died before it looked
    with pytest.raises(ConfigError, match="another process has begun to add z.0"):
        later.ledger.create_table(later.ledger.table())
    assert len(live_passes(made.ledger)) == 2  # (what others may have begun is not dropped)


def test_a_dropped_pass_is_not_read_and_not_continued(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4})
    added.drop()
    assert "z.0" not in spile.open(made.path).taps
    assert live_passes(made.ledger) == []
    done = added.ledger.read_done(0)
    assert done
    with pytest.raises(ConfigError, match="z.0 were dropped while they were being added"):
        added.ledger.commit(done)
    again, rows = stored.add_pass(made, {"z.0": 4}, number=1, seed=5)
    assert again.name != added.name
    np.testing.assert_array_equal(all_rows(spile.open(made.path))["z.0"], rows["z.0"])


@pytest.mark.parametrize("change", ["rows", "taps", "recipe"])
def test_a_damaged_record_of_a_pass_is_named_and_the_rest_is_read(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4})
    key = fmt.pass_prefix(added.name) + fmt.PASS
    body = fmt.decode_record(key, made.objects.get(key), "pass")
    body[change] = {
        "rows": "of another dataset",
        "taps": {},
        "recipe": {**body["recipe"], "seq_len": 9},
    }[change]
    (made.path / key).write_bytes(fmt.encode_record("pass", body))
    with caplog.at_level("WARNING"):
        reader = spile.open(made.path)
    assert reader.num_tokens == len(made.index) and "z.0" not in reader.taps
    assert f"{key}: " in caplog.text and f"spile drop --taps {added.name}" in caplog.text
    assert any(fault.startswith(f"{key}: ") for fault in verify(made.objects).faults)


def test_damage_in_a_pass_is_named_by_its_place_in_the_dataset(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4})
    key = fmt.pass_prefix(added.name) + fmt.MANIFEST
    (made.path / key).write_bytes(b"{}")
    with pytest.raises(CorruptError, match=f"^{key}: "):
        spile.open(made.path)
    assert isinstance(Ledger(made.objects).table().recipe.seq_len, int)


def test_drop_takes_whole_passes_and_leaves_the_datasets_own_taps(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    first, _ = stored.add_pass(made, {"z.0": 4, "z.1": 4})
    stored.add_pass(made, {"q.0": TapInfo((2, 3), "float32", ("blocks.0.attn.hook_q",))})
    for asked, message in {
        ("mlp_out.1",): "was made with mlp_out.1; only taps that --add-taps has added",
        ("z.7",): "no tap 'z.7' was added to .*; these can be dropped: ",
        ("z.0", "q.0"): "z.0, z.1 were added together, .*: --taps z.0,z.1$",
    }.items():
        with pytest.raises(ConfigError, match=message):
            drop_taps(made.ledger, asked)
    assert len(live_passes(made.ledger)) == 2
    gone = drop_taps(made.ledger, ["z:0", "z.1"])
    assert {*gone} == {"z.0", "z.1"} and all(gone.values())
    assert made.listed(fmt.pass_prefix(first.name) + fmt.DROPPED)
    assert [*drop_taps(made.ledger, ["blocks.0.attn.hook_q"])] == ["q.0"]
    assert {*spile.open(made.path).taps} == {*made.rows}


def test_gc_removes_a_dropped_pass_and_keeps_the_others(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    before = made.listed()
    dropped, _ = stored.add_pass(made, {"z.0": 4})
    kept, rows = stored.add_pass(made, {"q.0": 4})
    there = made.listed()
    assert collect_garbage(made.objects) == []
    dropped.drop()
    prefix = fmt.pass_prefix(dropped.name)
    assert collect_garbage(made.objects) == [key for key in there if key.startswith(prefix)]
    assert made.listed(prefix) == [prefix + fmt.DROPPED]
    assert {*made.listed()} - {prefix + fmt.DROPPED} == {
        *before,
        *(key for key in there if key.startswith(fmt.pass_prefix(kept.name))),
    }
    np.testing.assert_array_equal(all_rows(spile.open(made.path))["q.0"], rows["q.0"])
    assert collect_garbage(made.objects) == []


def test_gc_removes_losing_attempts_of_a_pass_and_never_those_in_hand(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=[0])
    for unit in (0, 1):
        part = slice(made.starts[unit], made.starts[unit + 1])
        values = {"z.0": rows["z.0"][part]}
        stored.write_unit(added.objects, added.ledger.table(), unit, made.read[unit], values, 60)
    removed = collect_garbage(made.objects)
    units = {fmt.parse_attempt_key(fmt.split_pass_key(key)[1])[0] for key in removed}  # type: ignore[index]
    assert units == {0}
    removed = collect_garbage(made.objects, abandoned=True)
    units = {fmt.parse_attempt_key(fmt.split_pass_key(key)[1])[0] for key in removed}  # type: ignore[index]
    assert units == {1}


@pytest.mark.parametrize("quick", [False, True])
def test_verify_audits_passes(tmp_path: Path, quick: bool) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, MORE)
    unfinished, _ = stored.add_pass(made, {"z.0": 4}, commit=[0])
    report = verify(made.objects, quick=quick)
    assert report.ok and not report.orphans, (report.faults, report.orphans)
    assert report.passes[added.name].units_done == len(made.table.units)
    assert report.passes[unfinished.name].units_done == 1
    done = added.ledger.read_done(3)
    assert done
    key = fmt.pass_prefix(added.name) + done.shards[0].key
    data = made.objects.get(key)
    (made.path / key).write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if not quick else data[:-1])
    report = verify(made.objects, quick=quick)
    assert [fault.partition(": ")[0] for fault in report.faults] == [key]
    assert not report.damaged and [*report.passes[added.name].damaged] == [3]
    added.drop()
    report = verify(made.objects, quick=quick)
    assert report.ok and key in report.orphans


def test_verify_compares_the_rows_of_a_pass_with_the_datasets(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4})
    done = added.ledger.read_done(0)
    assert done
    key = added.ledger.layout.done_key(0)
    added.objects.delete(key)
    body = {**done.to_json(), "text_digest": "07"}
    assert added.objects.create(key, fmt.encode_record("done", body))
    faults = verify(made.objects).faults
    assert f"passes/{added.name}/{key}: has other rows than the dataset (text_digest)" in faults


def test_a_damaged_record_of_the_dataset_is_no_fault_of_its_passes(
    tmp_path: Path,
) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4})
    key = made.ledger.layout.done_key(0)
    data = made.objects.get(key)
    (made.path / key).write_bytes(data[: len(data) // 2])
    report = verify(made.objects)
    assert [*report.damaged] == [0]
    record, segment, manifest = report.faults
    assert record.startswith(f"{key}: is not JSON") and segment.endswith("missing or damaged")
    assert manifest.endswith(f"done records are missing or damaged: {key}")
    assert report.passes[added.name].ok


def test_the_damaged_record_of_a_pass_is_set_aside_in_its_folder(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4})
    prefix = fmt.pass_prefix(added.name)
    (made.path / prefix / added.ledger.layout.done_key(0)).write_bytes(b"torn")
    report = verify(made.objects)
    repairing = Repair(report.passes[added.name], Pass(made.ledger, added.name).ledger)
    assert repairing.units == [0]
    repairing.withdraw()
    assert made.listed(f"{prefix}damaged/") and not made.listed("damaged/")
    assert spile.open(made.path).num_tokens == len(made.index)  # the dataset reads as before
    assert "z.0" not in spile.open(made.path).taps

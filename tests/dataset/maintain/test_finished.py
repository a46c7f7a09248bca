"""A finished dataset as a source: copies have all of its taps, or an error says why not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.format import TapInfo
from spile.dataset.maintain.assemble import copy_part, merge
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.finished import read_finished
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.maintain.verify import verify
from spile.interop.export import export
from spile.objects import LocalObjects, MemoryObjects, Objects
from support import stored
from support.marks import some

MORE: stored.Taps = {"q.0": TapInfo((2, 3), "int8"), "z.1": 4}  # in int8: with scales


@pytest.fixture
def made(tmp_path: Path) -> stored.Stored:
    return stored.copied(tmp_path / "out")


def added(made: stored.Stored) -> dict[str, np.ndarray]:
    """The rows of all taps. Two passes have added some of them; a third pass is not complete."""
    _, first = stored.add_pass(made, MORE)
    _, second = stored.add_pass(made, {"logprob": 1})
    stored.add_pass(made, {"v.0": 4}, commit=(0,))
    return {**made.rows, **first, **second}


def test_a_finished_dataset_is_its_table_and_every_record(made: stored.Stored) -> None:
    table, records = read_finished(made.objects)
    assert table.fingerprint == made.table.fingerprint
    assert [done.unit for done in records] == [0, 1, 2, 3, 4]
    manifest = fmt.decode_record("manifest.json", made.objects.get("manifest.json"), "manifest")
    made.objects.delete("manifest.json")
    with pytest.raises(StoreError, match="every unit is done, but there is no manifest.json yet"):
        read_finished(made.objects)
    forged = fmt.encode_record("manifest", {**manifest, "rows": manifest["rows"] + 1})
    made.objects.create("manifest.json", forged)
    with pytest.raises(CorruptError, match="manifest.json: does not follow from the done records"):
        read_finished(made.objects)
    for key in ("manifest.json", "segments/000000.safetensors", "done/000000/00000002.json"):
        made.objects.delete(key)
    with pytest.raises(StoreError, match="4 of 5 units are done"):
        read_finished(made.objects)


def compacted(source: Objects, dest: Objects, **options: object) -> None:
    compact(source, dest, unit_bytes=4000, shard_bytes=500, **options)  # type: ignore[arg-type]


def shuffled(source: Objects, dest: Objects, **options: object) -> None:
    shuffle(source, dest, seed=3, memory=20_000, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", [compacted, shuffled, copy_part])
def test_added_taps_become_taps_like_the_others(
    verb: Callable[..., object], made: stored.Stored, tmp_path: Path
) -> None:
    wanted, dest = added(made), LocalObjects(tmp_path / "dest")
    verb(made.objects, dest)
    found = verify(dest)
    assert found.ok and not found.passes and not found.orphans, found.faults
    dataset = spile.open(dest.url)
    assert {*dataset.taps} == {*wanted} == {*dataset.recipe.stored_taps}
    assert dataset.fingerprint == dataset.recipe.fingerprint()
    # Rows are found by their entries, whatever the order.
    index = dataset.index(0, dataset.num_tokens)
    order, own = (np.argsort(each, order=("doc", "offset")) for each in (index, made.index))
    assert index[order].tobytes() == made.index[own].tobytes()
    for tap, rows in wanted.items():
        read = dataset.read(tap, 0, dataset.num_tokens)
        np.testing.assert_array_equal(read[order], rows[own])
        assert dataset.statistics(tap).count == len(rows)
    verb(made.objects, dest)  # the same again has nothing left to do
    with pytest.raises(ConfigError, match="holds another dataset"):
        verb(made.objects, dest, taps="q.0")


@pytest.mark.parametrize("units", some([3, 40], 40))
@pytest.mark.parametrize("verb", [compacted, shuffled, copy_part])
def test_each_record_is_read_once_and_few_are_held(
    verb: Callable[..., object], units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out", ((5,),) * units)
    added, _ = stored.add_pass(made, {"z.1": 4})
    source, dest = stored.CountedObjects(made.path), MemoryObjects(f"memory://{tmp_path}")
    once = dict.fromkeys(stored.record_keys(made, added), 1)
    held = stored.HeldRecords(source.url, monkeypatch)
    for _ in range(2):  # the second time, everything is there already
        source.reads.clear()
        verb(source, dest)
        assert source.reads == once
    assert held.most <= 20


def test_an_export_has_added_taps(made: stored.Stored, tmp_path: Path) -> None:
    wanted = added(made)
    export(str(made.path), str(tmp_path / "dest"), to="npy")
    assert {*spile.open(made.path).taps} == {*wanted}
    for tap in ("z.1", "logprob"):
        (path,) = (tmp_path / "dest").rglob(f"{tap}*.npy")
        np.testing.assert_array_equal(np.load(path).reshape(wanted[tap].shape), wanted[tap])


def test_datasets_with_the_same_added_taps_are_joined(made: stored.Stored, tmp_path: Path) -> None:
    other = stored.build(tmp_path / "b", ((7, 0), (9,)), seed=5, corpus=("34-cd",))
    taps: stored.Taps = {"z.1": 4}
    rows = [stored.add_pass(each, taps)[1]["z.1"] for each in (made, other)]
    merge([made.objects, other.objects], LocalObjects(tmp_path / "dest"))
    dataset = spile.open(tmp_path / "dest")
    np.testing.assert_array_equal(dataset.read("z.1", 0, dataset.num_tokens), np.concatenate(rows))
    stored.add_pass(made, {"q.0": 4})
    with pytest.raises(ConfigError, match="differ in taps"):
        merge([made.objects, other.objects], LocalObjects(tmp_path / "dest2"))


def test_taps_of_two_recipes_must_be_chosen_from(made: stored.Stored, tmp_path: Path) -> None:
    _, rows = stored.add_pass(made, {"z.1": 4, "logprob": 1}, dtype="bfloat16")
    dest = LocalObjects(tmp_path / "dest")
    with pytest.raises(ConfigError) as caught:
        compact(made.objects, dest)
    assert str(caught.value) == (
        f"{made.path}: {', '.join(made.table.recipe.taps)} and z.1, logprob differ in "
        "--store-dtype (float32 and bfloat16), and a new dataset can have one value "
        "only; choose taps with --taps"
    )
    compact(made.objects, dest, taps=["z.1"])
    dataset = spile.open(dest.url)
    assert (dataset.taps, dataset.recipe.store_dtype) == (["z.1"], "bfloat16")
    np.testing.assert_array_equal(dataset.read("z.1", 0, len(made.index)), rows["z.1"])


def test_taps_that_lack_later_documents_are_not_left_out_silently(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", grown=(3,))
    added, _ = stored.add_pass(made, {"z.1": 4})
    for key in (added.ledger.layout.manifest_key, added.ledger.layout.done_key(4)):
        added.objects.delete(key)
    stored.complete_before_growth(added)
    with pytest.raises(StoreError, match="z.1 lack the documents that were added later; .*z.1"):
        read_finished(made.objects)
    own = [*made.ledger.table().taps][:1]  # which lacks nothing
    table, _ = read_finished(made.objects, own)
    assert [*table.taps] == own


def test_damage_in_a_pass_is_named_and_not_copied(made: stored.Stored, tmp_path: Path) -> None:
    added, _ = stored.add_pass(made, {"z.1": 4})
    done = added.ledger.read_done(1)
    assert done
    prefix, shard = fmt.pass_prefix(added.name), done.shards[0]
    stored.flip(made.path / prefix / shard.key, shard.bytes - 1)
    with pytest.raises(CorruptError, match=f"^{prefix}{shard.key}: "):
        compact(made.objects, LocalObjects(tmp_path / "dest"))

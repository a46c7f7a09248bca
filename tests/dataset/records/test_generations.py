"""Generations: units that follow those of a table, whose own units do not change."""

import inspect
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import spile
from spile.core.config import canonical_json
from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.repair import Repair
from spile.dataset.maintain.replica import replicate
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import ManifestSums
from spile.objects import LocalObjects
from spile.status.status import read_status
from support import stored

# In groups of three: the first generation fills up a group and begins another, the second adds to
# that one.
UNITS = ((2,), (0,), (3, 1), (1,), (4,), (0,), (2,), (5, 5))
GROWN = (4, 7)


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stored.Stored:
    monkeypatch.setattr(fmt, "GROUP_UNITS", 3)
    return stored.build(tmp_path / "out", UNITS, grown=GROWN)


def holds(path: Path, dataset: stored.Stored, units: int, **opened: Any) -> spile.Dataset:
    """Check that a dataset reads as its first units, in every way."""
    ds = spile.open(path, **opened)
    rows = dataset.starts[units]
    assert ds.units == [*range(units)]
    assert ds.num_tokens == rows
    for tap, values in dataset.rows.items():
        assert np.array_equal(ds.read(tap, 0, rows), values[:rows])
        assert ds.statistics(tap).count == rows
        mean = values[:rows].mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(ds.statistics(tap).mean, mean, rtol=1e-12)
    assert np.array_equal(ds.index(0, rows), dataset.index[:rows])
    return ds


def test_a_grown_dataset_reads_as_one(grown: stored.Stored) -> None:
    ds = holds(grown.path, grown, 8)
    assert ds.is_complete and ds.num_documents == 8
    assert ds.document(8).index["doc"].tolist() == [8] * 5
    assert ds.recipe.corpus == ("12-ab", "1-cd", "2-cd")
    assert ds.fingerprint == grown.table.at(0).fingerprint
    assert read_status(grown.objects).generations == 2


def test_each_generation_derives_its_own_and_leaves_the_others(grown: stored.Stored) -> None:
    assert grown.listed(fmt.SEGMENTS, fmt.MANIFEST) == [
        "manifest.json", "segments/000000.safetensors", "segments/000001.safetensors",
    ]  # fmt: skip
    folders = [fmt.generation_folder(number) for number in (1, 2)]
    assert grown.listed(*(folder + fmt.SEGMENTS for folder in folders)) == [
        "generations/00000001/segments/000001.safetensors",
        "generations/00000001/segments/000002.safetensors",
        "generations/00000002/segments/000002.safetensors",
    ]
    newest = grown.ledger.derived.read_manifest(grown.ledger.layout)
    assert newest and [each.file.key for each in newest.segments] == [
        "segments/000000.safetensors",
        "generations/00000001/segments/000001.safetensors",
        "generations/00000002/segments/000002.safetensors",
    ]


def test_taps_added_to_a_grown_dataset_hide_none_of_it(
    grown: stored.Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an earlier manifest first, readers would have only its documents for a while."""
    created = list[str]()
    real = LocalObjects.create

    def create(objects: LocalObjects, key: str, data: bytes) -> bool:
        created.append(key)
        return real(objects, key, data)

    monkeypatch.setattr(LocalObjects, "create", create)
    added, _ = stored.add_pass(grown, {"z.0": 4})
    manifests = [key for key in created if key.endswith(fmt.MANIFEST)]
    assert manifests == [added.prefix + fmt.manifest_key(number) for number in (2, 0, 1)]
    # A process that ended between them is made up for by the next.
    added.objects.delete(fmt.manifest_key(0))
    added.objects.delete(fmt.manifest_key(1))
    assert len(spile.open(grown.path)) == len(grown.index)
    created.clear()
    assert added.ledger.complete(added.ledger.table())
    assert [key for key in created if key.endswith(fmt.MANIFEST)] == manifests[1:]
    assert verify(grown.objects).ok


def test_who_does_not_know_generations_reads_what_was_there(grown: stored.Stored) -> None:
    shutil.rmtree(grown.path / "generations")
    holds(grown.path, grown, 4)
    holds(grown.path, grown, 4, partial=True)


def test_an_unfinished_generation_is_shown_only_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "GROUP_UNITS", 3)
    dataset = stored.build(tmp_path / "out", UNITS, grown=GROWN, commit=[0, 1, 2, 3, 5, 7])
    holds(dataset.path, dataset, 4)
    ds = spile.open(dataset.path, partial=True)
    assert ds.units == [0, 1, 2, 3, 5, 7] and not ds.is_complete
    status = read_status(dataset.objects)
    assert (status.state, status.units_done, status.units) == ("unfinished", 6, 8)
    assert any("2 of 8 units" in fault for fault in verify(dataset.objects).faults)
    assert verify(dataset.objects, partial=True).ok
    (dataset.path / fmt.MANIFEST).unlink()  # (killed between the last record and the manifest)
    holds(dataset.path, dataset, 4)
    ledger = dataset.ledger
    for unit in (4, 6):
        assert ledger.commit(dataset.attempt(unit))
    assert ledger.complete(ledger.table())
    holds(dataset.path, dataset, 8)
    assert len(ledger.derived.manifests(ledger.table())) == 3  # those before are made good, too
    assert verify(dataset.objects).ok


def test_no_generation_is_read_that_a_manifest_would_hide(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, grown=GROWN)
    for key in dataset.listed(fmt.MANIFEST, fmt.GENERATIONS):
        if key.endswith(fmt.MANIFEST):  # (a copy was killed before it created them)
            (dataset.path / key).unlink()
    holds(dataset.path, dataset, 4)
    table = dataset.ledger.table()
    assert dataset.ledger.complete(table.at(0))
    holds(dataset.path, dataset, 4)
    assert dataset.ledger.complete(table)
    holds(dataset.path, dataset, 8)


def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, grown=GROWN, commit=range(7))
    ds = spile.open(dataset.path)
    assert ds.num_units == 7
    batches = ds.batches("resid_post.0", 4, seed=1)
    first = next(batches)["resid_post.0"]
    assert dataset.ledger.commit(dataset.attempt(7)) and dataset.ledger.complete(dataset.table)
    again = pickle.loads(pickle.dumps(ds))
    assert again.num_units == ds.num_units == 7
    rest = [batch["resid_post.0"] for batch in batches]
    assert len(first) + sum(map(len, rest)) == dataset.starts[7]
    state = batches.state_dict()
    other = spile.open(dataset.path).batches("resid_post.0", 4, seed=1)
    with pytest.raises(spile.SpileError):  # another set of rows has another order
        other.load_state_dict(state)


def test_of_two_generations_at_once_one_wins(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS[:4])
    more = stored.make_table(UNITS).units
    one = stored.more_units(dataset.table, more.part(4, 6))
    other = stored.more_units(dataset.table, more.part(4, 8))
    assert dataset.ledger.create_generation(one) == dataset.ledger.create_generation(other)
    assert len(dataset.ledger.table().units) == 6
    (orphan,) = verify(dataset.objects, partial=True).orphans
    assert orphan.startswith("generations/00000001/units/")
    # The units of a generation that is about to be created are not touched.
    later = stored.more_units(dataset.ledger.table(), more.part(6, 8))
    dataset.ledger.create_generation(later)
    (dataset.path / fmt.generation_key(2)).unlink()
    assert collect_garbage(dataset.objects) == [orphan]
    assert dataset.listed("generations/00000002/units/")


@pytest.mark.parametrize("change", [
    {"before": 3}, {"fingerprint": "f" * 64}, {"sources": []}, {"files": {}}, {"max_docs": "all"},
    {"files": [{"path": "/a", "identity": 3}]}, {"units": {"count": 0}},
    {"units": {"count": 10**8 - 3}}, {"units": {"count": 10**9}}, {"units": []},
])  # fmt: skip
def test_a_record_that_does_not_follow_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    dataset = stored.copied(tmp_path / "out", UNITS, grown=(4,))
    key = fmt.generation_key(1)
    body = fmt.decode_record(key, dataset.objects.get(key), "generation")
    if isinstance(change.get("units"), dict):
        change = {"units": {**body["units"], **change["units"]}}
    dataset.objects.replace(key, fmt.encode_record("generation", {**body, **change}))
    with pytest.raises(CorruptError, match=r"generations/00000001\.json: is not a generation"):
        dataset.ledger.table()


def test_verify_finds_what_is_damaged_in_any_generation(grown: stored.Stored) -> None:
    assert verify(grown.objects).ok and not verify(grown.objects).orphans
    for key in (
        "generations/00000001.json",
        "generations/00000002/manifest.json",
        "generations/00000001/manifest.json",
        "generations/00000001/segments/000002.safetensors",
        "segments/000001.safetensors",
        *grown.listed("generations/00000002/units/", "generations/00000001/manifest/"),
    ):
        with stored.changed(grown, key):
            stored.flip(grown.path / key, (grown.path / key).stat().st_size - 3)
            report = verify(grown.objects)
            assert any(key in fault for fault in report.faults), key
    (grown.path / "generations/00000003").mkdir()
    (grown.path / "generations/00000003/manifest.json").write_text("{}")
    assert verify(grown.objects).orphans == ["generations/00000003/manifest.json"]


def test_a_unit_of_an_earlier_generation_is_repaired(grown: stored.Stored) -> None:
    shard = grown.done(3).shards[0].key
    stored.flip(grown.path / shard, (grown.path / shard).stat().st_size - 1)
    report = verify(grown.objects)
    assert [*report.damaged] == [3]
    repair = Repair(report, Ledger(grown.objects))
    repair.condemn()
    again = grown.attempt(3)
    assert repair.ledger.commit(again)
    assert repair.ledger.complete(grown.table)
    assert verify(grown.objects).ok
    holds(grown.path, grown, 8)
    removed = collect_garbage(grown.objects)
    assert shard in removed and verify(grown.objects).ok and not verify(grown.objects).orphans
    holds(grown.path, grown, 8)


def test_gc_leaves_what_any_generation_names(grown: stored.Stored) -> None:
    before = grown.listed()
    lost = grown.attempt(2)
    assert {*collect_garbage(grown.objects)} == {file.key for file in lost.files()}
    assert grown.listed() == before


def test_what_is_made_of_a_grown_dataset_is_one_table(grown: stored.Stored, tmp_path: Path) -> None:
    compact(grown.objects, LocalObjects(tmp_path / "compacted"))
    ds = spile.open(tmp_path / "compacted")
    tap = next(iter(grown.rows))
    assert np.array_equal(ds.read(tap, 0, ds.num_tokens), grown.rows[tap])
    assert ds.fingerprint == ds.recipe.fingerprint() != grown.table.fingerprint
    assert ds.recipe.corpus == ("12-ab", "1-cd", "2-cd")
    shuffle(grown.objects, LocalObjects(tmp_path / "shuffled"), seed=3)
    found = spile.open(tmp_path / "shuffled").read(tap, 0, 10**6)
    assert sorted(map(bytes, found)) == sorted(map(bytes, grown.rows[tap]))
    for name in ("compacted", "shuffled"):
        assert verify(LocalObjects(tmp_path / name)).ok
        assert len(Ledger(LocalObjects(tmp_path / name)).table().generations) == 0


def test_a_copy_follows_a_dataset_that_grows(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", UNITS, grown=GROWN, commit=range(7))
    copy = LocalObjects(tmp_path / "copy")
    replicate(dataset.objects, copy)
    holds(tmp_path / "copy", dataset, 7)
    assert dataset.ledger.commit(dataset.attempt(7)) and dataset.ledger.complete(dataset.table)
    replicate(dataset.objects, copy)
    holds(tmp_path / "copy", dataset, 8)
    report = verify(copy)
    assert report.ok and not report.orphans
    assert {*copy.list()} == {key for key in dataset.listed() if not key.startswith(fmt.WORKERS)}


@pytest.fixture
def shallow() -> Iterator[Callable[[], None]]:
    """Returns a function that leaves room for few more calls within one another."""
    limit = sys.getrecursionlimit()
    yield lambda: sys.setrecursionlimit(len(inspect.stack(0)) + 80)
    sys.setrecursionlimit(limit)


def test_many_generations_need_no_deep_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shallow: Callable[[], None]
) -> None:
    monkeypatch.setattr(fmt, "GROUP_UNITS", 16)
    count = 40
    dataset = stored.build(tmp_path / "out", ((1,),) * count, grown=range(1, count - 1))
    holds(dataset.path, dataset, count)  # (imports modules at any depth)
    shallow()
    table = dataset.ledger.table()
    assert len(table.generations) == count - 2
    assert table.units == stored.make_table(((1,),) * count).units
    holds(dataset.path, dataset, count)
    for number in (0, 20, count - 2):
        assert len(table.at(number).units.columns["tokens"]) == len(table.at(number).units)
    assert verify(dataset.objects, quick=True).ok
    assert collect_garbage(dataset.objects) == []
    assert read_status(dataset.objects).generations == count - 2
    # Manifests that were never made are made in order with the next.
    numbers = range(20, count - 1)
    wanted = {n: dataset.objects.get(fmt.manifest_key(n)) for n in numbers}
    for key in map(fmt.manifest_key, numbers):
        dataset.objects.delete(key)
    assert dataset.ledger.complete(table)
    assert {n: dataset.objects.get(fmt.manifest_key(n)) for n in numbers} == wanted


class CountedRequests(LocalObjects):
    """A disk that counts requests by kind."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.requests["generation" if fmt.parse_generation(key) else "get"] += 1
        return super().get(key)

    def size(self, key: str) -> int:
        self.requests["size"] += key.endswith(fmt.MANIFEST)
        return super().size(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        self.requests["list"] += 1
        return super().list(prefix)

    def create(self, key: str, data: bytes) -> bool:
        self.requests["create"] += 1
        return super().create(key, data)


@pytest.mark.full
def test_one_more_generation_costs_as_much_after_few_as_after_many(tmp_path: Path) -> None:
    def cost(count: int) -> Counter[str]:
        path, last = tmp_path / str(count), count - 1
        dataset = stored.build(path, ((1,),) * count, grown=range(1, count), commit=range(last))
        made, ledger = dataset.attempt(last), Ledger(CountedRequests(path))
        table = ledger.table()
        assert ledger.commit(made) and ledger.complete(table)
        assert isinstance(ledger.objects, CountedRequests)
        return ledger.objects.requests

    few, many = cost(6), cost(30)
    for kind in ("list", "size", "create"):
        assert many[kind] == few[kind] > 0, kind
    # Each is read, and nothing that it derived; a few are read ahead of the last.
    assert many["generation"] - few["generation"] <= 24 + LocalObjects.parallel


def test_the_identity_of_the_units_at_each_generation_is_that_of_the_page(tmp_path: Path) -> None:
    """As docs/format.md has it: a list in canonical JSON, hashed."""
    newest = stored.build(tmp_path / "out", UNITS, grown=[2, 5]).ledger.table()
    for table in newest.every_generation():
        files = [file["identity"] for file in table.files]
        more = [each.columns.digest for each in table.generations if each.columns]
        told = canonical_json([table.fingerprint, files, newest.units.key, more])
        assert table.order == xxhash.xxh3_128_hexdigest(told)
    assert len({table.order for table in newest.every_generation()}) == 3


def test_each_record_is_read_once_however_many_generations_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "GROUP_UNITS", 3)
    dataset = stored.build(tmp_path / "out", UNITS, grown=range(1, 8))
    objects = stored.CountedObjects(dataset.path)
    ledger = Ledger(objects)
    table = ledger.table()
    must_be_done = partial(ledger.must_be_done, table)
    assert ledger.derived.unfounded(table, must_be_done) == set()
    assert {*objects.reads.values()} == {1} and len(objects.reads) == len(UNITS)
    # A segment of an earlier generation that does not follow is found by all that name it.
    key = table.at(4).layout.segment_key(1)
    sums, data = ManifestSums(), objects.get(key)
    wrong = dataset.table.at(3).layout.segment_key(1)
    objects.replace(key, objects.get(wrong))
    assert ledger.derived.unfounded(table, must_be_done) == {fmt.manifest_key(4)}
    objects.replace(key, data)
    for each in table.every_generation():
        assert ledger.derived.derive(each, sums) == ledger.derived.derive(each)
        assert ledger.derived.manifest_follows(each)


def test_a_repair_makes_manifests_again_from_the_first_that_is_wrong(
    grown: stored.Stored,
) -> None:
    keys = [fmt.manifest_key(number) for number in range(3)]
    whole = [grown.objects.get(key) for key in keys]
    stored.flip(grown.path / keys[1], 40)
    repair = Repair(verify(grown.objects), Ledger(grown.objects))
    assert repair.ledger.complete(grown.table)
    assert repair.repaired.records == keys[1:]
    assert [grown.objects.get(key) for key in keys] == whole


class Endless(LocalObjects):
    """A hostile store: after the last generation there is always another."""

    def get(self, key: str) -> bytes:
        number = fmt.parse_generation(key)
        if number < 2:
            return super().get(key)
        first = fmt.generation_key(1)
        body = fmt.decode_record(first, super().get(first), "generation")
        units = {**body["units"]}
        if "/units/" in key:
            return super().get(units["key"])
        units["key"] = units["key"].replace(first[:-5], key.removesuffix(".json"))
        body |= {"before": body["before"] + (number - 1) * units["count"], "units": units}
        return fmt.encode_record("generation", body)


def test_a_store_with_generations_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "MOST_GENERATIONS", 20)
    dataset = stored.build(tmp_path / "out", ((1,), (1,)), grown=[1])
    with pytest.raises(CorruptError, match=r"generations/00000021\.json: is one too many \(20 may"):
        Ledger(Endless(dataset.path)).table()


def test_a_dataset_that_has_grown_too_often_is_not_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "MOST_GENERATIONS", 1)
    dataset = stored.build(tmp_path / "out", ((1,), (1,)), grown=[1])
    more = stored.more_units(dataset.table, stored.make_table(((1,),) * 3).units.part(2, 3))
    with pytest.raises(ConfigError, match="has grown 1 times, which is the most"):
        dataset.ledger.create_generation(more)


def test_a_dataset_that_is_not_there_has_no_generations(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no dataset there"):
        Ledger(LocalObjects(tmp_path)).table()

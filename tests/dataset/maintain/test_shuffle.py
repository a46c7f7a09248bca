"""Shuffling on disk: a uniform permutation of the rows, whatever is killed."""

import os
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import run
from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain import shuffle as module
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.shuffle import Shuffled, shuffle
from spile.dataset.maintain.verify import verify
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.dataset.read.tap_groups import TapGroup
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects, MemoryObjects, Objects, open_objects
from support import servers, stored, tiny, zygote
from support.marks import some

TOLD = ("doc", "tokens", "rows", "skipped", "preview")


def keys(index: np.ndarray) -> np.ndarray:
    return index["doc"].astype(np.int64) << 32 | index["offset"]


def places(one: Dataset, other: Dataset) -> np.ndarray:
    """Return the place in one dataset of each row of the other; each must be there once."""
    mine, theirs = (keys(ds.index(0, ds.num_tokens)) for ds in (one, other))
    order = np.argsort(theirs)
    assert len({*mine.tolist()}) == len(mine) == len(theirs)
    assert np.array_equal(np.sort(mine), theirs[order])
    return order[np.searchsorted(theirs, mine, sorter=order)]


def check_shuffled(source: Objects, dest: Objects) -> np.ndarray:
    """Check that it is a whole dataset, and bit for bit a permutation of the source."""
    report = verify(dest)
    assert report.faults == []
    assert report.orphans == []
    one, other = open_dataset(source.url), open_dataset(dest.url)
    assert (one.recipe, one.fingerprint, one.taps) == (other.recipe, other.fingerprint, other.taps)
    found = places(other, one)
    count = one.num_tokens
    assert other.index(0, count).tobytes() == one.index(0, count)[found].tobytes()
    first, second = (ds.batches(ds.taps, count, shuffle=None, encoded=True) for ds in (one, other))
    before, after = next(first), next(second)
    for tap in one.taps:
        a, b = before[tap], after[tap]
        if isinstance(a, tuple):  # codes and scales, as they are stored
            by_row = len(a[1]) == count and a[1].ndim == 1
            assert b[1].tobytes() == (a[1][found] if by_row else a[1]).tobytes()
            a, b = a[0], b[0]
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert b.tobytes() == np.ascontiguousarray(a[found]).tobytes()
        was, now = one.statistics(tap), other.statistics(tap)
        assert (was.count, was.nonfinite, was.clipped) == (now.count, now.nonfinite, now.clipped)
        assert (was.mean.tobytes(), was.m2.tobytes()) == (now.mean.tobytes(), now.m2.tobytes())
    assert one.documents(TOLD).equals(other.documents(TOLD))
    return found


@pytest.mark.parametrize(
    ("kind", "memory"),
    some(product(["SHAPED", "SCALED"], [1 << 30, 6000]), ("SHAPED", 1 << 30), ("SCALED", 6000)),
)
def test_every_row_comes_once_with_its_bytes_and_its_entry(
    kind: str, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SEGMENT_BYTES", 100)
    made = stored.copied(tmp_path / "out", taps=getattr(stored, kind), compress=kind == "SHAPED")
    dest = LocalObjects(tmp_path / "dest")
    result = shuffle(made.objects, dest, memory=memory, compress=kind == "SCALED")
    found = check_shuffled(made.objects, dest)
    assert not np.array_equal(found, np.arange(len(found)))
    assert (result.rows, result.units) == (111, 5)
    assert not list(dest.list(fmt.SCRATCH))


def test_of_many_parts_more_passes_are_made(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", every=3)
    dest = LocalObjects(tmp_path / "dest")
    result = shuffle(made.objects, dest, memory=2200, shard_bytes=200)
    assert result.passes > 2
    found = check_shuffled(made.objects, dest)
    assert len(found) == result.rows


def test_the_seed_fixes_the_order(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        dest = LocalObjects(tmp_path / f"dest-{number}")
        shuffle(made.objects, dest, seed=seed)
        orders.append(places(open_dataset(dest.url), open_dataset(str(made.path))).tobytes())
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.full
def test_rows_are_uniform_in_their_places_and_their_neighbours(tmp_path: Path) -> None:
    """Chi-square over many seeds. Memory holds a third of the rows: they are scattered twice."""
    made = stored.copied(tmp_path / "out", ((6,), (4, 2)), taps={"logprob": 1})
    source, count, seeds = open_dataset(str(made.path)), 12, 100
    at = np.zeros((count, count))
    follows = np.zeros((count, count))
    table, records = module.read_finished(made.objects)
    for seed in range(seeds):
        # (in memory: a disk would be synced ten thousand times)
        dest = MemoryObjects(f"memory://uniform/{seed}")
        work = module._Shuffle(
            made.objects, dest, table, records, seed, 800, f"memory://uniform-scratch/{seed}",
            1 << 20, False,
        )  # fmt: skip
        assert len(work._passes(_parts(work))) == 2 < len(_parts(work))
        work.run()
        ledger = Ledger(dest)
        shuffled = ledger.table()
        part = TapGroup(shuffled, ledger.catalog_so_far(shuffled), {})
        found = places(Dataset(dest, [part]), source)
        at[np.arange(count), found] += 1
        follows[found[:-1], found[1:]] += 1
    expected = seeds / count
    chi = ((at - expected) ** 2 / expected).sum()
    free = (count - 1) ** 2
    assert abs(chi - free) < 5 * np.sqrt(2 * free)
    off = ~np.eye(count, dtype=bool)
    expected = seeds * (count - 1) / off.sum()
    chi, free = ((follows[off] - expected) ** 2 / expected).sum(), off.sum() - 2 * count
    assert abs(chi - free) < 6 * np.sqrt(2 * free)


def _parts(work: Any) -> Any:
    return module.SourceRows(work.source, work.table, work.records).parts(work.capacity)


_KILLED = """
import os, signal, sys
from pathlib import Path
from spile.objects import LocalObjects
from spile.objects.local import LocalObjects as Local
from spile.dataset.maintain import shuffle as module

left = int(sys.argv[3])
def counted(real):
    def call(self, key, *more):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, key, *more)
    return call

for name in ("create", "stream", "delete"):
    setattr(Local, name, counted(getattr(Local, name)))
module.shuffle(LocalObjects(Path(sys.argv[1])), LocalObjects(Path(sys.argv[2])), memory=6000)
"""


@pytest.mark.full  # tests/chaos/test_faults.py kills it at system calls
def test_the_same_command_continues_after_kills_anywhere(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED)
    dest, kills = LocalObjects(tmp_path / "dest"), 0
    command = [sys.executable, "-c", _KILLED, str(made.path), str(dest.root)]
    for after in (12, 40, 70, 1_000_000):
        ended = zygote.run([*command, str(after)], env=tiny.environment())
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
        kills += 1
        if Ledger(dest).read_table() is None:
            with pytest.raises(StoreError, match="no dataset there"):
                open_dataset(dest.url, partial=True)
        if any(fmt.DONE in key for key in dest.list()):
            with pytest.raises(ConfigError, match="another --seed or --memory"):
                shuffle(made.objects, dest, memory=6000, seed=1)
    assert kills >= 2
    assert shuffle(made.objects, dest, memory=6000).units == 5
    collect_garbage(dest)
    found = check_shuffled(made.objects, dest)
    straight = LocalObjects(tmp_path / "straight")
    shuffle(made.objects, straight, memory=6000)
    assert np.array_equal(check_shuffled(made.objects, straight), found)


@pytest.mark.full  # compact copies by the same means, in test_compact.py
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_disk_is_shuffled_into_a_bucket_and_back(kind: str, tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED)
    new_store = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}[kind]
    bucket, dest = open_objects(new_store()), LocalObjects(tmp_path / "dest")
    shuffle(made.objects, bucket)
    check_shuffled(made.objects, bucket)
    shuffle(bucket, dest, seed=1, scratch=str(tmp_path / "scratch"))
    check_shuffled(made.objects, dest)
    assert not list((tmp_path / "scratch").rglob("*.*"))


def test_documents_are_found_though_they_lie_everywhere(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SHAPED)
    shuffle(made.objects, LocalObjects(tmp_path / "dest"), memory=6000)
    here, there = open_dataset(str(made.path)), open_dataset(str(tmp_path / "dest"))
    for doc in range(11):
        assert here.about(doc)["tokens"] == there.about(doc)["tokens"]
        assert here.has_document(doc) is there.has_document(doc)
        if not here.has_document(doc):
            continue
        one, other = here.document(doc), there.document(doc)
        assert one.index.tobytes() == other.index.tobytes()
        for tap in here.taps:
            assert one.read(tap).tobytes() == other.read(tap).tobytes()
    assert there.documents(["first_row"])["first_row"].null_count == 11


def test_a_state_of_batches_is_not_taken_for_that_of_another_order(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    shuffle(made.objects, LocalObjects(tmp_path / "dest"))
    state = open_dataset(str(made.path)).batches([], 10).state_dict()
    with pytest.raises(ConfigError, match="of another iteration"):
        open_dataset(str(tmp_path / "dest")).batches([], 10).load_state_dict(state)


def test_it_can_be_compacted_and_shuffled_again(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED)
    dest, few, again = (LocalObjects(tmp_path / name) for name in ("dest", "few", "again"))
    shuffle(made.objects, dest, memory=6000)
    assert compact(dest, few).units == 1
    check_shuffled(made.objects, few)
    shuffle(few, again, seed=1)
    check_shuffled(made.objects, again)


def test_rows_that_are_exchanged_are_noticed(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    dest = LocalObjects(tmp_path / "dest")
    shuffle(made.objects, dest)
    (dest.root / fmt.MANIFEST).unlink()
    table = Ledger(dest).table()
    told = {**(table.shuffled or {}), "entries": "0" * 16}
    stored.replace_table(dest, replace(table, shuffled=told))
    assert any("not those that were shuffled" in fault for fault in verify(dest).faults)


def test_damage_of_the_source_or_between_passes_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out", shard_bytes=400)
    shard = made.path / made.done(1).shards[0].key
    dest = LocalObjects(tmp_path / "dest")
    stored.flip(shard, shard.stat().st_size - 1)
    with pytest.raises(CorruptError, match="checksum"):
        shuffle(made.objects, dest, memory=6000)
    stored.flip(shard, shard.stat().st_size - 1)
    gathered = module._Shuffle._gathered

    def damaged(self: Any, *arguments: Any) -> Any:
        run = next(p for p in (dest.root / "scratch").rglob("resid_post.0.00000.*"))
        stored.flip(run, run.stat().st_size - 1)
        return gathered(self, *arguments)

    monkeypatch.setattr(module._Shuffle, "_gathered", damaged)
    with pytest.raises(CorruptError, match="its rows differ from those that were read"):
        shuffle(made.objects, dest, memory=6000)
    with pytest.raises(StoreError, match="no dataset there"):
        open_dataset(dest.url)


@pytest.mark.full
def test_memory_is_what_was_asked_for(tmp_path: Path) -> None:
    taps = {"resid_post.0": 4096, "mlp_out.1": 4096}
    made = stored.build(tmp_path / "out", ((900,), (900,)), taps=taps, shard_bytes=1 << 20)
    whole = sum(rows.nbytes for rows in made.rows.values())
    made.rows.clear()
    tracemalloc.start()
    try:
        shuffle(made.objects, LocalObjects(tmp_path / "dest"), memory=6 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert whole > 50 << 20
    assert peak < 24 << 20, "six, and what is in hand between reading and writing"


def test_places_that_are_taken_are_refused(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    other = stored.copied(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="holds another dataset"):
        shuffle(made.objects, other.objects)
    with pytest.raises(ConfigError, match="must not contain one another"):
        shuffle(made.objects, LocalObjects(made.path / "inside"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="belongs to no dataset"):
        shuffle(made.objects, LocalObjects(tmp_path / "home"))
    assert os.listdir(tmp_path / "home") == ["letter.txt"]


class Overtaken(LocalObjects):
    """A place where another dataset is begun while the first listing runs."""

    def list(self, prefix: str = "") -> Iterator[str]:
        found = [*super().list(prefix)]
        if not (self.root / fmt.UNITS).exists():
            stored.build(self.root, ((5,),), seed=1, commit=[])
        return iter(found)


def test_a_dataset_that_appears_meanwhile_is_not_taken_for_the_result(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    with pytest.raises(ConfigError, match="holds another dataset"):
        shuffle(made.objects, Overtaken(tmp_path / "dest"))


def test_rows_between_passes_that_vanish_are_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a copy to the same place ends first: it clears up, and so does `gc`."""
    get_range = MemoryObjects.get_range

    def cleared(self: MemoryObjects, key: str, start: int, stop: int) -> bytes:
        if "/scratch/" in self.url and start:  # (its header was read before)
            self.delete(key)
        return get_range(self, key, start, stop)

    monkeypatch.setattr(MemoryObjects, "get_range", cleared)
    made = stored.copied(tmp_path / "out")
    with pytest.raises(StoreError, match=r"its files vanished .* choose another place"):
        shuffle(made.objects, open_objects("memory://cleared"))


def test_the_command_shuffles_and_other_verbs_work_on_the_result(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    out, dest = str(tmp_path / "out"), str(tmp_path / "dest")
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1", seq_len=32, unit_tokens=1500
    )
    spile.extract(recipe, out)
    said = run("shuffle", out, dest, "--seed", "5", "--memory", "64KiB", "--json")
    assert said.code == 0, said.err
    made = Shuffled(**said.json)
    check_shuffled(open_objects(out), open_objects(dest))
    assert "every row of the source once" in run("shuffle", out, dest, "--seed", "5",
                                                 "--memory", "64KiB").out  # fmt: skip
    assert run("export", dest, "--to", "npy", tmp_path / "npy").code == 0
    collected = run("gc", dest)
    assert (collected.out, collected.err) == ("0 orphans removed\n", "")
    assert spile.extract(spile.Recipe(), dest).rows == made.rows, "it is complete"
    for lost in (fmt.MANIFEST, fmt.CURRENT.segment_key(0), fmt.CURRENT.done_key(0)):
        (Path(dest) / lost).unlink()
    with pytest.raises(StoreError, match="rows of a shuffled dataset are missing; shuffle again"):
        spile.extract(spile.Recipe(), dest)
    wrong = run("shuffle", out, tmp_path / "x", "--memory", "much")
    assert (wrong.code, "--memory must be a number" in wrong.err) == (2, True)

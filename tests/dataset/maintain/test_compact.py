"""Compaction: other files on the disk, and the same rows for every reader."""

import os
import signal
import sys
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import run
from spile.core.errors import ConfigError, CorruptError, SpileError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain import compact as module
from spile.dataset.maintain import copy as checked
from spile.dataset.maintain.compact import Compacted, compact
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import verify
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects, Objects, open_objects
from support import servers, stored, tiny, zygote
from support.marks import some

# Columns of a document without its place in its unit, which `verify` compares with the index.
TOLD = ("doc", "tokens", "rows", "skipped", "preview")
COUNTS = ("fingerprint", "rows", "tokens", "documents", "skipped")


def manifest(objects: Objects) -> dict[str, Any]:
    found = Ledger(objects).derived.read_manifest(fmt.CURRENT)
    assert found
    return {"fingerprint": found.fingerprint, **vars(found.totals)}


def check_same(one: Dataset, other: Dataset) -> None:
    """Check that readers get the same rows, bit for bit."""
    assert (one.recipe, one.fingerprint, one.taps) == (other.recipe, other.fingerprint, other.taps)
    assert one.num_documents == other.num_documents
    rows = one.num_tokens
    assert rows == other.num_tokens
    assert one.index(0, rows).tobytes() == other.index(0, rows).tobytes()
    assert one.documents(TOLD).equals(other.documents(TOLD))
    for tap in one.taps:
        first, second = (np.asarray(ds.read(tap, 0, rows)) for ds in (one, other))
        assert (first.dtype, first.shape) == (second.dtype, second.shape)
        assert first.tobytes() == second.tobytes()
        before, after = one.statistics(tap), other.statistics(tap)
        for name in ("count", "nonfinite", "clipped", "max_abs"):
            assert getattr(before, name) == getattr(after, name)
        for name in ("mean", "m2", "norm_sum"):  # float64 sums, in another grouping
            assert np.allclose(getattr(before, name), getattr(after, name), rtol=1e-12, atol=1e-12)


def check_compacted(source: Objects, dest: Objects) -> None:
    report = verify(dest)
    assert report.faults == []
    assert report.orphans == []
    check_same(open_dataset(source.url), open_dataset(dest.url))
    before, after = manifest(source), manifest(dest)
    assert {name: before[name] for name in COUNTS} == {name: after[name] for name in COUNTS}


def attempts(objects: Objects) -> dict[int, str]:
    ledger = Ledger(objects)
    records = [ledger.read_done(unit) for unit in sorted(ledger.done_units())]
    return {done.unit: done.attempt for done in records if done}


@pytest.mark.parametrize(
    ("kind", "was_compressed", "compress"),
    some(
        product(["TAPS", "SHAPED", "SCALED"], [False, True], [False, True]),
        ("TAPS", False, True), ("SHAPED", True, False), ("SCALED", True, True),
    ),
)  # fmt: skip
def test_units_become_one_with_the_same_rows(
    kind: str, was_compressed: bool, compress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "WINDOW_BYTES", 100)
    made = stored.copied(tmp_path / "out", taps=getattr(stored, kind), compress=was_compressed)
    dest = LocalObjects(tmp_path / "dest")
    result = compact(made.objects, dest, compress=compress)
    check_compacted(made.objects, dest)
    taps = len(made.table.taps)
    assert (result.units, result.units_before) == (1, 5)
    assert result.shards == taps < result.shards_before
    assert result.rows == 111
    shards = [key for key in dest.list(fmt.ATTEMPTS) if ".00000." in key]
    assert len(shards) == taps
    assert all(key.endswith(fmt.COMPRESSED) is compress for key in shards)


@pytest.mark.parametrize("dtype", some(stored.DTYPE_NAMES, "bfloat16"))
def test_filtered_rows_stay_filtered(dtype: str, tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", dtype=dtype, every=3)
    compact(made.objects, LocalObjects(tmp_path / "dest"))
    check_compacted(made.objects, LocalObjects(tmp_path / "dest"))


def test_units_are_cut_at_the_size_asked_for_and_shards_too(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    sizes = [sum(file.bytes for file in made.done(unit).files()) for unit in range(5)]
    dest = LocalObjects(tmp_path / "dest")
    result = compact(made.objects, dest, unit_bytes=sizes[0] + sizes[1], shard_bytes=240)
    check_compacted(made.objects, dest)
    ledger = Ledger(dest)
    table = ledger.table()
    groups = [ledger.read_done(unit.id) for unit in table.units]
    origins = [done.made_by["compacted"]["units"] for done in groups if done]
    assert [origin[0] for origin in origins] == [0, *(last + 1 for _, last in origins[:-1])]
    assert origins[-1][1] == 4
    assert 1 < result.units < 5
    for first, last in origins:
        assert sum(sizes[first : last + 1]) <= sizes[0] + sizes[1]
    for done in filter(None, groups):
        assert {s.count for s in done.shards if s.tap == "resid_post.0"} <= {*range(1, 11)}
    assert sum(unit.tokens for unit in table.units) == sum(unit.tokens for unit in made.table.units)


def test_a_unit_of_the_source_is_never_cut(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    result = compact(made.objects, LocalObjects(tmp_path / "dest"), unit_bytes=1)
    assert result.units == 5
    check_compacted(made.objects, LocalObjects(tmp_path / "dest"))


def test_the_index_of_a_merged_unit_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out")
    monkeypatch.setattr(module, "_INDEX_BYTES", 75 * made.index.itemsize)
    assert compact(made.objects, LocalObjects(tmp_path / "dest")).units == 2


def test_the_documents_of_a_merged_unit_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out", keep=("id",))
    sizes = [made.done(unit).documents_table.bytes for unit in range(5)]
    monkeypatch.setattr(module, "_DOCUMENTS_BYTES", sum(sizes) - 1)
    assert compact(made.objects, LocalObjects(tmp_path / "dest")).units == 2
    check_compacted(made.objects, LocalObjects(tmp_path / "dest"))
    dataset = open_dataset(str(tmp_path / "dest"))
    assert dataset.documents(["id"])["id"].to_pylist() == [f"id-{doc}" for doc in range(11)]


def test_a_record_says_what_it_was_compacted_from_and_who_made_the_rows(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", commit=())
    for unit in range(5):
        device = {"device": "a" if unit < 3 else "b"}
        when = {"finished_at": 1e9 + unit, "seconds": 0.5 * unit}
        made.ledger.commit(made.attempt(unit, made_by={**device, **when}))
    made.ledger.complete(made.table)
    compact(made.objects, LocalObjects(tmp_path / "dest"))
    done = Ledger(LocalObjects(tmp_path / "dest")).read_done(0)
    assert done
    assert done.made_by["compacted"]["units"] == [0, 4]
    assert done.made_by["rows_by"] == [{"device": "a"}, {"device": "b"}]


def test_memory_is_a_window_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taps = {"resid_post.0": 4096, "mlp_out.1": 4096}
    compact(stored.copied(tmp_path / "few").objects, LocalObjects(tmp_path / "imported"))
    made = stored.build(tmp_path / "out", ((600,), (600,)), taps=taps, shard_bytes=1 << 22)
    whole = sum(rows.nbytes for rows in made.rows.values())
    made.rows.clear()
    monkeypatch.setattr(checked, "WINDOW_BYTES", 1 << 18)
    tracemalloc.start()
    try:
        result = compact(made.objects, LocalObjects(tmp_path / "dest"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.units == 1
    assert whole > 36 << 20
    assert peak < 4 << 20


_KILLED = """
import os, signal, sys
from pathlib import Path
from spile.objects import LocalObjects
from spile.dataset.maintain.compact import compact
from spile.dataset.records.ledger import Ledger

commit = Ledger.commit
def last(self, done):
    if done.unit == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(self, done)

Ledger.commit = last
compact(LocalObjects(Path(sys.argv[1])), LocalObjects(Path(sys.argv[2])), unit_bytes=1)
"""


@pytest.mark.full  # tests/chaos/test_faults.py kills it at system calls
def test_the_same_command_continues_after_a_kill(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED)
    dest = LocalObjects(tmp_path / "dest")
    arguments = [sys.executable, "-c", _KILLED, str(made.path), str(dest.root)]
    killed = zygote.run(arguments, env=tiny.environment())
    assert killed.returncode == -signal.SIGKILL
    before = attempts(dest)
    assert sorted(before) == [0, 1]
    with pytest.raises(StoreError, match="no dataset there"):
        open_dataset(dest.url, partial=True)
    with pytest.raises(ConfigError, match="another --unit-bytes"):
        compact(made.objects, dest)
    with pytest.raises(ConfigError, match="holds another dataset"):
        other = stored.build(tmp_path / "other", taps=stored.SCALED)  # (the same but for its ids)
        compact(other.objects, dest, unit_bytes=1)
    assert compact(made.objects, dest, unit_bytes=1).units == 5
    assert before.items() <= attempts(dest).items()
    report = verify(dest)
    assert report.ok
    assert {key.split("/")[2] for key in report.orphans} == {"00000002"}
    assert sorted(collect_garbage(dest)) == report.orphans
    check_compacted(made.objects, dest)


def test_what_is_finished_is_left_as_it_is(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    dest = LocalObjects(tmp_path / "dest")
    first = compact(made.objects, dest)
    files = {path: path.stat().st_mtime_ns for path in dest.root.rglob("*")}
    assert compact(made.objects, dest) == first
    assert {path: path.stat().st_mtime_ns for path in dest.root.rglob("*")} == files


def test_a_compacted_dataset_can_be_compacted(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SHAPED)
    between, dest = LocalObjects(tmp_path / "between"), LocalObjects(tmp_path / "dest")
    compact(made.objects, between, unit_bytes=1, compress=True)
    assert compact(between, dest).units == 1
    check_compacted(made.objects, dest)


def refused(source: Objects, dest: Objects, error: type[SpileError], match: str) -> None:
    before = sorted(dest.list())
    with pytest.raises(error, match=match):
        compact(source, dest)
    assert sorted(dest.list()) == before


def test_an_unfinished_source_is_refused(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", commit=(0, 1, 3))
    dest = LocalObjects(tmp_path / "dest")
    refused(made.objects, dest, StoreError, "3 of 5 units are done; finish with the same")
    assert not dest.root.exists()
    refused(LocalObjects(tmp_path / "none"), dest, StoreError, "no dataset there")


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    other = stored.copied(tmp_path / "other", seed=1)
    begun = stored.copied(tmp_path / "begun", commit=(0,))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    refused(made.objects, other.objects, ConfigError, "holds another dataset")
    refused(made.objects, begun.objects, ConfigError, "holds another dataset")
    home = LocalObjects(tmp_path / "home")
    refused(made.objects, home, ConfigError, "holds letter.txt, which belongs to no dataset")


def test_a_place_inside_the_source_or_around_it_is_refused(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    (tmp_path / "link").symlink_to(made.path)
    for place in ("out", "out/compact", "link/compact", "."):
        dest = LocalObjects(tmp_path / place)
        refused(made.objects, dest, ConfigError, "must not contain one another")
    compact(made.objects, LocalObjects(tmp_path / "out-compact"))


def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out")
    monkeypatch.setattr(LocalObjects, "free_bytes", lambda self: 1000)
    dest = LocalObjects(tmp_path / "dest")
    refused(made.objects, dest, ConfigError, r"GB would be written, but only 0.00 GB are free")


def damages(made: stored.Stored, every: int) -> dict[str, list[int]]:
    """Places to damage: the ends and the middle of every kind of file, or some of them in turn."""
    done = made.done(1)
    chosen = [next(s for s in done.shards if s.tap == tap) for tap in made.table.taps]
    files = {file.key: file.bytes for file in (*chosen, *done.files()[-3:])}
    for key in (fmt.UNITS, fmt.MODEL, fmt.MANIFEST, fmt.CURRENT.done_key(1), fmt.SCALES):
        if (made.path / key).exists():
            files[key] = (made.path / key).stat().st_size
    return {
        key: [0, 900, size // 2, size - 1][number % every :: every]
        for number, (key, size) in enumerate(files.items())
    }


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.varied
def test_damage_is_not_copied(compress: bool, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    every = 1 if pytestconfig.getoption("--chaos-full") else 2
    made = stored.copied(tmp_path / "out", taps=stored.SCALED, compress=compress, shard_bytes=400)
    tried = 0
    for key, positions in damages(made, every).items():
        for position in positions:
            if position >= (made.path / key).stat().st_size:
                continue
            dest = LocalObjects(tmp_path / f"dest-{tried}")
            stored.flip(made.path / key, position)
            with pytest.raises(StoreError):
                compact(made.objects, dest)
            stored.flip(made.path / key, position)
            assert not list(dest.list(fmt.DONE))
            assert not list(dest.list(fmt.ATTEMPTS)), "what came from it is removed"
            tried += 1
    assert tried > 30 // every
    compact(made.objects, LocalObjects(tmp_path / "dest"))


def test_a_file_that_is_missing_cut_or_exchanged_is_not_copied(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", shard_bytes=240)
    first, second = (s.key for s in made.done(1).shards[:2])
    for action, match in (
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 200), "has 200 bytes"),
        (lambda path: path.write_bytes((made.path / second).read_bytes()), "checksum"),
    ):
        with stored.changed(made, first) as paths:
            action(paths[first])
            with pytest.raises(CorruptError, match=match):
                compact(made.objects, LocalObjects(tmp_path / "dest"))


def test_records_that_disagree_are_not_copied(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    key = fmt.CURRENT.done_key(1)
    (made.path / key).unlink()
    made.ledger.commit(made.attempt(1))  # the manifest still names the first attempt
    with pytest.raises(CorruptError, match="does not follow from the done records"):
        compact(made.objects, LocalObjects(tmp_path / "dest"))


@pytest.mark.full
@pytest.mark.parametrize("kind", some(["s3", "gs"], "s3"))
def test_a_disk_is_compacted_into_a_bucket_and_back(kind: str, tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED)
    new_store = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}[kind]
    bucket, dest = open_objects(new_store()), LocalObjects(tmp_path / "dest")
    compact(made.objects, bucket, unit_bytes=1)
    check_compacted(made.objects, bucket)
    assert compact(bucket, dest).units == 1
    check_compacted(made.objects, dest)
    with pytest.raises(ConfigError, match="must not contain one another"):
        compact(bucket, open_objects(f"{bucket.url}/inside"))


def test_the_command_compacts_and_every_verb_works_on_the_result(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    out, dest = str(tmp_path / "out"), str(tmp_path / "dest")
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1", seq_len=32, unit_tokens=200
    )
    outcome = spile.extract(recipe, out)
    said = run("compact", out, dest, "--shard-bytes", "1MiB", "--json")
    assert said.code == 0, said.err
    assert Compacted(**said.json).units_before == outcome.units > 1
    check_compacted(open_objects(out), open_objects(dest))
    units = Ledger(open_objects(out)).table().units
    (merged,) = Ledger(open_objects(dest)).table().units
    assert [*merged.spans] == [span for unit in units for span in unit.spans]
    status = run("status", dest, "--json").json
    assert (status["state"], status["units"]) == ("complete", 1)
    assert status["tokens_estimated"] == run("status", out, "--json").json["tokens_estimated"]
    assert run("gc", dest).out == "0 orphans removed\n"
    assert run("export", dest, "--to", "npy", tmp_path / "npy").code == 0
    checked = run("check", dest, "--samples", "2", "--json")
    assert checked.code == 0, checked.err
    assert spile.extract(spile.Recipe(), dest).units == 1, "it is complete"
    here, there = spile.open(out), spile.open(dest)
    assert here.document(17).index.tobytes() == there.document(17).index.tobytes()
    again = run("compact", out, dest)
    assert again.code == 0
    assert f"in 1 unit (of {outcome.units})" in again.out
    small = run("compact", out, tmp_path / "x", "--shard-bytes", "1")
    assert (small.code, small.err) == (2, "spile: --shard-bytes must be at least 4096, got 1\n")

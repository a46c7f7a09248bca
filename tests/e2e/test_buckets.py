"""A dataset in a bucket equals the one on a disk."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import check_refused, run
from spile.core.errors import ConfigError
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import Journal, verify
from spile.dataset.records.ledger import Ledger
from spile.objects import open_objects
from spile.objects.bucket import BucketObjects
from support import servers, tiny
from support.marks import some

TAPS = "embed,resid_post:1"


STORES = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}


class Counted:
    """A store that passes requests on, and records what was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: Counter[str] = Counter()  # bytes by key
        for name in ("get", "get_range"):
            real = getattr(BucketObjects, name)

            def counting(objects: BucketObjects, key: str, *span: int, real: Any = real) -> bytes:
                data = real(objects, key, *span)
                self.read[key] += len(data)
                return data

            monkeypatch.setattr(BucketObjects, name, counting)

    def shards(self) -> int:
        return sum(size for key, size in self.read.items() if key.startswith("attempts/"))


@pytest.fixture(scope="module")
def extracted(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, spile.Recipe]]:
    corpus = tiny.write_corpus(tmp_path_factory.mktemp("texts") / "c.jsonl", 100, seed=2)
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps=TAPS, seq_len=64, unit_tokens=1000
    )
    made = {kind: (new(), recipe) for kind, new in STORES.items()}
    for out, _ in made.values():
        spile.extract(recipe, out, spile.Runtime(shard_bytes=1 << 15))
    return made


def test_what_is_extracted_into_a_bucket_is_what_a_disk_would_hold(
    extracted: Any, tmp_path: Path
) -> None:
    recipe, memory = extracted["s3"][1], f"memory://{tmp_path.name}"
    outcome = spile.extract(recipe, str(tmp_path / "disk"))
    spile.extract(recipe, memory, spile.Runtime(shard_bytes=4096))
    here, rows = spile.open(str(tmp_path / "disk")), outcome.rows
    for out in (extracted["s3"][0], extracted["gs"][0], memory):
        assert verify(open_objects(out)).ok
        there = spile.open(out)
        assert there.num_tokens == here.num_tokens == rows > 100
        assert there.index(0, rows).tobytes() == here.index(0, rows).tobytes()
        for tap in here.taps:
            one, other = (ds.read(tap, 0, rows) for ds in (there, here))
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        again = spile.extract(spile.Recipe(), out)
        assert again.units == outcome.units, "it is complete"


@pytest.mark.parametrize("kind", STORES)
def test_reading_some_rows_fetches_those_rows(
    kind: str, extracted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = spile.open(extracted[kind][0])
    row = dataset.width("embed") * 2
    counted = Counted(monkeypatch)
    rows = dataset.read("embed", 700, 720)
    assert rows.shape == (20, dataset.width("embed"))
    assert counted.shards() <= 20 * row + (1 << 16), "its header beside"
    counted.read.clear()
    dataset.read("embed", 705, 725)
    assert counted.shards() == 20 * row, "the header is known"
    counted.read.clear()
    dataset.index(0, 50)
    assert counted.shards() < 50 * 32 + 5 * (1 << 16)


@pytest.mark.parametrize("kind", STORES)
def test_an_audit_fetches_every_byte_once_and_a_quick_one_none(
    kind: str, extracted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_objects(extracted[kind][0])
    total = sum(entry.size for entry in objects.entries("attempts/"))
    counted = Counted(monkeypatch)
    report = verify(objects)
    assert report.ok and report.bytes == total
    assert counted.shards() == total
    counted.read.clear()
    report = verify(objects, quick=True)
    assert report.ok and report.quick and report.bytes == total
    assert counted.shards() == 0


@pytest.mark.parametrize("kind", STORES)
def test_a_quick_audit_names_what_is_not_the_object_that_was_written(
    kind: str, extracted: Any
) -> None:
    objects = open_objects(extracted[kind][0])
    keys = [key for key in sorted(objects.list("attempts/")) if "resid_post" in key][:3]
    data = [objects.get(key) for key in keys]
    try:
        for key in keys:
            objects.delete(key)
        objects.replace(keys[1], data[1][:-1])
        objects.replace(keys[2], data[2][:-1] + b"?")
        faults = verify(objects, quick=True).faults
        named = dict(zip(keys, ("is missing", "bytes", "not the object"), strict=True))
        for key, said in named.items():
            assert [said in fault for fault in faults if key in fault] == [True], faults
        assert len(faults) == 3
    finally:
        for key, whole in zip(keys, data, strict=True):
            objects.replace(key, whole)
    assert verify(objects, quick=True).ok


@pytest.mark.full
def test_an_interrupted_audit_goes_on_where_it_stood(
    extracted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILE_CACHE", str(tmp_path))
    out, _ = extracted["s3"]
    objects = open_objects(out)

    def interrupt(done: int, total: int) -> None:
        assert total > 4
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(objects, journal=Journal(out, resume=False), progress=interrupt)
    first = Ledger(objects).read_done(0)
    assert first
    # (A segment of the index is derived from the statistics of all its units.)
    keys = {file.key for file in first.files()} - {first.statistics.key}
    counted = Counted(monkeypatch)
    result = run("verify", out, "--resume")
    assert "3 units of them by the earlier audit" in result.out, result.out
    with pytest.raises(KeyboardInterrupt):
        verify(objects, journal=Journal(out, resume=False), progress=interrupt)
    counted.read.clear()
    report = verify(objects, journal=Journal(out, resume=True))
    assert report.ok and report.resumed == 3
    assert not keys & {*counted.read}, "the first unit was found sound before"
    assert list((tmp_path / "verify").iterdir()) == [], "it came to its end"
    assert verify(objects, journal=Journal(out, resume=True)).resumed == 0


def test_a_faulty_unit_is_looked_at_again_by_the_audit_that_goes_on(
    extracted: Any, tmp_path: Path
) -> None:
    out, _ = extracted["gs"]
    objects = open_objects(out)
    done = Ledger(objects).read_done(0)
    assert done
    key, data = done.shards[0].key, objects.get(done.shards[0].key)

    def interrupt(number: int, total: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    try:
        objects.replace(key, data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(KeyboardInterrupt):
            verify(objects, journal=Journal(out, tmp_path, resume=False), progress=interrupt)
        report = verify(objects, journal=Journal(out, tmp_path, resume=True))
        assert [key in fault for fault in report.faults] == [True] and report.resumed == 1
    finally:
        objects.replace(key, data)


@pytest.mark.parametrize("kind", some([*STORES, "disk"]))
def test_a_run_ends_before_the_dataset_is_larger_than_allowed(
    kind: str, extracted: Any, tmp_path: Path
) -> None:
    reference, recipe = extracted["gs"]
    whole = sum(entry.size for entry in open_objects(reference).entries("attempts/"))
    out = STORES[kind]() if kind in STORES else str(tmp_path / "out")
    limit = whole // 2
    outcome = spile.extract(recipe, out, spile.Runtime(max_bytes=limit))
    stored = sum(entry.size for entry in open_objects(out).entries("attempts/"))
    assert not outcome.complete and 1 < outcome.units < outcome.units_total
    assert 0.6 * limit < stored == outcome.bytes <= limit
    assert verify(open_objects(out), partial=True).ok
    assert spile.open(out, partial=True).num_tokens == outcome.rows
    again = spile.extract(recipe, out, spile.Runtime(max_bytes=limit))
    assert again.units == outcome.units, "nothing more fits"
    assert spile.extract(recipe, out).complete
    one, other = (spile.open(o).read("embed", 0, 10**9) for o in (out, reference))
    assert one.tobytes() == other.tobytes()


def test_a_limit_below_one_unit_is_refused(extracted: Any, tmp_path: Path) -> None:
    _, recipe = extracted["gs"]
    with pytest.raises(ConfigError, match="--max-bytes 1000: no unit"):
        spile.extract(recipe, str(tmp_path / "out"), spile.Runtime(max_bytes=1000))


def test_a_run_that_its_limit_ended_says_so_and_succeeds(extracted: Any, tmp_path: Path) -> None:
    _, recipe = extracted["gs"]
    result = run(
        "extract", "--model", recipe.model, "--corpus", recipe.corpus, "--taps", "embed",
        "--seq-len", 64, "--unit-tokens", 1000, "--out", tmp_path / "out", "--max-bytes", "300kB",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "--max-bytes ended it after" in result.out and "partial=True" in result.out


def test_a_plan_prices_what_a_bucket_keeps(extracted: Any) -> None:
    _, recipe = extracted["s3"]
    flags = ["--model", recipe.model, "--corpus", recipe.corpus, "--taps", TAPS]
    for kind, price in (("s3", 0.023), ("gs", 0.020)):
        out = STORES[kind]()
        plan = run("plan", "--calibrate", "off", *flags, "--out", out, "--json")
        assert plan.code == 0, plan.err
        cost = plan.json
        assert cost["monthly_dollars"] == pytest.approx(price * cost["total_bytes"] / 2**30)
        assert "http" in cost["priced_as"]
        asked = cost["requests"]
        assert asked["lists"] == 4 * cost["units"] and asked["reads"] == 2 * cost["units"]
        writes = asked["creates"] + asked["lists"]
        dollars = (0.005 * writes + 0.0004 * asked["reads"]) / 1000
        assert cost["request_dollars"] == pytest.approx(dollars)
        assert cost["host_bytes"] > 16 * (64 << 20), "what waits to be uploaded"
        assert list(open_objects(out).list()) == [], "nothing is left there"
    spool = ["--out", out, "--spool", "/nowhere", "--json"]
    spooled = run("plan", "--calibrate", "off", *flags, *spool)
    assert spooled.json["host_bytes"] < 16 * (64 << 20)
    told = run("plan", "--calibrate", "off", *flags, "--out", out, "--prices", "1,2,3").out
    assert "a month" in told and "--prices (1,2,3)" in told
    assert "to write it" in told and "$0.7200 an hour for each worker's heartbeats" in told
    elsewhere = run("plan", "--calibrate", "off", *flags, "--out", "memory://x", "--json")
    assert elsewhere.json["monthly_dollars"] is None


@pytest.mark.parametrize("verb", ["plan", "extract"])
def test_a_server_that_ignores_preconditions_is_refused(verb: str, extracted: Any) -> None:
    _, recipe = extracted["gs"]
    flags = ["--model", recipe.model, "--corpus", recipe.corpus, "--taps", TAPS]
    with servers.faulty_gcs("careless") as out:
        check_refused(run(verb, *flags, "--out", out), 3, out, "preconditions")
        assert list(open_objects(out).list()) == []


def test_a_bucket_that_takes_nothing_ends_the_run_at_once(extracted: Any) -> None:
    _, recipe = extracted["gs"]
    flags = ["--model", recipe.model, "--corpus", recipe.corpus, "--taps", TAPS]
    with servers.faulty_gcs("closed") as out:
        check_refused(run("extract", *flags, "--out", out), 3, out, "credentials")


@pytest.mark.parametrize("kind", STORES)
def test_what_no_unit_needs_is_removed_from_a_bucket(kind: str, extracted: Any) -> None:
    objects = open_objects(extracted[kind][0])
    before = sorted(objects.list())
    for number in range(40):
        objects.replace(f"attempts/000000/00000001/loser/embed.{number:05d}.safetensors", b"rows")
    objects.replace("probes/left", b"")
    assert len(verify(objects, quick=True).orphans) == 41
    seen: list[tuple[int, int]] = []
    removed = collect_garbage(objects, progress=lambda done, all: seen.append((done, all)))
    assert len(removed) == 41 and seen[-1] == (41, 41)  # probes too, as the dataset is whole
    assert sorted(objects.list()) == before

"""Records that a stranger made: unit table, done records, manifest, scales, heartbeats.

Either one is refused by an error of ours, or all it says is within bounds.
"""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from security.hostile import (
    DEEP,
    JSON,
    NUMBERS,
    body_of,
    changed,
    damaged,
    fuzz,
    only_our_errors,
    refused,
    sealed,
)  # fmt: skip
from spile.core.errors import CorruptError
from spile.dataset import format as fmt
from spile.dataset.codec.columns import column_file, columns_in, encode_columns
from spile.dataset.codec.quantization import scales_from_json, scales_to_json
from spile.dataset.codec.statistics import TapStats, merged
from spile.dataset.format import Done, TapInfo, decode_record, encode_record
from spile.dataset.records.heartbeat import Presence, read_workers
from spile.dataset.records.ledger import Ledger
from spile.objects import MemoryObjects
from spile.status.status import read_status
from support import stored
from support.stored import Stored

KINDS = {
    fmt.UNITS: "units",
    fmt.CURRENT.done_key(0): "done",
    fmt.MANIFEST: "manifest",
    fmt.SCALES: "scales",
    fmt.MODEL: "model",
    "workers/host-1-ab.json": "worker",
}
BEAT = {
    "state": "running", "units": [0, 1], "counter": 3, "host": "host", "boot": "b", "pid": 1,
    "started": 5, "tokens": 7, "error": "gone", "world": {"coordinator": "h:1", "process": 1},
}  # fmt: skip
PREFIX = fmt.CURRENT.attempt_prefix(0, "a1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A finished dataset with scales of rows and of channels, and a worker."""
    made = stored.build(tmp_path_factory.mktemp("h") / "d", ((3, 2), (4,)), taps=stored.SCALED)
    made.objects.create("workers/host-1-ab.json", encode_record("worker", BEAT))
    return made


def with_record(made: Stored, key: str, record: bytes) -> MemoryObjects:
    """A dataset's records, one of them replaced."""
    objects = MemoryObjects("memory://records")
    for prefix in fmt.DERIVED:
        for each in made.objects.list(prefix):
            objects.create(each, made.objects.get(each))
    for each in KINDS:
        objects.create(each, record if each == key else made.objects.get(each))
    return objects


def use(objects: MemoryObjects) -> None:
    """Run everything that reads records."""
    ledger = Ledger(objects)
    with only_our_errors():
        table = ledger.table()
        assert all(0 < info.width < 1 << 56 for info in table.taps.values())
        assert all(info.row_bytes for info in table.taps.values())
        assert len(table.recipe.fingerprint()) == 64
        with only_our_errors():
            for tap, scale in (ledger.read_scales(table) or {}).items():
                assert scale.shape == table.taps[tap].shape
                assert (scale > 0).all()
    with only_our_errors():
        done = ledger.read_done(0)
        for file in done.files() if done else ():
            assert file.key.startswith(fmt.CURRENT.attempt_prefix(0, done.attempt) if done else "")
            assert file.key.count("/") == 4
            assert 0 <= file.first <= file.first + file.count < 1 << 57
    with only_our_errors():
        manifest = ledger.derived.read_manifest(ledger.layout)
        if manifest:
            for done in ledger.derived.catalog(ledger.table(), manifest):
                assert done.rows < 1 << 56
    with only_our_errors():
        ledger.check_weights({"embed": "aa", "blocks": "bb"})
    with only_our_errors():
        status = read_status(objects)
        assert all(str(worker["state"]).isprintable() for worker in status.workers)
        json.dumps(status.to_json(), allow_nan=False)
    with only_our_errors():
        assert all(unit >= 0 for unit in Presence(objects, 30).held_by_others())


@fuzz(20)
@pytest.mark.parametrize("key", KINDS)
@given(data=st.data())
def test_a_record_of_any_bytes_is_refused(dataset: Stored, key: str, data: st.DataObject) -> None:
    record = data.draw(damaged(dataset.objects.get(key)) | st.binary(max_size=200))
    use(with_record(dataset, key, record))


@fuzz(80)
@pytest.mark.parametrize("key", KINDS)
@given(data=st.data())
def test_a_sealed_record_is_refused_or_within_bounds(
    dataset: Stored, key: str, data: st.DataObject
) -> None:
    record = sealed(KINDS[key], data.draw(changed(body_of(dataset.objects.get(key)))))
    if record is not None:
        use(with_record(dataset, key, record))


@fuzz(100)
@given(body=JSON)
def test_a_sealed_record_of_any_shape_is_refused_or_within_bounds(body: Any) -> None:
    objects = MemoryObjects("memory://any")
    for key, kind in KINDS.items():
        if record := sealed(kind, body if isinstance(body, dict) else {"units": body}):
            objects.create(key, record)
    use(objects)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", ["rows", "format", "checksum", "kind", "unit"])
def test_a_number_beyond_all_measure_is_refused(number: str, place: str) -> None:
    body = {"format": fmt.FORMAT, "kind": "done", "rows": 1, "unit": 0, place: "HERE"}
    text = json.dumps(body, sort_keys=True, indent=1).replace('"HERE"', number) + "\n"
    with refused("^k: "):
        Done.from_json("k", decode_record("k", text.encode(), "done"))


@pytest.mark.parametrize("name", ["format", "kind", "checksum", "made_by", "x"])
@pytest.mark.parametrize("depth", [60, 300, 900, DEEP])
def test_what_is_nested_deeply_is_refused(name: str, depth: int) -> None:
    body = json.dumps({"format": fmt.FORMAT, "kind": "done", name: "HERE"}, indent=1)
    text = body.replace('"HERE"', "[" * depth + "1" + "]" * depth)
    # What cannot be spelled canonically has the checksum of nothing, and a stranger knows that.
    nothing = f'{text[:-2]},\n "checksum": "{xxhash.xxh3_128_hexdigest(b"")}"\n}}'
    for data in (text, nothing):
        with refused("^k: "):
            decode_record("k", data.encode(), "done")


@pytest.mark.parametrize("depth", [33, 300, 900])
def test_a_sealed_record_that_is_nested_deeply_is_refused(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    record = sealed("done", {"made_by": value})
    if record is not None:  # at 900 levels Python itself cannot write it
        with refused("nested too deeply"):
            decode_record("k", record, "done")


def test_a_key_that_is_given_twice_is_refused() -> None:
    data = encode_record("model", {"tensors": {"a": "1"}})
    twice = data.replace(b'"a":"1"', b'"a":"2","a":"1"')
    with refused("checksum does not match"):
        decode_record("k", twice, "model")


@pytest.mark.parametrize(
    "key",
    ["../../x", "/etc/passwd", "a\0b", "a\\b", "..", "", "a/b", f"{PREFIX}../b", f"{PREFIX}a/b",
     f"{PREFIX}.hidden", fmt.CURRENT.attempt_prefix(1, "a1") + "x",
     fmt.CURRENT.attempt_prefix(0, "a2") + "x", "done/000000/00000000.json", f"{PREFIX}a\nb",
     f"{PREFIX}\ud800", PREFIX.replace("a1", "..") + "x"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["shards", "index", "statistics"])
def test_a_file_of_another_place_is_refused(dataset: Stored, key: str, place: str) -> None:
    body = dataset.done(0).to_json()
    attempt = body["attempt"]
    file = body[place][0] if place == "shards" else body[place]
    file["key"] = key.replace("/a1/", f"/{attempt}/")
    with refused("^done/x: names .*not of its attempt"):
        Done.from_json("done/x", json.loads(json.dumps(body)))


@pytest.mark.parametrize("count", [-1, 1.0, 1 << 56, 1 << 64, True, "1", None, [1]])
@pytest.mark.parametrize("place", ["rows", "tokens", "documents", "contexts", "unit"])
def test_a_count_that_is_none_is_refused(dataset: Stored, count: Any, place: str) -> None:
    with refused("^done/x: "):
        Done.from_json("done/x", {**dataset.done(0).to_json(), place: count})


@pytest.mark.parametrize(
    "shape",
    [[1 << 62], [1 << 30, 1 << 30], [1] * 9, [1] * 5000, [0], [-1], [2.0], [True], "2", [[2]],
     [1 << 200], [1 << 56]],
)  # fmt: skip
def test_a_tap_of_an_impossible_shape_is_refused(dataset: Stored, shape: Any) -> None:
    with pytest.raises(ValueError, match="not a tap"):
        TapInfo.from_json({"shape": shape, "dtype": "float32", "aliases": [], "latents": 0})
    body = body_of(dataset.objects.get(fmt.UNITS))
    body["taps"]["logprob"]["shape"] = shape
    objects = MemoryObjects("memory://shape")
    objects.create(fmt.UNITS, encode_record("units", body))
    with refused("^units.json: is not a unit table"):
        Ledger(objects).table()


def test_words_that_a_terminal_obeys_are_not_shown(dataset: Stored) -> None:
    clear = "\x1b[2J\r\nroot#"
    objects = MemoryObjects("memory://words")
    for key in (fmt.UNITS, *dataset.listed(fmt.UNIT_COLUMNS)):
        objects.create(key, dataset.objects.get(key))
    objects.create("workers/w.json", encode_record("worker", {**BEAT, "error": clear}))
    objects.create(f"workers/{clear}.json", encode_record("worker", BEAT))
    (worker,) = read_status(objects).workers
    assert worker["error"] == r"\x1b[2J\r\nroot#"
    with refused("is not a done record"):
        Done.from_json("k", {**dataset.done(0).to_json(), "skipped": {clear: 1}})
    with refused(r"unexpected keyword argument '\\x1b"):
        Done.from_json("k", {**dataset.done(0).to_json(), clear: 1})


@pytest.mark.parametrize(
    "change",
    [{"units": 3}, {"units": [[1]]}, {"units": ["0"]}, {"units": {"0": 1}}, {"counter": None},
     {"counter": "x"}, {"pid": "../1"}, {"pid": 1e9}, {"world": [1]}, {"world": {"process": "0"}}],
)  # fmt: skip
def test_a_heartbeat_that_is_none_counts_for_nobody(change: dict[str, Any]) -> None:
    objects = MemoryObjects("memory://beats")
    objects.create("workers/a.json", encode_record("worker", BEAT))
    assert Presence(objects, 30).held_by_others() == {0, 1}
    objects.replace("workers/a.json", encode_record("worker", {**BEAT, **change}))
    assert read_workers(objects) == {}
    assert Presence(objects, 30).held_by_others() == set()


@fuzz(100)
@given(body=st.dictionaries(st.sampled_from(["q.1", "x"]), JSON | st.text("AP8/=+ ", max_size=40)))
def test_scales_are_one_positive_number_for_each_channel_or_refused(body: dict[str, Any]) -> None:
    taps = {"q.1": TapInfo((2, 3), "int8")}
    good = scales_to_json({"q.1": np.ones((2, 3), np.float32)})
    for each in (body, {**body, "q.1": str(body.get("q.1", "")) + good["q.1"][:28]}):
        with only_our_errors():
            scale = scales_from_json(each, taps)["q.1"]
            assert scale.shape == (2, 3)
            assert (scale > 0).all()


@fuzz(60)
@pytest.mark.parametrize("prefix", [fmt.UNIT_COLUMNS, fmt.SEGMENTS, fmt.MANIFEST_COLUMNS])
@given(data=st.data())
def test_columns_of_any_values_are_refused_or_within_bounds(
    dataset: Stored, prefix: str, data: st.DataObject
) -> None:
    """The file fits its record, so no checksum shows the change."""
    (key,) = dataset.objects.list(prefix)
    good = columns_in(key, dataset.objects.get(key))
    name = data.draw(st.sampled_from(sorted(good)))
    values = np.array(good[name])
    kind = data.draw(st.sampled_from(["one", "length", "dtype", "gone"]))
    if kind == "one" and values.size:
        most = 255 if values.dtype == np.uint8 else (1 << 63) - 1
        value = data.draw(st.sampled_from([0, 1, 2, most, most // 2, -1 % (most + 1)]))
        values.reshape(-1)[data.draw(st.integers(0, values.size - 1))] = value
    elif kind == "length":
        values = np.resize(values, data.draw(st.integers(0, 9)))
    elif kind == "dtype":
        values = values.astype(data.draw(st.sampled_from(["u1", "i4", "f4", "?"])))
    columns = {**good, name: values}
    encoded = encode_columns({n: c for n, c in columns.items() if kind != "gone" or n != name})
    told = column_file(key, encoded).to_json()
    objects = with_record(dataset, "", b"")
    objects.replace(key, encoded)
    record = fmt.UNITS if prefix == fmt.UNIT_COLUMNS else fmt.MANIFEST
    body = body_of(objects.get(record))
    if prefix == fmt.SEGMENTS:
        body["segments"][0] |= told
    else:
        body["units" if prefix == fmt.UNIT_COLUMNS else "columns"] |= told
    objects.replace(record, encode_record(KINDS[record], body))
    use(objects)
    with only_our_errors():
        list(Ledger(objects).table().units)


@fuzz(50)
@given(data=st.data())
def test_statistics_are_of_their_tap_or_refused(data: st.DataObject) -> None:
    good = stored.describe(np.ones((4, 3), np.float32)).to_tensors("t")
    shapes = st.sampled_from([(), (0,), (1,), (3,), (4,), (1, 3), (1 << 10,)])
    kinds = st.sampled_from(["f8", "i8", "f4", "u1", "?", "f2"])
    spoilt = st.builds(np.zeros, shapes, kinds) | st.none() | st.just(np.full(1, -1))
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(good)), spoilt, min_size=1))
    tensors = {name: array for name, array in {**good, **changes}.items() if array is not None}
    with only_our_errors():
        total = merged([TapStats.from_tensors("t", tensors, 3)], 3)
        assert total.mean.shape == total.m2.shape == total.variance.shape == (3,)
        assert total.count >= 0


def test_a_manifest_of_a_million_rows_with_none_stored_costs_nothing(dataset: Stored) -> None:
    records = [dataset.done(unit) for unit in range(2)]
    forged = replace(records[0], rows=10**6, index=replace(records[0].index, count=10**6))
    with stored.forged_units(dataset, [forged, records[1]]):
        objects = with_record(dataset, fmt.MODEL, dataset.objects.get(fmt.MODEL))
    tracemalloc.start()
    try:
        ledger = Ledger(objects)
        manifest = ledger.derived.read_manifest(ledger.layout)
        assert manifest is not None
        with pytest.raises(CorruptError, match="do not add up to its rows"):
            list(ledger.derived.catalog(ledger.table(), manifest))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()

"""The format: its literal bytes, and that other bytes are refused."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import CorruptError, SpileError, StoreError
from spile.dataset import format as fmt
from spile.dataset.format import (
    Done,
    Shard,
    TapInfo,
    covariance_width,
    decode_record,
    encode_record,
)
from support.marks import examples

PREFIX = "attempts/000000/00000003/a1b2/"
OTHER = PREFIX + "q.00000.safetensors"
DONE = Done(
    unit=3,
    attempt="a1b2",
    fingerprint="f00d",
    made_from="5eed",
    rows=5,
    tokens=7,
    documents=2,
    contexts=2,
    skipped={"no tokens": 1},
    text_digest="77",
    shards=(
        Shard("embed", PREFIX + "embed.00000.safetensors", 0, 3, 4108, "aa", "ee"),
        Shard("embed", PREFIX + "embed.00001.safetensors", 3, 2, 4104, "bb"),
    ),
    index=Shard("index", PREFIX + "index.safetensors", 0, 5, 4206, "cc"),
    statistics=Shard("statistics", PREFIX + "statistics.safetensors", 0, 5, 4148, "dd"),
    documents_table=Shard("documents", PREFIX + "documents.safetensors", 0, 3, 900, "ff"),
    made_by={"jax": "0.10"},
)
LITERAL = (
    b'{"attempt":"a1b2","checksum":"964d38db5a7570b214136eb983d5e946","contexts":2,"documents":2,'
    b'"documents_table":{"bytes":900,"count":3,"digest":"ff","etag":"","first":0,'
    b'"key":"attempts/000000/00000003/a1b2/documents.safetensors","tap":"documents"},'
    b'"fingerprint":"f00d","format":8,'
    b'"index":{"bytes":4206,"count":5,"digest":"cc","etag":"","first":0,'
    b'"key":"attempts/000000/00000003/a1b2/index.safetensors","tap":"index"},'
    b'"kind":"done","made_by":{"jax":"0.10"},"made_from":"5eed","rows":5,'
    b'"shards":[{"bytes":4108,"count":3,"digest":"aa","etag":"ee","first":0,'
    b'"key":"attempts/000000/00000003/a1b2/embed.00000.safetensors","tap":"embed"},'
    b'{"bytes":4104,"count":2,"digest":"bb","etag":"","first":3,'
    b'"key":"attempts/000000/00000003/a1b2/embed.00001.safetensors","tap":"embed"}],'
    b'"skipped":{"no tokens":1},'
    b'"statistics":{"bytes":4148,"count":5,"digest":"dd","etag":"","first":0,'
    b'"key":"attempts/000000/00000003/a1b2/statistics.safetensors","tap":"statistics"},'
    b'"text_digest":"77","tokens":7,"unit":3}\n'
)
# A record of format 6, which was indented.
EARLIER = b"""{
 "checksum": "65cc1b3842acf60809b93935e4868ce1",
 "format": 6,
 "kind": "model",
 "tensors": {
  "embed": "aa"
 }
}
"""
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def body(**changes: Any) -> dict[str, Any]:
    """A done record's body, as it reads back."""
    return {**json.loads(json.dumps(DONE.to_json())), **changes}


def shard(number: int, **changes: Any) -> dict[str, Any]:
    return {**body()["shards"][number], **changes}


# -- records ---------------------------------------------------------------------------------


def test_a_done_record_is_these_bytes() -> None:
    assert encode_record("done", DONE.to_json()) == LITERAL
    assert Done.from_json("k", decode_record("k", LITERAL, "done")) == DONE


def test_a_group_is_256_units() -> None:
    layout = fmt.CURRENT
    assert layout.done_key(300) == "done/000001/00000300.json"
    assert [layout.groups(count) for count in (1, 256, 257)] == [1, 1, 2]
    assert layout.units_of(1, 300) == range(256, 300)
    assert fmt.CURRENT.segment_key(layout.group(300)) == "segments/000001.safetensors"


def test_keys_are_spelled_so() -> None:
    assert fmt.CURRENT.done_key(3) == "done/000000/00000003.json"
    assert (
        fmt.CURRENT.shard_key(3, "a1b2", "resid_post.20", 7, compressed=False)
        == PREFIX + "resid_post.20.00007.safetensors"
    )
    assert fmt.CURRENT.worker_key("host-1", 0) == "workers/000000/host-1.json"
    held = fmt.CURRENT.worker_key("host-1", 0, [3, 5])
    assert held == "workers/000000/host-1@00000003@00000005.json"
    assert fmt.parse_worker_key(held) == ("host-1", 0, (3, 5))
    assert fmt.CURRENT.worker_key("host-1", 0, range(100)) == "workers/000000/host-1.json"
    assert fmt.idle_worker_key("host-1") == "workers/host-1.json"
    assert (
        fmt.CURRENT.shard_key(3, "a1b2", "resid_post.20", 7, compressed=True)
        == PREFIX + "resid_post.20.00007.safetensors.zst"
    )
    assert fmt.scale_name("resid_post.20") == "resid_post.20/scale"
    assert (fmt.UNITS, fmt.MODEL, fmt.MANIFEST) == ("units.json", "model.json", "manifest.json")
    assert fmt.SCALES == "scales.json"
    assert fmt.CHECK == "check.json"


@examples(200)
@given(st.sets(st.integers(1, 40), max_size=8), st.integers(1, 4), st.integers(1, 5))
def test_a_group_has_a_segment_of_each_generation_that_added_to_it(
    grown: set[int], more: int, size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fmt, "GROUP_UNITS", size)
        layout, counts = fmt.KeyLayout(tuple(sorted(grown))), [*sorted(grown)]
        counts.append(max(counts, default=0) + more)
        for group in range(layout.groups(counts[-1])):
            units = {*layout.units_of(group, counts[-1])}
            had = [units.intersection(range(count)) for count in counts]
            added = [n for n, now in enumerate(had) if now != (had[n - 1] if n else set())]
            assert [*layout.generations_of(group)] == added
            assert fmt.parse_generation(layout.segment_key(group)) == added[-1]
            assert layout.segment_key(group).rpartition("/")[0] + "/" in layout.segment_folders
    assert [fmt.parse_generation(fmt.manifest_key(number)) for number in (0, 7)] == [0, 7]


@pytest.mark.parametrize("unit", [0, 3, 99_999_999])
def test_keys_are_parsed_back(unit: int) -> None:
    assert fmt.parse_done_key(fmt.CURRENT.done_key(unit)) == unit
    for compressed in (False, True):
        key = fmt.CURRENT.shard_key(unit, "a1b2", "embed", 0, compressed=compressed)
        assert fmt.parse_attempt_key(key) == (unit, "a1b2")
        assert fmt.parse_done_key(key) is None


@pytest.mark.parametrize(
    "key",
    ["done/3.json", "done/000000/00000003.json.tmp-1", "done/x/00000003.json",
     "x/done/000000/00000003.json", "done/000000/00000003.json\n", "units.json"],
)  # fmt: skip
def test_other_keys_are_not_taken_for_done_records(key: str) -> None:
    assert fmt.parse_done_key(key) is None
    assert fmt.parse_attempt_key(key) is None


def test_every_changed_byte_is_refused() -> None:
    for position in range(len(LITERAL)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            damaged = bytearray(LITERAL)
            damaged[position] ^= mask
            with pytest.raises(CorruptError, match="done/x"):
                decode_record("done/x", bytes(damaged), "done")


def test_every_truncation_and_any_addition_is_refused() -> None:
    for length in range(len(LITERAL)):
        with pytest.raises(CorruptError):
            decode_record("k", LITERAL[:length], "done")
    for extra in (b"\n", b" ", b"\0", b"{}"):
        for changed in (LITERAL + extra, extra + LITERAL):
            with pytest.raises(CorruptError):
                decode_record("k", changed, "done")


def test_the_same_json_in_another_spelling_is_refused() -> None:
    record = json.loads(LITERAL)
    for spelled in (
        json.dumps(record).encode(),
        json.dumps(dict(reversed(record.items())), indent=1).encode() + b"\n",
        LITERAL.replace(b'"a1b2"', b'"\\u00611b2"', 1),
        LITERAL.decode().encode("utf-16"),
    ):
        assert json.loads(spelled) == record
        with pytest.raises(CorruptError):
            decode_record("k", spelled, "done")


@pytest.mark.parametrize("version", [6, 9])
def test_another_format_is_refused_with_advice(version: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fmt, "FORMAT", version)
        data = EARLIER if version == 6 else encode_record("model", {})
    with pytest.raises(StoreError, match=f"in format {version}.*reads format 8; use") as caught:
        decode_record("units.json", data, "model")
    assert not isinstance(caught.value, CorruptError) and "\n" not in str(caught.value)
    with pytest.raises(CorruptError):  # damage is not another format
        decode_record("units.json", LITERAL.replace(b'"format":8', b'"format":9'), "done")


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(CorruptError, match="'done' record, expected 'units'"):
        decode_record("units.json", LITERAL, "units")


@examples(300)
@given(st.dictionaries(st.text(max_size=8).filter(lambda k: k not in ("format", "kind")), JSON))
def test_any_body_reads_back(value: dict[str, Any]) -> None:
    value.pop("checksum", None)
    assert decode_record("k", encode_record("x", value), "x") == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_stored_is_an_error_and_not_an_empty_record(value: float) -> None:
    with pytest.raises(ValueError):
        encode_record("done", {**DONE.to_json(), "made_by": {"speed": value}})


@examples(300)
@given(st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()))
def test_arbitrary_bytes_are_refused_with_our_own_error(data: bytes) -> None:
    with pytest.raises(SpileError):
        decode_record("k", data, "done")


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"format":3,"checksum":NaN}', b'{"n":' + b"9" * 5000,
     b'{"format":' + b"9" * 5000 + b"}", b'{"a":1e999,"format":3}', b'{"a":"\\ud800","format":3}'],
)  # fmt: skip
def test_hostile_json_is_refused_with_our_own_error(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_record("k", data, "done")


# -- taps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "storage", "scaled_by", "row_bytes"),
    [
        ((6,), "float32", "float32", None, 24),
        ((2, 3), "bfloat16", "bfloat16", None, 12),
        ((2, 3), "float8_e4m3", "float8_e4m3fn", "row", 10),  # with the scale's four
        ((), "float8_e4m3", "float8_e4m3fn", "row", 5),
        ((6,), "int8", "int8", "channel", 6),
        ((6,), "int16", "int16", None, 12),
        ((6,), "float8_e5m2", "float8_e5m2", None, 6),
    ],
)
def test_what_a_tap_takes_and_is_scaled_by(
    shape: tuple[int, ...], dtype: str, storage: str, scaled_by: str | None, row_bytes: int
) -> None:
    info = TapInfo(shape, dtype, latents=9 if len(shape) == 1 else 0)
    assert (info.storage.name, info.scaled_by, info.row_bytes) == (storage, scaled_by, row_bytes)
    spelled = {"shape": [*shape], "dtype": dtype, "aliases": [], "latents": info.latents}
    assert TapInfo.from_json(spelled) == info
    assert info.to_json() == {**spelled, "shape": shape, "aliases": ()}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_covariance_follows_its_means(shape: tuple[int, ...]) -> None:
    channels = math.prod(shape)
    info = TapInfo((covariance_width(channels),), "float64", covariance_of=shape)
    assert info.channels == channels and info.width == channels + channels * (channels + 1) / 2
    spelled = json.loads(json.dumps(info.to_json()))
    assert TapInfo.from_json(spelled) == info
    for bad in ({"covariance_of": [*shape, 2]}, {"covariance_of": 3}, {"covariance_of": [0]}):
        with pytest.raises(ValueError, match="not a tap"):
            TapInfo.from_json({**spelled, **bad})


# -- done records ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shards": [shard(0), shard(1, first=4, count=1)]}, "gap"),
        ({"shards": [shard(0), shard(1, first=2, count=3)]}, "overlap"),
        ({"shards": [shard(0, first=1, count=2), shard(1)]}, "gap"),
        ({"shards": [shard(1), shard(0)]}, "gap"),
        ({"shards": [shard(0), shard(0, first=3, count=0, key=OTHER), shard(1)]}, "gap"),
        ({"shards": [shard(0), shard(1, count=-2)]}, "gap|count"),
        ({"shards": [shard(0)]}, "add up"),
        ({"shards": [shard(0), shard(1, count=3)]}, "add up"),
        ({"shards": [shard(0), shard(1), shard(0, tap="q", key=OTHER)]}, "add up"),
        ({"rows": 6}, "add up"),
        ({"index": {**body()["index"], "count": 4}}, "add up"),
    ],
)
def test_shards_must_tile_the_rows(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptError, match=f"^done/x: .*({reason})"):
        Done.from_json("done/x", body(**changes))


def test_a_file_named_twice_is_refused() -> None:
    shards = [shard(0, count=3), shard(0, first=3, count=2)]
    with pytest.raises(CorruptError):
        Done.from_json("done/x", body(shards=shards))


@pytest.mark.parametrize(
    "key",
    ["../x", "/etc/passwd", PREFIX + "../../../x", PREFIX + "a/b", PREFIX, PREFIX + "..",
     "attempts/000000/00000003/beef/embed.00000.safetensors", PREFIX + "a\0b", PREFIX + "a\n",
     "attempts/000000/00000004/a1b2/embed.00000.safetensors", PREFIX + ".hidden"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["shards", "index", "statistics"])
def test_files_outside_the_attempt_are_refused(key: str, place: str) -> None:
    changed = body()
    target = changed["shards"][1] if place == "shards" else changed[place]
    target["key"] = key
    with pytest.raises(CorruptError, match="not of its attempt"):
        Done.from_json("done/x", changed)


@pytest.mark.parametrize("place", ["index", "statistics", "documents_table"])
def test_only_rows_may_be_compressed(place: str) -> None:
    changed = body()
    for target in changed["shards"]:
        target["key"] += fmt.COMPRESSED
    assert Done.from_json("done/x", changed).shards[1].key.endswith(".safetensors.zst")
    changed[place]["key"] += fmt.COMPRESSED
    with pytest.raises(CorruptError, match="^done/x: names a compressed index, statistics or"):
        Done.from_json("done/x", changed)


@pytest.mark.parametrize("attempt", ["..", "../00000004/beef", "a/b", "", ".", "a\0"])
def test_an_attempt_that_is_not_a_name_is_refused(attempt: str) -> None:
    text = json.dumps(body()).replace("/a1b2/", json.dumps(f"/{attempt}/")[1:-1])
    with pytest.raises(CorruptError):
        Done.from_json("done/x", {**json.loads(text), "attempt": attempt})


@pytest.mark.parametrize("field", sorted(body()))
def test_a_missing_or_an_unknown_field_is_refused(field: str) -> None:
    with pytest.raises(CorruptError, match="^done/x: is not a done record"):
        Done.from_json("done/x", {k: v for k, v in body().items() if k != field})
    with pytest.raises(CorruptError, match="^done/x: is not a done record"):
        Done.from_json("done/x", body(**{field + "_": 1}))


def test_a_unit_without_rows_has_no_shards() -> None:
    changed = body(rows=0, shards=[], index={**body()["index"], "count": 0})
    assert Done.from_json("k", changed).shards == ()


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [at] if at else []
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths(part, (*at, name))
    return found


def well_typed(done: Done) -> bool:
    counts = [done.unit, done.rows, done.tokens, done.documents, done.contexts]
    counts += done.skipped.values()
    texts = [done.attempt, done.fingerprint, done.made_from, done.text_digest]
    for file in done.files():
        counts += [file.first, file.count, file.bytes]
        texts += [file.tap, file.key, file.digest]
    return (
        all(type(n) is int and n >= 0 for n in counts)
        and all(type(text) is str for text in texts)
        and isinstance(done.made_by, dict)
    )


@examples(600)
@given(st.sampled_from(paths(body())), JSON)
def test_a_changed_value_is_refused_or_makes_a_sound_record(
    path: tuple[Any, ...], value: Any
) -> None:
    changed = copy.deepcopy(body())
    target = changed
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    try:
        done = Done.from_json("done/x", changed)
    except CorruptError as error:
        assert error.key == "done/x"
    else:
        assert well_typed(done)

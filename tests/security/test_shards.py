"""Hostile shards: headers, seek tables, bombs, and pickles under our names."""

import json
import pickle
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from security.hostile import DEEP, JSON, NUMBERS, changed, damaged, fuzz, only_our_errors, refused
from spile.core.errors import CorruptError
from spile.core.tensors import MAX_HEADER_BYTES, map_tensor, parse_header, read_header
from spile.dataset.codec.compression import MAX_FRAME_BYTES, PlaneReader
from spile.dataset.codec.shard import ShardWriter, open_tensor, read_shard_header
from spile.models.files.checkpoint import open_checkpoint
from spile.objects import MemoryObjects

KEYS = ("plain.safetensors", "packed.safetensors.zst")
SPECS: list[tuple[str, Any, tuple[int, ...]]] = [("a", "f4", (5, 3)), ("a/scale", "f4", (5,))]


@pytest.fixture(scope="module")
def shards() -> dict[str, bytes]:
    """The same two tensors, plain and compressed."""
    objects = MemoryObjects("memory://shards")
    for key in KEYS:
        writer = ShardWriter(objects, key, SPECS)
        for _, dtype, shape in SPECS:
            writer.write(np.arange(np.prod(shape), dtype=dtype).reshape(shape))
        writer.close()
    return {key: objects.get(key) for key in KEYS}


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Fail if more memory than that was ever in use."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, f"{peak} bytes"


def held(entries: Any, data: bytes = b"") -> bytes:
    """A file with this header."""
    body = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(body)) + body + data


def read_all(key: str, data: bytes) -> None:
    """Read every tensor of a shard; check that each has the size of its shape."""
    objects = MemoryObjects("memory://read")
    objects.create(key, data)
    for info in read_shard_header(objects, key).values():
        assert 0 <= info.stop - info.start <= max(len(data), 1 << 20)
        if not info.shape:
            continue
        rows = open_tensor(objects, key, info)[: info.shape[0]]
        assert rows.shape == info.shape
        assert rows.nbytes == info.stop - info.start


@fuzz(80)
@pytest.mark.parametrize("key", KEYS)
@given(data=st.data())
def test_a_shard_of_any_bytes_is_refused_or_read_within_bounds(
    shards: dict[str, bytes], key: str, data: st.DataObject
) -> None:
    with only_our_errors():
        read_all(key, data.draw(damaged(shards[key]) | st.binary(max_size=100)))


@fuzz(120)
@given(data=st.data())
def test_a_header_with_anything_in_it_is_refused_or_read_within_bounds(
    shards: dict[str, bytes], data: st.DataObject
) -> None:
    plain = shards[KEYS[0]]
    size = struct.unpack("<Q", plain[:8])[0]
    entries = data.draw(changed(json.loads(plain[8 : 8 + size])) | JSON)
    with only_our_errors():
        read_all(KEYS[0], held(entries, plain[8 + size :]))


@fuzz(80)
@given(data=st.data())
def test_a_seek_table_of_any_bytes_is_refused_or_read_within_bounds(
    shards: dict[str, bytes], data: st.DataObject
) -> None:
    packed = bytearray(shards[KEYS[1]])
    table = len(packed) - struct.unpack_from("<I", packed, len(packed) - 9)[0] * 12 - 9
    number = st.sampled_from([0, 1, 7, 1 << 16, 1 << 26, (1 << 32) - 1]) | st.integers(0, 1 << 32)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, (len(packed) - table - 4) // 4)) * 4 + table
        struct.pack_into("<I", packed, at, data.draw(number) % (1 << 32))
    with only_our_errors(), at_most(1 << 25):
        read_all(KEYS[1], bytes(packed))


@pytest.mark.parametrize(
    "shape",
    [[1 << 50], [1 << 31, 1 << 31], [1 << 32, 1 << 32], [1 << 61, 8], [0, 1 << 62], [1] * 99,
     [-1, -4], [4.0], ["4"], [True, 4], [[4]], 4, "4", {"4": 4}, None],
)  # fmt: skip
def test_a_shape_that_its_bytes_do_not_hold_is_refused(shape: Any) -> None:
    for stop in (16, 1 << 52, (1 << 62) - 1, 1 << 64):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, stop]}
        with refused("^k: "), at_most(1 << 20):
            parse_header("k", held({"a": entry}), len(held({"a": entry})) + 16)


@pytest.mark.parametrize("declared", [90 << 20, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_declared_header_is_not_allocated(declared: int, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    path.write_bytes(struct.pack("<Q", declared) + b"{}" * 40)
    with refused("impossible header size"), at_most(1 << 20):
        read_header(path)


@pytest.mark.parametrize("filler", [b"[],", b"{},", b'{"":[]},'])
def test_a_header_of_very_many_parts_is_refused_before_it_is_parsed(filler: bytes) -> None:
    data = held(b'{"a":[' + filler * (4 << 20) + b"0]}")
    with refused("more than 1048576 tensors"), at_most(len(data) + (1 << 20)):
        parse_header("k", data, len(data))


def test_many_entries_take_memory_in_proportion_to_their_bytes() -> None:
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    data = held(b"{" + b",".join(entry % n for n in range(20_000)) + b"}")
    with at_most(30 * len(data)):
        assert len(parse_header("k", data, len(data))) == 20_000


@pytest.mark.parametrize("number", NUMBERS)
def test_a_header_with_a_number_beyond_all_measure_is_refused(number: str) -> None:
    for text in (f'{{"a":{number}}}', f'{{"a":{{"dtype":"F32","shape":[{number}],'
                 f'"data_offsets":[0,{number}]}}}}'):  # fmt: skip
        with refused("^k: "):
            parse_header("k", held(text.encode()), len(held(text.encode())))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"a":{"shape":['])
def test_a_header_that_is_nested_deeply_is_refused(opening: bytes) -> None:
    data = held(opening * DEEP)
    with refused("not JSON"):
        parse_header("k", data, len(data))


def bomb(plain: int, declared: int) -> bytes:
    """A compressed shard of one frame of zeros, and a table that says how long it is."""
    frame = pa.Codec("zstd").compress(b"\0" * plain, asbytes=True)
    table = struct.pack("<III", len(frame), declared, 0)
    head = struct.pack("<II", 0x184D2A5E, len(table) + 9)
    return frame + head + table + struct.pack("<IBI", 1, 0x80, 0x8F92EAB1)


@pytest.mark.parametrize(
    ("plain", "declared"),
    [(64 << 20, 8), (8, 60 << 20), (64, MAX_FRAME_BYTES + 1), (64, (1 << 32) - 1), (64 << 20, 64)],
)
def test_a_frame_holds_what_its_table_says_or_is_refused(plain: int, declared: int) -> None:
    data = bomb(plain, declared)
    with refused("^k: "), at_most(1 << 20):
        PlaneReader("k", len(data), lambda start, stop: data[start:stop]).read(0, 8, 1)


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_unpickled(tmp_path: Path, model: Path) -> None:
    ran = tmp_path / "ran"
    payload = pickle.dumps(Payload(ran))
    assert pickle.loads(payload) is None and ran.exists(), "the payload does nothing"
    ran.unlink()
    padded = payload.ljust(4096, b"\0")
    for key in KEYS:
        objects = MemoryObjects("memory://pickle")
        objects.create(key, padded)
        with pytest.raises(CorruptError):
            read_shard_header(objects, key)
    # numpy would unpickle an array of objects, of such a file and from such a header.
    np.save(tmp_path / "m.npy", np.array([Payload(ran)]), allow_pickle=True)
    path = tmp_path / "m.safetensors"
    path.write_bytes((tmp_path / "m.npy").read_bytes().ljust(4096, b"\0"))
    with pytest.raises(CorruptError):
        read_header(path)
    entry = {"dtype": "O", "shape": [1], "data_offsets": [0, 8]}
    with refused("unreadable header entry"):
        parse_header("k", held({"a": entry}), len(held({"a": entry})) + 8)
    copied = tmp_path / "model"
    copied.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (copied / name).write_bytes((model / name).read_bytes())
    (copied / "pytorch_model.bin").write_bytes(padded)
    with refused("pickled .bin weights are never read"):
        open_checkpoint(str(copied))
    (copied / "model.safetensors").write_bytes(padded)
    with refused("not a safetensors file"):
        open_checkpoint(str(copied))
    assert not ran.exists()


def test_an_empty_tensor_of_a_huge_shape_is_mapped_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.write_bytes(held({"a": {"dtype": "F32", "shape": [0, 1 << 40], "data_offsets": [0, 0]}}))
    with at_most(1 << 20):
        assert map_tensor(path, read_header(path)["a"]).shape == (0, 1 << 40)


@pytest.mark.parametrize("shape", [[0, 1 << 61], [1 << 40, 0, 1 << 40], [0] + [1 << 10] * 7])
def test_an_empty_tensor_that_numpy_cannot_have_is_refused(shape: list[int]) -> None:
    data = held({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})
    with refused("impossible shape"):
        parse_header("k", data, len(data))

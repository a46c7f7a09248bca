"""The safetensors container: pinned bytes, the official readers, and hostile headers."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import CorruptError
from spile.core.tensors import (
    DTYPES,
    HEADER_ALIGN,
    TensorInfo,
    as_bytes,
    build_header,
    header_size,
    map_tensor,
    map_tensors,
    parse_header,
    read_header,
    read_header_from,
    write_tensors,
)
from support.marks import examples

BF16 = np.dtype(ml_dtypes.bfloat16)


def container(header: Any, data: bytes = b"") -> bytes:
    """A file with this header, valid or not."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + data


def entry(dtype: str, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def parse(file: bytes) -> dict[str, TensorInfo]:
    return parse_header("f", file, len(file))


def assert_tiles(found: dict[str, TensorInfo], file: bytes) -> None:
    """An accepted header describes its file: tensors fill it without gaps or overlaps."""
    reached = header_size("f", file[:8], len(file))
    for info in sorted(found.values(), key=lambda t: (t.start, t.stop)):
        assert info.start == reached
        assert info.stop - info.start == info.dtype.itemsize * math.prod(info.shape)
        reached = info.stop
    assert reached == len(file)


def test_a_small_file_is_these_bytes(tmp_path: Path) -> None:
    arrays = {
        "a": np.array([1.0, -2.0], np.float32),
        "b": np.array([[1.0, 0.5, -1.0]], BF16),
        "é": np.array(258, np.uint16),
    }
    write_tensors(tmp_path / "f", arrays)
    body = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]},'
        b'"\\u00e9":{"dtype":"U16","shape":[],"data_offsets":[14,16]}}'
    )
    data = bytes.fromhex("0000803f000000c0 803f003f80bf 0201")
    expected = b"\xf8\x0f\0\0\0\0\0\0" + body + b" " * (4088 - len(body)) + data
    assert (tmp_path / "f").read_bytes() == expected


def test_metadata_comes_first_in_these_bytes() -> None:
    header = build_header([("x", np.int8, (0, 3))], {"format": "spile"})
    assert header.rstrip(b" ")[8:] == (
        b'{"__metadata__":{"format":"spile"},"x":{"dtype":"I8","shape":[0,3],"data_offsets":[0,0]}}'
    )


@pytest.mark.parametrize("count", [0, 1, 60, 500])
def test_rows_begin_on_a_page_boundary(count: int) -> None:
    header = build_header((f"tensor.{i}", np.float32, (1,)) for i in range(count))
    assert len(header) % HEADER_ALIGN == 0
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert len(parse_header("f", header, len(header) + 4 * count)) == count


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith("F8")])
def test_the_official_numpy_reader_opens_every_dtype_it_knows(name: str, tmp_path: Path) -> None:
    values = np.array([[0, 1, 2], [3, 4, 5]]).astype(DTYPES[name])
    write_tensors(tmp_path / "f.safetensors", {"first": values, "second": values[:, 1:]})
    found = safetensors.numpy.load_file(tmp_path / "f.safetensors")
    for key, wanted in (("first", values), ("second", values[:, 1:])):
        assert found[key].shape == wanted.shape
        assert found[key].tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert found["first"].dtype == values.dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32),
     ("I64", torch.int64), ("BOOL", torch.bool), ("F8_E4M3", torch.float8_e4m3fn),
     ("F8_E5M2", torch.float8_e5m2)],
)  # fmt: skip
def test_the_official_torch_reader_finds_the_values(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    values = np.array([[0.0, 1.0, -2.0], [0.5, 1.75, 3.0]]).astype(DTYPES[name])
    write_tensors(tmp_path / "f.safetensors", {"x": values, "scalar": values[1, 2]})
    found = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert found["x"].dtype == dtype
    assert np.array_equal(found["x"].double().numpy(), values.astype(np.float64))
    assert found["scalar"].shape == ()


def test_files_of_the_official_writers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    wanted = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.tensor(2.5),
        "c": torch.zeros(0, 4, dtype=torch.int32),
    }
    safetensors.torch.save_file(wanted, path, metadata={"format": "pt"})
    found = read_header(path)
    assert set(found) == {"a", "b", "c"}
    for name, tensor in wanted.items():
        ours = map_tensor(path, found[name])
        assert ours.shape == tuple(tensor.shape)
        assert np.array_equal(ours.astype(np.float32), tensor.float().numpy())
    assert found["a"].dtype == BF16


BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "array",
    [BASE.T, BASE[::2], BASE[:, ::-1], BASE[1:3, 2:5], np.asfortranarray(BASE), BASE[:, 0],
     BASE.reshape(2, 2, 6).transpose(2, 0, 1), np.broadcast_to(BASE[0], (3, 6)),
     BASE.astype(BF16).T, BASE[3, 3], BASE[:0], BASE.T > 5],
)  # fmt: skip
def test_any_layout_in_memory_is_written_in_reading_order(
    array: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / "f.safetensors"
    write_tensors(path, {"x": array, "after": BASE})
    found = safetensors.numpy.load_file(path)
    assert np.array_equal(found["x"], array)
    assert np.array_equal(found["after"], BASE)
    assert np.array_equal(map_tensor(path, read_header(path)["x"]), array)


def test_bytes_of_a_contiguous_array_are_not_copied() -> None:
    array = np.zeros((3, 5), np.float32)
    view = as_bytes(array)
    array[0, 0] = 1.0
    assert bytes(view[:4]) == struct.pack("<f", 1.0)
    assert len(view) == 60


def test_a_map_is_read_only(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"x": BASE})
    mapped = map_tensor(tmp_path / "f", read_header(tmp_path / "f")["x"])
    with pytest.raises(ValueError, match="read-only"):
        mapped[0, 0] = 1.0


def test_all_tensors_of_a_file_are_views_of_one_read_only_map(tmp_path: Path) -> None:
    tensors = {"x": BASE, "none": BASE[:0], "flags": BASE[0] > 3, "odd": BASE[1]}
    write_tensors(tmp_path / "f", tensors)
    mapped = map_tensors(tmp_path / "f", read_header(tmp_path / "f"))
    assert {name: a.tolist() for name, a in mapped.items()} == {
        name: a.tolist() for name, a in tensors.items()
    }
    assert len({id(a.base) for a in mapped.values()}) == 1
    with pytest.raises(ValueError, match="read-only"):
        mapped["x"][0, 0] = 1.0


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"x": BASE})
    before = (tmp_path / "f").read_bytes()
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "f", {"x": BASE + 1})
    assert (tmp_path / "f").read_bytes() == before


BAD_HEADERS: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "no header": struct.pack("<Q", 0),
    "header beyond the file": struct.pack("<Q", 1000) + b"{}",
    "header of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "header over the official limit": struct.pack("<Q", (100 << 20) + 1),
    "not JSON": container(b"{'a': 1}"),
    "not UTF-8": container(b'{"\xff": 1}'),
    "not an object": container([1, 2]),
    "deeply nested": container(b"[" * 100_000),
    "a number of 5000 digits": container(b'{"a": ' + b"9" * 5000 + b"}"),
    "entry not an object": container({"a": 1}),
    "entry without dtype": container({"a": {"shape": [], "data_offsets": [0, 0]}}),
    "unknown dtype": container({"a": entry("F7", [1], 0, 1)}, b"x"),
    "dtype a list": container({"a": entry(["F32"], [1], 0, 4)}, b"xxxx"),  # type: ignore[arg-type]
    "shape a number": container({"a": entry("U8", 1, 0, 1)}, b"x"),
    "shape of texts": container({"a": entry("U8", "11", 0, 1)}, b"x"),
    "shape of floats": container({"a": entry("U8", [1.0], 0, 1)}, b"x"),
    "shape of switches": container({"a": entry("U8", [True], 0, 1)}, b"x"),
    "NaN in the shape": container(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"),
    "negative sizes": container({"a": entry("U8", [-1, -1], 0, 1)}, b"x"),
    "negative offset": container({"a": entry("U8", [1], -1, 0)}, b"x"),
    "offsets turned": container({"a": entry("U8", [1], 1, 0)}, b"x"),
    "three offsets": container({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}),
    "huge shape": container({"a": entry("F32", [1 << 40, 1 << 40], 0, 4)}, b"xxxx"),
    "huge shape and offset": container({"a": entry("U8", [1 << 61], 0, 1 << 61)}, b"x"),
    "huge shape with a zero": container({"a": entry("U8", [1 << 70, 0], 0, 0)}),
    "size not of the shape": container({"a": entry("F32", [2], 0, 4)}, b"xxxx"),
    "65 dimensions": container({"a": entry("U8", [1] * 65, 0, 1)}, b"x"),
    "gap at the start": container({"a": entry("U8", [1], 1, 2)}, b"xx"),
    "gap between": container({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xxx"),
    "overlap": container({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx"),
    "the same place twice": container({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 0, 1)}),
    "bytes after the last": container({"a": entry("U8", [1], 0, 1)}, b"xx"),
    "bytes and no tensor": container({}, b"x"),
    "cut by one byte": container({"a": entry("U8", [2], 0, 2)}, b"x"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_cannot_be_true_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptError) as caught:
        parse(BAD_HEADERS[name])
    assert caught.value.key == "f"
    assert "\n" not in str(caught.value)
    (tmp_path / "f").write_bytes(BAD_HEADERS[name])
    with pytest.raises(CorruptError):
        read_header(tmp_path / "f")


def valid_file() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "weight": entry("F32", [3, 2], 0, 24),
        "bias": entry("BF16", [3], 24, 30),
        "empty": entry("I8", [0, 7], 30, 30),
    }
    return container(header, bytes(30))


def test_every_truncation_of_a_valid_file_is_refused() -> None:
    whole = valid_file()
    assert set(parse(whole)) == {"weight", "bias", "empty"}
    for size in range(len(whole)):
        with pytest.raises(CorruptError):
            parse(whole[:size])


@given(st.binary(max_size=200))
@examples(300)
def test_noise_gives_corrupt_error_or_nothing(noise: bytes) -> None:
    for file in (noise, container(noise), container(b"{" + noise + b"}")):
        try:
            found = parse(file)
        except CorruptError:
            continue
        assert_tiles(found, file)


@given(st.data())
@examples(300)
def test_a_damaged_header_is_refused_or_still_tiles_its_file(data: st.DataObject) -> None:
    file = bytearray(valid_file())
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 31))] = data.draw(st.integers(0, 255))
    try:
        found = parse(bytes(file))
    except CorruptError:
        return
    assert_tiles(found, bytes(file))


ODD = st.sampled_from(
    [None, True, -1, 0, 1, 3, 7, 8, 1 << 40, 1 << 62, 1 << 70, 0.5, 1e300, "", "F32", "U8", "11",
     [], [1], [0, 1], [1, 0], [[1]], {}, {"a": 1}]
)  # fmt: skip
LAYOUT = st.lists(
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 3), max_size=3)), max_size=4
)
FAULT = st.tuples(
    st.integers(0, 3), st.sampled_from(["dtype", "shape", "data_offsets", None]), ODD, ODD
)


@given(LAYOUT, st.lists(FAULT, max_size=2), st.integers(-1, 1))
@examples(400)
def test_a_strangers_header_is_refused_or_tiles_its_file(
    layout: list[tuple[str, list[int]]], faults: list[tuple[int, str | None, Any, Any]], rest: int
) -> None:
    header: dict[str, Any] = {}
    size = 0
    for name, (dtype, shape) in enumerate(layout):
        stop = size + DTYPES[dtype].itemsize * math.prod(shape)
        header[str(name)] = entry(dtype, shape, size, stop)
        size = stop
    for name, field, odd, other in faults:
        if field is None:
            header[str(name)] = odd
        elif isinstance(header.get(str(name)), dict):
            header[str(name)][field] = [odd, other] if field == "data_offsets" else odd
    file = container(header, bytes(max(0, size + rest)))
    try:
        found = parse(file)
    except CorruptError:
        assert faults or rest, "a true header was refused"
        return
    assert_tiles(found, file)


def test_a_short_header_takes_one_read_and_a_long_one_two(tmp_path: Path) -> None:
    for count, reads in ((1, 1), (3000, 2)):
        write_tensors(tmp_path / f"{count}", {f"t{i}": np.zeros(1) for i in range(count)})
        data = (tmp_path / f"{count}").read_bytes()
        asked: list[tuple[int, int]] = []

        def read(start: int, length: int, data: bytes = data, asked: Any = asked) -> bytes:
            asked.append((start, length))
            return data[start : start + length]

        assert read_header_from(read, len(data), "f") == parse_header("f", data, len(data))
        assert len(asked) == reads
        assert all(start + length <= len(data) for start, length in asked)


def test_an_impossible_header_size_is_not_asked_for() -> None:
    asked: list[int] = []

    def read(start: int, length: int) -> bytes:
        asked.append(length)
        return (struct.pack("<Q", 1 << 40) + bytes(100))[:length]

    with pytest.raises(CorruptError, match="impossible header size"):
        read_header_from(read, 1 << 50, "f")
    assert asked == [1 << 16]

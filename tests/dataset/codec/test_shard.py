"""Shards: safetensors files that other tools read, and whose damage is noticed."""

import mmap
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from spile.core.errors import CorruptError
from spile.dataset.codec.shard import (
    ShardWriter,
    contains_exactly,
    index_tensors,
    open_tensor,
    read_shard_header,
    tap_tensors,
)
from spile.dataset.format import TapInfo
from spile.objects import LocalObjects
from support.marks import examples


class Remote(LocalObjects):
    """A backend whose objects are no local files."""

    def local_path(self, key: str) -> None:  # type: ignore[override]
        return None


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


def store(objects: LocalObjects, key: str, tensors: dict[str, np.ndarray]) -> tuple[int, str, str]:
    writer = ShardWriter(objects, key, [(n, a.dtype, a.shape) for n, a in tensors.items()])
    for array in tensors.values():
        writer.write(array)
    return writer.close()


def test_a_shard_is_these_bytes(objects: LocalObjects) -> None:
    store(objects, "s", {"embed": np.array([[1.0, -2.0]], np.float32)})
    header = b'{"embed":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}'
    assert objects.get("s") == (
        b"\xf8\x0f\0\0\0\0\0\0" + header.ljust(4088) + b"\0\0\x80\x3f" + b"\0\0\0\xc0"
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_official_reader_reads_the_same_rows(objects: LocalObjects, dtype: type) -> None:
    rows = np.random.default_rng(0).standard_normal((13, 5)).astype(dtype)
    store(objects, "s", {"resid_post.3": rows})
    read = load_file(objects.local_path("s"))
    assert list(read) == ["resid_post.3"]
    assert read["resid_post.3"].dtype == np.dtype(dtype)
    assert np.array_equal(read["resid_post.3"], rows)


@pytest.mark.parametrize("key", ["s", "s.zst"])
@pytest.mark.parametrize("backend", [LocalObjects, Remote])
def test_tensors_read_back_by_name(backend: type[LocalObjects], tmp_path: Path, key: str) -> None:
    objects = backend(tmp_path)
    rng = np.random.default_rng(1)
    tensors = {
        "a": rng.standard_normal((7, 3)),
        "none": np.zeros((0, 3), np.float32),
        "b": rng.integers(0, 9, 11).astype(np.uint16),
        "a/scale": rng.standard_normal(7).astype(np.float32),
    }
    store(objects, key, tensors)
    header = read_shard_header(objects, key)
    assert list(header) == ["a", "none", "b", "a/scale"]
    for name, wanted in tensors.items():
        read = open_tensor(objects, key, header[name])
        assert (read.dtype, read.shape, len(read)) == (wanted.dtype, wanted.shape, len(wanted))
        for rows in (slice(None), slice(2, 5), slice(5, 100), slice(3, 3), slice(4, 2)):
            assert np.array_equal(read[rows], wanted[rows])
            assert read[rows].shape == wanted[rows].shape


def test_a_compressed_shard_is_the_same_file_in_fewer_bytes(objects: LocalObjects) -> None:
    rng = np.random.default_rng(7)
    tensors = {
        "x": rng.standard_normal((4000, 8)).astype(np.float32),
        "x/scale": rng.uniform(1, 2, 4000).astype(np.float32),
    }
    size, digest, _ = store(objects, "s.zst", tensors)
    data = objects.get("s.zst")
    assert (size, digest) == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert size < 0.95 * store(objects, "s", tensors)[0]
    plain, packed = read_shard_header(objects, "s"), read_shard_header(objects, "s.zst")
    assert plain == packed


@pytest.mark.parametrize("key", ["s", "s.zst"])
def test_pieces_of_a_shard_that_cannot_be_closed_leave_nothing(
    objects: LocalObjects, key: str
) -> None:
    writer = ShardWriter(objects, key, [("x", np.float32, (3, 2)), ("y", np.float32, (3,))])
    writer.write(np.zeros((3, 2), np.float32))
    with pytest.raises(AssertionError, match="12 bytes were not written"):
        writer.close()
    writer.abandon()
    assert list(objects.list()) == []


def test_rows_begin_on_a_page(objects: LocalObjects) -> None:
    store(objects, "s", {"x": np.ones((2, 2), np.float32)})
    assert read_shard_header(objects, "s")["x"].start % 4096 == 0


def test_pieces_make_the_same_file_as_the_whole(objects: LocalObjects) -> None:
    rows = np.random.default_rng(2).standard_normal((50, 4)).astype(np.float32)
    whole = store(objects, "whole", {"x": rows})
    writer = ShardWriter(objects, "pieces", [("x", np.float32, (50, 4))])
    for piece in np.split(rows, [1, 1, 9, 30]):
        writer.write(piece)
    assert writer.close() == whole
    assert objects.get("pieces") == objects.get("whole")


def test_size_and_digest_are_those_of_the_file(objects: LocalObjects) -> None:
    size, digest, _ = store(objects, "s", {"x": np.arange(12.0).reshape(3, 4)})
    data = objects.get("s")
    assert (size, digest) == (len(data), xxhash.xxh3_128_hexdigest(data))


def test_a_non_contiguous_array_is_written_in_its_own_order(objects: LocalObjects) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for number, view in enumerate((base.T, base[:, ::2], base[::-1], base[:, 1:3])):
        assert not view.flags.c_contiguous
        store(objects, str(number), {"x": view})
        read = open_tensor(objects, str(number), read_shard_header(objects, str(number))["x"])
        assert np.array_equal(read, view)


def test_a_shard_cannot_be_closed_short_or_long(objects: LocalObjects) -> None:
    for rows in (0, 2, 4):
        writer = ShardWriter(objects, f"s{rows}", [("x", np.float32, (3, 2))])
        writer.write(np.zeros((rows, 2), np.float32))
        with pytest.raises(AssertionError, match=f"s{rows}"):
            writer.close()
        writer.abandon()
    assert list(objects.list()) == []


def test_a_memory_map_is_read_only(objects: LocalObjects) -> None:
    store(objects, "s", {"x": np.ones((2, 2), np.float32)})
    rows = open_tensor(objects, "s", read_shard_header(objects, "s")["x"])
    assert isinstance(rows.base, mmap.mmap)
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 2


def test_a_missing_shard_is_named(objects: LocalObjects) -> None:
    for key in ("attempts/x", "attempts/x.zst"):
        with pytest.raises(CorruptError, match=f"^{key}: is missing"):
            read_shard_header(objects, key)


def test_a_header_longer_than_the_first_read_is_read_whole(objects: LocalObjects) -> None:
    tensors = {f"tensor-with-a-long-name-{n}": np.full(1, n) for n in range(2000)}
    store(objects, "s", tensors)
    header = read_shard_header(objects, "s")
    assert header["tensor-with-a-long-name-0"].start > 1 << 16
    assert open_tensor(objects, "s", header["tensor-with-a-long-name-1999"])[0] == 1999


@pytest.mark.parametrize("length", [0, 7, 8, 100, 4096, 4096 + 31, 4096 + 33])
def test_a_shard_of_another_length_is_refused(objects: LocalObjects, length: int) -> None:
    store(objects, "s", {"x": np.ones((2, 4), np.float32)})
    data = objects.get("s").ljust(5000, b"\0")[:length]
    objects.create("damaged", data)
    with pytest.raises(CorruptError, match="^damaged: "):
        read_shard_header(objects, "damaged")


@examples(150)
@given(st.integers(0, 5000), st.binary(max_size=80), st.booleans())
def test_any_header_is_sound_or_refused(
    tmp_path_factory: pytest.TempPathFactory, claimed: int, body: bytes, honest: bool
) -> None:
    objects = LocalObjects(tmp_path_factory.mktemp("fuzz"))
    objects.create("s", struct.pack("<Q", len(body) if honest else claimed) + body)
    try:
        header = read_shard_header(objects, "s")
    except CorruptError as error:
        assert error.key == "s"
    else:
        assert all(0 <= i.start <= i.stop <= objects.size("s") for i in header.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "int8"])
def test_a_file_contains_the_tensors_that_are_listed_and_no_others(
    objects: LocalObjects, dtype: str
) -> None:
    info = TapInfo((2, 3), dtype)
    specs = tap_tensors("z.0", 5, info)
    assert [name for name, *_ in specs] == ["z.0", "z.0/scale"][: 1 + (dtype == "float8_e4m3")]
    writer = ShardWriter(objects, "k", specs)
    for _, kind, shape in specs:
        writer.write(np.zeros(shape, kind))
    writer.close()
    header = read_shard_header(objects, "k")
    assert contains_exactly(header, specs)
    assert not contains_exactly(header, tap_tensors("z.0", 4, info))
    assert not contains_exactly(header, specs[1:])
    assert not contains_exactly(header, [*specs, ("more", np.int8, ())])
    assert not contains_exactly(header, index_tensors(5))

"""Compressed shards: smaller, exact, readable by other tools, and damage is always noticed."""

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import CorruptError
from spile.core.tensors import as_bytes, build_header, parse_header
from spile.dataset.codec.compression import MAX_FRAME_BYTES, PlaneReader, PlaneWriter
from spile.objects import LocalObjects
from support.marks import examples

Pieces = Sequence[tuple[bytes | memoryview, int]]


def pack(pieces: Pieces, block_bytes: int = 1 << 20) -> bytes:
    out = bytearray()
    writer = PlaneWriter(out.extend, block_bytes)
    for data, itemsize in pieces:
        writer.write(data, itemsize)
    writer.close()
    return bytes(out)


def reader_of(data: bytes) -> PlaneReader:
    return PlaneReader("cold", len(data), lambda start, stop: data[start:stop])


def planes_of(data: bytes, itemsize: int) -> bytes:
    return b"".join(data[byte::itemsize] for byte in range(itemsize))


def seek_table(
    entries: Sequence[tuple[int, int, int]],
    *,
    magic: int = 0x184D2A5E,
    descriptor: int = 0x80,
    end: int = 0x8F92EAB1,
    frames: int | None = None,
    frame_size: int | None = None,
) -> bytes:
    """The layout of the format, written a second time."""
    body = b"".join(struct.pack("<III", *entry) for entry in entries)
    body += struct.pack("<I", len(entries) if frames is None else frames)
    body += struct.pack("<BI", descriptor, end)
    return struct.pack("<II", magic, len(body) if frame_size is None else frame_size) + body


def activations(rows: int) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((rows, 512), np.float32)
    return values.astype(ml_dtypes.bfloat16)


def test_a_cold_file_is_these_bytes() -> None:
    frame = bytes.fromhex("28b52ffd2004210000") + b"acbd"  # one raw block of four bytes
    checksum = xxhash.xxh64_intdigest(b"acbd") & 0xFFFFFFFF
    assert pack([(b"abcd", 2)]) == frame + seek_table([(len(frame), 4, checksum)])
    assert pack([]) == bytes.fromhex("5e2a4d18 09000000 00000000 80 b1ea928f")


@examples(200)
@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(4, 300))
def test_any_range_reads_as_it_was_written(
    draw: st.DataObject, itemsize: int, block_bytes: int
) -> None:
    items = st.binary(max_size=200).map(lambda b: b[: len(b) // itemsize * itemsize] * 3)
    pieces = draw.draw(st.lists(items, max_size=6))
    stream = b"".join(pieces)
    reader = reader_of(pack([(piece, itemsize) for piece in pieces], block_bytes))
    assert reader.size == len(stream)
    assert reader.read(0, len(stream), itemsize) == stream
    offset = st.integers(0, len(stream))
    for start, stop in draw.draw(st.lists(st.tuples(offset, offset).map(sorted), max_size=8)):
        assert reader.read(start, stop, itemsize) == stream[start:stop]


def test_a_shard_of_mixed_tensors_reads_back_from_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "rows": activations(700),
        "none": np.zeros((0, 3), np.float32),
        "norms": rng.standard_normal(999).astype(np.float32),
        "tokens": rng.integers(0, 9, 1001).astype(np.uint8),
    }
    header = build_header((name, a.dtype, a.shape) for name, a in tensors.items())
    objects = LocalObjects(tmp_path)
    stream = objects.stream("cold")
    writer = PlaneWriter(stream.write, 1 << 16)
    writer.write(header, 1)
    for array in tensors.values():
        writer.write(as_bytes(array), array.dtype.itemsize)
    writer.close()
    stream.close()

    reader = PlaneReader("cold", objects.size("cold"), lambda a, b: objects.get_range("cold", a, b))
    infos = parse_header("cold", bytes(reader.read(0, len(header), 1)), reader.size)
    for name, wanted in tensors.items():
        info = infos[name]
        data = reader.read(info.start, info.stop, info.dtype.itemsize)
        assert np.array_equal(np.frombuffer(data, info.dtype).reshape(info.shape), wanted)


def test_activations_shrink_and_more_than_under_plain_zstd() -> None:
    data = as_bytes(activations(4096))
    cold = len(pack([(data, 2)]))
    assert cold < 0.75 * len(data)
    assert cold < 0.95 * len(pack([(data, 1)]))
    assert cold < 0.95 * len(zstandard.ZstdCompressor(level=1).compress(data))


def test_any_zstd_decoder_restores_the_planes() -> None:
    data = bytes(as_bytes(activations(40)))
    cold = pack([(b"header", 1), (data, 2), (data[:800], 4)], block_bytes=10_000)
    blocks = [data[at : at + 10_000] for at in range(0, len(data), 10_000)]
    wanted = b"header" + b"".join(planes_of(b, 2) for b in blocks) + planes_of(data[:800], 4)
    decoder = zstandard.ZstdDecompressor()
    with decoder.stream_reader(cold, read_across_frames=True) as stream:
        assert stream.read() == wanted


def test_blocks_hold_whole_items_and_never_span_calls() -> None:
    cold = pack([(bytes(12), 4), (bytes(20), 4), (b"", 4)], block_bytes=11)
    count = struct.unpack("<I", cold[-9:-5])[0]
    table = struct.unpack(f"<{3 * count}I", cold[-9 - 12 * count : -9])
    assert table[1::3] == (8, 4, 8, 8, 4)


def test_what_cannot_be_blocks_of_items_is_a_mistake_of_the_caller() -> None:
    for data, itemsize, block_bytes in ((b"abc", 2, 8), (b"abcd", 4, 3)):
        with pytest.raises(AssertionError, match="items"):
            pack([(data, itemsize)], block_bytes)
    for block_bytes in (0, MAX_FRAME_BYTES + 1):
        with pytest.raises(AssertionError, match="blocks"):
            PlaneWriter(bytearray().extend, block_bytes)


def test_only_the_frames_needed_are_read_and_the_last_one_only_once() -> None:
    data = bytes(as_bytes(activations(64)))
    cold = pack([(data, 2)], block_bytes=4096)
    asked: list[tuple[int, int]] = []

    def get_range(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return cold[start:stop]

    reader = PlaneReader("cold", len(cold), get_range)
    asked.clear()
    for at in range(8192, 3 * 4096, 64):
        assert reader.read(at, at + 64, 2) == data[at : at + 64]
    assert len(asked) == 1
    assert asked[0][1] - asked[0][0] < 4096
    assert reader.read(3 * 4096 - 10, 4 * 4096 + 10, 2) == data[3 * 4096 - 10 : 4 * 4096 + 10]
    assert len(asked) == 2
    assert asked[1][0] == asked[0][1]
    assert asked[1][1] - asked[1][0] < 2 * 4096


def test_the_frame_kept_is_not_given_to_another_item_size() -> None:
    reader = reader_of(pack([(b"abcdefgh", 2)]))
    assert reader.read(0, 8, 2) == b"abcdefgh"
    assert reader.read(0, 8, 1) == b"acegbdfh"


def test_a_table_longer_than_the_first_read_is_read_whole() -> None:
    data = np.random.default_rng(2).bytes(40_000)
    reader = reader_of(pack([(data, 1)], block_bytes=5))
    assert reader.read(0, len(data), 1) == data
    assert reader.read(31_003, 31_009, 1) == data[31_003:31_009]


def small_file() -> tuple[bytes, bytes]:
    data = bytes(as_bytes(activations(1)))[:600] + b"a" * 300
    return data, pack([(data, 2)], block_bytes=400)


def test_every_flipped_bit_is_noticed_or_harmless() -> None:
    data, cold = small_file()
    noticed = 0
    for at in range(len(cold)):
        for flip in (*(1 << bit for bit in range(8)), 0xFF):
            damaged = bytearray(cold)
            damaged[at] ^= flip
            try:
                reader = reader_of(bytes(damaged))
                if reader.size != len(data):  # as `parse_header` would say
                    noticed += 1
                    continue
                read = b"".join(
                    reader.read(start, min(start + 90, len(data)), 2)
                    for start in range(0, len(data), 90)
                )
                assert read == data
            except CorruptError:
                noticed += 1
    assert noticed > 0.98 * 9 * len(cold)


def test_a_full_read_of_any_size_notices_every_flipped_byte() -> None:
    data, cold = small_file()
    for at in range(len(cold)):
        damaged = bytearray(cold)
        damaged[at] ^= 0xFF
        try:
            reader = reader_of(bytes(damaged))
            assert reader.read(0, reader.size, 2) == data
        except CorruptError as error:
            assert error.key == "cold"


def test_every_truncation_and_any_extension_is_refused() -> None:
    _, cold = small_file()
    for length in range(len(cold)):
        with pytest.raises(CorruptError, match="^cold: "):
            reader_of(cold[:length])
        with pytest.raises(CorruptError, match="^cold: "):
            reader_of(cold[len(cold) - length :])
    for longer in (cold + b"\0", b"\0" + cold, cold + cold):
        with pytest.raises(CorruptError, match="^cold: "):
            reader_of(longer)


def test_an_object_shorter_than_it_is_said_to_be_is_refused() -> None:
    data, cold = small_file()
    with pytest.raises(CorruptError, match="^cold: gave"):
        PlaneReader("cold", len(cold) + 5, lambda start, stop: cold[start:stop])
    calls = iter([cold, b"short"])
    reader = PlaneReader("cold", len(cold), lambda start, stop: next(calls)[start:stop])
    with pytest.raises(CorruptError, match="^cold: gave"):
        reader.read(0, len(data), 2)


def test_a_range_beyond_the_stream_is_refused() -> None:
    data, cold = small_file()
    for start, stop in ((0, len(data) + 1), (-1, 4), (9, 8), (len(data) + 1, len(data) + 1)):
        with pytest.raises(CorruptError, match="^cold: holds 900 bytes"):
            reader_of(cold).read(start, stop, 2)


def test_a_frame_of_other_items_is_refused() -> None:
    with pytest.raises(CorruptError, match="^cold: frame 1 is not of items of 4 bytes"):
        reader_of(pack([(bytes(8), 4), (bytes(6), 2)])).read(0, 14, 4)


FRAME = zstandard.ZstdCompressor().compress(b"abcd")
SUM = xxhash.xxh64_intdigest(b"abcd") & 0xFFFFFFFF
SIZE = len(FRAME)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (seek_table([(SIZE, 4, SUM)], end=0x8F92EAB2), "does not end in"),
        (seek_table([(SIZE, 4, SUM)], magic=0x184D2A50), "does not begin"),
        (seek_table([(SIZE, 4, SUM)], frame_size=20), "does not begin"),
        (seek_table([(SIZE, 4, SUM)], frames=0), "does not begin"),
        (seek_table([(SIZE, 4, SUM)], frames=2), "does not begin"),
        (seek_table([(SIZE, 4, SUM)], frames=3), "cannot hold 3 frames"),
        (seek_table([(SIZE, 4, SUM)], frames=0xFFFFFFFF), "cannot hold 4294967295 frames"),
        (seek_table([(SIZE, 4, SUM)], descriptor=0x84), "unknown kind"),
        (seek_table([(SIZE, 4, SUM)], descriptor=0xC0), "unknown kind"),
        (seek_table([(SIZE, 4, SUM)], descriptor=0), "unchecked"),
        (seek_table([(SIZE, 0, SUM)]), "empty or above"),
        (seek_table([(SIZE, MAX_FRAME_BYTES + 1, SUM)]), "empty or above"),
        (seek_table([(SIZE, 0xFFFFFFFF, SUM)]), "empty or above"),
        (seek_table([(SIZE, MAX_FRAME_BYTES, SUM)]), "zstd cannot have made"),
        (seek_table([(0, 4, SUM), (SIZE, 4, SUM)]), "zstd cannot have made"),
        (seek_table([(0xFFFFFFFF, 4, SUM)]), "zstd cannot have made"),
        (seek_table([(0xFFFFFFFF, 1 << 26, SUM)] * 2), "zstd cannot have made"),
        (seek_table([(SIZE - 1, 4, SUM)]), "its frames end at"),
        (seek_table([(SIZE, 4, SUM), (SIZE, 4, SUM)]), "its frames end at"),
        (seek_table([(1 << 26, 1 << 26, SUM)] * 64), "its frames end at"),
        (seek_table([]), "its frames end at"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_seek_table_is_refused_without_allocating(table: bytes, reason: str) -> None:
    assert reader_of(FRAME + seek_table([(SIZE, 4, SUM)])).read(0, 4, 1) == b"abcd"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=f"^cold: .*{reason}"):
            reader_of(FRAME + table)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_a_huge_object_cannot_ask_for_a_huge_table() -> None:
    table = seek_table([], frames=0xFFFFFFFF)
    asked: list[int] = []

    def get_range(start: int, stop: int) -> bytes:
        asked.append(stop - start)
        return table.rjust(stop - start, b"\0")[-(stop - start) :]

    with pytest.raises(CorruptError, match="^cold: cannot hold 4294967295 frames"):
        PlaneReader("cold", 1 << 40, get_range)
    assert asked == [1 << 16]


@pytest.mark.parametrize(
    ("frame", "claimed", "checksum", "reason"),
    [
        (FRAME, 4, SUM ^ 1, "does not match its checksum"),
        (FRAME, 3, SUM, "does not decompress"),
        (FRAME, 5, SUM, "does not decompress"),
        (FRAME[:-1] + b"e", 4, SUM, "does not"),
        (b"\0" + FRAME[1:], 4, SUM, "does not decompress"),
        (FRAME + b"tail", 4, SUM, "does not decompress"),
        (FRAME + FRAME, 4, SUM, "does not decompress"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_frame_that_is_not_what_the_table_says_is_refused(
    frame: bytes, claimed: int, checksum: int, reason: str
) -> None:
    reader = reader_of(frame + seek_table([(len(frame), claimed, checksum)]))
    for _ in range(2):
        with pytest.raises(CorruptError, match=f"^cold: frame 0 {reason}"):
            reader.read(0, 1, 1)


@examples(300)
@given(
    st.lists(
        st.tuples(
            st.just(FRAME) | st.binary(max_size=20) | st.binary(max_size=12).map(FRAME[:5].__add__),
            st.just(4) | st.integers(0, 80) | st.integers(0, 0xFFFFFFFF),
            st.just(SUM) | st.integers(0, 0xFFFFFFFF),
        ),
        max_size=4,
    ),
    st.integers(-1, 1) | st.just(0),
)
def test_any_file_is_sound_or_refused(frames: list[tuple[bytes, int, int]], lie: int) -> None:
    entries = [(max(0, len(frame) + lie), size, checksum) for frame, size, checksum in frames]
    try:
        reader = reader_of(b"".join(frame for frame, _, _ in frames) + seek_table(entries))
        assert reader.read(0, reader.size, 1) == b"abcd" * len(frames)
    except CorruptError as error:
        assert error.key == "cold"

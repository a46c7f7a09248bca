"""Cold shards: byte planes compressed by zstd, lossless, readable at any offset.

The bytes of floats compress badly when interleaved: exponents repeat, mantissas are noise. Each
block of a stream is therefore split into planes (all first bytes of its items, then all second
bytes, ...) and becomes one zstd frame. The file ends in the seek table of zstd's seekable format
(0.1.0, in zstd's `contrib/seekable_format`), which is a frame that decoders skip: any zstd tool
restores the planes.

The item size of a block is not stored. It follows from the safetensors header, which itself is
written with item size 1. A seek table is untrusted data, and is checked before anything is
allocated. Nothing in the format protects the table as a whole, so compare `PlaneReader.size` with
the size in that header (as `parse_header` does): a damaged size would shift everything after it.
"""

import importlib
import struct
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from spile.core.errors import CorruptError

BLOCK_BYTES = 1 << 20  # decoded by the smallest read
MAX_FRAME_BYTES = 64 << 20  # of one block, so that a hostile frame cannot require more
MAX_FRAMES = 1 << 24  # 16 TiB in blocks of the usual size; zstd's own limit is 1 << 27
_FIRST_READ = 1 << 16  # holds the table of about 5 GiB, so that one request usually suffices

_HEAD = struct.Struct("<II")  # magic number, bytes that follow
_FOOTER = struct.Struct("<IBI")  # frames, descriptor, magic number
_ENTRY_BYTES = 12  # compressed size, decompressed size, checksum
_SKIPPABLE_MAGIC, _SEEKABLE_MAGIC = 0x184D2A5E, 0x8F92EAB1
_CHECKSUMS, _RESERVED = 0x80, 0x7C  # bits of the descriptor

_Bytes = npt.NDArray[np.uint8]


@cache
def _zstd() -> Any:
    """Return the codec. Level 1: on noise, higher levels are slower and worse. A heavy import."""
    return importlib.import_module("pyarrow").Codec("zstd", compression_level=1)


class PlaneWriter:
    """Compresses the data written to it; `close` appends the seek table."""

    def __init__(
        self, write: Callable[[bytes | memoryview], None], block_bytes: int = BLOCK_BYTES
    ) -> None:
        if not 0 < block_bytes <= MAX_FRAME_BYTES:
            raise AssertionError(f"blocks of {block_bytes} bytes")
        self._write = write
        self._block_bytes = block_bytes
        self._table = bytearray()

    def write(self, data: bytes | memoryview, itemsize: int) -> None:
        """Write whole items. Each call starts a new block, so calls should be large."""
        raw = np.frombuffer(data, np.uint8)
        step = self._block_bytes // itemsize * itemsize
        if not step or raw.size % itemsize:
            raise AssertionError(f"{raw.size} bytes as items of {itemsize}")
        for start in range(0, raw.size, step):
            if len(self._table) == MAX_FRAMES * _ENTRY_BYTES:
                raise AssertionError(f"more than {MAX_FRAMES} blocks")
            planes = _split(raw[start : start + step], itemsize)
            frame: bytes = _zstd().compress(planes, asbytes=True)
            self._write(frame)
            self._table += struct.pack("<III", len(frame), planes.size, _checksum(planes))

    def close(self) -> None:
        """Write the seek table."""
        head = _HEAD.pack(_SKIPPABLE_MAGIC, len(self._table) + _FOOTER.size)
        frames = len(self._table) // _ENTRY_BYTES
        self._write(head + self._table + _FOOTER.pack(frames, _CHECKSUMS, _SEEKABLE_MAGIC))


class PlaneReader:
    """Random access to the original stream; reads only the frames it needs.

    Attributes:
        size: bytes in the uncompressed stream.
    """

    def __init__(
        self, where: str, size: int, get_range: Callable[[int, int], bytes | memoryview]
    ) -> None:
        """Read and check the seek table of a compressed object of `size` bytes."""
        self._where = where
        self._get_range = get_range
        table = self._read_table(size)
        packed, plain = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        if np.any((plain == 0) | (plain > MAX_FRAME_BYTES)):
            raise CorruptError(where, f"a frame is empty or above {MAX_FRAME_BYTES} bytes")
        # A zstd block takes 4 bytes or more and gives 128 KiB or less; expansion is bounded, too.
        if np.any((plain > (packed - 6) << 15) | (packed > plain + (plain >> 8) + 64)):
            raise CorruptError(where, "a frame has a size that zstd cannot have made")
        self._packed_at, self._plain_at = _offsets(packed), _offsets(plain)
        self._checksums = table[:, 2]
        table_at = size - _table_bytes(len(table))
        if self._packed_at[-1] != table_at:
            raise CorruptError(where, f"its frames end at {table_at}, not as its table says")
        self.size = int(self._plain_at[-1])
        # The last frame read, by index and item size. One tuple, so that threads may share it.
        self._last: tuple[int, int, _Bytes] = (-1, 0, np.empty(0, np.uint8))

    def read(self, start: int, stop: int, itemsize: int) -> memoryview:
        """Return bytes `start` to `stop` of the original stream, all written with that item size.

        Raises:
            CorruptError: if the stream does not reach that far, or a frame is not what was written.
        """
        if not 0 <= start <= stop <= self.size:
            raise CorruptError(self._where, f"holds {self.size} bytes, not {start} to {stop}")
        # Pages are touched as frames are decoded, so a table that promises too much costs nothing.
        out = np.empty(stop - start, np.uint8)
        if start == stop:
            return out.data
        begin = int(self._plain_at.searchsorted(start, "right")) - 1
        end = int(self._plain_at.searchsorted(stop, "left"))
        rest, skip = out, start - int(self._plain_at[begin])
        index, known, block = self._last
        if (index, known) == (begin, itemsize):
            rest, skip, begin = _fill(rest, block[skip:]), 0, begin + 1
            if begin == end:
                return out.data
        bounds: list[int] = self._packed_at[begin : end + 1].tolist()
        packed = memoryview(self._get(bounds[0], bounds[-1]))
        for index, (at, to) in enumerate(pairwise(bounds), begin):
            block = self._decode(index, packed[at - bounds[0] : to - bounds[0]], itemsize)
            rest, skip = _fill(rest, block[skip:]), 0
        self._last = (end - 1, itemsize, block)
        return out.data

    def _decode(self, index: int, frame: memoryview, itemsize: int) -> _Bytes:
        size = int(self._plain_at[index + 1] - self._plain_at[index])
        if size % itemsize:
            raise CorruptError(self._where, f"frame {index} is not of items of {itemsize} bytes")
        try:
            # This also fails if the frame holds fewer bytes than the table says.
            planes = np.frombuffer(_zstd().decompress(frame, size), np.uint8)
        except OSError as error:
            raise CorruptError(self._where, f"frame {index} does not decompress") from error
        if _checksum(planes) != self._checksums[index]:
            raise CorruptError(self._where, f"frame {index} does not match its checksum")
        return _join(planes, itemsize)

    def _read_table(self, size: int) -> npt.NDArray[np.uint32]:
        if size < _table_bytes(0):
            raise CorruptError(self._where, "too short to hold a zstd seek table")
        tail = self._get(max(0, size - _FIRST_READ), size)
        frames, descriptor, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
        if magic != _SEEKABLE_MAGIC:
            raise CorruptError(self._where, "does not end in a zstd seek table (truncated?)")
        if descriptor & (_RESERVED | _CHECKSUMS) != _CHECKSUMS:
            raise CorruptError(self._where, "its seek table is of an unknown kind or unchecked")
        length = _table_bytes(frames)
        if frames > MAX_FRAMES or length > size:
            raise CorruptError(self._where, f"cannot hold {frames} frames (truncated?)")
        tail = tail[-length:] if length <= len(tail) else self._get(size - length, size)
        if _HEAD.unpack_from(tail) != (_SKIPPABLE_MAGIC, length - _HEAD.size):
            raise CorruptError(self._where, "its seek table does not begin where it should")
        return np.frombuffer(tail, "<u4", 3 * frames, _HEAD.size).reshape(frames, 3)

    def _get(self, start: int, stop: int) -> bytes | memoryview:
        data = self._get_range(start, stop)
        if len(data) != stop - start:
            raise CorruptError(self._where, f"gave {len(data)} of {stop - start} bytes")
        return data


def _table_bytes(frames: int) -> int:
    return _HEAD.size + frames * _ENTRY_BYTES + _FOOTER.size


def _offsets(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _checksum(planes: _Bytes) -> int:
    return xxhash.xxh64_intdigest(planes.data) & 0xFFFFFFFF


def _fill(out: _Bytes, block: _Bytes) -> _Bytes:
    """Copy what fits; return the part left to fill."""
    count = min(out.size, block.size)
    out[:count] = block[:count]
    return out[count:]


# Plane by plane, since numpy copies several times faster than it transposes.
def _split(raw: _Bytes, itemsize: int) -> _Bytes:
    planes = np.empty((itemsize, raw.size // itemsize), np.uint8)
    for byte in range(itemsize):
        planes[byte] = raw[byte::itemsize]
    return planes.reshape(-1)


def _join(planes: _Bytes, itemsize: int) -> _Bytes:
    raw = np.empty_like(planes)
    for byte, plane in enumerate(planes.reshape(itemsize, -1)):
        raw[byte::itemsize] = plane
    return raw

"""Columns of small values in one checked file: the units of a table, the records of a group.

Such a file is safetensors, like everything else, and the record that names it has its size and
hash. It is memory-mapped on a local disk, and fetched whole from anywhere else. A column of texts
is two tensors: `NAME` holds their bytes, `ends/NAME` the end of each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from spile.core.errors import CorruptError
from spile.core.tensors import as_bytes, build_header, map_tensors, parse_header
from spile.dataset.format import is_count, is_name
from spile.objects import Objects

Columns = Mapping[str, np.ndarray]
Ints = npt.NDArray[np.int64]

_MOST = 1 << 56  # as `format.is_count`
_FIRST_PRINTABLE, _LAST_PRINTABLE = ord(" "), ord("~")
_HEAD = 1 << 20  # more than any of our headers


@dataclass(frozen=True)
class ColumnFile:
    """A file of columns, as a record names it."""

    key: str
    bytes: int
    digest: str  # XXH3 of 128 bits

    @classmethod
    def from_json(cls, value: Mapping[str, Any], prefix: str) -> "ColumnFile":
        """Rebuild a reference to a file under a prefix; raise ValueError if it is not one."""
        found = cls(value["key"], value["bytes"], value["digest"])
        if not is_name(found.key) or not found.key.startswith(prefix) or not is_count(found.bytes):
            raise ValueError(f"not a file of columns: {value!r}")
        if not is_name(found.digest):
            raise ValueError(f"not a file of columns: {value!r}")
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def column_file(key: str, data: bytes) -> ColumnFile:
    """Return the reference to a file with these bytes."""
    return ColumnFile(key, len(data), xxhash.xxh3_128_hexdigest(data))


def encode_columns(columns: Columns) -> bytes:
    """Return the bytes of a file of columns, which follow from the columns alone.

    The widest come first, so that all are aligned; of one width, they come by name.
    """
    ordered = dict(sorted(columns.items(), key=lambda item: (-item[1].itemsize, item[0])))
    header = build_header((name, array.dtype, array.shape) for name, array in ordered.items())
    return b"".join([header, *(as_bytes(array) for array in ordered.values())])


def named_by_content(prefix: str, columns: Columns) -> tuple[ColumnFile, bytes]:
    """Return the file of columns, and its bytes; its name follows from its content."""
    data = encode_columns(columns)
    return column_file(f"{prefix}{xxhash.xxh3_128_hexdigest(data)}.safetensors", data), data


def read_columns(objects: Objects, file: ColumnFile) -> dict[str, np.ndarray]:
    """Return the columns of a file.

    Raises:
        CorruptError: if it is missing, or not the file that was written.
    """
    try:
        if objects.size(file.key) != file.bytes:
            raise CorruptError(file.key, f"does not have the {file.bytes} bytes that were written")
        path = objects.local_path(file.key)
        if path is None:
            data = objects.get(file.key)
            if xxhash.xxh3_128_hexdigest(data) == file.digest:
                return columns_in(file.key, data)
        else:
            with path.open("rb") as opened:
                infos = parse_header(file.key, opened.read(min(_HEAD, file.bytes)), file.bytes)
            columns = map_tensors(path, infos)
            mapped: Any = next((a.base for a in columns.values() if a.size), None)
            whole = path.read_bytes() if mapped is None else mapped
            if xxhash.xxh3_128_hexdigest(whole) == file.digest:
                return columns
    except FileNotFoundError:
        raise CorruptError(file.key, "is missing") from None
    raise CorruptError(file.key, "checksum does not match (damaged, or another file in its place)")


def columns_in(key: str, data: bytes) -> dict[str, np.ndarray]:
    """Return the columns in the bytes of a file."""
    return {
        name: np.frombuffer(data, info.dtype, (info.stop - info.start) // info.dtype.itemsize,
                            info.start).reshape(info.shape)
        for name, info in parse_header(key, data, len(data)).items()
    }  # fmt: skip


# -- values ----------------------------------------------------------------------------------


def ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def ends_of(counts: Iterable[int]) -> Ints:
    """Return where each run of values ends, from their lengths."""
    return np.cumsum(ints(counts), dtype=np.int64)


def text_columns(name: str, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return a column of texts."""
    data = [text.encode() for text in texts]
    return {
        name: np.frombuffer(b"".join(data), np.uint8),
        f"ends/{name}": ends_of(map(len, data)),
    }


def run_of(ends: Ints, at: int) -> slice:
    """Return the place of a run of values, given where runs end."""
    return slice(int(ends[at - 1]) if at else 0, int(ends[at]))


def text_at(columns: Columns, name: str, at: int) -> str:
    """Return one text of a column."""
    return columns[name][run_of(columns[f"ends/{name}"], at)].tobytes().decode()


def texts_at(columns: Columns, name: str, run: slice) -> list[str]:
    """Return consecutive texts of a column."""
    ends = columns[f"ends/{name}"]
    begin = int(ends[run.start - 1]) if run.start else 0
    bounds = [0, *(ends[run] - begin).tolist()]
    data = columns[name][begin : begin + bounds[-1]].tobytes()
    return [data[a:b].decode() for a, b in zip(bounds, bounds[1:], strict=False)]


# -- checks of untrusted columns ---------------------------------------------------------------


def check_counts(key: str, columns: Columns, names: Iterable[str], length: int) -> None:
    """Refuse a column that is missing, or that holds anything but counts."""
    for name in names:
        found = columns.get(name)
        if found is None or found.dtype != np.int64 or found.shape != (length,):
            raise CorruptError(key, f"does not hold {name} of {length}")
        if length and not (int(found.min()) >= 0 and int(found.max()) < _MOST):
            raise CorruptError(key, f"holds a {name} that is not a count")


def check_ends(key: str, columns: Columns, name: str, length: int) -> int:
    """Refuse ends of runs that do not ascend; return the end of the last."""
    check_counts(key, columns, [name], length)
    ends = columns[name]
    if length and (np.diff(ends) < 0).any():
        raise CorruptError(key, f"{name} does not ascend")
    return int(ends[-1]) if length else 0


def check_texts(key: str, columns: Columns, name: str, length: int) -> None:
    """Refuse a column that does not hold this number of printable texts."""
    stop = check_ends(key, columns, f"ends/{name}", length)
    found = columns.get(name)
    if found is None or found.dtype != np.uint8 or found.shape != (stop,):
        raise CorruptError(key, f"does not hold {name} of {length}")
    # (Names and hashes are ASCII, which is checked at once. Reasons may be any printable text.)
    if not ((found >= _FIRST_PRINTABLE) & (found <= _LAST_PRINTABLE)).all():
        try:
            sound = all(map(is_name, texts_at(columns, name, slice(0, length))))
        except UnicodeDecodeError:
            sound = False
        if not sound:
            raise CorruptError(key, f"{name} holds a value that is not text")

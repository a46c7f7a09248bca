"""Rows of many files are mapped as one array, wherever tensors begin in their files."""

import gc
from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import CorruptError
from spile.core.tensors import TensorInfo
from spile.dataset.read.rows import MappedFile, MappedRows, map_rows

U8 = np.dtype(np.uint8)


def written(
    folder: Path, counts: list[int], row_bytes: int, start: int
) -> tuple[list[MappedFile], bytes]:
    """Files of random rows, each after `start` other bytes and before some more."""
    rng = np.random.default_rng(row_bytes)
    parts: list[MappedFile] = []
    rows, first = b"", 0
    for number, count in enumerate(counts):
        data = rng.bytes(count * row_bytes)
        path = folder / str(number)
        path.write_bytes(b"x" * start + data + b"y" * 100)
        info = TensorInfo("t", U8, (count, row_bytes), start, start + len(data))
        parts.append((path, info, first))
        rows, first = rows + data, first + count
    return parts, rows


@pytest.mark.parametrize(
    ("row_bytes", "start"),
    [(1, 4096), (2, 4098), (6, 4096), (6, 14), (1152, 4096), (8192, 4096), (12288, 8192),
     (4095, 4096), (4097, 5), (8, 16), (48, 32)],
)  # fmt: skip
def test_rows_of_all_files_are_found(tmp_path: Path, row_bytes: int, start: int) -> None:
    parts, rows = written(tmp_path, [5, 1, 700, 33], row_bytes, start)
    mapped = map_rows(parts, row_bytes)
    assert mapped is not None
    whole = np.frombuffer(rows, np.uint8).reshape(-1, row_bytes)
    every = np.arange(len(whole))
    mapped.expect(mapped.numbers(every), [0, 3, len(whole)])
    assert np.array_equal(np.take(mapped.table, mapped.numbers(every), axis=0), whole)
    some = np.array([0, 4, 5, 6, 100, 705, 706, 738])
    assert np.array_equal(mapped.table[mapped.numbers(some)], whole[some])
    with pytest.raises(ValueError, match="read-only"):
        mapped.table[0] = 0


def test_what_lies_askew_is_not_mapped(tmp_path: Path) -> None:
    parts, _ = written(tmp_path, [5, 6], 8, 4)
    assert map_rows(parts, 8) is None
    assert map_rows([], 8) is None


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    parts, _ = written(tmp_path, [5, 6], 4096, 4096)
    parts[1][0].write_bytes(b"x" * 5000)
    with pytest.raises(CorruptError, match="shorter"):
        map_rows(parts, 4096)


def test_addresses_are_given_back(tmp_path: Path) -> None:
    def maps() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().split())

    parts, _ = written(tmp_path, [5, 6], 4096, 4096)
    mapped = MappedRows(parts, 4096)
    view = mapped.table[:3]
    assert maps() == 2
    del mapped
    gc.collect()
    assert maps() == 2, "somebody still looks at them"
    del view
    gc.collect()
    assert maps() == 0

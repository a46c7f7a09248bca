"""Footers that would crash Arrow are refused; others are checked once."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from security.parsers import FINDS
from spile.core.errors import InputError
from spile.corpus.formats import parquet_footer
from spile.corpus.formats.parquet import ParquetFormat
from spile.corpus.formats.parquet_footer import checked_metadata
from support.texts import groups_of

ABORTS = FINDS / "parquet cells" / "histogram-of-levels"


def written(path: Path, columns: int = 2) -> Path:
    table = pa.table({f"column {n}": ["a", "b", "c"] for n in range(columns)})
    pq.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.parametrize("columns", [1, 900], ids=["short", "longer than what is read at first"])
def test_a_footer_is_what_arrow_reads(columns: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", columns)
    assert checked_metadata(path).equals(pq.read_metadata(path))


def test_a_footer_that_makes_arrow_abort_is_refused() -> None:
    said = r"histogram-of-levels: cannot read Parquet \(its footer takes down the process.*signal 6"
    for _ in range(2):
        with pytest.raises(InputError, match=said):
            groups_of(ABORTS, ParquetFormat)


def test_after_one_that_aborts_others_are_read(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        checked_metadata(ABORTS)
    assert checked_metadata(written(tmp_path / "a.parquet", 3)).num_rows == 3


def test_a_process_that_has_ended_meanwhile_is_started_again(tmp_path: Path) -> None:
    checked_metadata(written(tmp_path / "a.parquet", 4))
    process = parquet_footer._checker._process
    assert process
    os.kill(process.pid, 9)
    assert checked_metadata(written(tmp_path / "b.parquet", 5)).num_columns == 5


def test_the_same_footer_is_gone_through_once(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", 6)
    checked_metadata(path)
    parquet_footer._checker.close()
    assert checked_metadata(path).num_columns == 6
    assert parquet_footer._checker._process is None


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" * 9, b"\xff\xff\xff\x7fPAR1"])
def test_what_has_no_footer_is_refused_by_arrow(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    with pytest.raises(InputError, match="a.parquet: cannot read Parquet"):
        groups_of(path, ParquetFormat)

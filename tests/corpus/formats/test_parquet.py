"""Parquet: any string type, the right column, only the needed row groups; damage refused."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spile.core.errors import DataError, InputError
from spile.core.units import Span
from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.reader import CorpusReader
from support.texts import NOT_UTF8, read, units_of, write_parquet

KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parquet_texts_come_from_any_type_of_string(kind: pa.DataType, tmp_path: Path) -> None:
    texts = ["one", "zwei 🌳", None, "", "vier\nlines", " \t"]
    values = [t.encode() if t is not None and "binary" in str(kind) else t for t in texts]
    columns = {"n": pa.array(range(6)), "text": pa.array(values, kind)}
    path = write_parquet(tmp_path / "a.parquet", columns)
    found = read(path)
    assert found.texts == ["one", "zwei 🌳", "vier\nlines"]
    assert found.ordinals == [0, 1, 4]
    assert found.skipped == Counter({"null": 1, "empty": 1, "white space only": 1})


def test_parquet_strings_that_are_not_utf8_are_counted_not_believed(tmp_path: Path) -> None:
    raw = pa.array([b"fine", NOT_UTF8, b"fine too"], pa.binary())
    liar = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    found = read(write_parquet(tmp_path / "a.parquet", {"text": liar}))
    assert (found.texts, found.ordinals) == (["fine", "fine too"], [0, 2])
    assert found.skipped == Counter({"not UTF-8": 1})


@pytest.mark.parametrize(
    ("columns", "asked", "chosen"),
    [(["body", "text"], None, "text"), (["body"], None, "body"),
     (["body", "text"], "body", "body"), (["a.b"], "a.b", "a.b")],
)  # fmt: skip
def test_the_text_column_is_the_named_one_or_text_or_the_only_one(
    columns: list[str], asked: str | None, chosen: str, tmp_path: Path
) -> None:
    table = {name: pa.array([f"{name} 0", f"{name} 1"]) for name in columns}
    path = write_parquet(tmp_path / "a.parquet", {"id": pa.array([1, 2]), **table})
    assert read(path, asked).texts == [f"{chosen} 0", f"{chosen} 1"]


@pytest.mark.parametrize(
    ("columns", "asked", "said"),
    [(["a", "b"], None, ["--text-column", "a, b"]), ([], None, ["--tokens-column", "id: int64"]),
     (["a", "b"], "c", ["'c'", "a, b"]), (["a"], "id", ["'id'", "not a column of strings"])],
)  # fmt: skip
def test_an_unclear_text_column_is_refused_with_the_files_columns(
    columns: list[str], asked: str | None, said: list[str], tmp_path: Path
) -> None:
    table = {"id": pa.array([1]), **{name: pa.array(["x"]) for name in columns}}
    path = write_parquet(tmp_path / "a.parquet", table)
    with pytest.raises(InputError) as caught:
        read(path, asked)
    assert all(part in str(caught.value) for part in [str(path), *said])


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_parquet_file_is_refused_in_one_line(keep: int, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": pa.array(["x" * 50] * 20)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="is it whole") as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_pages_that_do_not_decode_are_refused_in_one_line(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": pa.array(["x" * 50, "y" * 50])})
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56
    path.write_bytes(data)
    with pytest.raises(InputError, match="cannot read Parquet") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_that_lost_rows_since_it_was_cut_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": pa.array(list("abcdef"))})
    files = find_files(str(path))
    (unit,) = units_of(files)
    write_parquet(path, {"text": pa.array(list("abcd"))})
    with pytest.raises(DataError, match="changed"):
        CorpusReader(files).read(unit.spans, 0)


def test_a_span_is_read_from_the_row_groups_that_hold_it(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(2500)]
    path = write_parquet(tmp_path / "a.parquet", {"text": pa.array(texts)}, rows=1100)
    reader = CorpusReader(find_files(str(path)))
    for first, count in [(0, 2500), (0, 1), (1099, 2), (1100, 1100), (1023, 3), (2499, 1)]:
        found = reader.read((Span(0, first, count),), first)
        assert found.texts == texts[first : first + count]
        assert found.ordinals == list(range(first, first + count))


def test_values_over_the_limit_are_counted_one_by_one(tmp_path: Path) -> None:
    texts = ["a" * 10, "b" * 11, None, "ä" * 5, "ä" * 6, ""]
    path = write_parquet(tmp_path / "a.parquet", {"text": pa.array(texts)}, rows=3)
    files = find_files(str(path))
    reader = CorpusReader(files, ReadOptions(max_doc_bytes=10))
    (unit,) = units_of(files)
    found = reader.read(unit.spans, 0)
    assert found.texts == ["a" * 10, "ä" * 5]
    assert found.skipped == Counter({"over --max-doc-bytes": 2, "null": 1, "empty": 1})


@pytest.mark.parametrize("keep", [(), ("n",)])
def test_a_row_group_that_is_one_large_value_is_not_read(
    keep: tuple[str, ...], tmp_path: Path
) -> None:
    """The size suffices: damage inside the value is not noticed."""
    texts = pa.array(["one", "x" * (8 << 20), "three"])
    columns = {"text": texts, "n": pa.array([1, 2, 3])}
    path = write_parquet(tmp_path / "a.parquet", columns, rows=1)
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    data = bytearray(path.read_bytes())
    data[place : place + 200] = bytes(200)
    path.write_bytes(data)
    files = find_files(str(path))
    options = ReadOptions(max_doc_bytes=100, keep=keep)
    found = CorpusReader(files, options).read((Span(0, 0, 3),), 0)
    assert not keep or found.kept("n") == [1, 2, 3]
    assert (found.texts, found.ordinals) == (["one", "three"], [0, 2])
    assert found.skipped == Counter({"over --max-doc-bytes": 1})

"""CSV and TSV: records and values equal those of `csv.reader`, wherever a file is cut."""

import csv
import gzip
import io
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import DataError, InputError
from spile.core.expressions import DocumentFilter
from spile.corpus.chats.rows import Pairs
from spile.corpus.documents import Documents
from spile.corpus.files import find_files
from spile.corpus.formats import byte_files, contract
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.formats.csv import CsvError, fields, records, typed
from spile.corpus.reader import CorpusReader
from support.marks import examples
from support.texts import read, units_of

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}
VALUES = st.text("ab ,;\t\"\n\r'é🌳", max_size=8).filter(lambda value: "\r" not in value)
ROWS = st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=9)


def written(rows: list[tuple[str, ...]], **options: Any) -> bytes:
    sink = io.StringIO(newline="")
    csv.writer(sink, **options).writerows(rows)
    return sink.getvalue().encode()


def cut_at(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@given(
    ROWS, st.sampled_from([",", "\t"]), st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), st.integers(1, 200), st.integers(1, 40),
    st.booleans(),
)  # fmt: skip
@examples(150)
def test_every_record_is_in_one_unit_with_the_values_that_were_written(
    rows: list[tuple[str, ...]], delimiter: str, end: str, quoting: Any, size: int, chunk: int,
    last: bool,
) -> None:  # fmt: skip
    data = written([("n", "text", "other"), *rows], delimiter=delimiter, lineterminator=end,
                   quoting=quoting)  # fmt: skip
    data = data if last else data.removesuffix(end.encode())
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_files, "CHUNK", chunk)
        patch.setattr(contract, "_READ_SIZE", chunk + 1)
        path = Path(name) / ("a.csv" if delimiter == "," else "a.tsv")
        path.write_bytes(data)
        files = find_files(str(path))
        units = units_of(files, size)
        with closing(CorpusReader(files, ReadOptions(keep=("n", "other")))) as reader:
            found = [document for unit in units for document in
                     reader.read(unit.spans, unit.first_doc).every]  # fmt: skip
    assert [document.ordinal for document in found] == list(range(len(rows)))
    for document, row in zip(found, rows, strict=True):
        assert document.text == (row[1] if row[1].strip() else "")
        assert document.columns == {"n": row[0] or None, "other": row[2] or None}
    if size == 1:
        assert len(units) == len(rows)


@given(st.text('a,"\n', max_size=24), st.lists(st.integers(0, 99), max_size=4))
@examples(400)
def test_any_bytes_are_read_as_by_the_standard_library(text: str, places: list[int]) -> None:
    """Refuse what `csv.reader` refuses; a quote inside an unquoted field is a character."""
    try:
        wanted = [*csv.reader(io.StringIO(text, newline=""), strict=True)]
    except csv.Error:
        wanted = None
    try:
        pieces = cut_at(text.encode(), places)
        found = [
            fields(record.decode(), ",", 99) if record else []
            for _, record in records(pieces, b",", 1 << 20, 0)
            if record is not None
        ]
    except CsvError:
        found = None
    assert found == wanted


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'a,text\n1,"x"y\n', "line 2: something follows a closing quote; fix or remove"),
        (b'a,text\n1,x\n2,"y\n3,z\n', "line 3: a quote opens a field, and none closes it"),
        (b'a,text\n1,"x\ny"\n1\n', "line 4: its number of fields is 1, and the first line names 2"),
        (b"a,text\n\n1,2,3\n", "line 3: its number of fields is more than 2, and the first line"),
        (b"a;text\n1;2\n", "seem to be separated by ';'; .csv is read with commas"),
        (b"\na,text\n", "the first line must name the columns; its first line names none"),
        (b"a,a,text\n1,2,3\n", "2 columns are called 'a'; rename some"),
        (b"a,text\r1,x\r", "its lines end in CR alone"),
        (b"caf\xe9,text\n1,x\n", "the first line must name the columns; .* is not UTF-8"),
        (b"a,b\n1,2\n", r"which column is the text\? Choose one with --text-column \(a, b\)"),
        (b"a,text" + b"x" * (1 << 20), "its first line is longer than"),
        (b"," * 20_000 + b"text\n", "its first line has more than 16384 fields"),
        (b"\xff\xfea\0,\0t\0e\0x\0t\0\n\0" * 20, "holds UTF-16 text"),
        (b"a,text\n", "the corpus is empty"),
        (b"", "the corpus is empty"),
        (b"\xef\xbb\xbf", "the corpus is empty"),
    ],
)
def test_what_is_no_csv_is_refused_with_its_line(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    with pytest.raises(InputError, match=said) as caught:
        read(path)
    assert "\n" not in str(caught.value) and "a.csv" in str(caught.value)


def test_the_text_is_a_column_that_is_named_or_can_be_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfbody,title\nx,y\n")
    assert read(path, "title").texts == ["y"]
    assert read(path, "body").texts == ["x"], "a byte-order mark is no part of the first name"
    with pytest.raises(InputError, match="no column 'titel', which --text-.* mean 'title'"):
        read(path, "titel")
    path.write_bytes(b",review\n0,good\n1,bad\n")  # as pandas writes its index
    assert read(path).texts == ["good", "bad"]


@pytest.mark.parametrize("ending", COMPRESS)
def test_what_is_left_out_is_counted_and_ordinals_go_on(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.csv{ending}"
    rows = b'id,text\r\n1,"one\r\ntwo"\r\n\r\n3,\r\n4," "\r\n5,\xe9\r\n6,six'
    path.write_bytes(COMPRESS[ending](rows))
    found = read(path)
    assert found.texts == ["one\r\ntwo", "six"] and found.ordinals == [0, 5]
    assert found.skipped == {"empty": 2, "white space only": 1, "not UTF-8": 1}


def read_with(path: Path, options: ReadOptions, reading: Any = None) -> Documents:
    files = find_files(str(path))
    (unit,) = units_of(files, read=options, reading=reading)
    with closing(CorpusReader(files, options, reading=reading)) as reader:
        sampled, _ = reader.sample(0)
        found = reader.read(unit.spans, unit.first_doc)
        assert sampled.texts == found.texts
        return found


def test_a_filter_compares_numbers_with_numbers_and_texts_with_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "text,score,zip,good,best\n"
        "a,10,01234,true,9\n"
        "b,9.5,1234,False,10\n"
        "c,,x,TRUE,\n"
        "d,n/a,,,-1\n"
    )  # fmt: skip
    for condition, texts in {
        "score > 9": "ab",
        "score >= 1e1": "a",
        "score in (10, 11)": "a",
        "score not in (10, 11)": "bd",
        "score is None": "c",
        "score == 'n/a'": "d",
        "zip == '01234'": "a",
        "zip == 1234": "ab",
        "zip in ('01234', 'x')": "ac",
        "good": "ac",
        "good == False": "b",
        "not good": "bd",
        "score > best": "ad",  # as texts, where one is no number
        "best > score": "b",
        "'2' in zip": "ab",
    }.items():
        found = read_with(path, ReadOptions(filter=DocumentFilter(condition)))
        assert "".join(found.texts) == texts, condition


def test_what_is_kept_is_a_number_only_where_that_loses_nothing(tmp_path: Path) -> None:
    for value in ("0", "-7", "1234567890123456789", "0.5", "1e-05", "12.25"):
        assert str(typed(value)) == value and not isinstance(typed(value), str)
    for value in ("", "007", "1.50", "+1", "1e5", "nan", "inf", "9" * 30, "-0", " 1", "1_0", "٣"):
        assert typed(value) == value
    path = tmp_path / "a.csv"
    path.write_text("text,n,code\na,1,007\nb,,1\n")
    found = read_with(path, ReadOptions(keep=("n", "code")))
    assert (found.kept("n"), found.kept("code")) == ([1, None], ["007", 1])


def test_prompts_and_responses_can_be_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('q\ta\nwhy?\t"because\n"\n\tno\n')
    found = read_with(path, ReadOptions(), Pairs("q", "a", "", " ", None))
    assert found.texts == ["why? because\n"] and found.skipped == {"null": 1}


def test_a_record_of_any_size_is_passed_over_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\nfirst\n"' + b'x\n""' * 100_000 + b'"\nlast\n')
    files = find_files(str(path))
    (unit,) = units_of(files)
    with closing(CorpusReader(files, ReadOptions(max_doc_bytes=1000))) as reader:
        found = reader.read(unit.spans, unit.first_doc)
    assert found.texts == ["first", "last"] and found.skipped == {"over --max-doc-bytes": 1}


def test_bytes_that_changed_since_the_file_was_cut_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"n,text\n1,one\n2,two\n")
    files = find_files(str(path))
    (unit,) = units_of(files)
    path.write_bytes(b"n,text\n1,one\n2,TWO\n")
    with closing(CorpusReader(files)) as reader, pytest.raises(DataError, match="changed since"):
        reader.read(unit.spans, unit.first_doc)


def test_csv_beside_other_kinds_is_no_part_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\n")
    (tmp_path / "b.tsv").write_text("text\ntwo\n")
    assert read(tmp_path).texts == ["one", "two"]
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n')
    assert read(tmp_path).texts == ["three"]
    assert read(f"{tmp_path}/*").texts == ["one", "two", "three"]

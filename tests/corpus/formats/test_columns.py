"""Columns: nested ones, ones that differ between files, and very large texts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spile.core.errors import InputError
from spile.core.expressions import DocumentFilter
from spile.corpus.documents import value_at
from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.reader import CorpusReader
from support.texts import read, units_of, write_parquet

HARD = [
    "nul \0 and \x01 within",
    "\u202eright to left\u202c, עברית and العربية in a line",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 flags 🇺🇦🇯🇵, and z̸̡͚a̷l̶g̸o",
    "\u2028 line and \u2029 paragraph, \x85 and \x0b: none of them ends a line",
    "\U0010ffff \ufffe \ufeff in the middle",
]


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "parquet"])
def test_whatever_is_text_is_read_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, {"text": pa.array(HARD)})
    elif kind == "txt":
        path.write_bytes("\n".join(HARD).encode())
    else:
        rows = [{"text": text} for text in HARD]
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    found = read(path)
    assert (found.texts, found.skipped) == (HARD, Counter())


def test_lone_surrogates_are_counted_and_pairs_are_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud800 b"}\n{"text": "\\ud83c\\udf33"}\n{"text": "\\udc00"}\n')
    found = read(path)
    assert (found.ordinals, found.texts) == ([1], ["🌳"])
    assert found.skipped == Counter({"not UTF-8": 2})


ROWS = [{"a": {"b": "one", "n": 1}}, {"a": None}, {"a": {"b": None, "n": 2}}, {"a": {"b": "four"}}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_of_a_nested_column_can_be_the_text(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, *ROWS)
    else:
        write_parquet(path, {"a": pa.array([row["a"] for row in ROWS])})
    found = read(path, "a.b")
    assert (found.ordinals, found.texts) == ([0, 3], ["one", "four"])
    assert found.skipped == Counter({"null": 2})


def test_a_field_can_be_the_text_beside_the_column_that_is_filtered_by(tmp_path: Path) -> None:
    columns = {"a": pa.array([row["a"] for row in ROWS]), "n": pa.array([1, 2, 3, 4])}
    files = find_files(str(write_parquet(tmp_path / "a.parquet", columns)))
    (unit,) = units_of(files, read=ReadOptions("a.b"))
    reader = CorpusReader(files, ReadOptions("a.b", filter=DocumentFilter("n >= 2")))
    assert reader.read(unit.spans, 0).texts == ["four"]


def test_a_key_with_a_dot_in_it_comes_before_a_field() -> None:
    row = {"a.b": "flat", "a": {"b": "nested", "c": {"d": 1}}, "x": "text"}
    wanted = {"a.b": "flat", "a.c.d": 1, "a.c": {"d": 1}, "x.y": None, "none": None}
    assert {name: value_at(row, name) for name in wanted} == wanted


def test_a_nested_column_is_no_text(tmp_path: Path) -> None:
    chats = pa.array([[{"role": "user", "content": "x"}]])
    path = write_parquet(tmp_path / "a.parquet", {"a": pa.array([{"b": "x"}]), "chats": chats})
    with pytest.raises(InputError, match=r"'a' is not .* but struct<b: string> \(those are: a\.b"):
        read(path, "a")
    with pytest.raises(InputError, match=r"but list<.*--messages chats reads its chats"):
        read(path, "chats")


@pytest.mark.parametrize("strings", [[], ["id"], ["id", "title"]])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_of_chats_is_refused_with_the_flag_that_reads_it(
    kind: str, strings: list[str], tmp_path: Path
) -> None:
    chats = pa.array([[{"role": "user", "content": "x"}]])
    table = {"chat": chats, "turns": pa.array([1]), **{n: pa.array(["x"]) for n in strings}}
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, table)
    else:
        with pa.ipc.new_file(path, pa.table(table).schema) as writer:
            writer.write_table(pa.table(table))
    with pytest.raises(InputError, match=r"--text-column .*; --messages chat reads its chats$"):
        units_of(find_files(str(path)))
    if strings:
        assert units_of(find_files(str(path)), read=ReadOptions("id"))[0].num_docs == 1


@pytest.mark.parametrize("other", [pa.array([1, 2]), pa.array([["a"], []]), pa.array([{"x": 1}])])
def test_a_text_column_that_changes_between_files_is_named_with_both(
    other: pa.Array, tmp_path: Path
) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": pa.array(["x"])})
    write_parquet(tmp_path / "b.parquet", {"text": other})
    with pytest.raises(InputError) as caught:
        units_of(find_files(str(tmp_path)))
    for part in (
        tmp_path / "b.parquet",
        f"'text' is {str(other.type)[:4]}",
        "string in",
        "a.parquet",
    ):
        assert str(part) in str(caught.value)


def test_changed_and_missing_columns_are_found_when_the_corpus_is_cut(
    tmp_path: Path,
) -> None:
    text = {"text": pa.array(["x"])}
    write_parquet(tmp_path / "a.parquet", {**text, "score": pa.array([1])})
    write_parquet(tmp_path / "b.parquet", {**text, "score": pa.array([0.5])})
    files = find_files(str(tmp_path))
    by_score = ReadOptions(filter=DocumentFilter("score > 0"))
    assert len(units_of(files, read=by_score)[0].spans) == 2, "numbers are numbers"
    write_parquet(tmp_path / "b.parquet", {**text, "score": pa.array(["high"])})
    with pytest.raises(InputError, match=r"b\.parquet: 'score' is string there, but int64 in"):
        units_of(files, read=by_score)
    with pytest.raises(InputError, match="no column 'none', which --filter names"):
        units_of(files, read=ReadOptions(filter=DocumentFilter("none > 0")))


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_key_that_changes_between_files_of_json_is_named_with_both(
    kind: str, tmp_path: Path
) -> None:
    for name, texts in {"a": [None, "x"], "b": ["x"], "c": [["x"], "y"]}.items():
        rows = [{"text": text} for text in texts]
        whole = json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.{kind}").write_text(whole)
    files = find_files(str(tmp_path))
    with pytest.raises(InputError, match=r"c\.json.*: 'text' is list there, but string in .*b\.js"):
        units_of(files)
    assert len(units_of(files[:2])) == 1


def test_a_column_of_nulls_alone_goes_with_any_other(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": pa.array([None, None], pa.null())})
    write_parquet(tmp_path / "b.parquet", {"text": pa.array(["x"])})
    found = read(tmp_path)
    assert (found.ordinals, found.texts, found.skipped) == ([2], ["x"], Counter({"null": 2}))


def test_texts_of_a_dictionary_are_texts(tmp_path: Path) -> None:
    """A column as pandas writes categories."""
    column = pa.array(["one", "two", None, "one"]).dictionary_encode()
    found = read(write_parquet(tmp_path / "a.parquet", {"text": column}, rows=4))
    assert (found.texts, found.ordinals) == (["one", "two", "one"], [0, 1, 3])

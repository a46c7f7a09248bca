"""Which columns are kept of each document, and which a filter may name."""

import gzip
import json
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from spile.core.errors import ConfigError, InputError
from spile.core.expressions import DocumentFilter
from spile.corpus.files import find_files
from spile.corpus.reader import (
    CorpusReader,
    ReadOptions,
    keep_spelled,
    parse_keep,
    refuse_missing_columns,
    settled_columns,
)
from texts import units_of, write_parquet

PROGRAM = """
def documents():
    yield {"text": "one", "task": 1, "rows": 2, "b, c": 3}
    yield {"text": "two", "task": 2, "augmentation": {"flip": True}, "none": 1, " x": 1, "": 1}
"""


@pytest.mark.parametrize(
    ("keep", "columns"),
    [("id", ("id",)), (" url , id,url", ("id", "url")), ("none", ()), ("a b", ("a b",))],
)
def test_names_are_separated_by_commas_and_have_one_order(
    keep: str, columns: tuple[str, ...]
) -> None:
    assert parse_keep(keep) == columns
    assert parse_keep(keep_spelled(columns)) == columns


@pytest.mark.parametrize("keep", ["id,,url", ",", "id,", "a\nb", "tokens", "id,preview"])
def test_what_can_be_no_column_is_refused(keep: str) -> None:
    with pytest.raises(ConfigError, match="^--keep "):
        parse_keep(keep)


def test_id_and_url_are_kept_where_they_are(tmp_path: Path) -> None:
    table = write_parquet(
        tmp_path / "a.parquet", {n: pa.array(["x"]) for n in ("text", "url", "b")}
    )
    (tmp_path / "b.jsonl").write_text('\n{"text": "one"}\n{"text": "two", "id": 3}\n')
    (tmp_path / "c.txt").write_text("one\n")
    (tmp_path / "d.py").write_text(PROGRAM)
    for path, columns in (
        (table, ("url",)),
        (tmp_path / "b.jsonl", ("id",)),
        (tmp_path / "c.txt", ()),
        (f"{tmp_path}/d.py:documents", ("augmentation", "task")),
    ):
        assert settled_columns(None, find_files(str(path)), None, None) == columns


def test_a_column_that_is_named_must_be_there(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        columns = {"text": pa.array(["x"]), **({"id": pa.array([1])} if name != "b" else {})}
        write_parquet(tmp_path / f"{name}.parquet", columns)
    with pytest.raises(InputError, match=r"b\.parquet: no column 'id', which --keep names; it has"):
        units_of(find_files(str(tmp_path)), keep=("id",))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"text": "one", "id": 1}\n', "no 'url' in its first documents.*have id, text"),
        ("a.json", '[{"text": "one"}]', "no 'url' in its first documents"),
        ("a.txt", "one\n", "such a file has no columns"),
        ("a.py", "def create_dataset(): return ['one']", "no 'url' in its first .*they have none"),
    ],
)
def test_a_key_that_no_sampled_row_has_is_refused(
    name: str, content: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    reader = CorpusReader(find_files(str(tmp_path / name)))
    with pytest.raises(InputError, match=reason):
        refuse_missing_columns(reader, ("url",))
    reader.close()


def refuse_filter(condition: str, corpus: Path) -> None:
    options = ReadOptions(filter=DocumentFilter(condition))
    with closing(CorpusReader(find_files(str(corpus)), options)) as reader:
        refuse_missing_columns(reader, ())


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json", "py"])
def test_a_filter_on_a_column_that_no_file_has_is_refused_by_name(
    kind: str, tmp_path: Path
) -> None:
    row = {"text": "one", "language": "en"}
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, {name: pa.array([value]) for name, value in row.items()})
    elif kind == "py":
        path.write_text(f"def create_dataset(): return [{row}]")
    else:
        path.write_text(json.dumps(row if kind == "jsonl" else [row]))
    refuse_filter("language == 'en'", path)
    said = r"no column 'lang', which --filter names; there are .*language.*did you mean 'language'"
    with pytest.raises(InputError, match=said):
        refuse_filter("lang == 'en'", path)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_key_that_comes_late_can_be_filtered_by(ending: str, tmp_path: Path) -> None:
    """Beyond all samples, across two reads, and after a text that only looks like the key."""
    first = json.dumps({"text": '{"flagged": true}'}) + "\n"
    before = first * ((1 << 22) // len(first))
    data = before + " " * ((1 << 22) - len(before) - 4) + '{"flagged" : true, "text": "x"}\n'
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(gzip.compress(data.encode(), 1) if ending else data.encode())
    refuse_filter("flagged", path)
    with pytest.raises(InputError, match="no column 'flag', which"):
        refuse_filter("flag", path)

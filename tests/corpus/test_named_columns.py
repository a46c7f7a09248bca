"""Which columns of documents are kept, and which ones a filter may name."""

import csv
import gzip
import json
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spile.core.errors import ConfigError, InputError
from spile.core.expressions import DocumentFilter
from spile.corpus.chats.rows import Pairs
from spile.corpus.files import find_files
from spile.corpus.formats import parquet
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.named_columns import (
    keep_spelled,
    parse_keep,
    refuse_missing_columns,
    settled_columns,
)
from spile.corpus.reader import CorpusReader
from support.texts import units_of, write_parquet

PAIRS = Pairs("q", "a", "", "", None)
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


ROWS = [
    {
        "text": f"some text {n}",
        "label": n % 2,
        "topic": "law" if n else None,
        "good": n > 1,
        "score": n / 3,
        "url": "https://" + "x" * 99,  # kept whatever it holds
        "title": "t" * (60 + n),  # one is too long
        "tags": ["a"],
        "meta": {"a": n},
        "nothing": None,
        "tokens": n,  # a name of the documents table
        "a, b": n,
    }
    for n in range(6)
]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "json", "csv"])
def test_labels_are_kept_unless_told_otherwise(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    flat = [{k: v for k, v in row.items() if k not in ("tags", "meta")} for row in ROWS]
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(flat[0]))
            writer.writeheader()
            writer.writerows(flat)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        lines = "\n".join(map(json.dumps, ROWS))
        path.write_text(lines if kind == "jsonl" else json.dumps(ROWS))
    files = find_files(str(path))
    assert settled_columns(None, files, None, None) == ("good", "label", "score", "topic", "url")
    assert settled_columns("none", files, None, None) == ()
    assert settled_columns("meta", files, None, None) == ("meta",)
    others = settled_columns(None, files, "topic", None)
    assert others == ("good", "label", "score", "text", "url"), "the text itself is no label"


def test_columns_of_which_documents_are_made_are_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "why", "a": "so", "kind": "x"}\n')
    assert settled_columns(None, find_files(str(path)), None, PAIRS) == ("kind",)


def test_few_columns_of_a_wide_table_are_kept_and_long_ones_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {f"c{n:03}": pa.array([n]) for n in range(100)}
    long = {"text": pa.array(["x"]), "body": pa.array(["long " * 999]), "raw": pa.array([b"x"])}
    path = write_parquet(tmp_path / "a.parquet", {**long, **columns})
    read: list[str] = []
    rows = parquet.kept_rows
    monkeypatch.setattr(
        parquet, "kept_rows", lambda p, b, names: (read.extend(names), rows(p, b, names))[1]
    )
    assert settled_columns(None, find_files(str(path)), None, None) == tuple([*columns][:32])
    assert not {"body", "raw"} & {*read}


def test_repeated_and_dotted_column_names_are_not_kept_by_default(tmp_path: Path) -> None:
    table = pa.table([["x"], [1], [2], [3], [4]], names=["text", "n", "n", "a.b", "m"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert settled_columns(None, find_files(str(tmp_path)), None, None) == ("m",)


def test_id_and_url_are_kept_where_they_are(tmp_path: Path) -> None:
    table = write_parquet(
        tmp_path / "a.parquet", {n: pa.array(["x"]) for n in ("text", "url", "b")}
    )
    (tmp_path / "b.jsonl").write_text('\n{"text": "one"}\n{"text": "two", "id": 3}\n')
    (tmp_path / "c.txt").write_text("one\n")
    (tmp_path / "d.py").write_text(PROGRAM)
    for path, columns in (
        (table, ("b", "url")),
        (tmp_path / "b.jsonl", ("id",)),
        (tmp_path / "c.txt", ()),
        (f"{tmp_path}/d.py:documents", ("augmentation", "task")),
    ):
        assert settled_columns(None, find_files(str(path)), None, None) == columns


def test_a_column_that_is_named_must_be_there(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        columns = {"text": pa.array(["x"]), **({"id": pa.array([1])} if name != "b" else {})}
        write_parquet(tmp_path / f"{name}.parquet", columns)
    with pytest.raises(
        InputError, match=r"b\.parquet: no column 'id', which --keep or --by names; it has"
    ):
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
    """The key lies beyond all samples, across two reads, and after a text that looks like it."""
    first = json.dumps({"text": '{"flagged": true}'}) + "\n"
    before = first * ((1 << 22) // len(first))
    data = before + " " * ((1 << 22) - len(before) - 4) + '{"flagged" : true, "text": "x"}\n'
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(gzip.compress(data.encode(), 1) if ending else data.encode())
    refuse_filter("flagged", path)
    with pytest.raises(InputError, match="no column 'flag', which"):
        refuse_filter("flag", path)

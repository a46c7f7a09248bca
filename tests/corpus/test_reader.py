"""Files of documents: which files and texts are read, skipped or refused."""

import gzip
import json
import logging
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from spile.core.errors import DataError, InputError, SpileError
from spile.core.expressions import DocumentFilter
from spile.corpus.chats.rows import Pairs
from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.formats.parquet import ParquetFormat
from spile.corpus.reader import CorpusReader
from support.texts import NOT_UTF8, groups_of, read, units_of, write_parquet

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]),  # two members
    ".zst": lambda data: zstandard.compress(data[:20]) + zstandard.compress(data[20:]),  # frames
}


def jsonl(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("last", [b"", b"\n"])
def test_jsonl_texts_keep_their_ordinals_past_what_is_skipped(
    ending: str, last: bytes, tmp_path: Path
) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "one", "n": 1}',  # a byte order mark is no text
        b'{"text": null}',
        b"",
        b'{"text": ""}',
        b'{"other": "no text here"}',
        b'{"text": "' + NOT_UTF8 + b'"}',
        b'{"text": "lone \\ud800 surrogate"}',
        b'{"text": "a pair \\ud83c\\udf33"}',
        b'{"text": " \\n\\t "}',
        b'"a bare string"',
        b'{"text": "two\\nlines"}\r',
        b'{"text": "last"}',
    ]
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](b"\n".join(lines) + last))
    found = read(path)
    assert found.texts == ["one", "a pair 🌳", "a bare string", "two\nlines", "last"]
    assert found.ordinals == [0, 7, 9, 10, 11]
    assert found.skipped == Counter({"null": 2, "empty": 2, "white space only": 1, "not UTF-8": 2})


def test_the_jsonl_key_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_bytes(jsonl({"body": "yes", "text": "no"}, {"body": "also"}))
    assert read(path, "body").texts == ["yes", "also"]


def test_a_key_that_no_sampled_line_has_is_refused_and_the_others_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    latin = b'{"body": "\xe9t\xe9"}\n'
    path.write_bytes(b"\n" + jsonl({"body": "x", "alpha": 1}, {"body": "y"}) + latin)
    with pytest.raises(InputError) as caught:
        CorpusReader(find_files(str(path))).sample(0)
    for part in ("'text'", "alpha, body", "--text-column", str(path)):
        assert part in str(caught.value)


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_file_of_chats_is_read_with_messages(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{ending}"
    rows = [{"id": 1, "turns": [{"role": "user", "content": "x"}], "tags": ["a"]}] * 2
    path.write_bytes(jsonl(*rows) if ending == "jsonl" else json.dumps(rows).encode())
    said = r"no key 'text' in its first .*have id, tags, turns: --messages turns reads its chats$"
    with pytest.raises(InputError, match=said):
        CorpusReader(find_files(str(path))).sample(0)
    with pytest.raises(InputError, match=r"'turns' holds list.*--messages turns reads its chats$"):
        CorpusReader(find_files(str(path)), ReadOptions("turns")).sample(0)


def test_a_line_without_the_key_counts_as_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl({"body": "x"}, {"text": "y"}))
    documents = read(path)
    assert (documents.ordinals, documents.skipped) == ([1], {"null": 1})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (jsonl({"text": "x"}) + b"{garbage\n", ["line 2", "not JSON"]),
        (jsonl({"text": "x"}) + b'{"text": "cut off', ["line 2", "not JSON"]),
        (jsonl({"text": "x"}, [1, 2]), ["line 2", "not a JSON object"]),
        (jsonl({"text": "x"}, {"text": "y"}, {"text": 5}), ["line 3", "'text' holds int"]),
        (jsonl({"text": "x"}) + b"[" * 100_000, ["line 2", "not JSON"]),
    ],
    ids=["garbage", "cut off", "array", "number", "nested"],
)
def test_a_bad_jsonl_line_is_refused_by_number(
    data: bytes, said: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in [str(path), *said]), message


def test_a_bad_line_in_a_later_unit_is_refused_by_its_number_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(*({"text": f"line {i}"} for i in range(1, 10))) + b"garbage\n")
    files = find_files(str(path))
    units = units_of(files, size=40)
    assert len(units) > 3
    reader = CorpusReader(files)
    with pytest.raises(InputError, match="line 10: not JSON"):
        reader.read(units[-1].spans, units[-1].first_doc)
    reader.close()


MARKED = ["\ufeffone", "two", "\ufeffthree", "\ufeff"]


def write_rows(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    """A file of that format; JSON files begin with a byte-order mark."""
    path, table = folder / f"a.{kind}", pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:
        text = json.dumps(rows) if kind == "json" else "".join(json.dumps(r) + "\n" for r in rows)
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "json"])
def test_prompts_and_responses_can_be_fields_of_a_column(kind: str, tmp_path: Path) -> None:
    rows = [{"n": n, "translation": {"en": f"yes {n}", "fr": f" oui {n}"}} for n in range(3)]
    files = find_files(str(write_rows(tmp_path, kind, rows)))
    pairs = Pairs("translation.en", "translation.fr", "", "", None)
    (unit,) = units_of(files, reading=pairs)
    for filter in (None, DocumentFilter("n >= 0")):
        options = ReadOptions(filter=filter)
        with closing(CorpusReader(files, options, reading=pairs)) as reader:
            wanted = [f"yes {n} oui {n}" for n in range(3)]
            assert reader.read(unit.spans, 0).texts == wanted
            assert reader.sample(0)[0].texts == wanted
    if files[0].format.has_schema:
        with pytest.raises(InputError, match="no column 'translation.es'"):
            units_of(files, reading=replace(pairs, prompt="translation.es"))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "json"])
def test_every_format_keeps_a_byte_order_mark_that_begins_a_text(kind: str, tmp_path: Path) -> None:
    """The tokens of one corpus do not depend on its format."""
    rows = [{"text": text, "n": n} for n, text in enumerate(MARKED)]
    path = write_rows(tmp_path, kind, rows)
    assert read(path).texts == MARKED
    files = find_files(str(path))
    (unit,) = units_of(files)
    for keep, filter in (((), "n >= 0"), (("n",), "n >= 0"), (("n",), None)):
        options = ReadOptions(keep=keep, filter=DocumentFilter(filter) if filter else None)
        with closing(CorpusReader(files, options)) as reader:
            assert reader.read(unit.spans, 0).texts == MARKED


@pytest.mark.parametrize("documents", ["line", "file"])
def test_only_the_first_mark_of_a_text_file_is_no_text(documents: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeff\ufeffone\n\ufefftwo\n", encoding="utf-8")
    wanted = ["\ufeffone", "\ufefftwo"] if documents == "line" else ["\ufeffone\n\ufefftwo\n"]
    assert read(tmp_path, documents=documents).texts == wanted
    files = find_files(str(tmp_path))
    units = units_of(files, 1, ReadOptions(text_documents=documents))  # each line a unit of its own
    with closing(CorpusReader(files, ReadOptions(text_documents=documents))) as reader:
        texts = [text for u in units for text in reader.read(u.spans, u.first_doc).texts]
    assert texts == wanted


@pytest.mark.parametrize("ending", COMPRESS)
def test_text_lines_are_documents(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(COMPRESS[ending](b"\xef\xbb\xbfone\r\n\r\n  two \nthree\x0b\x85\n\nfour"))
    found = read(path)
    assert found.texts == ["one", "  two ", "four"]
    assert found.ordinals == [0, 2, 5]
    assert found.skipped == Counter({"empty": 2, "not UTF-8": 1})


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g\rh"  # all of them line ends to str.splitlines
    (tmp_path / "a.txt").write_text(f"{odd}\nnext\n", encoding="utf-8", newline="")
    assert read(tmp_path / "a.txt").texts == [odd, "next"]


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_whole_text_file_can_be_a_document(ending: str, tmp_path: Path) -> None:
    contents = {"a": b"one\r\ntwo\n", "b": NOT_UTF8 * 9, "c": b" \n\n" * 9, "d": b"last\n" * 9}
    for name, data in contents.items():
        (tmp_path / f"{name}.txt{ending}").write_bytes(COMPRESS[ending](data))
    found = read(tmp_path, documents="file")
    assert found.texts == ["one\r\ntwo\n", "last\n" * 9]
    assert found.ordinals == [0, 3]
    assert found.skipped == Counter({"not UTF-8": 1, "white space only": 1})


def test_a_directory_is_its_known_files_sorted_by_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ["b.txt", "a/z.jsonl", "a.txt", "c.TXT", "sub/deep/a.text"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jsonl({"text": name}) if "jsonl" in name else f"{name}\n".encode())
    (tmp_path / "README.md").write_text("not a document\n")
    with caplog.at_level(logging.WARNING, "spile"):
        found = read(tmp_path)
    assert found.texts == ["a/z.jsonl", "a.txt", "b.txt", "c.TXT", "sub/deep/a.text"]
    assert "1 other files skipped" in caplog.text
    assert "README.md" in caplog.text


def test_hidden_files_and_folders_are_no_documents(tmp_path: Path) -> None:
    for name in ["a.txt", ".hidden.txt", "_SUCCESS.txt", ".cache/b.txt", "_temporary/c.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    assert read(tmp_path).texts == ["a.txt"]
    assert read(tmp_path / ".cache").texts == [".cache/b.txt"], "what is asked for is not hidden"


def test_a_glob_gives_each_match_once_sorted(tmp_path: Path) -> None:
    for name in ["x/y/2.txt", "x/1.txt", "x/y/z/3.txt", "x/other.jsonl"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    wanted = ["x/1.txt", "x/y/2.txt", "x/y/z/3.txt"]
    assert read(f"{tmp_path}/**/*.txt").texts == wanted
    assert read(f"{tmp_path}/**/**/*.txt").texts == wanted
    assert read(f"{tmp_path}/x/*/2.txt").texts == ["x/y/2.txt"]
    (tmp_path / "x" / "[1].txt").write_text("a name is first of all a name\n")
    assert read(tmp_path / "x" / "[1].txt").texts == ["a name is first of all a name"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("absent.jsonl", "no such file"), ("no*match.txt", "no such file"), ("empty", "holds no"),
     ("a.xml", "does not say"), ("a.parquet.gz", "does not say"), ("a", "does not say")],
)  # fmt: skip
def test_a_corpus_that_cannot_be_is_refused_by_name(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for file in ["a.xml", "a.parquet.gz", "a"]:
        (tmp_path / file).write_text("x\n")
    with pytest.raises(InputError, match=said) as caught:
        find_files(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_the_demo_corpus_can_be_read() -> None:
    found = read("demo")
    assert len(found.texts) > 100
    assert not found.skipped
    assert any("Fellow" in text for text in found.texts)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_truncated_compressed_file_is_refused(ending: str, keep: float, tmp_path: Path) -> None:
    """A file cut short by a failed copy must not pass for a shorter corpus."""
    noise = random.Random(0)
    data = b"".join(b"%d\n" % noise.getrandbits(200) for _ in range(20_000))
    whole = gzip.compress(data) if ending == ".gz" else zstandard.compress(data)
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(InputError, match="is it whole") as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("place", [0, 12, 0.5, -3])
def test_a_damaged_compressed_file_is_refused(ending: str, place: float, tmp_path: Path) -> None:
    data = b"".join(b"line %d of the text\n" % i for i in range(20_000))
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    whole = bytearray(gzip.compress(data) if ending == ".gz" else zstd.compress(data))
    start = int(len(whole) * place) if isinstance(place, float) else place % len(whole)
    for i in range(start, min(start + 40, len(whole))):
        whole[i] ^= 0x55
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(whole)
    with pytest.raises(InputError, match="cannot decompress") as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("ending", COMPRESS)
def test_bytes_that_changed_since_the_table_was_made_are_refused(
    ending: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.txt{ending}"
    data = b"".join(b"line %d\n" % i for i in range(30))
    path.write_bytes(COMPRESS[ending](data))
    files = find_files(str(path))
    units = units_of(files, size=60)
    changed = data.replace(b"line 15", b"LINE 15")
    for contents, doc in ((changed, 15), (data[:-1], 29), (data[: len(data) // 2], 29)):
        path.write_bytes(COMPRESS[ending](contents))
        (unit,) = (u for u in units if u.first_doc <= doc < u.first_doc + u.num_docs)
        reader = CorpusReader(files)
        assert reader.read(units[0].spans, 0).texts[0] == "line 0"
        with pytest.raises(DataError, match="changed since") as caught:
            reader.read(unit.spans, unit.first_doc)
        reader.close()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.parquet"])
def test_a_file_that_vanished_since_the_table_was_made_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        write_parquet(path, {"text": pa.array(["x"])})
    else:
        path.write_bytes(COMPRESS[name.removeprefix("a.txt")](b"a line of more than twenty bytes"))
    files = find_files(str(path))
    (unit,) = units_of(files)
    path.unlink()
    with pytest.raises(SpileError, match=str(path)):
        CorpusReader(files).read(unit.spans, 0)


@pytest.mark.parametrize("ending", COMPRESS)
def test_units_read_in_any_order_give_the_same_texts(ending: str, tmp_path: Path) -> None:
    texts = [f"{i} {'word ' * (i % 7)}end" for i in range(120)]
    for name, part in (("a", texts[:70]), ("b", texts[70:])):
        data = "\n".join(part).encode()
        (tmp_path / f"{name}.txt{ending}").write_bytes(COMPRESS[ending](data))
    files = find_files(str(tmp_path))
    units = units_of(files, size=150)
    assert len(units) > 8
    orders = [units, units[::-1], units[::3] + units[1::3] + units[2::3], units[4:5] * 3 + units]
    for order in orders:
        reader = CorpusReader(files)
        found: dict[int, str] = {}
        for unit in order:
            documents = reader.read(unit.spans, unit.first_doc)
            found.update(zip(documents.ordinals, documents.texts, strict=True))
        reader.close()
        assert found == dict(enumerate(texts))


def test_a_sample_measures_the_bytes_it_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\nthree\n")
    write_parquet(tmp_path / "b.parquet", {"text": pa.array(["é", None, "abc"])})
    reader = CorpusReader(find_files(str(tmp_path)))
    lines, size = reader.sample(0)
    assert (lines.texts, size) == (["one", "three"], 11)
    assert lines.skipped == Counter({"empty": 1})
    rows, size = reader.sample(1)
    of_footer = sum(size for _, size in groups_of(tmp_path / "b.parquet", ParquetFormat))
    assert (rows.texts, size) == (["é", "abc"], of_footer)

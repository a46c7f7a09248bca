"""The record of a document: the columns that it keeps, and which documents hashes tell apart."""

import datetime
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spile.core.errors import InputError
from spile.core.expressions import DocumentFilter
from spile.corpus import reader as reader_module
from spile.corpus.chats.rows import Pairs, of_program
from spile.corpus.documents import LONGEST, CorpusDocument, Documents, plain
from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.programs.program import ProgramDocument
from spile.corpus.reader import CorpusReader
from spile.corpus.select import Selection
from support import tiny
from support.texts import units_of, write_parquet


def read(path: Path, keep: tuple[str, ...] = (), preview: int = 20, **options: Any) -> Documents:
    files = find_files(str(path))
    (unit,) = units_of(files)
    reader = CorpusReader(files, ReadOptions(keep=keep, preview=preview, **options))
    try:
        found = reader.read(unit.spans, unit.first_doc)
        assert found.columns == keep
        assert found.skipped == Counter(filter(None, reasons(found)))
        return found
    finally:
        reader.close()


def reasons(found: Documents) -> list[str | None]:
    return [document.skipped for document in found.every]


def previews(found: Documents) -> list[str | None]:
    return [document.preview for document in found.every]


def values(found: Documents, column: str) -> list[Any]:
    return found.kept(column)


LINES = r"""{"text": "one", "id": 1, "url": "http://a"}
{"text": "  ", "id": 2}

{"id": 3}
"a bare text"
{"text": "lone \ud800", "id": "\ud800"}
{"text": "nul \u0000 and bell \u0007", "id": {"b": [1, 2], "a": "é"}}
{"text": "a text of more than twenty characters 🌳", "id": 12345678901234567890}
"""


def test_every_line_has_its_row_whatever_became_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    found = read(tmp_path, ("id", "url"))
    assert [document.ordinal for document in found.every] == list(range(8))
    assert reasons(found) == [
        None,
        "white space only",
        "empty",
        "null",
        None,
        "not UTF-8",
        None,
        None,
    ]
    assert values(found, "id") == [
        1, 2, None, 3, None, r"\ud800", '{"a": "é", "b": [1, 2]}', "12345678901234567890",
    ]  # fmt: skip
    assert values(found, "url") == ["http://a", *[None] * 7]
    assert previews(found) == [
        "one", None, None, None, "a bare text", None, "nul \0 and bell \7", "a text of more than ",
    ]  # fmt: skip


def test_nothing_is_kept_where_nothing_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    found = read(tmp_path, preview=0)
    assert {*previews(found)} == {None} and not any(d.columns for d in found.every)
    assert len(found.every) == 8


def test_a_preview_is_cut_between_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("🌳🌳🌳\nשלום\n")
    assert previews(read(tmp_path, preview=2)) == ["🌳🌳", "של"]


def test_columns_of_parquet_keep_what_python_can_say_of_them(tmp_path: Path) -> None:
    when = [datetime.datetime(2024, 5, 6, 7, 8, 9, 10, datetime.UTC), None, None]
    columns = {
        "text": pa.array(["one", None, "three"]),
        "id": pa.array([b"fine", b"caf\xe9", None]),
        "nested": pa.array([{"a": [1]}, None, {"a": []}]),
        "time": pa.array(when, pa.timestamp("ns", "UTC")),
        "price": pa.array([Decimal("1.50"), None, None]),
        "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
        "big": pa.array([2**64 - 1, 1, None], pa.uint64()),
        "score": pa.array([0.5, float("nan"), None]),
    }
    write_parquet(tmp_path / "a.parquet", columns)
    found = read(tmp_path, tuple(columns)[1:])
    assert reasons(found) == [None, "null", None]
    assert values(found, "id") == ["fine", r"caf\xe9", None]
    assert values(found, "nested") == ['{"a": [1]}', None, '{"a": []}']
    assert values(found, "time") == ["2024-05-06 07:08:09.000010000Z", None, None]
    assert values(found, "price") == ["1.50", None, None]
    assert values(found, "kind") == ["x", "y", "x"]
    assert values(found, "big") == [str(2**64 - 1), 1, None]
    assert values(found, "score")[0] == 0.5 and values(found, "score")[2] is None


def test_a_column_that_some_files_lack_is_empty_there(tmp_path: Path) -> None:
    texts = pa.array(["one", "two"])
    write_parquet(tmp_path / "a.parquet", {"text": texts, "id": pa.array([1, 2])})
    write_parquet(tmp_path / "b.parquet", {"text": texts})
    assert values(read(tmp_path, ("id",)), "id") == [1, 2, None, None]


def test_texts_can_be_kept_whole_beside_what_is_read_of_them(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": pa.array(["one", "two"])})
    assert values(read(tmp_path, ("text",), preview=1), "text") == ["one", "two"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_what_a_filter_leaves_out_says_nothing(kind: str, tmp_path: Path) -> None:
    rows = {"text": ["one", "two", "three", "four"], "id": [1, 2, 3, 4]}
    if kind == "parquet":
        write_parquet(tmp_path / "a.parquet", {n: pa.array(v) for n, v in rows.items()})
    else:
        lines = (f'{{"text": "{t}", "id": {i}}}\n' for t, i in zip(*rows.values(), strict=True))
        (tmp_path / "a.jsonl").write_text("".join(lines))
    found = read(tmp_path, ("id",), filter=DocumentFilter("id >= 4"))
    assert values(found, "id") == [None, None, None, 4]
    assert previews(found) == [None, None, None, "four"]


def test_documents_that_a_hash_leaves_out_are_known_still(tmp_path: Path) -> None:
    path = tiny.write_corpus(tmp_path / "a.jsonl")
    found = read(path, ("id",), selection=Selection(fraction=0.5))
    assert values(found, "id") == list(range(40)) and None not in previews(found)
    assert {*reasons(found)} == {None, "beyond --fraction"}


def test_long_values_are_cut_and_say_so() -> None:
    assert plain("é" * LONGEST) == "é" * LONGEST
    cut = plain("é" * (LONGEST + 1))
    assert isinstance(cut, str) and len(cut) == LONGEST and cut.endswith("é…")
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    assert plain(nested) == "…"
    assert plain({(1, 2): 3}) == "…"


def test_too_much_for_a_unit_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reader_module, "MOST_CHARACTERS", 100)
    path = tiny.write_corpus(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="what is kept of documents 0 to .*--keep"):
        read(path, ("id",))


def test_a_document_is_skipped_for_a_reason_and_keeps_what_describes_it() -> None:
    for given, reason in (
        (None, "null"),
        ("", "empty"),
        (" \n", "white space only"),
        ("\ud800", "not UTF-8"),
    ):
        assert CorpusDocument.of_text(given) == CorpusDocument(skipped=reason)
    assert CorpusDocument.of_bytes(b"caf\xe9") == CorpusDocument(skipped="not UTF-8")
    marked = b"\xef\xbb\xbfone"
    assert CorpusDocument.of_bytes(marked, cut_mark=True) == CorpusDocument("one")
    assert CorpusDocument.of_bytes(marked) == CorpusDocument("\ufeffone")
    document = CorpusDocument("one", ((0, 3, 1),), columns={"id": 7, "x": 8}, ordinal=5)
    document.keep(("id",), 2)
    assert (document.text, document.preview, document.columns) == ("one", "on", {"id": 7})
    document.skip("why")
    assert (document.ordinal, document.preview, document.skipped) == (5, "on", "why")
    assert document.columns == {"id": 7} and not document.text and not document.roles


def test_white_space_alone_is_left_out_as_such_wherever_it_comes_from() -> None:
    pairs = Pairs("q", "a", "", "", None)
    for text, reason in (("", "empty"), (" \n", "white space only")):
        assert CorpusDocument.of_bytes(text.encode()).skipped == reason
        assert pairs.document({"q": text, "a": ""}).skipped == reason
        assert of_program(ProgramDocument(text), None).skipped == reason


def documents(ordinals: list[int], texts: list[str], *others: CorpusDocument) -> Documents:
    pairs = zip(ordinals, texts, strict=True)
    return Documents([*(CorpusDocument(text, ordinal=n) for n, text in pairs), *others])


def test_the_digest_of_documents_is_that_of_their_texts() -> None:
    base = documents([0, 1], ["ab", "c"])
    others = [([0, 1], ["a", "bc"]), ([0], ["ab"])]
    assert len({base.digest(), *(documents(*other).digest() for other in others)}) == 3
    assert documents([0, 2], ["ab", "c"]).digest() == base.digest()  # a merge moves ordinals
    empty = CorpusDocument(skipped="empty", ordinal=2)
    assert documents([0, 1], ["ab", "c"], empty).digest() == base.digest()

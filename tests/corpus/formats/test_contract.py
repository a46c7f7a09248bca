"""The contract of corpus formats: one suite that every row of the table passes."""

import csv
import gzip
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.config import Recipe
from spile.core.errors import InputError, SpileError
from spile.core.expressions import DocumentFilter
from spile.core.units import Unit
from spile.corpus.documents import CorpusDocument
from spile.corpus.files import find_files
from spile.corpus.formats import FORMATS
from spile.corpus.formats.arrow import ArrowFormat
from spile.corpus.formats.contract import CorpusFormat, ReadOptions
from spile.corpus.formats.csv import CsvFormat, TsvFormat
from spile.corpus.formats.json import JsonArrayFormat, JsonLinesFormat
from spile.corpus.formats.parquet import ParquetFormat
from spile.corpus.formats.program import ProgramFormat
from spile.corpus.formats.text import TextFormat
from spile.corpus.formats.token_ids import FlatArray, TokenArrayFormat, TokenIds
from spile.corpus.reader import CorpusReader
from spile.corpus.units import CutOptions, CutSoFar, make_units
from support.marks import examples

END = 300  # ends a document of token ids, which are the bytes of its text
IDS = TokenIds(END + 1, flat=FlatArray(np.dtype("<u2"), END, leads=False, window=6))
TEXTS = [f"document {n} " + "ä" * (n * 7 % 23) for n in range(40)]


def write_table(path: Path, texts: list[str]) -> None:
    table = pa.table({"n": range(len(texts)), "text": texts})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
        return
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_json(path: Path, texts: list[str]) -> None:
    rows = [{"n": n, "text": text} for n, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(json.dumps(rows) if path.suffix == ".json" else lines)


def write_csv(path: Path, texts: list[str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([("n", "text"), *enumerate(texts)])


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(text + "\n" for text in texts))


def write_ids(path: Path, texts: list[str]) -> None:
    path.write_bytes(np.array([i for t in texts for i in (*t.encode(), END)], "<u2").tobytes())


def write_program(path: Path, texts: list[str]) -> None:
    rows = [{"n": n, "text": text} for n, text in enumerate(texts)]
    path.write_text(f"def create_dataset():\n    return {rows!r}\n")


# The name of a corpus of each format, and the function that writes its documents there.
CASES: dict[type[CorpusFormat], tuple[str, Callable[[Path, list[str]], None]]] = {
    ParquetFormat: ("a.parquet", write_table),
    ArrowFormat: ("a.arrow", write_table),
    JsonLinesFormat: ("a.jsonl", write_json),
    JsonArrayFormat: ("a.json", write_json),
    CsvFormat: ("a.csv", write_csv),
    TsvFormat: ("a.tsv", write_csv),
    TextFormat: ("a.txt", write_lines),
    TokenArrayFormat: ("a.bin", write_ids),
    ProgramFormat: ("a.py", write_program),
}
every_format = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.title)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[type[CorpusFormat], Path]:
    found = {}
    for kind, (name, write) in CASES.items():
        found[kind] = tmp_path_factory.mktemp("corpus") / name
        write(found[kind], TEXTS)
    return found


def opened(
    path: Path, kind: type[CorpusFormat], options: ReadOptions | None = None
) -> CorpusReader:
    reading = IDS if kind.holds_ids else None
    return CorpusReader(find_files(str(path)), options, reading=reading)


def text_of(document: CorpusDocument) -> str:
    return document.text if document.ids is None else bytes(document.ids.tolist()[:-1]).decode()


def texts(reader: CorpusReader, units: list[Unit]) -> dict[int, str]:
    read = (reader.read(unit.spans, unit.first_doc) for unit in units)
    return {document.ordinal: text_of(document) for part in read for document in part.usable}


def cut(reader: CorpusReader, size: int, so_far: CutSoFar | None = None, **more: Any) -> list[Unit]:
    return make_units(reader, CutOptions(unit_tokens=size, density=1.0, **more), so_far)


def test_every_format_of_the_table_has_a_case() -> None:
    assert CASES.keys() == {*FORMATS}, "write a corpus of the new format here"


def test_no_two_formats_share_a_suffix_or_a_title() -> None:
    suffixes = [suffix for kind in FORMATS for suffix in kind.suffixes]
    assert len({*suffixes}) == len(suffixes)
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in suffixes)
    assert len({kind.title for kind in FORMATS}) == len(FORMATS)


@every_format
def test_help_and_documentation_name_the_format(kind: type[CorpusFormat]) -> None:
    (option,) = [each for each in fields(Recipe) if each.name == "corpus"]
    page = Path(__file__).parents[3] / "docs" / "corpora.md"
    assert kind.title in option.metadata["help"]
    assert kind.title in page.read_text()


@every_format
def test_a_corpus_is_recognised(kind: type[CorpusFormat], corpora: dict[type, Path]) -> None:
    (file,) = find_files(str(corpora[kind]))
    assert file.format is kind


@every_format
@given(size=st.integers(1, 3000), most=st.integers(1, 60))
@examples(20)
def test_units_hold_every_document_once(
    kind: type[CorpusFormat], corpora: dict[type, Path], size: int, most: int
) -> None:
    with closing(opened(corpora[kind], kind)) as reader:
        assert texts(reader, cut(reader, size)) == dict(enumerate(TEXTS))
        some = cut(reader, size, max_docs=most)
        assert texts(reader, some) == dict(enumerate(TEXTS[:most]))
        drawn = cut(reader, size, shuffle=1, max_docs=most)
        found = texts(reader, drawn)
        assert len(found) == min(most, len(TEXTS))
        assert all(TEXTS[ordinal] == text for ordinal, text in found.items())


@pytest.mark.parametrize(
    "kind", [kind for kind in FORMATS if not kind.in_order], ids=lambda kind: kind.title
)
def test_a_cut_goes_on_where_it_ended(kind: type[CorpusFormat], corpora: dict[type, Path]) -> None:
    with closing(opened(corpora[kind], kind)) as reader:
        for taken in range(1, len(TEXTS), 5):
            before = cut(reader, 200, max_docs=taken)
            last = before[-1].spans[-1]
            place = CutSoFar(0, last.first + last.count, last.stop, taken, len(before))
            more = cut(reader, 200, place)
            assert [unit.id for unit in [*before, *more]] == [*range(len(before) + len(more))]
            assert texts(reader, [*before, *more]) == dict(enumerate(TEXTS))


@every_format
def test_a_sample_holds_the_first_documents_and_their_size(
    kind: type[CorpusFormat], corpora: dict[type, Path]
) -> None:
    with closing(opened(corpora[kind], kind)) as reader:
        sampled, size = reader.sample(0)
        assert [text_of(document) for document in sampled.usable] == TEXTS
        assert size >= sum(map(len, TEXTS))


@every_format
def test_columns_are_listed_filtered_by_and_kept(
    kind: type[CorpusFormat], corpora: dict[type, Path]
) -> None:
    options = ReadOptions(filter=DocumentFilter("n >= 30"), keep=("n",))
    if not kind.has_columns:
        with pytest.raises(InputError, match="such a file has no columns"):
            opened(corpora[kind], kind, options)
        return
    with closing(opened(corpora[kind], kind, options)) as reader:
        assert "n" in reader.columns_of(0)
        assert reader.made_of(0) == {"text"}
        found = [reader.read(unit.spans, unit.first_doc) for unit in cut(reader, 300)]
        kept = {d.ordinal: (d.text, d.columns) for part in found for d in part.usable}
        assert kept == {n: (TEXTS[n], {"n": n}) for n in range(30, 40)}


@every_format
def test_a_corpus_that_became_shorter_is_refused(kind: type[CorpusFormat], tmp_path: Path) -> None:
    name, write = CASES[kind]
    write(tmp_path / name, TEXTS)
    with closing(opened(tmp_path / name, kind)) as reader:
        units = cut(reader, 300)
    write(tmp_path / name, TEXTS[:-3])
    with closing(opened(tmp_path / name, kind)) as reader, pytest.raises(SpileError) as caught:
        texts(reader, units)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@every_format
def test_a_compressed_file_reads_like_a_plain_one(
    kind: type[CorpusFormat], corpora: dict[type, Path], tmp_path: Path
) -> None:
    path = tmp_path / f"{corpora[kind].name}.gz"
    path.write_bytes(gzip.compress(corpora[kind].read_bytes()))
    if not kind.compressible:
        with pytest.raises(InputError, match="does not say what it holds; use .parquet"):
            find_files(str(path))
        return
    with closing(opened(path, kind)) as reader:
        assert texts(reader, cut(reader, 300)) == dict(enumerate(TEXTS))

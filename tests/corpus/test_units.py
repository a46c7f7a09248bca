"""The corpus cut into units: every document once, in order, and equally in every process."""

import gzip
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import InputError, Interrupted
from spile.core.threads import cancelled_by
from spile.core.units import Unit
from spile.corpus.files import find_files
from spile.corpus.formats import byte_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.formats.parquet import ParquetFormat
from spile.corpus.reader import CorpusReader
from spile.corpus.units import CutOptions, make_units, tokens_per_byte
from support.marks import examples
from support.stops import StopAtLook
from support.texts import groups_of, units_of

KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "txt.zst", "parquet")
Corpus = list[tuple[str, list[str]]]  # kind and documents of each file


def write(folder: Path, corpus: Corpus, *, last_newline: bool = True) -> list[str]:
    """Write the files; returns every document in the corpus's order, usable or not."""
    for number, (kind, documents) in enumerate(corpus):
        path = folder / f"{number:03}.{kind}"
        if kind == "parquet":
            table = pa.table({"text": pa.array(documents, pa.string())})
            pq.write_table(table, path, row_group_size=3)
            continue
        lines = [json.dumps({"text": d}) if "jsonl" in kind else d for d in documents]
        data = "".join(line + "\n" for line in lines).encode()
        if lines and lines[-1] and not last_newline:
            data = data[:-1]
        if kind.endswith(".gz"):
            data = gzip.compress(data)
        elif kind.endswith(".zst"):
            data = zstandard.compress(data[:7]) + zstandard.compress(data[7:])
        path.write_bytes(data)
    return [document for _, documents in corpus for document in documents]


def cut(folder: Path, size: int, **options: Any) -> list[Unit]:
    """Units of about `size` bytes."""
    files = find_files(str(folder))
    read = ReadOptions(text_documents=options.pop("text_documents", "line"))
    return units_of(files, size, read, **options)


def read(folder: Path, units: list[Unit], documents: str = "line") -> dict[int, str]:
    """Map each ordinal that the units hold to its text; no ordinal may come twice."""
    reader = CorpusReader(find_files(str(folder)), ReadOptions(text_documents=documents))
    found: dict[int, str] = {}
    for unit in units:
        part = reader.read(unit.spans, unit.first_doc)
        assert part.skipped.total() + len(part.texts) == unit.num_docs
        assert not set(part.ordinals) & set(found)
        found.update(zip(part.ordinals, part.texts, strict=True))
    reader.close()
    return found


def usable(documents: list[str]) -> dict[int, str]:
    return {i: text for i, text in enumerate(documents) if text.strip()}


def assert_tiles(units: list[Unit], documents: int) -> None:
    """Check that units are numbered from 0, and that units and spans hold consecutive documents."""
    assert [unit.id for unit in units] == list(range(len(units)))
    assert units[0].first_doc == 0
    reached: dict[int, tuple[int, int]] = {}  # file -> document and byte reached
    total = 0
    for unit in units:
        assert unit.first_doc == total
        assert unit.num_docs == sum(span.count for span in unit.spans) > 0
        total += unit.num_docs
        for span in unit.spans:
            assert (span.first, span.start) == reached.get(span.file, (0, 0))
            reached[span.file] = (span.first + span.count, span.stop)
    assert list(reached) == sorted(reached)
    assert total == documents


@pytest.fixture(params=[1, 13, 1 << 20])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Line files are read in pieces of this many bytes."""
    monkeypatch.setattr(byte_files, "CHUNK", request.param)
    return request.param


TEXT = st.text("abc é🌳", max_size=12)
CORPUS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.lists(TEXT, max_size=12)), min_size=1, max_size=4
)


@given(CORPUS, st.integers(1, 120), st.integers(1, 60), st.booleans())
@examples(120)
def test_units_hold_every_document_exactly_once(
    corpus: Corpus, size: int, chunk: int, last_newline: bool
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_files, "CHUNK", chunk)
        folder = Path(name)
        documents = write(folder, corpus, last_newline=last_newline)
        if not documents:
            with pytest.raises(InputError, match="the corpus is empty"):
                cut(folder, size)
            return
        units = cut(folder, size)
        assert_tiles(units, len(documents))
        assert read(folder, units) == usable(documents)


def mixed(seed: int, files: int = 6) -> Corpus:
    rng = random.Random(seed)
    kinds = [*KINDS]
    rng.shuffle(kinds)
    return [
        (kinds[i % len(kinds)], [f"{i}.{j} {'word ' * rng.randrange(9)}" for j in range(20)])
        for i in range(files)
    ]


@pytest.mark.parametrize("size", [1, 100, 700, 1 << 30])
@pytest.mark.usefixtures("chunk")
def test_units_of_a_mixed_corpus_hold_every_document_exactly_once(
    size: int, tmp_path: Path
) -> None:
    documents = write(tmp_path, mixed(1, files=len(KINDS)), last_newline=False)
    units = cut(tmp_path, size)
    assert_tiles(units, len(documents))
    assert read(tmp_path, units) == usable(documents)
    if size == 1:
        assert len(units) == len(documents), "one document each"
    if size == 1 << 30:
        assert len(units) == 1, "one unit spans all the files"


def test_units_do_not_depend_on_how_much_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, mixed(2))
    cuts = []
    for chunk in (1, 2, 7, 64, 1 << 20):
        monkeypatch.setattr(byte_files, "CHUNK", chunk)
        cuts.append([cut(tmp_path, size) for size in (1, 90, 400)])
    assert all(other == cuts[0] for other in cuts[1:])


def test_units_do_not_depend_on_where_the_corpus_lies(tmp_path: Path) -> None:
    cuts = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, mixed(3))
        cuts.append(cut(tmp_path / name, 200))
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) > 5


@pytest.mark.usefixtures("chunk")
def test_a_unit_ends_with_the_document_that_fills_it(tmp_path: Path) -> None:
    documents = write(tmp_path, [("txt", ["word " * (i % 9) + "end" for i in range(80)])])
    units = cut(tmp_path, 100)
    assert len(units) > 5
    for unit in units[:-1]:
        sizes = [len(documents[unit.first_doc + i]) + 1 for i in range(unit.num_docs)]
        assert sum(sizes[:-1]) < 100 <= sum(sizes)
        assert unit.tokens == sum(sizes)


def test_the_estimate_of_a_unit_is_its_bytes_times_the_density(tmp_path: Path) -> None:
    write(tmp_path, [("txt", ["123456789"] * 40)])
    files = find_files(str(tmp_path))
    with closing(CorpusReader(files)) as reader:
        units = make_units(reader, CutOptions(unit_tokens=25, density=0.25))
    assert [unit.num_docs for unit in units] == [10] * 4
    assert [unit.tokens for unit in units] == [25] * 4


@pytest.mark.usefixtures("chunk")
def test_max_docs_is_exact(tmp_path: Path) -> None:
    documents = write(tmp_path, mixed(4, files=4), last_newline=False)
    for count in [*range(1, 46), len(documents) - 1, len(documents), len(documents) + 5]:
        units = cut(tmp_path, 150, max_docs=count)
        assert_tiles(units, min(count, len(documents)))
        if count % 9 == 0:
            assert read(tmp_path, units) == usable(documents[:count])


def test_max_docs_keeps_whole_units_as_they_were(tmp_path: Path) -> None:
    documents = write(tmp_path, mixed(5, files=4))
    everything = cut(tmp_path, 150)
    some = cut(tmp_path, 150, max_docs=len(documents) // 2)
    assert 3 < len(some) < len(everything)
    assert some[:-1] == everything[: len(some) - 1]


def test_max_tokens_takes_the_shortest_prefix_of_units_that_suffices(tmp_path: Path) -> None:
    write(tmp_path, mixed(6))
    everything = cut(tmp_path, 200)
    total = sum(unit.tokens for unit in everything)
    assert len(everything) > 5
    first = everything[0].tokens
    for wanted in (1, first - 1, first, first + 1, total // 2, total - 1, total, total + 1):
        units = cut(tmp_path, 200, max_tokens=wanted)
        assert units == everything[: len(units)]
        assert sum(unit.tokens for unit in units[:-1]) < wanted
        assert sum(unit.tokens for unit in units) >= min(wanted, total)


def test_a_whole_text_file_is_one_document_of_one_span(tmp_path: Path) -> None:
    contents = ["one\ntwo\n", "three", "\n\n", "four\r\n"]
    for number, text in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    for size in (1, 10, 1000):
        units = cut(tmp_path, size, text_documents="file")
        assert_tiles(units, 4)
        found = read(tmp_path, units, documents="file")
        assert found == {0: "one\ntwo\n", 1: "three", 3: "four\r\n"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_without_documents_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    write(tmp_path, [(kind, [])])
    with pytest.raises(InputError, match=f"no document in 1 files .*000.{kind}"):
        cut(tmp_path, 100)


def test_empty_files_between_others_change_nothing(tmp_path: Path) -> None:
    documents = write(tmp_path, [(kind, docs) for kind in KINDS for docs in ([], ["a", "b"])])
    units = cut(tmp_path, 10)
    assert_tiles(units, 2 * len(KINDS))
    assert read(tmp_path, units) == usable(documents)


def reader_of(folder: Path) -> CorpusReader:
    return CorpusReader(find_files(str(folder)))


def words(texts: list[str]) -> int:
    return sum(len(text.split()) for text in texts)


def test_density_is_the_tokens_of_the_samples_over_their_bytes(tmp_path: Path) -> None:
    """The size of Parquet comes from its footers, by which units are cut, too."""
    write(tmp_path, [("txt", ["one two", "", "three"]), ("parquet", ["four five"])])
    ((_, size),) = groups_of(next(tmp_path.glob("*.parquet")), ParquetFormat)
    assert tokens_per_byte(reader_of(tmp_path), words) == 5 / (15 + size)


def test_density_is_learnt_from_files_spread_over_the_corpus(tmp_path: Path) -> None:
    write(tmp_path, [("txt", ["x " * 50])] * 9 + [("txt", ["y" * 100])])
    density = tokens_per_byte(reader_of(tmp_path), words)
    assert density == pytest.approx((3 * 50 + 1) / (4 * 101))


def test_a_corpus_of_which_no_sample_is_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n" * 5)
    with pytest.raises(InputError, match="first 5 documents are not UTF-8"):
        tokens_per_byte(reader_of(tmp_path), words)


def silent(texts: list[str]) -> int:
    return 0


@pytest.mark.parametrize("documents", [["", " "], ["\u200b\u200b"]])
def test_density_is_positive_where_the_sample_teaches_nothing(
    documents: list[str], tmp_path: Path
) -> None:
    write(tmp_path, [("txt", documents)])
    assert tokens_per_byte(reader_of(tmp_path), silent) > 0


def test_a_long_first_line_does_not_stop_the_estimate(tmp_path: Path) -> None:
    write(tmp_path, [("jsonl", ["x" * (1 << 19), "short"])])
    assert tokens_per_byte(reader_of(tmp_path), words) > 0


def test_cutting_stops_reading_once_max_docs_is_reached(tmp_path: Path) -> None:
    """The rest of the corpus may be terabytes; here it is a file that cannot be read."""
    write(tmp_path, [("txt", ["a", "b", "c"])])
    (tmp_path / "001.parquet").write_bytes(b"not Parquet")
    assert_tiles(cut(tmp_path, 100, max_docs=3), 3)


def documents_of(units: list[Unit]) -> Iterator[int]:
    for unit in units:
        yield from range(unit.first_doc, unit.first_doc + unit.num_docs)


def test_a_row_group_larger_than_a_unit_is_cut(tmp_path: Path) -> None:
    texts = [f"row {i} " + "x" * 40 for i in range(500)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="none")
    units = cut(tmp_path, 2000)
    assert list(documents_of(units)) == list(range(500))
    assert max(unit.num_docs for unit in units) < 100
    assert read(tmp_path, units) == dict(enumerate(texts))


def test_the_pass_over_the_corpus_can_be_stopped_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.corpus.formats.byte_files.CHUNK", 100)
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 200)
    stop = StopAtLook(5)
    with cancelled_by(stop), pytest.raises(Interrupted):
        units_of(find_files(str(path)), 10)
    assert stop.looks == 5

"""A drawn order: every document once, the same for a seed, spread over the corpus."""

import gzip
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spile.core.errors import ConfigError, DataError, InputError
from spile.core.units import Span, Unit
from spile.corpus import units as order
from spile.corpus.files import find_files
from spile.corpus.formats import contract
from spile.corpus.reader import DUPLICATE, CorpusReader
from spile.corpus.units import CutOptions, make_units, without_duplicates
from support.texts import units_of

KINDS = ("parquet", "jsonl", "jsonl.gz", "json", "txt", "arrow")
PROGRAM = """
def numbered(count=200):
    return [f"document {n}" for n in range(count)]

def in_order(count=200):
    return (f"document {n}" for n in range(count))
"""


def write(folder: Path, kinds: tuple[str, ...] = KINDS * 2, documents: int = 50) -> list[str]:
    """Write files with so many documents each; return all documents in the corpus's order."""
    folder.mkdir(exist_ok=True)
    texts: list[str] = []
    for number, kind in enumerate(kinds):
        path = folder / f"{number:02}.{kind}"
        mine = [f"{number}.{n} " + "word " * (n % 5) + "end" for n in range(documents)]
        texts += mine
        table = pa.table({"text": mine})
        lines = "".join(json.dumps({"text": text}) + "\n" for text in mine)
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=20)
        elif kind == "arrow":
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=20)
        elif kind == "json":
            path.write_text(json.dumps([{"text": text} for text in mine]))
        elif kind == "txt":
            path.write_text("\n".join(mine))
        else:
            path.write_bytes(gzip.compress(lines.encode()) if "gz" in kind else lines.encode())
    return texts


def cut(folder: Path, size: int = 300, **options: Any) -> list[Unit]:
    return units_of(find_files(f"{folder}/*"), size, **{"shuffle": 0, **options})


def read(folder: Path, units: list[Unit]) -> dict[int, str]:
    """Map ordinals to texts, in the order of units; no ordinal may come twice."""
    reader = CorpusReader(find_files(f"{folder}/*"))
    found: dict[int, str] = {}
    with closing(reader):
        for unit in units:
            part = reader.read(unit.spans, unit.first_doc)
            assert len(part.texts) == unit.num_docs == sum(span.count for span in unit.spans)
            assert not {*part.ordinals} & {*found}
            found.update(zip(part.ordinals, part.texts, strict=True))
    return found


@pytest.mark.parametrize("size", [1, 150, 1000, 1 << 20])
def test_every_document_comes_once_with_its_ordinal_for_any_unit_size(
    size: int, tmp_path: Path
) -> None:
    texts = write(tmp_path)
    units = cut(tmp_path, size)
    assert [unit.id for unit in units] == list(range(len(units)))
    assert read(tmp_path, units) == dict(enumerate(texts))


def test_units_are_those_of_the_corpus_in_another_order(tmp_path: Path) -> None:
    write(tmp_path)
    plain, drawn = cut(tmp_path, shuffle=None), cut(tmp_path)
    assert [unit.spans for unit in plain] != [unit.spans for unit in drawn]
    assert {unit.spans for unit in plain} == {unit.spans for unit in drawn}


def test_an_order_is_its_seeds_alone(tmp_path: Path) -> None:
    for name in ("here", "there"):
        write(tmp_path / name)
    orders = [
        cut(tmp_path / name, shuffle=seed) for seed in (0, 1, 2) for name in ("here", "there")
    ]
    assert orders[::2] == orders[1::2]
    firsts = [[unit.first_doc for unit in units] for units in orders[::2]]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]


def test_an_order_is_the_same_on_every_machine_and_for_every_version() -> None:
    units = [Unit(n, 10 * n, 10, 1, (Span(0, 10 * n, 10),)) for n in range(8)]
    drawn = [unit.first_doc for unit in order.shuffled(units, 7, [False])]
    assert drawn == [50, 0, 40, 60, 20, 30, 70, 10]


def test_the_head_is_spread_over_the_files(tmp_path: Path) -> None:
    texts = write(tmp_path, ("jsonl", "parquet") * 10)
    units = cut(tmp_path, 400)
    head = units[: len(units) // 5]
    files = {span.file for unit in head for span in unit.spans}
    assert len(files) >= 10
    ordinals = sorted(read(tmp_path, head))
    assert ordinals[0] < len(texts) // 5 and ordinals[-1] > len(texts) * 4 // 5


def test_max_docs_takes_exactly_so_many_in_the_drawn_order(tmp_path: Path) -> None:
    texts = write(tmp_path)
    drawn = list(read(tmp_path, cut(tmp_path)).items())
    for count in [*range(1, 160, 7), len(texts), len(texts) + 1]:
        assert list(read(tmp_path, cut(tmp_path, max_docs=count)).items()) == drawn[:count]


def test_a_unit_that_was_cut_short_is_still_compared_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {n}\n" for n in range(30)))
    (unit,) = cut(tmp_path, 1 << 20, max_docs=5)
    assert list(read(tmp_path, [unit]).values()) == [f"line {n}" for n in range(5)]
    path.write_text(path.read_text().replace("line 29", "LINE 29"))
    with pytest.raises(DataError, match="changed since"):
        read(tmp_path, [unit])


def test_max_tokens_takes_the_first_units_of_the_drawn_order(tmp_path: Path) -> None:
    write(tmp_path)
    drawn = cut(tmp_path)
    for wanted in (1, 500, 5000):
        some = cut(tmp_path, max_tokens=wanted)
        assert some == drawn[: len(some)]
        assert sum(u.tokens for u in some) >= wanted > sum(u.tokens for u in some[:-1])


def test_a_large_compressed_file_goes_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "_QUICKLY", 100)
    texts = write(tmp_path, ("jsonl.gz", "jsonl") * 6)
    units = cut(tmp_path)
    assert read(tmp_path, units) == dict(enumerate(texts))
    reached: dict[int, int] = {}
    left: set[int] = set()
    for unit in units:
        for span in unit.spans:
            if span.file % 2 == 0:
                assert span.file not in left, "it was left, and is taken up again"
                assert span.start == reached.get(span.file, 0)
                reached[span.file] = span.stop
        left |= reached.keys() - {span.file for span in unit.spans}
    assert [*reached] != sorted(reached), "such files are in another order"


def test_small_files_that_share_a_unit_are_not_tied_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "_QUICKLY", 1)
    texts = write(tmp_path, ("jsonl.gz",) * 12, documents=10)
    units = cut(tmp_path, 700)
    assert [unit.first_doc for unit in units] != sorted(unit.first_doc for unit in units)
    assert read(tmp_path, units) == dict(enumerate(texts))


def test_a_corpus_in_which_nothing_can_be_moved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, ("jsonl.gz",))
    assert len(cut(tmp_path)) > 3
    monkeypatch.setattr(contract, "_QUICKLY", 100)
    with pytest.raises(InputError, match="--shuffle-docs: the corpus is one large compressed"):
        cut(tmp_path)


def of_program(file: Path, name: str, **options: Any) -> tuple[CorpusReader, list[Unit]]:
    files = find_files(f"{file}:{name}")
    reader = CorpusReader(files)
    chosen = CutOptions(unit_tokens=200, density=1.0, **{"shuffle": 5, **options})
    return reader, make_units(reader, chosen)


def test_a_program_with_numbers_is_drawn_from_and_an_iterator_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.py"
    file.write_text(PROGRAM)
    for most in (None, 33):
        reader, units = of_program(file, "numbered", max_docs=most)
        found = [reader.read(unit.spans, unit.first_doc) for unit in units]
        ordinals = [ordinal for part in found for ordinal in part.ordinals]
        assert len(ordinals) == most or sorted(ordinals) == list(range(200))
        assert ordinals != sorted(ordinals)
        assert all(
            text == f"document {ordinal}"
            for part in found
            for ordinal, text in zip(part.ordinals, part.texts, strict=True)
        )
    with pytest.raises(ConfigError, match="--shuffle-docs: .*one after another"):
        of_program(file, "in_order")


def test_of_equal_documents_the_first_in_the_drawn_order_stays(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n % 40}\n" for n in range(400)))
    files = find_files(str(tmp_path))
    with_all = cut(tmp_path, 60)
    reader = CorpusReader(files)
    units = without_duplicates(with_all, reader)
    drawn = read(tmp_path, with_all)
    wanted: dict[str, int] = {}
    for ordinal, text in drawn.items():
        wanted.setdefault(text, ordinal)
    kept: dict[int, str] = {}
    for unit in units:
        part = reader.read(unit.spans, unit.first_doc, unit.skip)
        kept.update(zip(part.ordinals, part.texts, strict=True))
        assert part.skipped[DUPLICATE] == len(unit.skip)
    reader.close()
    assert {text: ordinal for ordinal, text in kept.items()} == wanted
    assert len(kept) == 40 and sorted(kept) != list(range(40))

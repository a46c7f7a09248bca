"""Bytes of spans are read forward, and once, where spans follow one another."""

import gzip
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import pytest
import zstandard

import spile
from chaos.harness import extracted
from spile.core.errors import InputError
from spile.corpus.files import find_files
from spile.corpus.formats.byte_files import refuse_wide
from spile.corpus.formats.contract import CorpusFile
from spile.corpus.reader import CorpusReader
from support.texts import units_of

LINES = "".join(f"line {n} of the text\n" for n in range(3000)).encode()
COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


class Counter:
    """Counts how often files were opened, and how many bytes were decompressed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened = self.bytes = 0
        real_open, real_read = CorpusFile.open, CorpusFile.read

        def counted_open(file: CorpusFile) -> BinaryIO:
            self.opened += 1
            return real_open(file)

        def counted_read(file: CorpusFile, stream: BinaryIO, size: int) -> bytes:
            data = real_read(file, stream, size)
            self.bytes += len(data)
            return data

        patch.setattr(CorpusFile, "open", counted_open)
        patch.setattr(CorpusFile, "read", counted_read)


@pytest.mark.parametrize("ending", COMPRESS)
def test_units_in_order_decompress_a_file_once_forward(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"a.txt{ending}").write_bytes(COMPRESS[ending](LINES))
    files = find_files(str(tmp_path))
    units = units_of(files, size=4000)
    assert len(units) > 10
    for chosen, wanted in ((units, len(LINES)), (units[1::3], units[1::3][-1].spans[-1].stop)):
        with monkeypatch.context() as patch:
            counter = Counter(patch)
            reader = CorpusReader(files)
            for unit in chosen:
                assert reader.read(unit.spans, unit.first_doc).ordinals[0] == unit.first_doc
            reader.close()
            assert (counter.opened, counter.bytes) == (1, wanted)


def test_a_plain_file_is_read_only_where_spans_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(LINES)
    files = find_files(str(tmp_path))
    some = units_of(files, size=4000)[7:0:-3]
    counter = Counter(monkeypatch)
    reader = CorpusReader(files)
    for unit in some:
        reader.read(unit.spans, unit.first_doc)
    reader.close()
    assert counter.bytes == sum(span.stop - span.start for unit in some for span in unit.spans)


def test_a_run_decompresses_its_corpus_once_after_the_cut(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "a.txt.gz"
    corpus.write_bytes(gzip.compress(LINES[:8000]))
    counter = Counter(monkeypatch)
    outcome = extracted(model, corpus, tmp_path / "out", unit_tokens=900)
    assert outcome.units > 5
    sample = cut = reading = 8000
    assert (counter.opened, counter.bytes) == (3, sample + cut + reading)
    assert spile.open(str(tmp_path / "out")).num_documents == LINES[:8000].count(b"\n") + 1


WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.txt.gz"])
def test_text_of_two_or_four_bytes_a_character_is_refused_in_one_line(
    encoding: str, name: str, tmp_path: Path
) -> None:
    rows = [{"text": f"Zeile {n}, größer als die letzte"} for n in range(20)]
    text = {
        "a.txt": "".join(row["text"] + "\n" for row in rows),
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "a.json": json.dumps(rows),
    }[name.removesuffix(".gz")]
    data = text.encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    files = find_files(str(path))
    with closing(CorpusReader(files)) as reader:
        for ask in (lambda: reader.sample(0), lambda: units_of(files)):
            with pytest.raises(InputError) as caught:
                ask()
            said = str(caught.value)
            kind = encoding[:6].upper()
            assert said.startswith(f"{path}: holds {kind}") and "\n" not in said
            assert f"iconv -f {encoding.upper().replace('-LE', 'LE').replace('-BE', 'BE')} " in said


def test_a_later_file_of_another_encoding_is_refused_too(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("a few words\n" * 9)
    (tmp_path / "5.txt").write_bytes(("ein paar Wörter\n" * 9).encode("utf-16"))
    with pytest.raises(InputError, match=r"5\.txt: holds UTF-16 text"):
        units_of(find_files(str(tmp_path)))


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"a", b"\x00" * 64, b"a\x00b" * 30, "日本語のテキスト\n".encode() * 9,
     b"plain text with one \x00 in it\n" * 9],
)  # fmt: skip
def test_utf8_is_not_taken_for_something_else(data: bytes, tmp_path: Path) -> None:
    refuse_wide(tmp_path / "a.txt", data)

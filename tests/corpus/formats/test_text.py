"""Bytes of spans: read forward, each once, wherever spans follow one another."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import zstandard

import spile
from chaos.harness import extracted
from spile.corpus.files import CorpusFile, find_files
from spile.corpus.reader import CorpusReader
from texts import units_of

LINES = "".join(f"line {n} of the text\n" for n in range(3000)).encode()
COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


class Counter:
    """How often files were opened, and how many bytes were decompressed."""

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

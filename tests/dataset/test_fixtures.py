"""Datasets of every kind that this version of the format has, as they were stored once.

Later versions must read these bytes. `scripts/make_fixtures.py` made them, and adds new kinds.
"""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

import spile
from dataset.test_format_page import PageReader
from spile.core.config import build
from spile.dataset.format import FORMAT
from spile.dataset.maintain.verify import verify
from spile.objects import LocalObjects

FIXTURES = Path(__file__).parents[1] / "fixtures" / "datasets" / f"v{FORMAT}"
CONTENTS: dict[str, dict[str, str]] = json.loads((FIXTURES / "contents.json").read_text())


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder / name, filter="data")
    return folder / name


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_stored_dataset_is_sound_and_has_its_rows(kind: str, tmp_path: Path) -> None:
    path = unpacked(kind, tmp_path)
    report = verify(LocalObjects(path), partial=kind == "unfinished")
    assert report.ok, report.faults
    ds = spile.open(path, partial=kind == "unfinished")
    found = {tap: digest(ds.read(tap, dtype="stored")) for tap in ds.taps}
    assert {"index": digest(ds.index(0, ds.num_tokens)), **found} == CONTENTS[kind]


@pytest.mark.parametrize(
    "kind", ["chat", "int8", "grown", "added", "dropped", "compacted", "pooled"]
)
def test_a_reader_written_from_the_page_reads_it(kind: str, tmp_path: Path) -> None:
    path = unpacked(kind, tmp_path)
    ds, plain = spile.open(path), PageReader(path)
    for tap, rows in plain.all_rows().items():
        found = ds.read(tap, 0, ds.num_tokens)
        np.testing.assert_array_equal(found, rows.reshape(found.shape))


@pytest.mark.parametrize("kind", ["unfinished", "added"])
def test_a_stored_dataset_is_continued(kind: str, tmp_path: Path) -> None:
    path, inputs = unpacked(kind, tmp_path), unpacked("inputs", tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in (
        ("docs.jsonl",) if kind in ("unfinished", "added") else ("docs.jsonl", "more.jsonl")
    ):
        shutil.copy(inputs / name, corpus)
    asked = {"model": str(inputs / "model"), "corpus": str(corpus)}
    if kind != "unfinished":
        asked["add_taps"] = "resid_post:0"
    recipe, runtime = build(asked)
    assert spile.extract(recipe, str(path), runtime).complete
    assert verify(LocalObjects(path)).ok
    if kind == "unfinished":
        ds, whole = spile.open(path), spile.open(unpacked("text", tmp_path))
        count = whole.num_tokens
        assert ds.index(0, count).tobytes() == whole.index(0, count).tobytes()
        np.testing.assert_allclose(  # another machine may round differently
            ds.read("logprob", 0, count).astype(np.float32),
            whole.read("logprob", 0, count).astype(np.float32),
            rtol=2**-7, atol=2**-7,
        )  # fmt: skip

"""A unit prepared for the model: documents read or skipped, packed rows, documents file."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.dataset.records.ledger import Ledger
from spile.objects import MemoryObjects
from spile.plan import job as job_module
from spile.plan.job import ExtractionJob, PreparedUnit, prepare_documents, prepare_unit
from spile.plan.resolve import resolve
from support import tiny


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return tiny.write_corpus(tmp_path / "c.jsonl")


def job_of(model: Path, corpus: Path, **fields: Any) -> ExtractionJob:
    asked = {"taps": "embed", "seq_len": 64, "unit_tokens": 1500, "keep": "id", **fields}
    recipe = Recipe(model=str(model), corpus=str(corpus), **asked)
    return resolve(recipe, Ledger(MemoryObjects("memory://job")), "cpu")


def prepared(job: ExtractionJob, **options: Any) -> list[PreparedUnit]:
    with closing(job.reader()) as reader:
        return [prepare_unit(job, reader, unit, **options) for unit in job.units]


def test_documents_of_the_wrong_length_say_so_and_keep_their_columns(
    model: Path, corpus: Path
) -> None:
    every = prepared(job_of(model, corpus))
    lengths = {doc: len(ids) for unit in every for doc, ids in unit.tokens.items()}
    fewest = sorted(lengths.values())[len(lengths) // 2]
    short = {doc for doc, length in lengths.items() if length < fewest}
    assert short
    for whole, unit in zip(every, prepared(job_of(model, corpus, min_tokens=fewest)), strict=True):
        left_out = {*unit.tokens} - {*unit.packed.doc_tokens}
        assert left_out == short & {*whole.tokens}
        told = bytes(unit.documents["skipped"])
        assert told.count(b"under --min-tokens") == len(left_out)
        assert unit.skipped == whole.skipped + type(unit.skipped)(
            {"under --min-tokens": len(left_out)} if left_out else {}
        )
        assert unit.digest == whole.digest, "of what was read, left out afterwards or not"
        for name in ("doc", "preview", "ends/preview", "kept/id"):
            assert np.array_equal(unit.documents[name], whole.documents[name])


def test_the_tokens_are_those_that_are_packed(model: Path, corpus: Path) -> None:
    for unit in prepared(job_of(model, corpus)):
        index = unit.packed.index
        for doc, ids in unit.tokens.items():
            rows = index[index["doc"] == doc]
            assert np.array_equal(rows["token_id"][np.argsort(rows["offset"])], ids)


def test_the_table_names_every_document_and_is_made_where_it_is_wanted(
    model: Path, corpus: Path
) -> None:
    job = job_of(model, corpus)
    with closing(job.reader()) as reader:
        for unit, made in zip(job.units, prepared(job), strict=True):
            every = reader.read(unit.spans, unit.first_doc, unit.skip).every
            assert made.documents["doc"].tolist() == [document.ordinal for document in every]
    assert all(unit.documents == {} for unit in prepared(job, with_table=False))


def test_the_stages_are_timed_in_their_order(model: Path, corpus: Path) -> None:
    stages: list[str] = []

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        stages.append(stage)
        yield

    job = job_of(model, corpus)
    prepared(job, timed=timed)
    own = ["reading", "preparing", "tokenizing", "packing"]
    assert stages == own * len(job.units)


def test_a_sample_is_prepared_as_a_unit_is(model: Path, corpus: Path) -> None:
    job = job_of(model, corpus, keep="none")
    with closing(job.reader()) as reader:
        documents, _ = reader.sample(0)
    sample = prepare_documents(job.recipe, job.tokenizer, documents)
    assert sample.packed.num_docs == len(documents.usable) > 10


def test_a_unit_with_too_many_labels_is_refused_with_their_bytes(
    model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(model, corpus, reduce="mean", by="id")
    most = max(unit.packed.num_rows for unit in prepared(job))
    monkeypatch.setattr(job_module, "_MOST_LABELS", most)
    assert prepared(job)
    monkeypatch.setattr(job_module, "_MOST_LABELS", most - 1)
    told = rf"--reduce mean --by id: unit \d+ has {most} labels, which take .* in each unit"
    with pytest.raises(ConfigError, match=told):
        prepared(job)

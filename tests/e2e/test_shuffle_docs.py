"""Units in a drawn order make a dataset like any other: resumed, audited, compacted, checked."""

import dataclasses
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import check_refused, check_same, extracted, launch, run
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import open_objects
from spile.plan.resolve import resolve
from support import stored, tiny

FILES, DOCUMENTS = 6, 15


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shuffled")
    for number in range(FILES):
        tiny.write_corpus(folder / f"{number}.jsonl", DOCUMENTS, seed=number)
    return folder


def flags(model: Path, corpus: Path, out: Path, **more: Any) -> list[object]:
    given = {"model": model, "corpus": corpus, "taps": "embed", "seq_len": 64,
             "unit_tokens": 600, "compute_dtype": "float32", "shuffle_docs": 0, **more,
             "out": out}  # fmt: skip
    return [part for k, v in given.items() for part in (f"--{k.replace('_', '-')}", v)]


@pytest.fixture(scope="module")
def shuffled(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    assert run("extract", *flags(model, corpus, out)).code == 0
    return out


def kept(out: Path) -> list[int]:
    dataset = spile.open(str(out))
    return np.unique(dataset.index(0, dataset.num_tokens)["doc"]).tolist()


@pytest.mark.full
def test_a_killed_run_goes_on_and_is_the_same(model: Path, corpus: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run("extract", *flags(model, corpus, whole)).code == 0
    process = launch({"kill": "commit after", "nth": 3}, "extract", *flags(model, corpus, killed))
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    refused = run("extract", *flags(model, corpus, killed, shuffle_docs=1))
    check_refused(refused, 2, "shuffle_docs: stored 0, now 1")
    assert run("extract", "--out", killed).code == 0
    check_same(killed, whole)
    assert run("verify", killed, "--json").json["faults"] == []
    assert kept(killed) == list(range(FILES * DOCUMENTS))


def test_limits_are_samples_of_the_whole_corpus(model: Path, corpus: Path, tmp_path: Path) -> None:
    outcome = extracted(model, corpus, tmp_path / "docs", shuffle_docs=0, max_docs=25,
                        unit_tokens=100)  # fmt: skip
    assert outcome.documents == 25
    assert len({doc // DOCUMENTS for doc in kept(tmp_path / "docs")}) >= 4
    extracted(model, corpus, tmp_path / "tokens", shuffle_docs=0, max_tokens=1500, unit_tokens=100)
    assert len({doc // DOCUMENTS for doc in kept(tmp_path / "tokens")}) >= 4


def test_merged_units_know_documents_that_do_not_follow_one_another(
    shuffled: Path, tmp_path: Path
) -> None:
    out, dest, again = shuffled, tmp_path / "dest", tmp_path / "again"
    said = run("compact", out, dest, "--json")
    assert said.code == 0 and said.json["units"] == 1 < said.json["units_before"], said.err
    assert run("compact", dest, again).code == 0
    source = spile.open(str(out))
    for place in (dest, again):
        assert run("verify", place, "--json").json["faults"] == []
        (unit,) = Ledger(open_objects(str(place))).table().units
        runs = unit.doc_runs
        assert len(runs) > 3 and sum(count for _, count in runs) == FILES * DOCUMENTS
        copy = spile.open(str(place))
        for doc in (0, 1, 44, FILES * DOCUMENTS - 1):
            one, other = source.document(doc), copy.document(doc)
            assert np.array_equal(one.index, other.index)
            assert np.array_equal(one.read("embed"), other.read("embed"))
    job = resolve(spile.Recipe(), Ledger(open_objects(str(again))), "cpu")
    with closing(job.reader()) as reader:
        (unit,) = job.units
        read = reader.read(unit.spans, unit.first_doc)
    assert read.ordinals != sorted(read.ordinals) == list(range(FILES * DOCUMENTS))
    for doc, tokens in zip(read.ordinals, job.tokenizer.encode(read.texts), strict=True):
        assert np.array_equal(source.document(doc).index["token_id"], tokens)


def test_a_document_that_is_in_two_units_or_in_none_is_found(
    shuffled: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(shuffled, tmp_path / "out"))
    table = Ledger(open_objects(str(out))).table()
    for change in (1, -1):
        units = [*table.units]
        moved = sorted(units, key=lambda unit: unit.first_doc)[1]
        units[moved.id] = dataclasses.replace(moved, first_doc=moved.first_doc + change)
        forged = dataclasses.replace(table, units=UnitColumns.of(units))
        stored.replace_table(open_objects(str(out)), forged)
        faults = run("verify", out, "--json").json["faults"]
        assert any("does not follow" in fault for fault in faults), faults

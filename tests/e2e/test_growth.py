"""A dataset whose corpus has grown has the rows of one extraction of the whole corpus."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.config import build
from spile.core.errors import DriftError, Interrupted, StoreError
from spile.dataset.maintain.assemble import copy_part
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.objects import LocalObjects
from spile.run.extract import Outcome
from support import tiny

RECIPE: dict[str, Any] = {
    "taps": "resid_post:0,mlp_out:1",
    "seq_len": 32,
    "unit_tokens": 300,
    "compute_dtype": "float32",
    "store_dtype": "float32",
}


def documents(path: Path, names: str, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [{"text": f"{name} {tiny.words(rng, 30)}", "id": name} for name in names]
    path.write_text("".join(json.dumps(each) + "\n" for each in texts))
    return path


def extract(
    model: Path, out: Path, *, stop: threading.Event | None = None, **options: Any
) -> Outcome:
    recipe, runtime = build({"model": str(model), **RECIPE, **options})
    return spile.extract(recipe, str(out), runtime, stop=stop)


def by_name(path: Path, **opened: Any) -> dict[str, dict[str, np.ndarray]]:
    """The rows of each document in reading order, by a name that does not depend on its place."""
    ds = spile.open(path, **opened)
    every = ds.documents().to_pylist()
    found: dict[str, dict[str, np.ndarray]] = {}
    for row in every:
        if row["rows"]:
            document = ds.document(row["doc"])
            rows = {tap: document.read(tap) for tap in ds.taps}
            beside = {name: document.index[name] for name in ("token_id", "offset", "pos", "flags")}
            assert row["id"] not in found
            found[row["id"]] = {**rows, **beside}
    return found


def check_same(
    one: dict[str, dict[str, np.ndarray]], other: dict[str, dict[str, np.ndarray]]
) -> None:
    assert one.keys() == other.keys()
    for name, rows in one.items():
        for what, values in rows.items():
            assert np.array_equal(values, other[name][what]), (name, what)


def sound(path: Path) -> None:
    report = verify(LocalObjects(path))
    assert report.ok and not report.orphans, (report.faults, report.orphans)


def test_added_documents_are_those_of_one_extraction_of_the_whole_corpus(
    model: Path, tmp_path: Path
) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    documents(corpus / "m.jsonl", "abcdefgh", 1)
    extract(model, out, corpus=str(corpus))
    first = by_name(out)
    old, before = spile.open(out), Ledger(LocalObjects(out)).table()
    rows = old.read("resid_post.0", 0, old.num_tokens).copy()
    documents(corpus / "a.jsonl", "ijklm", 2)  # (its name comes first, its units last)
    documents(corpus / "z.jsonl", "nop", 3)
    with pytest.raises(DriftError, match="1 file', now '3 files'.*--more"):
        extract(model, out)
    outcome = extract(model, out, more=True)
    grown = spile.open(out)
    assert outcome.documents == grown.num_documents == 16
    assert grown.num_tokens > old.num_tokens
    # What was there keeps its place, to the bit, and whoever reads it goes on.
    assert np.array_equal(grown.read("resid_post.0", 0, len(rows)), rows)
    assert np.array_equal(old.read("resid_post.0", 0, 10**9), rows)
    assert grown.documents(["id"])["id"].to_pylist() == list("abcdefghijklmnop")
    assert Ledger(LocalObjects(out)).table().at(0) == before
    extract(model, tmp_path / "whole", corpus=str(corpus))
    whole = by_name(tmp_path / "whole")
    check_same(by_name(out), whole)
    check_same(first, {name: whole[name] for name in first})
    for tap in grown.taps:
        one, other = grown.statistics(tap), spile.open(tmp_path / "whole").statistics(tap)
        assert one.count == other.count
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-6, atol=1e-9)
    sound(out)


def test_more_of_a_corpus_with_nothing_new_changes_nothing(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, out = documents(tmp_path / "c.jsonl", "abcd", 1), tmp_path / "out"
    extract(model, out, corpus=str(corpus))
    before = sorted(path for path in out.rglob("*") if "workers" not in str(path))
    with caplog.at_level("INFO"):
        outcome = extract(model, out, more=True)
    assert outcome.complete and "nothing new" in caplog.text
    assert sorted(path for path in out.rglob("*") if "workers" not in str(path)) == before


@pytest.mark.full
def test_a_larger_limit_goes_on_after_the_last_document(model: Path, tmp_path: Path) -> None:
    corpus, out = documents(tmp_path / "c.jsonl", "abcdefghij", 1), tmp_path / "out"
    extract(model, out, corpus=str(corpus), max_docs=3)
    extract(model, out, more=True, max_docs=7)
    extract(model, out, max_docs=7)  # (the same, resumed)
    assert spile.open(out).documents(["id"])["id"].to_pylist() == list("abcdefg")
    extract(model, out, more=True, max_docs=100)
    assert len(Ledger(LocalObjects(out)).table().generations) == 2
    extract(model, tmp_path / "whole", corpus=str(corpus))
    check_same(by_name(out), by_name(tmp_path / "whole"))
    sound(out)


def test_another_corpus_is_added_and_found_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    corpus = documents(tmp_path / "c.jsonl", "abc", 1)
    other = documents(tmp_path / "other" / "d.jsonl", "def", 2)
    extract(model, out, corpus=str(corpus))
    extract(model, out, add_corpus=str(other.parent))
    extract(model, out, add_corpus=str(other.parent))
    assert len(Ledger(LocalObjects(out)).table().generations) == 1
    documents(other.parent / "e.jsonl", "gh", 3)
    extract(model, out, more=True)
    assert spile.open(out).documents(["id"])["id"].to_pylist() == list("abcdefgh")
    other.write_text("changed")
    with pytest.raises(DriftError, match=r"corpus file .*d\.jsonl"):
        extract(model, out, more=True)


def test_an_interrupted_growth_is_continued_without_more(model: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    documents(corpus / "a.jsonl", "abcd", 1)
    extract(model, out, corpus=str(corpus))
    rows = spile.open(out).num_tokens
    documents(corpus / "b.jsonl", "efghijkl", 2)
    outcome = extract(model, out, more=True, max_bytes=1)
    assert not outcome.complete
    assert spile.open(out).num_tokens == rows  # as before
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        extract(model, out, stop=stop)
    assert extract(model, out).complete
    assert spile.open(out, partial=True).num_documents == 12
    sound(out)


@pytest.mark.full
def test_two_processes_that_add_the_same_make_one_generation(model: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    documents(corpus / "a.jsonl", "abcd", 1)
    extract(model, out, corpus=str(corpus))
    documents(corpus / "b.jsonl", "efghijkl", 2)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: extract(model, out, more=True), range(2)))
    assert [each.documents for each in outcomes] == [12, 12]
    assert len(Ledger(LocalObjects(out)).table().generations) == 1
    sound(out)


def test_taps_that_were_added_must_cover_a_generation_before_it_is_read(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    documents(corpus / "a.jsonl", "abcd", 1)
    # A row for each context: the units of one extraction pack others side by side, and sums over a
    # row's keys may round differently from place to place.
    extract(model, out, corpus=str(corpus), pack="none")
    added = {"taps": None, "add_taps": "resid_post:1"}
    extract(model, out, **added)
    documents(corpus / "b.jsonl", "efgh", 2)
    with caplog.at_level("WARNING"):
        extract(model, out, more=True)
    assert "--add-taps resid_post.1" in caplog.text
    ds = spile.open(out)
    assert ds.num_documents == 4 and ds.taps == ["resid_post.0", "mlp_out.1", "resid_post.1"]
    assert spile.open(out, taps=["mlp_out.1"]).num_documents == 8
    assert verify(LocalObjects(out)).ok
    with pytest.raises(StoreError, match="resid_post.1 lack the documents.*or choose others"):
        copy_part(LocalObjects(out), LocalObjects(tmp_path / "part"))
    copy_part(LocalObjects(out), LocalObjects(tmp_path / "part"), taps="mlp_out.1")
    assert spile.open(tmp_path / "part").num_documents == 8
    extract(model, out, **added)
    both = {**RECIPE, "taps": "resid_post:0,mlp_out:1,resid_post:1", "pack": "none"}
    extract(model, tmp_path / "whole", corpus=str(corpus), **both)
    check_same(by_name(out), by_name(tmp_path / "whole"))
    sound(out)

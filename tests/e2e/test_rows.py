"""Row filters from end to end: kept rows equal those of a run that keeps everything."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import Work, check_refused, check_same, check_sound, files, launch, run
from spile.core.errors import StoreError
from spile.core.index import BOS, END, FIRST
from support import tiny
from support.marks import some

OPTIONS: dict[str, Any] = {
    "taps": "embed,q:1,resid_post:2,logprob",
    "seq_len": 32,
    "unit_tokens": 300,
    "compute_dtype": "float32",
    "batch_tokens": 128,
}


@dataclass(frozen=True)
class Filter:
    """A filter, and the meaning of its `where` in numpy."""

    where: str | None
    every: int | None
    chosen: Callable[[np.ndarray], np.ndarray]


FILTERS = {
    "sampled": Filter(
        "not bos and pos >= 2", 3, lambda index: (index["flags"] & BOS == 0) & (index["pos"] >= 2)
    ),
    "ends": Filter("end", None, lambda index: index["flags"] & END != 0),
    "documents": Filter("doc % 3 == 1", None, lambda index: index["doc"] % 3 == 1),
}


def thinned(index: np.ndarray, chosen: np.ndarray, every: int) -> np.ndarray:
    """Keep the first of each context's chosen rows, and every N-th after it."""
    kept = np.zeros(len(index), bool)
    seen = 0
    for row, entry in enumerate(index):
        seen = 0 if entry["flags"] & FIRST else seen
        kept[row] = chosen[row] and seen % every == 0
        seen += bool(chosen[row])
    return kept


@dataclass(frozen=True)
class Whole:
    """A run that keeps everything."""

    work: Work
    dataset: spile.Dataset
    index: np.ndarray


@dataclass(frozen=True)
class Filtered:
    """A run that keeps the rows of `mask`."""

    filter: Filter
    out: Path
    dataset: spile.Dataset
    mask: np.ndarray


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    work = Work(model, tiny.write_corpus(folder / "docs.jsonl", 16, seed=4, mean=2.4), OPTIONS)
    work.extract(folder / "out")
    dataset = spile.open(str(folder / "out"))
    index = dataset.index(0, dataset.num_tokens)
    # Else little would be tested: long documents and short ones, several units.
    lengths = np.bincount(index["doc"])
    assert lengths.max() > 3 * 32 and lengths.min() < 32
    assert len(list((folder / "out" / "done").glob("*/*"))) >= 3
    return Whole(work, dataset, index)


@pytest.fixture(scope="module", params=some(FILTERS, "sampled"))
def filtered(
    request: pytest.FixtureRequest, whole: Whole, tmp_path_factory: pytest.TempPathFactory
) -> Filtered:
    chosen = FILTERS[request.param]
    out = tmp_path_factory.mktemp("filtered") / "out"
    whole.work.extract(out, where=chosen.where, every=chosen.every)
    mask = thinned(whole.index, chosen.chosen(whole.index), chosen.every or 1)
    return Filtered(chosen, out, spile.open(str(out)), mask)


def test_the_index_is_that_of_a_whole_run_filtered(whole: Whole, filtered: Filtered) -> None:
    dataset = filtered.dataset
    assert 0 < dataset.num_tokens < 0.5 * len(whole.index)
    assert np.array_equal(dataset.index(0, dataset.num_tokens), whole.index[filtered.mask])
    check_sound(filtered.out)


def test_rows_are_those_of_a_whole_run(whole: Whole, filtered: Filtered) -> None:
    for tap in whole.dataset.taps:
        wanted = whole.dataset.read(tap, 0, len(whole.index))[filtered.mask]
        found = filtered.dataset.read(tap, 0, filtered.dataset.num_tokens)
        assert found.shape == wanted.shape
        if tap == "logprob":  # the head runs on the kept rows alone
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        else:
            assert found.tobytes() == wanted.tobytes(), tap
        wide = wanted.reshape(len(wanted), -1).astype(np.float64)
        stats = filtered.dataset.statistics(tap)
        assert stats.count == len(wanted)
        np.testing.assert_allclose(stats.mean, wide.mean(0), atol=1e-5)
        np.testing.assert_allclose(stats.variance, wide.var(0), atol=1e-5 * max(1.0, wide.var()))


def test_a_document_has_the_rows_that_were_kept_of_it(whole: Whole, filtered: Filtered) -> None:
    kept = whole.index[filtered.mask]
    absent = set(whole.index["doc"]) - set(kept["doc"])
    assert bool(absent) == (filtered.filter.where == "doc % 3 == 1")
    for doc in np.unique(whole.index["doc"]).tolist():
        if doc in absent:
            with pytest.raises(StoreError, match=f"document {doc} is not in .*--where"):
                filtered.dataset.document(doc)
            continue
        document, full = filtered.dataset.document(doc), whole.dataset.document(doc)
        wanted = np.isin(full.index["offset"], kept["offset"][kept["doc"] == doc])
        assert np.array_equal(document.index, full.index[wanted])
        for tap in ("q.1", "resid_post.2"):
            assert document[tap].tobytes() == full[tap][wanted].tobytes()


def test_rows_kept_are_told_from_tokens_read(whole: Whole, filtered: Filtered) -> None:
    rows, tokens = int(filtered.mask.sum()), len(whole.index)
    flags = whole.work.flags(filtered.out, where=filtered.filter.where, every=filtered.filter.every)
    again = run("extract", *flags, "--json").json
    assert (again["rows"], again["tokens"]) == (rows, tokens)
    assert again["documents"] == 16
    status = run("status", filtered.out, "--json").json
    assert (status["rows"], status["tokens"], status["documents"]) == (rows, tokens, 16)
    assert run("verify", filtered.out, "--json").json["rows"] == rows
    lines = {line.split()[0]: line for line in run("status", filtered.out).out.splitlines()}
    assert f"{rows:,}" in lines["rows"]
    assert f"{tokens:,}" in lines["tokens"]
    printed = run("extract", *flags).out
    assert f"{rows:,} rows per tap" in printed
    assert f"{tokens:,} tokens" in printed


def test_a_filter_is_part_of_the_recipe_however_it_is_spelled(whole: Whole, tmp_path: Path) -> None:
    given = {"where": "not bos and pos in (3, 1, 2)", "every": 2, "taps": "embed"}
    whole.work.extract(tmp_path / "whole", **given)
    out = tmp_path / "out"
    flags = whole.work.flags(out, **given)
    process = launch({"kill": "commit after", "nth": 1}, "extract", *flags)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    before = files(out)

    def resumed(**changes: Any) -> Any:
        return run("extract", *whole.work.flags(out, **{**given, **changes}))

    other = "not bos and pos in (1, 2)"
    check_refused(resumed(where=other), 2, out, "where: stored", given["where"][:7], other)
    check_refused(resumed(every=1), 2, out, "every: stored 2, now None")
    assert files(out) == before
    same = "(not bos) and\n  (pos in [1,2, 3,2])"
    result = resumed(where=same)
    assert result.code == 0, result.err
    check_same(out, tmp_path / "whole")
    after = files(out)
    assert run("extract", "--out", out).code == 0
    assert files(out) == after
    assert spile.open(str(out)).recipe.where == "not bos and pos in (1, 2, 3)"


def test_every_first_row_is_every_row(whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole.work.extract(out, every=1, taps="embed")
    assert spile.open(str(out)).recipe.keeps_all
    whole.work.extract(out, taps="embed")
    assert spile.open(str(out)).num_tokens == len(whole.index)


def test_a_filter_that_keeps_nothing_is_said_so_in_one_line(whole: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = whole.work.flags(out, where="pos > 1000")
    for _ in range(2):  # when the work is done, and when there is none left
        check_refused(run("extract", *flags), 2, "--where", "pos > 1000", f"{len(whole.index):,}")
    check_sound(out)
    status = run("status", out, "--json").json
    assert (status["state"], status["rows"], status["tokens"]) == ("empty", 0, len(whole.index))
    dataset = spile.open(str(out))
    assert dataset.num_tokens == 0
    assert dataset.read("q.1", 0, 5).shape == (0, 4, 8)
    assert dataset.statistics("logprob").count == 0


def test_a_plan_counts_the_rows_that_are_kept(whole: Whole, filtered: Filtered) -> None:
    chosen = filtered.filter
    absent = filtered.out.parent / "absent"
    flags = whole.work.flags(absent, where=chosen.where, every=chosen.every)
    plan = run("plan", "--calibrate", "off", *flags, "--json").json
    extracted = run("status", filtered.out, "--json").json
    assert plan["rows"] == pytest.approx(extracted["rows"], rel=0.1)
    assert plan["total_bytes"] == pytest.approx(extracted["bytes"], rel=0.25)
    assert f"{plan['rows']:,}" in run("plan", "--calibrate", "off", *flags).out
    assert not absent.exists()

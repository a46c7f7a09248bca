"""An engine's log-probabilities are compared with the model's own: kept, warned of, checked."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import Work, check_sound, run
from spile.core.disagreement import BOUND
from support import tiny
from support.worlds import Group

COLUMNS = ("disagreement", "disagreement_max", "disagreement_tokens")
DOCUMENTS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("agreeing") / "model")


@pytest.fixture(scope="module")
def rows(model: Path) -> list[dict[str, Any]]:
    """Answers with the model's own log-probabilities, of which `answer` tokens are the last."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(3, 20, DOCUMENTS).tolist()
    answers = rng.integers(1, 25, DOCUMENTS).tolist()
    every = rng.integers(0, 250, (DOCUMENTS, max(prompts) + max(answers)))
    own = np.asarray(spile.load_model(str(model))(every, "logprob")["logprob"])
    found: list[dict[str, Any]] = []
    for prompt, answer, ids, logs in zip(prompts, answers, every, own, strict=True):
        logs = [None] * prompt + logs[prompt - 1 : prompt + answer - 1].tolist()
        mask = [0] * prompt + [1] * answer
        found.append({"ids": ids[: len(mask)].tolist(), "logs": logs, "mask": mask})
    return found


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(model: Path, corpus: Path, **options: Any) -> spile.Recipe:
    given: dict[str, Any] = {
        "model": str(model), "corpus": str(corpus), "taps": "resid_post:0", "seq_len": 64,
        "tokens_column": "ids", "logprobs_column": "logs", "roles_column": "mask",
        "compute_dtype": "float32", "unit_tokens": 256,
    }  # fmt: skip
    return spile.Recipe(**given | options)


def extracted(model: Path, corpus: Path, out: Path, **options: Any) -> spile.Dataset:
    runtime = {"max_disagreement": options.pop("max_disagreement", BOUND),
               "weights": options.pop("weights", "auto")}  # fmt: skip
    spile.extract(asked(model, corpus, **options), str(out), spile.Runtime(**runtime))
    return spile.open(str(out))


def table_of(ds: spile.Dataset) -> list[dict[str, Any]]:
    return ds.documents().to_pylist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"where": "assistant"},
        pytest.param({"where": "first"}, marks=pytest.mark.full),
        {"pool": "mean", "where": "assistant"},
        pytest.param({"pool": "last"}, marks=pytest.mark.full),
        pytest.param({"taps": "resid_post:0,logprob"}, marks=pytest.mark.full),
        {"weights": "host"},
        pytest.param({"long_docs": "truncate"}, marks=pytest.mark.full),
        pytest.param({"taps": "final_norm", "every": 2}, marks=pytest.mark.full),
        pytest.param({"store_dtype": "int8"}, marks=pytest.mark.full),
        pytest.param({"store_dtype": "float8_e4m3"}, marks=pytest.mark.full),
        pytest.param({"reduce": "mean,cov", "by": "label", "where": None}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_models_own_logprobs_agree(
    model: Path, rows: list[dict[str, Any]], tmp_path: Path, options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    labelled = [{**row, "label": str(n % 2)} for n, row in enumerate(rows)]
    corpus = written(tmp_path / "c.jsonl", labelled)
    ds = extracted(model, corpus, tmp_path / "out", **options)
    assert ds.document_columns[-3:] == list(COLUMNS)
    for row, told in zip(rows, table_of(ds), strict=True):
        assert told["disagreement_tokens"] == sum(row["mask"])
        assert told["disagreement"] <= told["disagreement_max"] < 1e-4
    assert "disagreement" not in caplog.text


def test_a_document_that_disagrees_is_told_with_its_distance(
    model: Path, rows: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt = [dict(row) for row in rows]
    prompt = spoilt[5]["mask"].index(1)
    shifts = np.arange(sum(spoilt[5]["mask"])) + 1.0
    logs = spoilt[5]["logs"]
    spoilt[5]["logs"] = [*logs[:prompt], *(np.array(logs[prompt:]) - shifts)]
    ds = extracted(model, written(tmp_path / "c.jsonl", spoilt), tmp_path / "out")
    found = table_of(ds)
    assert found[5]["disagreement"] == pytest.approx(shifts.mean(), rel=1e-5)
    assert found[5]["disagreement_max"] == pytest.approx(shifts.max(), rel=1e-5)
    others = [told["disagreement"] for n, told in enumerate(found) if n != 5]
    assert max(others) < 1e-4
    assert "disagreement: document 5: the engine's log-probabilities of" in caplog.text
    assert "disagreement: 1 of 24 documents beyond 0.1" in caplog.text


@pytest.mark.full
def test_it_is_kept_by_growth_copies_merges_and_added_taps(
    model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    given = {column: None for column in COLUMNS}
    folder = tmp_path / "corpus"
    written(folder / "a.jsonl", rows[:10])
    recipe, out = asked(model, folder, unit_tokens=64), tmp_path / "out"
    spile.extract(recipe, str(out), spile.Runtime(max_bytes=40_000))  # ends after some units
    begun = spile.open(str(out), partial=True).num_documents
    assert 0 < begun < 10
    spile.extract(recipe, str(out))
    shutil.copytree(out, tmp_path / "first")
    written(folder / "b.jsonl", rows[10:])
    spile.extract(asked(model, folder / "b.jsonl", unit_tokens=64), str(tmp_path / "second"))
    spile.extract(spile.Recipe(more=True), str(out))
    grown = table_of(spile.open(str(out)))
    assert [told["disagreement_tokens"] for told in grown] == [sum(row["mask"]) for row in rows]
    assert max(told["disagreement_max"] for told in grown) < 1e-4

    spile.extract(spile.Recipe(add_taps="embed"), str(out))
    assert table_of(spile.open(str(out))) == grown
    for verb, *places in (
        ("copy", out, tmp_path / "copy"), ("compact", out, tmp_path / "compact"),
        ("shuffle", out, tmp_path / "shuffle"),
        ("merge", tmp_path / "first", tmp_path / "second", tmp_path / "merge"),
    ):  # fmt: skip
        assert run(verb, *places).code == 0
        found = sorted(table_of(spile.open(str(places[-1]))), key=lambda told: told["doc"])
        for told, before in zip(found, grown, strict=True):
            assert {**told, **given, "first_row": 0} == {**before, **given, "first_row": 0}
            assert [told[name] for name in COLUMNS] == [before[name] for name in COLUMNS]
    assert run("verify", out, "--json").json["faults"] == []


@pytest.mark.full
def test_two_processes_compare_what_one_compares(
    model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    corpus = written(tmp_path / "c.jsonl", rows)
    named = {"tokens_column": "ids", "logprobs_column": "logs", "roles_column": "mask"}
    recipe = {"taps": "resid_post:0", "seq_len": 32, "unit_tokens": 256, "batch_tokens": 128,
              "compute_dtype": "float32", **named}  # fmt: skip
    work = Work(model, corpus, recipe)
    work.extract(tmp_path / "one")
    with Group(work.flags(tmp_path / "two", mesh="2d"), 2, 2) as world:
        world.finish()
    check_sound(tmp_path / "two")
    one, two = (table_of(spile.open(str(tmp_path / name))) for name in ("one", "two"))
    for found, wanted in zip(two, one, strict=True):
        assert found["disagreement_tokens"] == wanted["disagreement_tokens"]
        assert found["disagreement_max"] < 1e-4

"""`spile check` fails if the engine of the rollouts was not the model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import run
from support import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("judged") / "model")


def made(model: Path, folder: Path, **options: Any) -> Path:
    """A dataset of which only document 7 was sampled by another model."""
    ids = np.random.default_rng(2).integers(0, 250, (10, 24))
    own = np.array(spile.load_model(str(model))(ids, "logprob")["logprob"])
    own[7] -= 0.3
    folder.mkdir()
    corpus = folder / "c.jsonl"
    rows = [
        {"ids": tokens.tolist(), "logs": [None, *logs[:-1].tolist()]}
        for tokens, logs in zip(ids, own, strict=True)
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "model": str(model), "corpus": str(corpus), "taps": "resid_post:1", "seq_len": 64,
        "tokens_column": "ids", "logprobs_column": "logs", "compute_dtype": "float32",
    }  # fmt: skip
    spile.extract(spile.Recipe(**given | options), str(folder / "out"))
    return folder / "out"


def test_one_document_fails_the_check_and_a_wider_bound_passes(model: Path, tmp_path: Path) -> None:
    out = made(model, tmp_path / "a")
    failed = run("check", out)
    assert failed.code == 3
    assert "1 beyond it: 7" in failed.out and "the engine disagrees with the model" in failed.out
    assert "disagree with the reference" not in failed.out
    report = run("check", out, "--json", "--max-disagreement", "0.5")
    assert report.code == 0 and report.json["ok"]
    assert report.json["disagreement"]["mean"] == pytest.approx(0.03, rel=1e-3)
    assert report.json["disagreement"]["tokens"] == 230


def test_without_the_engines_numbers_nothing_is_said(model: Path, tmp_path: Path) -> None:
    out = made(model, tmp_path / "a", logprobs_column="none")
    checked = run("check", out, "--json")
    assert checked.code == 0 and checked.json["disagreement"] is None

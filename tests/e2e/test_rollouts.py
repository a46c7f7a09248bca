"""A directory of rollouts is a corpus: speakers, answers, thinking, engines' log-probabilities."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import spile
from chaos.harness import run
from spile.core.index import FLAGS
from support import tiny
from support.engine_server import serving

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.write_model(tmp_path_factory.mktemp("rollouts") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(model / "tokenizer.json"))
    return model


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of twelve prompts, two answers each."""
    folder = tmp_path_factory.mktemp("made")
    rows = [{"messages": [{"role": "user", "content": f"what is {n}?"}], "level": n % 3}
            for n in range(12)]  # fmt: skip
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving() as server:
        done = run(
            "rollouts", "--model", model, "--corpus", folder / "c.jsonl", "--server", server.url,
            "--out", folder / "out", "--answer-tokens", 9, "--unit-prompts", 5, "--per-prompt", 2,
        )  # fmt: skip
    assert done.code == 0, done.err
    return folder / "out"


def extracted(model: Path, corpus: object, out: Path, **options: Any) -> spile.Dataset:
    asked: dict[str, Any] = {"taps": "resid_post:1", "seq_len": 64, "logprobs_column": "none"}
    asked |= {"model": str(model), "corpus": str(corpus), **options}
    spile.extract(spile.Recipe(**asked), str(out))
    return spile.open(str(out))


def answers_of(made: Path) -> list[dict[str, Any]]:
    files = sorted((made / "data").rglob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def test_rollouts_are_read_with_their_speakers_and_columns(
    model: Path, made: Path, tmp_path: Path
) -> None:
    ds = extracted(model, made, tmp_path / "out", where="assistant")
    rows = answers_of(made)
    table = ds.documents().to_pylist()
    assert [(row["prompt"], row["answer"]) for row in table] == [
        (prompt, answer) for prompt in range(12) for answer in range(2)
    ]
    assert table[5]["level"] == 2 and table[5]["finish_reason"] == "stop"
    assert ds.recipe.roles_column == "roles" and ds.recipe.tokens_column == "token_ids"
    for doc, row in enumerate(rows):
        index = ds.document(doc).index
        assert index["token_id"].tolist() == row["token_ids"][row["prompt_tokens"] :]
        assert index["offset"][0] == row["prompt_tokens"]
        assert (index["flags"] & FLAGS["answer"] != 0).all()


def test_one_answer_of_each_prompt_can_be_chosen(model: Path, made: Path, tmp_path: Path) -> None:
    ds = extracted(model, made, tmp_path / "out", filter="answer == 0 and level > 0")
    read = [row for row in ds.documents().to_pylist() if row["skipped"] is None]
    assert [(row["prompt"], row["answer"]) for row in read] == [
        (prompt, 0) for prompt in range(12) if prompt % 3
    ]


def test_one_file_of_rollouts_is_as_good_as_all(model: Path, made: Path, tmp_path: Path) -> None:
    (file, *_) = sorted((made / "data").rglob("*.parquet"))
    ds = extracted(model, file, tmp_path / "out", where="user")
    rows = answers_of(made)
    for doc in range(10):
        index = ds.document(doc).index
        flags = np.array(rows[doc]["roles"])
        wanted = np.flatnonzero(flags & FLAGS["user"])
        assert index["offset"].tolist() == wanted.tolist() and len(wanted)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_answers_of_other_engines_are_read_by_named_columns(
    model: Path, tmp_path: Path, suffix: str
) -> None:
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    open_, close = vocabulary["<think>"], vocabulary["</think>"]
    rows = [
        {"ids": [7, 8, open_, 5, close, 4 + n], "mask": [0, 0, 1, 1, 1, 1],
         "logs": [None, -2.0, -1.0, -1.0, -0.5, -0.25], "sample": n, "name": "x"}
        for n in range(3)
    ]  # fmt: skip
    corpus = tmp_path / f"c{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), corpus)
    else:
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"tokens_column": "ids", "roles_column": "mask"}
    ds = extracted(model, corpus, tmp_path / "out", where="thinking", keep="sample", **named)
    assert ds.documents()["sample"].to_pylist() == [0, 1, 2]
    for doc in range(3):
        assert ds.document(doc).index["offset"].tolist() == [2, 3, 4]
    ds = extracted(model, corpus, tmp_path / "answers", where="answer", **named)
    assert ds.index(0, 3)["token_id"].tolist() == [4, 5, 6]


@pytest.mark.full
def test_rollouts_that_come_later_are_added(model: Path, made: Path, tmp_path: Path) -> None:
    """A directory that is not finished is read as far as it is, and later to its end."""
    growing, late = tmp_path / "growing", made / "data" / "000000"
    shutil.copytree(made, growing)
    *_, last = sorted(file.name for file in late.glob("*.parquet"))
    (growing / "data" / "000000" / last).unlink()
    begun = extracted(model, growing, tmp_path / "out", where="assistant")
    shutil.copy(late / last, growing / "data" / "000000")
    spile.extract(spile.Recipe(more=True), str(tmp_path / "out"))
    grown = spile.open(str(tmp_path / "out"))
    whole = extracted(model, made, tmp_path / "whole", where="assistant")
    table, before = (each.documents().to_pylist() for each in (grown, begun))
    assert len(before) == 20 and table[:20] == before
    wanted = whole.documents().to_pylist()
    for found, told in zip(table, wanted, strict=True):
        assert {**found, "first_row": 0} == {**told, "first_row": 0}
        rows = grown.document(found["doc"]).index["token_id"]
        assert rows.tolist() == whole.document(told["doc"]).index["token_id"].tolist()


def test_another_column_is_another_dataset(model: Path, made: Path, tmp_path: Path) -> None:
    extracted(model, made, tmp_path / "out")
    for changed in ({"roles_column": "none"}, {"logprobs_column": "logprobs"}):
        with pytest.raises(spile.DriftError, match=next(iter(changed))):
            extracted(model, made, tmp_path / "out", **changed)


def test_speakers_need_ids_and_ids_as_many(model: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"text": "a", "ids": [1, 2], "mask": [1]}) + "\n")
    for options, said in (
        ({"roles_column": "mask"}, "give --tokens-column"),
        ({"roles_column": "mask", "tokens_column": "ids"}, "'mask' has 1 entries for 2 tokens"),
    ):
        flags = [w for name, value in options.items()
                 for w in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
        result = run("extract", "--model", model, "--corpus", corpus, "--taps", "embed",
                     "--out", tmp_path / "out", *flags)  # fmt: skip
        assert result.code == 2 and said in result.err

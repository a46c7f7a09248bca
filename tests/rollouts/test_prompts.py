"""Prompts are any corpus that Spile reads: texts, chats, pairs, programs."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.core.index import ROLES
from spile.rollouts.prompts import EnginePrompt, PromptCorpus
from support import tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.write_model(tmp_path_factory.mktemp("prompts") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(model: Path, corpus: object, **options: Any) -> list[EnginePrompt]:
    found = PromptCorpus(Recipe(model=str(model), corpus=str(corpus), **options), 4)
    units, _ = found.cut()
    with closing(found.open()) as reader:
        return [prompt for unit in units for prompt in reader.read(unit)]


def test_questions_become_chats_and_their_answers_are_not_read(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "completion": "no", "id": n} for n in range(6)]
    found = read(model, lines(tmp_path / "c.jsonl", rows), system="be", keep="id")
    assert [prompt.chat for prompt in found[:2]] == [
        [{"role": "user", "content": "q0"}], [{"role": "user", "content": "q1"}],
    ]  # fmt: skip
    assert found[1].text == "[system]be[user]q1>" and found[1].columns == {"id": 1}
    user = [int(r) == ROLES["user"] for r in found[1].roles]
    assert [c for c, is_user in zip(found[1].text, user, strict=True) if is_user] == ["q", "1"]


def test_prompts_without_a_template_are_texts(model: Path, tmp_path: Path) -> None:
    corpus = lines(tmp_path / "c.jsonl", [{"q": "x", "a": ""}])
    (found,) = read(model, corpus, prompt_column="q", prompt_suffix="!", template="none")
    assert (found.chat, found.text, found.ids.tolist()) == (None, "x!", [tiny.BOS, 87, 0])


def test_structs_of_parquet_lose_the_fields_that_are_null(model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q", "name": None}]
    pq.write_table(pa.Table.from_pylist([{"messages": chat}]), tmp_path / "c.parquet")
    (found,) = read(model, tmp_path / "c.parquet")
    assert found.chat == [{"role": "user", "content": "q"}]


def test_selections_apply_and_everything_left_out_says_why(model: Path, tmp_path: Path) -> None:
    rows = [
        {"text": "a", "n": 1},
        {"text": "", "n": 2},
        {"text": "a", "n": 3},
        {"text": "b", "n": 9},
    ]
    corpus = lines(tmp_path / "c.jsonl", rows)
    found = read(model, corpus, filter="n < 5", dedupe=True)
    assert [prompt.skipped for prompt in found] == [
        None, "empty", "duplicate", "left out by --filter",
    ]  # fmt: skip
    chats = lines(tmp_path / "d.jsonl", [{"messages": [{"role": "user", "content": str(n)}]}
                                         for n in range(40)])  # fmt: skip
    some = [prompt.skipped for prompt in read(model, chats, fraction=0.5)]
    assert 8 < some.count(None) < 32, "chats differ by their messages"


def test_corpora_that_hold_no_text_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "c.bin").write_bytes(b"\0\0" * 64)
    with pytest.raises(ConfigError, match="holds token ids"):
        PromptCorpus(Recipe(model=str(model), corpus=str(tmp_path / "c.bin")), 4)
    with pytest.raises(ConfigError, match="--corpus is missing"):
        PromptCorpus(Recipe(model=str(model)), 4)
    with pytest.raises(ConfigError, match="have a column of that name"):
        read(model, lines(tmp_path / "c.jsonl", [{"text": "a", "answer": 1}]), keep="answer")

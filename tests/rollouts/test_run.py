"""Rollouts: every prompt is answered once, whatever the server and the machine do."""

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from chaos.harness import launch, run
from spile.core.config import Recipe
from spile.core.errors import StoreError
from spile.core.index import ROLES
from spile.corpus.rollout_columns import COLUMNS
from spile.objects import open_objects
from spile.rollouts.run import RolloutOptions, rollouts
from support import tiny
from support.engine_server import FAULTS, EngineServer, sampled, serving

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.write_model(tmp_path_factory.mktemp("rollouts") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with serving() as server:
        yield server


def chats(path: Path, count: int) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"what is {n}?"}], "id": n, "level": n % 3}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"once, {n} "}) + "\n" for n in range(count)))
    return path


def rows_of(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "data").rglob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def check_each_once(out: Path, prompts: int, per_prompt: int = 1) -> list[dict[str, Any]]:
    rows = rows_of(out)
    places = [(row["prompt"], row["answer"]) for row in rows]
    assert places == [(p, a) for p in range(prompts) for a in range(per_prompt)]
    return rows


def command(model: Path, corpus: Path, server: EngineServer, out: Path, *more: object) -> Any:
    return run(
        "rollouts", "--model", model, "--corpus", corpus, "--server", server.url, "--out", out,
        "--answer-tokens", 8, *more,
    )  # fmt: skip


def test_chats_are_answered_with_ids_and_log_probabilities(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    corpus, out = chats(tmp_path / "c.jsonl", 10), tmp_path / "out"
    done = command(model, corpus, server, out, "--per-prompt", 3, "--unit-prompts", 4, "--seed", 5)
    assert done.code == 0, done.err
    rows = check_each_once(out, 10, 3)
    assert len([*(out / "data").rglob("*.parquet")]) == 3
    assert [*rows[0]][: len(COLUMNS)] == [*COLUMNS]
    for row in rows:
        messages = json.loads(row["messages"])
        said, logs = sampled(messages, row["seed"], 8)
        assert messages == [{"role": "user", "content": f"what is {row['prompt']}?"}]
        assert row["id"] == row["prompt"] and row["level"] == row["prompt"] % 3
        text = f"<user>what is {row['prompt']}?</>\n<assistant>"
        assert row["prompt_text"] == text
        ids = [ord(c) - 33 if c not in " \n" else None for c in text]
        first, prompt = row["prompt_tokens"], row["token_ids"][: row["prompt_tokens"]]
        assert all(a == b for a, b in zip(ids, prompt, strict=True) if a is not None)
        assert row["token_ids"][first:] == [each - 33 for each in said]
        assert row["logprobs"][:first] == [None] * first
        assert np.allclose(row["logprobs"][first:], logs, atol=1e-6)
        roles = np.array(row["roles"])
        assert set(roles[first:]) == {ROLES["assistant"]}
        assert set(roles[6 : text.index("</>")]) == {ROLES["user"]}
        assert (row["prompt_ids_from"], row["answer_ids_from"]) == ("tokenizer", "engine")
        assert row["finish_reason"] == "stop" and row["error"] is None
    assert len({row["seed"] for row in rows}) == 30
    assert json.loads(rows[0]["sampling"])["repetition_penalty"] == 1.0


def test_texts_are_continued_from_the_ids_that_were_sent(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    corpus, out = texts(tmp_path / "c.jsonl", 5), tmp_path / "out"
    assert command(model, corpus, server, out).code == 0
    for row in check_each_once(out, 5):
        first = row["prompt_tokens"]
        assert {row["prompt_ids_from"], row["answer_ids_from"]} == {"sent", "engine"}
        assert row["token_ids"][0] == tiny.BOS and first == 1 + len(row["prompt_text"])
        assert sampled(row["token_ids"][:first], row["seed"], 8)[0] == [
            each + 33 for each in row["token_ids"][first:]
        ]
    assert all("top_p" in body and body["logprobs"] == 1 for body in server.bodies)


def test_ids_that_no_engine_tells_are_made_by_tokenizing_and_marked(
    model: Path, tmp_path: Path
) -> None:
    with serving("unknown") as server:
        done = command(model, chats(tmp_path / "c.jsonl", 4), server, tmp_path / "out")
        assert done.code == 0 and "4 answers came without token ids" in done.out
        assert not any("return_token_ids" in body for body in server.bodies)
    for row in check_each_once(tmp_path / "out", 4):
        said, logs = sampled(json.loads(row["messages"]), row["seed"], 8)
        assert row["answer_ids_from"] == "tokenizer"
        assert row["token_ids"][row["prompt_tokens"] :] == [each - 33 for each in said]
        assert np.allclose(row["logprobs"][row["prompt_tokens"] :], logs, atol=1e-6)


@pytest.mark.parametrize("kind", [chats, texts])
def test_a_hostile_server_loses_nothing_and_doubles_nothing(
    model: Path, tmp_path: Path, kind: Any
) -> None:
    with serving("vllm", FAULTS) as server:
        done = command(
            model, kind(tmp_path / "c.jsonl", 24), server, tmp_path / "out",
            "--unit-prompts", 4, "--timeout", 1, "--concurrency", 24,
        )  # fmt: skip
        assert done.code == 0, done.err
    asked = "messages" if kind is chats else "prompt"
    for row in check_each_once(tmp_path / "out", 24):
        first = row["prompt_tokens"]
        given = json.loads(row["messages"]) if asked == "messages" else row["token_ids"][:first]
        said, logs = sampled(given, row["seed"], 8)
        assert row["token_ids"][first:] == [each - 33 for each in said]
        assert np.allclose(row["logprobs"][first:], logs, atol=1e-6)
    assert server.asked.total() > 3 * 24 and server.most_at_a_time <= 24


@pytest.mark.full
def test_memory_is_bounded_however_long_answers_are(model: Path, tmp_path: Path) -> None:
    """Three answers to each request have no end, and 24 of them come at a time."""
    corpus, peaks = chats(tmp_path / "c.jsonl", 240), list[int]()
    for number, faults in enumerate(((), ("endless", "endless", "endless"))):
        peak, out = tmp_path / f"{number}.peak", tmp_path / str(number)
        with serving("vllm", faults) as server:
            process = launch(
                {"peak": str(peak)}, "rollouts", "--model", model, "--corpus", corpus, "--server",
                server.url, "--out", out, "--answer-tokens", 8, "--concurrency", 24,
            )  # fmt: skip
            _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        check_each_once(out, 240)
        assert server.asked.total() == 240 * (1 + len(faults))
        peaks.append(int(peak.read_text()))
    assert peaks[1] < peaks[0] + 24 * 4096, peaks  # in kB: an answer is read to 1 MiB


def test_the_same_command_continues_and_other_settings_are_refused(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    corpus, out = chats(tmp_path / "c.jsonl", 9), tmp_path / "out"
    assert command(model, corpus, server, out, "--unit-prompts", 3).code == 0
    (gone,) = (out / "data").rglob("00000001.parquet")
    before = gone.read_bytes()
    gone.unlink()
    asked = sum(server.asked.values())
    assert run("rollouts", "--server", server.url, "--out", out).code == 0  # --out is enough
    assert sum(server.asked.values()) == asked + 3 and gone.read_bytes() == before
    check_each_once(out, 9)
    refused = command(model, corpus, server, out, "--temperature", "0.5")
    assert refused.code == 2 and "--temperature is 1.0 there, 0.5 here" in refused.err
    chats(corpus, 10)
    refused = run("rollouts", "--server", server.url, "--out", out)
    assert refused.code == 2 and "changed files" in refused.err


def test_refused_prompts_are_kept_with_the_servers_reason(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    corpus, out = chats(tmp_path / "c.jsonl", 12), tmp_path / "out"
    server.refused = {"what is 3?"}
    done = command(model, corpus, server, out)
    assert done.code == 0 and "1 request refused: 400: the prompt is too long" in done.out
    errors = {row["prompt"]: row["error"] for row in check_each_once(out, 12) if row["error"]}
    assert errors == {3: "refused, 400: the prompt is too long"}
    server.refused = {"what"}
    done = command(model, corpus, server, tmp_path / "other")
    assert done.code == 2 and "the server refuses every request" in done.err


def test_an_answer_at_the_end_of_a_chat_is_made_anew(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    corpus = tmp_path / "c.jsonl"
    user, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    rows = [[user, said], [user, said, user], [user], [{"role": "system", "content": "s"}, said]]
    corpus.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    assert command(model, corpus, server, tmp_path / "out", "--system", "be").code == 0
    found = check_each_once(tmp_path / "out", 4)
    system = {"role": "system", "content": "be"}
    sent = {json.dumps(body["messages"]) for body in server.bodies}
    assert sent == {json.dumps([system, user]), json.dumps([system, user, said, user])}
    assert found[3]["error"] == "ends with no message to answer"
    assert found[2]["prompt_text"].startswith("<system>be")


def test_tools_and_their_calls_are_sent_and_nulls_of_parquet_are_not(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"messages": chat, "tools": [tool]}) + "\n")
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% endfor %}"
    )
    done = command(model, corpus, server, tmp_path / "out", "--template", template)
    assert done.code == 0, done.err
    (body,) = server.bodies
    assert body["tools"] == [tool]
    assert body["messages"][1] == {"role": "assistant", "tool_calls": [call]}


def test_a_server_that_is_gone_ends_the_run_and_what_is_stored_stays(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    corpus, out = chats(tmp_path / "c.jsonl", 40), tmp_path / "out"

    def stop_later() -> None:
        while sum(server.asked.values()) < 20:
            time.sleep(0.002)
        server.down = True

    thread = threading.Thread(target=stop_later)
    thread.start()
    recipe = Recipe(model=str(model), corpus=str(corpus))
    options = RolloutOptions(servers=[server.url], concurrency=4, patience=0.5)
    given = {"answer_tokens": 8}
    with pytest.raises(StoreError, match="is the server running"):
        rollouts(recipe, given, open_objects(str(out)), options, 2)
    thread.join()
    there = {row["prompt"] for row in rows_of(out)}
    assert 0 < len(there) < 40
    server.down = False
    rollouts(recipe, given, open_objects(str(out)), options, 2)
    check_each_once(out, 40)


def kill_at_random(model: Path, tmp_path: Path, kills: int) -> None:
    rng = random.Random(7)
    corpus = chats(tmp_path / "c.jsonl", 60)
    for number in range(kills):
        out = tmp_path / str(number)
        with serving("vllm", ("drop", "500", "twice")) as server:
            server.delay = 0.02
            words = (
                "rollouts", "--model", model, "--corpus", corpus, "--server", server.url,
                "--out", out, "--answer-tokens", 8, "--unit-prompts", 3, "--concurrency", 6,
            )  # fmt: skip
            process = launch({}, *words)
            # Half of them while it answers, the others from its first moment on.
            while number % 2 and not server.asked and process.poll() is None:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.8))
            process.kill()
            process.communicate()
            assert run(*words).code == 0
            check_each_once(out, 60)


@pytest.mark.full
def test_killed_rollouts_are_continued(model: Path, tmp_path: Path) -> None:
    kill_at_random(model, tmp_path, 2)


@pytest.mark.full
def test_a_hundred_kills_leave_every_prompt_answered_once(model: Path, tmp_path: Path) -> None:
    kill_at_random(model, tmp_path, 100)

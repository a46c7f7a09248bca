"""Requests and answers of engines, in their own spellings; whatever else comes is refused."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.rollouts.exchange import Sampling, UnusableAnswer, parse_answer, request
from spile.rollouts.prompts import EnginePrompt
from support.engine_server import answer_to

CHATS = Sampling(api="chat", answer_tokens=8)
BODY = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 8}
IDS = np.arange(3, dtype=np.int32)
PROMPT = EnginePrompt(7, None, "hi", IDS, np.zeros(3, np.uint16), [{"role": "user"}])


def parsed(body: Any, sampling: Sampling = CHATS) -> Any:
    return parse_answer(json.dumps(body).encode(), sampling, 260)


def test_engines_are_told_every_setting_that_a_model_might_bring() -> None:
    hot = Sampling(api="chat", temperature=0.5, top_k=9, more='{"stop": ["x"], "top_p": 0.25}')
    told = request(hot, PROMPT, 2, model="m", engine="vllm", system=None)
    assert {**told} == {
        "model": "m", "stream": False, "seed": hot.seed_of(7, 2), "temperature": 0.5,
        "top_p": 0.25, "top_k": 9, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 1024,
        "return_token_ids": True, "stop": ["x"], "messages": [{"role": "user"}], "logprobs": True,
        "top_logprobs": 1,
    }  # fmt: skip
    plain = request(CHATS, PROMPT, 2, model="m", engine="openai", system="be")
    assert {"top_k", "return_token_ids"}.isdisjoint(plain)
    assert plain["messages"][0] == {"role": "system", "content": "be"}


def test_each_answer_has_a_seed_of_its_own_which_stays() -> None:
    seeds = {CHATS.seed_of(p, a) for p in range(40) for a in range(40)}
    assert len(seeds) == 1600 and CHATS.seed_of(7, 2) == CHATS.seed_of(7, 2)
    assert Sampling(api="chat", seed=1).seed_of(7, 2) != CHATS.seed_of(7, 2)


def test_ids_come_from_wherever_an_engine_tells_them() -> None:
    ids = parsed(answer_to({**BODY, "return_token_ids": True}, True, "vllm")).ids
    assert np.array_equal(parsed(answer_to(BODY, True, "llamacpp")).ids, ids)
    silent = answer_to(BODY, True, "unknown")
    assert parsed(silent).ids is None
    for token, own in zip(silent["choices"][0]["logprobs"]["content"], ids, strict=True):
        token["token_id"] = int(own)  # as SGLang spells it
    assert np.array_equal(parsed(silent).ids, ids)
    silent["prompt_token_ids"] = [5, 6]
    assert parsed(silent).prompt_ids.tolist() == [5, 6]


def test_what_a_server_cut_out_is_known_from_the_tokens_or_not_at_all() -> None:
    answer = answer_to(BODY, True, "unknown")
    message = answer["choices"][0]["message"]
    message["reasoning_content"], message["content"] = "so", None
    found = parsed(answer)
    assert (found.thinking, found.text) == ("so", "")
    assert found.whole == "".join(found.pieces)
    answer["choices"][0]["logprobs"] = None
    assert parsed(answer).whole is None


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    body = answer_to({**BODY, "return_token_ids": True}, True, "vllm")
    change(body)
    return body


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda b: b.update(choices=[]), "exactly one choice"),
        (lambda b: b["choices"].append(b["choices"][0]), "exactly one choice"),
        (lambda b: b.update(error="x"), "not finished"),
        (lambda b: b["choices"][0].update(finish_reason=None), "not finished"),
        (lambda b: b["choices"][0].update(message=3), "its message is not an object"),
        (lambda b: b["choices"][0]["message"].update(content=3), "not a text"),
        (lambda b: b["choices"][0]["token_ids"].append(1), "token ids and"),
        (lambda b: b["choices"][0].update(token_ids=[1] * 99), "99 token ids of 8 at most"),
        (lambda b: b["choices"][0].update(token_ids=["1"]), "not numbers"),
        (lambda b: b["choices"][0].update(token_ids=[260]), "another model than --model"),
        (lambda b: b["choices"][0]["logprobs"]["content"][0].update(logprob=0.5), "above 0"),
        (lambda b: b["choices"][0]["logprobs"]["content"][0].update(logprob=None), "not a number"),
        (lambda b: b["choices"][0]["logprobs"]["content"][0].update(token=1), "do not fit"),
    ],
)
def test_answers_that_break_the_promise_are_refused(change: Any, why: str) -> None:
    with pytest.raises(UnusableAnswer, match=why):
        parsed(changed(change))


def test_minus_infinity_is_a_large_negative_number() -> None:
    body = changed(lambda b: b["choices"][0]["logprobs"]["content"][0].update(logprob=-1e30))
    assert parsed(body).logprobs[0] == -1e4


@pytest.mark.parametrize(
    "wrong",
    [{"per_prompt": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"more": "[1]"}],
)
def test_settings_are_checked_before_anything_is_asked(wrong: Any) -> None:
    name = next(iter(wrong)).replace("_", "-").replace("more", "request")
    with pytest.raises(ConfigError, match=f"--{name}"):
        Sampling(api="chat", **wrong)

"""Tokens of prompts and answers, each part marked with where its ids come from."""

from typing import Any

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.core.index import ROLES
from spile.corpus.tokenize import TextTokenizer
from spile.rollouts.exchange import SampledAnswer, Sampling
from spile.rollouts.prompts import EnginePrompt
from spile.rollouts.tokens import answered
from support import tiny

USER, ASSISTANT, TEMPLATE = ROLES["user"], ROLES["assistant"], ROLES["template"]
PROMPT = EnginePrompt(0, None, "ab", np.array([64, 65], np.int32), np.full(2, USER, np.uint16))
CHAT = Sampling(api="chat")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(tiny.write_model(tmp_path_factory.mktemp("m") / "m"), "none")


def answer(**changes: Any) -> SampledAnswer:
    ids, logs = np.array([66, 67], np.int32), np.array([-1, -2], np.float32)
    whole: dict[str, Any] = {
        "ids": ids, "pieces": ["c", "d"], "logprobs": logs, "prompt_ids": None, "text": "cd",
        "thinking": None, "tool_calls": None, "finish_reason": "stop", "model": "m",
    }  # fmt: skip
    return SampledAnswer(**{**whole, **changes})


def test_what_the_engine_tells_is_taken(tokenizer: TextTokenizer) -> None:
    found = answered(PROMPT, answer(prompt_ids=PROMPT.ids), CHAT, tokenizer)
    assert found.ids.tolist() == [64, 65, 66, 67] and found.prompt == 2
    assert found.roles.tolist() == [USER, USER, ASSISTANT, ASSISTANT]
    assert np.isnan(found.logprobs[:2]).all() and found.logprobs[2:].tolist() == [-1, -2]
    assert (found.prompt_from, found.answer_from) == ("engine", "engine")


def test_a_prompt_that_the_engine_read_otherwise_has_no_speakers(tokenizer: TextTokenizer) -> None:
    found = answered(PROMPT, answer(prompt_ids=np.array([1], np.int32)), CHAT, tokenizer)
    assert found.ids.tolist() == [1, 66, 67]
    assert found.roles.tolist() == [TEMPLATE, ASSISTANT, ASSISTANT]


def test_texts_are_tokenized_and_logs_kept_only_if_they_fit(tokenizer: TextTokenizer) -> None:
    found = answered(PROMPT, answer(ids=None), CHAT, tokenizer)
    assert found.ids.tolist() == [64, 65, 66, 67] and found.logprobs[2:].tolist() == [-1, -2]
    assert (found.prompt_from, found.answer_from) == ("tokenizer", "tokenizer")
    short = answer(ids=None, pieces=["cd"], logprobs=np.array([-1], np.float32))
    assert np.isnan(answered(PROMPT, short, CHAT, tokenizer).logprobs).all()


def test_an_answer_whose_parts_were_cut_out_unseen_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="without a parser"):
        answered(PROMPT, answer(ids=None, pieces=None, thinking="so"), CHAT, tokenizer)


def test_tokens_that_the_engine_left_out_are_noticed(tokenizer: TextTokenizer) -> None:
    """llama.cpp tells only the last token of a character that has several."""
    whole = tokenizer.encode_plain("é!")
    assert len(whole) == 3
    logs = np.array([-1, -2, -3], np.float32)
    told = answer(ids=whole, pieces=["", "é", "!"], logprobs=logs, text="é!")
    assert answered(PROMPT, told, CHAT, tokenizer).answer_from == "engine"
    lacking = answer(ids=whole[1:], pieces=["é", "!"], logprobs=logs[1:], text="é!")
    found = answered(PROMPT, lacking, CHAT, tokenizer)
    assert found.answer_from == "tokenizer" and found.ids[2:].tolist() == whole.tolist()
    assert np.isnan(found.logprobs).all()
    cut = answer(ids=whole[:1], pieces=[""], logprobs=logs[:1], text="")
    assert answered(PROMPT, cut, CHAT, tokenizer).answer_from == "engine"

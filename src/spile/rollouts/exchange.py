"""What an OpenAI-compatible server is asked for an answer, and what it says.

Log-probabilities are asked for as the model gives them: before temperature and filters. Engines
that are recognised by `owned_by` in their list of models are asked for token ids, too, and told
every setting that they would otherwise take from a model's `generation_config.json`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import xxhash

from spile.core.bounded_json import JsonError, parse_json_object
from spile.core.errors import ConfigError
from spile.rollouts.prompts import EnginePrompt

CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/chat/completions", COMPLETIONS: "/completions"}
_SEEDS = 1 << 31
_ROUNDED = 1e-3  # most that a log-probability may lie above 0
# Fields for the engines that have them: token ids in the answer, and no sampling filters.
_OF_ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "sglang": {
        "return_prompt_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    },
    "llamacpp": {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
}  # fmt: skip


class UnusableAnswer(ValueError):  # noqa: N818 (it says what came, and the request is repeated)
    """An answer is not what the API promises. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled.

    Attributes:
        api: `chat`: the server renders the messages; `completions`: it gets token ids.
        per_prompt: answers to each prompt.
        answer_tokens: most tokens of an answer.
        more: further fields of the request, which win.
    """

    api: str
    per_prompt: int = 1
    answer_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    more: str = "{}"

    def __post_init__(self) -> None:
        for name, least in (("per_prompt", 1), ("answer_tokens", 1), ("seed", 0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least {least}, got {getattr(self, name)}")
        if self.temperature < 0 or not math.isfinite(self.temperature):
            raise ConfigError(f"--temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k must be at least 1, got {self.top_k}")
        try:
            parse_json_object(self.more.encode())
        except JsonError as error:
            raise ConfigError(f"--request must be a JSON object: {error}") from None

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def settings(self, engine: str) -> dict[str, Any]:
        """Return the sampling settings as the request has them, without the seed."""
        told: dict[str, Any] = {
            "temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.answer_tokens,
        }  # fmt: skip
        told |= _OF_ENGINES.get(engine, {})
        told |= {} if self.top_k is None else {"top_k": self.top_k}
        return told | json.loads(self.more)

    def seed_of(self, prompt: int, answer: int) -> int:
        """Return an answer's own seed: a request that is repeated asks for the same sample."""
        return xxhash.xxh3_64_intdigest(f"{self.seed} {prompt} {answer}".encode()) % _SEEDS

    @property
    def most_bytes(self) -> int:
        """The largest answer to read: no token's share is near so large."""
        return (1 << 20) + (self.answer_tokens << 12)


def request(
    sampling: Sampling,
    prompt: EnginePrompt,
    answer: int,
    *,
    model: str,
    engine: str,
    system: str | None,
) -> dict[str, Any]:
    """Return the body of the request for one answer."""
    body: dict[str, Any] = {
        "model": model, "stream": False, "seed": sampling.seed_of(prompt.ordinal, answer),
        **sampling.settings(engine),
    }  # fmt: skip
    if sampling.api == COMPLETIONS:
        return {**body, "prompt": prompt.ids.tolist(), "logprobs": 1}
    messages = [dict(message) for message in prompt.chat or ()]
    if system is not None and messages[0].get("role") not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    return {**body, "messages": messages, "logprobs": True, "top_logprobs": 1}


@dataclass(frozen=True)
class SampledAnswer:
    """What a server sampled.

    Attributes:
        ids: the sampled token ids; None if the server does not tell them.
        pieces: the text of each token; None if the server does not tell them.
        logprobs: the log-probability of each token.
        prompt_ids: the ids that the model read; None if the server does not tell them.
        text: the answer without the parts below, which the server may cut out.
        thinking: what the model thought first.
        tool_calls: the calls it made.
    """

    ids: np.ndarray | None
    pieces: Sequence[str] | None
    logprobs: np.ndarray | None
    prompt_ids: np.ndarray | None
    text: str
    thinking: str | None
    tool_calls: Sequence[Any] | None
    finish_reason: str | None
    model: str

    @property
    def whole(self) -> str | None:
        """All of the sampled text; None if the server has cut out parts of it."""
        if self.pieces is not None:
            return "".join(self.pieces)
        return None if self.thinking or self.tool_calls else self.text


def parse_answer(data: bytes, sampling: Sampling, vocabulary: int) -> SampledAnswer:
    """Parse the body of an answer; raise UnusableAnswer if it is not one."""
    try:
        body = parse_json_object(data)
    except JsonError as error:
        raise UnusableAnswer(str(error)) from None
    choices = body.get("choices")
    if not isinstance(choices, list) or len(cast(list[Any], choices)) != 1:
        raise UnusableAnswer("it does not hold exactly one choice")
    choice = _object(cast(list[Any], choices)[0], "its choice")
    if "error" in body or choice.get("finish_reason") is None:
        raise UnusableAnswer("it was not finished")
    said = _object(choice.get("message"), "its message") if sampling.api == CHAT else choice
    text = said.get("content") if sampling.api == CHAT else said.get("text")
    calls, thinking = said.get("tool_calls"), said.get("reasoning_content", said.get("reasoning"))
    if not isinstance(text, str | None) or not isinstance(thinking, str | None):
        raise UnusableAnswer("its text is not a text")
    pieces, logprobs, ids = _tokens(choice.get("logprobs"))
    told = choice.get("token_ids")
    ids = ids if told is None else told
    prompt_ids = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
    found = _ids(ids, vocabulary)
    for name, other in (("log-probabilities", logprobs), ("token ids", found)):
        if other is not None and len(other) > sampling.answer_tokens + 1:
            raise UnusableAnswer(f"it has {len(other)} {name} of {sampling.answer_tokens} at most")
    if found is not None and logprobs is not None and len(found) != len(logprobs):
        raise UnusableAnswer(f"it has {len(found)} token ids and {len(logprobs)} log-probabilities")
    return SampledAnswer(
        ids=found,
        pieces=pieces,
        logprobs=logprobs,
        prompt_ids=_ids(prompt_ids, vocabulary),
        text=text or "",
        thinking=thinking or None,
        tool_calls=cast(list[Any], calls) if isinstance(calls, list) and calls else None,
        finish_reason=str(choice["finish_reason"]),
        model=str(body.get("model", "")),
    )


def _tokens(told: Any) -> tuple[list[str] | None, np.ndarray | None, list[Any] | None]:
    """Return the text, log-probability and id of each token, as far as they are told."""
    if not isinstance(told, dict):
        return None, None, None
    given = cast(dict[str, Any], told)
    content = given.get("content")
    if isinstance(content, list):
        each = [_object(token, "a token") for token in cast(list[Any], content)]
        pieces = [token.get("token") for token in each]
        logs = [token.get("logprob") for token in each]
        ids = [token.get("id", token.get("token_id")) for token in each]
    else:
        pieces, logs = given.get("tokens"), given.get("token_logprobs")
        if not isinstance(pieces, list) or not isinstance(logs, list):
            return None, None, None
        pieces, logs, ids = cast(list[Any], pieces), cast(list[Any], logs), list[Any]()
    if len(pieces) != len(logs) or not all(isinstance(piece, str) for piece in pieces):
        raise UnusableAnswer("its tokens and log-probabilities do not fit together")
    return cast(list[str], pieces), _logs(logs), ids if ids and None not in ids else None


def _logs(values: Sequence[Any]) -> np.ndarray:
    """Return log-probabilities as float32. Engines spell minus infinity as a large negative."""
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise UnusableAnswer("a log-probability is not a number")
    found = np.array(values, np.float64)
    if np.isnan(found).any() or (found > _ROUNDED).any():
        raise UnusableAnswer("a log-probability is NaN, or above 0")
    return np.clip(found, -1e4, 0.0).astype(np.float32)


def _ids(values: Any, vocabulary: int) -> np.ndarray | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(v) is int for v in cast(list[Any], values)):
        raise UnusableAnswer("its token ids are not numbers")
    found = np.array(cast(list[int], values), np.int64)
    if len(found) and (found.min() < 0 or found.max() >= vocabulary):
        raise UnusableAnswer(
            f"token {int(found.max())} is not one of the tokenizer's {vocabulary}: does the "
            "server run another model than --model?"
        )
    return found.astype(np.int32)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UnusableAnswer(f"{what} is not an object")
    return cast(dict[str, Any], value)

"""The tokens of a prompt and its answer: which the engine told, and which are recovered."""

from dataclasses import dataclass

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import ROLES
from spile.corpus.tokenize import TextTokenizer
from spile.rollouts.exchange import COMPLETIONS, SampledAnswer, Sampling
from spile.rollouts.prompts import EnginePrompt

SENT, ENGINE, TOKENIZER = "sent", "engine", "tokenizer"  # where token ids come from
_BROKEN = "\ufffd"  # what an incomplete character is decoded to


@dataclass(frozen=True)
class AnsweredTokens:
    """Token ids of a prompt and its answer.

    Attributes:
        ids: of both.
        prompt: how many of them are the prompt's.
        roles: the flag of each token's speaker; what was sampled is the assistant's.
        logprobs: the engine's log-probability of each token; NaN where it gave none.
        prompt_from, answer_from: where the ids come from: they were sent, the engine told them, or
            the text was tokenized, which need not give the ids that were sampled.
    """

    ids: np.ndarray
    prompt: int
    roles: np.ndarray
    logprobs: np.ndarray
    prompt_from: str
    answer_from: str


def answered(
    prompt: EnginePrompt, answer: SampledAnswer, sampling: Sampling, tokenizer: TextTokenizer
) -> AnsweredTokens:
    """Join the tokens of a prompt and of an answer to it."""
    read, roles, prompt_from = prompt.ids, prompt.roles, TOKENIZER
    if sampling.api == COMPLETIONS:
        prompt_from = SENT
    elif answer.prompt_ids is not None:
        prompt_from = ENGINE
        if not np.array_equal(answer.prompt_ids, read):
            # Its speakers are not known: the server's template is not the model's.
            read = answer.prompt_ids
            roles = np.full(len(read), ROLES["template"], np.uint16)
    ids, logprobs, answer_from = answer.ids, answer.logprobs, ENGINE
    if ids is not None and lacks_tokens(ids, answer.whole, tokenizer):
        ids = logprobs = None
    if ids is None:
        answer_from, whole = TOKENIZER, answer.whole
        if whole is None:
            raise ConfigError(
                "the server tells no token ids, and cuts thinking or tool calls out of its answers:"
                " start it without a parser of those, or use --api completions"
            )
        ids = tokenizer.encode_plain(whole)
    if logprobs is None or len(logprobs) != len(ids):  # (tokenized into other tokens)
        logprobs = np.full(len(ids), np.nan, np.float32)
    return AnsweredTokens(
        ids=np.concatenate([read, ids]).astype(np.int32),
        prompt=len(read),
        roles=np.concatenate([roles, np.full(len(ids), ROLES["assistant"], np.uint16)]),
        logprobs=np.concatenate([np.full(len(read), np.nan, np.float32), logprobs]),
        prompt_from=prompt_from,
        answer_from=answer_from,
    )


def lacks_tokens(ids: np.ndarray, text: str | None, tokenizer: TextTokenizer) -> bool:
    """Return whether tokens are missing from a text's ids.

    llama.cpp leaves out tokens that end within a character, so that the others do not make the
    characters of the text. (At the end of an answer, a character may really be incomplete.)
    """
    if text is None:
        return False
    made = tokenizer.decode(ids.tolist()).removesuffix(_BROKEN)
    return made.count(_BROKEN) > text.count(_BROKEN)

"""The columns of a directory of rollouts: what `spile rollouts` writes, and a corpus reads.

    data/GROUP/UNIT.parquet    the answers of a unit's prompts, a row each

The columns of the prompts' own rows that were kept follow those below, under their own names.
"""

RECORD = "rollouts.json"  # what makes a directory one of rollouts
DATA = "data/"

PROMPT = "prompt"  # the prompt's ordinal in its corpus
ANSWER = "answer"  # which answer to it, from 0
TOKEN_IDS = "token_ids"  # of the prompt and the answer
PROMPT_TOKENS = "prompt_tokens"  # how many of them are the prompt's
ROLE_FLAGS = "roles"  # the index's flag of each token's speaker
LOGPROBS = "logprobs"  # the engine's log-probability of each token; null where it gave none
COLUMNS = (
    PROMPT, ANSWER, TOKEN_IDS, PROMPT_TOKENS, ROLE_FLAGS, LOGPROBS,
    "prompt_ids_from", "answer_ids_from",  # sent, engine or tokenizer
    "text", "thinking", "tool_calls", "finish_reason", "error",
    "prompt_text", "messages", "tools", "seed", "sampling", "model",
)  # fmt: skip

# The columns that the documents of rollouts keep, if --keep does not say.
KEPT = (PROMPT, ANSWER, PROMPT_TOKENS, "finish_reason", "prompt_ids_from", "answer_ids_from")

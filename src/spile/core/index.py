"""The index: the metadata of each stored row. One entry per token, or per span that was pooled."""

from typing import Any

import numpy as np

# Flags, one bit each. FIRST and LAST mark the ends of a context: a document, or a part of one.
# END marks the last token of a document that the model reads.
BOS, EOS, SPECIAL, FIRST, LAST, END = 1, 2, 4, 8, 16, 32
# SPECIAL marks special tokens other than BOS and EOS, so each special token has one of these flags.
SPECIALS = BOS | EOS | SPECIAL
# The speaker, in a chat. TEMPLATE marks text that the chat template added.
ROLES = {"system": 64, "user": 128, "assistant": 256, "tool": 512, "template": 1024}
# Of rollouts: which tokens of the assistant are thinking, and which are not.
THINKING, ANSWER = 2048, 4096
FLAGS = {
    "bos": BOS, "eos": EOS, "special": SPECIAL, "first": FIRST, "last": LAST, "end": END, **ROLES,
    "thinking": THINKING, "answer": ANSWER,
}  # fmt: skip
# Flags as conditions and tables name them, with the bits of each: `special` is any special token.
NAMED_FLAGS = {**FLAGS, "special": SPECIALS}

# Columns are stored as tensors with these names and types.
INDEX_DTYPE = np.dtype(
    [
        ("token_id", np.int32),
        ("doc", np.int64),  # the document's ordinal in the corpus
        ("offset", np.int32),  # the token's position in its document
        ("pos", np.int32),  # the position the model saw; restarts with each context
        ("flags", np.uint16),
    ]
)

# Of a pooled dataset, each row of which stands for a span of a document. The columns above belong
# to the last kept token of the span (for `first`: to its first).
POOLED_INDEX_DTYPE = np.dtype(
    [
        *((name, INDEX_DTYPE[name]) for name in INDEX_DTYPE.names or ()),
        ("span", np.int32),  # the span's number in its document
        ("start", np.int32),  # the offset of its first kept token
        ("count", np.int32),  # how many kept tokens it has
    ]
)


def index_dtype(*, pooled: bool) -> np.dtype[Any]:
    """Return the columns of a dataset's index."""
    return POOLED_INDEX_DTYPE if pooled else INDEX_DTYPE


# The first columns of the documents table of each unit; columns chosen from the corpus follow.
DOCUMENT_COLUMNS = ("doc", "tokens", "rows", "first_row", "skipped", "preview")

"""The index: what is known of each stored row besides its values. One entry per token."""

import numpy as np

# Flags, one bit each. FIRST and LAST are of a context: a document, or a piece of a long one.
# END is of a document: the last of its tokens that the model reads.
BOS, EOS, SPECIAL, FIRST, LAST, END = 1, 2, 4, 8, 16, 32
# SPECIAL is of special tokens that are neither BOS nor EOS: a special token has one of these.
SPECIALS = BOS | EOS | SPECIAL
# Who said it, in a chat: TEMPLATE is of what nobody said.
ROLES = {"system": 64, "user": 128, "assistant": 256, "tool": 512, "template": 1024}
FLAGS = {
    "bos": BOS, "eos": EOS, "special": SPECIAL, "first": FIRST, "last": LAST, "end": END, **ROLES,
}  # fmt: skip

# Columns are stored as tensors of these names and types.
INDEX_DTYPE = np.dtype(
    [
        ("token_id", np.int32),
        ("doc", np.int64),  # the document's ordinal in the corpus
        ("offset", np.int32),  # the token's place in its document
        ("pos", np.int32),  # the position the model saw; restarts with each context
        ("flags", np.uint16),
    ]
)

# Of the documents table beside each unit, before those that were chosen from the corpus.
DOCUMENT_COLUMNS = ("doc", "tokens", "rows", "first_row", "skipped", "preview")

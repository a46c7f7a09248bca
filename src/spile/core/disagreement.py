"""Disagreement: how far an engine's log-probabilities are from the model's own, in nats.

The columns of the documents table that say so, and the bound that tells rounding from another
model.
"""

import math

# Over the compared tokens of a document; null if there are none.
MEAN, LARGEST_GAP, COMPARED = "disagreement", "disagreement_max", "disagreement_tokens"
DISAGREEMENT_COLUMNS = (MEAN, LARGEST_GAP, COMPARED)

BOUND = 0.1  # on average: twice what two results in bfloat16 had (docs/rollouts.md)
_ONE_TOKEN = 20  # times that is what a single token may have


def is_within(bound: float, tokens: int, total: float) -> bool:
    """Return whether rounding explains the distances of some tokens, of one document or of many.

    On average a token may be off by `bound`, and one of them by 20 times as much: a short document
    may happen to hold an unlikely token.

    Args:
        total: the sum of the distances; NaN if the model's own are.
    """
    return math.isfinite(total) and total <= bound * (tokens - 1 + _ONE_TOKEN)

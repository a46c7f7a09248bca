"""What the integers of a tap name: ids of the largest values, compared by the values themselves.

Two values that rounding cannot tell apart may swap their places, in HF as here. Then their ids
differ, but the values that the ids name do not.
"""

import numpy as np

_RANK, _TOKENS = "next_rank", "top_token_ids"


def values_named_in(tap: str) -> str | None:
    """Return the tap of HF whose values a tap's integers name; None if they name none."""
    return "logits" if tap in (_RANK, _TOKENS) else None


def named_values(
    tap: str, integers: np.ndarray, tokens: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return the values that a tap's integers name; NaN for those that name none.

    Args:
        integers: rows of the tap.
        tokens: the token of each row.
        values: of all tokens, from which the integers are chosen.
    """
    found = np.full(integers.shape, np.nan)
    for row, (own, token) in enumerate(zip(integers, tokens.tolist(), strict=True)):
        among = values[token].astype(np.float64)
        among = among - among.max()
        among -= np.log(np.exp(among).sum())
        if tap == _RANK:  # the value that has this rank
            among = np.sort(among)[::-1]
        known = (own >= 0) & (own < len(among))
        found[row] = np.where(known, among[np.where(known, own, 0)], np.nan)
    return found

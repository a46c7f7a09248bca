"""Values in a form in which their distance says how wrong they are.

Ids of the largest values are compared by the values that they name. Two that rounding cannot tell
apart may swap their places, in HF as here. Then the ids differ, but what they name does not.
"""

from collections.abc import Mapping

import numpy as np

_RANK, _TOKENS, _KEYS, _SUMMARY = "next_rank", "top_token_ids", "attn_top_keys", "attn_summary"
_LENS_IDS = "lens_top_ids"


def named_in(tap: str) -> str | None:
    """Return the tap of HF whose values a tap's integers name; None if they name none."""
    site, dot, rest = tap.partition(".")
    of_lens = f"lens_logits{dot}{rest}"
    named = {_RANK: "logits", _TOKENS: "logits", _LENS_IDS: of_lens}
    return (named | {_KEYS: f"attn_pattern{dot}{rest}"}).get(site)


def comparable(
    tap: str, values: np.ndarray, tokens: np.ndarray, exact: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return a tap's rows as they are compared; most as they are.

    Args:
        tokens: the place of each row in its context.
        exact: taps of the context, among them that of `named_in`.
    """
    site, among = tap.partition(".")[0], named_in(tap)
    if site == _SUMMARY:  # distances would hide the other values, which are at most a few
        return values / np.append(np.ones(4), len(next(iter(exact.values()))))
    if among is None:
        return values
    found = np.full(values.shape, np.nan)
    for row, (own, token) in enumerate(zip(values, tokens.tolist(), strict=True)):
        named = exact[among][token].astype(np.float64)
        if site != _KEYS:
            named = named - named.max()
            named -= np.log(np.exp(named).sum())
        if site == _RANK:  # the value that has this rank
            named = np.sort(named)[::-1]
        known = (own >= 0) & (own < named.shape[-1])
        places = np.where(known, own, 0).reshape(*named.shape[:-1], -1)
        there = np.take_along_axis(named, places, axis=-1).reshape(own.shape)
        absent = np.where((site == _KEYS) & (own == -1), 0.0, np.nan)  # there may be fewer keys
        found[row] = np.where(known, there, absent)
    return found

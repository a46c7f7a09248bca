"""Where heads look, from the attention weights that HF returns."""

# Strict, but for values that numpy's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import numpy as np


def attended(weights: np.ndarray, top: int, *, sink: bool) -> dict[str, np.ndarray]:
    """Return the values of each such site, from the weights [tokens, heads, keys] of a context.

    Args:
        top: how many keys to keep.
        sink: whether a sink takes the rest of the weight.
    """
    tokens, heads, _ = weights.shape
    keys = np.argsort(-weights, axis=-1, kind="stable")[..., :top]
    found = np.take_along_axis(weights, keys, axis=-1)
    keys = np.where(found > 0, keys, -1)  # (an invisible key has no weight)
    missing = [(0, 0), (0, 0), (0, top - keys.shape[-1])]
    at: np.ndarray = np.arange(tokens)
    ago: np.ndarray = at[:, None] - at[None, :]
    logs = np.log(np.where(weights > 0, weights, 1.0))
    entropy = -(weights * logs).sum(axis=-1)
    of_keys: np.ndarray = weights.sum(axis=-1)
    if sink:
        rest = np.maximum(1.0 - of_keys, 0.0)
        entropy = entropy - rest * np.log(np.where(rest > 0, rest, 1.0))
    before = np.zeros((tokens, heads), weights.dtype)
    before[1:] = weights[at[1:], :, at[:-1]]
    parts = (
        entropy, weights[..., 0], weights[at, :, at], before,
        np.einsum("thk,tk->th", weights, ago) / of_keys,
    )  # fmt: skip
    return {
        "attn_top_keys": np.pad(keys, missing, constant_values=-1),
        "attn_top_weights": np.pad(found, missing),
        "attn_summary": np.stack(parts, axis=-1).astype(weights.dtype),
    }

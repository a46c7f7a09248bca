"""What HF's logits say about the next token, in float64."""

# Strict, but for values that torch's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Mapping

import torch
from torch import Tensor

_ROWS_AT_ONCE = 256  # of logits in float64: a whole context with a large vocabulary takes gigabytes


def next_token(logits: Tensor, ids: Tensor, tops: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the values of each site after the head; 0 where they need a next token and none is.

    Args:
        tops: how many of the largest to keep, by site.
    """
    targets = torch.cat([ids[1:], ids[:1]]).to(logits.device)
    count = min(max(tops.values()), logits.shape[-1])
    parts: dict[str, list[Tensor]] = {}
    for rows, target in zip(logits.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True):
        wide = rows.double()
        logs = wide.log_softmax(-1)
        own = wide.gather(-1, target[:, None])
        lower = torch.arange(wide.shape[-1], device=wide.device) < target[:, None]
        top = torch.topk(wide, count).indices.sort(dim=-1).values
        # Of equal logits the lower id comes first.
        order = logs.gather(-1, top).argsort(dim=-1, descending=True, stable=True)
        top = top.gather(-1, order)
        for name, found in {
            "logprob": logs.gather(-1, target[:, None])[:, 0],
            "entropy": torch.special.entr(logs.exp()).sum(-1),
            "logsumexp": wide.logsumexp(-1),
            "next_rank": ((wide > own) | ((wide == own) & lower)).sum(-1),
            "top_token_ids": top,
            "top_logprobs": logs.gather(-1, top),
        }.items():
            parts.setdefault(name, []).append(found)
    joined = {name: torch.cat(each) for name, each in parts.items()}
    for name in ("logprob", "next_rank"):
        joined[name][-1] = 0
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return {
        n: value.to(dtype) if value.is_floating_point() else value for n, value in joined.items()
    }

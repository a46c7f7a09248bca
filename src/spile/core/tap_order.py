"""The order in which taps are listed: by layer, and in a layer as a model computes them.

Records hold taps in the order of their names (`resid_post.10` before `resid_post.9`), or of the
runs that added them. A dataset is read without a model's description, so the order of sites stands
here, below both; `models/sites` has everything else about them.
"""

import re
from collections.abc import Iterable

BEFORE_BLOCKS = ("embed",)
IN_A_BLOCK = (
    "resid_pre", "attn_in", "q", "kv_latent", "k", "v", "q_rot", "k_rot", "attn_pattern",
    "attn_top_keys", "attn_top_weights", "attn_summary", "ssm_in", "conv_in", "conv_out",
    "conv_gate", "delta_state_norm", "attn_gate", "z", "attn_out", "ssm_read", "ssm_gate", "ssm_z",
    "ssm_out", "resid_mid", "mlp_in", "router_logits", "expert_weights", "expert_ids", "mlp_hidden",
    "shared_expert_out", "mlp_out", "layer_embed", "layer_embed_out", "resid_post",
)  # fmt: skip
OF_A_LENS = ("lens_logsumexp", "lens_top_ids", "lens_top_logprobs")  # of a block's output
AFTER_BLOCKS = (
    "final_norm", "logits", "logprob", "entropy", "logsumexp", "next_rank", "top_token_ids",
    "top_logprobs",
)  # fmt: skip
# The sites that keep the largest of many values, by the option that says how many.
LARGEST = {
    "attn_top": ("attn_top_keys", "attn_top_weights"),
    "top_logits": ("top_token_ids", "top_logprobs"),
}
# Sites whose place k holds the k-th largest of something, whichever that is.
RANKED = (
    "expert_weights", "expert_ids", *OF_A_LENS[1:],
    *(site for sites in LARGEST.values() for site in sites),
)  # fmt: skip
_ALL = *BEFORE_BLOCKS, *IN_A_BLOCK, *OF_A_LENS, *AFTER_BLOCKS
_PLACES = {site: n for n, site in enumerate(_ALL)}
# A site, its gradient or attribution; of an encoded tap, what is stored; the layer; the heads.
_NAME = re.compile(
    r"(\w+?)(_grad|_attr|_edge)?(_latents|_latent_ids|_error)?(?:\.(\d{1,9})((?:\.h\d{1,9})*))?"
)
EDGES = "_edge"
_OF_A_SITE = (None, "_grad", "_attr", EDGES)
_STORED = (None, "_latents", "_latent_ids", "_error")


def sorted_taps(names: Iterable[str]) -> list[str]:
    """Return taps by layer: what comes before the blocks, each block, and what comes after them.

    Within a block they are in the order in which a model computes them. Names of an unknown form
    come last.
    """
    return sorted(names, key=_place)


def of_backward_pass(tap: str) -> str | None:
    """Return the ending of a tap that a backward pass makes: `_grad`, `_attr`, `_edge`; or None."""
    match = _NAME.fullmatch(tap)
    return match[2] if match else None


def _place(name: str) -> tuple[int, int, int, int, tuple[int, ...], int, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        return 3, 0, 0, 0, (), 0, name
    site, made, stored, layer, heads = match.groups()
    stage = 1 if layer else 0 if site in BEFORE_BLOCKS else 2
    each = tuple(int(head[1:]) for head in (heads or "").split(".")[1:])
    place = _PLACES.get(site, len(_PLACES))
    kind = _OF_A_SITE.index(made)
    return stage, int(layer or 0), place, kind, each, _STORED.index(stored), name

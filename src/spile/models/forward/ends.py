"""What comes before the blocks and after them: embeddings, the final norm, the head."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Collection
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spile.models.config.arch import (
    Arch,
)
from spile.models.forward.block import own_norm
from spile.models.forward.forward_pass import (
    Buffers,
    ForwardPass,
    Inputs,
    SiteValues,
    at_columns,
)
from spile.models.forward.next_token import next_token
from spile.models.forward.ops import (
    Hidden,
    Places,
    in_slices,
    linear,
    norm,
    scaled,
    softcap,
    widened,
)
from spile.models.forward.probes import by_token
from spile.models.forward.splice import in_block
from spile.models.forward.weights import WeightArrays
from spile.models.sites import SITES

_HEAD_VALUES = 1 << 28  # logits held at once, in float32: 1 GiB


def embedded_tokens(
    outer: WeightArrays,
    run: ForwardPass,
    embedded: Hidden | None = None,
    *,
    probes: Buffers | None = None,
    shapes: str = "",
) -> tuple[Hidden, Float[Array, "rows seq layers inner"] | None, SiteValues]:
    """The stream that enters the first block, the embeddings of all blocks' own, if they have some,
    and the values that can be tapped before the blocks.

    `embedded`: the tokens' rows of the embedding, if they were looked up elsewhere.
    """
    arch = run.arch
    found = outer["embed"][run.tokens] if embedded is None else embedded
    found = run.by_rows(widened(found))
    found = scaled(found, arch.embed_scale)
    if arch.embed_bare_norm:
        found = norm(found, None, None, arch.norm, arch.norm_eps)
    x = found = run.watching(in_block(run.changes), probes or {}, shapes)("embed", found)
    by_layer = _layer_embeds(outer, found, run) if arch.layer_embed else None
    x = own_norm(x, "embed_norm", block=outer, arch=arch)
    if "positions" in outer:
        x = x + outer["positions"][run.positions + arch.position_offset]
    if arch.wide_stream:
        x = x.astype(jnp.float32)
    x = run.watching(in_block(run.changes, 0), probes or {}, shapes)("resid_pre", x)
    return x, by_layer, {"embed": found, "resid_pre": x}


def _layer_embeds(outer: WeightArrays, embedded: Hidden, run: ForwardPass) -> Array:
    """Each block's own embedding of the tokens: its row of a table, and a part of the usual one."""
    arch = run.arch

    def split(values: Array) -> Float[Array, "rows seq layers inner"]:
        return values.reshape(*embedded.shape[:2], arch.num_layers, arch.layer_embed)

    found = widened(outer["layer_embeds"][run.tokens])
    found = run.by_rows(scaled(found, arch.layer_embed**0.5))
    part = split(scaled(linear(embedded, outer["layer_embeds_from"]), arch.width**-0.5))
    part = own_norm(part, "layer_embeds_norm", block=outer, arch=arch)
    return run.by_rows(scaled(part + split(found), 2.0**-0.5))


def after_blocks(outer: WeightArrays, x: Hidden, run: ForwardPass) -> SiteValues:
    """Apply the final norm, and the head to the kept rows only, in slices: logits are large."""
    arch, wanted = run.arch, run.wanted
    normed = own_norm(run.kept(x), "final_norm", block=outer, arch=arch)
    out = {"final_norm": normed} if "final_norm" in wanted else {}
    if not any(SITES[site].head for site in wanted):
        return out
    weights, following, has_next = _head_of(outer, run)
    tokens = run.kept(following), run.kept(has_next)
    predict = partial(_predicted, arch, wanted, run.tops)
    found = partial(predict, weights=weights)
    return out | in_slices(found, (normed, *tokens), _head_slices(normed, arch))


def aimed_after(
    outer: WeightArrays,
    x: Hidden,
    run: ForwardPass,
    site: str,
    answers: Int[Array, "rows seq 2"] | None = None,
) -> Array:
    """The values of all tokens at a site after the blocks, to be differentiated.

    `answers`: of logits, only those of two tokens each.
    """
    arch = run.arch
    normed = own_norm(x, "final_norm", block=outer, arch=arch)
    if site == "final_norm":
        return normed
    weights, following, has_next = _head_of(outer, run)
    if site == "logits" and answers is not None:
        head, bias = weights["head"][answers], weights.get("head_bias")
        logits = jnp.einsum("rsw,rsaw->rsa", normed.astype(head.dtype), head)
        logits = logits if bias is None else logits + bias[answers]
        return softcap(scaled(logits, arch.logit_scale), arch.logit_softcap)

    def predict(hidden: Hidden, targets: Places, known: Array, weights: WeightArrays) -> Array:
        return _predicted(arch, {site: []}, {}, hidden, targets, known, weights)[site]

    if SITES[site].shape:
        return predict(normed, following, has_next, weights)
    return by_token(predict, _head_slices(normed, arch), normed, (following, has_next), weights)


def gaps(
    outer: WeightArrays, x: Hidden, run: ForwardPass, inputs: Inputs
) -> Float[Array, "rows scored"]:
    """Return how far an engine's log-probabilities are from the model's own."""
    arch, scored, claimed = run.arch, inputs.scored, inputs.claimed
    assert scored is not None and claimed is not None
    normed = own_norm(at_columns(x, scored), "final_norm", block=outer, arch=arch)
    weights, following, has_next = _head_of(outer, run)
    predict = partial(_predicted, arch, {"logprob": []}, {}, weights=weights)
    tokens = at_columns(following, scored), at_columns(has_next, scored)
    own = in_slices(predict, (normed, *tokens), _head_slices(normed, arch))["logprob"]
    return jnp.abs(own - claimed)


def head_values(
    outer: WeightArrays, stream: Hidden, arch: Arch, wanted: Collection[str], tops: dict[str, int]
) -> SiteValues:
    """What the model's norm and head say of values that stand for the last stream.

    Args:
        wanted: sites that do not ask which token is next.
    """
    normed = own_norm(stream, "final_norm", block=outer, arch=arch)
    none = jnp.zeros(stream.shape[:2], jnp.int32)
    predict = partial(_predicted, arch, {site: [] for site in wanted}, tops)
    found = partial(predict, weights=_head_arrays(outer))
    return in_slices(found, (normed, none, none > 0), _head_slices(normed, arch))


def _head_arrays(outer: WeightArrays) -> WeightArrays:
    head = outer["embed"] if "head" not in outer else outer["head"]
    return {"head": head, **({"head_bias": outer["head_bias"]} if "head_bias" in outer else {})}


def _head_of(outer: WeightArrays, run: ForwardPass) -> tuple[WeightArrays, Places, Array]:
    """Return the head's arrays, the token after each, and whether there is one."""
    following = jnp.roll(run.tokens, -1, axis=1)
    has_next = (jnp.roll(run.segments, -1, axis=1) == run.segments).at[:, -1].set(False)
    return _head_arrays(outer), following, has_next


def _head_slices(hidden: Hidden, arch: Arch) -> int:
    return -(-hidden.shape[0] * hidden.shape[1] * arch.vocab_size // _HEAD_VALUES)


def _predicted(
    arch: Arch,
    wanted: dict[str, list[int]],
    tops: dict[str, int],
    hidden: Hidden,
    targets: Places,
    known: Array,
    weights: WeightArrays,
) -> SiteValues:
    """The values of sites that need the head, from normalised values."""
    head = weights["head"]
    logits = linear(hidden.astype(head.dtype), head, weights.get("head_bias"))
    logits = scaled(logits, arch.logit_scale)
    logits = softcap(logits, arch.logit_softcap)
    found = next_token(logits, targets, known, wanted, tops)
    return found | ({"logits": logits} if "logits" in wanted else {})

"""Where HF transformers computes each tap: a module, its input or output, and the part to keep.

This is the code of every site that a module takes or returns; `reference.py` finds the others in
functions that modules call. It knows names of modules, but not how a family computes.
"""

# Strict, but for values that torch's and transformers' types leave unknown.
# pyright: reportUnknownVariableType=false

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

# Names of each part; the first that the module has is used.
_NAMES = {
    "blocks": ("layers", "h", "blocks"),
    "final_norm": (
        "norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "embedding_norm"
    ),
    # Some families call any mixer, or an MLP, by the last name: `find_attention`, `find_space` and
    # `find_mlp` tell which it is.
    "attention": (
        "self_attn", "attn", "attention", "self_attention", "linear_attn", "conv", "mixer"
    ),
    "space": ("mamba", "mixer"),
    "out_projection": ("o_proj", "c_proj", "dense", "out_proj"),
    "mlp": ("mlp", "ffn", "block_sparse_moe", "feed_forward", "shared_mlp", "mixer"),
    "up_projection": ("fc1",),
    "down_projection": (
        "down_proj", "c_proj", "dense_4h_to_h", "fc_out", "fc2", "w2", "output_linear"
    ),
    "router": ("router", "gate"),
    "head_dim": ("head_dim", "head_size", "head_v_dim", "v_head_dim"),
    "gated_norm": ("norm", "o_norm"),
    "delta_heads": ("num_v_heads", "num_heads"),
    # `post_attention_layernorm` has two meanings: see `_attention_points`.
    "norm_after_attention": (
        "post_attention_layernorm",
        "ln_2",
        "final_layer_norm",
        "norm_2",
        "feedforward_layernorm",
        "pre_ff_layernorm",
        "ffn_norm",
    ),
}  # fmt: skip

Take = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Point:
    """One tap: a module's input or output, and the part of it to keep."""

    name: str
    module: Any
    side: Literal["in", "out"]
    take: Take
    # index, for a module that takes or returns several values; None: all that it returns
    item: int | None = 0
    whole: bool = False  # the tap is all of that value: it can be changed there
    scale: float = 1.0  # what the tap is multiplied by


def block_points(block: Any, layer: str, heads: int) -> Iterator[Point]:
    """The points of one block; `layer` is the end of their names, as `.3`."""
    attention, space, mlp = find_attention(block), find_space(block), find_mlp(block)
    yield Point("resid_pre" + layer, block, "in", token_rows, whole=True)
    if attention is not None:
        yield from _attention_points(block, attention, layer, heads)
    if space is not None:
        yield from _space_points(block, space, layer)
    if mlp is not None:
        yield from _mlp_points(block, mlp, layer, mixes=bool(attention or space))
    if embeds_itself(block):
        embedded = block.post_per_layer_input_norm
        yield Point("layer_embed" + layer, block, "in", token_rows, item=1)
        yield Point("layer_embed_out" + layer, embedded, "out", token_rows)
    yield Point("resid_post" + layer, block, "out", token_rows, whole=True)


def _attention_points(block: Any, attention: Any, layer: str, heads: int) -> Iterator[Point]:
    # Beside a state space, attention may read the same input, but scaled.
    space = find_space(block)
    yield Point("attn_in" + layer, space or attention, "in", token_rows, whole=space is None)
    projection = added = find_part(attention, "out_projection")
    # If the MLP's result is normalised, so is attention's, by the norm "post attention"; otherwise
    # that name means the norm between the stream and the MLP.
    if hasattr(block, "post_feedforward_layernorm"):
        added = block.post_attention_layernorm
    elif hasattr(block, "post_mlp_layernorm"):
        added = block.post_self_attn_layernorm
    scale = getattr(block, "residual_multiplier", 1.0) * getattr(block, "attn_out_multiplier", 1.0)
    yield Point("attn_out" + layer, added, "out", token_rows, whole=True, scale=scale)
    if convolves(attention):
        yield Point("conv_gate" + layer, attention.in_proj, "out", lambda x: x[0].chunk(3, -1)[1])
        return
    head_dim = find_part(attention, "head_dim")
    if hasattr(attention, "conv1d"):
        norm = find_part(attention, "gated_norm")
        opens = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[norm.activation]

        def gate(value: Tensor) -> Tensor:
            heads = find_part(attention, "delta_heads")
            return opens(value.to(torch.float32)).reshape(-1, heads, head_dim)

        yield Point("attn_gate" + layer, norm, "in", gate, item=1)
    else:
        if hasattr(attention, "kv_a_layernorm"):
            yield from _latent_points(attention, layer)
        else:
            found = _projections(attention, heads, head_dim)
            modules = [projected for projected, _ in found.values()]
            for site, (projected, take) in found.items():
                alone = modules.count(projected) == 1
                yield Point(site + layer, projected, "out", take, whole=alone)
        # [batch, head, query, key], as returned: not every family computes them in one function
        yield Point("attn_pattern" + layer, attention, "out", lambda x: x[0].transpose(0, 1), 1)
    yield Point("z" + layer, projection, "in", _split(head_dim), whole=True)


def _space_points(block: Any, space: Any, layer: str) -> Iterator[Point]:
    factors = getattr(space, "mup_vector", None)
    scale = getattr(block, "residual_multiplier", 1.0) * getattr(block, "ssm_out_multiplier", 1.0)

    def gate(value: Tensor) -> Tensor:
        value = value if factors is None else value * factors
        wide = value[0, :, : space.intermediate_size].to(torch.float32)
        return torch.nn.functional.silu(wide).unflatten(-1, (-1, space.head_dim))

    yield Point("ssm_in" + layer, space, "in", token_rows)
    yield Point("ssm_gate" + layer, space.in_proj, "out", gate)
    yield Point("ssm_z" + layer, space.out_proj, "in", _split(space.head_dim))
    yield Point("ssm_out" + layer, space.out_proj, "out", token_rows, whole=True, scale=scale)


def _mlp_points(block: Any, mlp: Any, layer: str, *, mixes: bool) -> Iterator[Point]:
    experts, shared = hasattr(mlp, "experts"), find_shared_expert(block)
    if apart := mlp is not block and hasattr(block, "experts"):  # experts beside a plain MLP
        shared = block.post_feedforward_layernorm_1
    down = mlp if experts else find_part(mlp, "down_projection")
    sandwich = hasattr(block, "post_feedforward_layernorm")
    added = block.post_feedforward_layernorm if sandwich else down
    added = getattr(block, "post_mlp_layernorm", added)
    scale = getattr(block, "residual_multiplier", 1.0) * getattr(mlp, "down_multiplier", 1.0)
    if mixes and not getattr(block, "use_parallel_residual", False):
        if sandwich:
            reader = getattr(block, "pre_feedforward_layernorm", mlp)
        else:
            norms = (getattr(block, name, None) for name in _NAMES["norm_after_attention"])
            reader = next(filter(None, norms), None)
        if reader is not None:  # else attention and MLP share a norm
            yield Point("resid_mid" + layer, reader, "in", token_rows)
    reads = find_part(block, "up_projection") if mlp is block else mlp
    yield Point("mlp_in" + layer, reads, "in", token_rows, whole=not apart and mlp is not block)
    if experts or apart:
        yield from _expert_points(block if apart else mlp, shared, layer)
    if not experts:
        yield Point("mlp_hidden" + layer, down, "in", token_rows, whole=True)
    if experts and shared is getattr(block, "shared_mlp", block):  # beside the others
        yield Point(
            "mlp_out" + layer, mlp, "in", lambda x: token_rows((mlp.forward(x) + shared(x)) * scale)
        )
    else:
        yield Point("mlp_out" + layer, added, "out", token_rows, whole=True, scale=scale)


def _expert_points(mlp: Any, shared: Any, layer: str) -> Iterator[Point]:
    router = find_part(mlp, "router")

    def routed(found: Any) -> Any:
        if len(found) == 3:
            return found
        weights, logits = found  # of all experts: zero for those that are not chosen
        return logits, *weights.topk(router.top_k)

    def by_weight(found: Any, item: int) -> Tensor:
        _, weights, _ = values = routed(found)
        order = weights.argsort(dim=-1, descending=True, stable=True)
        return values[item].gather(-1, order)

    # Routers return values without the batch dimension; some do not sort them, and some return
    # probabilities in place of their projection's output.
    if (projection := getattr(router, "proj", None)) is not None:
        yield Point("router_logits" + layer, projection, "out", token_rows)
    else:
        yield Point("router_logits" + layer, router, "out", lambda x: routed(x)[0], None)
    yield Point("expert_weights" + layer, router, "out", partial(by_weight, item=1), None)
    yield Point("expert_ids" + layer, router, "out", partial(by_weight, item=2), None)
    gate = getattr(mlp, "shared_expert_gate", None)
    if gate is not None:

        def weighed(x: Tensor) -> Tensor:
            return torch.sigmoid(torch.nn.functional.linear(x, gate.weight)) * shared(x)

        yield Point("shared_expert_out" + layer, gate, "in", weighed)
    elif shared is not None:
        yield Point("shared_expert_out" + layer, shared, "out", token_rows)


def _latent_points(attention: Any, layer: str) -> Iterator[Point]:
    """Points of attention with a latent for keys and values; all heads share a part of the keys."""
    down, up = attention.kv_a_proj_with_mqa, attention.kv_b_proj
    own, shared = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    queries = getattr(attention, "q_b_proj", None) or attention.q_proj

    def split(value: Tensor) -> Tensor:
        return value.reshape(value.shape[-2], -1, own + attention.v_head_dim)  # batch: one

    def keys(x: Tensor) -> Tensor:
        latent, last = down(x).split([attention.kv_lora_rank, shared], dim=-1)
        first = split(up(attention.kv_a_layernorm(latent)))[..., :own]
        return torch.cat([first, last[0, :, None].expand(-1, first.shape[1], -1)], dim=-1)

    yield Point("kv_latent" + layer, attention.kv_a_layernorm, "out", token_rows)
    yield Point("q" + layer, queries, "out", _split(own + shared))
    yield Point("k" + layer, attention, "in", keys)
    yield Point("v" + layer, up, "out", lambda x: split(x)[..., own:])


def _projections(attention: Any, heads: int, head_dim: int) -> dict[str, tuple[Any, Take]]:
    """The modules that project q, k and v, and the place of each in the module's output."""
    queries = getattr(attention, "q_proj", None)
    if queries is not None and queries.out_features == 2 * heads * head_dim:  # each with its gate
        return {
            "q": (queries, lambda x: _split(2 * head_dim)(x)[..., :head_dim]),
            "attn_gate": (queries, lambda x: _split(2 * head_dim)(x)[..., head_dim:].sigmoid()),
            "k": (attention.k_proj, _split(head_dim)),
            "v": (attention.v_proj, _split(head_dim)),
        }
    if queries is not None:
        keys = getattr(attention, "k_proj", None)  # None: those of an earlier layer
        values = getattr(attention, "v_proj", None) or keys
        found = {"q": queries, "k": keys, "v": values}
        taken = {site: (part, _split(head_dim)) for site, part in found.items() if part is not None}
        if (gate := getattr(attention, "gate_proj", None)) is not None:
            taken["attn_gate"] = gate, lambda x: _split(head_dim)(x).sigmoid()
        return taken
    if (fused := getattr(attention, "query_key_value", None)) is not None:
        keys = getattr(attention, "num_kv_heads", heads)  # for each, its queries, itself, its value

        def split(x: Tensor) -> Tensor:
            return x[0].unflatten(-1, (keys, heads // keys + 2, head_dim))

        return {
            "q": (fused, lambda x: split(x)[:, :, :-2].flatten(1, 2)),
            "k": (fused, lambda x: split(x)[:, :, -2]),
            "v": (fused, lambda x: split(x)[:, :, -1]),
        }
    for name in ("qkv_proj", "c_attn", "Wqkv"):  # all q, all k, all v
        if (fused := getattr(attention, name, None)) is not None:
            return {
                "q": (fused, lambda x: _split(head_dim)(x)[:, :heads]),
                "k": (fused, lambda x: _split(head_dim)(x)[:, heads:].chunk(2, dim=1)[0]),
                "v": (fused, lambda x: _split(head_dim)(x)[:, heads:].chunk(2, dim=1)[1]),
            }
    raise ValueError(f"{type(attention).__name__} has no known projections of q, k and v")


def embeds_itself(block: Any) -> bool:
    """Whether each block has its own embedding of the token, made partly of the usual one."""
    return getattr(block, "post_per_layer_input_norm", None) is not None


def find_part(module: Any, role: str) -> Any:
    for name in _NAMES[role]:
        if getattr(module, name, None) is not None:
            return getattr(module, name)
    raise ValueError(f"{type(module).__name__} has none of {', '.join(_NAMES[role])} ({role})")


def find_attention(block: Any) -> Any:
    """The module that has the projections; some families have it inside another one.

    None if the block has no mixer that attends, applies the delta rule or only convolves.
    """
    named = (getattr(block, name, None) for name in _NAMES["attention"])
    attention = next(filter(None, named), None)
    attention = getattr(attention, "attention", attention)
    mixes = any(hasattr(attention, name) for name in _NAMES["out_projection"])
    return attention if mixes and not _is_space(attention) else None


def find_space(block: Any) -> Any:
    """The module of the state space, if the block has one."""
    named = (getattr(block, name, None) for name in _NAMES["space"])
    return next(filter(_is_space, named), None)


def _is_space(mixer: Any) -> bool:
    return hasattr(mixer, "A_log") and hasattr(mixer, "D")


def convolves(mixer: Any) -> bool:
    """Whether a mixer is a convolution alone."""
    return hasattr(mixer, "conv") and hasattr(mixer, "in_proj")


def find_mlp(block: Any) -> Any:
    """The module of the MLP, or the block itself if it has its projections; None: it has none."""
    named = (getattr(block, name, None) for name in _NAMES["mlp"])
    mlp = next(filter(None, named), block)
    parts = ("experts", *_NAMES["down_projection"])
    return mlp if any(hasattr(mlp, part) for part in parts) else None


def find_shared_expert(block: Any) -> Any:
    """The expert that every token goes to: inside the mixture, or beside it."""
    mlp, beside = find_mlp(block), getattr(block, "shared_mlp", None)
    inside = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
    return beside if inside is None and beside is not mlp else inside


def token_rows(value: Tensor) -> Tensor:
    """Some modules are given tokens without the batch dimension."""
    return value[0] if value.ndim > 2 else value


def _split(head_dim: int) -> Take:
    return lambda value: value[0].unflatten(-1, (-1, head_dim))

"""What decides the activations of hybrid models, out of transformers' modules and out of ours.

Their blocks are of several kinds, each with other parts: so the parts are compared, one of each,
and which block has which.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from spile.models.config.arch import (
    ATTENTION,
    NO_MIXER,
    SHORT_CONVOLUTION,
    SIDE_BY_SIDE,
    STATE_SPACE,
    Arch,
    Experts,
    ShortConvolution,
    StateSpace,
)

FAMILIES = ("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2")
_MIXERS = {
    "full_attention": ATTENTION, "linear_attention": STATE_SPACE, "hybrid": SIDE_BY_SIDE,
    "conv": SHORT_CONVOLUTION, "mlp": NO_MIXER, "moe": NO_MIXER,
}  # fmt: skip
_MLPS = ("feed_forward", "block_sparse_moe", "shared_mlp")


class _Frequencies:
    """Check equality within float32's precision."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Frequencies)
        return self.values.shape == other.values.shape and np.allclose(
            self.values, other.values, rtol=3e-6, atol=0
        )


def of_theirs(config: Any, built: Callable[[Any], Any]) -> dict[str, Any]:
    kinds = list(config.layer_types)
    each = list(dict.fromkeys(kinds))
    small = copy.deepcopy(config)
    if config.model_type == "bamba":
        small.attn_layer_indices = [i for i, kind in enumerate(each) if kind == "full_attention"]
    elif config.model_type not in ("mamba2", "falcon_h1"):  # which have one kind
        small.layer_types = each
    small.num_hidden_layers = len(each)
    base = built(small).get_decoder()
    base = getattr(base, "model", base)
    blocks = dict(zip(each, base.layers, strict=True))
    (eps,) = {m.variance_epsilon for m in base.modules() if type(m).__name__.endswith("Norm")}

    def mixer(name: str, *kinds: str) -> Any:
        found = [blocks[kind] for kind in kinds if kind in blocks]
        return getattr(found[0], name, getattr(found[0], "mixer", None)) if found else None

    space = mixer("mamba", "linear_attention", "hybrid")
    attention = mixer("self_attn", "full_attention", "hybrid")
    convolution = mixer("conv", "conv")
    routed = [m for m in base.modules() if hasattr(m, "experts")]
    shared = getattr(next(iter(blocks.values())), "shared_mlp", None)
    mlps = {kind: any(hasattr(b, name) for name in _MLPS) for kind, b in blocks.items()}
    mlps |= {kind: True for kind in ("mlp", "moe") if kind in mlps}
    return {
        "vocab": config.vocab_size,
        "width": config.hidden_size,
        "tied": config.tie_word_embeddings,
        "eps": eps,
        "scales": (
            getattr(config, "embedding_multiplier", 1.0),
            getattr(config, "residual_multiplier", 1.0),
            getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0),
            tuple(getattr(config, "mlp_multipliers", (1.0, 1.0))),
        ),
        "wide": config.model_type == "mamba2" and config.residual_in_fp32,
        "kinds": [(_MIXERS[kind], mlps[kind], kind == "mlp") for kind in kinds],
        "activation": getattr(config, "mlp_hidden_act", "silu") if any(mlps.values()) else None,
        "space": space and _space(space, config),
        "convolution": convolution
        and ShortConvolution(convolution.conv_kernel_size, convolution.conv.bias is not None),
        "attention": attention and _attention(attention, base, config),
        "experts": _experts(routed[0], shared) if routed else None,
    }


def of_ours(arch: Arch) -> dict[str, Any]:
    attends = any(layer.attends for layer in arch.layers)
    ropes = [r.frequencies(arch.head_dim, arch.rope_positions) for r in arch.ropes]
    return {
        "vocab": arch.vocab_size,
        "width": arch.width,
        "tied": arch.tied_head,
        "eps": arch.norm_eps,
        "scales": (arch.embed_scale, arch.residual_scale, arch.logit_scale, arch.mlp_scales),
        "wide": arch.wide_stream,
        "kinds": [(layer.mixer, layer.mlp, layer.dense) for layer in arch.layers],
        "activation": arch.activation if any(layer.mlp for layer in arch.layers) else None,
        "space": arch.state_space if any(each.has_state_space for each in arch.layers) else None,
        "convolution": arch.convolution
        if any(layer.mixer == SHORT_CONVOLUTION for layer in arch.layers)
        else None,
        "attention": {
            "heads": (arch.num_heads, arch.num_kv_heads, arch.head_dim),
            "scale": _rounded(arch.attn_scale),
            "scales": (arch.attn_in_scale, arch.key_scale, arch.attn_out_scale),
            "rotary": _Frequencies(ropes[0][0]) if ropes else None,
            "positions": arch.rope_positions,
            "qk_norm": arch.qk_norm == "head",
            "bias": (arch.qkv_bias, arch.out_bias),
        }
        if attends
        else None,
        "experts": arch.experts,
    }


def _attention(attention: Any, base: Any, config: Any) -> dict[str, Any]:
    rotary = getattr(base, "rotary_emb", None)
    frequencies = None if rotary is None else type(rotary)(config).inv_freq.numpy()
    out = getattr(attention, "o_proj", None) or attention.out_proj
    names = ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")
    return {
        "heads": (config.num_attention_heads, config.num_key_value_heads, attention.head_dim),
        "scale": _rounded(attention.scaling),
        "scales": tuple(getattr(config, name, 1.0) for name in names),
        "rotary": None if frequencies is None else _Frequencies(frequencies),
        "positions": config.max_position_embeddings,
        "qk_norm": hasattr(attention, "q_layernorm"),
        "bias": (attention.q_proj.bias is not None, out.bias is not None),
    }


def _space(space: Any, config: Any) -> StateSpace:
    first = getattr(space.norm, "norm_before_gate", False)
    kind = "ungated" if first else "gated"
    least, most = space.time_step_limit
    return StateSpace(
        heads=space.num_heads,
        head_dim=space.head_dim,
        groups=space.n_groups,
        state=space.ssm_state_size,
        kernel=space.conv1d.kernel_size[0],
        norm_eps=space.norm.variance_epsilon
        if hasattr(space.norm, "weight")
        else space.layer_norm_epsilon,
        norm=kind if hasattr(space.norm, "weight") else None,
        norm_by_group=config.model_type in ("nemotron_h", "falcon_h1"),
        least_step=least,
        most_step=most if np.isfinite(most) else None,
        bias=space.in_proj.bias is not None,
        conv_bias=space.conv1d.bias is not None,
        activation=space.activation,
        in_scale=getattr(space, "ssm_in_multiplier", 1.0),
        scales=tuple(getattr(config, "ssm_multipliers", (1.0,) * 5)),
        out_scale=getattr(config, "ssm_out_multiplier", 1.0),
    )


def _experts(mlp: Any, beside: Any) -> Experts:
    router = getattr(mlp, "router", None) or mlp.gate
    nemotron = type(router).__name__.startswith("NemotronH")
    shared = mlp.shared_experts.up_proj.out_features if nemotron else 0
    return Experts(
        router.num_experts,
        router.top_k,
        router.norm_topk_prob if nemotron else True,
        scored="sigmoid" if nemotron else "softmax",
        corrected=hasattr(router, "e_score_correction_bias"),
        groups=router.num_group if nemotron else 1,
        chosen_groups=router.topk_group if nemotron else 1,
        scale=router.routed_scaling_factor if nemotron else 1.0,
        wide=nemotron,
        shared=shared or beside.input_linear.out_features // 2,
    )


def _rounded(scale: float) -> float:
    """Compare with a tolerance: a root and a quotient of one number differ in the last digit."""
    return float(np.float32(scale))

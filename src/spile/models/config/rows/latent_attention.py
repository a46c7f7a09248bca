"""Rows of families with latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""

from typing import Any

from spile.models.config.family import LAYER, Family
from spile.models.config.rows.mixtures import (
    GROUPED,
    GROUPED_READS,
    MOE_KEYS,
    MOE_READS,
    MOE_WEIGHTS,
    SHARED_EXPERTS,
)
from spile.models.config.specs import fused, linears, named

# Keys and values from a latent, as DeepSeek has them.
LATENT_READS = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
LATENT_SIZES = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
LATENT_WEIGHTS = {
    **linears(LAYER + "self_attn.", qa="q_a_proj"),
    **named(
        LAYER + "self_attn.", q_latent_norm="q_a_layernorm.weight",
        kv_latent_norm="kv_a_layernorm.weight", wqb="q_b_proj.weight",
    ),
    **fused(LAYER + "self_attn.kv_a_proj_with_mqa.weight", "wka", "wkr"),
    **fused(LAYER + "self_attn.kv_a_proj_with_mqa.bias", "bka", "bkr"),
    **fused(LAYER + "self_attn.kv_b_proj.weight", "wk", "wv", by="head"),
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    # transformers computes the first; the code that `auto_map` names does the same as its own.
    "ignored": (
        "qk_head_dim", "auto_map", "ep_size", "aux_loss_alpha", "seq_aux",
        "output_router_logits", "num_nextn_predict_layers", "num_mtp_layers",
    ),
    "harmless": {"moe_layer_freq": (1,)},
    "equal": {"head_dim": "qk_rope_head_dim"},
    "latent": {},
}  # fmt: skip
_DEEPSEEK2: dict[str, Any] = {
    **_LATENT,
    "architectures": ("DeepseekV2ForCausalLM",),
    "fixed": {"rope_interleaved": True},
    "keys": {**MOE_KEYS, "num_experts": "n_routed_experts", "shared_count": "n_shared_experts"},
    # (transformers does not normalise whatever the second says, and gives experts no bias)
    "harmless": {
        **_LATENT["harmless"], "scoring_func": ("softmax", None), "norm_topk_prob": (False, None),
        "mlp_bias": (False, None),
    },
    "weights": {**MOE_WEIGHTS, **SHARED_EXPERTS, **LATENT_WEIGHTS},
}  # fmt: skip
_DEEPSEEK3: dict[str, Any] = {
    **_LATENT,
    **GROUPED,
    "harmless": {
        **_LATENT["harmless"], "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
    },
    "weights": {**GROUPED["weights"], **LATENT_WEIGHTS},
}  # fmt: skip
_DEEPSEEK2_DEFAULTS = {
    **LATENT_SIZES, "q_lora_rank": 1536, "first_k_dense_replace": 0, "num_experts": 64,
    "shared_count": 2, "intermediate_size": 1407, "dense_size": 11008, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 2048,
}  # fmt: skip
_DEEPSEEK2_READS = (
    *MOE_READS, *LATENT_READS, "num_experts", "shared_count", "routed_scaling_factor",
    "first_k_dense_replace",
)  # fmt: skip

LATENT_ATTENTION = (
    Family(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        reads=(*GROUPED_READS, *LATENT_READS, "rope_interleave"),
        defaults={
            **LATENT_SIZES, "q_lora_rank": 1536, "rope_interleave": True, "num_experts": 256,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "intermediate_size": 2048,
            "dense_size": 18432, "shared_count": 1, "first_k_dense_replace": 3, "n_group": 8,
            "topk_group": 4, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096,
        },
        # The layer beyond the last predicts one more token.
        unused_weights=("layers.61.*",),
        **_DEEPSEEK3,
    ),
    Family(
        name="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        reads=(
            *(key for key in GROUPED_READS if key != "first_k_dense_replace"), *LATENT_READS,
            "mlp_layer_types", "rope_interleave",
        ),
        defaults={
            "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64, "v_head_dim": 256, "rope_interleave": True,
            "num_experts": 64, "num_experts_per_tok": 4, "norm_topk_prob": True,
            "intermediate_size": 1536, "dense_size": 10240, "shared_count": 1, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202_752,
        },
        unused_weights=("layers.47.*",),  # predicts one more token
        # transformers does not read this key; it assumes the same value.
        **dict(_DEEPSEEK3, harmless={**_DEEPSEEK3["harmless"], "first_k_dense_replace": (1,)}),
    ),
    Family(
        name="deepseek_v2",
        when={"topk_method": ("group_limited_greedy",)},
        reads=(*_DEEPSEEK2_READS, "n_group", "topk_group"),
        defaults=_DEEPSEEK2_DEFAULTS,
        experts={"wide": True, "group_best": 1},
        **_DEEPSEEK2,
    ),
    Family(
        name="deepseek_v2-greedy",
        when={"topk_method": ("greedy", None)},
        reads=_DEEPSEEK2_READS,
        defaults=_DEEPSEEK2_DEFAULTS,
        experts={"wide": True},
        **dict(_DEEPSEEK2, ignored=(*_DEEPSEEK2["ignored"], "n_group", "topk_group")),
    ),
)  # fmt: skip

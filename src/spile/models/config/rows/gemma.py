"""Rows of Gemma 1 to 4: norms before and after, layers that slide, heads by layer."""

from typing import Any

from spile.models.config.family import LAYER, LLAMA_WEIGHTS, Family
from spile.models.config.specs import fused, linears, named, norms

_GEMMA = {"norm": "rms_plus_one"}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA_NORMS = {
    **LLAMA_WEIGHTS,
    **norms(
        LAYER,
        attn_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
}
_CAUSAL = {"use_bidirectional_attention": (False, None)}
_GEMMA3: dict[str, Any] = {
    "fixed": {**_GEMMA, "post_norm": True, "qk_norm": "head"},
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    "keys": {"hidden_act": "hidden_activation"},
    "reads": (
        "sliding_window", "layer_types", "sliding_window_pattern", "query_pre_attn_scalar",
        "final_logit_softcapping", "rope_local_base_freq",
    ),
    "defaults": {
        **_GEMMA_DEFAULTS, "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    # Gemma 3's config has the cap, but transformers does not apply it
    "harmless": {**_CAUSAL, "attn_logit_softcapping": (None,), "cache_implementation": ("hybrid",)},
    "ignored": ("_sliding_window_pattern",),
    "windows": "pattern",
    "ropes_by_kind": True,
    "scaled_embeddings": True,
    "weights": _GEMMA_NORMS,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "fixed": {
        "norm": "rms_float32", "post_norm": True, "qk_norm": "head", "v_norm": True,
        "attn_scale": 1.0, "block_scale": True,
    },
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    "keys": {"hidden_act": "hidden_activation", "layer_embed": "hidden_size_per_layer_input"},
    "reads": (
        "sliding_window", "layer_types", "final_logit_softcapping", "global_head_dim",
        "num_global_key_value_heads", "per_layer_config", "attention_k_eq_v",
        "num_kv_shared_layers", "use_double_wide_mlp", "layer_embed",
    ),
    "defaults": {
        "tie_word_embeddings": True, "vocab_size": 262_144, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "layer_embed": 256,
        "num_kv_shared_layers": 0, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 512,
        "sliding_window_pattern": 6, "max_position_embeddings": 131_072,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6
            },
        },
    },
    # Tokens of text see the ones before them in any case.
    "harmless": {"use_bidirectional_attention": ("vision", None)},
    "equal": {"vocab_size_per_layer_input": "vocab_size"},
    "windows": "pattern",
    "ropes_by_kind": True,
    "scaled_embeddings": True,
    "weights": {
        **_GEMMA_NORMS,
        **norms(
            LAYER,
            experts_norm="pre_feedforward_layernorm_2",
            experts_post_norm="post_feedforward_layernorm_2",
            shared_post_norm="post_feedforward_layernorm_1",
            layer_embed_post_norm="post_per_layer_input_norm",
        ),
        **named(
            "", layer_embeds="embed_tokens_per_layer.weight",
            layer_embeds_from="per_layer_model_projection.weight",
            layer_embeds_norm="per_layer_projection_norm.weight",
        ),
        **named(
            LAYER, block_scale="layer_scalar", wlg="per_layer_input_gate.weight",
            wlo="per_layer_projection.weight", w_router="router.proj.weight",
            router_scale="router.scale", expert_scale="router.per_expert_scale",
        ),
    },
}  # fmt: skip
_GEMMA4_DENSE: dict[str, Any] = {
    **_GEMMA4,
    "when": {"enable_moe_block": (False, None)},
    "ignored": ("num_experts", "top_k_experts", "moe_intermediate_size"),
}
_GEMMA4_EXPERTS: dict[str, Any] = {
    **_GEMMA4,
    "when": {"enable_moe_block": (True,)},
    "keys": {
        **_GEMMA4["keys"], "intermediate_size": "moe_intermediate_size",
        "shared_size": "intermediate_size", "num_experts_per_tok": "top_k_experts",
    },
    "reads": (
        *(key for key in _GEMMA4["reads"] if key != "use_double_wide_mlp"), "num_experts",
        "num_experts_per_tok", "shared_size",
    ),
    "defaults": {
        **{k: v for k, v in _GEMMA4["defaults"].items() if k != "intermediate_size"},
        "shared_size": 9216, "norm_topk_prob": True,
    },
    "harmless": {**_GEMMA4["harmless"], "use_double_wide_mlp": (False, None)},
    "experts": {"apart": True, "scaled": True},
    "weights": {
        **_GEMMA4["weights"],
        **linears(LAYER + "mlp.", s_gate="gate_proj", s_up="up_proj", s_down="down_proj"),
        **fused(LAYER + "experts.gate_up_proj", "w_gate", "w_up"),
        **named(LAYER + "experts.", w_down="down_proj"),
    },
}  # fmt: skip
_GEMMA4_TOWER: dict[str, Any] = {
    "architectures": ("Gemma4ForConditionalGeneration",),
    "nested": "text_config",
    "beside": (
        "vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id",
        "video_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id",
        "vision_soft_tokens_per_image",
    ),
    "prefixes": ("model.language_model.",),
    "unused_weights": (
        "model.vision_tower.*", "model.embed_vision.*", "model.audio_tower.*",
        "model.embed_audio.*",
    ),
}  # fmt: skip

GEMMAS = (
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM",),
        fixed={**_GEMMA, "activation": "gelu_pytorch_tanh"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        defaults={**_GEMMA_DEFAULTS, "max_position_embeddings": 8192},
        # The first releases say "gelu", but were trained with the tanh approximation.
        harmless={
            **_CAUSAL, "hidden_act": ("gelu", "gelu_pytorch_tanh"),
            "hidden_activation": ("gelu_pytorch_tanh", None),
        },
        scaled_embeddings=True,
    ),
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM",),
        fixed={**_GEMMA, "post_norm": True},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={"hidden_act": "hidden_activation"},
        reads=(
            "sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        defaults={
            **_GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 4096,
            "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        harmless={
            **_CAUSAL, "hidden_act": ("gelu_pytorch_tanh",), "cache_implementation": ("hybrid",)
        },
        ignored=("sliding_window_size",),  # an old spelling beside the one that is read
        windows="pattern",
        scaled_embeddings=True,
        weights=_GEMMA_NORMS,
    ),
    Family(name="gemma3", architectures=("Gemma3ForCausalLM",), **_GEMMA3),
    Family(
        name="gemma3-multimodal",
        architectures=("Gemma3ForConditionalGeneration",),
        nested="text_config",
        beside=(
            "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
            "image_token_index", "image_token_id", "boi_token_id", "eoi_token_id",
        ),
        prefixes=("language_model.model.", "model.language_model."),
        unused_weights=(
            "vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*",
            "model.multi_modal_projector.*", "language_model.lm_head.weight",
        ),
        **_GEMMA3,
    ),
    Family(name="gemma4", architectures=("Gemma4ForCausalLM",), **_GEMMA4_DENSE),
    Family(name="gemma4-experts", architectures=("Gemma4ForCausalLM",), **_GEMMA4_EXPERTS),
    Family(name="gemma4-multimodal", **{**_GEMMA4_DENSE, **_GEMMA4_TOWER}),
    Family(name="gemma4-experts-multimodal", **{**_GEMMA4_EXPERTS, **_GEMMA4_TOWER}),
)  # fmt: skip

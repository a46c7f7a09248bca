"""Rows of families with softmax attention and experts in place of the MLP."""

from typing import Any

from spile.models.config.family import LAYER, LLAMA_WEIGHTS, Family
from spile.models.config.rows.llama_like import GRANITE_AMOUNTS, GRANITE_DEFAULTS, SWITCHED
from spile.models.config.specs import TensorSource, fused, linears, named

ROUTED = ("num_experts_per_tok",)
MOE_KEYS = {
    "intermediate_size": "moe_intermediate_size", "dense_size": "intermediate_size",
    "shared_size": "shared_expert_intermediate_size",
}  # fmt: skip
MOE_READS = (*ROUTED, "dense_size")
SPARSE_STEP = ("decoder_sparse_step", "mlp_only_layers")
MOE_WEIGHTS = {
    **LLAMA_WEIGHTS,
    **linears(LAYER + "mlp.", d_gate="gate_proj", d_up="up_proj", d_down="down_proj"),
    **named(LAYER + "mlp.", w_router="gate.weight"),
    **linears(LAYER + "mlp.experts.{expert}.", _gate="gate_proj", _up="up_proj", _down="down_proj"),
}
SHARED_EXPERTS = linears(
    LAYER + "mlp.shared_experts.", s_gate="gate_proj", s_up="up_proj", s_down="down_proj"
)
SPARSE_MOE = LAYER + "block_sparse_moe."
MIXTRAL_EXPERTS = named(
    SPARSE_MOE, w_router="gate.weight", w_gate="experts.{expert}.w1.weight",
    w_up="experts.{expert}.w3.weight", w_down="experts.{expert}.w2.weight",
)  # fmt: skip
GRANITE_EXPERTS = {
    **named(SPARSE_MOE, w_router="router.layer.weight", w_down="output_linear.weight"),
    **fused(SPARSE_MOE + "input_linear.weight", "w_gate", "w_up"),
}
# Experts in groups, after some plain layers, as DeepSeek V3 has them.
GROUPED_READS = (
    *MOE_READS, "num_experts", "norm_topk_prob", "shared_count", "routed_scaling_factor",
    "n_group", "topk_group", "first_k_dense_replace",
)  # fmt: skip
ONE_GROUP = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
GROUPED: dict[str, Any] = {
    "keys": {
        **MOE_KEYS, "num_experts": ("n_routed_experts", "num_local_experts"),
        "shared_count": "n_shared_experts",
    },
    "experts": {"scored": "sigmoid", "corrected": True, "wide": True},
    "weights": {
        **MOE_WEIGHTS, **SHARED_EXPERTS,
        **named(LAYER + "mlp.gate.", correction="e_score_correction_bias"),
    },
}  # fmt: skip
ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
SHARED_WEIGHED = linears(
    LAYER + "mlp.", s_gate="shared_expert.gate_proj", s_up="shared_expert.up_proj",
    s_down="shared_expert.down_proj", s_router="shared_expert_gate",
)  # fmt: skip
FEED_FORWARD = LAYER + "feed_forward."
_LLAMA4: dict[str, Any] = {
    "fixed": {"rope_interleaved": True, "qk_norm_last": True, "qk_norm_rotated": True},
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    "switched": {"qk_norm": ("use_qk_norm", "bare")},
    "keys": {
        "num_experts": "num_local_experts", "dense_size": "intermediate_size_mlp",
        "shared_size": "intermediate_size",
    },
    "reads": (
        *MOE_READS, "num_experts", "shared_size", "moe_layers", "interleave_moe_layer_step",
        "no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size",
        "attn_temperature_tuning", "floor_scale", "attn_scale",
    ),
    "defaults": {
        "num_key_value_heads": 8, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 1,
        "norm_topk_prob": False, "intermediate_size": 8192, "shared_size": 8192,
        "dense_size": 16384, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192, "use_qk_norm": True, "attn_temperature_tuning": True,
        "floor_scale": 8192, "attn_scale": 0.1, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    "ignored": ROUTER_LOSS,
    "harmless": {"for_llm_compression": (False,), "cache_implementation": ("hybrid",)},
    "experts": {"scored": "sigmoid", "weighs_input": True},
    "weights": {
        **LLAMA_WEIGHTS,
        **linears(FEED_FORWARD, d_gate="gate_proj", d_up="up_proj", d_down="down_proj"),
        **linears(
            FEED_FORWARD + "shared_expert.", s_gate="gate_proj", s_up="up_proj",
            s_down="down_proj",
        ),
        **named(FEED_FORWARD, w_router="router.weight"),
        **fused(FEED_FORWARD + "experts.gate_up_proj", "w_gate", "w_up", transposed=True),
        "w_down": TensorSource(FEED_FORWARD + "experts.down_proj", transposed=True),
    },
}  # fmt: skip

MIXTURES = (
    Family(name="llama4", architectures=("Llama4ForCausalLM",), **_LLAMA4),
    Family(
        name="llama4-multimodal",
        architectures=("Llama4ForConditionalGeneration",),
        nested="text_config",
        beside=("vision_config", "boi_token_index", "eoi_token_index", "image_token_index"),
        prefixes=("language_model.model.",),
        head="language_model.lm_head.weight",
        unused_weights=("vision_model.*", "multi_modal_projector.*"),
        **_LLAMA4,
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        keys={"num_experts": "num_local_experts"},
        reads=("sliding_window", "num_experts", *ROUTED),
        defaults={
            "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131_072,
        },
        ignored=ROUTER_LOSS,
        windows="always",
        weights={**LLAMA_WEIGHTS, **MIXTRAL_EXPERTS},
    ),
    Family(
        name="phimoe",
        architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        fixed={"norm": "layer"},
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias", "head_bias": "lm_head_bias"
        },
        keys={"num_experts": "num_local_experts", "margin": "router_jitter_noise"},
        reads=(
            "sliding_window", "num_experts", "margin", "original_max_position_embeddings", *ROUTED
        ),
        defaults={
            "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2,
            "norm_topk_prob": False, "margin": 0.01, "intermediate_size": 6400,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131_072,
        },
        ignored=(
            "output_router_logits", "router_aux_loss_coef", "input_jitter_noise", "auto_map",
            "hidden_dropout",
        ),
        windows="always",
        weights={**LLAMA_WEIGHTS, **MIXTRAL_EXPERTS},
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        fixed={"qk_norm": "head"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={**MOE_KEYS, "num_experts": ("num_experts", "num_local_experts")},
        reads=(
            *MOE_READS, *SPARSE_STEP, "num_experts", "norm_topk_prob", "sliding_window",
            "use_sliding_window",
        ),
        defaults={
            **SWITCHED, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "dense_size": 6144, "decoder_sparse_step": 1, "sliding_window": 4096,
            "max_position_embeddings": 32768,
        },
        ignored=(*ROUTER_LOSS, "max_window_layers"),
        windows="always",
        weights=MOE_WEIGHTS,
    ),
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        biases={"qkv_bias": "qkv_bias"},
        keys=MOE_KEYS,
        reads=(
            *MOE_READS, *SPARSE_STEP, "num_experts", "norm_topk_prob", "shared_size",
            "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
        ),
        defaults={
            **SWITCHED, "qkv_bias": True, "num_key_value_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "norm_topk_prob": False, "intermediate_size": 1408,
            "dense_size": 5632, "shared_size": 5632, "decoder_sparse_step": 1,
            "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768,
        },
        ignored=ROUTER_LOSS,
        experts={"shared_gate": True},
        windows="lower",
        weights={**MOE_WEIGHTS, **SHARED_WEIGHED},
    ),
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        fixed={"qk_norm": "full"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={"num_experts": ("num_experts", "num_local_experts")},
        reads=("num_experts", "norm_topk_prob", *ROUTED),
        defaults={
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "intermediate_size": 2048, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        },
        ignored=ROUTER_LOSS,
        harmless={"clip_qkv": (None,)},
        weights=MOE_WEIGHTS,
    ),
    Family(
        name="granitemoe",
        architectures=("GraniteMoeForCausalLM",),
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={"num_experts": "num_local_experts"},
        reads=("num_experts", "logits_scaling", *ROUTED),
        ignored=ROUTER_LOSS,
        weights={**LLAMA_WEIGHTS, **GRANITE_EXPERTS},
        defaults={
            **GRANITE_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        amounts=GRANITE_AMOUNTS,
    ),
    Family(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        biases={"qkv_bias": "attention_bias"},
        switched={"qk_norm": ("use_qk_norm", "head")},
        reads=(*GROUPED_READS, "partial_rotary_factor"),
        defaults={
            "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "intermediate_size": 1408, "dense_size": 10944,
            "shared_count": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, **ONE_GROUP,
        },
        ignored=(*ROUTER_LOSS, "num_nextn_predict_layers", "num_mtp_layers"),
        # The layer beyond the last predicts one more token: GLM-4.5-Air's, and GLM-4.5's.
        unused_weights=("layers.46.*", "layers.92.*"),
        **GROUPED,
    ),
    Family(
        name="dots1",
        architectures=("Dots1ForCausalLM",),
        fixed={"qk_norm": "head"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        reads=(*GROUPED_READS, "sliding_window", "max_window_layers", "layer_types"),
        defaults={
            "norm_topk_prob": False, "intermediate_size": 1408, "dense_size": 10944,
            "first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62,
            "max_position_embeddings": 2048, **ONE_GROUP,
        },
        ignored=(*ROUTER_LOSS, "moe_layer_freq"),
        harmless={
            "use_sliding_window": (False, None), "scoring_func": ("noaux_tc", "sigmoid"),
            "topk_method": ("noaux_tc",),
        },
        windows="upper",
        **GROUPED,
    ),
    Family(
        name="ernie4_5_moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        fixed={"rope_interleaved": True},
        keys={
            **MOE_KEYS, "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
            "shared_count": "moe_num_shared_experts",
        },
        reads=(
            *MOE_READS, "num_experts", "shared_count", "moe_layer_start_index",
            "moe_layer_end_index", "moe_layer_interval",
        ),
        defaults={
            "tie_word_embeddings": True, "num_key_value_heads": 4, "num_experts": 64,
            "num_experts_per_tok": 6, "norm_topk_prob": True, "intermediate_size": 1536,
            "dense_size": 12288, "shared_count": 2, "moe_layer_start_index": 1,
            "moe_layer_end_index": -1, "moe_layer_interval": 1, "rope_theta": 5e5,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        },
        ignored=(*ROUTER_LOSS, "moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free"),
        harmless={"use_bias": (False, None)},
        experts={"corrected": True, "wide": True},
        weights={
            **MOE_WEIGHTS,
            **SHARED_EXPERTS,
            "correction": TensorSource(
                LAYER + "mlp.moe_statics.e_score_correction_bias", boxed=True
            ),
        },
        unused_weights=("mtp_*",),
    ),
    Family(
        name="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        fixed={"qk_norm": "full"},
        keys={"num_experts": "num_local_experts"},
        reads=("num_experts", "rotary_dim", *ROUTED),
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "intermediate_size": 1536,
            "rope_theta": 5e6, "max_position_embeddings": 196_608,
        },
        ignored=(
            *ROUTER_LOSS, "auto_map", "attn_type_list", "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
            "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode",
        ),
        harmless={
            "qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",), "use_qk_norm": (True,),
            "use_routing_bias": (True,), "shared_intermediate_size": (0,),
        },
        experts={"scored": "sigmoid", "corrected": True},
        weights={
            **LLAMA_WEIGHTS, **MIXTRAL_EXPERTS,
            **named(SPARSE_MOE, correction="e_score_correction_bias"),
        },
    ),
    Family(
        name="gpt_oss",
        architectures=("GptOssForCausalLM",),
        fixed={
            "norm": "rms_float32", "sinks": True, "mlp_bias": True, "activation": "quick_gelu"
        },
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={"num_experts": "num_local_experts", "glu_limit": "swiglu_limit"},
        reads=("sliding_window", "layer_types", "num_experts", "glu_limit", *ROUTED),
        defaults={
            "attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4, "head_dim": 64,
            "sliding_window": 128, "sliding_window_pattern": 2, "norm_topk_prob": True,
            "glu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
            "max_position_embeddings": 131_072,
        },
        ignored=(*ROUTER_LOSS, "experts_per_token", "initial_context_length"),
        harmless={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
        rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
        quantized=("mxfp4",),
        windows="pattern",
        weights={
            **LLAMA_WEIGHTS,
            **named(LAYER, sinks="self_attn.sinks", b_down="mlp.experts.down_proj_bias"),
            **linears(LAYER, _router="mlp.router"),
            **fused(
                LAYER + "mlp.experts.gate_up_proj", "w_gate", "w_up", by="row", transposed=True
            ),
            **fused(LAYER + "mlp.experts.gate_up_proj_bias", "b_gate", "b_up", by="row"),
            "w_down": TensorSource(LAYER + "mlp.experts.down_proj", transposed=True),
        },
    ),
)  # fmt: skip

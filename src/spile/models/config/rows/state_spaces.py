"""Rows of families with the state spaces of Mamba-2, or with short convolutions."""

from typing import Any

from spile.models.config.arch import NO_MIXER, SHORT_CONVOLUTION, SIDE_BY_SIDE, STATE_SPACE, Layer
from spile.models.config.family import LAYER, LLAMA_WEIGHTS, Family
from spile.models.config.rows.llama_like import BIAS_KEYS, GRANITE_AMOUNTS, GRANITE_DEFAULTS
from spile.models.config.rows.mixtures import (
    FEED_FORWARD,
    GRANITE_EXPERTS,
    MOE_READS,
    ONE_GROUP,
    ROUTED,
    ROUTER_LOSS,
)
from spile.models.config.specs import fused, linears, named, norms, state_space

# State spaces, as Mamba-2 and Bamba name their sizes; and their tensors below a stem.
_SSM_READS = ("time_step_limit",)
_MAMBA2_SIZES = {
    "ssm_groups": "n_groups", "ssm_kernel": "conv_kernel", "ssm_conv_bias": "use_conv_bias",
    "ssm_bias": "use_bias",
}  # fmt: skip
_BAMBA_SIZES = {
    "ssm_heads": "mamba_n_heads", "ssm_head_dim": "mamba_d_head", "ssm_groups": "mamba_n_groups",
    "ssm_state": "mamba_d_state", "ssm_kernel": "mamba_d_conv", "ssm_expand": "mamba_expand",
    "ssm_conv_bias": "mamba_conv_bias", "ssm_bias": "mamba_proj_bias",
    "ssm_activation": "hidden_act",
}  # fmt: skip
_BAMBA_DEFAULTS = {
    "ssm_heads": 128, "ssm_head_dim": "auto", "ssm_groups": 1, "ssm_state": 256, "ssm_kernel": 4,
    "ssm_expand": 2, "ssm_conv_bias": True, "ssm_bias": False,
}  # fmt: skip
_BAMBA_WEIGHTS = {
    **LLAMA_WEIGHTS,
    **norms("", final_norm="final_layernorm"),
    **norms(LAYER, mlp_norm="pre_ff_layernorm"),
    **linears(FEED_FORWARD, _gate="gate_proj", _up="up_proj", _down="down_proj"),
    **state_space(LAYER + "mamba."),
}
_SSM_IGNORED = (
    "mamba_chunk_size", "chunk_size", "use_mamba_kernels", "num_logits_to_keep",
    "z_loss_coefficient", "rescale_prenorm_residual", "time_step_min", "time_step_max",
    "time_step_floor", "time_step_rank",
)  # fmt: skip
_SSM_LAYER = Layer(rope=None, mixer=STATE_SPACE)
_SSM_KINDS = {"full_attention": Layer(), "linear_attention": _SSM_LAYER}
_GRANITE_HYBRID: dict[str, Any] = {
    "architectures": ("GraniteMoeHybridForCausalLM",),
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    "amounts": GRANITE_AMOUNTS,
    "ignored": (*_SSM_IGNORED, *ROUTER_LOSS, "init_method"),
    "harmless": {"normalization_function": ("rmsnorm",), "mlp_bias": (False, None)},
    "unrotated": {"position_embedding_type": (None, "nope")},
    "kinds": _SSM_KINDS,
    "unlisted": "linear_attention",
    "state_space": {},
}  # fmt: skip
_GRANITE_HYBRID_READS = ("logits_scaling", "layer_types", "ssm_expand", *_SSM_READS)
_GRANITE_HYBRID_WEIGHTS = {**LLAMA_WEIGHTS, **state_space(LAYER + "mamba.")}

STATE_SPACES = (
    Family(
        name="mamba2",
        architectures=("Mamba2ForCausalLM",),
        fixed={"norm": "rms_float32", "ropes": (), "first_hidden": 1},
        biases={"wide_stream": "residual_in_fp32"},
        keys={
            **_MAMBA2_SIZES, "rms_norm_eps": "layer_norm_epsilon", "ssm_heads": "num_heads",
            "ssm_head_dim": "head_dim", "ssm_state": "state_size", "ssm_expand": "expand",
            "ssm_activation": "hidden_act",
        },
        reads=("ssm_expand", *_SSM_READS),
        # It attends nowhere, and no position is its last.
        defaults={
            "num_attention_heads": 1, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5,
            "ssm_heads": 128, "ssm_head_dim": 64, "ssm_groups": 8, "ssm_state": 128,
            "ssm_kernel": 4, "ssm_expand": 2, "ssm_conv_bias": True, "residual_in_fp32": True,
        },
        # (transformers does not read the last two.)
        ignored=(
            *_SSM_IGNORED, "pad_vocab_size_multiple", "time_step_init_scheme", "time_step_scale",
            "norm_before_gate", "rms_norm",
        ),
        kinds={"linear_attention": Layer(rope=None, mixer=STATE_SPACE, mlp=False)},
        unlisted="linear_attention",
        state_space={},
        weights={
            **named("", embed="embeddings.weight", final_norm="norm_f.weight"),
            **norms(LAYER, attn_norm="norm"),
            **state_space(LAYER + "mixer."),
        },
        elsewhere=named("", embed="embedding.weight"),
        prefixes=("backbone.",),
    ),
    Family(
        name="bamba",
        architectures=("BambaForCausalLM",),
        biases=BIAS_KEYS,
        keys={**_BAMBA_SIZES, "attention_layers": "attn_layer_indices"},
        reads=("partial_rotary_factor", "attention_layers", "ssm_expand", *_SSM_READS),
        defaults={
            **_BAMBA_DEFAULTS, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5, "max_position_embeddings": 262_144,
        },
        ignored=(*_SSM_IGNORED, "attn_rotary_emb"),
        kinds=_SSM_KINDS,
        unlisted="linear_attention",
        state_space={},
        weights=_BAMBA_WEIGHTS,
    ),
    Family(
        name="granitemoehybrid-dense",
        when={"num_local_experts": (0,)},
        keys={**_BAMBA_SIZES, "intermediate_size": "shared_intermediate_size"},
        reads=_GRANITE_HYBRID_READS,
        defaults={**GRANITE_DEFAULTS, **_BAMBA_DEFAULTS, "intermediate_size": 1024},
        weights={
            **_GRANITE_HYBRID_WEIGHTS,
            **fused(LAYER + "shared_mlp.input_linear.weight", "w_gate", "w_up"),
            **named(LAYER + "shared_mlp.", w_down="output_linear.weight"),
        },
        **dict(
            _GRANITE_HYBRID,
            ignored=(*_GRANITE_HYBRID["ignored"], "intermediate_size", "num_experts_per_tok"),
        ),
    ),
    Family(
        name="granitemoehybrid",
        keys={
            **_BAMBA_SIZES, "num_experts": "num_local_experts",
            "shared_size": "shared_intermediate_size",
        },
        reads=(*_GRANITE_HYBRID_READS, "num_experts", "shared_size", *ROUTED),
        defaults={
            **GRANITE_DEFAULTS, **_BAMBA_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "shared_size": 1024,
        },
        weights={
            **_GRANITE_HYBRID_WEIGHTS,
            **GRANITE_EXPERTS,
            **fused(LAYER + "shared_mlp.input_linear.weight", "ws_gate", "ws_up"),
            **named(LAYER + "shared_mlp.", ws_down="output_linear.weight"),
        },
        **_GRANITE_HYBRID,
    ),
    Family(
        name="nemotron_h",
        architectures=("NemotronHForCausalLM",),
        fixed={"norm": "rms_float32", "ropes": (), "gated": False},
        biases={"mlp_bias": "mlp_bias"},
        keys={
            **_MAMBA2_SIZES, "rms_norm_eps": "layer_norm_epsilon", "ssm_heads": "mamba_num_heads",
            "ssm_head_dim": "mamba_head_dim", "ssm_state": "ssm_state_size",
            "ssm_activation": "mamba_hidden_act", "hidden_act": "mlp_hidden_act",
            "layer_types": ("layers_block_type", "layer_types"), "num_experts": "n_routed_experts",
            "intermediate_size": "moe_intermediate_size", "dense_size": "intermediate_size",
            "shared_size": "moe_shared_expert_intermediate_size",
        },
        reads=(
            *MOE_READS, "num_experts", "norm_topk_prob", "shared_size", "routed_scaling_factor",
            "n_group", "topk_group", "layer_types", "hybrid_override_pattern", "time_step_min",
        ),
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "relu2",
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "ssm_heads": 128,
            "ssm_head_dim": 64, "ssm_groups": 8, "ssm_state": 128, "ssm_kernel": 4,
            "ssm_conv_bias": True, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "intermediate_size": 7688, "shared_size": 7688,
            "dense_size": 21504, "time_step_min": 0.001, **ONE_GROUP,
        },
        # (transformers reads neither these limits nor the expansion, and adds in its own dtype.)
        ignored=(
            *(key for key in _SSM_IGNORED if key != "time_step_min"), *ROUTER_LOSS,
            "time_step_limit", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype",
            "residual_in_fp32", "hidden_dropout", "moe_shared_expert_overlap", "n_shared_experts",
            "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
            "auto_map", "rope_theta", "partial_rotary_factor", "norm_eps",
        ),
        harmless={
            "attention_bias": (False, None), "moe_latent_size": (None,), "mlp_hidden_dim": (None,),
            "attention_head_dim": (128,),
        },
        experts={"scored": "sigmoid", "corrected": True, "wide": True},
        kinds={
            "full_attention": Layer(mlp=False),
            "linear_attention": Layer(rope=None, mixer=STATE_SPACE, mlp=False),
            "mlp": Layer(rope=None, mixer=NO_MIXER, dense=True),
            "moe": Layer(rope=None, mixer=NO_MIXER),
        },
        state_space={"norm_by_group": True},
        weights={
            **named("", embed="embeddings.weight", final_norm="norm_f.weight"),
            **norms(LAYER, attn_norm="norm", mlp_norm="norm"),
            **linears(LAYER + "mixer.", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),
            **state_space(LAYER + "mixer."),
            **linears(LAYER + "mixer.", d_up="up_proj", d_down="down_proj"),
            **linears(LAYER + "mixer.experts.{expert}.", _up="up_proj", _down="down_proj"),
            **linears(LAYER + "mixer.shared_experts.", s_up="up_proj", s_down="down_proj"),
            **named(
                LAYER + "mixer.gate.", w_router="weight", correction="e_score_correction_bias"
            ),
        },
        prefixes=("model.", "backbone."),
        unused_weights=("mtp.*",),
    ),
    Family(
        name="falcon_h1",
        architectures=("FalconH1ForCausalLM",),
        biases=BIAS_KEYS,
        amounts={
            "embed_scale": "embedding_multiplier", "logit_scale": "lm_head_multiplier",
            "attn_in_scale": "attention_in_multiplier",
            "attn_out_scale": "attention_out_multiplier", "key_scale": "key_multiplier",
        },
        keys={**_BAMBA_SIZES, "ssm_inner": "mamba_d_ssm"},
        reads=(
            "mlp_multipliers", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
            "mamba_rms_norm", "mamba_norm_before_gate", "ssm_inner", "ssm_expand", *_SSM_READS,
        ),
        defaults={
            **_BAMBA_DEFAULTS, "ssm_inner": 1024, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "mamba_norm_before_gate": True, "max_position_embeddings": 8192,
        },
        ignored=(*_SSM_IGNORED, "mamba_use_mlp", "mlp_expansion_factor"),
        harmless={"attn_layer_indices": (None,)},
        equal={"projectors_bias": "ssm_bias"},
        kinds={"hybrid": Layer(mixer=SIDE_BY_SIDE)},
        unlisted="hybrid",
        state_space={"norm_by_group": True},
        weights=_BAMBA_WEIGHTS,
        unused_weights=("layers.*.mamba.mup_vector",),
    ),
    Family(
        name="lfm2",
        architectures=("Lfm2ForCausalLM",),
        fixed={"qk_norm": "head", "activation": "silu"},
        keys={
            "rms_norm_eps": "norm_eps", "intermediate_size": ("block_ff_dim", "intermediate_size"),
            "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
            "attention_layers": "full_attn_idxs",
        },
        reads=(
            "layer_types", "attention_layers", "conv_L_cache", "block_auto_adjust_ff_dim",
        ),
        defaults={
            "tie_word_embeddings": True, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "max_position_embeddings": 128_000, "conv_L_cache": 3,
            "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True, "intermediate_size": 12288,
        },
        # transformers does not read them; the last five say how weights are drawn at random.
        ignored=(
            "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale",
            "block_use_xavier_init", "conv_use_xavier_init", "theta",
        ),
        harmless={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
        equal={
            "block_dim": "hidden_size", "conv_dim": "hidden_size", "conv_dim_out": "hidden_size",
            "num_heads": "num_attention_heads",
        },
        kinds={
            "full_attention": Layer(), "conv": Layer(rope=None, mixer=SHORT_CONVOLUTION)
        },
        unlisted="full_attention",
        weights={
            **LLAMA_WEIGHTS,
            **norms("", final_norm="embedding_norm"),
            **norms(LAYER, attn_norm="operator_norm", mlp_norm="ffn_norm"),
            **linears(LAYER + "self_attn.", o="out_proj"),
            **named(
                LAYER + "self_attn.", q_norm="q_layernorm.weight", k_norm="k_layernorm.weight"
            ),
            **linears(FEED_FORWARD, _gate="w1", _up="w3", _down="w2"),
            **fused(LAYER + "conv.in_proj.weight", "wcb", "wcc", "wcx"),
            **fused(LAYER + "conv.in_proj.bias", "bcb", "bcc", "bcx"),
            **named(LAYER + "conv.conv.", conv="weight", conv_bias="bias"),
            **linears(LAYER + "conv.", co="out_proj"),
        },
    ),
)  # fmt: skip

"""Rows of families some of whose layers mix tokens by the gated delta rule."""

from typing import Any

from spile.models.config.arch import GATED_DELTA, Layer
from spile.models.config.family import LAYER, LLAMA_WEIGHTS, Family
from spile.models.config.rows.latent_attention import (
    LATENT_READS,
    LATENT_SIZES,
    LATENT_WEIGHTS,
)
from spile.models.config.rows.mixtures import (
    GROUPED_READS,
    MIXTRAL_EXPERTS,
    MOE_KEYS,
    MOE_READS,
    MOE_WEIGHTS,
    ROUTED,
    ROUTER_LOSS,
    SHARED_WEIGHED,
    SPARSE_MOE,
    SPARSE_STEP,
)
from spile.models.config.specs import fused, linears, named, norms

_DELTA_KINDS = {
    "full_attention": Layer(), "linear_attention": Layer(rope=None, mixer=GATED_DELTA)
}  # fmt: skip
_LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
_LINEAR = LAYER + "linear_attn."
_LINEAR_WEIGHTS = {
    **named(
        _LINEAR, wdg="in_proj_z.weight", wdb="in_proj_b.weight", wda="in_proj_a.weight",
        wdo="out_proj.weight", decay="A_log", decay_bias="dt_bias", delta_norm="norm.weight",
    ),
    **fused(_LINEAR + "in_proj_qkv.weight", "wdq", "wdk", "wdv"),
    **fused(_LINEAR + "conv1d.weight", "conv_q", "conv_k", "conv_v"),
}  # fmt: skip
# Tensors of layers that fuse none of them.
_SEPARATE = {
    "wdq": "q_proj.weight", "wdk": "k_proj.weight", "wdv": "v_proj.weight", "wdb": "b_proj.weight",
    "wdo": "o_proj.weight", "conv_q": "q_conv1d.weight", "conv_k": "k_conv1d.weight",
    "conv_v": "v_conv1d.weight", "decay": "A_log", "decay_bias": "dt_bias",
    "delta_norm": "o_norm.weight",
}  # fmt: skip
_GATED_QUERIES = {
    **fused(LAYER + "self_attn.q_proj.weight", "wq", "wg", by="head"),
    **fused(LAYER + "self_attn.q_proj.bias", "bq", "bg", by="head"),
}
_QWEN_HYBRID: dict[str, Any] = {
    "fixed": {"norm": "rms_plus_one", "qk_norm": "head", "attn_gate": True},
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    "reads": (
        "layer_types", "full_attention_interval", "partial_rotary_factor", *_LINEAR_SIZES
    ),
    "defaults": {
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
    },
    "kinds": _DELTA_KINDS,
    "delta": {},
    "unused_weights": ("mtp.*",),
}  # fmt: skip
_QWEN35: dict[str, Any] = {
    **_QWEN_HYBRID,
    # All of a text token's three positions are the same; the state is in float32 in any case.
    "ignored": (
        "mrope_section", "mrope_interleaved", "mamba_ssm_dtype", "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ),
    "harmless": {"attn_output_gate": (True,), "output_gate_type": ("swish", None)},
}  # fmt: skip
_QWEN35_TOWER: dict[str, Any] = {
    "nested": "text_config",
    "beside": (
        "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
        "vision_end_token_id",
    ),
    "prefixes": ("model.language_model.",),
    "unused_weights": ("mtp.*", "model.visual.*"),
}  # fmt: skip
_QWEN35_DENSE = {**LLAMA_WEIGHTS, **_GATED_QUERIES, **_LINEAR_WEIGHTS}
_QWEN35_EXPERTS = {**MOE_WEIGHTS, **_GATED_QUERIES, **_LINEAR_WEIGHTS, **SHARED_WEIGHED}
_QWEN_NEXT: dict[str, Any] = {
    **_QWEN_HYBRID,
    "keys": MOE_KEYS,
    "reads": (
        *_QWEN_HYBRID["reads"], *MOE_READS, *SPARSE_STEP, "num_experts", "norm_topk_prob",
        "shared_size",
    ),
    "defaults": {
        **_QWEN_HYBRID["defaults"], "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": True, "intermediate_size": 512, "shared_size": 512, "dense_size": 5632,
        "decoder_sparse_step": 1,
    },
    "ignored": ROUTER_LOSS,
    "experts": {"shared_gate": True},
}  # fmt: skip
_QWEN35_MOE: dict[str, Any] = {
    **_QWEN35,
    "keys": {
        "intermediate_size": "moe_intermediate_size",
        "shared_size": "shared_expert_intermediate_size",
    },
    "reads": (*_QWEN_HYBRID["reads"], *ROUTED, "num_experts", "shared_size"),
    "defaults": {
        **_QWEN_HYBRID["defaults"], "num_experts": 256, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "intermediate_size": 512, "shared_size": 512,
    },
    # Every layer has experts: of other MLPs it has the keys at most.
    "ignored": (*_QWEN35["ignored"], *ROUTER_LOSS, "intermediate_size"),
    "harmless": {
        **_QWEN35["harmless"], "mlp_only_layers": ([], None), "decoder_sparse_step": (1, None),
        "norm_topk_prob": (True, None),
    },
    "experts": {"shared_gate": True},
    # As published; transformers writes each expert by itself.
    "elsewhere": {
        **fused(LAYER + "mlp.experts.gate_up_proj", "w_gate", "w_up"),
        **named(LAYER + "mlp.experts.", w_down="down_proj"),
    },
}  # fmt: skip
_KIMI_KEYS = {
    **MOE_KEYS, "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
    "norm_topk_prob": ("moe_renormalize", "norm_topk_prob"),
    "n_group": ("num_expert_group", "n_group"),
    "shared_count": ("num_shared_experts", "n_shared_experts"),
    "attention_layers": "full_attn_layers", "linear_layers": "kda_layers",
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), "linear_num_heads"),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), "linear_head_dim"),
}  # fmt: skip
_KIMI_WEIGHTS = {
    **MOE_WEIGHTS,
    **LATENT_WEIGHTS,
    **named(
        LAYER + "self_attn.", **_SEPARATE, wdan="f_a_proj.weight", wda="f_b_proj.weight",
        wdgn="g_a_proj.weight", wdg="g_b_proj.weight",
    ),
    **MIXTRAL_EXPERTS,
    **named(SPARSE_MOE, correction="gate.e_score_correction_bias"),
    **linears(
        SPARSE_MOE + "shared_experts.", s_gate="gate_proj", s_up="up_proj", s_down="down_proj"
    ),
}  # fmt: skip

DELTA_NETS = (
    Family(
        name="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        weights={
            **_QWEN35_EXPERTS,
            **fused(_LINEAR + "in_proj_qkvz.weight", "wdq", "wdk", "wdv", "wdg", by="head"),
            **fused(_LINEAR + "in_proj_ba.weight", "wdb", "wda", by="head"),
        },
        **_QWEN_NEXT,
    ),
    Family(
        name="qwen3_5",
        architectures=("Qwen3_5ForCausalLM",),
        weights=_QWEN35_DENSE,
        **_QWEN35,
    ),
    Family(
        name="qwen3_5-multimodal",
        architectures=("Qwen3_5ForConditionalGeneration",),
        weights=_QWEN35_DENSE,
        **{**_QWEN35, **_QWEN35_TOWER},
    ),
    Family(
        name="qwen3_5_moe",
        architectures=("Qwen3_5MoeForCausalLM",),
        weights=_QWEN35_EXPERTS,
        **_QWEN35_MOE,
    ),
    Family(
        name="qwen3_5_moe-multimodal",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        weights=_QWEN35_EXPERTS,
        **{**_QWEN35_MOE, **_QWEN35_TOWER},
    ),
    Family(
        name="olmo_hybrid",
        architectures=("OlmoHybridForCausalLM",),
        fixed={"norm": "rms_float32", "pre_norm": False, "post_norm": True, "qk_norm": "full"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        reads=("layer_types", "linear_allow_neg_eigval", *_LINEAR_SIZES),
        defaults={
            "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
            "max_position_embeddings": 65536,
        },
        # They say how weights are drawn at random.
        ignored=(
            "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
            "linear_dt_init_floor",
        ),
        harmless={"linear_use_gate": (True,)},
        unrotated_without_theta=True,
        kinds=_DELTA_KINDS,
        delta={"norm_eps": 1e-5, "pre_norm_only": True},
        weights={
            **LLAMA_WEIGHTS,
            **norms(
                LAYER, attn_norm="attention_layer_norm", mlp_norm="feedforward_layer_norm",
                attn_post_norm="post_attention_layernorm",
                mlp_post_norm="post_feedforward_layernorm",
            ),
            **named(_LINEAR, **_SEPARATE, wdg="g_proj.weight", wda="a_proj.weight"),
        },
    ),
    Family(
        name="kimi_linear",
        architectures=("KimiLinearForCausalLM",),
        fixed={"ropes": (), "tied_head": False},  # (transformers ties nothing, even if told to)
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys=_KIMI_KEYS,
        inside={
            "linear_attn_config": {
                "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
                "short_conv_kernel_size": "linear_conv_kernel_dim",
            }
        },
        reads=(
            *GROUPED_READS, *LATENT_READS, "layer_types", "attention_layers", "linear_layers",
            "mlp_layer_types", *_LINEAR_SIZES,
        ),
        defaults={
            **LATENT_SIZES, "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "intermediate_size": 1024, "dense_size": 9216, "shared_count": 1, "n_group": 1,
            "topk_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 1_048_576,
            "linear_num_key_heads": 32, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        },
        # (transformers reads none of them: heads have the sizes of the latent, and do not turn)
        ignored=(
            "auto_map", "head_dim", "qk_head_dim", "rope_theta", "num_nextn_predict_layers",
            "output_router_logits",
        ),
        harmless={
            "mla_use_nope": (True,), "moe_layer_freq": (1,), "use_grouped_topk": (True,),
            "moe_router_activation_func": ("sigmoid",), "rope_scaling": (None,),
            "rope_parameters": (None,),
        },
        experts={"scored": "sigmoid", "corrected": True, "wide": True},
        kinds=_DELTA_KINDS,
        first_listed=1,
        delta={"by_channel": True, "narrow": True, "gate": "sigmoid"},
        latent={},
        weights=_KIMI_WEIGHTS,
        # transformers writes the plain MLP under the name of the experts.
        elsewhere=linears(SPARSE_MOE, d_gate="gate_proj", d_up="up_proj", d_down="down_proj"),
    ),
)  # fmt: skip

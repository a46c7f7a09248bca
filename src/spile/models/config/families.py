"""Model families as data: one row each, read by one decoder.

A row states the constants of the family, the keys its `config.json` has beyond the shared ones,
the defaults of transformers for missing keys, and the names of its tensors.
`hf_config.py` reads a config through its row; to add a family, see docs/models.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spile.models.config.arch import (
    GATED_DELTA,
    NO_MIXER,
    SHORT_CONVOLUTION,
    SIDE_BY_SIDE,
    STATE_SPACE,
    Layer,
)
from spile.models.config.specs import TensorSource, fused, linears, named, norms, state_space

LAYER = "layers.{layer}."
LLAMA_WEIGHTS: Mapping[str, TensorSource] = {
    **named("", embed="embed_tokens.weight"),
    **norms("", final_norm="norm"),
    **norms(LAYER, attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    **linears(LAYER + "self_attn.", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),
    **named(LAYER + "self_attn.", q_norm="q_norm.weight", k_norm="k_norm.weight"),
    **linears(LAYER + "mlp.", _gate="gate_proj", _up="up_proj", _down="down_proj"),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table below."""

    name: str
    architectures: tuple[str, ...]
    # key -> its values in models of this row, where one class has several rows
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of `Arch`
    biases: Mapping[str, str] = field(default_factory=dict[str, str])  # field of `Arch` -> key
    amounts: Mapping[str, str] = field(default_factory=dict[str, str])  # the same, for numbers
    # field of `Arch` -> key, and the field's value if that is true
    switched: Mapping[str, tuple[str, Any]] = field(default_factory=dict[str, Any])
    # usual key -> this family's, or several spellings of it
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, Any])
    reads: tuple[str, ...] = ()  # keys beyond the usual ones: see `hf_config.py`
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for missing keys
    ignored: tuple[str, ...] = ()  # keys that cannot change an activation
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    equal: Mapping[str, str] = field(default_factory=dict[str, str])  # key -> one with its value
    # which layers slide: "never", "always", "upper", "lower" (every other), "pattern", "listed", or
    # those without rotary positions
    windows: str = "never"
    full_unrotated: bool = False  # where some layers slide, the others have no rotary positions
    alibi: bool = False  # scores fall with the distance
    experts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of `Experts`
    ropes_by_kind: bool = False  # sliding layers have rotary settings of their own
    unrotated_without_theta: bool = False  # `"rope_theta": null`: no layer rotates q and k
    # key -> its values with which no layer does
    unrotated: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    # where layers differ in more than windows: each kind, as configs name it
    kinds: Mapping[str, Layer] = field(default_factory=dict[str, Layer])
    unlisted: str | None = None  # the kind of all layers, if a config lists none
    # fields of `GatedDelta` that are constant; None: the family has no such layers
    delta: Mapping[str, Any] | None = None
    state_space: Mapping[str, Any] | None = None  # the same, of `StateSpace`
    latent: Mapping[str, Any] | None = None  # the same, of `Latent`
    scaled_embeddings: bool = False
    activations: tuple[str, ...] = ()  # that need arrays of their own
    quantized: tuple[str, ...] = ()  # methods whose tensors can be decoded
    rope_scaling: Mapping[str, Any] | None = None  # if the config has none
    inside: tuple[str, ...] = ()  # keys that hold further keys
    nested: str | None = None  # the key that holds the config
    beside: tuple[str, ...] = ()  # keys beside it that do not concern the decoder
    weights: Mapping[str, TensorSource] = field(default_factory=lambda: LLAMA_WEIGHTS)
    # arrays that some files hold under other names than these
    elsewhere: Mapping[str, TensorSource] = field(default_factory=dict[str, TensorSource])
    prefixes: tuple[str, ...] = ("model.",)  # of every tensor but the head; published files vary
    head: str = "lm_head.weight"
    head_bias: str = "lm_head.bias"
    unused_weights: tuple[str, ...] = ()  # tensors that no forward pass needs; `*` is anything


# Saved by old versions of transformers; the frequencies are computed here.
_OLD_ROTARY = ("layers.*.self_attn.rotary_emb.inv_freq",)
_SWITCHED = {"use_sliding_window": False}
_MISTRAL: dict[str, Any] = {
    "reads": ("sliding_window",),
    "defaults": {"sliding_window": 4096, "max_position_embeddings": 131_072},
    "windows": "always",
}
_MINISTRAL3: dict[str, Any] = {
    "reads": ("sliding_window",),
    "defaults": {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "max_position_embeddings": 262_144,
    },
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "windows": "always",
}  # fmt: skip
_MISTRAL3_TOWER: dict[str, Any] = {
    "architectures": ("Mistral3ForConditionalGeneration",),
    "nested": "text_config",
    "beside": (
        "vision_config", "image_token_index", "image_token_id", "projector_hidden_act",
        "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
    ),
    "prefixes": ("language_model.model.", "model.language_model."),
    "head": "language_model.lm_head.weight",
    "unused_weights": ("vision_tower.*", "multi_modal_projector.*"),
}  # fmt: skip
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
_OLMO_NORMS = {
    **LLAMA_WEIGHTS,
    **norms(
        LAYER,
        attn_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
}
_GLM: dict[str, Any] = {
    "biases": {"qkv_bias": "attention_bias"},
    "reads": ("partial_rotary_factor",),
    "defaults": {
        "attention_bias": True, "num_key_value_heads": 2, "head_dim": 128,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
    },
}  # fmt: skip
_GLM_WEIGHTS = {
    **LLAMA_WEIGHTS,
    **fused(LAYER + "mlp.gate_up_proj.weight", "w_gate", "w_up"),
}
_COHERE: dict[str, Any] = {
    "fixed": {
        "norm": "layer_weight", "parallel": True, "shared_norm": True, "rope_interleaved": True
    },
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    "amounts": {"logit_scale": "logit_scale"},
    "keys": {"rms_norm_eps": "layer_norm_eps"},
    # Written beside the keys that transformers reads; they say what the class does.
    "harmless": {
        "use_parallel_block": (True,), "use_parallel_embedding": (True, False),
        "use_embedding_sharing": (True,), "use_gated_activation": (True,), "rotary_pct": (1.0, 1),
        "position_embedding_type": ("rope_gptj",), "model_max_length": (8192, 131_072),
        "cache_implementation": ("hybrid",),
        "order_of_interleaved_layers": ("local_attn_first",),
    },
}  # fmt: skip
_COHERE_DEFAULTS = {
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
}  # fmt: skip
_GRANITE_AMOUNTS = {
    "embed_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "attn_scale": "attention_multiplier",
}  # fmt: skip
_GRANITE_DEFAULTS = {
    "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "logits_scaling": 1.0,
}  # fmt: skip
_OF_GPT = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "hidden_act": "activation_function",
    "num_attention_heads": "n_head", "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
_GPT_IGNORED = (
    "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "gradient_checkpointing",
)  # fmt: skip
_BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_FALCON: dict[str, Any] = {
    "architectures": ("FalconForCausalLM",),
    "biases": {"qkv_bias": "bias", "out_bias": "bias", "mlp_bias": "bias"},
    "keys": {
        "rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
    },
    "defaults": {
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "gelu",
        "max_position_embeddings": 2048,
    },
    "ignored": ("hidden_dropout", "auto_map", "ff_factor"),
    # (transformers rounds these slopes to bfloat16 before it multiplies by positions.)
    "harmless": {
        "alibi": (False, None), "parallel_attn": (True,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    "prefixes": ("transformer.",),
}  # fmt: skip
_FALCON_GROUPED: dict[str, Any] = {
    **_FALCON,
    "keys": {**_FALCON["keys"], "num_key_value_heads": "num_kv_heads"},
    "ignored": (*_FALCON["ignored"], "multi_query"),  # (read with the other architecture)
}
_FALCON_ONE_KEY: dict[str, Any] = {
    **_FALCON,
    "ignored": (*_FALCON["ignored"], "num_kv_heads"),  # (read with the other architecture)
    "harmless": {
        **_FALCON["harmless"], "multi_query": (True, None),
        "new_decoder_architecture": (False, None), "num_ln_in_parallel_attn": (None, 1),
    },
}  # fmt: skip
_FALCON_FIXED = {"norm": "layer", "gated": False, "parallel": True}
_FALCON_WEIGHTS = {
    **named("", embed="word_embeddings.weight"),
    **norms("", final_norm="ln_f"),
    **norms("h.{layer}.", attn_norm="input_layernorm"),
    **fused("h.{layer}.self_attention.query_key_value.weight", "wq", "wk", "wv", by="head"),
    **fused("h.{layer}.self_attention.query_key_value.bias", "bq", "bk", "bv", by="head"),
    **linears(
        "h.{layer}.", o="self_attention.dense", _up="mlp.dense_h_to_4h", _down="mlp.dense_4h_to_h"
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
_ROUTED = ("num_experts_per_tok",)
_MOE_KEYS = {
    "intermediate_size": "moe_intermediate_size", "dense_size": "intermediate_size",
    "shared_size": "shared_expert_intermediate_size",
}  # fmt: skip
_MOE_READS = (*_ROUTED, "dense_size")
_SPARSE_STEP = ("decoder_sparse_step", "mlp_only_layers")
_MOE_WEIGHTS = {
    **LLAMA_WEIGHTS,
    **linears(LAYER + "mlp.", d_gate="gate_proj", d_up="up_proj", d_down="down_proj"),
    **named(LAYER + "mlp.", w_router="gate.weight"),
    **linears(LAYER + "mlp.experts.{expert}.", _gate="gate_proj", _up="up_proj", _down="down_proj"),
}
_SHARED_EXPERTS = linears(
    LAYER + "mlp.shared_experts.", s_gate="gate_proj", s_up="up_proj", s_down="down_proj"
)
# Experts in groups, after some plain layers, as DeepSeek V3 has them.
_GROUPED_READS = (
    *_MOE_READS, "num_experts", "norm_topk_prob", "shared_count", "routed_scaling_factor",
    "n_group", "topk_group", "first_k_dense_replace",
)  # fmt: skip
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_GROUPED: dict[str, Any] = {
    "keys": {
        **_MOE_KEYS, "num_experts": ("n_routed_experts", "num_local_experts"),
        "shared_count": "n_shared_experts",
    },
    "experts": {"scored": "sigmoid", "corrected": True, "wide": True},
    "weights": {
        **_MOE_WEIGHTS, **_SHARED_EXPERTS,
        **named(LAYER + "mlp.gate.", correction="e_score_correction_bias"),
    },
}  # fmt: skip
# Keys and values from a latent, as DeepSeek has them.
_LATENT_READS = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_LATENT_SIZES = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_LATENT_WEIGHTS = {
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
    "keys": {**_MOE_KEYS, "num_experts": "n_routed_experts", "shared_count": "n_shared_experts"},
    # (transformers does not normalise whatever the second says, and gives experts no bias)
    "harmless": {
        **_LATENT["harmless"], "scoring_func": ("softmax", None), "norm_topk_prob": (False, None),
        "mlp_bias": (False, None),
    },
    "weights": {**_MOE_WEIGHTS, **_SHARED_EXPERTS, **_LATENT_WEIGHTS},
}  # fmt: skip
_DEEPSEEK2_GREEDY: dict[str, Any] = {
    **_DEEPSEEK2,
    "ignored": (*_DEEPSEEK2["ignored"], "n_group", "topk_group"),
}
_DEEPSEEK3: dict[str, Any] = {
    **_LATENT,
    **_GROUPED,
    "harmless": {
        **_LATENT["harmless"], "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
    },
    "weights": {**_GROUPED["weights"], **_LATENT_WEIGHTS},
}  # fmt: skip
_GLM4_LITE: dict[str, Any] = {
    **_DEEPSEEK3,
    # (transformers does not read it; what it assumes instead is the same)
    "harmless": {**_DEEPSEEK3["harmless"], "first_k_dense_replace": (1,)},
}
_DEEPSEEK2_DEFAULTS = {
    **_LATENT_SIZES, "q_lora_rank": 1536, "first_k_dense_replace": 0, "num_experts": 64,
    "shared_count": 2, "intermediate_size": 1407, "dense_size": 11008, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 2048,
}  # fmt: skip
_DEEPSEEK2_READS = (
    *_MOE_READS, *_LATENT_READS, "num_experts", "shared_count", "routed_scaling_factor",
    "first_k_dense_replace",
)  # fmt: skip
_BY_CHANNEL = "its states decay by channel, which is not computed here"
_SPARSE_ATTENTION = "an indexer chooses the keys that each token sees, which is not computed here"
_SEVERAL_STREAMS = "its blocks predict and correct four streams at once, and every tap has one"
# Classes of transformers that are refused with a reason; others are refused as unknown.
REFUSED = {
    "DeepseekV32ForCausalLM": _SPARSE_ATTENTION,
    "GlmMoeDsaForCausalLM": _SPARSE_ATTENTION,
    "DeepseekV4ForCausalLM": "tokens see compressed keys, some chosen by an indexer",
    "MambaForCausalLM": _BY_CHANNEL,
    "FalconMambaForCausalLM": _BY_CHANNEL,
    "Zamba2ForCausalLM": "its blocks share their weights, and read the embeddings once more",
    "KimiLinearForCausalLM": "its linear layers forget by channel, which is not computed here",
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), _SEVERAL_STREAMS),
}
_ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
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
_SHARED_WEIGHED = linears(
    LAYER + "mlp.", s_gate="shared_expert.gate_proj", s_up="shared_expert.up_proj",
    s_down="shared_expert.down_proj", s_router="shared_expert_gate",
)  # fmt: skip
_QWEN35_EXPERTS = {**_MOE_WEIGHTS, **_GATED_QUERIES, **_LINEAR_WEIGHTS, **_SHARED_WEIGHED}
_QWEN_NEXT: dict[str, Any] = {
    **_QWEN_HYBRID,
    "keys": _MOE_KEYS,
    "reads": (
        *_QWEN_HYBRID["reads"], *_MOE_READS, *_SPARSE_STEP, "num_experts", "norm_topk_prob",
        "shared_size",
    ),
    "defaults": {
        **_QWEN_HYBRID["defaults"], "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": True, "intermediate_size": 512, "shared_size": 512, "dense_size": 5632,
        "decoder_sparse_step": 1,
    },
    "ignored": _ROUTER_LOSS,
    "experts": {"shared_gate": True},
}  # fmt: skip
_QWEN35_MOE: dict[str, Any] = {
    **_QWEN35,
    "keys": {
        "intermediate_size": "moe_intermediate_size",
        "shared_size": "shared_expert_intermediate_size",
    },
    "reads": (*_QWEN_HYBRID["reads"], *_ROUTED, "num_experts", "shared_size"),
    "defaults": {
        **_QWEN_HYBRID["defaults"], "num_experts": 256, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "intermediate_size": 512, "shared_size": 512,
    },
    # Every layer has experts: of other MLPs it has the keys at most.
    "ignored": (*_QWEN35["ignored"], *_ROUTER_LOSS, "intermediate_size"),
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
    "amounts": _GRANITE_AMOUNTS,
    "ignored": (*_SSM_IGNORED, *_ROUTER_LOSS, "init_method"),
    "harmless": {"normalization_function": ("rmsnorm",), "mlp_bias": (False, None)},
    "unrotated": {"position_embedding_type": (None, "nope")},
    "kinds": _SSM_KINDS,
    "unlisted": "linear_attention",
    "state_space": {},
}  # fmt: skip
_GRANITE_DENSE: dict[str, Any] = {
    **_GRANITE_HYBRID,
    "ignored": (*_GRANITE_HYBRID["ignored"], "intermediate_size", "num_experts_per_tok"),
}
_GRANITE_HYBRID_READS = ("logits_scaling", "layer_types", "ssm_expand", *_SSM_READS)
_GRANITE_HYBRID_WEIGHTS = {**LLAMA_WEIGHTS, **state_space(LAYER + "mamba.")}
_FEED_FORWARD = LAYER + "feed_forward."
_LLAMA4: dict[str, Any] = {
    "fixed": {"rope_interleaved": True, "qk_norm_last": True, "qk_norm_rotated": True},
    "biases": {"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
    "switched": {"qk_norm": ("use_qk_norm", "bare")},
    "keys": {
        "num_experts": "num_local_experts", "dense_size": "intermediate_size_mlp",
        "shared_size": "intermediate_size",
    },
    "reads": (
        *_MOE_READS, "num_experts", "shared_size", "moe_layers", "interleave_moe_layer_step",
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
    "ignored": _ROUTER_LOSS,
    "harmless": {"for_llm_compression": (False,), "cache_implementation": ("hybrid",)},
    "experts": {"scored": "sigmoid", "weighs_input": True},
    "weights": {
        **LLAMA_WEIGHTS,
        **linears(_FEED_FORWARD, d_gate="gate_proj", d_up="up_proj", d_down="down_proj"),
        **linears(
            _FEED_FORWARD + "shared_expert.", s_gate="gate_proj", s_up="up_proj",
            s_down="down_proj",
        ),
        **named(_FEED_FORWARD, w_router="router.weight"),
        **fused(_FEED_FORWARD + "experts.gate_up_proj", "w_gate", "w_up", transposed=True),
        "w_down": TensorSource(_FEED_FORWARD + "experts.down_proj", transposed=True),
    },
}  # fmt: skip

FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"
        },
        defaults={"max_position_embeddings": 2048},
        unused_weights=_OLD_ROTARY,
    ),
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
        name="mistral",
        architectures=("MistralForCausalLM",),
        unused_weights=_OLD_ROTARY,
        **_MISTRAL,
    ),
    Family(
        name="mistral3", when={"model_type": ("mistral",)}, **{**_MISTRAL, **_MISTRAL3_TOWER}
    ),
    Family(
        name="mistral3-ministral3",
        when={"model_type": ("ministral3",)},
        **{**_MINISTRAL3, **_MISTRAL3_TOWER},
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        fixed={"qkv_bias": True},
        reads=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        defaults={
            **_SWITCHED, "sliding_window": 4096, "max_window_layers": 28,
            "max_position_embeddings": 32768,
        },
        harmless={"use_mrope": (False, None)},
        windows="upper",
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        fixed={"qk_norm": "head"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        reads=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        defaults={
            **_SWITCHED, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        windows="upper",
    ),
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
    Family(
        name="gpt2",
        architectures=("GPT2LMHeadModel",),
        fixed={
            "norm": "layer", "gated": False, "ropes": (), "qkv_bias": True, "out_bias": True,
            "mlp_bias": True,
        },
        keys={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "hidden_act":
            "activation_function", "num_attention_heads": "n_head", "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults={
            "tie_word_embeddings": True, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
        },
        ignored=(
            "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
            "gradient_checkpointing", "_num_labels", "n_special", "output_past",
            "predict_special_tokens",
        ),
        harmless={
            "scale_attn_weights": (True, None), "scale_attn_by_inverse_layer_idx": (False, None),
            # upcasting changes nothing in float32, and below it we score in float32 anyway
            "reorder_and_upcast_attn": (False, True, None),
        },
        weights={
            **named("", embed="wte.weight", positions="wpe.weight"),
            **norms("", final_norm="ln_f"),
            **norms("h.{layer}.", attn_norm="ln_1", mlp_norm="ln_2"),
            **fused("h.{layer}.attn.c_attn.weight", "wq", "wk", "wv", transposed=True),
            **fused("h.{layer}.attn.c_attn.bias", "bq", "bk", "bv"),
            **linears("h.{layer}.", o="attn.c_proj", _up="mlp.c_fc", _down="mlp.c_proj"),
            **{
                ours: TensorSource(f"h.{{layer}}.{theirs}.weight", transposed=True)
                for ours, theirs in (
                    ("wo", "attn.c_proj"), ("w_up", "mlp.c_fc"), ("w_down", "mlp.c_proj")
                )
            },
        },
        prefixes=("transformer.", ""),
        unused_weights=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    Family(
        name="gpt_neox",
        architectures=("GPTNeoXForCausalLM",),
        fixed={"norm": "layer", "gated": False, "mlp_bias": True},
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias",
            "parallel": "use_parallel_residual",
        },
        keys={
            "rms_norm_eps": "layer_norm_eps",
            # some versions of transformers 4 write both
            "rope_theta": ("rotary_emb_base", "rope_theta"),
            "partial_rotary_factor": ("rotary_pct", "partial_rotary_factor"),
        },
        reads=("partial_rotary_factor",),
        defaults={
            "attention_bias": True, "use_parallel_residual": True, "rms_norm_eps": 1e-5,
            "hidden_act": "gelu", "partial_rotary_factor": 0.25, "max_position_embeddings": 2048,
        },
        ignored=(
            "hidden_dropout", "classifier_dropout", "hidden_dropout_prob",
            "attention_probs_dropout_prob",
        ),
        weights={
            **LLAMA_WEIGHTS,
            **named("", embed="embed_in.weight"),
            **norms("", final_norm="final_layer_norm"),
            **fused(
                LAYER + "attention.query_key_value.weight", "wq", "wk", "wv", by="head"
            ),
            **fused(LAYER + "attention.query_key_value.bias", "bq", "bk", "bv", by="head"),
            **linears(
                LAYER, o="attention.dense", _up="mlp.dense_h_to_4h", _down="mlp.dense_4h_to_h"
            ),
        },
        prefixes=("gpt_neox.",),
        head="embed_out.weight",
        unused_weights=(
            "layers.*.attention.bias", "layers.*.attention.masked_bias",
            "layers.*.attention.rotary_emb.inv_freq",
        ),
    ),
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        reads=("sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
        defaults={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        ignored=("embd_pdrop", "resid_pdrop", "auto_map"),
        harmless={
            "attention_bias": (False, None), "full_attn_mod": (1,), "interpolate_factor": (1,),
            "mlp_bias": (False, None), "lm_head_bias": (False, None),
        },
        windows="always",
        weights={
            **LLAMA_WEIGHTS,
            **fused(LAYER + "self_attn.qkv_proj.weight", "wq", "wk", "wv"),
            **fused(LAYER + "mlp.gate_up_proj.weight", "w_gate", "w_up"),
        },
    ),
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        fixed={"norm": "rms_float32", "pre_norm": False, "post_norm": True, "qk_norm": "full"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        weights=_OLMO_NORMS,
    ),
    Family(
        name="olmo3",
        architectures=("Olmo3ForCausalLM",),
        fixed={"norm": "rms_float32", "pre_norm": False, "post_norm": True, "qk_norm": "full"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        reads=("sliding_window", "layer_types"),
        defaults={
            "rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096,
            "sliding_window_pattern": 4, "max_position_embeddings": 2048,
        },
        windows="pattern",
        ropes_by_kind=True,
        weights=_OLMO_NORMS,
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
            **named(
                _LINEAR, wdq="q_proj.weight", wdk="k_proj.weight", wdv="v_proj.weight",
                wdg="g_proj.weight", wda="a_proj.weight", wdb="b_proj.weight",
                wdo="o_proj.weight", conv_q="q_conv1d.weight", conv_k="k_conv1d.weight",
                conv_v="v_conv1d.weight", decay="A_log", decay_bias="dt_bias",
                delta_norm="o_norm.weight",
            ),
        },
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
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"
        },
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
        weights={
            **LLAMA_WEIGHTS,
            **norms("", final_norm="final_layernorm"),
            **norms(LAYER, mlp_norm="pre_ff_layernorm"),
            **linears(_FEED_FORWARD, _gate="gate_proj", _up="up_proj", _down="down_proj"),
            **state_space(LAYER + "mamba."),
        },
    ),
    Family(
        name="granitemoehybrid-dense",
        when={"num_local_experts": (0,)},
        keys={**_BAMBA_SIZES, "intermediate_size": "shared_intermediate_size"},
        reads=_GRANITE_HYBRID_READS,
        defaults={**_GRANITE_DEFAULTS, **_BAMBA_DEFAULTS, "intermediate_size": 1024},
        weights={
            **_GRANITE_HYBRID_WEIGHTS,
            **fused(LAYER + "shared_mlp.input_linear.weight", "w_gate", "w_up"),
            **named(LAYER + "shared_mlp.", w_down="output_linear.weight"),
        },
        **_GRANITE_DENSE,
    ),
    Family(
        name="granitemoehybrid",
        keys={
            **_BAMBA_SIZES, "num_experts": "num_local_experts",
            "shared_size": "shared_intermediate_size",
        },
        reads=(*_GRANITE_HYBRID_READS, "num_experts", "shared_size", *_ROUTED),
        defaults={
            **_GRANITE_DEFAULTS, **_BAMBA_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "shared_size": 1024,
        },
        weights={
            **_GRANITE_HYBRID_WEIGHTS,
            **named(
                LAYER + "block_sparse_moe.", w_router="router.layer.weight",
                w_down="output_linear.weight",
            ),
            **fused(LAYER + "block_sparse_moe.input_linear.weight", "w_gate", "w_up"),
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
            *_MOE_READS, "num_experts", "norm_topk_prob", "shared_size", "routed_scaling_factor",
            "n_group", "topk_group", "layer_types", "hybrid_override_pattern", "time_step_min",
        ),
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "relu2",
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "ssm_heads": 128,
            "ssm_head_dim": 64, "ssm_groups": 8, "ssm_state": 128, "ssm_kernel": 4,
            "ssm_conv_bias": True, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "intermediate_size": 7688, "shared_size": 7688,
            "dense_size": 21504, "time_step_min": 0.001, **_ONE_GROUP,
        },
        # (transformers reads neither these limits nor the expansion, and adds in its own dtype.)
        ignored=(
            *(key for key in _SSM_IGNORED if key != "time_step_min"), *_ROUTER_LOSS,
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
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"
        },
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
        weights={
            **LLAMA_WEIGHTS,
            **norms("", final_norm="final_layernorm"),
            **norms(LAYER, mlp_norm="pre_ff_layernorm"),
            **linears(_FEED_FORWARD, _gate="gate_proj", _up="up_proj", _down="down_proj"),
            **state_space(LAYER + "mamba."),
        },
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
            **linears(_FEED_FORWARD, _gate="w1", _up="w3", _down="w2"),
            **fused(LAYER + "conv.in_proj.weight", "wcb", "wcc", "wcx"),
            **fused(LAYER + "conv.in_proj.bias", "bcb", "bcc", "bcx"),
            **named(LAYER + "conv.conv.", conv="weight", conv_bias="bias"),
            **linears(LAYER + "conv.", co="out_proj"),
        },
    ),
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"
        },
        reads=(
            "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers",
            "no_rope_layer_interval",
        ),
        defaults={
            **_SWITCHED, "tie_word_embeddings": True, "rope_theta": 2e6,
            "no_rope_layer_interval": 4, "max_position_embeddings": 32768,
        },
        harmless={"pretraining_tp": (1, 2, None)},  # published with 2; the model does not read it
        windows="unrotated",
    ),
    Family(
        name="cohere",
        architectures=("CohereForCausalLM",),
        switched={"qk_norm": ("use_qk_norm", "heads")},
        defaults={**_COHERE_DEFAULTS, "rope_theta": 5e5},
        **_COHERE,
    ),
    Family(
        name="cohere2",
        architectures=("Cohere2ForCausalLM",),
        reads=("sliding_window", "layer_types", "sliding_window_pattern"),
        defaults={**_COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
        ignored=("layer_switch",),  # an old spelling of the pattern
        windows="pattern",
        full_unrotated=True,
        **_COHERE,
    ),
    Family(
        name="granite",
        architectures=("GraniteForCausalLM",),
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"
        },
        reads=("logits_scaling",),
        defaults=_GRANITE_DEFAULTS,
        amounts=_GRANITE_AMOUNTS,
    ),
    Family(
        name="glm",
        architectures=("GlmForCausalLM",),
        fixed={"rope_interleaved": True},
        weights=_GLM_WEIGHTS,
        **_GLM,
    ),
    Family(
        name="glm4",
        architectures=("Glm4ForCausalLM",),
        fixed={"rope_interleaved": True, "post_norm": True},
        weights={
            **_GLM_WEIGHTS,
            **norms(
                LAYER, attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
            ),
        },
        **_GLM,
    ),
    Family(
        name="olmo",
        architectures=("OlmoForCausalLM",),
        fixed={"norm": "layer_bare", "norm_eps": 1e-5},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        amounts={"qkv_limit": "clip_qkv"},
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        name="exaone4",
        architectures=("Exaone4ForCausalLM",),
        fixed={"pre_norm": False, "post_norm": True, "qk_norm": "head"},
        reads=("sliding_window", "layer_types", "sliding_window_pattern"),
        defaults={
            "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
            "sliding_window_pattern": 4, "max_position_embeddings": 2048,
        },
        windows="pattern",
        full_unrotated=True,
        weights=_OLMO_NORMS,
    ),
    Family(
        name="hunyuan_v1_dense",
        architectures=("HunYuanDenseV1ForCausalLM",),
        fixed={"qk_norm": "head", "qk_norm_last": True},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        reads=("rope_alpha",),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        ignored=(
            "eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id",
            "mask_init_id", "org_vocab_size", "pad_id", "sep_token_id", "text_end_id",
            "text_start_id", "routed_scaling_factor", "norm_type", "class_num", "pool_type",
            "attention_head_dim", "dense_list",
        ),
        harmless={
            "add_classification_head": (False,), "cla_share_factor": (2,),
            "enable_lm_head_fp32": (True, False), "mlp_bias": (False,), "position_embedding_xdrope":
            (False,), "use_cla": (False,), "use_qk_norm": (True,), "use_rotary_pos_emb": (True,),
        },
        weights={
            **LLAMA_WEIGHTS,
            **named(
                LAYER + "self_attn.", q_norm="query_layernorm.weight",
                k_norm="key_layernorm.weight",
            ),
        },
    ),
    Family(
        name="apertus",
        architectures=("ApertusForCausalLM",),
        fixed={"gated": False, "qk_norm": "head"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        defaults={
            "hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12e6,
            "max_position_embeddings": 65536,
        },
        # Written beside the keys that transformers reads; they say what the class does.
        ignored=("hidden_dropout",),
        harmless={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
        activations=("xielu",),
        weights={
            **LLAMA_WEIGHTS,
            **norms(LAYER, attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
            **named(LAYER + "mlp.act_fn.", xielu_up="alpha_p", xielu_down="alpha_n"),
        },
        unused_weights=("layers.*.mlp.act_fn.beta", "layers.*.mlp.act_fn.eps"),
    ),
    Family(
        name="ministral3",
        architectures=("Ministral3ForCausalLM",),
        **_MINISTRAL3,
    ),
    Family(
        name="ernie4_5",
        architectures=("Ernie4_5ForCausalLM",),
        fixed={"rope_interleaved": True},
        biases={"qkv_bias": "use_bias", "out_bias": "use_bias", "mlp_bias": "use_bias"},
        defaults={
            "tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128,
            "rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        },
    ),
    Family(
        name="phi",
        architectures=("PhiForCausalLM",),
        fixed={
            **_BIASED, "norm": "layer", "gated": False, "parallel": True, "shared_norm": True,
            "head_bias": True,
        },
        keys={"rms_norm_eps": "layer_norm_eps"},
        reads=("partial_rotary_factor",),
        defaults={
            "hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
        },
        ignored=("embd_pdrop", "resid_pdrop"),
        harmless={"qk_layernorm": (False, None)},
        weights={
            **LLAMA_WEIGHTS,
            **norms("", final_norm="final_layernorm"),
            **linears(LAYER, o="self_attn.dense", _up="mlp.fc1", _down="mlp.fc2"),
        },
    ),
    Family(
        name="stablelm",
        architectures=("StableLmForCausalLM",),
        fixed={"norm": "layer"},
        biases={
            "qkv_bias": "use_qkv_bias", "parallel": "use_parallel_residual",
            "shared_norm": "use_parallel_residual",
        },
        switched={"qk_norm": ("qk_layernorm", "heads")},
        keys={"rms_norm_eps": "layer_norm_eps"},
        reads=("partial_rotary_factor",),
        defaults={
            "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        },
        ignored=("hidden_dropout",),
        weights={
            **LLAMA_WEIGHTS,
            **named(
                LAYER + "self_attn.", q_norm="q_layernorm.norms.{head}.weight",
                k_norm="k_layernorm.norms.{head}.weight",
            ),
        },
    ),
    Family(
        name="gptj",
        architectures=("GPTJForCausalLM",),
        fixed={
            "norm": "layer", "gated": False, "mlp_bias": True, "parallel": True,
            "shared_norm": True, "rope_interleaved": True, "head_bias": True,
        },
        keys=_OF_GPT,
        reads=("rotary_dim",),
        defaults={
            "hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "rotary_dim": 64,
            "max_position_embeddings": 2048,
        },
        ignored=(*_GPT_IGNORED, "rotary", "tokenizer_class"),
        harmless={"scale_attn_weights": (True,)},
        weights={
            **named("", embed="wte.weight"),
            **norms("", final_norm="ln_f"),
            **norms("h.{layer}.", attn_norm="ln_1"),
            **linears("h.{layer}.attn.", q="q_proj", k="k_proj", v="v_proj", o="out_proj"),
            **linears("h.{layer}.mlp.", _up="fc_in", _down="fc_out"),
        },
        prefixes=("transformer.",),
        unused_weights=("h.*.attn.bias", "h.*.attn.masked_bias"),
    ),
    Family(
        name="opt",
        architectures=("OPTForCausalLM",),
        fixed={
            **_BIASED, "norm": "layer", "norm_eps": 1e-5, "gated": False, "ropes": (),
            "position_offset": 2,
        },
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        defaults={
            "tie_word_embeddings": True, "hidden_act": "relu", "intermediate_size": 3072,
            "max_position_embeddings": 2048,
        },
        ignored=("dropout", "activation_dropout", "layerdrop", "init_std", "prefix"),
        harmless={
            "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
            "enable_bias": (True,), "layer_norm_elementwise_affine": (True,),
        },
        equal={"word_embed_proj_dim": "hidden_size"},
        weights={
            **named("", embed="embed_tokens.weight", positions="embed_positions.weight"),
            **norms("", final_norm="final_layer_norm"),
            **norms(LAYER, attn_norm="self_attn_layer_norm", mlp_norm="final_layer_norm"),
            **linears(LAYER + "self_attn.", q="q_proj", k="k_proj", v="v_proj", o="out_proj"),
            **linears(LAYER, _up="fc1", _down="fc2"),
        },
        prefixes=("model.decoder.", "decoder."),
    ),
    Family(
        name="bloom",
        architectures=("BloomForCausalLM",),
        fixed={
            **_BIASED, "norm": "layer", "gated": False, "ropes": (), "embed_norm": True,
            "activation": "gelu_new",
        },
        keys={
            "hidden_size": ("n_embed", "hidden_size"), "num_hidden_layers": ("n_layer",
            "num_hidden_layers"), "num_attention_heads": ("n_head", "num_attention_heads"),
            "rms_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "seq_length",
        },
        defaults={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048
        },
        ignored=(
            "attention_softmax_in_fp32", "bias_dropout_fusion", "hidden_dropout",
            "masked_softmax_fusion", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv",
            "unk_token_id",
        ),
        # (Another number of slices only matters with `slow_but_exact`.)
        harmless={
            "apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,),
            "pretraining_tp": (1, 2, 4, None), "n_inner": (None,),
        },
        alibi=True,
        weights={
            **_FALCON_WEIGHTS,
            **norms("", embed_norm="word_embeddings_layernorm"),
            **norms("h.{layer}.", mlp_norm="post_attention_layernorm"),
        },
        prefixes=("transformer.", ""),
    ),
    Family(
        name="falcon-grouped-one-norm",
        when={"new_decoder_architecture": (True,), "num_ln_in_parallel_attn": (1,)},
        fixed={**_FALCON_FIXED, "shared_norm": True},
        weights=_FALCON_WEIGHTS,
        **_FALCON_GROUPED,
    ),
    Family(
        name="falcon-grouped",
        when={"new_decoder_architecture": (True,), "num_ln_in_parallel_attn": (2, None)},
        fixed=_FALCON_FIXED,
        weights={
            **_FALCON_WEIGHTS, **norms("h.{layer}.", attn_norm="ln_attn", mlp_norm="ln_mlp")
        },
        **_FALCON_GROUPED,
    ),
    Family(
        name="falcon",
        fixed={**_FALCON_FIXED, "shared_norm": True, "num_kv_heads": 1},
        weights=_FALCON_WEIGHTS,
        **_FALCON_ONE_KEY,
    ),
    Family(
        name="gpt_neo",
        architectures=("GPTNeoForCausalLM",),
        fixed={
            "norm": "layer", "gated": False, "ropes": (), "out_bias": True, "mlp_bias": True,
            "attn_scale": 1.0,
        },
        keys={
            "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
            "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon",
            "sliding_window": "window_size",
        },
        reads=("sliding_window", "attention_types"),
        defaults={
            "tie_word_embeddings": True, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5,
            "sliding_window": 256, "attention_types": [[["global", "local"], 12]],
            "max_position_embeddings": 2048,
        },
        ignored=(
            *_GPT_IGNORED, "attention_layers", "classifier_dropout", "embed_dropout",
            "resid_dropout", "tokenizer_class",
        ),
        windows="listed",
        weights={
            **named("", embed="wte.weight", positions="wpe.weight"),
            **norms("", final_norm="ln_f"),
            **norms("h.{layer}.", attn_norm="ln_1", mlp_norm="ln_2"),
            **linears(
                "h.{layer}.attn.attention.", q="q_proj", k="k_proj", v="v_proj", o="out_proj"
            ),
            **linears("h.{layer}.mlp.", _up="c_fc", _down="c_proj"),
        },
        prefixes=("transformer.",),
        unused_weights=("h.*.attn.attention.bias", "h.*.attn.attention.masked_bias"),
    ),
    Family(
        name="gpt_bigcode",
        architectures=("GPTBigCodeForCausalLM",),
        fixed={**_BIASED, "norm": "layer", "gated": False, "ropes": (), "num_kv_heads": 1},
        keys=_OF_GPT,
        defaults={
            "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
        },
        ignored=(
            *_GPT_IGNORED, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
            "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length",
            "pre_allocate_kv_cache", "validate_runner_input",
        ),
        harmless={"multi_query": (True, None), "scale_attn_weights": (True,)},
        weights={
            **named("", embed="wte.weight", positions="wpe.weight"),
            **norms("", final_norm="ln_f"),
            **norms("h.{layer}.", attn_norm="ln_1", mlp_norm="ln_2"),
            **fused("h.{layer}.attn.c_attn.weight", "wq", "wk", "wv"),
            **fused("h.{layer}.attn.c_attn.bias", "bq", "bk", "bv"),
            **linears("h.{layer}.", o="attn.c_proj", _up="mlp.c_fc", _down="mlp.c_proj"),
        },
        prefixes=("transformer.",),
    ),
    Family(
        name="mpt",
        architectures=("MptForCausalLM", "MPTForCausalLM"),
        fixed={"norm": "layer_weight", "gated": False, "ropes": (), "activation": "gelu"},
        amounts={"qkv_limit": "clip_qkv", "attn_scale": "softmax_scale"},
        keys={
            "hidden_size": "d_model", "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads", "rms_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "max_seq_len",
        },
        defaults={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048
        },
        ignored=(
            "attn_impl", "attn_pdrop", "emb_pdrop", "init_config", "init_device",
            "resid_pdrop", "tokenizer_name", "embedding_fraction", "auto_map", "verbose",
            "fc_type", "ffn_config", "torch_dtype", "norm_type",
            "learned_pos_emb",  # (with ALiBi there are none)
        ),
        harmless={
            "alibi": (True,), "alibi_bias_max": (8,), "attn_type": ("multihead_attention",),
            "attn_uses_sequence_id": (False,), "expansion_ratio": (4,), "logit_scale": (None,),
            "no_bias": (True,), "prefix_lm": (False,), "qk_ln": (False,),
        },
        inside=("attn_config",),
        alibi=True,
        weights={
            **named("", embed="wte.weight"),
            **norms("", final_norm="norm_f"),
            **norms("blocks.{layer}.", attn_norm="norm_1", mlp_norm="norm_2"),
            **fused("blocks.{layer}.attn.Wqkv.weight", "wq", "wk", "wv"),
            **linears(
                "blocks.{layer}.", o="attn.out_proj", _up="ffn.up_proj", _down="ffn.down_proj"
            ),
        },
        prefixes=("transformer.",),
    ),
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_out_bias", "mlp_bias": "mlp_bias"
        },
        defaults={
            "attention_bias": True, "head_dim": 128, "max_position_embeddings": 524_288
        },
        ignored=("residual_dropout",),
    ),
    Family(
        name="arcee",
        architectures=("ArceeForCausalLM",),
        fixed={"gated": False},
        biases={
            "qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"
        },
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        keys={"num_experts": "num_local_experts"},
        reads=("sliding_window", "num_experts", *_ROUTED),
        defaults={
            "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131_072,
        },
        ignored=_ROUTER_LOSS,
        windows="always",
        weights={
            **LLAMA_WEIGHTS,
            **named(
                LAYER + "block_sparse_moe.", w_router="gate.weight",
                w_gate="experts.{expert}.w1.weight", w_up="experts.{expert}.w3.weight",
                w_down="experts.{expert}.w2.weight",
            ),
        },
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
            "sliding_window", "num_experts", "margin", "original_max_position_embeddings", *_ROUTED
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
        weights={
            **LLAMA_WEIGHTS,
            **named(
                LAYER + "block_sparse_moe.", w_router="gate.weight",
                w_gate="experts.{expert}.w1.weight", w_up="experts.{expert}.w3.weight",
                w_down="experts.{expert}.w2.weight",
            ),
        },
    ),
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        fixed={"qk_norm": "head"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={**_MOE_KEYS, "num_experts": ("num_experts", "num_local_experts")},
        reads=(
            *_MOE_READS, *_SPARSE_STEP, "num_experts", "norm_topk_prob", "sliding_window",
            "use_sliding_window",
        ),
        defaults={
            **_SWITCHED, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "dense_size": 6144, "decoder_sparse_step": 1, "sliding_window": 4096,
            "max_position_embeddings": 32768,
        },
        ignored=(*_ROUTER_LOSS, "max_window_layers"),
        windows="always",
        weights=_MOE_WEIGHTS,
    ),
    Family(
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        biases={"qkv_bias": "qkv_bias"},
        keys=_MOE_KEYS,
        reads=(
            *_MOE_READS, *_SPARSE_STEP, "num_experts", "norm_topk_prob", "shared_size",
            "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
        ),
        defaults={
            **_SWITCHED, "qkv_bias": True, "num_key_value_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "norm_topk_prob": False, "intermediate_size": 1408,
            "dense_size": 5632, "shared_size": 5632, "decoder_sparse_step": 1,
            "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768,
        },
        ignored=_ROUTER_LOSS,
        experts={"shared_gate": True},
        windows="lower",
        weights={**_MOE_WEIGHTS, **_SHARED_WEIGHED},
    ),
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        fixed={"qk_norm": "full"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={"num_experts": ("num_experts", "num_local_experts")},
        reads=("num_experts", "norm_topk_prob", *_ROUTED),
        defaults={
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "intermediate_size": 2048, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        },
        ignored=_ROUTER_LOSS,
        harmless={"clip_qkv": (None,)},
        weights=_MOE_WEIGHTS,
    ),
    Family(
        name="granitemoe",
        architectures=("GraniteMoeForCausalLM",),
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={"num_experts": "num_local_experts"},
        reads=("num_experts", "logits_scaling", *_ROUTED),
        ignored=_ROUTER_LOSS,
        weights={
            **LLAMA_WEIGHTS,
            **named(
                LAYER + "block_sparse_moe.", w_router="router.layer.weight",
                w_down="output_linear.weight",
            ),
            **fused(LAYER + "block_sparse_moe.input_linear.weight", "w_gate", "w_up"),
        },
        defaults={
            **_GRANITE_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        amounts=_GRANITE_AMOUNTS,
    ),
    Family(
        name="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        biases={"qkv_bias": "attention_bias"},
        switched={"qk_norm": ("use_qk_norm", "head")},
        reads=(*_GROUPED_READS, "partial_rotary_factor"),
        defaults={
            "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "intermediate_size": 1408, "dense_size": 10944,
            "shared_count": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, **_ONE_GROUP,
        },
        ignored=(*_ROUTER_LOSS, "num_nextn_predict_layers", "num_mtp_layers"),
        # The layer beyond the last predicts one more token: GLM-4.5-Air's, and GLM-4.5's.
        unused_weights=("layers.46.*", "layers.92.*"),
        **_GROUPED,
    ),
    Family(
        name="dots1",
        architectures=("Dots1ForCausalLM",),
        fixed={"qk_norm": "head"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        reads=(*_GROUPED_READS, "sliding_window", "max_window_layers", "layer_types"),
        defaults={
            "norm_topk_prob": False, "intermediate_size": 1408, "dense_size": 10944,
            "first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62,
            "max_position_embeddings": 2048, **_ONE_GROUP,
        },
        ignored=(*_ROUTER_LOSS, "moe_layer_freq"),
        harmless={
            "use_sliding_window": (False, None), "scoring_func": ("noaux_tc", "sigmoid"),
            "topk_method": ("noaux_tc",),
        },
        windows="upper",
        **_GROUPED,
    ),
    Family(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        reads=(*_GROUPED_READS, *_LATENT_READS, "rope_interleave"),
        defaults={
            **_LATENT_SIZES, "q_lora_rank": 1536, "rope_interleave": True, "num_experts": 256,
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
            *(key for key in _GROUPED_READS if key != "first_k_dense_replace"), *_LATENT_READS,
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
        **_GLM4_LITE,
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
        **_DEEPSEEK2_GREEDY,
    ),
    Family(
        name="ernie4_5_moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        fixed={"rope_interleaved": True},
        keys={
            **_MOE_KEYS, "num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
            "shared_count": "moe_num_shared_experts",
        },
        reads=(
            *_MOE_READS, "num_experts", "shared_count", "moe_layer_start_index",
            "moe_layer_end_index", "moe_layer_interval",
        ),
        defaults={
            "tie_word_embeddings": True, "num_key_value_heads": 4, "num_experts": 64,
            "num_experts_per_tok": 6, "norm_topk_prob": True, "intermediate_size": 1536,
            "dense_size": 12288, "shared_count": 2, "moe_layer_start_index": 1,
            "moe_layer_end_index": -1, "moe_layer_interval": 1, "rope_theta": 5e5,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        },
        ignored=(*_ROUTER_LOSS, "moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free"),
        harmless={"use_bias": (False, None)},
        experts={"corrected": True, "wide": True},
        weights={
            **_MOE_WEIGHTS,
            **_SHARED_EXPERTS,
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
        reads=("num_experts", "rotary_dim", *_ROUTED),
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "intermediate_size": 1536,
            "rope_theta": 5e6, "max_position_embeddings": 196_608,
        },
        ignored=(
            *_ROUTER_LOSS, "auto_map", "attn_type_list", "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
            "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode",
        ),
        harmless={
            "qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",), "use_qk_norm": (True,),
            "use_routing_bias": (True,), "shared_intermediate_size": (0,),
        },
        experts={"scored": "sigmoid", "corrected": True},
        weights={
            **LLAMA_WEIGHTS,
            **named(
                LAYER + "block_sparse_moe.", w_router="gate.weight",
                correction="e_score_correction_bias", w_gate="experts.{expert}.w1.weight",
                w_up="experts.{expert}.w3.weight", w_down="experts.{expert}.w2.weight",
            ),
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
        reads=("sliding_window", "layer_types", "num_experts", "glu_limit", *_ROUTED),
        defaults={
            "attention_bias": True, "num_experts": 128, "num_experts_per_tok": 4, "head_dim": 64,
            "sliding_window": 128, "sliding_window_pattern": 2, "norm_topk_prob": True,
            "glu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
            "max_position_embeddings": 131_072,
        },
        ignored=(*_ROUTER_LOSS, "experts_per_token", "initial_context_length"),
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
    Family(
        name="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        fixed={"norm": "layer", "gated": False},
        biases={"qkv_bias": "use_bias", "out_bias": "use_bias", "mlp_bias": "use_bias"},
        keys={"rms_norm_eps": "norm_epsilon"},
        reads=("sliding_window",),
        defaults={
            "use_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096,
        },
        # The last four belong to its predecessor's config, and are not read for this family.
        ignored=(
            "residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon",
            "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
        ),
        harmless={
            "norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,),
        },
        windows="always",
        weights={
            **LLAMA_WEIGHTS,
            **linears(LAYER + "mlp.", _up="c_fc", _down="c_proj"),
        },
    ),
)  # fmt: skip

"""Rows of families with softmax attention and a plain MLP, whose tensors are named as Llama's."""

from typing import Any

from spile.models.config.family import LAYER, LLAMA_WEIGHTS, Family
from spile.models.config.specs import fused, linears, named, norms

# Saved by old versions of transformers; the frequencies are computed here.
_OLD_ROTARY = ("layers.*.self_attn.rotary_emb.inv_freq",)
SWITCHED = {"use_sliding_window": False}
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
GRANITE_AMOUNTS = {
    "embed_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "attn_scale": "attention_multiplier",
}  # fmt: skip
GRANITE_DEFAULTS = {
    "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "logits_scaling": 1.0,
}  # fmt: skip
BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
BIAS_KEYS = {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}

LLAMA_LIKE = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        biases=BIAS_KEYS,
        defaults={"max_position_embeddings": 2048},
        unused_weights=_OLD_ROTARY,
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
        name="ministral3",
        architectures=("Ministral3ForCausalLM",),
        **_MINISTRAL3,
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        fixed={"qkv_bias": True},
        reads=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        defaults={
            **SWITCHED, "sliding_window": 4096, "max_window_layers": 28,
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
            **SWITCHED, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128,
            "max_position_embeddings": 32768,
        },
        windows="upper",
    ),
    Family(
        name="phi",
        architectures=("PhiForCausalLM",),
        fixed={
            **BIASED, "norm": "layer", "gated": False, "parallel": True, "shared_norm": True,
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
        name="olmo",
        architectures=("OlmoForCausalLM",),
        fixed={"norm": "layer_bare", "norm_eps": 1e-5},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        amounts={"qkv_limit": "clip_qkv"},
        defaults={"max_position_embeddings": 2048},
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
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        biases=BIAS_KEYS,
        reads=(
            "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers",
            "no_rope_layer_interval",
        ),
        defaults={
            **SWITCHED, "tie_word_embeddings": True, "rope_theta": 2e6,
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
        biases=BIAS_KEYS,
        reads=("logits_scaling",),
        defaults=GRANITE_DEFAULTS,
        amounts=GRANITE_AMOUNTS,
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
        biases=BIAS_KEYS,
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    Family(
        name="muse_glimmer",
        architectures=("MuseGlimmerForConditionalGeneration",),
        nested="text_config",
        beside=(
            "vision_config", "image_token_id", "video_token_id", "out_hidden_size",
            "projector_hidden_size", "projector_hidden_act",
        ),
        fixed={
            "norm": "rms_plus_one", "last_norm": "rms_float32", "post_norm": True,
            "qk_norm": "bare", "attn_gate": True, "embed_bare_norm": True,
        },
        amounts={
            "query_scale": "qk_scale_factor", "logit_scale": "output_multiplier",
            "post_norm_eps": "post_norm_eps",
        },
        keys={"hidden_act": "hidden_activation"},
        reads=("sliding_window", "layer_types", "layer_rope_theta", "final_logit_softcapping"),
        defaults={
            "vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19968,
            "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
            "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8, "sliding_window": 2048, "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
        },
        # (Its gate has no bias where others have one.)
        harmless={"attention_bias": (False,)},
        windows="but_fourth",
        weights={
            **LLAMA_WEIGHTS,
            **named(LAYER + "self_attn.", wg="gate_proj.weight"),
            **norms(
                LAYER, attn_post_norm="post_attention_layernorm",
                mlp_norm="pre_feedforward_layernorm", mlp_post_norm="post_feedforward_layernorm",
            ),
        },
        prefixes=("model.language_model.",),
        unused_weights=("model.vision_*",),
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

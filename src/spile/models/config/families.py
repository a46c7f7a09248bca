"""Model families as data: one row each, read by one decoder.

A row states the constants of the family, the keys its `config.json` has beyond the shared ones,
the defaults of transformers for missing keys, and the names of its tensors.
`hf_config.py` reads a config through its row; to add a family, see docs/models.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spile.models.config.specs import TensorSource, fused, linears, named, norms

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
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of `Arch`
    biases: Mapping[str, str] = field(default_factory=dict[str, str])  # field of `Arch` -> key
    # usual key -> this family's, or several spellings of it
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, Any])
    reads: tuple[str, ...] = ()  # keys beyond the usual ones: see `hf_config.py`
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for missing keys
    ignored: tuple[str, ...] = ()  # keys that cannot change an activation
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    # which layers slide: "never", "always", "upper", "pattern", or those without rotary positions
    windows: str = "never"
    ropes_by_kind: bool = False  # sliding layers have rotary settings of their own
    scaled_embeddings: bool = False
    quantized: tuple[str, ...] = ()  # methods whose tensors can be decoded
    rope_scaling: Mapping[str, Any] | None = None  # if the config has none
    nested: str | None = None  # the key that holds the config
    beside: tuple[str, ...] = ()  # keys beside it that do not concern the decoder
    weights: Mapping[str, TensorSource] = field(default_factory=lambda: LLAMA_WEIGHTS)
    prefixes: tuple[str, ...] = ("model.",)  # of every tensor but the head; published files vary
    head: str = "lm_head.weight"
    unused_weights: tuple[str, ...] = ()  # tensors that no forward pass needs; `*` is anything


# Saved by old versions of transformers; the frequencies are computed here.
_OLD_ROTARY = ("layers.*.self_attn.rotary_emb.inv_freq",)
_SWITCHED = {"use_sliding_window": False}
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
_ROUTED = ("num_experts_per_tok",)
_ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")

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
    Family(
        name="mistral",
        architectures=("MistralForCausalLM",),
        reads=("sliding_window",),
        defaults={"sliding_window": 4096, "max_position_embeddings": 131_072},
        windows="always",
        unused_weights=_OLD_ROTARY,
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
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        fixed={"qk_norm": "head"},
        biases={"qkv_bias": "attention_bias", "out_bias": "attention_bias"},
        keys={
            "intermediate_size": "moe_intermediate_size",
            "num_experts": ("num_experts", "num_local_experts"),
        },
        reads=("sliding_window", "use_sliding_window", "num_experts", "norm_topk_prob", *_ROUTED),
        defaults={
            **_SWITCHED, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False,
            "sliding_window": 4096, "max_position_embeddings": 32768,
        },
        # The width of dense layers, which are refused; and a switch that is read only for those.
        ignored=(*_ROUTER_LOSS, "intermediate_size", "max_window_layers"),
        harmless={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        windows="always",
        weights={
            **LLAMA_WEIGHTS,
            **named(LAYER + "mlp.", w_router="gate.weight"),
            **linears(
                LAYER + "mlp.experts.{expert}.", _gate="gate_proj", _up="up_proj",
                _down="down_proj",
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

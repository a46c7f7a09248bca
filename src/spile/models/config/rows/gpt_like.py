"""Rows of older families with softmax attention: those of GPT, OPT, BLOOM, Falcon and MPT."""

from typing import Any

from spile.models.config.family import LAYER, LLAMA_WEIGHTS, Family
from spile.models.config.rows.llama_like import BIASED
from spile.models.config.specs import TensorSource, fused, linears, named, norms

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
_GPT_WEIGHTS = {
    **named("", embed="wte.weight", positions="wpe.weight"),
    **norms("", final_norm="ln_f"),
    **norms("h.{layer}.", attn_norm="ln_1", mlp_norm="ln_2"),
    **fused("h.{layer}.attn.c_attn.weight", "wq", "wk", "wv"),
    **fused("h.{layer}.attn.c_attn.bias", "bq", "bk", "bv"),
    **linears("h.{layer}.", o="attn.c_proj", _up="mlp.c_fc", _down="mlp.c_proj"),
}
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

GPT_LIKE = (
    Family(
        name="gpt2",
        architectures=("GPT2LMHeadModel",),
        fixed={**BIASED, "norm": "layer", "gated": False, "ropes": ()},
        keys=_OF_GPT,
        defaults={
            "tie_word_embeddings": True, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
        },
        ignored=(
            *_GPT_IGNORED, "_num_labels", "n_special", "output_past", "predict_special_tokens"
        ),
        harmless={
            "scale_attn_weights": (True, None), "scale_attn_by_inverse_layer_idx": (False, None),
            # upcasting changes nothing in float32, and below it we score in float32 anyway
            "reorder_and_upcast_attn": (False, True, None),
        },
        weights={
            **_GPT_WEIGHTS,
            **fused("h.{layer}.attn.c_attn.weight", "wq", "wk", "wv", transposed=True),
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
            **BIASED, "norm": "layer", "norm_eps": 1e-5, "gated": False, "ropes": (),
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
            **BIASED, "norm": "layer", "gated": False, "ropes": (), "embed_norm": True,
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
        fixed={**BIASED, "norm": "layer", "gated": False, "ropes": (), "num_kv_heads": 1},
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
        weights=_GPT_WEIGHTS,
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
        inside={"attn_config": {}},
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
)  # fmt: skip

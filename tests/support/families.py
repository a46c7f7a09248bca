"""Tiny random HF models of every family, for parity tests."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from support import tiny

WINDOW = 24  # smaller than the contexts of tests, and no power of two
SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": tiny.BOS,
    "eos_token_id": tiny.EOS,
    "pad_token_id": None,  # some families' own lies outside our vocabulary
}
MHA: dict[str, Any] = {"num_key_value_heads": 4}
MQA: dict[str, Any] = {"num_key_value_heads": 1}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# as gpt-oss has it: no rounding of the bounds
YARN_OSS = {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
NTK = {"type": "dynamic", "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
MSCALED = {
    **YARN, "original_max_position_embeddings": 80, "mscale": 0.7, "mscale_all_dim": 1.3,
    "llama_4_scaling_beta": 0.1, "max_position_embeddings": 256,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
THETA = {"rope_type": "default", "rope_theta": 1e6}


def partial(factor: float) -> dict[str, Any]:
    """Rotary positions on the first part of each head alone."""
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}


def longrope(pairs: int) -> dict[str, Any]:
    """Other frequencies for contexts longer than 64."""
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.5 * i for i in range(pairs)],
    }  # fmt: skip


# head_dim is not hidden_size / heads, and the scale of scores is the root of neither
GEMMA: dict[str, Any] = {**SMALL, "head_dim": 16}
GEMMA2: dict[str, Any] = {
    **GEMMA, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    **GEMMA, "num_hidden_layers": 8, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}  # fmt: skip
# Full layers have heads of another size and number, and use keys as values. The last three layers
# reuse the keys and values of earlier ones, and have wider MLPs.
GEMMA4: dict[str, Any] = {
    **GEMMA, "num_hidden_layers": 7, "sliding_window": WINDOW, "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2
    + ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": tiny.VOCAB,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5
        },
    },
}  # fmt: skip
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 32,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0,
}  # fmt: skip
# Every fourth layer, counted from the last, is full and does not rotate; norms after attention and
# MLP have an epsilon of their own.
MUSE: dict[str, Any] = {
    **GEMMA, "num_hidden_layers": 5, "sliding_window": WINDOW, "qk_scale_factor": 1.7,
    "output_multiplier": 0.4, "final_logit_softcapping": 3.0, "rms_norm_eps": 1e-4,
    "post_norm_eps": 1e-2,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
}  # fmt: skip
# The last layer is full, and has other frequencies.
OLMO3: dict[str, Any] = {
    **SMALL, "num_hidden_layers": 4, "sliding_window": WINDOW,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN,
    },
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256,
    "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS,
}  # fmt: skip
# Every head has its own keys and values.
OWN_KEYS: dict[str, Any] = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
GPTJ: dict[str, Any] = {**GPT2, "n_embd": 64, "rotary_dim": 8}
GPTNEO: dict[str, Any] = {
    **{k: v for k, v in OWN_KEYS.items() if k not in ("num_hidden_layers", "num_attention_heads")},
    "num_layers": 4, "num_heads": 4, "window_size": WINDOW,
    "attention_types": [[["global", "local"], 2]],
}  # fmt: skip
FALCON: dict[str, Any] = {k: v for k, v in OWN_KEYS.items() if k != "intermediate_size"}
OPT: dict[str, Any] = {**FALCON, "ffn_dim": 80, "pad_token_id": 1}
# six heads, two more than a power of two
BLOOM: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6,
    "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS,
}  # fmt: skip
MPT: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256,
    "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS,
}  # fmt: skip
# heads of 16 dimensions, of which a quarter (two pairs) is rotated
NEOX: dict[str, Any] = {
    **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, "hidden_size": 64,
    "rope_parameters": partial(0.25),
}  # fmt: skip
GLM: dict[str, Any] = {**SMALL, "head_dim": 16, "rope_parameters": partial(0.5)}
GRANITE: dict[str, Any] = {
    **SMALL, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}  # fmt: skip
SLIDING: dict[str, Any] = {**SMALL, "num_hidden_layers": 5, "sliding_window": WINDOW}
STABLELM: dict[str, Any] = {**SMALL, "hidden_size": 64, "rope_parameters": partial(0.25)}
MIXTRAL: dict[str, Any] = {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN3: dict[str, Any] = {**SMALL, "head_dim": 16}
QWEN3MOE: dict[str, Any] = {
    **QWEN3, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
QWEN2MOE: dict[str, Any] = {
    **SMALL, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
OLMOE: dict[str, Any] = {**SMALL, "num_experts": 6, "num_experts_per_tok": 3}
GRANITEMOE: dict[str, Any] = {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}
GLM4MOE: dict[str, Any] = {
    **GLM, "num_hidden_layers": 4, "n_routed_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
}  # fmt: skip
DOTS1: dict[str, Any] = {
    **SMALL, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
# Queries and keys have 20 dimensions; the last 8 are rotated. Values have 10. The norms of
# latents have another epsilon.
LATENT: dict[str, Any] = {
    **SMALL, **MHA, "num_hidden_layers": 4, "q_lora_rank": 20, "kv_lora_rank": 24,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-3,
    "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}  # fmt: skip
DEEPSEEK3: dict[str, Any] = {**LATENT, "first_k_dense_replace": 1}
DEEPSEEK2: dict[str, Any] = {**DEEPSEEK3, "topk_method": "group_limited_greedy"}
GREEDY: dict[str, Any] = {"topk_method": "greedy", "n_group": None, "topk_group": None}
ERNIE45MOE: dict[str, Any] = {
    **SMALL, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32,
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    **SMALL, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3,
    "rope_parameters": partial(0.5),
}  # fmt: skip
# Chunks as long as others' windows; every other layer has experts, every third does not rotate.
LLAMA4: dict[str, Any] = {
    **SMALL, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 32,
    "intermediate_size_mlp": 56, "num_local_experts": 6, "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": WINDOW,
    "floor_scale": 10, "attn_scale": 0.4,
}  # fmt: skip
# Two value heads for each key head, of other sizes than attention's. What a query reads may be
# nearly zero, and a norm scales it to one: with the usual epsilon of 1e-6, errors as well.
HYBRID: dict[str, Any] = {
    **SMALL, "head_dim": 16, "num_hidden_layers": 5, "rms_norm_eps": 1e-4,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "rope_parameters": partial(0.25),
}  # fmt: skip
HYBRID_MOE: dict[str, Any] = {
    **HYBRID, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
OLMO_HYBRID: dict[str, Any] = {
    **HYBRID,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
del OLMO_HYBRID["head_dim"]
# Keys and values have heads of one size; both kinds of layers occur with MLPs and with experts.
KIMI_LINEAR: dict[str, Any] = {
    **{key: LATENT[key] for key in LATENT if key not in ("n_routed_experts", "rope_parameters")},
    "num_local_experts": 8, "num_hidden_layers": 5, "layer_types": HYBRID["layer_types"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"], "q_lora_rank": None,
    "linear_num_heads": 6, "linear_head_dim": 8,
}  # fmt: skip
# Three heads for each of two groups; states of other sizes than heads, and a norm that matters.
SPACE: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 16, "rms_norm_eps": 1e-4,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 6,
    "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16, "layer_norm_epsilon": 1e-4,
    "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": None,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    **SMALL, **SPACE, "num_hidden_layers": 5, "attn_layer_indices": [1, 3],
}  # fmt: skip
GRANITE_HYBRID: dict[str, Any] = {
    **GRANITEMOE, **SPACE, "num_hidden_layers": 5, "shared_intermediate_size": 40,
    "layer_types": ["mamba", "attention", "mamba", "attention", "mamba"],
}  # fmt: skip
# Every kind of block twice, so that a layer further on can be compared.
NEMOTRON_H: dict[str, Any] = {
    **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"}, "head_dim": 16,
    "layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2, "mamba_num_heads": 6,
    "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16,
    "layer_norm_epsilon": 1e-4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5, "time_step_min": 0.6, "time_step_max": 0.9,
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    **SMALL, **SPACE, "mamba_d_ssm": 96, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6, "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.2, "ssm_multipliers": [0.5, 0.8, 1.4, 0.9, 1.1],
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7,
}  # fmt: skip
LFM2: dict[str, Any] = {
    **SMALL, "num_hidden_layers": 5, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3,
    "layer_types": ["conv", "full_attention"] * 2 + ["conv"],
}  # fmt: skip
GPTOSS: dict[str, Any] = {
    **SMALL, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 40,
    "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW,
    "swiglu_limit": 1.5, "rope_parameters": YARN_OSS,
}  # fmt: skip


def _family(config: str, model: str, base: dict[str, Any]) -> Callable[..., Callable[..., Any]]:
    """Return a function that makes a model from these settings and its own changes, which win.

    Classes are named: importing those of every family takes seconds, in every process of a run.
    """

    def variant(*settings: dict[str, Any], **more: Any) -> Callable[..., Any]:
        def make(**changes: Any) -> Any:
            merged = dict(base)
            for part in (*settings, more, changes):
                merged |= part
            if "layer_types" in merged:
                merged["layer_types"] = merged["layer_types"][: merged["num_hidden_layers"]]
            # configs modify their arguments
            made = getattr(transformers, config)(**deepcopy(merged))
            return getattr(transformers, model)(made)

        return make

    return variant


_llama = _family("LlamaConfig", "LlamaForCausalLM", SMALL)
_mistral = _family("MistralConfig", "MistralForCausalLM", {**SMALL, "sliding_window": None})
_qwen2 = _family("Qwen2Config", "Qwen2ForCausalLM", SMALL)
_qwen3 = _family("Qwen3Config", "Qwen3ForCausalLM", QWEN3)
_gemma = _family("GemmaConfig", "GemmaForCausalLM", GEMMA)
_gemma2 = _family("Gemma2Config", "Gemma2ForCausalLM", GEMMA2)
_gemma3 = _family("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3)
_gemma4 = _family("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4)
_gpt2 = _family("GPT2Config", "GPT2LMHeadModel", GPT2)
_neox = _family("GPTNeoXConfig", "GPTNeoXForCausalLM", NEOX)
_phi3 = _family("Phi3Config", "Phi3ForCausalLM", SMALL)
_olmo2 = _family("Olmo2Config", "Olmo2ForCausalLM", SMALL)
_phimoe = _family("PhimoeConfig", "PhimoeForCausalLM", {**MIXTRAL, "router_jitter_noise": 0.3})
_mixtral = _family("MixtralConfig", "MixtralForCausalLM", MIXTRAL)
_qwen3moe = _family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3MOE)
_gptoss = _family("GptOssConfig", "GptOssForCausalLM", GPTOSS)
_starcoder2 = _family("Starcoder2Config", "Starcoder2ForCausalLM", SMALL)
_olmo3 = _family("Olmo3Config", "Olmo3ForCausalLM", OLMO3)
_smollm3 = _family("SmolLM3Config", "SmolLM3ForCausalLM", {**SMALL, "num_hidden_layers": 5})
_seedoss = _family("SeedOssConfig", "SeedOssForCausalLM", {**SMALL, "head_dim": 16})
_arcee = _family("ArceeConfig", "ArceeForCausalLM", SMALL)
_qwen35 = _family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HYBRID)
_qwen35moe = _family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", HYBRID_MOE)
_qwen3next = _family("Qwen3NextConfig", "Qwen3NextForCausalLM", HYBRID_MOE)
_olmohybrid = _family("OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO_HYBRID)
_kimilinear = _family("KimiLinearConfig", "KimiLinearForCausalLM", KIMI_LINEAR)
_llama4 = _family("Llama4TextConfig", "Llama4ForCausalLM", LLAMA4)
_mamba2 = _family("Mamba2Config", "Mamba2ForCausalLM", MAMBA2)
_bamba = _family("BambaConfig", "BambaForCausalLM", BAMBA)
_granitehybrid = _family("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE_HYBRID)
_nemotronh = _family("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON_H)
_falconh1 = _family("FalconH1Config", "FalconH1ForCausalLM", FALCON_H1)
_lfm2 = _family("Lfm2Config", "Lfm2ForCausalLM", LFM2)
_stablelm = _family("StableLmConfig", "StableLmForCausalLM", STABLELM)
_qwen2moe = _family("Qwen2MoeConfig", "Qwen2MoeForCausalLM", QWEN2MOE)
_olmoe = _family("OlmoeConfig", "OlmoeForCausalLM", OLMOE)
_granitemoe = _family("GraniteMoeConfig", "GraniteMoeForCausalLM", GRANITEMOE)
_glm4moe = _family("Glm4MoeConfig", "Glm4MoeForCausalLM", GLM4MOE)
_dots1 = _family("Dots1Config", "Dots1ForCausalLM", DOTS1)
_deepseek3 = _family("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK3)
_deepseek2 = _family("DeepseekV2Config", "DeepseekV2ForCausalLM", DEEPSEEK2)
_glm4moelite = _family("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", LATENT)
_ernie45moe = _family("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", ERNIE45MOE)
_minimaxm2 = _family("MiniMaxM2Config", "MiniMaxM2ForCausalLM", MINIMAX)
_hunyuan = _family("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", {**SMALL, "head_dim": 16})
_apertus = _family("ApertusConfig", "ApertusForCausalLM", {**SMALL, "dtype": "float32"})
_ministral3 = _family("Ministral3Config", "Ministral3ForCausalLM", {**SMALL, "head_dim": 16})
_cohere = _family("CohereConfig", "CohereForCausalLM", SMALL)
_cohere2 = _family("Cohere2Config", "Cohere2ForCausalLM", SLIDING)
_granite = _family("GraniteConfig", "GraniteForCausalLM", GRANITE)
_glm = _family("GlmConfig", "GlmForCausalLM", GLM)
_glm4 = _family("Glm4Config", "Glm4ForCausalLM", GLM)
_olmo = _family("OlmoConfig", "OlmoForCausalLM", SMALL)
_exaone4 = _family("Exaone4Config", "Exaone4ForCausalLM", SLIDING)
_ernie45 = _family("Ernie4_5Config", "Ernie4_5ForCausalLM", {**SMALL, "head_dim": 16})
_phi = _family("PhiConfig", "PhiForCausalLM", STABLELM)
_gptj = _family("GPTJConfig", "GPTJForCausalLM", GPTJ)
_opt = _family("OPTConfig", "OPTForCausalLM", OPT)
_bloom = _family("BloomConfig", "BloomForCausalLM", BLOOM)
_falcon = _family("FalconConfig", "FalconForCausalLM", FALCON)
_gptneo = _family("GPTNeoConfig", "GPTNeoForCausalLM", GPTNEO)
_gptbigcode = _family("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT2)
_mpt = _family("MptConfig", "MptForCausalLM", MPT)

FAMILIES: dict[str, Callable[..., Any]] = {
    "llama-gqa": _llama(),
    "llama-mha-tied": _llama(MHA, TIED),
    "llama-mqa-bias": _llama(MQA, attention_bias=True, mlp_bias=True),
    "llama-head-dim": _llama(head_dim=16),
    "llama3-rope": _llama(rope_parameters=LLAMA3),
    "llama-linear-rope": _llama(rope_parameters=LINEAR),
    "llama-dynamic-rope": _llama(rope_parameters=DYNAMIC),
    "llama4-gqa": _llama4(),
    "llama4-mha-chosen": _llama4(
        MHA,
        num_experts_per_tok=1,
        moe_layers=[0, 3],
        no_rope_layers=[0, 1, 1, 1],
        rope_parameters=LLAMA3,
    ),
    "llama4-mqa-plain": _llama4(
        MQA,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        interleave_moe_layer_step=1,
        attention_bias=True,
    ),
    "mistral-gqa": _mistral(head_dim=16),
    "mistral-mha": _mistral(MHA),
    "mistral-mqa": _mistral(MQA),
    "mistral-window": _mistral(sliding_window=WINDOW),
    "qwen2": _qwen2(rope_parameters=THETA),
    "qwen2-mha-tied": _qwen2(MHA, TIED),
    "qwen2-mqa": _qwen2(MQA),
    "qwen2-yarn": _qwen2(rope_parameters=YARN),
    "qwen2-window": _qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3-gqa": _qwen3(rope_parameters=THETA),
    "qwen3-mha": _qwen3(MHA, TIED),
    "qwen3-mqa": _qwen3(MQA, attention_bias=True),
    "gemma-gqa": _gemma(),
    "gemma-mha": _gemma(MHA),
    "gemma-mqa": _gemma(MQA),
    "gemma2-gqa": _gemma2(),
    "gemma2-mha": _gemma2(MHA),
    "gemma2-mqa": _gemma2(MQA),
    "gemma2-nocap": _gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3-gqa": _gemma3(),
    "gemma3-mha": _gemma3(MHA),
    "gemma3-mqa": _gemma3(MQA),
    "gemma4-gqa": _gemma4(),
    "gemma4-mha-plain": _gemma4(
        MHA, hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=False
    ),
    "gemma4-mqa-bias": _gemma4(MQA, UNTIED, attention_bias=True, num_kv_shared_layers=1),
    "gemma4-experts": _gemma4(GEMMA4_EXPERTS),
    "gemma4-experts-all": _gemma4(
        GEMMA4_EXPERTS, hidden_size_per_layer_input=12, num_kv_shared_layers=3
    ),
    "gpt2": _gpt2(),
    "gpt2-inner-untied": _gpt2(UNTIED, n_inner=80, activation_function="relu"),
    "gpt2-layer-scaled": _gpt2(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "neox": _neox(),
    "neox-sequential": _neox(use_parallel_residual=False, rope_parameters=partial(1.0)),
    "neox-tied-unbiased": _neox(TIED, attention_bias=False),
    "phi3-gqa": _phi3(),
    "phi3-mha": _phi3(MHA),
    "phi3-mqa": _phi3(MQA),
    "phi3-window": _phi3(sliding_window=WINDOW),
    "phi3-longrope": _phi3(original_max_position_embeddings=64, rope_parameters=longrope(6)),
    "phi3-longrope-partial": _phi3(  # Phi-4-mini
        TIED,
        hidden_size=64,
        original_max_position_embeddings=64,
        rope_parameters={**longrope(6), "partial_rotary_factor": 0.75},
    ),
    "phi3-partial-rotary": _phi3(hidden_size=64, rope_parameters=partial(0.75)),
    "olmo2-gqa": _olmo2(),
    "olmo2-mha": _olmo2(MHA),
    "olmo2-mqa": _olmo2(MQA),
    "olmo3-gqa": _olmo3(),
    "olmo3-mha": _olmo3(MHA),
    "olmo3-mqa-bias": _olmo3(MQA, attention_bias=True),
    "smollm3-gqa": _smollm3(TIED),
    "smollm3-mha-window": _smollm3(MHA, use_sliding_window=True, sliding_window=WINDOW),
    "smollm3-mqa-chosen": _smollm3(
        MQA, UNTIED, no_rope_layers=[0, 1, 1, 0, 1], attention_bias=True, mlp_bias=True
    ),
    "seedoss-gqa": _seedoss(),
    "seedoss-mha-out-bias": _seedoss(MHA, attention_out_bias=True, mlp_bias=True),
    "seedoss-mqa-unbiased": _seedoss(MQA, attention_bias=False),
    "arcee-gqa": _arcee(),
    "arcee-mha-bias": _arcee(MHA, attention_bias=True, mlp_bias=True),
    "arcee-mqa": _arcee(MQA),
    "mixtral-gqa": _mixtral(),
    "phimoe-gqa": _phimoe(
        rope_parameters={**longrope(6), "short_mscale": 1.2, "long_mscale": 1.3}, **UNTIED
    ),
    "phimoe-mha-bias": _phimoe(MHA, attention_bias=True, lm_head_bias=True),
    "phimoe-mqa-window": _phimoe(MQA, sliding_window=WINDOW),
    "mixtral-mha": _mixtral(MHA),
    "mixtral-mqa-window": _mixtral(MQA, sliding_window=WINDOW),
    "qwen3moe-gqa": _qwen3moe(),
    "qwen3moe-mha-unnormed": _qwen3moe(MHA, norm_topk_prob=False),
    "qwen3moe-mqa-mixed": _qwen3moe(MQA, mlp_only_layers=[1]),
    "gptoss-gqa": _gptoss(),
    "gptoss-mha": _gptoss(MHA),
    "gptoss-mqa": _gptoss(MQA),
    "starcoder2-gqa": _starcoder2(),
    "starcoder2-mha-unbiased": _starcoder2(MHA, UNTIED, use_bias=False),
    "starcoder2-mqa-window": _starcoder2(MQA, sliding_window=WINDOW),
    "qwen35-gqa": _qwen35(),
    "qwen35-mha-tied": _qwen35(MHA, TIED, attention_bias=True),
    "qwen35-mqa": _qwen35(MQA, linear_num_key_heads=4),
    "qwen35moe-gqa": _qwen35moe(),
    "qwen35moe-mha": _qwen35moe(MHA, TIED),
    "qwen35moe-mqa": _qwen35moe(MQA, linear_num_key_heads=4),
    "qwen3next-gqa": _qwen3next(),
    "qwen3next-mha-mixed": _qwen3next(MHA, mlp_only_layers=[1], attention_bias=True),
    "qwen3next-mqa-unnormed": _qwen3next(
        MQA, linear_num_key_heads=1, norm_topk_prob=False, linear_conv_kernel_dim=3
    ),
    "olmohybrid-gqa": _olmohybrid(),
    "olmohybrid-mha-rotary": _olmohybrid(MHA, rope_parameters=THETA, attention_bias=True),
    "olmohybrid-mqa": _olmohybrid(MQA, linear_allow_neg_eigval=False),
    "kimilinear": _kimilinear(),
    "kimilinear-bias-latent-queries": _kimilinear(attention_bias=True, q_lora_rank=20),
    "kimilinear-short": _kimilinear(n_group=1, topk_group=1, linear_conv_kernel_dim=3),
    "mamba2": _mamba2(),
    "mamba2-plain": _mamba2(
        TIED, n_groups=1, use_conv_bias=False, use_bias=True, residual_in_fp32=False, conv_kernel=3
    ),
    "bamba-gqa": _bamba(),
    "bamba-mha-bias": _bamba(
        MHA, TIED, mamba_n_groups=1, mamba_proj_bias=True, attention_bias=True, mlp_bias=True
    ),
    "bamba-mqa-limited": _bamba(MQA, time_step_limit=(0.3, 0.9), mamba_conv_bias=False),
    "granitehybrid-gqa": _granitehybrid(),
    "granitehybrid-mha-rotary": _granitehybrid(MHA, TIED, position_embedding_type="rope"),
    "granitehybrid-mqa-dense": _granitehybrid(MQA, num_local_experts=0, attention_bias=True),
    "nemotronh-gqa": _nemotronh(),
    "nemotronh-mha-dense": _nemotronh(
        MHA,
        layers_block_type=["mamba", "mlp", "attention", "mlp"] * 2,
        mlp_bias=True,
        use_bias=True,
    ),
    "nemotronh-mqa": _nemotronh(MQA, n_groups=1, norm_topk_prob=False, n_group=1, topk_group=1),
    "falconh1-gqa": _falconh1(),
    "falconh1-mha-normed": _falconh1(MHA, mamba_rms_norm=True, attention_bias=True, mlp_bias=True),
    "falconh1-mqa-gated-first": _falconh1(
        MQA,
        TIED,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        projectors_bias=True,
    ),
    "lfm2-gqa": _lfm2(),
    "lfm2-mha-bias": _lfm2(MHA, UNTIED, conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2-mqa-wide": _lfm2(MQA, conv_L_cache=4),
    "stablelm-gqa": _stablelm(),
    "stablelm-mha-bias": _stablelm(MHA, use_qkv_bias=True),
    "stablelm-mqa-parallel-qknorm": _stablelm(MQA, use_parallel_residual=True, qk_layernorm=True),
    "qwen2moe-gqa": _qwen2moe(),
    "qwen2moe-mha-normed": _qwen2moe(MHA, norm_topk_prob=True, qkv_bias=False),
    "qwen2moe-mqa-mixed": _qwen2moe(MQA, num_hidden_layers=4, decoder_sparse_step=2),
    "qwen2moe-window": _qwen2moe(use_sliding_window=True, sliding_window=WINDOW),
    "olmoe-gqa": _olmoe(),
    "olmoe-mha-normed": _olmoe(MHA, norm_topk_prob=True),
    "olmoe-mqa-bias": _olmoe(MQA, attention_bias=True),
    "granitemoe-gqa": _granitemoe(),
    "granitemoe-mha-tied": _granitemoe(MHA, TIED),
    "granitemoe-mqa-bias": _granitemoe(MQA, attention_bias=True),
    "glm4moe-gqa": _glm4moe(),
    "glm4moe-mha-qknorm": _glm4moe(MHA, use_qk_norm=True, attention_bias=True),
    "glm4moe-mqa-unnormed": _glm4moe(MQA, norm_topk_prob=False, first_k_dense_replace=2),
    "dots1-gqa": _dots1(),
    "dots1-mha-window": _dots1(MHA, sliding_window=WINDOW, max_window_layers=1),
    "dots1-mqa-normed": _dots1(MQA, norm_topk_prob=True, attention_bias=True),
    "deepseek3": _deepseek3(),
    "deepseek3-own-queries": _deepseek3(q_lora_rank=None, v_head_dim=20, rope_interleave=False),
    "deepseek3-bias-wide": _deepseek3(
        TIED, attention_bias=True, v_head_dim=24, n_group=1, topk_group=1
    ),
    "deepseek2": _deepseek2(),
    "deepseek2-greedy-own-queries": _deepseek2(
        GREEDY, q_lora_rank=None, first_k_dense_replace=0, rope_parameters=YARN
    ),
    "deepseek2-bias": _deepseek2(TIED, attention_bias=True, rope_parameters=THETA),
    "glm4moelite": _glm4moelite(),
    "glm4moelite-mixed": _glm4moelite(
        q_lora_rank=None, mlp_layer_types=["sparse", "dense", "sparse", "dense"]
    ),
    "glm4moelite-halves": _glm4moelite(rope_interleave=False, attention_bias=True),
    "ernie45moe-gqa": _ernie45moe(),
    "ernie45moe-mha-few": _ernie45moe(
        MHA, num_hidden_layers=4, moe_layer_interval=2, moe_num_shared_experts=0
    ),
    "ernie45moe-mqa": _ernie45moe(MQA, UNTIED, moe_layer_end_index=1),
    "minimaxm2-gqa": _minimaxm2(),
    "minimaxm2-mha": _minimaxm2(MHA),
    "minimaxm2-mqa": _minimaxm2(MQA, rope_parameters=partial(0.25)),
    "hunyuan-gqa": _hunyuan(rope_parameters=NTK),
    "hunyuan-mha-bias": _hunyuan(MHA, TIED, attention_bias=True),
    "hunyuan-mqa": _hunyuan(MQA),
    "apertus-gqa": _apertus(),
    "apertus-mha-bias": _apertus(MHA, attention_bias=True),
    "apertus-mqa": _apertus(MQA, TIED),
    "ministral3-gqa": _ministral3(rope_parameters=MSCALED),
    "ministral3-mha": _ministral3(MHA, rope_parameters=MSCALED),
    "ministral3-mqa-window": _ministral3(MQA, rope_parameters=MSCALED, sliding_window=WINDOW),
    "cohere-gqa": _cohere(logit_scale=0.25),
    "cohere-mha-qknorm": _cohere(MHA, use_qk_norm=True),
    "cohere-mqa-bias": _cohere(MQA, UNTIED, attention_bias=True),
    "cohere2-gqa": _cohere2(),
    "cohere2-mha": _cohere2(MHA),
    "cohere2-mqa-bias": _cohere2(MQA, attention_bias=True),
    "granite-gqa": _granite(),
    "granite-mha-tied": _granite(MHA, TIED),
    "granite-mqa-bias": _granite(MQA, attention_bias=True, mlp_bias=True),
    "glm-gqa": _glm(),
    "glm-mha": _glm(MHA),
    "glm-mqa-unbiased": _glm(MQA, attention_bias=False),
    "glm4-gqa": _glm4(),
    "glm4-mha": _glm4(MHA),
    "glm4-mqa-unbiased": _glm4(MQA, attention_bias=False),
    "olmo-gqa": _olmo(),
    "olmo-mha-clipped": _olmo(MHA, clip_qkv=0.5),
    "olmo-mqa-bias": _olmo(MQA, TIED, attention_bias=True),
    "exaone4-gqa": _exaone4(),
    "exaone4-mha-full": _exaone4(MHA, sliding_window=None, layer_types=["full_attention"] * 5),
    "exaone4-mqa": _exaone4(MQA),
    "ernie45-gqa": _ernie45(),
    "ernie45-mha-bias": _ernie45(MHA, UNTIED, use_bias=True),
    "ernie45-mqa": _ernie45(MQA),
    "phi-gqa": _phi(rope_parameters=partial(0.5)),
    "phi-mha": _phi(MHA),
    "phi-mqa": _phi(MQA),
    "gptj": _gptj(),
    "gptj-inner": _gptj(n_inner=80, activation_function="relu"),
    "opt": _opt(),
    "opt-untied": _opt(UNTIED, activation_function="gelu"),
    "opt-projected": _opt(word_embed_proj_dim=32),
    "opt-norm-after": _opt(do_layer_norm_before=False),
    "bloom": _bloom(),
    "bloom-untied": _bloom(UNTIED, n_head=4),
    "falcon-mqa": _falcon(),
    "falcon-mqa-bias": _falcon(UNTIED, bias=True, ffn_hidden_size=80),
    "falcon-gqa": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-mha-one-norm": _falcon(
        new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1, bias=True
    ),
    "falcon-alibi": _falcon(alibi=True),
    "gptneo": _gptneo(),
    "gptneo-runs": _gptneo(attention_types=[[["global"], 1], [["local"], 3]]),
    "gptbigcode-mqa": _gptbigcode(),
    "gptbigcode-own-keys": _gptbigcode(multi_query=False),
    "mpt": _mpt(),
    "mpt-clipped": _mpt(n_heads=4, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.2}),
}

# What the decoder does not compute, and the error that says so.
REFUSED = {
    "gpt2-layer-scaled": "scale_attn_by_inverse_layer_idx = True is not supported",
    "opt-projected": "word_embed_proj_dim = 32 is not supported",
    "opt-norm-after": "do_layer_norm_before = False is not supported",
    "falcon-alibi": "alibi = True is not supported",
    "gptbigcode-own-keys": "multi_query = False is not supported",
}


def qwen35_multimodal(*, experts: bool = False, **changes: Any) -> Any:
    """Qwen 3.5 as published: the same decoder, beside a vision tower."""
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "depth": 1, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 48, "num_position_embeddings": 16,
    }  # fmt: skip
    kind, base = ("Qwen3_5Moe", HYBRID_MOE) if experts else ("Qwen3_5", HYBRID)
    config = getattr(transformers, f"{kind}Config")(
        text_config=deepcopy({**base, **changes}), vision_config=vision
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def llama4_multimodal(**changes: Any) -> Any:
    """Llama 4 as published: the same decoder, beside a vision tower."""
    vision = {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 8,
        "num_attention_heads": 2, "patch_size": 4, "vision_output_dim": 16,
        "projector_input_dim": 16, "projector_output_dim": 16,
    }  # fmt: skip
    config = transformers.Llama4Config(
        text_config=deepcopy({**LLAMA4, **changes}), vision_config=vision
    )
    return transformers.Llama4ForConditionalGeneration(config)


def muse_glimmer(**changes: Any) -> Any:
    """Muse Glimmer as published: its own decoder, beside a vision tower."""
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "patch_size": 4,
        "num_attention_heads": 2, "pos_emb_height": 2, "pos_emb_width": 2,
    }  # fmt: skip
    text = {**MUSE, **changes}
    text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    given: dict[str, Any] = {
        "text_config": deepcopy(text), "vision_config": vision, "out_hidden_size": 64,
        "projector_hidden_size": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    config = transformers.MuseGlimmerConfig(**given)
    return transformers.MuseGlimmerForConditionalGeneration(config)


def gemma3_multimodal(**changes: Any) -> Any:
    """Gemma 3 as published from 4B up: the same decoder, beside a vision tower."""
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=deepcopy({**GEMMA3, **changes}), vision_config=vision, mm_tokens_per_image=1
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3_multimodal(*, text: str = "mistral", **changes: Any) -> Any:
    """Mistral Small 3.1 and Ministral 3 as published: such a decoder, beside a vision tower."""
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "head_dim": 8, "patch_size": 14,
    }  # fmt: skip
    scaled = {"rope_parameters": MSCALED} if text == "ministral3" else {}
    own = {**SMALL, "head_dim": 16, "model_type": text, "sliding_window": WINDOW, **scaled}
    config = transformers.Mistral3Config(
        text_config=deepcopy({**own, **changes}), vision_config=vision, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def gemma4_multimodal(*, experts: bool = False, **changes: Any) -> Any:
    """Gemma 4 as published: the same decoder, beside towers for images and sound."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "intermediate_size": 32, "head_dim": 8, "num_key_value_heads": 2}
    audio = {**small, "output_proj_dims": 16, "subsampling_conv_channels": [8, 4]}
    text = {**GEMMA4, **(GEMMA4_EXPERTS if experts else {}), "pad_token_id": 0, **changes}
    config = transformers.Gemma4Config(
        text_config=deepcopy(text), vision_config=vision, audio_config=audio
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def save(model: Any, directory: Path) -> None:
    """Write a model as it would be published.

    transformers writes OLMo Hybrid's convolutions in three equal parts, whatever their sizes, and
    a norm of its attention layers under the name of another; and the experts of Qwen 3.5 one by
    one.
    """
    name = type(model).__name__
    model.save_pretrained(
        directory, save_original_format=name != "Qwen3_5MoeForConditionalGeneration"
    )
    if name != "OlmoHybridForCausalLM":
        return
    config, tensors = model.config, dict[str, torch.Tensor]()
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for name, tensor in model.state_dict().items():
        if name.endswith("conv1d.weight"):
            parts = tensor.split([keys, keys, len(tensor) - 2 * keys])
            for part, values in zip("qkv", parts, strict=True):
                tensors[name.replace("conv1d", f"{part}_conv1d")] = values.contiguous()
            continue
        number = f"{name}..".split(".")[2]
        if number.isdigit() and config.layer_types[int(number)] == "linear_attention":
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def one_of_each(variants: Iterable[str]) -> list[str]:
    """The first variant of each family."""
    first: dict[str, str] = {}
    for name in variants:
        first.setdefault(name.partition("-")[0], name)
    return list(first.values())


def randomised(make: Callable[[], Any], seed: int = 0) -> Any:
    """A model whose every parameter is random: HF's own init leaves norms at 1, biases at 0.

    Scaled so that activations stay of order one, whatever the depth.
    """
    torch.manual_seed(seed)
    model = make()
    done: set[int] = set()
    scaled: list[Any] = []
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in done:  # a tied one is met twice
                    mean, scale = _distribution(module, name, parameter)
                    parameter.copy_(mean + scale * torch.randn_like(parameter))
                    done.add(id(parameter))
            for name, buffer in module.named_buffers(recurse=False):
                if name == "e_score_correction_bias":  # decides about experts
                    buffer.copy_(0.3 * torch.randn_like(buffer))
                if name == "layer_scalar":
                    buffer.copy_(1.0 + 0.3 * torch.randn_like(buffer))
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                scaled.append(module)
        for module in scaled:  # where norms alone keep scores of order one
            module.q_norm.weight.mul_(module.head_dim**-0.5)
    return model.eval()


def _distribution(module: Any, name: str, parameter: torch.Tensor) -> tuple[float, float]:
    kind = type(module).__name__
    if parameter.ndim == 2 and kind.endswith("LayerNorm"):  # weights for each head
        return 1.0, 0.3
    if kind.endswith("NormGated"):
        return 1.0, 0.3
    if kind == "Gemma4TextRouter" and parameter.ndim == 1:  # divided by the width's root
        return (parameter.shape[0] ** 0.5 if name == "scale" else 1.0), 0.3
    if kind == "Conv1d":  # small values would be small beside the norm's epsilon
        return 0.0, 0.15
    if name == "A_log":
        return -2.0, 2.0  # states of which little, or nearly all, is left after a token
    if kind.endswith("Norm") and name == "weight":
        # Some norms add the one.
        adding = ("Gemma", "Qwen3_5", "Qwen3Next", "MuseGlimmerTextCentered")
        adds = kind.startswith(adding) and kind != "Gemma4RMSNorm"
        return (0.0 if adds else 1.0), 0.3
    if name == "sinks":
        return 0.0, 1.0
    if parameter.ndim == 1 or name.endswith("bias"):
        return 0.0, 0.3
    # Conv1D and some experts are stored [in, out], everything else [out, in].
    inward = kind in ("Conv1D", "GptOssExperts", "Llama4TextExperts")
    return 0.0, parameter.shape[-2 if inward else -1] ** -0.5

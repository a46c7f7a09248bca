"""Tiny random HF models of every family, for parity tests."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import transformers

import tiny

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


# head_dim is not hidden_size / heads, the scores' scale is neither's root
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
# heads of 16: a quarter of them turns two pairs
NEOX: dict[str, Any] = {
    **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, "hidden_size": 64,
    "rope_parameters": partial(0.25),
}  # fmt: skip
STABLELM: dict[str, Any] = {**SMALL, "hidden_size": 64, "rope_parameters": partial(0.25)}
MIXTRAL: dict[str, Any] = {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN3: dict[str, Any] = {**SMALL, "head_dim": 16}
QWEN3MOE: dict[str, Any] = {
    **QWEN3, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
GPTOSS: dict[str, Any] = {
    **SMALL, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 40,
    "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW,
    "swiglu_limit": 1.5, "rope_parameters": YARN_OSS,
}  # fmt: skip


def _family(config: str, model: str, base: dict[str, Any]) -> Callable[..., Callable[..., Any]]:
    """From settings to a maker of models, which takes changes of its own; the last one holds.

    Classes are named: importing those of every family takes seconds, in every process of a run.
    """

    def variant(*settings: dict[str, Any], **more: Any) -> Callable[..., Any]:
        def make(**changes: Any) -> Any:
            merged = dict(base)
            for part in (*settings, more, changes):
                merged |= part
            # configs write into what they are given
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
_gpt2 = _family("GPT2Config", "GPT2LMHeadModel", GPT2)
_neox = _family("GPTNeoXConfig", "GPTNeoXForCausalLM", NEOX)
_phi3 = _family("Phi3Config", "Phi3ForCausalLM", SMALL)
_olmo2 = _family("Olmo2Config", "Olmo2ForCausalLM", SMALL)
_mixtral = _family("MixtralConfig", "MixtralForCausalLM", MIXTRAL)
_qwen3moe = _family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3MOE)
_gptoss = _family("GptOssConfig", "GptOssForCausalLM", GPTOSS)
_starcoder2 = _family("Starcoder2Config", "Starcoder2ForCausalLM", SMALL)
_olmo3 = _family("Olmo3Config", "Olmo3ForCausalLM", OLMO3)
_smollm3 = _family("SmolLM3Config", "SmolLM3ForCausalLM", {**SMALL, "num_hidden_layers": 5})
_seedoss = _family("SeedOssConfig", "SeedOssForCausalLM", {**SMALL, "head_dim": 16})
_arcee = _family("ArceeConfig", "ArceeForCausalLM", SMALL)
_stablelm = _family("StableLmConfig", "StableLmForCausalLM", STABLELM)

FAMILIES: dict[str, Callable[..., Any]] = {
    "llama-gqa": _llama(),
    "llama-mha-tied": _llama(MHA, TIED),
    "llama-mqa-bias": _llama(MQA, attention_bias=True, mlp_bias=True),
    "llama-head-dim": _llama(head_dim=16),
    "llama3-rope": _llama(rope_parameters=LLAMA3),
    "llama-linear-rope": _llama(rope_parameters=LINEAR),
    "llama-dynamic-rope": _llama(rope_parameters=DYNAMIC),
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
    "stablelm-gqa": _stablelm(),
    "stablelm-mha-bias": _stablelm(MHA, use_qkv_bias=True),
    "stablelm-mqa-parallel-qknorm": _stablelm(MQA, use_parallel_residual=True, qk_layernorm=True),
}


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


def randomised(make: Callable[[], Any], seed: int = 0) -> Any:
    """A model whose every parameter is random: HF's own init leaves norms at 1, biases at 0.

    Scaled so that activations stay of order one, whatever the depth.
    """
    torch.manual_seed(seed)
    model = make()
    done: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in done:  # a tied one is met twice
                    mean, scale = _distribution(module, name, parameter)
                    parameter.copy_(mean + scale * torch.randn_like(parameter))
                    done.add(id(parameter))
    return model.eval()


def _distribution(module: Any, name: str, parameter: torch.Tensor) -> tuple[float, float]:
    kind = type(module).__name__
    if kind.endswith("Norm") and name == "weight":
        return (0.0 if kind.startswith("Gemma") else 1.0), 0.3  # Gemma's norms add the one
    if name == "sinks":
        return 0.0, 1.0
    if parameter.ndim == 1 or name.endswith("bias"):
        return 0.0, 0.3
    # Conv1D and gpt-oss' experts are stored [in, out], everything else [out, in].
    inward = kind == "Conv1D" or kind == "GptOssExperts"
    return 0.0, parameter.shape[-2 if inward else -1] ** -0.5

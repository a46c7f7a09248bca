"""Published configs are read as transformers reads them; what is not understood is refused by name.

The fixtures are `config.json` files as they lie on the Hub. The reference is transformers' own
reading of the same file: its config classes, and its modules built without memory.
"""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN
from transformers.initialization import no_init_weights

from spile.core.errors import InputError
from spile.models.config.arch import GATED_DELTA, Arch, Experts, GatedDelta, Latent, Layer
from spile.models.config.families import FAMILIES, REFUSED
from spile.models.config.hf_config import ACTIVATIONS, read_config
from spile.models.files.checkpoint import Checkpoint
from support import hybrid_facts, tiny
from support.marks import some

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
# Parameters of each, as its page on the Hub or transformers counts them: a tied head once, of the
# multimodal one the language model alone, and with routers' corrections and scales of blocks, which
# are buffers there.
PARAMS = {
    "AFM-4.5B": 4_619_184_640,
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Llama-4-Maverick-17B-128E-text": 400_711_848_960,
    "Llama-4-Scout-17B-16E-Instruct": 107_769_861_120,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-Nemo-Base-2407": 12_247_782_400,
    "Mixtral-8x22B-v0.1": 140_620_634_112,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Muse-Glimmer-30B": 27_854_780_928,
    "OLMo-2-0425-1B": 1_484_916_736,
    "Olmo-Hybrid-7B": 7_430_870_688,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Kimi-Linear-48B-A3B-Instruct": 49_122_681_728,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-27B-text": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.5-35B-A3B-text": 34_660_610_688,
    "OLMo-2-1124-7B": 7_298_617_344,
    "Olmo-3-1025-7B": 7_298_011_136,
    "Phi-3-medium-4k-instruct": 13_960_238_080,
    "Phi-3-mini-128k-instruct": 3_821_079_552,
    "Phi-3-mini-128k-instruct-su": 3_821_079_552,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-4-mini-instruct": 3_836_021_760,
    "Qwen2-0.5B": 494_032_768,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-7B-Instruct-yarn": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M": 134_515_008,
    "TinyLlama-1.1B": 1_100_048_384,
    "distilgpt2": 81_912_576,
    "gemma-1.1-2b-it": 2_506_172_416,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b-it": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "gemma-3-4b-it": 3_880_263_168,
    "gemma-7b": 8_537_680_896,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "phi-4": 14_659_507_200,
    "pythia-410m": 405_334_016,
    "Seed-OSS-36B-Base": 36_151_104_512,
    "SmolLM3-3B": 3_075_098_624,
    "pythia-6.9b": 6_857_302_016,
    "pythia-70m": 70_426_624,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "ERNIE-4.5-0.3B-PT": 360_748_032,
    "ERNIE-4.5-21B-A3B-PT": 21_825_437_888,
    "EXAONE-4.0-32B": 32_003_216_384,
    "GLM-4-9B-0414": 9_400_094_720,
    "GLM-4.5-Air": 106_852_251_264,
    "MiniMax-M2": 228_689_764_864,
    "OLMo-1.7-7B-hf": 6_888_095_744,
    "OLMoE-1B-7B-0924": 6_919_161_856,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "bloom-560m": 559_214_592,
    "c4ai-command-r-plus": 103_810_674_688,
    "c4ai-command-r7b-12-2024": 8_028_033_024,
    "dots.llm1.base": 142_774_381_696,
    "falcon-11B": 11_102_822_400,
    "falcon-40b": 41_303_293_952,
    "falcon-7b": 6_921_720_704,
    "glm-4-9b-chat-hf": 9_399_951_360,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neo-1.3B": 1_315_575_808,
    "gpt_bigcode-santacoder": 1_124_886_528,
    "granite-3.1-3b-a800m-base": 3_298_793_472,
    "granite-3.1-8b-instruct": 8_170_848_256,
    "mpt-7b": 6_649_286_656,
    "opt-1.3b": 1_315_758_080,
    "phi-2": 2_779_683_840,
    "stablelm-2-12b": 12_143_185_920,
    "Apertus-8B-2509": 8_053_338_176,
    "DeepSeek-V2": 235_741_434_880,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V3": 671_026_419_200,
    "GLM-4.7-Flash": 29_943_393_920,
    "gemma-4-E2B-it": 4_628_569_379,
    "gemma-4-E2B-it-text": 4_628_569_379,
    "gemma-4-26B-A4B-it": 25_233_141_790,
    "gemma-4-26B-A4B-it-text": 25_233_141_790,
    "Hunyuan-1.8B-Instruct": 1_791_080_448,
    "Mamba-Codestral-7B-v0.1": 7_285_403_648,
    "Bamba-9B": 9_780_235_392,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-1b": 1_461_538_368,
    "Nemotron-H-8B-Base-8K": 8_100_852_736,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "Falcon-H1-0.5B-Base": 521_411_104,
    "LFM2-1.2B": 1_170_340_608,
    "Ministral-3-8B-Base-2512-text": 8_489_553_920,
    "Phi-3.5-MoE-instruct": 41_873_153_344,
    "Ministral-3-8B-Base-2512": 8_489_553_920,
    "Mistral-Small-3.1-24B-Base-2503": 23_572_403_200,
}
LEARNED = ("correction_bias", "layer_scalar")  # buffers
KIMI = "Kimi-Linear-48B-A3B-Instruct"
# One of each row of `FAMILIES`, the hardest there is.
OF_FAMILY = {
    "llama": "Llama-3.1-8B",
    "llama4": "Llama-4-Maverick-17B-128E-text",
    "llama4-multimodal": "Llama-4-Scout-17B-16E-Instruct",
    "mistral": "Mistral-7B-v0.1",
    "mistral3": "Mistral-Small-3.1-24B-Base-2503",
    "mistral3-ministral3": "Ministral-3-8B-Base-2512",
    "muse_glimmer": "Muse-Glimmer-30B",
    "qwen2": "Qwen2.5-7B-Instruct-yarn",
    "qwen3": "Qwen3-8B",
    "gemma": "gemma-2b",
    "gemma2": "gemma-2-9b",
    "gemma3": "gemma-3-1b-it",
    "gemma3-multimodal": "gemma-3-4b-it",
    "gemma4": "gemma-4-E2B-it-text",
    "gemma4-multimodal": "gemma-4-E2B-it",
    "gemma4-experts": "gemma-4-26B-A4B-it-text",
    "gemma4-experts-multimodal": "gemma-4-26B-A4B-it",
    "gpt2": "gpt2",
    "gpt_neox": "pythia-70m",
    "phi3": "Phi-4-mini-instruct",
    "olmo2": "OLMo-2-0425-1B",
    "olmo3": "Olmo-3-1025-7B",
    "olmo_hybrid": "Olmo-Hybrid-7B",
    "qwen3_next": "Qwen3-Next-80B-A3B-Instruct",
    "kimi_linear": "Kimi-Linear-48B-A3B-Instruct",
    "qwen3_5": "Qwen3.5-27B-text",
    "qwen3_5-multimodal": "Qwen3.5-27B",
    "qwen3_5_moe": "Qwen3.5-35B-A3B-text",
    "qwen3_5_moe-multimodal": "Qwen3.5-35B-A3B",
    "mamba2": "Mamba-Codestral-7B-v0.1",
    "bamba": "Bamba-9B",
    "granitemoehybrid": "granite-4.0-h-tiny",
    "granitemoehybrid-dense": "granite-4.0-h-1b",
    "nemotron_h": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "falcon_h1": "Falcon-H1-0.5B-Base",
    "lfm2": "LFM2-1.2B",
    "smollm3": "SmolLM3-3B",
    "seed_oss": "Seed-OSS-36B-Base",
    "arcee": "AFM-4.5B",
    "mixtral": "Mixtral-8x7B-v0.1",
    "phimoe": "Phi-3.5-MoE-instruct",
    "qwen3_moe": "Qwen3-30B-A3B",
    "gpt_oss": "gpt-oss-20b",
    "starcoder2": "starcoder2-3b",
    "cohere": "c4ai-command-r-plus",
    "cohere2": "c4ai-command-r7b-12-2024",
    "granite": "granite-3.1-8b-instruct",
    "granitemoe": "granite-3.1-3b-a800m-base",
    "glm": "glm-4-9b-chat-hf",
    "glm4": "GLM-4-9B-0414",
    "glm4_moe": "GLM-4.5-Air",
    "olmo": "OLMo-1.7-7B-hf",
    "olmoe": "OLMoE-1B-7B-0924",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B",
    "exaone4": "EXAONE-4.0-32B",
    "ernie4_5": "ERNIE-4.5-0.3B-PT",
    "ernie4_5_moe": "ERNIE-4.5-21B-A3B-PT",
    "dots1": "dots.llm1.base",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v2-greedy": "DeepSeek-V2-Lite",
    "deepseek_v3": "DeepSeek-V3",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "minimax_m2": "MiniMax-M2",
    "phi": "phi-2",
    "hunyuan_v1_dense": "Hunyuan-1.8B-Instruct",
    "apertus": "Apertus-8B-2509",
    "ministral3": "Ministral-3-8B-Base-2512-text",
    "stablelm": "stablelm-2-12b",
    "gptj": "gpt-j-6b",
    "opt": "opt-1.3b",
    "bloom": "bloom-560m",
    "falcon": "falcon-7b",
    "falcon-grouped": "falcon-40b",
    "falcon-grouped-one-norm": "falcon-11B",
    "gpt_neo": "gpt-neo-1.3B",
    "gpt_bigcode": "gpt_bigcode-santacoder",
    "mpt": "mpt-7b",
}
# One for each way in which a family's config is read.
READ_APART = ("llama", "gpt2", "gemma3", "gpt_oss", "mpt", "falcon", "qwen3_next", "deepseek_v3",
              "nemotron_h", "gemma4")  # fmt: skip


@cache
def _text(name: str) -> str:
    return (CONFIGS / f"{name}.json").read_text()


def published(name: str) -> dict[str, Any]:
    """One `config.json` from the Hub."""
    return json.loads(_text(name))


def read(values: Mapping[str, Any]) -> Arch:
    return read_config(values, "dir/config.json")[1]


def decoder_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping with the decoder's keys, to change in place."""
    return values.get("text_config", values)


def theirs(values: Mapping[str, Any]) -> Any:
    """Return transformers' reading of a config, or of its text part."""
    own = copy.deepcopy(dict(values))
    own.pop("quantization_config", None)  # asks for kernels; the numbers are those of bfloat16
    if (own.get("rope_scaling") or {}).get("type") == "su":
        own["rope_scaling"]["type"] = "longrope"  # transformers 5 no longer reads the old name
    return CONFIG_MAPPING[own.pop("model_type")].from_dict(own).get_text_config()


def built(config: Any) -> Any:
    """Make the model without memory for its tensors."""
    with torch.device("meta"), no_init_weights():
        if config.model_type == "muse_glimmer_text":
            return _without_tower(config)
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    model.tie_weights()
    return model


def _without_tower(config: Any) -> Any:
    """Return the decoder and the head of a model that exists only with a vision tower."""
    both = transformers.MuseGlimmerConfig(vision_config={"num_hidden_layers": 1})
    both.text_config = copy.deepcopy(config)
    whole = transformers.MuseGlimmerForConditionalGeneration(both)
    alone: Any = torch.nn.Module()
    alone.model, alone.lm_head = whole.model.language_model, whole.lm_head
    alone.get_decoder = lambda: alone.model
    return alone


def first(of: Any, *names: str) -> Any:
    """Return the first attribute that exists: families use different names for one thing."""
    if names == ("self",):
        return of
    return next(getattr(of, name) for name in names if getattr(of, name, None) is not None)


def facts_of_theirs(config: Any) -> dict[str, Any]:
    """Collect what decides activations besides weights, from transformers' config and modules."""
    if config.model_type in hybrid_facts.FAMILIES:
        return hybrid_facts.of_theirs(config, built)
    small, linear = copy.deepcopy(config), "linear_attention"
    config.allow_global_per_layer_attribute_access = True  # some layers have other numbers
    # The others are built alike; the first may have no experts, or no attention.
    hybrid = linear in (getattr(config, "layer_types", None) or ())
    built_too = 4 if hybrid else max(2, getattr(config, "first_k_dense_replace", 0) + 1)
    if hasattr(config, "num_kv_shared_layers"):  # a layer is built as those after it allow
        built_too = config.num_hidden_layers
    small.num_hidden_layers = built_too
    base = built(small).get_decoder()
    base = getattr(base, "model", base)
    block = first(base, "layers", "h", "blocks")[-1]
    attention = first(block, "self_attn", "self_attention", "attention", "attn")
    attention = getattr(attention, "attention", attention)
    mlp = first(block, *[n for n in MLPS if hasattr(block, n)], "self")
    norms = [
        module
        for name, module in base.named_modules()
        if type(module).__name__.endswith("Norm") and not name.endswith("_a_layernorm")
    ]
    after = getattr(config, "post_norm_eps", None)
    if after is not None:  # those after attention and MLP have one of their own
        both = (block.post_attention_layernorm, block.post_feedforward_layernorm)
        assert {norm.eps for norm in both} == {after}
        norms = [norm for norm in norms if norm.eps != after]
    # (OLMo's and OPT's have no such setting)
    (eps,) = {getattr(m, "variance_epsilon", getattr(m, "eps", 1e-5)) for m in norms}
    inner = getattr(mlp, "experts", mlp)
    heads, depth = config.num_attention_heads, config.num_hidden_layers
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if hasattr(config, "attention_layers"):
        window = config.window_size
        names = {"global": "full_attention", "local": "sliding_attention"}
        kinds = [names[kind] for kind in config.attention_layers]
    activations = ("act_fn", "act", "activation_fn", "gelu_impl")
    activation = next((getattr(inner, n) for n in activations if hasattr(inner, n)), None)
    return {
        "vocab": config.vocab_size,
        "width": config.hidden_size,
        "heads": (
            heads,
            getattr(attention, "num_kv_heads", getattr(config, "num_key_value_heads", heads)),
        ),
        "head_dim": first(attention, "head_dim", "head_size", "qk_head_dim"),
        "windows": [
            window if kinds is None or kinds[i] == "sliding_attention" else None
            for i in range(depth)
        ],
        "rotary": _rotary_of_theirs(getattr(base, "rotary_emb", None), config, attention),
        "positions": first(config, "max_position_embeddings", "max_seq_len", "seq_length")
        if config.model_type != "bloom"
        else getattr(config, "seq_length", 2048),
        "tied": config.tie_word_embeddings,
        "embed_scale": getattr(
            base.get_input_embeddings(),
            "scalar_embed_scale",
            getattr(base, "embedding_multiplier", 1.0),
        ),
        "residual_scale": getattr(block, "residual_multiplier", 1.0),
        "post_eps": after,
        "query_scale": getattr(attention, "qk_scale_factor", 1.0),
        "logit_scale": next(
            (
                getattr(config, n)
                for n in ("logit_scale", "output_multiplier")
                if getattr(config, n, 0)
            ),
            1.0,
        )
        / (getattr(config, "logits_scaling", None) or 1.0),
        "qkv_limit": getattr(config, "clip_qkv", None),
        "shared_norm": getattr(block, "post_attention_layernorm", None) is None
        and not any(hasattr(block, name) for name in MLP_NORMS),
        "eps": eps,
        "attn_scale": _rounded(
            1 / attention.scale_attn  # GPT-J divides, GPT-Neo does neither
            if hasattr(attention, "scale_attn")
            else next((getattr(attention, n) for n in SCALES if hasattr(attention, n)), 1.0)
        ),
        # Gemma 3 has the setting and does not hand it to its attention
        "attn_softcap": getattr(attention, "attn_logit_softcapping", None)
        if "Gemma2" in type(attention).__name__
        else None,
        "logit_softcap": getattr(config, "final_logit_softcapping", None),
        # gpt-oss spells its activation out: quick_gelu, of a gate that is clamped
        "activation": type(ACT2FN["quick_gelu"])
        if getattr(inner, "alpha", None) == 1.702
        else {"BloomGelu": type(ACT2FN["gelu_new"]), "GELU": type(ACT2FN["gelu"])}.get(
            type(activation).__name__, type(activation)
        ),
        "glu_limit": getattr(inner, "limit", None),
        "experts": _experts_of_theirs(mlp if hasattr(mlp, "experts") else block)
        if hasattr(mlp, "experts") or hasattr(block, "experts")
        else None,
        "sizes": [_sizes_of_theirs(each) for each in base.layers]
        if hasattr(attention, "is_kv_shared_layer")
        else None,
        "layer_embed": getattr(config, "hidden_size_per_layer_input", 0),
        "dense": [i not in config.moe_layers for i in range(depth)]
        if hasattr(config, "moe_layers")
        else [
            not hasattr(first(each, *[n for n in MLPS if hasattr(each, n)], "self"), "experts")
            and hasattr(mlp, "experts")
            for each in (*first(base, "layers", "h", "blocks"), *[block] * (depth - built_too))
        ],
        "parallel": getattr(
            config,
            "use_parallel_residual",
            config.model_type in ("cohere", "cohere2", "phi", "gptj", "falcon"),
        ),
        "sinks": hasattr(attention, "sinks"),
        "qk_norm": any(
            hasattr(attention, name)
            for name in ("q_norm", "q_layernorm", "query_layernorm", "qk_norm")
        ),
        "chunks": [
            config.attention_chunk_size if kinds and kinds[i] == "chunked_attention" else None
            for i in range(depth)
        ],
        "growth": (attention.attn_scale, attention.floor_scale)
        if getattr(attention, "attn_temperature_tuning", False)
        else None,
        "linear": [kinds is not None and kinds[i] == linear for i in range(depth)],
        "delta": _delta_of_theirs(base.layers[0], block) if hybrid else None,
        "latent": _latent_of_theirs(attention) if hasattr(attention, "kv_b_proj") else None,
        "attn_gate": hasattr(attention, "q_proj")
        and not hasattr(attention, "kv_b_proj")
        and (
            attention.q_proj.out_features == 2 * heads * attention.head_dim
            or hasattr(attention, "gate_proj")
        ),
    }


def _sizes_of_theirs(block: Any) -> tuple[Any, ...]:
    """Return the sizes of a block's heads, keys and MLP, and which of them it has."""
    attention, keys = block.self_attn, getattr(block.self_attn, "k_proj", None)
    return (
        attention.head_dim,
        keys and keys.out_features // attention.head_dim,
        keys is not None and attention.v_proj is None,
        block.mlp.gate_proj.out_features,
    )


def _sizes_of_ours(arch: Arch, layer: Layer) -> tuple[Any, ...]:
    own = arch.of(layer)
    return (
        own.head_dim,
        None if layer.borrows else own.num_kv_heads,
        layer.keys_as_values,
        own.experts.shared if own.experts else own.mlp_width,
    )


def _delta_of_theirs(block: Any, other: Any) -> GatedDelta:
    """Return the facts of a linear block; the other block attends."""
    rule = first(block, "linear_attn", "self_attn")
    norm = first(rule, "norm", "o_norm")
    return GatedDelta(
        key_heads=first(rule, "num_k_heads", "num_heads"),
        value_heads=first(rule, "num_v_heads", "num_heads"),
        key_dim=first(rule, "head_k_dim", "head_dim"),
        value_dim=first(rule, "head_v_dim", "head_dim"),
        kernel=rule.conv1d.kernel_size[0],
        norm_eps=norm.variance_epsilon,
        most_written=2.0 if getattr(rule, "allow_neg_eigval", False) else 1.0,
        gate=norm.activation,
        by_channel=hasattr(rule, "forget_gate"),
        narrow=hasattr(rule, "g_a_proj"),
        pre_norm_only=hasattr(other, "post_feedforward_layernorm"),
    )


def _latent_of_theirs(attention: Any) -> Latent:
    return Latent(
        rank=attention.kv_b_proj.in_features,
        query_rank=attention.q_lora_rank,
        rope_dim=attention.qk_rope_head_dim,
        value_dim=attention.v_head_dim,
        norm_eps=attention.kv_a_layernorm.variance_epsilon,
        regrouped=getattr(attention.config, "rope_interleave", False),
    )


def _rounded(scale: float) -> float:
    """Compare with a tolerance: a root and a quotient of one number differ in the last digit."""
    return float(np.float32(scale))


MLP_NORMS = ("ln_2", "ln_mlp", "fc1", "norm_2", "feedforward_layernorm")
MLPS = ("mlp", "ffn", "block_sparse_moe", "feed_forward")
SIGMOIDS = ("Glm4Moe", "Dots1", "MiniMax", "DeepseekV3", "Llama4", "KimiLinear")
SCALES = ("scaling", "inv_norm_factor", "softmax_scale")


def _experts_of_theirs(mlp: Any) -> Experts:
    router = next(m for m in mlp.modules() if "Router" in type(m).__name__)
    name = type(router).__name__
    shared = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
    apart = hasattr(mlp, "post_feedforward_layernorm_1")  # beside a plain MLP
    shared = mlp.mlp if apart else shared
    method = getattr(router, "topk_method", None)
    corrected = any("correction" in n for n, _ in (*mlp.named_buffers(), *mlp.named_parameters()))
    return Experts(
        router.config.num_experts if apart else router.num_experts,
        router.config.top_k_experts if apart else router.top_k,
        getattr(
            router,
            "norm_topk_prob",
            method is None and name not in ("Llama4Router", "PhimoeTopKRouter"),
        ),
        scored="sigmoid" if name.startswith(SIGMOIDS) else "softmax",
        weighs_input=name.startswith("Llama4"),
        corrected=corrected,
        groups=1 if method == "greedy" else getattr(router, "num_group", 1),
        chosen_groups=1 if method == "greedy" else getattr(router, "topk_group", 1),
        group_best=1 if method == "group_limited_greedy" else 2,
        scale=getattr(router, "routed_scaling_factor", 1.0),
        wide=name.startswith(("Glm4Moe", "Dots1", "Ernie", "Deepseek", "KimiLinear")),
        shared=0 if shared is None else shared.gate_proj.out_features,
        shared_gate=hasattr(mlp, "shared_expert_gate"),
        apart=apart,
        scaled=hasattr(router, "per_expert_scale"),
        margin=router.router_jitter_noise if name.startswith("Phimoe") else None,
    )


@dataclass(frozen=True, eq=False)
class Rotary:
    """Frequencies and the factor on cos and sin, equal as far as float32 goes."""

    frequencies: np.ndarray
    amplitude: float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rotary) or self.frequencies.shape != other.frequencies.shape:
            return False
        same = np.allclose(self.frequencies, other.frequencies, rtol=3e-6, atol=0)
        return same and math.isclose(self.amplitude, other.amplitude)


def _rotary_of_theirs(rotary: Any, config: Any, attention: Any) -> list[Rotary | None]:
    """Return the rotary settings of each layer; none where nothing rotates."""
    if hasattr(attention, "rotary_dim"):  # GPT-J makes its angles itself
        plain = 1e4 ** -(np.arange(0, attention.rotary_dim, 2) / attention.rotary_dim)
        return [Rotary(plain.astype(np.float32), 1.0)] * config.num_hidden_layers
    if rotary is None:
        return [None] * config.num_hidden_layers
    module = type(rotary)(config)  # on the host, where its numbers are
    stems = [f"{kind}_" for kind in config.layer_types] if hasattr(module, "layer_types") else [""]
    by_stem = {
        stem: Rotary(
            getattr(module, f"{stem}inv_freq").numpy(),
            # Phi-3.5-MoE looks this one up as it rotates.
            config.rope_parameters.get("short_mscale", getattr(module, f"{stem}attention_scaling")),
        )
        for stem in set(stems)
    }
    found = [by_stem[stem] for stem in stems] * (config.num_hidden_layers // len(stems))
    listed = ("no_rope_layers", "layer_rope_theta")
    rotated = next((v for n in listed if (v := getattr(config, n, None))), [1] * len(found))
    if config.model_type in ("cohere2", "exaone4") and config.sliding_window is not None:
        rotated = [kind == "sliding_attention" for kind in config.layer_types]
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        rotated = [kind == "full_attention" for kind in config.layer_types]
    return [each if turned else None for each, turned in zip(found, rotated, strict=False)]


def facts_of_ours(arch: Arch) -> dict[str, Any]:
    if arch.state_space or arch.convolution:
        return hybrid_facts.of_ours(arch)
    given = zip(arch.ropes, arch.rope_dims, strict=True)
    ropes = [Rotary(*rope.frequencies(dim, arch.rope_positions)) for rope, dim in given]
    return {
        "vocab": arch.vocab_size,
        "width": arch.width,
        "heads": (arch.num_heads, arch.num_kv_heads),
        "head_dim": arch.of(arch.layers[-1]).head_dim,
        "windows": [layer.window for layer in arch.layers],
        "rotary": [
            ropes[layer.rope] if ropes and layer.rope is not None else None for layer in arch.layers
        ],
        "positions": arch.rope_positions,
        "tied": arch.tied_head,
        "embed_scale": arch.embed_scale,
        "residual_scale": arch.residual_scale,
        "post_eps": arch.post_norm_eps,
        "query_scale": arch.query_scale,
        "logit_scale": arch.logit_scale,
        "qkv_limit": arch.qkv_limit,
        "shared_norm": arch.shared_norm,
        "eps": arch.norm_eps,
        "attn_scale": _rounded(arch.attn_scale),
        "attn_softcap": arch.attn_softcap,
        "logit_softcap": arch.logit_softcap,
        "activation": type(ACT2FN[arch.activation]),
        "glu_limit": arch.glu_limit,
        "experts": arch.experts,
        "dense": [layer.dense for layer in arch.layers],
        "parallel": arch.parallel,
        "sinks": arch.sinks,
        "qk_norm": arch.qk_norm is not None,
        "chunks": [layer.chunk for layer in arch.layers],
        "growth": arch.attn_growth,
        "linear": [layer.mixer == GATED_DELTA for layer in arch.layers],
        "delta": arch.delta,
        "latent": arch.latent,
        "sizes": [_sizes_of_ours(arch, layer) for layer in arch.layers] if arch.v_norm else None,
        "layer_embed": arch.layer_embed,
        "attn_gate": arch.attn_gate,
    }


def test_every_fixture_and_every_family_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PARAMS)
    assert len(PARAMS) >= 50
    found = {name: read_config(published(name), name)[0].name for name in PARAMS}
    assert set(found.values()) <= {family.name for family in FAMILIES}
    assert all(found[name] == family for family, name in OF_FAMILY.items())


def test_layers_without_rotary_positions_are_listed_or_counted() -> None:
    values = published("SmolLM3-3B")
    listed = read(values)
    assert [layer.rope for layer in listed.layers] == [0, 0, 0, None] * 9
    assert (listed.period, {layer.window for layer in listed.layers}) == (4, {None})
    del values["no_rope_layers"]
    assert read(values) == listed
    assert [layer.rope for layer in read({**values, "no_rope_layer_interval": 2}).layers][:4] == [
        0, None, 0, None,
    ]  # fmt: skip
    for bad in ([1, 0], [2] * 36, "all"):
        with pytest.raises(InputError, match="no_rope_layers must say 0 or 1 for each layer"):
            read({**values, "no_rope_layers": bad})


def test_chunks_are_in_the_layers_that_rotate_or_in_those_that_are_listed() -> None:
    values = published("Llama-4-Maverick-17B-128E-text")
    listed = read(values)
    assert [(layer.chunk, layer.rope) for layer in listed.layers] == [
        *[(8192, 0)] * 3, (None, None),
    ] * 12  # fmt: skip
    assert [layer.dense for layer in listed.layers] == [True, False] * 24
    for key in ("layer_types", "no_rope_layers", "moe_layers"):
        del values[key]
    assert read(values) == listed
    whole = read({**values, "layer_types": ["full_attention"] * 48})
    assert {layer.chunk for layer in whole.layers} == {None}
    assert [layer.rope for layer in whole.layers] == [layer.rope for layer in listed.layers]
    assert "layer_types must say" in refused({**values, "layer_types": ["sliding_attention"] * 48})
    assert "attention_chunk_size" in refused({**values, "attention_chunk_size": None})
    for bad in ([48], "all", [[1]]):
        assert "moe_layers must be a list of layers" in refused({**values, "moe_layers": bad})


def test_alpha_stretches_the_base_of_hunyuans_rotary_positions() -> None:
    values = published("Hunyuan-1.8B-Instruct")
    (rope,) = read(values).ropes
    assert (rope.kind, rope.theta) == ("default", pytest.approx(1e4 * 1000 ** (128 / 126)))
    for bad in (-1.0, "2", [1.0], 1e300):
        values["rope_scaling"]["alpha"] = bad
        assert "alpha" in refused(values)


def test_only_full_layers_of_olmo3_have_scaled_rotary_positions() -> None:
    arch = read(published("Olmo-3-1025-7B"))
    assert [layer.rope for layer in arch.layers] == [1, 1, 1, 0] * 8
    assert [layer.window for layer in arch.layers] == [4096, 4096, 4096, None] * 8
    full, sliding = arch.ropes
    assert (full.kind, sliding.kind, sliding.theta) == ("yarn", "default", 500_000)


def test_kimi_k2_is_read_as_what_it_is() -> None:
    """Its class is DeepSeek V3's; its `model_type` is unknown to transformers."""
    changes = {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827, "vocab_size": 163_840, "aux_loss_alpha": 0.001,
        "seq_aux": True, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    arch = read({**published("DeepSeek-V3"), **changes})
    assert tiny.num_params(arch, arch.num_layers, head=True) == 1_026_408_232_448
    assert arch.experts and (arch.experts.groups, arch.lead, arch.period) == (1, 1, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_a_known_class_that_is_not_computed_is_refused_with_the_reason(name: str) -> None:
    message = refused({**published("DeepSeek-V3"), "architectures": [name]})
    assert f"{name} is not supported: " in message and "nearest" not in message
    by_channel = dict.fromkeys(("Mamba", "FalconMamba"), "by channel")
    reasons = {**by_channel, "Zamba2": "share their weights", "Gemma3n": "four streams"}
    encoders = ("Bert", "Roberta", "ModernBert", "Gemma3Text")
    reasons |= {"Lfm2Moe": "more than their sum", **dict.fromkeys(encoders, "is an encoder: ")}
    told = [why for stem, why in reasons.items() if name.startswith(stem)]
    assert (told or ["indexer"])[0] in message


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "DeepSeek-V3",
            {"num_key_value_heads": 64},
            "num_key_value_heads 64 is not num_attention_heads 128",
        ),
        ("DeepSeek-V3", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive number, got 0"),
        ("DeepSeek-V3", {"q_lora_rank": "x"}, "q_lora_rank must be a positive number, got 'x'"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("DeepSeek-V3", {"index_topk": 2048}, "unknown config key 'index_topk'"),
        ("DeepSeek-V3", {"qk_rope_head_dim": 1}, "is no whole number of pairs"),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "is not supported"),
        ("GLM-4.7-Flash", {"head_dim": 128}, "head_dim = 128 is not supported"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "dense or sparse for each layer"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["other"] * 47}, "dense or sparse for each layer"),
        (KIMI, {"linear_attn_config": {"full_attn_layers": [0]}}, "[0] is not a list of"),
        (
            KIMI,
            {"linear_attn_config": {"full_attn_layers": [27], "kda_layers": [1]}},
            "kda_layers must be the layers that do not attend, [1, 2, 3,",
        ),
        (KIMI, {"linear_head_dim": 64}, "linear_head_dim is 64, but 128 in linear_attn_config"),
    ],
)
def test_latent_attention_that_is_not_understood_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    assert said in refused({**published(name), **changes})


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Bamba-9B", {"mamba_d_head": 32}, "128 heads of 32 channels, in 1 groups, are not the"),
        ("Bamba-9B", {"mamba_n_groups": 3}, "in 3 groups"),
        ("Bamba-9B", {"mamba_d_conv": 65}, "ssm_kernel must be at most 64, got 65"),
        ("Bamba-9B", {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be two ascending"),
        ("Bamba-9B", {"time_step_limit": [0.0, math.nan]}, "time_step_limit must be two"),
        ("Bamba-9B", {"time_step_limit": 3}, "time_step_limit must be two ascending numbers"),
        ("Bamba-9B", {"attn_layer_indices": [32]}, "[32] is not a list of the layers that attend"),
        ("Bamba-9B", {"attn_layer_indices": {}}, "{} is not a list of the layers that attend"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"]}, "full_attention or linear_attention"),
        ("granite-4.0-h-tiny", {"layer_types": [{}] * 40}, "layer_types must say"),
        ("Nemotron-H-8B-Base-8K", {"hybrid_override_pattern": "X" * 52}, "layer_types must say"),
        ("Nemotron-H-8B-Base-8K", {"hybrid_override_pattern": None}, "a letter for each layer"),
        ("Nemotron-H-8B-Base-8K", {"moe_latent_size": 64}, "moe_latent_size = 64 is not supported"),
        ("Nemotron-H-8B-Base-8K", {"mamba_hidden_act": "xielu"}, "ssm_activation 'xielu' is not"),
        ("Falcon-H1-0.5B-Base", {"ssm_multipliers": [1.0]}, "must be a list of 5 numbers"),
        ("Falcon-H1-0.5B-Base", {"mlp_multipliers": "x"}, "must be a list of 2 numbers"),
        ("Falcon-H1-0.5B-Base", {"projectors_bias": True}, "projectors_bias = True is not"),
        ("LFM2-1.2B", {"block_dim": 1024}, "block_dim = 1024 is not supported"),
        ("LFM2-1.2B", {"layer_types": ["linear_attention"] * 16}, "full_attention or conv"),
    ],
)
def test_unknown_state_spaces_and_convolutions_are_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    assert said in refused({**published(name), **changes})


@pytest.mark.parametrize("name", PARAMS)
def test_a_published_config_has_its_published_number_of_parameters(name: str) -> None:
    arch = read(published(name))
    assert tiny.num_params(arch, arch.num_layers, head=True) == PARAMS[name]


@pytest.mark.parametrize("name", some(PARAMS, *(OF_FAMILY[each] for each in READ_APART)))
def test_every_tensor_of_the_model_is_expected_and_no_other(name: str) -> None:
    family, arch = read_config(published(name), name)
    model = built(theirs(published(name)))
    buffers = {n: b for n, b in model.named_buffers() if n.endswith(LEARNED)}
    held = sum(tensor.numel() for tensor in (*model.parameters(), *buffers.values()))
    assert held == PARAMS[name]
    prefix = "model." if family.nested else family.prefixes[0]
    found = Checkpoint(Path(), family, arch, {}, (), prefix).shapes()
    wanted = {n: tuple(p.shape) for n, p in model.named_parameters()}
    if "lm_head.weight" in wanted:  # GPT-NeoX' own name for it is that of its files
        wanted[family.head] = wanted.pop("lm_head.weight")
    if family.name == "olmo_hybrid":  # transformers fuses convolutions, and renames norms
        found, wanted = (
            {n: s for n, s in each.items() if "conv1d" not in n and "norm" not in n}
            for each in (found, wanted)
        )
    if family.name == "kimi_linear":  # it fuses these, too, and puts the decay's into a module
        found = {n: s for n, s in found.items() if "conv1d" not in n}
        wanted = {n.replace("forget_gate.", ""): s for n, s in wanted.items() if "conv1d" not in n}
    wanted |= {n: tuple(b.shape) for n, b in buffers.items() if "scalar" in n}
    if arch.experts:  # transformers fuses experts as it loads them
        found, wanted = ({n: s for n, s in each.items() if not _moe(n)} for each in (found, wanted))
    assert found == wanted


def _moe(tensor: str) -> bool:
    parts = (".mlp.", ".block_sparse_moe.", ".mixer.experts", ".mixer.shared_experts", ".gate.")
    return any(part in tensor for part in parts)


@pytest.mark.parametrize("name", PARAMS)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    assert facts_of_ours(read(published(name))) == facts_of_theirs(theirs(published(name)))


@pytest.mark.parametrize("name", PARAMS)
def test_what_transformers_saves_of_a_config_is_the_same_model(name: str) -> None:
    values = published(name)
    if name.endswith("-su"):
        values["rope_scaling"]["type"] = "longrope"
    config = CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))
    assert read(json.loads(config.to_json_string())) == read(values)


# Keys without effect; and those on which shapes depend, where a wrong guess meets other tensors.
NOT_DROPPED = {
    "architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "n_embd", "n_layer",
    "n_head", "moe_intermediate_size", "quantization_config", "n_embed", "ffn_dim", "d_model",
    "n_layers", "n_heads", "num_layers", "num_heads", "ffn_hidden_size", "num_kv_heads",
    "attn_config", "shared_expert_intermediate_size", "multi_query", "new_decoder_architecture",
    "num_ln_in_parallel_attn", "word_embed_proj_dim", "n_routed_experts", "num_experts",
    "num_experts_per_tok", "top_k_experts", "n_shared_experts", "attention_types", "text_config",
    "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "transformers_version",
    "use_cache", "initializer_range", "attention_dropout", "_name_or_path", "auto_map",
    "embd_pdrop", "resid_pdrop", "attn_pdrop", "residual_dropout", "embedding_dropout",
    "task_specific_params", "num_local_experts", "linear_attn_config",
}  # fmt: skip


@pytest.mark.parametrize("family", some(OF_FAMILY, *READ_APART))
def test_a_key_that_is_missing_means_what_transformers_assumes(family: str) -> None:
    whole = published(OF_FAMILY[family])
    # In that case transformers' Hunyuan config has no head_dim.
    kept = NOT_DROPPED | ({"head_dim"} if family == "hunyuan_v1_dense" else set())
    for key in sorted(set(decoder_part(whole)) - kept):
        values = copy.deepcopy(whole)
        del decoder_part(values)[key]
        try:
            arch = read(values)
        except InputError as error:
            if key not in str(error):  # it is missed by another one's name
                with pytest.raises((StrictDataclassError, TypeError), match="short_f|unsupp|amba"):
                    theirs(values)
        else:
            assert facts_of_ours(arch) == facts_of_theirs(theirs(values)), key


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("switch", [True, False, None])
def test_a_window_holds_only_where_it_is_switched_on(family: str, switch: bool | None) -> None:
    changes = {"use_sliding_window": switch, "sliding_window": 4096, "max_window_layers": 5}
    values = {**published(OF_FAMILY[family]), **changes}
    if switch is not None:  # newer versions refuse to say what null means; older take it for false
        assert facts_of_ours(read(values)) == facts_of_theirs(theirs(values))
    sliding = [layer.window == 4096 for layer in read(values).layers]
    if not switch:
        assert not any(sliding)
    elif family == "qwen3_moe":  # has no upper layers
        assert all(sliding)
    else:
        assert sliding.index(True) == 5
        assert all(sliding[5:])


def test_layers_may_be_given_one_by_one() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"] * 14
    for name in ("gemma-2-9b", "gpt-oss-20b", "Qwen3-8B"):
        values = published(name)
        own = kinds[: values["num_hidden_layers"]]
        values |= {"layer_types": own, "sliding_window": 77, "use_sliding_window": True}
        if "use_sliding_window" not in published(name):
            del values["use_sliding_window"]
        assert facts_of_ours(read(values)) == facts_of_theirs(theirs(values))
        assert {layer.window for layer in read(values).layers} == {None, 77}
        assert read(values).period == 3


def test_a_longrope_model_reads_no_further_than_its_short_factors_hold() -> None:
    for name in ("Phi-3-mini-128k-instruct", "Phi-3-mini-128k-instruct-su", "Phi-4-mini-instruct"):
        arch = read(published(name))
        assert (arch.max_positions, arch.rope_positions) == (4096, 131072)


def test_the_original_length_beside_the_scaling_is_that_of_transformers() -> None:
    values = published("Phi-4-mini-instruct")
    values["rope_scaling"]["original_max_position_embeddings"] = 8192
    assert facts_of_ours(read(values)) == facts_of_theirs(theirs(values))


def test_gpt_neox_configs_may_spell_their_rotary_settings_twice() -> None:
    """Return the config as transformers 4.45 to 4.57 saves it."""
    values = published("pythia-410m")
    twice = {"partial_rotary_factor": 0.25, "rope_theta": 10000, "rope_scaling": None}
    assert read({**values, **twice}) == read(values)


def test_multimodal_and_text_configs_of_one_decoder_are_the_same() -> None:
    values = published("gemma-3-4b-it")
    text = {**values["text_config"], "architectures": ["Gemma3ForCausalLM"]}
    inner = read(text)
    assert inner.family == "gemma3"
    assert {**vars(read(values)), "family": "gemma3"} == vars(inner)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 24},
        {"layer_types": None},
        {"sliding_window": None},
        {"max_window_layers": 3},
        {"_name_or_path": "elsewhere", "transformers_version": "9", "use_cache": False},
        {"dtype": "float32", "pad_token_id": 5},
        {"quantization_config": None},
        {"is_decoder": True, "pruned_heads": {}, "pretraining_tp": 1},
    ],
)
def test_what_cannot_change_the_activations_is_accepted(changes: dict[str, Any]) -> None:
    config = published("Qwen2.5-0.5B")
    assert read({**config, **changes}) == read(config)


def refused(values: Mapping[str, Any]) -> str:
    """Return the error's message, which must name the file and be one line."""
    with pytest.raises(InputError) as caught:
        read(values)
    message = str(caught.value)
    assert message.startswith(("dir/config.json: ", "dir/config.json text_config: "))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("family", OF_FAMILY)
def test_an_unknown_key_is_refused_by_name(family: str) -> None:
    values = published(OF_FAMILY[family])
    decoder_part(values)["depth_multiplier"] = 2.0
    assert "unknown config key 'depth_multiplier'" in refused(values)


# Values other than those under which the key changes nothing.
NOT_HARMLESS = {
    "pretraining_tp": 2,
    "rope_interleaved": True,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "pruned_heads": {"0": [1]},
    "tie_encoder_decoder": True,
    "quantization_config": {"quant_method": "bitsandbytes"},
}


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_harmless_key_of_another_value_is_refused_by_name(family: str) -> None:
    row = next(row for row in FAMILIES if row.name == family)
    for key, value in {**NOT_HARMLESS, **dict.fromkeys(row.harmless, "another")}.items():
        values = published(OF_FAMILY[family])
        decoder_part(values)[key] = value
        message = refused(values)
        assert f"{key} = {value!r} is not supported for {family}" in message
    for key, accepted in row.harmless.items():
        for value in accepted:
            values = published(OF_FAMILY[family])
            decoder_part(values)[key] = value
            assert read(values) == read(published(OF_FAMILY[family]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("tie_word_embeddings", False),
        ("residual_multiplier", 2.0),
    ],
)
def test_keys_beside_a_nested_config_are_accounted_for_too(key: str, value: Any) -> None:
    values = published("gemma-3-4b-it")
    assert read({**values, "tie_word_embeddings": True, "pad_token_id": 0}) == read(values)
    assert key in refused({**values, key: value})


def test_a_multimodal_config_without_its_text_part_is_refused() -> None:
    for text in (None, [], "text"):
        message = refused({**published("gemma-3-4b-it"), "text_config": text})
        assert "has no text_config for gemma3-multimodal" in message


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        ("Qwen2.5-7B", {"attention_bias": True}, "unknown config key 'attention_bias'"),
        ("Qwen2.5-7B", {"use_mrope": True}, "use_mrope = True"),
        ("Llama-2-7b-hf", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        ("Llama-2-7b-hf", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("Llama-2-7b-hf", {"rope_parameters": {"partial_rotary_factor": 0.5}},
         "partial_rotary_factor"),
        ("Llama-2-7b-hf", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported (known: s"),
        ("Llama-2-7b-hf", {"hidden_act": None}, "hidden_act None"),
        ("gpt2", {"activation_function": None}, "hidden_act None"),
        ("Llama-2-7b-hf", {"num_key_value_heads": 5}, "multiple of num_key_value_heads 5"),
        ("Llama-2-7b-hf", {"layer_types": ["sliding_attention"] * 32}, "sliding layer_types"),
        ("Llama-2-7b-hf", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ("Qwen3-8B", {"layer_types": ["full_attention"]}, "layer_types must say full_attention or"),
        ("Qwen3-8B", {"layer_types": ["chunked_attention"] * 36}, "layer_types must say"),
        ("Qwen3-8B", {"layer_types": ["sliding_attention"] * 36}, "but no sliding_window"),
        ("gemma-2-2b", {"sliding_window": None}, "sliding layers, but no sliding_window"),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma-3-1b-it", {"rope_parameters": {"rope_type": "default"}}, "must be given for full_"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"rope_theta": 1e4}, "unknown config key 'rope_theta'"),
        ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("Mixtral-8x7B-v0.1", {"num_local_experts": None}, "num_experts must be a positive"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive"),
        ("GLM-4.5-Air", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a number"),
        ("GLM-4.5-Air", {"n_group": 3}, "topk_group 1 of n_group 3"),
        ("GLM-4.5-Air", {"n_group": 32, "topk_group": 1}, "topk_group 1 of n_group 32"),
        ("GLM-4.5-Air", {"n_group": 128, "topk_group": 8}, "leaves one expert in a group"),
        ("ERNIE-4.5-21B-A3B-PT", {"moe_layer_interval": 0}, "moe_layer_interval must be"),
        ("gpt-neo-1.3B", {"attention_types": [[["global"], 3]]}, "attention_types must say"),
        ("gpt-neo-1.3B", {"attention_types": [[["other"], 24]]}, "attention_types must say"),
        ("gpt-neo-1.3B", {"attention_types": "global"}, "attention_types must say"),
        ("mpt-7b", {"attn_config": {"alibi": False}}, "alibi = False"),
        ("mpt-7b", {"attn_config": "flash"}, "attn_config must be an object"),
        ("opt-1.3b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512"),
        ("falcon-7b", {"alibi": True}, "alibi = True"),
        ("falcon-7b", {"multi_query": False}, "multi_query = False"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "hqq"}}, "quantization_config ="),
        ("Llama-3.1-8B", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ("phi-4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                   "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters and"),
        ("pythia-70m", {"rotary_pct": 0}, "partial_rotary_factor"),
        ("pythia-70m", {"rotary_pct": 1.5}, "partial_rotary_factor"),
        ("pythia-70m", {"rotary_pct": 0.001}, "partial_rotary_factor"),
        ("Llama-2-7b-hf", {"head_dim": 127}, "of 127 dimensions"),
        ("Phi-3-mini-128k-instruct", {"partial_rotary_factor": 0.5}, "short_factor must have 24"),
        ("Phi-3-mini-128k-instruct", {"original_max_position_embeddings": 1}, "above 1"),
    ],
)  # fmt: skip
def test_what_would_change_the_activations_is_refused_by_name(
    base: str, changes: dict[str, Any], said: str
) -> None:
    assert said in refused({**published(base), **changes})


ODD = ["32", 2.5, -1, 0, True, math.nan, math.inf, 10**400, [], {}]


def _own(family: str, key: str) -> str:
    """Return a family's own spelling of a key, from its published config."""
    row = next(row for row in FAMILIES if row.name == family)
    spelled = row.keys.get(key, key)
    return spelled if isinstance(spelled, str) else spelled[0]


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_number_that_is_none_is_refused_by_name(family: str) -> None:
    row = next(row for row in FAMILIES if row.name == family)
    counts = {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "intermediate_size", "max_position_embeddings",
    }  # fmt: skip
    counts |= set(row.reads) & {
        "ssm_expand", "conv_L_cache",
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
        "linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval",
        "num_experts", "num_experts_per_tok", "sliding_window", "rotary_dim", "n_group",
        "topk_group", "decoder_sparse_step", "moe_layer_interval",
    }  # fmt: skip
    amounts = {"rms_norm_eps"} | (set() if "ropes" in row.fixed else {"rope_theta"})
    amounts |= set(row.reads) & {
        "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
        "rope_local_base_freq", "partial_rotary_factor", "glu_limit", "logits_scaling",
        "routed_scaling_factor",
    }  # fmt: skip
    amounts |= set(row.amounts.values())
    if row.state_space is not None:
        counts |= {"ssm_heads", "ssm_head_dim", "ssm_groups", "ssm_state", "ssm_kernel"}
    if "rope_parameters" in decoder_part(published(OF_FAMILY[family])) or row.unrotated:
        amounts -= {"rope_theta"}  # it is given there, or not needed
    for key in (counts | amounts) - set(row.ignored):
        for odd in ODD:
            rows = [each.when for each in FAMILIES if each.architectures == row.architectures]
            if any(odd in when.get(_own(family, key), ()) for when in rows):
                continue  # it is of another row
            if key in amounts and odd == 2.5:
                continue
            values = published(OF_FAMILY[family])
            if key == "sliding_window" and _own(family, "use_sliding_window") in values:
                values["use_sliding_window"] = True
            part = decoder_part(values)
            rotary = part.get("rope_parameters") or {}
            (rotary if key in rotary else part)[_own(family, key)] = odd
            message = refused(values)
            named = "rope_theta" if key == "rope_local_base_freq" else key
            assert named in message or _own(family, key) in message, (key, odd)


@pytest.mark.parametrize("family", OF_FAMILY)
def test_a_switch_that_is_neither_on_nor_off_is_refused_by_name(family: str) -> None:
    row = next(row for row in FAMILIES if row.name == family)
    keys = {"tie_word_embeddings", *row.biases.values(), *(key for key, _ in row.switched.values())}
    keys |= {"use_sliding_window", "norm_topk_prob"} & set(row.reads)
    for key in keys:
        for odd in ("false", 2, 0, [], {}, 0.5):
            values = published(OF_FAMILY[family])
            decoder_part(values)[_own(family, key)] = odd
            assert f"{key} must be true or false, got {odd!r}" in refused(values)


@pytest.mark.parametrize("odd", ["full_attention", 3, {}, [[]], [{}], [None], [3], True])
def test_layer_types_of_another_type_are_refused(odd: Any) -> None:
    for name in ("gemma-2-2b", "Llama-2-7b-hf", "Mistral-7B-v0.1"):
        assert "layer_types" in refused({**published(name), "layer_types": odd})


@pytest.mark.parametrize("odd", [None, 0, -1, 1.5, "6", [], True])
def test_a_pattern_of_layers_that_is_no_number_is_refused(odd: Any) -> None:
    values = published("gemma-3-1b-it")
    values.pop("layer_types", None)
    assert "sliding_window_pattern" in refused({**values, "sliding_window_pattern": odd})
    if odd != 0:
        changes = {"use_sliding_window": True, "max_window_layers": odd}
        assert "max_window_layers" in refused({**published("Qwen3-8B"), **changes})


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("Qwen2MoeModel", "Qwen2MoeForCausalLM"),
        ("Gemma3xForCausalLM", "Gemma3ForCausalLM"),
        ("GPT2Model", "GPT2LMHeadModel"),
        ("MistralForCausalLm", "MistralForCausalLM"),
        ("T5", ""),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest_known_one(
    given: str, nearest: str
) -> None:
    message = refused({**published("Llama-2-7b-hf"), "architectures": [given]})
    assert repr(given) in message
    assert f"the nearest is {nearest}" in message
    assert all(name in message for family in FAMILIES for name in family.architectures)


@pytest.mark.parametrize(
    "given", [None, [], {}, 3, ["LlamaForCausalLM"] * 2, "LlamaForCausalLM", [3], [["Llama"]]]
)
def test_architectures_must_name_one_class(given: Any) -> None:
    message = refused({**published("Llama-2-7b-hf"), "architectures": given})
    assert "'architectures' must name one model class" in message


def test_biases_follow_the_config_where_the_family_lets_them() -> None:
    config = {**published("Llama-3.1-8B"), "attention_bias": True, "mlp_bias": True}
    arch = read(config)
    assert (arch.qkv_bias, arch.out_bias, arch.mlp_bias) == (True, True, True)
    arch = read(published("Qwen2-0.5B"))
    assert (arch.qkv_bias, arch.out_bias, arch.mlp_bias) == (True, False, False)


def test_every_supported_activation_is_one_of_transformers() -> None:
    assert set(ACTIVATIONS) <= set(ACT2FN)
    for name in ACTIVATIONS:
        assert read({**published("Llama-3.1-8B"), "hidden_act": name}).activation == name


# Anything that JSON can hold, and what configs hold in the wrong place.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 64)
    | st.sampled_from([4096, 10**6, 10**400, 1e-300, 1e300, 0.25, 0.5, 1e4])
    | st.floats()
    | st.sampled_from(["", "silu", "gelu", "default", "linear", "yarn", "longrope", "llama3",
                       "dynamic", "full_attention", "sliding_attention", "mxfp4"])
    | st.text(max_size=2)
)  # fmt: skip
ROPE_KEYS = st.sampled_from(
    ["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
     "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate",
     "short_factor", "long_factor", "partial_rotary_factor", "full_attention", "sliding_attention",
     "quant_method"]
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(ROPE_KEYS, inner, max_size=5)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = sorted({key for name in PARAMS for key in decoder_part(published(name))} | {
    "rope_parameters", "rope_scaling", "layer_types", "sliding_window", "sliding_window_pattern",
    "head_dim", "max_window_layers", "use_sliding_window", "partial_rotary_factor", "mlp_bias",
    "pruned_heads", "quantization_config", "final_logit_softcapping", "norm_topk_prob",
    "text_config", "num_experts",
})  # fmt: skip
DEPTHS = {"num_hidden_layers", "n_layer"}
CHANGES = st.dictionaries(st.sampled_from(KEYS), ANYTHING, min_size=1, max_size=3)


@given(
    name=st.sampled_from(sorted(PARAMS)),
    changes=CHANGES,
    rope=st.none() | st.dictionaries(ROPE_KEYS, ANYTHING, max_size=3),
    gone=st.sets(st.sampled_from(KEYS), max_size=2),
)
@example("Qwen3-8B", {"layer_types": 3}, None, set())
@example("gemma-2-2b", {"layer_types": [[]] * 26}, None, set())
@example("Llama-3.1-8B", {"rope_theta": 10**400}, None, set())
@example("gemma-2-2b", {"hidden_size": 10**400}, None, set())
@example("Llama-3.1-8B", {}, {"low_freq_factor": 4.0}, set())
@example("Llama-3.1-8B", {}, {"low_freq_factor": [1.0]}, set())
@example("Qwen2.5-7B-Instruct-yarn", {"rope_theta": 1.0}, None, set())
@example("Qwen2.5-7B-Instruct-yarn", {}, {"attention_factor": [1.0]}, set())
@example("Phi-3-mini-128k-instruct", {}, {"short_factor": 2.0}, set())
@settings(max_examples=100, deadline=None)
def test_a_strangers_config_gives_an_architecture_or_is_refused_as_input(
    name: str, changes: dict[str, Any], rope: dict[str, Any] | None, gone: set[str]
) -> None:
    values = published(name)
    own = decoder_part(values)
    # A million layers would be listed one by one; that they are refused is tested above.
    own |= {k: v for k, v in changes.items() if k not in DEPTHS or v != v or _small(v)}
    if rope is not None:
        scaling = own.get("rope_scaling")
        own["rope_scaling"] = {**(scaling if isinstance(scaling, dict) else {}), **rope}
    for key in gone:
        own.pop(key, None)
    try:
        arch = read(values)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert arch.num_heads % arch.num_kv_heads == 0
    assert 0 < arch.max_positions <= arch.rope_positions
    assert 1 <= arch.period <= arch.num_layers
    assert all(math.isfinite(x) and x > 0 for x in (arch.embed_scale, arch.attn_scale))
    for rope_settings in arch.ropes:
        frequencies, amplitude = rope_settings.frequencies(arch.head_dim, arch.rope_positions)
        assert np.isfinite(frequencies).all()
        assert (frequencies > 0).all()
        assert 0 < 2 * len(frequencies) <= arch.head_dim
        assert 0 < amplitude < math.inf


def _small(value: Any) -> bool:
    return not isinstance(value, int | float) or value < 100

"""GGUF files for tests, written as llama.cpp's converter writes them."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

Types = gguf.GGMLQuantizationType
LAYERS, WIDTH, INNER, HEADS, KV, VOCAB, CONTEXT = 2, 64, 256, 4, 2, 260, 128
BOS, EOS = 256, 257

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
}
META = {
    "block_count": LAYERS,
    "context_length": CONTEXT,
    "embedding_length": WIDTH,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV,
}
RMS = {**META, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5}
HEAD_32 = {"attention.key_length": 32, "attention.value_length": 32}
# Wavelengths on both sides of the bounds, and between them.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = [1.0 + 1.3 * i for i in range(8)]
SHORT = [1.0 + 0.1 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": LONG,
    "short_factor": SHORT,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def plain(theta: float = 5e5) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


# name: GGUF architecture, class in transformers, config beyond SIZES, metadata
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "llama", "Llama", {"rms_norm_eps": 1e-5, "rope_parameters": plain()},
        {**RMS, "rope.dimension_count": 16, "vocab_size": VOCAB},
    ),
    "llama tied, biased, linear": (
        "llama", "Llama",
        {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": True,
         "mlp_bias": True, "rope_parameters": {**plain(), "rope_type": "linear", "factor": 4.0}},
        {**RMS, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama 3": (
        "llama", "Llama", {"rms_norm_eps": 1e-5, "head_dim": 64, "rope_parameters": LLAMA3},
        {**RMS, "attention.key_length": 64, "attention.value_length": 64},
    ),
    "mistral": (
        "llama", "Mistral",
        {"rms_norm_eps": 1e-5, "head_dim": 32, "sliding_window": None,
         "rope_parameters": plain()},
        {**RMS, **HEAD_32, "rope.dimension_count": 32},
    ),
    "qwen2": (
        "qwen2", "Qwen2", {"rms_norm_eps": 1e-5, "rope_parameters": plain()}, RMS,
    ),
    "qwen3": (
        "qwen3", "Qwen3",
        {"rms_norm_eps": 1e-5, "head_dim": 32, "tie_word_embeddings": True,
         "rope_parameters": YARN},
        {**RMS, **HEAD_32, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 32},
    ),
    "olmo2": ("olmo2", "Olmo2", {"rms_norm_eps": 1e-5, "rope_parameters": plain()}, RMS),
    "gemma": (
        "gemma", "Gemma", {"rms_norm_eps": 1e-6, "head_dim": 32, "rope_parameters": plain(1e4)},
        {**META, **HEAD_32, "attention.layer_norm_rms_epsilon": 1e-6},
    ),
    "gemma2": (
        "gemma2", "Gemma2",
        {"rms_norm_eps": 1e-6, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
         "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
         "rope_parameters": plain(1e4)},
        {**META, **HEAD_32, "attention.layer_norm_rms_epsilon": 1e-6,
         "attention.sliding_window": 8, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "gemma3", "Gemma3",
        {"rms_norm_eps": 1e-6, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
         "num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE},
        {**RMS, **HEAD_32, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
         "attention.sliding_window": 8, "rope.scaling.type": "linear",
         "rope.scaling.factor": 8.0, "block_count": 7, "rope.freq_base_swa": 1e4},
    ),
    "phi3": (
        "phi3", "Phi3",
        {"rms_norm_eps": 1e-5, "sliding_window": 16, "rope_parameters": plain(),
         "original_max_position_embeddings": CONTEXT},
        {**RMS, "attention.sliding_window": 16, "rope.dimension_count": 16,
         "rope.scaling.original_context_length": CONTEXT},
    ),
    "phi3 long, partly rotated": (
        "phi3", "Phi3",
        {"rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": True,
         "hidden_size": 2 * WIDTH, "original_max_position_embeddings": 64,
         "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5}},
        {**RMS, "embedding_length": 2 * WIDTH, "rope.freq_base": 1e4,
         "attention.sliding_window": 0, "rope.dimension_count": 16,
         "rope.scaling.original_context_length": 64,
         "rope.scaling.attn_factor": (1 + np.log(2) / np.log(64)) ** 0.5},
    ),
    "gpt2": (
        "gpt2", "GPT2",
        {"n_embd": WIDTH, "n_inner": INNER, "n_layer": LAYERS, "n_head": HEADS,
         "n_positions": CONTEXT, "tie_word_embeddings": True},
        {**{k: v for k, v in META.items() if not k.endswith("_kv")},
         "attention.layer_norm_epsilon": 1e-5},
    ),
}  # fmt: skip


def source(case: str) -> torch.nn.Module:
    """A random model; its norms are random, too, so that a forgotten one changes results."""
    return deepcopy(_made(case))


@cache
def _made(case: str) -> torch.nn.Module:
    _, name, changes, _ = CASES[case]
    config_class = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")
    sizes = {"vocab_size": VOCAB} if name == "GPT2" else SIZES
    config = config_class(**{**sizes, "bos_token_id": BOS, "eos_token_id": EOS, **changes})
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * (0.5 if value.ndim == 1 else 0.15))
    return model


def as_stored(case: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The tensors under GGUF's names, changed as `convert_hf_to_gguf.py` changes them."""
    arch = CASES[case][0]
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, 99)
    stored: dict[str, np.ndarray] = {}
    for name, value in model.named_parameters():  # a tied head is not among them
        array = value.detach().numpy()
        if arch == "llama" and "q_proj" in name:
            array = interleave(array, HEADS)
        elif arch == "llama" and "k_proj" in name:
            array = interleave(array, KV)
        elif arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        elif arch == "gpt2" and ".c_" in name:
            array = array.T
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert to is not None, name
        stored[to] = np.ascontiguousarray(array)
    if case == "llama 3":
        stored["rope_freqs.weight"] = llama3_divisors(64)
    if case == "phi3 long, partly rotated":
        stored["rope_factors_long.weight"] = np.array(LONG, np.float32)
        stored["rope_factors_short.weight"] = np.array(SHORT, np.float32)
    return stored


@cache
def _stored(case: str) -> dict[str, np.ndarray]:
    return as_stored(case, _made(case))


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def llama3_divisors(dim: int, factor: float = 8.0, original: int = 8192) -> np.ndarray:
    """Llama 3's divisors of frequencies in float32, as the converter computes them."""
    wavelengths = 2 * np.pi * np.float32(5e5) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    found = []
    for wavelength in wavelengths.astype(np.float32):
        smooth = (np.float32(original) / wavelength - np.float32(1)) / np.float32(3)
        between = 1 / ((1 - smooth) / np.float32(factor) + smooth)
        short, long = wavelength < original / 4, wavelength > original
        found.append(1 if short else factor if long else between)
    return np.array(found, np.float32)


def byte_tokens() -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*alphabet, "<s>", "</s>", "<user>", "in"],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 4, 1],
        "tokenizer.ggml.merges": ["i n"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
    }


def write_gguf(
    path: Path,
    arch: str,
    meta: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, Types] | None = None,
) -> Path:
    """Write a GGUF file; keys outside GGUF's own groups get the architecture as prefix."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in meta.items():
        top = key.split(".")[0] in ("tokenizer", "general", "split", "adapter", "quantize")
        name = key if top else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_case(
    path: Path,
    case: str = "llama",
    *,
    meta: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    quantise: Types | None = None,
) -> Path:
    """One of CASES with changes; None takes something away."""
    arch, _, _, stated = CASES[case]
    all_meta = {**stated, **byte_tokens(), **(meta or {})}
    all_tensors = {**_stored(case), **(tensors or {})}
    kept = {name: array for name, array in all_tensors.items() if array is not None}
    types: dict[str, Types] = {}
    if quantise is not None:
        types = {name: quantise for name, array in kept.items() if array.ndim == 2}
        kept |= {name: gguf.quants.quantize(kept[name], quantise) for name in types}
    kept_meta = {key: value for key, value in all_meta.items() if value is not None}
    return write_gguf(path, arch, kept_meta, kept, types)

"""GGUF files, written as llama.cpp's converter writes them, become the models they came from."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers, trainers

from spile.core.errors import InputError
from spile.core.tensors import map_tensor, read_header
from spile.models.files import gguf as converter
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.gguf import convert

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
    """A random model; norms too, so that a forgotten one shows."""
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


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def llama3_divisors(dim: int, factor: float = 8.0, original: int = 8192) -> np.ndarray:
    """As the converter computes them: in float32."""
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
    """Metadata without a dot in front of its first word belong to the architecture."""
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
    all_tensors = {**as_stored(case, source(case)), **(tensors or {})}
    kept = {name: array for name, array in all_tensors.items() if array is not None}
    types: dict[str, Types] = {}
    if quantise is not None:
        types = {name: quantise for name, array in kept.items() if array.ndim == 2}
        kept |= {name: gguf.quants.quantize(kept[name], quantise) for name in types}
    kept_meta = {key: value for key, value in all_meta.items() if value is not None}
    return write_gguf(path, arch, kept_meta, kept, types)


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def loaded(dest: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(dest).eval()


@pytest.mark.parametrize("case", CASES)
def test_the_converted_model_gives_the_logits_of_its_source(case: str, tmp_path: Path) -> None:
    convert(write_case(tmp_path / "m.gguf", case), tmp_path / "out")
    expected = logits(source(case))
    found = logits(loaded(tmp_path / "out"))
    assert torch.equal(found, expected), (found - expected).abs().max()
    assert open_checkpoint(str(tmp_path / "out")).arch.num_layers >= LAYERS


def test_an_untied_gpt2_keeps_its_head(tmp_path: Path) -> None:
    head = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    path = write_case(tmp_path / "m.gguf", "gpt2", tensors={"output.weight": head})
    convert(path, tmp_path / "out")
    model = source("gpt2")
    model.get_submodule("lm_head").weight = torch.nn.Parameter(torch.from_numpy(head))
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("kind", [Types.F16, Types.BF16, Types.Q8_0, Types.Q4_0, Types.Q5_1])
def test_a_quantised_model_is_that_of_its_dequantised_weights(
    kind: Types, case: str, tmp_path: Path
) -> None:
    convert(write_case(tmp_path / "m.gguf", case, quantise=kind), tmp_path / "out")
    expected = source(case)

    def through(array: np.ndarray) -> np.ndarray:
        return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)

    with torch.no_grad():
        for name, value in expected.named_parameters():
            array = value.detach().numpy()
            if array.ndim == 1:
                continue
            if case == "gpt2" and ".c_" in name:
                array = through(np.ascontiguousarray(array.T)).T
            elif case == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = HEADS if "q_proj" in name else KV
                rows = np.arange(array.shape[0])
                order = interleave(rows, heads)
                array = through(array[order])[np.argsort(order)]
            else:
                array = through(array)
            value.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    assert not torch.equal(logits(expected), logits(source(case)))
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(expected))


def random_blocks(kind: Types, rows: int, columns: int) -> np.ndarray:
    """Bytes that are finite numbers when read as this type."""
    rng = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.zeros((rows * columns // block, size), np.uint8)
    bad = np.ones(len(blocks), bool)
    while bad.any():
        blocks[bad] = rng.integers(0, 256, (bad.sum(), size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            bad = ~np.isfinite(gguf.quants.dequantize(blocks, kind)).all(axis=1)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in Types if kind.name in vars(gguf.quants)],
    ids=lambda kind: kind.name,
)
def test_every_quantisation_is_read(kind: Types, tmp_path: Path) -> None:
    name = "blk.1.ffn_down.weight"
    data = random_blocks(kind, WIDTH, INNER)
    stored = {**as_stored("llama", source("llama")), name: data}
    meta = {**CASES["llama"][3], **byte_tokens()}
    path = write_gguf(tmp_path / "m.gguf", "llama", meta, stored, {name: kind})
    convert(path, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    info = read_header(weights)["model.layers.1.mlp.down_proj.weight"]
    found = map_tensor(weights, info)
    assert np.array_equal(found, gguf.quants.dequantize(data, kind))
    assert len(np.unique(found)) > 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_can_be_rounded(dtype: str, tmp_path: Path) -> None:
    path = write_case(tmp_path / "m.gguf")
    convert(path, tmp_path / "out", dtype=dtype)
    kind = getattr(torch, dtype)
    found = loaded(tmp_path / "out").parameters()
    for value, exact in zip(found, source("llama").parameters(), strict=True):
        assert torch.equal(value, exact.to(kind)) and value.dtype == kind


def test_a_weight_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    huge = np.full(WIDTH, 1e6, np.float32)
    path = write_case(tmp_path / "m.gguf", tensors={"output_norm.weight": huge})
    with pytest.raises(InputError, match=r"model\.norm\.weight is too large for float16"):
        convert(path, tmp_path / "out", dtype="float16")
    assert os.listdir(tmp_path) == ["m.gguf"]
    with pytest.raises(InputError, match="none of float32"):
        convert(path, tmp_path / "out", dtype="int8")


@pytest.mark.parametrize(
    ("dim", "factor", "original"), [(128, 8.0, 8192), (64, 32.0, 8192), (128, 4.0, 2048)]
)
def test_the_scaling_of_llama_3_is_found_again(
    dim: int, factor: float, original: int, tmp_path: Path
) -> None:
    tensors = as_stored("llama", source("llama"))
    for layer in range(LAYERS):
        for part, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            tensors[f"blk.{layer}.attn_{part}.weight"] = np.ones((heads * dim, WIDTH), np.float32)
        tensors[f"blk.{layer}.attn_output.weight"] = np.ones((WIDTH, HEADS * dim), np.float32)
    tensors["rope_freqs.weight"] = llama3_divisors(dim, factor, original)
    sizes = {"attention.key_length": dim, "attention.value_length": dim}
    path = write_gguf(tmp_path / "m.gguf", "llama", {**RMS, **sizes, **byte_tokens()}, tensors)
    convert(path, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] == {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": original,
        "rope_type": "llama3",
    }


@pytest.mark.parametrize(("layers", "scalar"), [(46, 16), (4, 32)])
def test_only_the_largest_gemma_2_scales_by_its_width(
    layers: int, scalar: int, tmp_path: Path
) -> None:
    stored = as_stored("gemma2", source("gemma2"))
    for layer in range(2, layers):
        stored |= {
            name.replace("blk.0.", f"blk.{layer}."): array
            for name, array in list(stored.items())
            if name.startswith("blk.0.")
        }
    meta = {**CASES["gemma2"][3], **byte_tokens(), "block_count": layers}
    convert(write_gguf(tmp_path / "m.gguf", "gemma2", meta, stored), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == scalar


ONES = np.ones(8, np.float32)
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "architecture": ("llama", {"general.architecture": "mamba"}, {}, "'mamba' is not supported"),
    "adapter": ("llama", {"general.type": "adapter"}, {}, "is not supported"),
    "foreign metadata": ("llama", {"adapter.lora.alpha": 1.0}, {}, r"adapter\.lora\.alpha"),
    "unread metadata": ("llama", {"attention.scale": 0.5}, {}, r"llama\.attention\.scale"),
    "experts": ("llama", {"expert_count": 8}, {}, r"llama\.expert_count"),
    "pooling": ("qwen3", {"pooling_type": 3}, {}, r"qwen3\.pooling_type"),
    "window": ("olmo2", {"attention.sliding_window": 8}, {}, r"olmo2\.attention\.sliding_window"),
    "scaling": ("llama", {"rope.scaling.type": "longrope"}, {}, "'longrope' is not supported"),
    "factor alone": ("llama", {"rope.scaling.factor": 2.0}, {}, r"llama\.rope\.scaling\.factor"),
    "yarn, half told": ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, {},
                        "lacks 'rope.scaling.original_context_length'"),
    "pattern": ("gemma2", {"attention.sliding_window_pattern": [False, True]}, {}, "window"),
    "part of a head": ("llama", {"rope.dimension_count": 8}, {}, "partly rotated"),
    "heads by layer": ("llama", {"attention.head_count": [4, 4]}, {}, "one positive number"),
    "no heads": ("llama", {"attention.head_count": 0}, {}, "one positive number"),
    "half a layer": ("llama", {"block_count": 1.5}, {}, "one positive number"),
    "too many layers": ("llama", {"block_count": 10**9}, {}, "layers, but only"),
    "no layers": ("llama", {"block_count": None}, {}, "the metadata lacks 'block_count'"),
    "vocabulary": ("llama", {"vocab_size": 7}, {}, "another size"),
    "parts": ("llama", {"split.count": 2}, {}, "llama-gguf-split --merge"),
    "missing tensor": ("llama", {}, {"blk.1.attn_k.weight": None}, r"blk\.1\.attn_k\.weight"),
    "missing bias": ("qwen2", {}, {"blk.0.attn_v.bias": None}, r"blk\.0\.attn_v\.bias"),
    "half the biases": ("llama", {}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "attn_k"),
    "unknown tensor": ("llama", {}, {"blk.0.ffn_gate_inp.weight": ONES}, "ffn_gate_inp"),
    "shape": ("llama", {}, {"output_norm.weight": ONES}, r"shape \(8,\), expected \(64,\)"),
    "frequencies": ("llama", {}, {"rope_freqs.weight": ONES * 3}, "no rotary scaling"),
    "frequencies elsewhere": ("qwen2", {}, {"rope_freqs.weight": ONES}, "rope_freqs.weight is not"),
    "scaled twice": ("llama 3", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {},
                     "second scaling"),
    "integers": ("llama", {}, {"output_norm.weight": np.ones(64, np.int32)}, "I32"),
    "attn_factor": ("phi3 long, partly rotated", {"rope.scaling.attn_factor": 1.5}, {}, "Phi-3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case, meta, tensors, message = REFUSED[name]
    arch = meta.pop("general.architecture", None) if "general.architecture" in meta else None
    path = tmp_path / "m.gguf"
    if arch:
        write_gguf(path, arch, {**META, **byte_tokens()}, {"token_embd.weight": ONES})
    else:
        write_case(path, case, meta=meta, tensors=tensors)
    with pytest.raises(InputError, match=message) as caught:
        convert(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.01, 0.2, 0.6, 0.99])
def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    path = write_case(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(InputError, match="not a GGUF file, or truncated"):
        convert(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_a_file_that_is_none_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no model " * 100)
    with pytest.raises(InputError, match="not a GGUF file"):
        convert(tmp_path / "text", tmp_path / "out")
    with pytest.raises(InputError, match="no such file"):
        convert(tmp_path / "nothing", tmp_path / "out")


def test_a_destination_is_never_overwritten(tmp_path: Path) -> None:
    path = write_case(tmp_path / "m.gguf")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    for dest in (full, full / "mine"):
        with pytest.raises(InputError, match="exists already"):
            convert(path, dest)
    assert (full / "mine").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    for dest in (tmp_path / "empty", tmp_path / "deep" / "er"):
        convert(path, dest)
        assert sorted(os.listdir(dest)) == [
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        ]  # fmt: skip


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_case(tmp_path / "m.gguf")

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(converter, "write_json", full)
    with pytest.raises(OSError, match="no space left"):
        convert(path, tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


KILLED = """
import os, signal, sys
from pathlib import Path
from spile.models.files import gguf
name, count = sys.argv[3], int(sys.argv[4])
owner = gguf if hasattr(gguf, name) else Path
real, calls = getattr(owner, name), []
def killer(*arguments):
    calls.append(arguments)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
setattr(owner, name, killer)
gguf.convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("call", [("as_bytes", "3"), ("write_json", "1"), ("rename", "1")])
def test_a_killed_conversion_leaves_no_half_model(call: tuple[str, str], tmp_path: Path) -> None:
    path, dest = write_case(tmp_path / "m.gguf"), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(path), str(dest), *call]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not dest.exists()
    convert(path, dest)
    assert torch.equal(logits(loaded(dest)), logits(source("llama")))


# How published tokenizer.json files cut text, copied from them.
WORDS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| ?[^\\s\\p{L}\\p{N}]+"
    "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
NEMO = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|"
    "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def byte_level(**more: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **more}


def regex(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    parts = [{**split, "invert": False}, byte_level(use_regex=False)]
    return {"type": "Sequence", "pretokenizers": parts}


DIGITS = {"type": "Digits", "individual_digits": True}
# name: normalizer, pre-tokenizer, ignore_merges, whether a BOS is added
PUBLISHED: dict[str, tuple[Any, Any, bool, bool]] = {
    "gpt-2": (None, byte_level(use_regex=True), False, False),
    "llama-bpe": (None, regex(WORDS % "{1,3}"), True, True),
    "qwen2": ({"type": "NFC"}, regex(WORDS % ""), False, False),
    "smollm": (None, {"type": "Sequence", "pretokenizers": [DIGITS, byte_level(use_regex=True)]},
               False, False),
    "tekken": (None, regex(NEMO), True, True),
}  # fmt: skip
TEXTS = [
    "", " ", "\n", "Hello world", "  two  spaces ", "a\tb\r\n\r\nc\n\n\nd   \n", "I'LL don't 'S'x",
    "0123456789 12 1234567 ١٢٣ Ⅷ ½", "naïve café cafe\u0301 e\u0301\u0301", "'ſ it'ſ",
    "Sabc Sabc Sabc 'Sabc it'Sabc",
    "日本語のテキスト 한국어 ภาษาไทย ગુજરાતી", "🙂👩‍👩‍👧‍👦 🏳️‍🌈", "\u200b\u00ad\u2028\ufeff\x00\x7f",
    "HTMLParser camelCase XMLHttpRequest ǅ", "--==//\\\\ ....... !!!??? ((()))", "…—“”‘’«»",
    "<s>a</s> <user> b", "[PAD259] <s>", "def f(x):\n    return x  # done\n", "aaaaaaaaaaaaa " * 3,
]  # fmt: skip


def published_tokenizer(pre: str) -> Tokenizer:
    normalizer, cut, ignore, bos = PUBLISHED[pre]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(alphabet)}, "merges": []}
    form = {"version": "1.0", "normalizer": normalizer, "pre_tokenizer": cut, "added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps({**form, "model": model}))
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    trained = json.loads(tokenizer.to_str())
    trained["model"]["ignore_merges"] = ignore
    # A whole word without merges: only `ignore_merges` can reach it.
    size = len(trained["model"]["vocab"])
    trained["model"]["vocab"] |= {"Ġworldly": size}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    trained["added_tokens"] = [
        {"id": size + 1 + i, "content": token, **flags, "special": token != "<user>"}
        for i, token in enumerate(["<s>", "</s>", "<user>"])
    ]
    if bos:
        ids = {"<s>": {"id": "<s>", "ids": [size + 1], "tokens": ["<s>"]}}
        first, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"id": "A", "type_id": 0}
        second = [{"SpecialToken": {"id": "<s>", "type_id": 1}}]
        second.append({"Sequence": {"id": "B", "type_id": 1}})
        single = [first, {"Sequence": text}]
        trained["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *second],
            "special_tokens": ids,
        }
    return Tokenizer.from_str(json.dumps(trained))


def tokenizer_meta(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What the converter writes about a byte-level tokenizer; some rows have no token."""
    size = tokenizer.get_vocab_size()
    tokens = [str(tokenizer.id_to_token(i)) for i in range(size)]
    types = [1] * (size - 3) + [3, 3, 4]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    # The second padding as old converters marked it.
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, f"[PAD{size}]", f"[PAD{size + 1}]"],
        "tokenizer.ggml.token_type": [*types, 5, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": size - 3,
        "tokenizer.ggml.eos_token_id": size - 2,
    }


def convert_tokenizer(folder: Path, meta: dict[str, Any], case: str = "llama") -> Path:
    rows = len(meta["tokenizer.ggml.tokens"])
    embed = np.zeros((rows, WIDTH), np.float32)
    tensors: dict[str, np.ndarray | None] = {"token_embd.weight": embed, "output.weight": None}
    sizes = {"vocab_size": None, **dict.fromkeys(byte_tokens())}
    path = write_case(folder / "m.gguf", case, meta={**sizes, **meta}, tensors=tensors)
    convert(path, folder / "out")
    return folder / "out"


def assert_same_ids(dest: Path, reference: Callable[[str], list[int]]) -> None:
    """Both as Spile reads the file and as transformers does."""
    plain = Tokenizer.from_file(str(dest / "tokenizer.json"))
    hugging = transformers.AutoTokenizer.from_pretrained(dest)
    unused = [f"[PAD{plain.get_vocab_size() - back}]" for back in (1, 2)]
    for text in [*TEXTS, "worldly worldly", "x worldly", *unused]:
        assert plain.encode(text).ids == reference(text), text
        assert hugging(text)["input_ids"] == reference(text), text


@pytest.mark.parametrize("pre", PUBLISHED)
def test_a_byte_level_tokenizer_gives_the_published_ids(pre: str, tmp_path: Path) -> None:
    published = published_tokenizer(pre)
    meta = tokenizer_meta(published, pre)
    dest = convert_tokenizer(tmp_path, meta)
    assert_same_ids(dest, lambda text: published.encode(text).ids)
    rebuilt = Tokenizer.from_file(str(dest / "tokenizer.json"))
    assert rebuilt.encode("a", "b").ids == published.encode("a", "b").ids
    assert rebuilt.encode("a", "b").type_ids == published.encode("a", "b").type_ids
    for text in TEXTS:
        ids = published.encode(text, add_special_tokens=False).ids
        assert rebuilt.decode(ids) == Tokenizer.decode(with_decoder(published), ids)


def with_decoder(tokenizer: Tokenizer) -> Tokenizer:
    form = json.loads(tokenizer.to_str())
    form["decoder"] = byte_level(use_regex=True)
    return Tokenizer.from_str(json.dumps(form))


@pytest.mark.parametrize("bos", [None, False, True])
@pytest.mark.parametrize("eos", [None, False, True])
@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_bos_and_eos_are_added_as_the_file_says(
    pre: str, bos: bool | None, eos: bool | None, tmp_path: Path
) -> None:
    meta = tokenizer_meta(published_tokenizer(pre), pre)
    flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    dest = convert_tokenizer(tmp_path, {**meta, **flags})
    ids = transformers.AutoTokenizer.from_pretrained(dest)("Hello")["input_ids"]
    begins = bos if bos is not None else pre == "llama-bpe"
    assert (ids[0] == meta["tokenizer.ggml.bos_token_id"]) == begins
    assert (ids[-1] == meta["tokenizer.ggml.eos_token_id"]) == bool(eos)


PIECES = ["▁t", "he", "in", "▁the", "er", "an", "▁a", "aa", "aaa", "aaaa", "an▁", "and", "▁and",
          "er▁", "--", "----", "ing", "▁▁", "▁▁▁▁", "▁in", "hein", "ther", "the"]  # fmt: skip


def sentencepiece_meta(space_prefix: bool) -> dict[str, Any]:
    letters = sorted({*"".join(PIECES), *"abcdefghijklmnopqrstuvwxyz.,-"})
    runs = [] if space_prefix else ["  ", "   "]
    normal = [*(p for p in PIECES if space_prefix or p.strip("▁")), *letters]
    control = ["<unk>", "<s>", "</s>"]
    tokens = [*control, *(f"<0x{i:02X}>" for i in range(256)), *normal]
    types = [2, 3, 3] + [6] * 256 + [1] * len(normal)
    scores = [0.0] * 259 + [-1.0 - i for i in range(len(normal))]
    if not space_prefix:  # Gemma: runs of spaces and a tag, as the converter writes them
        tokens, types = [*tokens, *runs, "<b>"], [*types, 4, 4, 4]
        scores += [-1000.0] * 3
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **({} if space_prefix else {"tokenizer.ggml.add_space_prefix": False}),
    }


def sentencepiece_ids(meta: dict[str, Any], text: str, space_prefix: bool) -> list[int]:
    """SentencePiece itself: the best-scored pair of neighbours first, the leftmost of equals."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    ids = {token.replace(" ", "▁"): i for i, token in enumerate(tokens)}
    scores = {
        token.replace(" ", "▁"): 0.5 if kind == 4 else score
        for token, kind, score in zip(tokens, types, meta["tokenizer.ggml.scores"], strict=True)
        if kind in (1, 4)
    }
    marked = ("▁" if space_prefix and text else "") + text.replace(" ", "▁")
    parts = list(marked)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
                 if a + b in scores]  # fmt: skip
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = [1]
    for part in parts:
        bytes_ = [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        found += [ids[part]] if part in ids else bytes_
    return found


@pytest.mark.parametrize("space_prefix", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score(space_prefix: bool, tmp_path: Path) -> None:
    meta = sentencepiece_meta(space_prefix)
    dest = convert_tokenizer(tmp_path, meta)
    plain = Tokenizer.from_file(str(dest / "tokenizer.json"))
    hugging = transformers.AutoTokenizer.from_pretrained(dest)
    rng = np.random.default_rng(0)
    letters = list("theinganrd -a") + ["é", "日", "\n"]
    texts = ["".join(rng.choice(letters, rng.integers(0, 40))) for _ in range(400)]
    for text in [*texts, "the the", "aaaaaaaaaaa", "---------", "an and " * 4]:
        expected = sentencepiece_ids(meta, text, space_prefix)
        assert plain.encode(text).ids == expected, text
        assert hugging(text)["input_ids"] == expected, text
        assert plain.decode(expected) == text


def test_user_defined_pieces_are_matched_before_all_others(tmp_path: Path) -> None:
    meta = sentencepiece_meta(space_prefix=False)
    tokenizer = Tokenizer.from_file(str(convert_tokenizer(tmp_path, meta) / "tokenizer.json"))
    tag = meta["tokenizer.ggml.tokens"].index("<b>")
    assert tokenizer.encode("<b>the<b>").ids.count(tag) == 2
    assert tokenizer.encode("the   the").tokens == ["<s>", "the", "▁▁▁", "the"]


def changed(meta: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**meta, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def refused_tokenizers() -> dict[str, tuple[dict[str, Any], str]]:
    spm, bpe = sentencepiece_meta(space_prefix=True), byte_tokens()
    tokens, types = spm["tokenizer.ggml.tokens"], spm["tokenizer.ggml.token_type"]
    scores = spm["tokenizer.ggml.scores"]
    more = changed(spm, tokens=[*tokens, "[INST]"], token_type=[*types, 3], scores=[*scores, 0.0])
    return {
        "splitting": (changed(bpe, pre="default"), "'gpt2' with splitting 'default'"),
        "no splitting": (changed(bpe, pre=None), "'gpt2' with splitting None"),
        "kind": (changed(bpe, model="bert"), "'bert' with splitting"),
        "charsmap": (changed(spm, precompiled_charsmap=[1]), "precompiled_charsmap"),
        "whitespace": (changed(spm, remove_extra_whitespaces=True), "remove_extra_whitespaces"),
        "prefix": (changed(bpe, add_space_prefix=True), "add_space_prefix"),
        "twice": (changed(bpe, tokens=["a"] * VOCAB), "twice the same"),
        "types": (changed(bpe, token_type=[1] * 256 + [3, 3, 4, 6]), r"types \[6\]"),
        "merge": (changed(bpe, merges=["a b"]), "merge of 'a' and 'b'"),
        "bos": (changed(bpe, add_bos_token=True, bos_token_id=None), "none is named"),
        "bos id": (changed(bpe, bos_token_id=10**6), "1000000 is not a token"),
        "no tokens": (changed(bpe, token_type=None), "lacks 'tokenizer.ggml.token_type'"),
        "spaces after": (more, r"'\[INST\]' and 0 more tokens treat spaces"),
        "no ranks": (changed(spm, scores=[-1000.0] * len(scores)), "do not rank"),
        "bytes": (changed(spm, token_type=[2, 3, 3] + [1] * (len(types) - 3)), "all bytes"),
    }


@pytest.mark.parametrize("name", refused_tokenizers())
def test_a_tokenizer_that_cannot_be_exact_is_refused(name: str, tmp_path: Path) -> None:
    meta, message = refused_tokenizers()[name]
    with pytest.raises(InputError, match=message) as caught:
        convert_tokenizer(tmp_path, meta)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_phi3_pieces_are_refused_as_their_spaces_are_not_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model's own tokenizer\.json"):
        convert_tokenizer(tmp_path, sentencepiece_meta(space_prefix=True), "phi3")


def test_the_models_own_tokenizer_can_be_given(tmp_path: Path) -> None:
    given = tmp_path / "own"
    given.mkdir()
    own = published_tokenizer("qwen2")
    own.save(str(given / "tokenizer.json"))
    path = tmp_path / "m.gguf"
    meta = changed(tokenizer_meta(own, "qwen2"), pre="default")
    rows = len(meta["tokenizer.ggml.tokens"])
    embed = {"token_embd.weight": np.zeros((rows, WIDTH), np.float32), "output.weight": None}
    write_case(path, meta={"vocab_size": None, **meta}, tensors=embed)
    with pytest.raises(InputError, match=r"no tokenizer_config\.json there"):
        convert(path, tmp_path / "out", tokenizer=given)
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    (given / "tokenizer_config.json").write_text(settings)
    convert(path, tmp_path / "out", tokenizer=given)
    assert_same_ids(tmp_path / "out", lambda text: own.encode(text).ids)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == settings
    published_tokenizer("gpt-2").save(str(given / "tokenizer.json"))
    with pytest.raises(InputError, match="not the tokenizer of"):
        convert(path, tmp_path / "other", tokenizer=given)
    (given / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"own/tokenizer\.json"):
        convert(path, tmp_path / "other", tokenizer=given)

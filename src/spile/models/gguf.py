"""GGUF in, Hugging Face layout out, so that one loader serves both.

Whatever the file says and this module does not read is refused, never guessed: an ignored rotary
scaling or bias would give activations that are silently wrong. Weights become float32, because
that holds every dequantised value without further rounding.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spile.errors import InputError
from spile.tensors import write_tensors

# GGUF tensor name -> Hugging Face name; N is the layer.
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.N.attn_norm.weight": "model.layers.N.input_layernorm.weight",
    "blk.N.attn_q.weight": "model.layers.N.self_attn.q_proj.weight",
    "blk.N.attn_k.weight": "model.layers.N.self_attn.k_proj.weight",
    "blk.N.attn_v.weight": "model.layers.N.self_attn.v_proj.weight",
    "blk.N.attn_output.weight": "model.layers.N.self_attn.o_proj.weight",
    "blk.N.ffn_norm.weight": "model.layers.N.post_attention_layernorm.weight",
    "blk.N.ffn_gate.weight": "model.layers.N.mlp.gate_proj.weight",
    "blk.N.ffn_up.weight": "model.layers.N.mlp.up_proj.weight",
    "blk.N.ffn_down.weight": "model.layers.N.mlp.down_proj.weight",
}
# `llama.*` metadata -> the key of config.json.
_CONFIG = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
}
# Each of these must agree with what the rest says (`_head_dim`, the number of tokens).
_CHECKED = {"attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size"}
# How text is split before BPE is not in the file, only its name is. (What transformers derives
# from a GGUF leaves the digits together and gives other ids than llama.cpp.)
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}
_NORMAL, _CONTROL = 1, 3  # values of tokenizer.ggml.token_type
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def convert(gguf_path: Path, dest: Path) -> None:
    """Write the model in `gguf_path` to the directory `dest` as Hugging Face would have it.

    Raises:
        InputError: if the file is no GGUF, or holds a model this module cannot convert exactly.
    """
    gguf = require_gguf()
    if not gguf_path.is_file():
        raise InputError(f"{gguf_path}: there is no such file")
    try:
        reader = gguf.GGUFReader(gguf_path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise InputError(f"{gguf_path}: not a GGUF file, or truncated ({error})") from error
    where = str(gguf_path)
    try:
        config = _config(where, meta)
        tokenizer = _tokenizer(where, meta)
        tokenizer_config = _tokenizer_config(meta)
    except KeyError as error:
        raise InputError(f"{where}: the metadata lacks {error}") from error
    tensors = _tensors(where, gguf, reader, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    dest.mkdir(parents=True, exist_ok=True)
    write_tensors(dest / "model.safetensors", tensors)
    tokenizer.save(str(dest / "tokenizer.json"))
    _write_json(dest / "tokenizer_config.json", tokenizer_config)
    _write_json(dest / "config.json", config)


def require_gguf() -> Any:
    """The optional `gguf` package.

    Raises:
        InputError: if it is not installed.
    """
    try:
        importlib.import_module("gguf.quants")
        return importlib.import_module("gguf")
    except ImportError as error:
        raise InputError(
            f"reading a GGUF file needs the gguf package ({error}): pip install 'spile[demo]'"
        ) from error


def _config(where: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    arch = meta["general.architecture"]
    if arch != "llama":
        raise InputError(f"{where}: architecture {arch!r} is not supported, only 'llama' is")
    stated = {k.removeprefix("llama."): v for k, v in meta.items() if k.startswith("llama.")}
    if unread := sorted(stated.keys() - _CONFIG.keys() - _CHECKED):
        raise InputError(f"{where}: metadata not supported: llama.{', llama.'.join(unread)}")
    stated.setdefault("attention.head_count_kv", stated["attention.head_count"])
    stated.setdefault("rope.freq_base", 10000.0)  # llama.cpp's default
    read = {key: _number(stated[name]) for name, key in _CONFIG.items()}
    head_dim = _head_dim(where, stated)
    vocab_size = len(meta["tokenizer.ggml.tokens"])
    if stated.get("vocab_size", vocab_size) != vocab_size:
        raise InputError(f"{where}: {vocab_size} tokens, but a vocabulary of another size")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocab_size,
        **read,
    }


def _head_dim(where: str, stated: Mapping[str, Any]) -> int:
    default = stated["embedding_length"] // stated["attention.head_count"]
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    sizes = {stated.get(name, default) for name in names}
    if len(sizes) != 1:
        raise InputError(f"{where}: heads of unequal or partly rotated size are not supported")
    return sizes.pop()


def _number(value: Any) -> int | float:
    # Floats are stored in 32 bits: 1e-05 would come back as 9.999999747378752e-06.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _name_table(layers: int) -> dict[str, str]:
    return {
        theirs.replace("N", str(layer)): ours.replace("N", str(layer))
        for layer in range(layers)
        for theirs, ours in _TENSORS.items()
    }


def _tensors(
    where: str, gguf: Any, reader: Any, config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    table = _name_table(config["num_hidden_layers"])
    stored = {tensor.name: tensor for tensor in reader.tensors}
    # A tied head is not stored; all else must be there, and nothing more.
    if odd := sorted((table.keys() - {"output.weight"}) ^ (stored.keys() - {"output.weight"})):
        raise InputError(f"{where}: tensors missing or not supported: {', '.join(odd[:4])}")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    for theirs, tensor in stored.items():
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(f"{where}: tensor {theirs!r}: {error}") from error
        projection = table[theirs].split(".")[-2]
        if projection in heads:
            array = _unpermute(array, heads[projection])
        tensors[table[theirs]] = array.astype(np.float32, copy=False)
    return tensors


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    # GGUF interleaves the two halves that a rotary pair comes from; Hugging Face keeps halves.
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(where: str, meta: Mapping[str, Any]) -> Tokenizer:
    kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise InputError(f"{where}: tokenizer {kind!r} with splitting {pre!r} is not supported")
    for flag in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if meta.get(f"tokenizer.ggml.{flag}", False):
            raise InputError(f"{where}: tokenizer.ggml.{flag} is not supported")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    if unknown := set(types) - {_NORMAL, _CONTROL}:
        raise InputError(f"{where}: token types {sorted(unknown)} are not supported")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def _tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    ids = {ours: meta.get(f"tokenizer.ggml.{name}_token_id") for ours, name in _SPECIAL.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    template = meta.get("tokenizer.chat_template")
    return {
        "add_prefix_space": False,
        **special,
        **({"chat_template": template} if template else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

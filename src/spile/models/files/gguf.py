"""Convert GGUF to the Hugging Face layout, so that one loader serves both.

Architectures are rows of data. Metadata that this module does not read is refused: an ignored
rotary scaling or bias would give activations that are silently wrong. Missing metadata takes the
defaults of llama.cpp. Weights pass through memory one at a time and become float32, which holds
every dequantised value without further rounding.
"""

import importlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.errors import InputError
from spile.core.tensors import DTYPES_BY_NAME, as_bytes, build_header
from spile.models.files.gguf_tokenizer import prepare_tokenizer, write_json

# Modules: name in GGUF -> name in Hugging Face (a leading dot: below the layer) and shape of the
# weight in the file; a bias has the first of its sizes. V vocabulary, D width, F inner width,
# H one head, Q all heads, K all key heads, P positions, R of Q, K, K, G of F, F. A third word
# says what the converter did: T transposed, r interleaved the two halves of rotary pairs.
_ENDS = {"token_embd": "model.embed_tokens VD", "output_norm": "model.norm D"}
_ATTENTION = {
    "attn_q": ".self_attn.q_proj QD", "attn_k": ".self_attn.k_proj KD",
    "attn_v": ".self_attn.v_proj KD", "attn_output": ".self_attn.o_proj DQ",
}  # fmt: skip
_MLP = {
    "ffn_gate": ".mlp.gate_proj FD", "ffn_up": ".mlp.up_proj FD", "ffn_down": ".mlp.down_proj DF"
}  # fmt: skip
_NORMS = {"attn_norm": ".input_layernorm D", "ffn_norm": ".post_attention_layernorm D"}
_HEAD_NORMS = {"attn_q_norm": ".self_attn.q_norm H", "attn_k_norm": ".self_attn.k_norm H"}
_POST_NORMS = {
    "post_attention_norm": ".post_attention_layernorm D",
    "post_ffw_norm": ".post_feedforward_layernorm D",
}
_LLAMA = {**_ENDS, **_ATTENTION, **_MLP, **_NORMS}
_INTERLEAVED = {"attn_q": ".self_attn.q_proj QD r", "attn_k": ".self_attn.k_proj KD r"}
_PHI3 = {
    **_ENDS, **_NORMS, "attn_qkv": ".self_attn.qkv_proj RD", "attn_output": ".self_attn.o_proj DQ",
    "ffn_up": ".mlp.gate_up_proj GD", "ffn_down": ".mlp.down_proj DF",
}  # fmt: skip
_WIDE_NORMS = {"attn_q_norm": ".self_attn.q_norm Q", "attn_k_norm": ".self_attn.k_norm K"}
_OLMO2 = {**_ENDS, **_ATTENTION, **_MLP, **_POST_NORMS, **_WIDE_NORMS}
_GPT2 = {
    "token_embd": "transformer.wte VD", "position_embd": "transformer.wpe PD",
    "output_norm": "transformer.ln_f D", "attn_norm": ".ln_1 D", "attn_qkv": ".attn.c_attn RD T",
    "attn_output": ".attn.c_proj DQ T", "ffn_norm": ".ln_2 D", "ffn_up": ".mlp.c_fc FD T",
    "ffn_down": ".mlp.c_proj DF T",
}  # fmt: skip
_GEMMA2 = {**_LLAMA, **_POST_NORMS, "ffn_norm": ".pre_feedforward_layernorm D"}
# Metadata (without the architecture's prefix) -> the key of config.json.
_SIZES = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "rope.freq_base": "rope_theta",
}  # fmt: skip
_GPT2_SIZES = {
    "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
}  # fmt: skip
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPPED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # defaults
_GEMMA2_SIZES = {**_SIZES, **_WINDOW, **{name: name for name in _CAPPED}}
# `rope.scaling.type` -> keys that must be given with it, and keys that may be.
_YARN = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
_BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_SCALINGS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "none": ({}, {}),
    "linear": ({"factor": "factor"}, {}),
    "yarn": (_YARN, _BETAS),
}
_USUAL = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
_SILU = {**_USUAL, "attention_bias": False, "hidden_act": "silu"}
_GELU = {**_USUAL, "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"}
_TANH = {"hidden_act": "gelu_pytorch_tanh"}  # Gemma 3 no longer has this key
# Notes about the file; `tokenizer.` has checks of its own.
_ELSEWHERE = ("GGUF.", "general.", "mradermacher.", "quantize.", "split.", "tokenizer.")
_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
_THETA = {"rope.freq_base": 1e4}
_MOST_PARTS = 1 << 23  # numbers and texts; a vocabulary of 256k with its merges is a quarter of it
_FLOATS = ("epsilon", "freq_base", "softcapping", "factor", "beta")  # all others are counts


def read_gguf(gguf: Any, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the metadata and the tensors of a file, each by name.

    Args:
        gguf: the package of that name.

    Raises:
            InputError: if the file is truncated, or holds what no model does.
    """

    class Reader(gguf.GGUFReader):
        """A reader that refuses data beyond the file's end; the package's own reads it as empty."""

        parts = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            found = gguf.GGUFReader._get(self, offset, dtype, count, override_order)
            self.parts += 1
            if len(found) != int(count) or self.parts > _MOST_PARTS:
                raise IndexError(f"{count} values do not fit at byte {offset}")
            return found

    try:
        with np.errstate(all="ignore"):  # sizes that overflow do not fit their data: refused below
            reader = Reader(path)
        meta = {name: entry.contents() for name, entry in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = ascii(str(error))[1:-1][:200]
        raise InputError(f"{path}: not a GGUF file, or truncated ({reason})") from error
    return meta, {tensor.name: tensor for tensor in reader.tensors}


@dataclass(frozen=True)
class _Stated:
    """The metadata not yet read, and the tensors that belong in the config."""

    where: str
    left: dict[str, Any]
    factors: dict[str, np.ndarray]

    def look(self, name: str) -> Any:
        value = self.left[name]
        kind = float if any(word in name for word in _FLOATS) else int
        if type(value) is not kind or not 0 < value < math.inf:
            raise InputError(f"{self.where}: {name} must be one positive number, got {value!r}")
        # Floats are stored in 32 bits: 1e-05 would come back as 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind is float else value

    def take(self, name: str) -> Any:
        value = self.look(name)
        del self.left[name]
        return value

    def head_dim(self) -> int:
        default = self.look("embedding_length") // self.look("attention.head_count")
        return self.look("attention.key_length") if "attention.key_length" in self.left else default


def _llama3(stated: _Stated) -> dict[str, Any]:
    """Read Llama 3's rotary scaling, which the file holds as a divisor for each frequency."""
    divisors = stated.factors.pop("rope_freqs.weight", None)
    if divisors is None or (divisors == 1).all():
        return {}
    dim = stated.head_dim()
    if divisors.shape != (-(-dim // 2),) or not ((divisors > 0) & (divisors < 1e9)).all():
        raise InputError(f"{stated.where}: rope_freqs.weight does not fit heads of {dim}")
    plain = stated.look("rope.freq_base") ** -(np.arange(0, dim, 2) / dim)
    factor = float(str(divisors.max()))
    # Meta published 8192, always with these bounds (1 and 4 turns).
    for original in (8192, *(1 << power for power in range(5, 21))):
        blend = np.clip((original * plain / (2 * math.pi) - 1) / 3, 0.0, 1.0)
        expected = 1 / ((1 - blend) / factor + blend)
        # The converter computes in float32, and the blend is a difference, so allow some error.
        if np.allclose(divisors, expected, rtol=2e-5, atol=0):
            turns = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
            length = {"original_max_position_embeddings": original}
            return {"rope_scaling": {"factor": factor, **turns, **length}}
    raise InputError(f"{stated.where}: rope_freqs.weight is not a known rotary scaling")


def _gemma2(layers_of_27b: int, stated: _Stated) -> dict[str, Any]:
    # Not in the file: llama.cpp recognizes the one size that differs by its number of layers.
    across = stated.look("embedding_length") // stated.look("attention.head_count")
    differs = stated.look("block_count") == layers_of_27b
    return {"query_pre_attn_scalar": across if differs else stated.head_dim()}


def _phi3(stated: _Stated) -> dict[str, Any]:
    original = stated.take("rope.scaling.original_context_length")
    window = stated.left.pop("attention.sliding_window", 0) or None  # 0: the model has none
    found = {"original_max_position_embeddings": original, "sliding_window": window}
    head = stated.head_dim()
    if (rotated := stated.left.pop("rope.dimension_count", head)) != head:
        found["partial_rotary_factor"] = rotated / head
        if int(head * (rotated / head)) != rotated:
            raise InputError(f"{stated.where}: rope.dimension_count {rotated} is not supported")
    names = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("long", "short")}
    lists = {key: [float(str(factor)) for factor in stated.factors.pop(name)]
             for key, name in names.items() if name in stated.factors}  # fmt: skip
    if lists:
        scale = stated.look("context_length") / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        stretch = stated.left.pop("rope.scaling.attn_factor", usual)
        if len(lists) != 2 or not math.isclose(stretch, usual, rel_tol=1e-6):
            raise InputError(f"{stated.where}: this rotary scaling of Phi-3 is not supported")
        found["rope_scaling"] = {**lists, "rope_type": "longrope"}
    return found


@dataclass(frozen=True)
class _Arch:
    """One row: a GGUF architecture and its transformers counterpart."""

    name: str
    model_type: str
    modules: Mapping[str, str]
    config: Mapping[str, Any]
    sizes: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    layers: str = "model.layers"
    biased: tuple[str, ...] = ()
    # Config keys, each true if its modules have a bias.
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, Any])
    defaults: Mapping[str, Any] = field(default_factory=lambda: _THETA)
    extras: Callable[[_Stated], dict[str, Any]] = lambda stated: {}
    full_every: int = 0  # one layer in this many sees the whole context, the others a window
    plus_one: bool = False  # whether the converter added one to the weights of all norms


_ARCHS = {
    "llama": _Arch(
        "LlamaForCausalLM", "llama", {**_LLAMA, **_INTERLEAVED},
        {**_SILU, "mlp_bias": False, "pretraining_tp": 1}, extras=_llama3,
        switches={"attention_bias": tuple(_ATTENTION), "mlp_bias": tuple(_MLP)},
    ),
    "qwen2": _Arch(
        "Qwen2ForCausalLM", "qwen2", _LLAMA, {**_USUAL, "hidden_act": "silu"},
        biased=("attn_q", "attn_k", "attn_v"),
    ),
    "qwen3": _Arch("Qwen3ForCausalLM", "qwen3", {**_LLAMA, **_HEAD_NORMS}, _SILU),
    "olmo2": _Arch("Olmo2ForCausalLM", "olmo2", _OLMO2, _SILU),
    "gemma": _Arch("GemmaForCausalLM", "gemma", _LLAMA, {**_GELU, **_TANH}, plus_one=True),
    "gemma2": _Arch(
        "Gemma2ForCausalLM", "gemma2", _GEMMA2, {**_GELU, **_TANH}, _GEMMA2_SIZES,
        defaults={**_THETA, "attention.sliding_window": 4096, **_CAPPED},
        extras=partial(_gemma2, 46), full_every=2, plus_one=True,
    ),
    "gemma3": _Arch(
        "Gemma3ForCausalLM", "gemma3_text", {**_GEMMA2, **_HEAD_NORMS}, _GELU,
        {**_SIZES, **_WINDOW, "rope.freq_base_swa": "rope_local_base_freq"}, plus_one=True,
        defaults={"rope.freq_base_swa": 1e4}, extras=partial(_gemma2, 62), full_every=6,
    ),
    "phi3": _Arch("Phi3ForCausalLM", "phi3", _PHI3, _SILU, extras=_phi3),
    "gpt2": _Arch(
        "GPT2LMHeadModel", "gpt2", _GPT2, {"activation_function": "gelu_new"}, _GPT2_SIZES,
        "transformer.h", tuple(name for name in _GPT2 if not name.endswith("embd")), defaults={},
    ),
}  # fmt: skip


def convert(
    gguf_path: Path, dest: Path, *, dtype: str = "float32", tokenizer: Path | None = None
) -> None:
    """Write the model in `gguf_path` to the new directory `dest`, in the Hugging Face layout.

    Args:
        dtype: of the weights: float32 (exact), bfloat16 or float16.
        tokenizer: a directory with the model's own tokenizer files, to use instead of the file's.

    Raises:
        InputError: if the file cannot be converted exactly, or `dest` exists.
        OSError: if `dest` cannot be written; nothing is left there then.
    """
    where = str(gguf_path)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(f"dtype {dtype!r} is not supported; choose float32, bfloat16 or float16")
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        raise InputError(f"{dest} exists already: choose another directory, or remove it")
    gguf = require_gguf()
    if not gguf_path.is_file():
        raise InputError(f"{where}: there is no such file")
    meta, stored = read_gguf(gguf, gguf_path)
    try:
        _refuse_foreign(where, gguf, meta, stored)
        factors = {name: gguf.quants.dequantize(stored[name].data, stored.pop(name).tensor_type)
                   for name in list(stored) if name.startswith("rope_f")}  # fmt: skip
        sizes, config = _config(where, meta, factors, stored)
        write_tokenizer = prepare_tokenizer(where, meta, tokenizer)
    except KeyError as error:
        raise InputError(f"{where}: the metadata lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{where}: the metadata has an unexpected type ({error})") from error
    plan = _plan(where, _ARCHS[meta["general.architecture"]], config, sizes, stored)
    dest.parent.mkdir(parents=True, exist_ok=True)
    # Beside the destination, so that the rename stays inside one file system.
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        with (model / "model.safetensors").open("xb") as file:
            file.write(build_header((name, DTYPES_BY_NAME[dtype], to) for name, to, *_ in plan))
            for name, _, how, tensor in plan:
                array = _undo(gguf.quants.dequantize(tensor.data, tensor.tensor_type), how, sizes)
                try:
                    with np.errstate(over="raise"):
                        file.write(as_bytes(array.astype(DTYPES_BY_NAME[dtype], copy=False)))
                except FloatingPointError as error:
                    raise InputError(f"{name} is too large for {dtype}: give another") from error
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the weights
        write_tokenizer(model)
        write_json(model / "config.json", {**config, "torch_dtype": dtype})
        model.rename(dest)


def require_gguf() -> Any:
    """Import the optional `gguf` package.

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


def _refuse_foreign(where: str, gguf: Any, meta: dict[str, Any], stored: dict[str, Any]) -> None:
    name = meta["general.architecture"]
    if name not in _ARCHS or meta.get("general.type", "model") != "model":
        raise InputError(
            f"{where}: architecture {name!r} is not supported, only {', '.join(_ARCHS)}"
        )
    if meta.get("split.count", 1) != 1:
        raise InputError(f"{where}: one of several parts; join them with llama-gguf-split --merge")
    if odd := [key for key in meta if not key.startswith((*_ELSEWHERE, f"{name}."))]:
        raise InputError(f"{where}: metadata not supported: {', '.join(odd)}")
    # Try one row of each type before hours of work, not after.
    for tensor in {tensor.tensor_type: tensor for tensor in stored.values()}.values():
        try:
            gguf.quants.dequantize(np.atleast_2d(tensor.data)[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(f"{where}: tensor {tensor.name!r}: {error}") from error


def _config(
    where: str, meta: Mapping[str, Any], factors: dict[str, np.ndarray], stored: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, Any]]:
    """The sizes of the tensors' axes, and the contents of `config.json`."""
    name = meta["general.architecture"]
    arch, rotary = _ARCHS[name], "rope.freq_base" in _ARCHS[name].sizes
    own = {k.removeprefix(f"{name}."): v for k, v in meta.items() if k.startswith(f"{name}.")}
    stated = _Stated(where, {**arch.defaults, **own}, factors)
    heads, head = stated.look("attention.head_count"), stated.head_dim()
    found = {"head_dim": head, "rope_scaling": _scaling(stated)} if rotary else {}
    extras = arch.extras(stated)
    if factors or (found.get("rope_scaling") and extras.get("rope_scaling")):
        raise InputError(f"{where}: {', '.join(factors) or 'a second scaling'} is not supported")
    if rotary:
        stated.left.setdefault("attention.head_count_kv", heads)
        parts = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        if {stated.left.pop(part, head) for part in parts} != {head} or head % 2:
            raise InputError(f"{where}: heads of unequal or partly rotated size are not supported")
    if (layers := stated.look("block_count")) > len(stored):
        raise InputError(f"{where}: {layers} layers, but only {len(stored)} tensors")
    tokens = meta.get("tokenizer.ggml.tokens")
    sizes = {
        "D": stated.look("embedding_length"), "F": stated.look("feed_forward_length"),
        "H": head, "K": head * (stated.look("attention.head_count_kv") if rotary else heads),
        "L": layers, "P": stated.look("context_length"), "Q": head * heads,
        "V": stated.look("vocab_size") if tokens is None else len(tokens),
    }  # fmt: skip
    sizes |= {"R": sizes["Q"] + 2 * sizes["K"], "G": 2 * sizes["F"]}
    if stated.left.pop("vocab_size", sizes["V"]) != sizes["V"]:
        raise InputError(f"{where}: {sizes['V']} tokens, but a vocabulary of another size")
    if arch.full_every:
        windows = [(layer + 1) % arch.full_every != 0 for layer in range(layers)]
        if stated.left.pop("attention.sliding_window_pattern", windows) != windows:
            raise InputError(f"{where}: these layers with a sliding window are not supported")
    read = {key: stated.take(name) for name, key in arch.sizes.items()}
    if unread := ", ".join(f"{name}.{key}" for key in sorted(stated.left)):
        raise InputError(f"{where}: metadata not supported: {unread}")
    ids = {f"{k}_token_id": meta.get(f"tokenizer.ggml.{v}_token_id") for k, v in _IDS.items()}
    switches = {key: any(f"blk.0.{module}.bias" in stored for module in modules)
                for key, modules in arch.switches.items()}  # fmt: skip
    start = {"architectures": [arch.name], "model_type": arch.model_type, "torch_dtype": None}
    first = {**arch.config, **start, **ids, **found, **extras, **switches, "vocab_size": sizes["V"]}
    read["tie_word_embeddings"] = "output.weight" not in stored
    return sizes, dict(sorted(first.items())) | read


def _scaling(stated: _Stated) -> dict[str, Any] | None:
    kind = stated.left.pop("rope.scaling.type", "none")
    stated.left.pop("rope.scaling.finetuned", None)  # describes the training, changes nothing
    if kind not in _SCALINGS:
        raise InputError(f"{stated.where}: rope.scaling.type {kind!r} is not supported")
    must, may = _SCALINGS[kind]
    there = {**must, **{k: v for k, v in may.items() if f"rope.scaling.{k}" in stated.left}}
    found = {ours: stated.take(f"rope.scaling.{theirs}") for theirs, ours in there.items()}
    return None if kind == "none" else {**found, "rope_type": kind}


def _plan(
    where: str, arch: _Arch, config: dict[str, Any], sizes: dict[str, int], stored: dict[str, Any]
) -> list[tuple[str, tuple[int, ...], str, Any]]:
    """Every tensor of the file, with its new name, its new shape and the conversion to undo."""
    switched = [arch.switches[key] for key in arch.switches if config[key]]
    biased = {*arch.biased, *(module for modules in switched for module in modules)}
    table: dict[str, tuple[str, str, str]] = {}
    head = {} if config["tie_word_embeddings"] else {"output": "lm_head VD"}
    for module, row in {**arch.modules, **head}.items():
        ours, letters, how = (*row.split(), "1" if arch.plus_one and "norm" in module else "")[:3]
        places = {module: ours}
        if ours.startswith("."):
            places = {f"blk.{n}.{module}": f"{arch.layers}.{n}{ours}" for n in range(sizes["L"])}
        for theirs, to in places.items():
            table[f"{theirs}.weight"] = (f"{to}.weight", letters, how)
            if module in biased:
                table[f"{theirs}.bias"] = (f"{to}.bias", letters[0], how)
    if odd := sorted(table.keys() ^ stored.keys()):
        raise InputError(f"{where}: tensors missing or not supported: {', '.join(odd[:4])}")
    plan: list[tuple[str, tuple[int, ...], str, Any]] = []
    for theirs, tensor in stored.items():
        ours, letters, how = table[theirs]
        found, shape = tuple(map(int, reversed(tensor.shape))), tuple(sizes[x] for x in letters)
        if found != shape:
            raise InputError(f"{where}: tensor {theirs!r} has shape {found}, expected {shape}")
        plan.append((ours, shape[::-1] if how == "T" else shape, how, tensor))
    return plan


def _undo(array: np.ndarray, how: str, sizes: Mapping[str, int]) -> np.ndarray:
    if how == "T":
        return array.T
    if how == "1":
        return array - np.float32(1)
    if how == "r":
        # GGUF interleaves the two halves of rotary pairs; Hugging Face keeps the halves.
        pairs = array.reshape(-1, sizes["H"] // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)
    return array

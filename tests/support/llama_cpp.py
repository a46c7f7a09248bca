"""llama.cpp's server on loopback, and model directories in the form that it reads.

Run as a program, it serves a GGUF file until its standard input is closed.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
Change = Callable[[str, np.ndarray], np.ndarray]


def unchanged(name: str, array: np.ndarray) -> np.ndarray:
    return array


def write_gguf(
    model: Path,
    path: Path,
    *,
    change: Change = unchanged,
    quantise: gguf.GGMLQuantizationType | None = None,
    template: str | None = None,
) -> Path:
    """The weights of a Llama model in the form that llama.cpp reads.

    Args:
        change: makes other weights of those of a name.
        quantise: the type of matrices [float32].
        template: of chats [the model's own].
    """
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = {**tokenizer["model"]["vocab"], **added}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[token] for token in tokens] == list(range(config["vocab_size"]))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if t in added else kinds.NORMAL for t in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    if chat := template or settings.get("chat_template"):
        writer.add_chat_template(chat)
    for name, array in load_file(model / "model.safetensors").items():
        stored_name, values = renamed(name, change(name, array), config["head_dim"])
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(
                stored_name, gguf.quants.quantize(values, quantise), raw_dtype=quantise
            )
        else:
            writer.add_tensor(stored_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def renamed(name: str, array: np.ndarray, head_dim: int) -> tuple[str, np.ndarray]:
    assert array.dtype == np.float32
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight":
             "output_norm.weight"}  # fmt: skip
    if name in outer:
        return outer[name], array
    _, _, layer, *parts, _ = name.split(".")
    module = NAMES[".".join(parts)]
    if module in ("attn_q", "attn_k"):  # there a rotary pair lies side by side
        halves = array.reshape(-1, 2, head_dim // 2, array.shape[1])
        array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
    return f"blk.{layer}.{module}.weight", array


def open_server(path: Path, context: int = 128, parallel: int = 1) -> Any:
    """A server that computes in float32, with one thread."""
    llama: Any = xllamacpp  # a compiled module without types
    params = llama.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context * parallel, parallel, 0
    # by default it keeps keys and values in float16
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.verbosity = False, -1
    return llama.Server(params)


@contextmanager
def served(path: Path, context: int = 512, parallel: int = 4) -> Iterator[str]:
    """The address of a server of a GGUF file, in a process of its own."""
    command = [sys.executable, __file__, str(path), str(context), str(parallel)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout and process.stdin
        try:
            yield next(line for line in process.stdout if line.startswith("http")).strip()
        finally:
            process.kill()


if __name__ == "__main__":
    server = open_server(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()

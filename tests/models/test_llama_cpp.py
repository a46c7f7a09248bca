"""Next-token log-probabilities, compared with llama.cpp, which shares no code with HF or jax."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import xllamacpp
from safetensors.numpy import load_file

import spile
from spile.models.files.demo import demo_model

TOLERANCE = 1e-3  # in nats; 4e-4 was measured
CANDIDATES = 1000  # most likely tokens compared at each place
TEXTS = (
    "The old mill by the river had not turned for twenty years, and the boys of the village",
    "def area(radius):\n    return 3.14159 * radius ** 2",
)
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(model: Path, path: Path) -> None:
    """The same float32 weights in the form that llama.cpp reads."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
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
    for name, array in load_file(model / "model.safetensors").items():
        writer.add_tensor(*renamed(name, array, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as directory:  # half a gigabyte: not pytest's, which stays
        path = Path(directory) / "demo.gguf"
        write_gguf(demo_model(), path)
        llama: Any = xllamacpp  # a compiled module without types
        params = llama.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = 128, 1, 0
        # by default it keeps keys and values in float16
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.verbosity = False, -1
        yield llama.Server(params)


def predictions(server: Any, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The most likely next tokens, and their log-probabilities."""
    answer = server.handle_completions(
        {"prompt": prompt, "max_tokens": 1, "n_probs": CANDIDATES, "temperature": 0.0}
    )
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert len(top) == CANDIDATES
    return np.array([each["id"] for each in top]), np.array([each["logprob"] for each in top])


@pytest.mark.full
def test_the_demo_models_log_probabilities_are_llama_cpps(server: Any, tmp_path: Path) -> None:
    corpus = tmp_path / "docs.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    recipe = spile.Recipe(
        model="demo", corpus=str(corpus), taps="logits,logprob", seq_len=64, compute_dtype="float32"
    )
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    met, places, furthest = 0, 0, 0.0
    for doc in range(len(TEXTS)):
        document = ds.document(doc)
        ids = document.index["token_id"].tolist()
        logits = document.read("logits").astype(np.float64)
        logs = logits - logits.max(axis=-1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
        logprob = document.read("logprob")
        for place in range(len(ids)):
            likely, wanted = predictions(server, ids[: place + 1])
            assert np.abs(logs[place, likely] - wanted).max() <= TOLERANCE, (doc, place)
            furthest = max(furthest, np.abs(logs[place - 1, likely] - wanted).max())
            places += 1
            if place + 1 < len(ids) and ids[place + 1] in likely:
                next_one = wanted[likely == ids[place + 1]][0]
                assert abs(logprob[place] - next_one) <= TOLERANCE, (doc, place)
                met += 1
    assert places > 30
    assert met > 0.8 * places, "most texts are likely"
    assert furthest > 1000 * TOLERANCE, "the control, one place off, must fail"

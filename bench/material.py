"""The inputs of bench/gpu.py: a model of real shapes with random weights, and a corpus."""

import json
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN = 2048
SHAPES = {  # width, mlp, layers, heads, kv heads, vocabulary: as Qwen2.5 has them
    "tiny": (64, 128, 16, 4, 2, 1024),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "14B": (5120, 13_824, 48, 40, 8, 152_064),
}


def config_of(shape: str) -> dict[str, Any]:
    width, mlp, layers, heads, kv_heads, vocab = SHAPES[shape]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocab,
        "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "use_sliding_window": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def make_model(directory: Path, shape: str) -> None:
    """Write random weights under which activations keep a realistic size, and a tokenizer."""
    import ml_dtypes
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    from spile.core.tensors import build_header
    from spile.models.config.hf_config import read_config
    from spile.models.files.checkpoint import Checkpoint

    directory.mkdir(parents=True)
    config = config_of(shape)
    (directory / "config.json").write_text(json.dumps(config))
    family, arch = read_config(config, "bench")
    shapes = Checkpoint(directory, family, arch, {}, (), family.prefixes[0]).shapes()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (directory / "model.safetensors").open("wb") as file:
        file.write(build_header((n, ml_dtypes.bfloat16, s) for n, s in shapes.items()))
        for name, size in shapes.items():
            scale = 1.0 if len(size) == 1 else size[-1] ** -0.5
            values = torch.randn(size, device=device, dtype=torch.bfloat16) * scale
            if "norm" in name:
                values = values.abs()
            file.write(values.view(torch.int16).cpu().numpy().data)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size = min(32_000, config["vocab_size"])
    trainer = BpeTrainer(vocab_size=size, special_tokens=["<s>"], show_progress=False)
    tokenizer.train_from_iterator(demo_texts(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>",
                "pad_token": "<s>"}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def demo_texts() -> list[str]:
    from spile.corpus.files import find_files

    with find_files("demo")[0].open() as stream:
        return [json.loads(line)["text"] for line in stream.read().decode().splitlines()]


def make_corpus(path: Path, model: Path, tokens: int) -> float:
    """Write pieces of the demo's text, of natural lengths; return their mean length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = " ".join(demo_texts()).split(" ")
    per_word = len(tokenizer.encode(" ".join(words[:20_000])).ids) / 20_000
    rng = np.random.default_rng(0)
    total = documents = 0
    with path.open("w") as file:
        while total < tokens:
            length = int(min(SEQ_LEN, rng.lognormal(np.log(600), 1.0)))
            count = max(1, int(length / per_word))
            start = int(rng.integers(0, len(words) - count))
            file.write(json.dumps({"text": " ".join(words[start : start + count])}) + "\n")
            total += length
            documents += 1
    return total / documents

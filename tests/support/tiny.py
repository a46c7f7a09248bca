"""Small real things for tests: a byte tokenizer, random checkpoints, corpora, and the command.

Checkpoints are written with numpy alone, in the layout `transformers` uses, so that most tests
need no torch; parity tests make theirs with `transformers` itself.
"""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from spile.core.tensors import write_tensors
from spile.models.config.arch import Arch
from spile.models.config.hf_config import read_config
from spile.models.config.specs import block_specs, head_specs, outer_specs
from spile.models.files.checkpoint import Checkpoint
from support import zygote

BOS, EOS = 256, 257
VOCAB = 260

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def num_params(arch: Arch, layers: int, *, head: bool) -> int:
    """Count the parameters of the first `layers` blocks, with or without the head."""
    late = set() if head else {spec.name for spec in head_specs(arch)}
    outer = [spec for spec in outer_specs(arch) if spec.name not in late]
    blocks = (spec for layer in arch.layers[:layers] for spec in block_specs(arch, layer))
    return sum(math.prod(spec.shape) for spec in (*blocks, *outer))


def write_tokenizer(directory: Path) -> None:
    """A tokenizer whose ids are bytes (permuted as byte-level BPE does), with a leading BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint; `changes` go into its config."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    write_tensors(directory / "model.safetensors", random_tensors(config, seed))
    return directory


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint, by their published names."""
    family, arch = read_config(config, "test")
    rng = np.random.default_rng(seed)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    checkpoint = Checkpoint(Path(), family, arch, {}, (), family.prefixes[0])
    return {name: values(shape) for name, shape in checkpoint.shapes().items()}


def words(rng: np.random.Generator, count: int) -> str:
    letters = "etaoinshrdlu"
    return " ".join(
        "".join(rng.choice(list(letters), rng.integers(1, 8))) for _ in range(max(1, count))
    )


def write_corpus(path: Path, documents: int = 40, *, seed: int = 0, mean: float = 2.3) -> Path:
    """JSONL of documents of log-normal lengths (in words)."""
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(documents):
            text = words(rng, int(rng.lognormal(mean, 0.8)))
            file.write(json.dumps({"text": text, "id": number}) + "\n")
    return path


def spile(*arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    options = {"env": environment(), **options}
    result = zygote.run([sys.executable, "-m", "spile.cli", *arguments], **options)
    if check and result.returncode:
        raise AssertionError(f"exit {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start the command and return at once."""
    return zygote.Popen(
        [sys.executable, "-m", "spile.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def environment() -> dict[str, str]:
    """Environment variables: processes under test run on the CPU, without warnings.

    (But jax may: of a program that another process is just adding to the tests' cache.)
    """
    warnings = "default,ignore:Error reading persistent compilation cache"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": warnings}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])

"""GGUF files, written as llama.cpp's converter writes them, become the models they came from."""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from spile.core.errors import InputError
from spile.core.tensors import map_tensor, read_header
from spile.models.files import gguf as converter
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.gguf import convert
from support import zygote
from support.ggufs import (
    CASES,
    HEADS,
    INNER,
    KV,
    LAYERS,
    META,
    RMS,
    VOCAB,
    WIDTH,
    Types,
    as_stored,
    byte_tokens,
    interleave,
    llama3_divisors,
    source,
    write_case,
    write_gguf,
)
from support.marks import some


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def loaded(dest: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(dest).eval()


@pytest.mark.parametrize(
    "case", some(CASES, "llama 3", "gemma3", "phi3 long, partly rotated", "gpt2")
)
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


QUANTISED = itertools.product(
    [Types.F16, Types.BF16, Types.Q8_0, Types.Q4_0, Types.Q5_1], ["llama", "gpt2", "gemma2"]
)
FEW = ((Types.Q5_1, "llama"), (Types.BF16, "gpt2"), (Types.Q8_0, "gemma2"))


@pytest.mark.parametrize(("kind", "case"), some(QUANTISED, *FEW))
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
    """Random bytes that are finite numbers of this type."""
    rng = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.zeros((rows * columns // block, size), np.uint8)
    bad = np.ones(len(blocks), bool)
    while bad.any():
        blocks[bad] = rng.integers(0, 256, (bad.sum(), size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            bad = ~np.isfinite(gguf.quants.dequantize(blocks, kind)).all(axis=1)
    return blocks.reshape(rows, -1)


def with_layers(stored: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """A model of more blocks, all equal to the first one."""
    first = {name: array for name, array in stored.items() if name.startswith("blk.0.")}
    more = {
        name.replace("blk.0.", f"blk.{layer}."): array
        for layer in range(LAYERS, layers)
        for name, array in first.items()
    }
    return {**stored, **more}


def test_every_quantisation_is_read(tmp_path: Path) -> None:
    """All quantizations in one file, each in its own block."""
    kinds = [kind for kind in Types if kind.name in vars(gguf.quants)]
    assert len(kinds) > 15
    data = {f"blk.{i}.ffn_down.weight": random_blocks(k, WIDTH, INNER) for i, k in enumerate(kinds)}
    stored = {**with_layers(as_stored("llama", source("llama")), len(kinds)), **data}
    meta = {**CASES["llama"][3], **byte_tokens(), "block_count": len(kinds)}
    types = dict(zip(data, kinds, strict=True))
    convert(write_gguf(tmp_path / "m.gguf", "llama", meta, stored, types), tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    header = read_header(weights)
    for layer, (kind, blocks) in enumerate(zip(kinds, data.values(), strict=True)):
        found = map_tensor(weights, header[f"model.layers.{layer}.mlp.down_proj.weight"])
        assert np.array_equal(found, gguf.quants.dequantize(blocks, kind)), kind.name
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
    with pytest.raises(InputError, match="'int8' is not supported; choose float32"):
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
    stored = with_layers(as_stored("gemma2", source("gemma2")), layers)
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
    "frequencies": ("llama", {}, {"rope_freqs.weight": ONES * 3}, "not a known rotary scaling"),
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


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_case(tmp_path / "m.gguf")
    content = path.read_bytes()
    for keep in (0.0, 0.0001, 0.01, 0.2, 0.6, 0.99):
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


@pytest.mark.parametrize(
    ("name", "nth"),
    some([("as_bytes", "3"), ("write_json", "1"), ("rename", "1")], ("rename", "1")),
)
def test_a_killed_conversion_leaves_no_half_model(name: str, nth: str, tmp_path: Path) -> None:
    path, dest = write_case(tmp_path / "m.gguf"), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(path), str(dest), name, nth]
    assert zygote.run(command, check=False).returncode == -signal.SIGKILL
    assert not dest.exists()
    convert(path, dest)
    assert torch.equal(logits(loaded(dest)), logits(source("llama")))

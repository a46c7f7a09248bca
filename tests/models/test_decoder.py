"""Parity with HF transformers in float32: the ground truth for every tap."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import spile
import tiny
from spile.models.demo import demo_model

TOLERANCE = 2e-5  # of the tap's largest value
ALL_TAPS = (
    "embed,resid_pre:all,resid_mid:all,resid_post:all,attn_out:all,mlp_out:all,final_norm,logits"
)
SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": tiny.BOS,
    "eos_token_id": tiny.EOS,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
THETA: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
MODELS: dict[str, Callable[[], Any]] = {
    "llama-gqa": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama-mha-tied": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True})
    ),
    "llama-mqa-bias": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SMALL, "num_key_value_heads": 1}, attention_bias=True, mlp_bias=True)
    ),
    "llama-head-dim": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=16)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "llama-linear-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        )
    ),
    "llama-dynamic-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, rope_parameters=THETA)),
    "qwen2-mha-tied": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True})
    ),
    "qwen2-yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, rope_parameters=YARN)),
}


def randomised(make: Callable[[], Any], seed: int = 0) -> Any:
    """A model whose every parameter is random: HF's own init leaves norms at 1, biases at 0."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale)
    return model.eval()


def reference(model: Any, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Every tap of one context, by hooks on the HF modules."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            found[name] = value[0].detach().numpy()

        return hook

    def keep_input(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any) -> None:
            found[name] = inputs[0][0].detach().numpy()

        return hook

    handles = [model.model.embed_tokens.register_forward_hook(keep("embed"))]
    handles.append(model.model.norm.register_forward_hook(keep("final_norm")))
    for i, layer in enumerate(model.model.layers):
        handles += [
            layer.input_layernorm.register_forward_pre_hook(keep_input(f"resid_pre.{i}")),
            layer.self_attn.register_forward_hook(keep(f"attn_out.{i}")),
            layer.post_attention_layernorm.register_forward_pre_hook(keep_input(f"resid_mid.{i}")),
            layer.mlp.register_forward_hook(keep(f"mlp_out.{i}")),
            layer.register_forward_hook(keep(f"resid_post.{i}")),
        ]
    with torch.no_grad():
        found["logits"] = model(torch.tensor(token_ids[None].astype(np.int64))).logits[0].numpy()
    for handle in handles:
        handle.remove()
    return found


def contexts_of(ds: spile.Dataset) -> list[tuple[int, int]]:
    """The rows of each context."""
    flags = ds.index(0, ds.num_tokens)["flags"]
    starts = np.flatnonzero(flags & spile.FLAGS["first"])
    return list(zip(starts.tolist(), [*starts[1:].tolist(), ds.num_tokens], strict=True))


def worst_error(
    ds: spile.Dataset, model: Any, contexts: list[tuple[int, int]], shift: int = 0
) -> float:
    """The largest error of any tap, over the tap's largest value; `shift` compares other layers."""
    worst = 0.0
    for start, stop in contexts:
        wanted = reference(model, ds.index(start, stop)["token_id"])
        for tap in ds.taps:
            site, _, layer = tap.partition(".")
            name = f"{site}.{int(layer) + shift}" if layer else tap
            if name in wanted:
                error = np.abs(np.asarray(ds.read(tap, start, stop)) - wanted[name]).max()
                worst = max(worst, error / np.abs(wanted[name]).max())
    return worst


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pack", ["ffd", "none"])
def test_every_tap_agrees_with_hf(name: str, pack: str, tmp_path: Path) -> None:
    model = randomised(MODELS[name])
    model.save_pretrained(tmp_path / "model")
    tiny.write_tokenizer(tmp_path / "model")
    # from a few tokens to several contexts, so that packing and splitting both occur
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 12, seed=3, mean=2.6)
    recipe = spile.Recipe(
        model=str(tmp_path / "model"),
        corpus=str(corpus),
        taps=ALL_TAPS,
        seq_len=96,
        pack=pack,
        compute_dtype="float32",
    )
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    contexts = contexts_of(ds)
    index = ds.index(0, ds.num_tokens)
    assert (index["offset"] >= 96).any(), "no document was split"
    assert len(contexts) > 12

    assert worst_error(ds, model, contexts) <= TOLERANCE
    assert worst_error(ds, model, contexts, shift=1) > 100 * TOLERANCE, "the control must fail"


def test_the_demo_model_agrees_with_hf_on_every_tap(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    recipe = spile.Recipe(
        model="demo",
        corpus="demo",
        taps="embed,resid_pre:0+15,resid_mid:7,attn_out:3+29,mlp_out:11+29,"
        "resid_post:0+20+28+29,final_norm",
        seq_len=64,
        max_docs=3,
        compute_dtype="float32",
    )
    spile.extract(recipe, str(directory))
    ds = spile.open(str(directory))
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()
    contexts = contexts_of(ds)[:6]
    assert worst_error(ds, model, contexts) <= TOLERANCE
    assert worst_error(ds, model, contexts, shift=1) > 100 * TOLERANCE


def test_a_document_is_the_same_alone_and_packed(tmp_path: Path, model: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 20, seed=5)
    lines = corpus.read_text().splitlines()
    common: dict[str, Any] = {
        "model": str(model),
        "taps": "resid_post:all",
        "compute_dtype": "float32",
    }
    spile.extract(spile.Recipe(corpus=str(corpus), **common), str(tmp_path / "packed"))
    packed = spile.open(str(tmp_path / "packed"))
    for doc in (0, 7, 19):
        alone_corpus = tmp_path / f"{doc}.jsonl"
        alone_corpus.write_text(lines[doc] + "\n")
        out = tmp_path / f"out{doc}"
        spile.extract(spile.Recipe(corpus=str(alone_corpus), **common), str(out))
        alone = spile.open(str(out)).document(0)
        together = packed.document(doc)
        assert np.array_equal(alone.index["token_id"], together.index["token_id"])
        for tap in packed.taps:
            a, b = alone.read(tap), together.read(tap)
            assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch without bf16 hardware
def test_bfloat16_stays_within_its_own_floor(tmp_path: Path) -> None:
    """Twice HF-bfloat16's own distance from HF-float32."""
    model = randomised(MODELS["qwen2"])
    model.save_pretrained(tmp_path / "model")
    tiny.write_tokenizer(tmp_path / "model")
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 6, seed=3)
    recipe = spile.Recipe(
        model=str(tmp_path / "model"),
        corpus=str(corpus),
        taps="resid_post:all,final_norm",
        seq_len=96,
        compute_dtype="bfloat16",
        store_dtype="float32",
    )
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    coarse = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    for start, stop in contexts_of(ds)[:4]:
        tokens = torch.tensor(ds.index(start, stop)["token_id"][None].astype(np.int64))
        with torch.no_grad():
            exact = model(tokens, output_hidden_states=True).hidden_states
            rough = coarse(tokens, output_hidden_states=True).hidden_states
        for layer in range(2):
            want = exact[layer + 1][0].numpy()
            floor = np.abs(rough[layer + 1][0].float().numpy() - want).mean()
            ours = np.abs(ds.read(f"resid_post.{layer}", start, stop) - want).mean()
            assert ours <= 2 * floor


def test_configs_written_by_transformers_5_and_4_load_alike(tmp_path: Path) -> None:
    model = randomised(MODELS["llama3-rope"])
    model.save_pretrained(tmp_path / "model")
    tiny.write_tokenizer(tmp_path / "model")
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 4)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    assert "rope_parameters" in config, "transformers 5 writes rope_parameters"
    rows = []
    for number in range(2):
        recipe = spile.Recipe(
            model=str(tmp_path / "model"), corpus=str(corpus), taps="resid_post:2",
            compute_dtype="float32",
        )  # fmt: skip
        spile.extract(recipe, str(tmp_path / f"out{number}"))
        ds = spile.open(str(tmp_path / f"out{number}"))
        rows.append(np.array(ds.read("resid_post.2", 0, ds.num_tokens)))
        scaling = dict(config["rope_parameters"])
        old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
        old |= {"rope_theta": scaling.pop("rope_theta"), "torch_dtype": "float32"}
        path.write_text(json.dumps({**old, "rope_scaling": scaling}))
    assert np.array_equal(rows[0], rows[1])

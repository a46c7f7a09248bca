"""`spile lens fit`: sums over a corpus in a dataset of their own, and the lens that follows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import spile
from chaos.harness import check_sound, run
from spile.models.files.lenses import open_lens

LAYERS = 3  # of the tiny model


def fitted(model: Path, corpus: Path, out: Path, kind: str, *more: str) -> None:
    words = (
        "lens", "fit", "--model", model, "--corpus", corpus, "--kind", kind, "--out", out,
        "--seq-len", "32", "--unit-tokens", "700", "--compute-dtype", "float32", *more,
    )  # fmt: skip
    assert run(*words).code == 0


def test_a_tuned_lens_is_the_map_of_least_squares(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    fitted(model, corpus, tmp_path / "lens", "tuned", "--ridge", "0")
    check_sound(tmp_path / "lens/sums")
    config = json.loads((tmp_path / "lens/config.json").read_text())
    assert config["lens_type"] == "linear_tuned_lens" and config["bias"] is True
    state = torch.load(tmp_path / "lens/params.pt", weights_only=True)
    assert list(state) == [f"{n}.{name}" for n in range(LAYERS) for name in ("weight", "bias")]
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_pre:0,resid_post:all", seq_len=32,
        compute_dtype="float32", where="pos >= 1",
    )  # fmt: skip
    spile.extract(recipe, tmp_path / "rows", progress=False)
    rows = spile.open(str(tmp_path / "rows"))
    y = rows.read(f"resid_post.{LAYERS - 1}").astype(np.float64)
    for number, tap in enumerate(("resid_pre.0", "resid_post.0", "resid_post.1")):
        x = rows.read(tap).astype(np.float64)
        wanted, *_ = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y - x, rcond=None)
        weight, bias = state[f"{number}.weight"].numpy(), state[f"{number}.bias"].numpy()
        assert weight.dtype == np.float32
        found = x @ weight.T.astype(np.float64) + bias
        made = x @ wanted[:-1] + wanted[-1]
        assert np.abs(found - made).max() < 1e-3 * np.abs(y).max()
    lens = open_lens(str(tmp_path / "lens"))
    assert lens.layers == (0, 1) and (lens.load(0)["matrix"] == state["1.weight"].numpy()).all()


def torch_jacobians(model: Path, prompts: list[np.ndarray]) -> dict[int, np.ndarray]:
    """The estimator of github.com/anthropics/jacobian-lens, as its paper defines it, in torch."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    streams: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(network.model.layers):

        def keep(_: Any, __: Any, out: Any, number: int = number) -> Any:
            found = out[0] if isinstance(out, tuple) else out
            streams[number] = found.requires_grad_() if number == 0 else found

        layer.register_forward_hook(keep)
    last = len(network.model.layers) - 1
    sums = {layer: 0.0 for layer in range(last)}
    for prompt in prompts:
        network(torch.tensor(prompt.tolist())[None])
        valid = torch.arange(16, len(prompt) - 1)
        rows = []
        for channel in range(streams[last].shape[-1]):
            cotangent = torch.zeros_like(streams[last])
            cotangent[0, valid, channel] = 1.0
            sources = [streams[layer] for layer in range(last)]
            gradients = torch.autograd.grad(streams[last], sources, cotangent, retain_graph=True)
            rows.append([each[0, valid].mean(dim=0) for each in gradients])
        for layer in range(last):
            sums[layer] += torch.stack([row[layer] for row in rows]).detach().numpy()
    return {layer: np.asarray(total) / len(prompts) for layer, total in sums.items()}


def test_a_jacobian_lens_is_that_of_torchs_autograd(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line)["text"] for line in corpus.read_text().splitlines()[:8]]
    texts = tmp_path / "texts.jsonl"  # every other one is too short to be a prompt
    texts.write_text(
        "".join(
            json.dumps({"text": t[: 10 if n % 2 else None]}) + "\n" for n, t in enumerate(lines)
        )
    )
    fitted(
        model, texts, tmp_path / "lens", "jacobian", "--unit-tokens", "80", "--batch-tokens", "64"
    )
    check_sound(tmp_path / "lens/sums")
    told = spile.open(str(tmp_path / "lens/sums"))
    assert told.num_units > 1 and told.recipe.where == "pos >= 16 and (not last)"
    recipe = spile.Recipe(
        model=str(model), corpus=str(texts), taps="embed", seq_len=32, long_docs="truncate",
    )  # fmt: skip
    spile.extract(recipe, tmp_path / "rows", progress=False)
    rows = spile.open(str(tmp_path / "rows"))
    tokens = [rows.document(doc).index["token_id"] for doc in range(8)]
    prompts = [each for each in tokens if len(each) > 17]
    assert len(prompts) == 4
    found = torch.load(tmp_path / "lens/lens.pt", weights_only=True)
    assert found["n_prompts"] == len(prompts) and found["source_layers"] == [0, 1]
    for layer, wanted in torch_jacobians(model, prompts).items():
        own = told.reduced(f"resid_post.{layer}").means[0]
        np.testing.assert_allclose(own, wanted, atol=2e-5 * np.abs(wanted).max())
        stored = found["J"][layer].float().numpy()
        np.testing.assert_allclose(stored, wanted, atol=1e-3 * np.abs(wanted).max())


def test_a_lens_is_made_again_from_its_sums_with_the_same_bytes(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    fitted(model, corpus, tmp_path / "lens", "tuned", "--max-docs", "20")
    params = tmp_path / "lens/params.pt"
    before = params.read_bytes()
    params.unlink()
    fitted(model, corpus, tmp_path / "lens", "tuned", "--max-docs", "20")
    assert params.read_bytes() == before

"""`spile lens fit`: sums over a corpus in a dataset of their own, and the lens that follows."""

import json
from pathlib import Path

import numpy as np
import torch

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


def test_a_lens_is_made_again_from_its_sums_with_the_same_bytes(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    fitted(model, corpus, tmp_path / "lens", "tuned", "--max-docs", "20")
    params = tmp_path / "lens/params.pt"
    before = params.read_bytes()
    params.unlink()
    fitted(model, corpus, tmp_path / "lens", "tuned", "--max-docs", "20")
    assert params.read_bytes() == before

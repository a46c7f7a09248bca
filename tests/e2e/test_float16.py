"""`--compute-dtype float16`: rows against float32 and HF, and with everything that rows meet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.check.compare import check
from spile.core.config import Recipe, Runtime
from spile.core.errors import DriftError
from spile.core.tensors import write_tensors
from support import saes, tiny

TAPS = "embed,resid_post:1+2,q:1,logits"
RATIO = 1 / 4  # of bfloat16's distance from float32: three more bits, and a stream in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float16")
    tiny.write_model(folder / "model")
    tiny.write_corpus(folder / "docs.jsonl", 12)
    saes.write_sae(folder / "sae", "topk", rescale_acts_by_decoder_norm=True)
    return folder


def extracted(
    folder: Path, out: str, dtype: str | None, runtime: Runtime | None = None, **more: Any
) -> spile.Dataset:
    given: dict[str, Any] = {
        "model": str(folder / "model"), "corpus": str(folder / "docs.jsonl"), "taps": TAPS,
        "seq_len": 64, "compute_dtype": dtype, "store_dtype": "float32", **more,
    }  # fmt: skip
    if not (folder / out).exists():
        spile.extract(Recipe(**given), str(folder / out), runtime or Runtime(batch_tokens=256))
    return spile.open(str(folder / out))


def distances(found: spile.Dataset, wanted: spile.Dataset, taps: Sequence[str]) -> np.ndarray:
    """The mean distance of a tap's rows, over the mean length."""
    return np.array([
        np.linalg.norm(found.read(tap).astype(np.float32) - wanted.read(tap), axis=-1).mean()
        / np.linalg.norm(wanted.read(tap), axis=-1).mean()
        for tap in taps
    ])  # fmt: skip


@pytest.mark.full
def test_rows_are_far_closer_to_float32_than_those_of_bfloat16(folder: Path) -> None:
    exact, ours, coarse = (extracted(folder, d, d) for d in ("float32", "float16", "bfloat16"))
    taps = ["embed", "resid_post.1", "resid_post.2", "logits"]
    assert (distances(ours, exact, taps) < RATIO * distances(coarse, exact, taps)).all()


def test_check_finds_them_as_close_as_hf_in_float16(folder: Path) -> None:
    extracted(folder, "float16", "float16")
    report = check(str(folder / "float16"), samples=4)
    assert report.ok and "in float32" in report.reference


@pytest.mark.parametrize("kept", ["disk", "resident"])
def test_where_weights_are_kept_changes_no_row(kept: str, folder: Path) -> None:
    ours = extracted(folder, "float16", "float16")
    again = extracted(folder, kept, "float16", Runtime(batch_tokens=256, weights=kept))
    for tap in ours.taps:
        np.testing.assert_array_equal(again.read(tap), ours.read(tap))


@pytest.mark.full
def test_rows_may_be_stored_as_int8_and_as_latents(folder: Path) -> None:
    exact = extracted(folder, "float32", "float32")
    small = extracted(folder, "int8", "float16", taps="resid_post:2", store_dtype="int8")
    assert distances(small, exact, ["resid_post.2"])[0] < 0.02
    given: dict[str, Any] = {"taps": "resid_post:1", "encode": f"resid_post.1={folder}/sae"}
    ours, wide = (extracted(folder, f"latents-{d}", d, **given) for d in ("float16", "float32"))
    found, wanted = (np.sort(each.read(each.taps[0])) for each in (ours, wide))
    np.testing.assert_allclose(found, wanted, atol=0.02 * wanted.max())


@pytest.mark.full
def test_a_changed_model_computes_in_float16_too(folder: Path) -> None:
    np.save(folder / "far.npy", np.full(32, 3.0, np.float32))
    given: dict[str, Any] = {
        "splice": f"steer:resid_post.1={folder}/far.npy",
        "taps": "resid_post:2",
    }
    ours, wide = (extracted(folder, f"steered-{d}", d, **given) for d in ("float16", "float32"))
    assert distances(ours, wide, ["resid_post.2"])[0] < 2e-3
    exact = extracted(folder, "float32", "float32")
    assert distances(wide, exact, ["resid_post.2"])[0] > 0.05


def test_a_dataset_begun_in_another_dtype_is_not_continued_in_float16(folder: Path) -> None:
    extracted(folder, "bfloat16", "bfloat16")
    recipe = Recipe(compute_dtype="float16")
    with pytest.raises(DriftError, match="compute_dtype") as caught:
        spile.extract(recipe, str(folder / "bfloat16"))
    assert "bfloat16" in str(caught.value) and "float16" in str(caught.value)
    tiny.write_corpus(folder / "more.jsonl", 3, seed=1)
    more = Recipe(add_corpus=str(folder / "more.jsonl"))
    extracted(folder, "grown", "float16", taps="resid_post:0")
    spile.extract(more, str(folder / "grown"))
    assert spile.open(str(folder / "grown")).recipe.compute_dtype == "float16"


def test_check_takes_bfloat16_where_hf_overflows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """HF's stream is in float16, too; Spile's is not."""
    tensors = tiny.random_tensors(tiny.CONFIG)
    tensors["model.layers.1.mlp.up_proj.weight"] *= np.float32(50)
    tensors["model.layers.1.mlp.down_proj.weight"] *= np.float32(1e4)
    tiny.write_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    write_tensors(tmp_path / "model" / "model.safetensors", tensors)
    tiny.write_corpus(tmp_path / "docs.jsonl", 4)
    ours = extracted(tmp_path, "float16", "float16", taps="resid_post:1")
    assert np.abs(ours.read("resid_post.1")).max() > 65504
    found = check(str(tmp_path / "float16"), samples=2).taps["resid_post.1"]
    assert 0 < found.error <= found.floor < 0.05  # (such rows hardly differ from the next block's)
    assert "the floor is its distance in bfloat16" in caplog.text

"""Sparse latents from end to end: stored values are those that the encoder computes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spile
from chaos.harness import check_refused, run
from spile.check import compare as recheck
from spile.check.compare import RowLatents, SparseTap, check
from spile.cli.model import check_text
from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError
from spile.dataset.maintain.verify import verify
from spile.dataset.read.latents import top_rows
from spile.objects import LocalObjects
from spile.status.status import read_status
from support import saes

VALUES, IDS, ERROR = "resid_post_latents.1", "resid_post_latent_ids.1", "resid_post_error.1"
KEPT = 12
OPTIONS = {"seq_len": 64, "unit_tokens": 900, "compute_dtype": "float32"}


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saes.write_sae(tmp_path_factory.mktemp("sae") / "sae", hook="blocks.1.hook_resid_post")


@pytest.fixture(scope="module")
def recipe(model: Path, corpus: Path, sae: Path) -> Recipe:
    return Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1,mlp_out:0", encode=str(sae),
        latents=KEPT, encode_error=True, **OPTIONS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def out(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "out"
    spile.extract(recipe, str(path))
    return path


def test_the_rows_are_the_encoders_largest_latents_of_the_models_rows(
    recipe: Recipe, out: Path, tmp_path: Path
) -> None:
    plain = Recipe(model=recipe.model, corpus=recipe.corpus, taps=recipe.taps, **OPTIONS)
    spile.extract(plain, str(tmp_path / "plain"))
    dense, ds = spile.open(str(tmp_path / "plain")), spile.open(str(out))
    count = ds.num_tokens
    assert np.array_equal(ds.read("mlp_out.0", 0, count), dense.read("mlp_out.0", 0, count))
    wanted = saes.plain_encode(
        dense.read("resid_post.1", 0, count), saes.random_tensors("jumprelu"), "jumprelu"
    )
    least = -np.sort(-wanted, axis=1)[:, KEPT - 1 : KEPT]
    found = ds.latents("resid_post.1", 0, count)
    assert found.width == 80
    np.testing.assert_allclose(found.dense(), np.where(wanted >= least, wanted, 0), atol=1e-4)
    more = np.count_nonzero(wanted, axis=1) > KEPT
    assert 0 < more.sum() == ds.statistics(VALUES).truncated
    # Where a latent is largest, with its document.
    best = top_rows(ds, "resid_post.1", int(found.ids[0]), 5)
    assert np.array_equal(ds.index(0, count)[best.rows], best.index)
    assert ds.about(int(best.index["doc"][0]))["doc"] == best.index["doc"][0]


def test_the_dataset_is_sound_and_agrees_with_the_reference(out: Path) -> None:
    report = verify(LocalObjects(out))
    assert report.ok and report.rows
    checked = check(str(out), samples=2)
    assert {*checked.taps} == {VALUES, ERROR, "mlp_out.0"}
    assert checked.ok and checked.taps[VALUES].error < 1e-5
    made = checked.taps[ERROR].reconstruction
    assert made and made.replaced_loss and abs(made.replaced_loss - made.loss) > 1e-3
    text = check_text("OUT", checked)
    assert f"{ERROR}: {made.error:.3g} of the rows' length is not reconstructed" in text
    assert f"{made.replaced_loss:.4g} with its reconstructions in their place" in text
    told = json.loads(json.dumps(checked.to_json()))["taps"][ERROR]["reconstruction"]
    assert told["replaced_loss"] == made.replaced_loss


def test_check_finds_latents_that_are_others(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned(SparseTap):
        def encode(self, rows: np.ndarray) -> RowLatents:
            top = super().encode(rows)
            return RowLatents(top.values, top.ids[:, ::-1])

    monkeypatch.setattr(recheck, "SparseTap", Turned)
    checked = check(str(out), samples=1)
    assert not checked.taps[VALUES].ok and checked.taps["mlp_out.0"].ok


def test_out_alone_resumes_and_another_encoder_is_refused(
    out: Path, recipe: Recipe, tmp_path: Path
) -> None:
    outcome = spile.extract(Recipe(), str(out))
    assert outcome.complete and {*outcome.truncated} == {VALUES}
    moved = saes.write_sae(tmp_path / "moved", hook="blocks.1.hook_resid_post")
    assert spile.extract(Recipe(encode=str(moved)), str(out)).complete
    other = saes.write_sae(tmp_path / "other", seed=1, hook="blocks.1.hook_resid_post")
    for change, named in (
        (Recipe(encode=str(other)), "encode resid_post.1"),
        (Recipe(latents=KEPT + 1), "latents"),
        (dataclasses.replace(recipe, encode_error=False), "encode_error: stored True, now False"),
    ):
        with pytest.raises(DriftError, match=named):
            spile.extract(change, str(out))


def test_the_command_plans_runs_and_says_what_was_cut_off(
    model: Path, corpus: Path, sae: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(model), "--corpus", str(corpus), "--taps", "resid_post:1", "--encode",
             str(sae), "--latents", "5", "--seq-len", "64", "--max-docs", "9"]  # fmt: skip
    plan = run("plan", "--calibrate", "off", *flags, "--json").json
    assert {*plan["bytes_per_tap"]} == {VALUES, IDS}
    assert plan["bytes_per_tap"][IDS] == plan["rows"] * 5 * 2
    by_dtype = plan["bytes_by_dtype"]
    assert by_dtype["float32"] - by_dtype["bfloat16"] == plan["rows"] * 5 * 2
    said = run("extract", *flags, "--out", tmp_path / "out").out
    assert f"{VALUES}: in " in said and "more latents were active than were kept" in said
    assert read_status(LocalObjects(tmp_path / "out")).taps == {VALUES: [5], IDS: [5]}


def test_pt_files_and_transcoders_encode_a_whole_model(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    """Directories of Qwen-Scope and circuit-tracer: each tap has its layer's encoder, and error."""
    transcoders = saes.write_transcoders(tmp_path / "transcoders", range(2))
    scope = tmp_path / "SAE-Res-Tiny-W1K-L0_9"
    scope.mkdir()
    for layer in range(2):
        tensors = saes.random_tensors("topk", seed=layer)
        turned = {n: torch.from_numpy(t).T if t.ndim == 2 else torch.from_numpy(t)
                  for n, t in tensors.items()}  # fmt: skip
        torch.save(turned, scope / f"layer{layer}.sae.pt")
    taps = "resid_post:0-1,mlp_in:0-1,mlp_out:0-1"
    options: dict[str, Any] = {"model": str(model), "corpus": str(corpus), **OPTIONS, "max_docs": 9}
    spile.extract(Recipe(taps=taps, **options), str(tmp_path / "dense"))
    options |= {"encode": f"{scope},{transcoders}", "latents": 80, "encode_error": True}
    spile.extract(Recipe(taps=taps, **options), str(tmp_path / "out"))
    dense, ds = spile.open(str(tmp_path / "dense")), spile.open(str(tmp_path / "out"))
    for layer in range(2):
        for tap, kind in ((f"resid_post.{layer}", "topk"), (f"mlp_in.{layer}", "jumprelu")):
            rows = dense.read(tap, 0, dense.num_tokens)
            tensors = saes.random_tensors(kind, seed=layer)
            wanted = saes.plain_encode(rows, tensors, kind, subtract=False)
            found = ds.latents(tap, 0, ds.num_tokens).dense()
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            made = found @ tensors["W_dec"] + tensors["b_dec"]
            if kind == "jumprelu":
                made = made + rows @ saes.skip_matrix(layer).T
                rows = dense.read(f"mlp_out.{layer}", 0, dense.num_tokens)
            site, _, number = tap.partition(".")
            error = ds.read(f"{site}_error.{number}", 0, ds.num_tokens)
            np.testing.assert_allclose(error, rows - made, atol=1e-3)
    assert ds.taps[:6] == [
        "mlp_in_latents.0", "mlp_in_latent_ids.0", "mlp_in_error.0", "mlp_out.0",
        "resid_post_latents.0", "resid_post_latent_ids.0",
    ]  # fmt: skip
    # The error of a transcoder needs the rows that it reconstructs.
    with pytest.raises(ConfigError, match="reconstructs blocks.0.hook_mlp_out, which is not among"):
        spile.extract(Recipe(taps="resid_post:0-1,mlp_in:0-1", **options), str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="--encode-error: pooled rows have no error"):
        spile.extract(Recipe(taps=taps, pool="mean:doc", **options), str(tmp_path / "no"))


@pytest.mark.full  # its parts: tests/run/step/test_stored.py, tests/plan/test_cross_layer.py
def test_errors_of_a_cross_layer_transcoder_are_made_and_checked(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = saes.write_cross_layer(tmp_path / "crossing", range(3))
    options: dict[str, Any] = {"model": str(model), "corpus": str(corpus), **OPTIONS, "max_docs": 9}
    taps, out = "resid_mid:0-2,mlp_out:0,mlp_out:2", tmp_path / "out"
    spile.extract(Recipe(taps=taps, **options), str(tmp_path / "dense"))
    recipe = Recipe(taps=taps, encode=str(folder), latents=5, encode_error=True, **options)
    spile.extract(recipe, str(out))
    dense, ds = spile.open(str(tmp_path / "dense")), spile.open(str(out))
    count = ds.num_tokens
    rows = [dense.read(f"resid_mid.{layer}", 0, count) for layer in range(3)]
    tensors = [saes.random_tensors("jumprelu", seed=layer) for layer in range(3)]
    latents = [
        saes.plain_encode(rows[layer], tensors[layer], "jumprelu", subtract=False)
        for layer in range(3)
    ]
    for target in (0, 2):
        made = tensors[target]["b_dec"] + sum(
            latents[n] @ saes.cross_decoders(n, 3)[:, target - n] for n in range(target + 1)
        )
        wanted = dense.read(f"mlp_out.{target}", 0, count) - made
        found = ds.read(f"resid_mid_error.{target}", 0, count)
        np.testing.assert_allclose(found, wanted, atol=1e-3)
    assert "resid_mid_latents.1" in ds.taps and "resid_mid_error.1" not in ds.taps
    assert verify(LocalObjects(out)).ok
    checked = check(str(out), samples=1)
    assert checked.ok and checked.taps["resid_mid_error.2"].reconstruction
    assert checked.taps["resid_mid_error.2"].error < 1e-5
    # The decoders belong to the dataset, too.
    other = saes.write_cross_layer(tmp_path / "other", range(3), decoders_from=200)
    for record in (out / "done").glob("*/*"):
        record.unlink()
    for name in ("manifest.json", "segments/000000.safetensors"):
        (out / name).unlink()
    with pytest.raises(DriftError, match="encoder of resid_mid.0: W_dec"):
        spile.extract(dataclasses.replace(recipe, encode=str(other)), str(out))
    with pytest.raises(ConfigError, match="of a cross-layer transcoder need the values of several"):
        spile.extract(recipe, str(tmp_path / "streamed"), spile.Runtime(weights="disk"))


@pytest.mark.full
def test_errors_are_added_copied_and_dropped_with_their_latents(
    model: Path, corpus: Path, sae: Path, tmp_path: Path
) -> None:
    out, copied = str(tmp_path / "out"), str(tmp_path / "copied")
    options: dict[str, Any] = {**OPTIONS, "max_docs": 9}
    recipe = Recipe(model=str(model), corpus=str(corpus), taps="mlp_out:0", **options)
    spile.extract(recipe, out)
    added = Recipe(
        add_taps="resid_post:1", encode=str(sae), latents=4, encode_error=True, store_dtype="int8"
    )
    spile.extract(added, out)
    ds = spile.open(out)
    assert ds.taps == ["mlp_out.0", VALUES, IDS, ERROR]
    assert verify(LocalObjects(Path(out))).ok
    run("copy", out, copied, "--taps", f"{VALUES},{IDS},{ERROR}")
    # Taps that are added later have no errors unless they ask for them.
    spile.extract(Recipe(add_taps="mlp_in:0"), out)
    again = spile.open(copied)
    assert again.recipe.encode_error and again.taps == [VALUES, IDS, ERROR]
    assert np.array_equal(again.read(ERROR, 0, 50), ds.read(ERROR, 0, 50))
    result = run("copy", out, tmp_path / "part", "--taps", ERROR)
    check_refused(result, 2, "resid_post_error.1 go together; give all of them")
    run("drop", out, "--taps", ERROR)
    assert spile.open(out).taps == ["mlp_in.0", "mlp_out.0"]


def test_an_encoder_that_does_not_fit_is_refused_in_one_line(
    model: Path, corpus: Path, sae: Path, tmp_path: Path
) -> None:
    result = run(
        "extract", "--model", model, "--corpus", corpus, "--taps", "mlp_hidden:1",
        "--encode", f"mlp_hidden.1={sae}", "--out", tmp_path / "out",
    )  # fmt: skip
    check_refused(result, 2, "reads rows of 32 values, but mlp_hidden.1 has 48")
    assert not (tmp_path / "out" / "units.json").exists()


def test_weights_that_changed_unseen_are_noticed_when_they_are_loaded(
    recipe: Recipe, sae: Path, tmp_path: Path
) -> None:
    """Only some blocks of a large file are hashed up front; while it is loaded, all of it is."""
    large = saes.write_sae(tmp_path / "large", latents=9000, hook="blocks.1.hook_resid_post")
    changed = Recipe(
        model=recipe.model, corpus=recipe.corpus, taps="resid_post:1", encode=str(large),
        latents=4, max_docs=2, **OPTIONS,
    )  # fmt: skip
    spile.extract(changed, str(tmp_path / "out"))
    file = large / "sae_weights.safetensors"
    with file.open("r+b") as stream:
        stream.seek(4096 + (70 << 10))  # in W_enc, between the first two blocks
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    for record in (tmp_path / "out" / "done").glob("*/*"):
        record.unlink()
    for name in ("manifest.json", "segments/000000.safetensors"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(DriftError, match="encoder of resid_post.1: W_enc"):
        spile.extract(changed, str(tmp_path / "out"))

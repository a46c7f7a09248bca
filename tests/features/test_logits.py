"""Logits of latents: the decoder's rows times the head, against the plain product."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import spile
from spile.core.errors import ConfigError
from spile.features import logits as module
from spile.features.logits import extremes, read_head
from spile.features.run import FeatureRequest, make_features
from support import saes, tiny


def plain(folder: Path, decoder: np.ndarray) -> np.ndarray:
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    head = tensors[
        "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    ]
    made = (decoder.astype(np.float64) * tensors["model.norm.weight"]) @ head.T
    return made - made.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("tied", [False, True])
def test_extremes_are_those_of_the_whole_product(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOKENS", 37)
    folder = tiny.write_model(tmp_path / "model", tie_word_embeddings=tied)
    decoder = np.random.default_rng(0).standard_normal((7, 32)).astype(np.float32)
    found = extremes(read_head(str(folder), None), decoder, 5, lambda: None)
    wanted = plain(folder, decoder)
    for name, sign in (("raised", -1), ("lowered", 1)):
        order = np.argsort(sign * wanted, axis=1)[:, :5]
        assert np.array_equal(found[f"{name}/ids"], order)
        values = np.take_along_axis(wanted, order, axis=1)
        assert found[f"{name}/value"] == pytest.approx(values, abs=1e-4)


def test_features_of_an_extraction_have_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.features.run.BLOCK", 32)
    model = tiny.write_model(tmp_path / "model")
    sae = saes.write_sae(tmp_path / "sae", "topk")
    recipe = spile.Recipe(
        model=str(model),
        corpus=str(tiny.write_corpus(tmp_path / "docs.jsonl", 6)),
        taps="resid_post:1",
        encode=str(sae),
        latents=8,
        seq_len=32,
    )
    spile.extract(recipe, str(tmp_path / "out"))
    made = make_features(str(tmp_path / "out"), FeatureRequest(logits=4))
    assert (made.latents, made.note) == (80, None)
    features = spile.open(tmp_path / "out").features("resid_post.1")
    wanted = plain(model, load_file(sae / "sae_weights.safetensors")["W_dec"])
    for latent in (0, 31, 32, 79):
        found = features.logits(latent)
        assert found is not None
        assert found.raised.tolist() == np.argsort(-wanted[latent])[:4].tolist()
        assert found.lowered_by == pytest.approx(np.sort(wanted[latent])[:4], abs=1e-4)
    # The encoder is another one now: its logits would not be those of these latents.
    other = saes.write_sae(tmp_path / "other", "topk", seed=1)
    (tmp_path / "out/features/resid_post.1-1/logits/00000001.json").unlink()
    with pytest.raises(ConfigError, match="is not the encoder that made the latents of resid"):
        make_features(str(tmp_path / "out"), FeatureRequest(encode=str(other)))
    assert make_features(str(tmp_path / "out"), FeatureRequest(encode=str(sae))).counted == 0
    assert make_features(str(tmp_path / "out"), FeatureRequest(logits=0)).counted == 0
    again = spile.open(tmp_path / "out").features("resid_post.1").logits(33)
    assert again is not None


def test_taps_beside_the_residual_stream_have_no_logits(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    sae = saes.write_sae(tmp_path / "sae", "topk")
    transcoders = saes.write_transcoders(tmp_path / "all", range(2))
    crossing = saes.write_cross_layer(tmp_path / "crossing", range(2))
    recipe = spile.Recipe(
        model=str(model),
        corpus=str(tiny.write_corpus(tmp_path / "docs.jsonl", 6)),
        taps="attn_in:1,mlp_in:1,mlp_out:1,attn_out:1,resid_mid:1",
        encode=f"attn_in.1={sae},mlp_in.1={transcoders},resid_mid.1={crossing}",
        latents=8,
        seq_len=32,
    )
    out = str(tmp_path / "out")
    spile.extract(recipe, out)
    # All have as many values as the stream. An autoencoder of what a mixer reads writes nothing.
    made = make_features(out, FeatureRequest(tap="attn_in.1", logits=4))
    assert made.note == "no logits: attn_in.1 is no part of the residual stream"
    assert spile.open(out).features("attn_in.1").logits(0) is None
    # A transcoder writes what the MLP adds.
    assert make_features(out, FeatureRequest(tap="mlp_in.1", logits=4)).note is None
    found = spile.open(out).features("mlp_in.1").logits(3)
    wanted = plain(model, saes.random_tensors("jumprelu", seed=1)["W_dec"])
    assert found is not None
    assert found.raised.tolist() == np.argsort(-wanted[3])[:4].tolist()
    made = make_features(out, FeatureRequest(tap="resid_mid.1", logits=4))
    assert made.note is not None and "cross-layer transcoder write to many layers" in made.note
    np.save(tmp_path / "one.npy", np.ones(32))
    request = FeatureRequest(tap="attn_out.1", directions=[str(tmp_path / "one.npy")], logits=4)
    assert make_features(out, request).note is None
    assert spile.open(out).features("attn_out.1:one").logits(0) is not None

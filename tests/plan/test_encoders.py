"""Which encoder belongs to which tap, and the arrays stored for it."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.dataset.format import TapInfo
from spile.models.files.checkpoint import open_checkpoint, read_arch
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.sae import Sae, SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.files.safetensors import read_tensor
from spile.models.taps import parse_taps
from spile.plan.encoders import each_source, find_encoders, gain_before, stored_taps
from support import saes, tiny


def found(
    model: Path, encode: object, taps: str = "resid_post:0-1,mlp_out:1", k: int | None = None
) -> dict[str, SparseEncoder]:
    arch = read_arch(str(model))
    return find_encoders(Recipe(encode=str(encode), latents=k), parse_taps(taps, arch), arch)


def test_an_encoder_finds_its_tap_by_name_by_hook_or_by_being_alone(
    model: Path, tmp_path: Path
) -> None:
    plain = saes.write_sae(tmp_path / "plain")
    hooked = saes.write_sae(tmp_path / "hooked", hook="blocks.1.hook_mlp_out")
    for name in ("resid_post.1", "resid_post:1", "blocks.1.hook_resid_post", "hidden_states[2]"):
        assert {*found(model, f"{name}={plain}")} == {"resid_post.1"}
    assert {*found(model, hooked)} == {"mlp_out.1"}
    assert {*found(model, plain, "resid_mid:2")} == {"resid_mid.2"}
    both = found(model, f"{hooked},resid_post.0={plain}", k=5)
    assert list(both) == ["resid_post.0", "mlp_out.1"], "in the order of the taps"
    assert [encoder.kept for encoder in both.values()] == [5, 5]
    # What was named wins over what an encoder says of itself.
    assert {*found(model, f"resid_post.0={hooked}")} == {"resid_post.0"}


def test_a_directory_may_hold_one_for_each_tap(model: Path, tmp_path: Path) -> None:
    for name, kind in (("resid_post.0", "topk"), ("mlp_out.1", "gated"), ("resid_post.2", "gated")):
        saes.write_sae(tmp_path / name, kind)
    each = found(model, tmp_path)
    assert {tap: encoder.sae.architecture for tap, encoder in each.items()} == {
        "resid_post.0": "topk", "mlp_out.1": "gated",
    }  # fmt: skip


def test_a_directory_may_hold_one_for_each_layer(model: Path, tmp_path: Path) -> None:
    folder = saes.write_transcoders(tmp_path / "all", range(3))
    taps = "mlp_in:0-2,resid_post:1,embed"
    each = found(model, folder, taps)
    assert list(each) == ["mlp_in.0", "mlp_in.1", "mlp_in.2"], "those that read mlp_in"
    assert {e.sae.writes for e in each.values()} == {f"blocks.{n}.hook_mlp_out" for n in range(3)}
    one = found(model, folder / "layer_2.safetensors", taps)["mlp_in.2"]
    assert one == each["mlp_in.2"] == each["mlp_in.1"], "they share one program"
    assert one.sae.identity() == each["mlp_in.2"].sae.identity()
    assert one.sae.identity() != each["mlp_in.1"].sae.identity()
    # What is named wins: the layer is the tap's.
    named = found(model, f"resid_post.1={folder}", taps)
    assert {tap: e.sae.identity() for tap, e in named.items()} == {
        "resid_post.1": each["mlp_in.1"].sae.identity()
    }
    with pytest.raises(ConfigError, match=r"of layers 0 to 2 \(blocks.1.mlp.hook_in\), and none"):
        found(model, folder, "resid_post:1,mlp_out:1")
    (folder / "config.yaml").unlink()
    assert {*found(model, folder, "resid_mid:1-2")} == {"resid_mid.1", "resid_mid.2"}


@pytest.mark.parametrize("plus_one", [False, True])
def test_an_encoder_of_what_a_norm_made_before_its_gain(plus_one: bool, tmp_path: Path) -> None:
    gemma = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 8,
             "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
    model = tiny.write_model(tmp_path / "model", **(gemma if plus_one else {}))
    checkpoint = open_checkpoint(str(model))
    folder = saes.write_transcoders(tmp_path / "all", range(2), "ln2.hook_normalized")
    taps = parse_taps("mlp_in:1,resid_post:1", checkpoint.arch)

    def find(where: object) -> Sae:
        recipe, gain = Recipe(encode=str(where)), partial(gain_before, checkpoint)
        return find_encoders(recipe, taps, checkpoint.arch, gain)["mlp_in.1"].sae

    file, info = checkpoint.tensors["model.layers.1.post_attention_layernorm.weight"]
    gain = plus_one + read_tensor(file, info).astype(np.float32)
    assert np.std(gain) > 0.01
    plain, found = open_sae(str(folder), layer=1), find(folder)
    assert (found.hook, found.ungained) == ("blocks.1.mlp.hook_in", True)
    wanted = load_arrays(plain)[0]["W_enc"] / gain[:, None]
    np.testing.assert_array_equal(load_arrays(found)[0]["W_enc"], wanted)
    # Gemma Scope's transcoders do not say so of themselves.
    (tmp_path / "raw").mkdir()
    np.savez(tmp_path / "raw" / "params.npz", **saes.random_tensors("jumprelu"))  # type: ignore[arg-type]
    raw = find(f"mlp_in.1={tmp_path / 'raw'}")
    wanted = saes.random_tensors("jumprelu")["W_enc"] / gain[:, None]
    np.testing.assert_array_equal(load_arrays(raw)[0]["W_enc"], wanted)
    with pytest.raises(ConfigError, match="is known for mlp_in and RMS norms only"):
        find(f"resid_post.1={folder}")


def test_heads_are_read_as_one_row(model: Path, tmp_path: Path) -> None:
    assert {*found(model, saes.write_sae(tmp_path), "z:1")} == {"z.1"}


@pytest.mark.parametrize(
    ("encode", "taps", "reason"),
    [
        ("DIR", "resid_post:0-1", "names no tap"),
        ("mlp_out.1=DIR", "resid_post:0", r"mlp_out.1 is not among --taps \(resid_post.0\)"),
        ("HOOKED", "resid_post:0", "was made for blocks.1.hook_mlp_out, which is not among --taps"),
        ("resid_post.0=DIR,resid_post.0=HOOKED", "resid_post:0", "two encoders for resid_post.0"),
        ("DIR", "mlp_hidden:0", "reads rows of 32 values, but mlp_hidden.0 has 48"),
        ("DIR", "attn_pattern:0", "an encoder cannot read attn_pattern"),
        ("DIR", "logprob", "an encoder cannot read logprob"),
        (",", "resid_post:0", "names no directory"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    model: Path, tmp_path: Path, encode: str, taps: str, reason: str
) -> None:
    plain = saes.write_sae(tmp_path / "plain")
    hooked = saes.write_sae(tmp_path / "hooked", hook="blocks.1.hook_mlp_out")
    with pytest.raises(ConfigError, match=reason):
        found(model, encode.replace("DIR", str(plain)).replace("HOOKED", str(hooked)), taps)


def test_gemma_scopes_embedding_encoder_is_refused_for_scaled_embeddings(
    tmp_path: Path,
) -> None:
    gemma = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 8}
    scaled = tiny.write_model(tmp_path / "gemma", **gemma, hidden_act="gelu_pytorch_tanh")
    (tmp_path / "sae").mkdir()
    np.savez(tmp_path / "sae" / "params.npz", **saes.random_tensors("jumprelu"))  # type: ignore[arg-type]
    assert {*found(scaled, tmp_path / "sae", "resid_post:0")} == {"resid_post.0"}
    with pytest.raises(ConfigError, match="expect unscaled embeddings"):
        found(scaled, tmp_path / "sae", "embed")


def test_latents_of_nothing_are_refused(model: Path) -> None:
    arch = read_arch(str(model))
    with pytest.raises(ConfigError, match="--latents needs --encode"):
        find_encoders(Recipe(latents=3), parse_taps("resid_post:0", arch), arch)


def test_an_encoded_tap_is_stored_as_two(model: Path, tmp_path: Path) -> None:
    arch = read_arch(str(model))
    taps = parse_taps("resid_post:0,embed,logprob", arch)
    encoders = find_encoders(
        Recipe(encode=f"resid_post.0={saes.write_sae(tmp_path)}", latents=6), taps, arch
    )
    infos = stored_taps(taps, encoders, arch, 64, "float8_e4m3")
    assert list(infos) == ["embed", "resid_post_latents.0", "resid_post_latent_ids.0", "logprob"]
    assert infos["resid_post_latents.0"] == TapInfo((6,), "float8_e4m3", latents=80)
    assert infos["resid_post_latent_ids.0"] == TapInfo((6,), "int16", latents=80)
    assert infos["resid_post_latents.0"].row_bytes == 6 + 4


def test_every_directory_is_made_to_last() -> None:
    assert each_source("a, resid_post.1=b", lambda path: f"/x/{path}") == "/x/a,resid_post.1=/x/b"

"""Every published layout: latents and reconstructions are those of its own project's code.

The projects' code made the files and what is expected of them: see `tests/fixtures/encoders`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.core.errors import InputError
from spile.core.recipe import CROSSCODER
from spile.models.files import encoders
from spile.models.files.encoders import LAYOUTS, find_layout, open_sae, with_decoders
from spile.models.files.encoders.arithmetic import completed, latents_of, reconstruction
from spile.models.files.encoders.sae import Sae
from spile.models.files.encoders.settings import read_yaml
from spile.models.files.encoders.tensors import load_arrays
from spile.models.splices import kth_largest
from spile.objects import MemoryObjects
from spile.objects.paths import RemotePath

FIXTURES = Path(__file__).parents[3] / "fixtures" / "encoders"
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
# Where the encoder lies in its folder, if not in itself; and what it reads and writes.
INSIDE = {
    "qwen_scope": "SAE-Res-Qwen3-1.7B-Base-W32K-L0_6", "sparsify": "layers.1",
    "sparsify_transcoder": "layers.1.mlp",
}  # fmt: skip
_MLP = ("mlp.hook_in", "hook_mlp_out")
_STREAM = ("hook_resid_post", None)
HOOKS = {
    "crosscoder": (None, None),
    "crosscoder_batchtopk": (None, None),
    "crosscoder_kissane": ("hook_resid_pre", None),
    "crosscoder_trained": (None, None),
    "circuit_tracer_clt": ("hook_resid_mid", "hook_mlp_out"),
    "circuit_tracer_relu": _MLP,
    "circuit_tracer_skip": _MLP,
    "gemma_scope_2": _STREAM,
    "gemma_scope_2_clt": _MLP,
    "gemma_scope_2_transcoder": _MLP,
    "gemma_scope_transcoder": (None, None),
    "llama_scope_2_transcoder": _MLP,
    "saelens_skip_transcoder": _MLP,
    "saelens_transcoder": _MLP,
    "sparsify_transcoder": _MLP,
}
CROSS_LAYER = ("circuit_tracer_clt", "gemma_scope_2_clt")


def where(name: str) -> str:
    return str(FIXTURES / name / INSIDE.get(name, ""))


def opened(name: str, place: str | None = None, *, decodes: bool = False) -> Sae:
    sides = 2 if name.startswith("crosscoder") else 1
    return open_sae(place or where(name), layer=1, decodes=decodes, sides=sides)


def wanted(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "wanted.npz") as found:
        return dict(found)


def latents(sae: Sae, rows: np.ndarray) -> np.ndarray:
    return latents_of(sae, load_arrays(sae)[0], rows, np, np.matmul, kth_largest)


def test_every_layout_has_a_fixture() -> None:
    found = {find_layout(Path(where(name))) for name in FOLDERS}
    layouts = {each.layout for each in found if each}
    assert None not in found
    assert layouts == {*LAYOUTS}


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in CROSS_LAYER])
def test_latents_and_reconstructions_are_the_projects_own(name: str) -> None:
    sae, expected = opened(name, decodes=True), wanted(name)
    arrays, digests = load_arrays(sae)
    found = latents_of(sae, arrays, expected["rows"], np, np.matmul, kth_largest)
    np.testing.assert_array_equal(found != 0, expected["latents"] != 0)
    np.testing.assert_allclose(found, expected["latents"], atol=5e-6)
    made = reconstruction(sae, arrays, expected["rows"], np, np.matmul, kth_largest)
    np.testing.assert_allclose(made, expected["decoded"], atol=2e-5)
    assert digests.keys() == sae.tensors().keys()
    # The latents alone need no decoder, unless its norms scale them.
    alone = opened(name)
    assert ("W_dec" in alone.tensors()) == (
        alone.rescales or alone.weighted or alone.norms is not None
    )
    np.testing.assert_array_equal(latents(alone, expected["rows"]), found)
    block = "blocks.1."
    hooks = HOOKS.get(name, _STREAM)
    assert (sae.hook, sae.writes) == tuple(hook and block + hook for hook in hooks)
    if sae.sides > 1:
        with pytest.raises(InputError, match="is a crosscoder of 2 models; make a dataset of each"):
            open_sae(where(name))
        with pytest.raises(InputError, match="is a crosscoder of 2 models, not 3"):
            open_sae(where(name), sides=3)
        assert sae.identity().startswith(CROSSCODER)


@pytest.mark.parametrize("name", CROSS_LAYER)
def test_latents_of_every_layer_of_a_cross_layer_transcoder(name: str) -> None:
    expected = wanted(name)
    for layer, rows in enumerate(expected["rows"]):
        sae = open_sae(where(name), layer=layer)
        found = latents(sae, rows)
        np.testing.assert_array_equal(found != 0, expected["latents"][layer] != 0)
        np.testing.assert_allclose(found, expected["latents"][layer], atol=5e-6)
        hooks = tuple(f"blocks.{layer}.{hook}" for hook in HOOKS[name] if hook)
        assert (sae.hook, sae.writes) == hooks
    with pytest.raises(InputError, match="is a cross-layer transcoder, whose reconstruction"):
        open_sae(where(name), layer=1, decodes=True)
    with pytest.raises(InputError, match="has encoders of layers 0, 1, 2; the tap is of layer 7"):
        open_sae(where(name), layer=7)
    with pytest.raises(InputError, match="has encoders of layers 0, 1, 2; the tap is of no layer"):
        open_sae(where(name))


@pytest.mark.parametrize("targets", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("name", CROSS_LAYER)
def test_reconstructions_across_layers_are_the_projects_own(
    name: str, targets: tuple[int, ...]
) -> None:
    expected = wanted(name)
    sums = dict.fromkeys(targets, np.float32(0))
    for layer, rows in enumerate(expected["rows"][: targets[-1] + 1]):
        alone = open_sae(where(name), layer=layer)
        sae = with_decoders(alone, tuple(target for target in targets if target >= layer))
        assert sae.identity() == alone.identity() and sae.outputs == 16 * len(sae.across)
        arrays, digests = load_arrays(sae)
        assert digests.keys() == sae.tensors().keys()
        found = latents_of(sae, arrays, rows, np, np.matmul, kth_largest)
        parts = np.split(found @ arrays["W_dec"], len(sae.across), axis=1)
        for target, part in zip(sae.across, parts, strict=True):
            sums[target] = sums[target] + part
        if layer in sums:
            made = completed(sae, arrays, sums[layer], rows, np.matmul)
            np.testing.assert_allclose(made, expected["decoded"][layer], atol=2e-5)


def test_decoders_that_are_missing_or_too_few_are_named(tmp_path: Path) -> None:
    for name in CROSS_LAYER:
        shutil.copytree(where(name), tmp_path / name)
    sae = open_sae(str(tmp_path / "circuit_tracer_clt"), layer=1)
    with pytest.raises(
        InputError, match=r"W_dec_1 has shape \[48, 2, 16\], expected \[48, 3, 16\]"
    ):
        with_decoders(sae, (1, 3))
    (tmp_path / "circuit_tracer_clt" / "W_dec_1.safetensors").unlink()
    with pytest.raises(InputError, match="W_dec_1.safetensors"):
        with_decoders(sae, (1, 2))
    sae = open_sae(str(tmp_path / "gemma_scope_2_clt"), layer=1)
    with pytest.raises(InputError, match=r"W_dec has shape \[48, 3, 16\], expected \[48, 4, 16\]"):
        with_decoders(sae, (3,))


@pytest.mark.parametrize("name", FOLDERS)
def test_encoders_behind_a_url_are_those_of_the_disk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = opened(name)
    objects = MemoryObjects()
    for path in (path for path in (FIXTURES / name).rglob("*") if path.is_file()):
        objects.create(path.relative_to(FIXTURES).as_posix(), path.read_bytes())
    monkeypatch.setattr(encoders, "path_of", lambda key: RemotePath(objects, key))
    remote = opened(name, str(Path(name, INSIDE.get(name, ""))))
    assert remote.identity() == local.identity() and remote.hook == local.hook
    here, there = load_arrays(local), load_arrays(remote)
    assert here[1] == there[1]
    for array, values in here[0].items():
        np.testing.assert_array_equal(there[0][array], values)


def test_a_file_of_a_directory_names_its_layer() -> None:
    for name, file, layer in (
        ("qwen_scope", "layer0.sae.pt", 0),
        ("circuit_tracer_skip", "layer_1.safetensors", 1),
        ("circuit_tracer_clt", "W_enc_2.safetensors", 2),
        ("gemma_scope_2_clt", "params_layer_0.safetensors", 0),
    ):
        by_file = open_sae(f"{where(name)}/{file}")
        assert by_file.identity() == open_sae(where(name), layer=layer).identity()
        assert by_file.hook and by_file.hook.startswith(f"blocks.{layer}.")
    whole = open_sae(f"{where('dictionary_learning_topk')}/ae.pt")
    assert whole.identity() == open_sae(where("dictionary_learning_topk")).identity()


def test_a_transcoder_of_llama_scope_has_two_scales(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "llama_scope", tmp_path, dirs_exist_ok=True)
    about = json.loads((tmp_path / "hyperparams.json").read_text())
    about["dataset_average_activation_norm"] = {"in": 2.0, "out": 0.5}
    about["hook_point_in"] = "blocks.1.ln2.hook_normalized"
    about["hook_point_out"] = "blocks.1.hook_mlp_out"
    (tmp_path / "hyperparams.json").write_text(json.dumps(about))
    sae, rows = open_sae(str(tmp_path), decodes=True), wanted("llama_scope")["rows"]
    assert (sae.hook, sae.writes, sae.ungained) == (
        "blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out", True
    )  # fmt: skip
    arrays, _ = load_arrays(sae)
    inside = rows * 2.0 @ arrays["W_enc"] + arrays["b_enc"]  # sqrt(16) / 2
    expected = np.where(inside > 2.0 * about["jump_relu_threshold"], inside, 0.0)
    np.testing.assert_allclose(latents(sae, rows), expected, atol=5e-6)
    made = reconstruction(sae, arrays, rows, np, np.matmul, kth_largest)
    expected = (expected @ arrays["W_dec"] + arrays["b_dec"]) / 8.0  # sqrt(16) / 0.5
    np.testing.assert_allclose(made, expected, atol=5e-6)


@pytest.mark.parametrize(
    ("name", "file", "changes", "reason"),
    [
        ("llama_scope", "hyperparams.json", {"act_fn": "topk"}, "act_fn is topk; known: jumprelu"),
        ("llama_scope", "hyperparams.json", {"use_glu_encoder": True}, "use_glu_encoder is True"),
        ("llama_scope", "hyperparams.json", {"norm_activation": "token-wise"}, "norm_activation"),
        ("llama_scope", "hyperparams.json", {"jump_relu_threshold": -1}, "threshold is -1"),
        ("llama_scope", "hyperparams.json", {"dataset_average_activation_norm": 3}, "norm is None"),
        ("llama_scope", "hyperparams.json", {"d_sae": 49}, "encoder.weight has shape .48, 16."),
        ("llama_scope_2", "config.json", {"sae_type": "clt"}, "sae_type is clt; known: sae"),
        ("llama_scope_2", "config.json", {"use_glu_encoder": True}, "use_glu_encoder is True"),
        ("llama_scope_2", "config.json", {"act_fn": "batchtopk"}, "known: relu, jumprelu, topk"),
        ("llama_scope_2", "config.json", {"norm_activation": "token-wise"}, "norm_activation is t"),
        ("llama_scope_2", "config.json", {"hook_point_out": "other"}, "the length of other is 0"),
        ("llama_scope_2", "config.json", {"expansion_factor": "3"}, "d_model and expansion_factor"),
        ("sparsify", "cfg.json", {"activation": "groupmax"}, "activation is groupmax; known: topk"),
        ("sparsify", "cfg.json", {"signed": True}, "signed is True; known: false"),
        ("sparsify", "cfg.json", {"k": None}, "d_in and k is 16 and None"),
        ("sparsify", "cfg.json", {"twist": 1}, "unknown key 'twist'"),
        ("dictionary_learning_topk", "config.json", {"trainer": {}}, "dict_class is None; known:"),
        ("dictionary_learning_topk", "config.json", {"trainer": 3}, "dict_class is None; known:"),
        (
            "crosscoder",
            "config.json",
            {"encoder_layers": [0]},
            "encoder_layers is .0.; known: null",
        ),
        ("crosscoder_batchtopk", "config.json", {"latent_processor": "f"}, "latent_processor is f"),
        ("gemma_scope_2", "config.json", {"architecture": "topk"}, "'topk'; known: jump_relu"),
        ("saelens_transcoder", "cfg.json", {"d_out": "8"}, "d_out is 8; known: a number"),
        (
            "saelens_transcoder",
            "cfg.json",
            {"normalize_activations": "layer_norm"},
            "normalize_act",
        ),
    ],
)
def test_what_would_change_the_latents_is_refused(
    name: str, file: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    shutil.copytree(where(name), tmp_path, dirs_exist_ok=True)
    about = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**about, **changes}))
    with pytest.raises(InputError, match=reason):
        open_sae(str(tmp_path))


def test_qwen_scope_needs_its_repositorys_name(tmp_path: Path) -> None:
    shutil.copytree(where("qwen_scope"), tmp_path / "renamed")
    with pytest.raises(InputError, match="stands only in the repository's name"):
        open_sae(str(tmp_path / "renamed"), layer=1)
    # The last number counts: a name above the repository's may hold another.
    outer = tmp_path / "runs-L0_9" / INSIDE["qwen_scope"]
    shutil.copytree(where("qwen_scope"), outer)
    assert open_sae(str(outer), layer=1).k == 6
    shutil.copytree(where("qwen_scope"), tmp_path / "W32K-L0_0")
    with pytest.raises(InputError, match="stands only in the repository's name"):
        open_sae(str(tmp_path / "W32K-L0_0"), layer=1)


def test_a_few_lines_of_yaml_do_not_stand_for_gigabytes(tmp_path: Path) -> None:
    lines = ["a0: &a0 {model_name: x}"]
    lines += [f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 99)}]" for n in range(1, 9)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    assert read_yaml(tmp_path / "config.yaml")["a0"] == {"model_name": "x"}

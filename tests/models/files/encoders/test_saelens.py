"""SAELens's directories: what is read and refused, compared with SAELens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.core.errors import InputError
from spile.models.files.encoders import find_layout, open_sae
from spile.models.files.encoders.arithmetic import activations
from spile.models.files.encoders.tensors import load_arrays
from support import saes


def test_saelens_directories_of_every_architecture_are_read(tmp_path: Path) -> None:
    for architecture in saes.ARCHITECTURES:
        folder = saes.write_sae(tmp_path / architecture, architecture, hook="blocks.1.hook_z")
        sae = open_sae(str(folder))
        assert (sae.architecture, sae.width, sae.latents) == (architecture, 32, 80)
        assert (sae.k, sae.hook, sae.subtracts) == (
            9 if architecture == "topk" else None, "blocks.1.hook_z", True,
        )  # fmt: skip
        assert find_layout(folder) and not find_layout(tmp_path)


def test_a_config_of_before_version_6_is_read(tmp_path: Path) -> None:
    old: dict[str, Any] = {
        "architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 7},
        "hook_name": "blocks.0.hook_mlp_out", "hook_layer": 0, "hook_head_index": None,
        "metadata": None, "normalize_activations": False, "reshape_activations": None,
        "apply_b_dec_to_input": None, "k": None, "finetuning_scaling_factor": False,
        "model_name": "gpt2", "context_size": 128, "prepend_bos": True, "lp_norm": 1.0,
    }  # fmt: skip
    folder = saes.write_sae(tmp_path, "standard", **old)
    written = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps({**written, "hook_head_index": None}))
    sae = open_sae(str(folder))
    assert (sae.architecture, sae.k, sae.hook) == ("topk", 7, "blocks.0.hook_mlp_out")
    assert (sae.normalize, sae.subtracts) == ("none", True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "temporal"}, "architecture is temporal; known: standard, topk"),
        ({"architecture": ["standard"]}, "architecture is"),
        ({"activation_fn": "tanh-relu"}, "activation_fn is tanh-relu; known: relu or topk"),
        ({"activation_fn_kwargs": {"alpha": 1}}, "activation_fn is relu"),
        ({"activation_fn_kwargs": 3}, "activation_fn_kwargs is 3"),
        ({"normalize_activations": "expected_average_only_in"}, "normalize_activations.*fold it"),
        ({"normalize_activations": True}, "normalize_activations is expected_average_only_in"),
        ({"normalize_activations": "covariance_whitening"}, "normalize_activations is covariance"),
        ({"reshape_activations": "other"}, "reshape_activations is other"),
        ({"hook_head_index": 3}, "hook_head_index is 3"),
        ({"metadata": {"hook_head_index": 2}}, "hook_head_index is 2"),
        ({"k": 5}, "k is 5; known: a number for topk"),
        ({"d_sae": 81}, "b_enc has shape .80., expected .81."),
        ({"d_in": "32"}, "d_in and d_sae is 32 and 80; known: two numbers"),
        ({"apply_b_dec_to_input": "yes"}, "apply_b_dec_to_input"),
        ({"spectral_shift": 0.5}, "unknown key 'spectral_shift'"),
    ],
)  # fmt: skip
def test_what_would_change_the_latents_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        open_sae(str(saes.write_sae(tmp_path, **changes)))


_SAELENS = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import numpy as np
import torch
from sae_lens import SAE
folder, rows = sys.argv[1], torch.tensor(np.load(sys.argv[2]))
for name in sys.argv[3:]:
    sae = SAE.load_from_disk(f"{folder}/{name}")
    with torch.no_grad():
        np.save(f"{folder}/{name}.npy", sae.encode(rows).numpy())
sae.save_model(f"{folder}/saved")
"""


@pytest.mark.full
def test_latents_are_those_of_saelens(tmp_path: Path) -> None:
    """The suite compares them with the formulas that tests/models/files/test_sae.py writes out."""
    beside = Path(sys.prefix, "saelens", "bin", "python")  # where `make` installs it
    python = os.environ.get("SPILE_SAELENS_PYTHON") or (str(beside) if beside.exists() else None)
    if not python:
        pytest.skip("SPILE_SAELENS_PYTHON does not name an interpreter that has sae-lens")
    normal = ("none", "layer_norm", "constant_norm_rescale")
    names: list[str] = []
    for architecture in saes.ARCHITECTURES:
        for normalize in normal:
            names.append(f"{architecture}-{normalize}")
            saes.write_sae(tmp_path / names[-1], architecture, normalize_activations=normalize)
    names += ["unbiased", "rescaled"]
    saes.write_sae(tmp_path / "unbiased", apply_b_dec_to_input=False)
    saes.write_sae(tmp_path / "rescaled", "topk", rescale_acts_by_decoder_norm=True)
    rows = np.random.default_rng(2).standard_normal((64, saes.WIDTH)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    result = subprocess.run(
        [python, "-c", _SAELENS, str(tmp_path), str(tmp_path / "rows.npy"), *names],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for name in names:
        sae = open_sae(str(tmp_path / name))
        found = activations(sae, load_arrays(sae)[0], rows, np, np.matmul)
        if sae.k:
            least = -np.sort(-found, axis=1)[:, sae.k - 1 : sae.k]
            found = np.where(found >= least, found, 0)
        wanted = np.load(tmp_path / f"{name}.npy")
        assert 0 < np.count_nonzero(wanted) < wanted.size
        np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=name)
    assert open_sae(str(tmp_path / "saved")).rescales, "as SAELens itself saves it"

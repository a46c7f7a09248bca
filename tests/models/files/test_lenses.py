"""Lenses are read as they are written, and as their own projects write them."""

from pathlib import Path

import numpy as np
import pytest
import torch

import spile
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.lenses import jacobian_files, open_lens, refuse_other_model, tuned_files


def test_a_jacobian_lens_is_what_its_project_saves(tmp_path: Path) -> None:
    """`JacobianLens.save` of github.com/anthropics/jacobian-lens, and what its `load` asks for."""
    rng = np.random.default_rng(0)
    matrices = {layer: rng.normal(size=(4, 4)) for layer in (0, 2, 5)}
    (data,) = jacobian_files(matrices, 7).values()
    (tmp_path / "lens.pt").write_bytes(data)
    found = torch.load(tmp_path / "lens.pt", map_location="cpu", weights_only=True)
    assert list(found) == ["J", "n_prompts", "source_layers", "d_model"]
    assert (found["n_prompts"], found["source_layers"], found["d_model"]) == (7, [0, 2, 5], 4)
    for layer, matrix in matrices.items():
        assert found["J"][layer].dtype == torch.float16
        assert (found["J"][layer].numpy() == matrix.astype(np.float16)).all()
    theirs = {
        "J": {n: torch.tensor(m).to(torch.float16) for n, m in matrices.items()},
        "n_prompts": 7, "source_layers": [0, 2, 5], "d_model": 4,
    }  # fmt: skip
    torch.save(theirs, tmp_path / "theirs.pt")
    for where in (tmp_path, tmp_path / "theirs.pt"):
        lens = open_lens(str(where))
        assert (lens.kind, lens.width, lens.layers, lens.adds) == ("jacobian", 4, (0, 2, 5), False)
        assert (lens.load(2)["matrix"] == matrices[2].astype(np.float16)).all()
        assert {*lens.load(2)} == {"matrix"}


def test_a_tuned_lens_has_a_translator_for_each_block(tmp_path: Path) -> None:
    matrix, bias = np.arange(9.0).reshape(3, 3), np.arange(3.0)
    for name, data in tuned_files({1: (matrix, bias)}, layers=4, model="m").items():
        (tmp_path / name).write_bytes(data)
    translators = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(4)])
    translators.load_state_dict(torch.load(tmp_path / "params.pt", weights_only=True))
    assert [bool(t.weight.detach().any()) for t in translators] == [False, False, True, False]
    lens = open_lens(str(tmp_path))
    assert (lens.kind, lens.layers, lens.adds) == ("tuned", (0, 1, 2), True)
    assert (lens.load(1)["matrix"] == matrix).all() and (lens.load(1)["bias"] == bias).all()
    torch.save(translators.state_dict(), tmp_path / "params.pt")  # as its own `save` does
    assert (open_lens(str(tmp_path)).load(1)["bias"] == bias).all()


def test_a_lens_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "lens.pt").write_bytes(jacobian_files({0: np.eye(3)}, 1)["lens.pt"])
    arch = open_checkpoint(str(model)).arch
    with pytest.raises(spile.ConfigError, match="maps streams of 3 values, but the model's has"):
        refuse_other_model(open_lens(str(tmp_path)), (0,), arch)
    (tmp_path / "lens.pt").write_bytes(jacobian_files({0: np.eye(arch.width)}, 1)["lens.pt"])
    refuse_other_model(open_lens(str(tmp_path)), (0,), arch)
    with pytest.raises(spile.ConfigError, match="has no layer 1; it has 0"):
        refuse_other_model(open_lens(str(tmp_path)), (0, 1), arch)


@pytest.mark.parametrize("content", ["", "{}", '{"d_model": 4, "lens_type": "other"}'])
def test_files_that_hold_no_lens_are_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(spile.InputError, match="holds no lens"):
        open_lens(str(tmp_path))
    torch.save({"0.weight": torch.zeros(3, 3)}, tmp_path / "params.pt")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(spile.InputError):
        open_lens(str(tmp_path))
    torch.save({"J": {}}, tmp_path / "lens.pt")
    with pytest.raises(spile.InputError, match="holds no Jacobian lens"):
        open_lens(str(tmp_path / "lens.pt"))

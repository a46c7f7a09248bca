"""An extraction where there are several devices."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

import spile
from spile.dataset.format import Done
from spile.dataset.records.ledger import Ledger
from support import tiny
from support.marks import some
from support.stored import unit_files


def test_a_mesh_of_one_device_leaves_the_others_alone(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    assert jax.device_count() == 8
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1", seq_len=64, unit_tokens=700,
        compute_dtype="float32",
    )  # fmt: skip
    for mesh in ("1", "data=8"):
        spile.extract(recipe, str(tmp_path / mesh), spile.Runtime(mesh=mesh, batch_tokens=512))
    one, all_of_them = (spile.open(str(tmp_path / mesh)) for mesh in ("1", "data=8"))
    rows = one.read("resid_post.1", 0, one.num_tokens)
    np.testing.assert_allclose(rows, all_of_them.read("resid_post.1", 0, one.num_tokens), atol=2e-5)
    for mesh in ("1", "data=8"):
        records = [json.loads(path.read_bytes()) for path in (tmp_path / mesh / "done").glob("*/*")]
        assert {record["made_by"]["mesh"] for record in records} == {mesh}


@pytest.mark.parametrize(
    "mesh", some(["fsdp=2,model=2,data=2", "data=8", "model=4,data=2"], "data=8")
)
def test_blocks_of_a_mesh_may_come_from_files(
    mesh: str, model: Path, corpus: Path, tmp_path: Path
) -> None:
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="embed,resid_post:0+2,logprob", seq_len=64,
        unit_tokens=900, compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip
    found = []
    for kept in ("resident", "disk"):
        runtime = spile.Runtime(mesh=mesh, batch_tokens=128, weights=kept)
        spile.extract(recipe, str(tmp_path / kept), runtime)
        ds = spile.open(str(tmp_path / kept))
        found.append([ds.read(tap, 0, ds.num_tokens) for tap in ds.taps])
    for whole, streamed in zip(*found, strict=True):
        np.testing.assert_array_equal(whole, streamed)


def test_on_a_mesh_too_a_replaced_file_changes_no_row(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = (tiny.write_model(tmp_path / f"model{seed}", seed=seed) for seed in (0, 1))
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1", seq_len=64, unit_tokens=200,
        store_dtype="float32",
    )  # fmt: skip
    runtime = spile.Runtime(mesh="fsdp=2,model=2,data=2", batch_tokens=128, weights="disk")
    spile.extract(recipe, str(tmp_path / "whole"), runtime)
    real = Ledger.commit

    def commit(self: Ledger, done: Done) -> bool:
        if (other / "model.safetensors").exists():
            os.replace(other / "model.safetensors", model / "model.safetensors")
        return real(self, done)

    monkeypatch.setattr(Ledger, "commit", commit)
    spile.extract(recipe, str(tmp_path / "out"), runtime)
    assert unit_files(tmp_path / "out") == unit_files(tmp_path / "whole")

"""An extraction where there are several devices."""

import json
from pathlib import Path

import jax
import numpy as np

import spile


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
        records = [json.loads(path.read_bytes()) for path in (tmp_path / mesh / "done").iterdir()]
        assert {record["made_by"]["mesh"] for record in records} == {mesh}

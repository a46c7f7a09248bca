"""Gemma Scope's own files."""

from pathlib import Path

import numpy as np
import pytest

from spile.core.tensors import write_tensors
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.tensors import load_arrays
from support import saes

TENSORS = saes.random_tensors("jumprelu")


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_gemma_scope_is_read(tmp_path: Path, kind: str, small: bool) -> None:
    named = {("w" + n[1:] if small and n[0] == "W" else n): t for n, t in TENSORS.items()}
    if kind == "npz":
        np.savez(tmp_path / "params.npz", **named)  # type: ignore[arg-type]
    else:
        write_tensors(tmp_path / "params.safetensors", named)
        (tmp_path / "config.json").write_text('{"architecture": "jump_relu", "l0": 10}')
    sae = open_sae(str(tmp_path))
    assert (sae.architecture, sae.width, sae.latents, sae.subtracts) == ("jumprelu", 32, 80, False)
    arrays, digests = load_arrays(sae)
    assert {*arrays} == {*digests} == {"W_enc", "b_enc", "threshold"}
    for name, array in arrays.items():
        assert np.array_equal(array, TENSORS[name])

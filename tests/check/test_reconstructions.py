"""What encoders do not reconstruct, and the loss of the model without it.

A check of stored errors is in tests/e2e/test_encode.py.
"""

from pathlib import Path

import numpy as np
import pytest
import transformers

import spile
from spile.check.latent_rows import SparseTap
from spile.check.reconstructions import ErrorTap, Reconstructions, error_taps
from spile.check.reference import Reference
from spile.models.files.encoders import open_sae, with_decoders
from spile.models.files.encoders.arithmetic import reconstruction
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.splices import kth_largest
from support import saes


@pytest.mark.parametrize("name", ["circuit_tracer_clt", "gemma_scope_2_clt"])
def test_errors_across_layers_are_those_of_the_projects_own_code(name: str) -> None:
    folder = Path(__file__).parents[1] / "fixtures" / "encoders" / name
    with np.load(folder / "wanted.npz") as found:
        rows, decoded = found["rows"], found["decoded"]
    encoders = {
        f"mlp_in.{layer}": SparseEncoder.of(
            with_decoders(open_sae(str(folder), layer=layer), (2,)), 9,
            error_of="mlp_out" if layer == 2 else None,
        )
        for layer in range(3)
    }  # fmt: skip
    sparse = {tap: SparseTap(tap, each) for tap, each in encoders.items()}
    (error,) = error_taps(encoders, sparse)
    assert error.name == "mlp_in_error.2" and error.needed == {"mlp_out.2", *encoders}
    outputs = np.random.default_rng(0).standard_normal(rows.shape[1:]).astype(np.float32)
    values = {f"mlp_in.{layer}": rows[layer] for layer in range(3)} | {"mlp_out.2": outputs}
    np.testing.assert_allclose(error.of(values), outputs - decoded[2], atol=2e-5)


def test_the_loss_is_that_of_the_same_splice(model: Path, tmp_path: Path) -> None:
    saes.write_sae(tmp_path / "sae", "topk")
    saes.write_transcoders(tmp_path / "transcoders", range(2))
    reference = Reference(transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float64"))
    own = spile.load_model(str(model), compute_dtype="float32")
    tokens = np.random.default_rng(0).integers(3, 250, 40)
    rows = {name: own(tokens[None], name)[name][0] for name in ("resid_post.1", "mlp_in.1")}
    rows = {name: np.asarray(values, np.float32) for name, values in rows.items()}
    for tap, target, folder in (
        ("resid_post.1", "resid_post.1", "sae"),
        ("mlp_in.1", "mlp_out.1", "transcoders"),
    ):
        sae = open_sae(str(tmp_path / folder), layer=1, decodes=True)
        site = target.partition(".")[0]
        errors = [ErrorTap(tap, SparseTap(tap, SparseEncoder.of(sae, 9)), site)]
        made = Reconstructions(errors, reference.taps)
        made.add(tokens)
        (found,) = made.results().values()
        arrays, _ = load_arrays(sae)
        new = reconstruction(sae, arrays, rows[tap], np, np.matmul, kth_largest)[None]
        assert found.loss == pytest.approx(float(own.loss(tokens[None])), abs=1e-5)
        spliced = own.loss(tokens[None], splice={target: spile.replaced(new)})
        assert found.replaced_loss == pytest.approx(float(spliced), abs=1e-4)
        assert abs(found.replaced_loss - found.loss) > 1e-3

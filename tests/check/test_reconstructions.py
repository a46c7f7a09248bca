"""What encoders do not reconstruct: checked against HF, with the model's loss without it."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

import spile
from spile.check.compare import check
from spile.check.latent_rows import SparseTap
from spile.check.reconstructions import ErrorTap, Reconstructions
from spile.check.reference import Reference
from spile.cli.model import check_text
from spile.core.config import Recipe
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.arithmetic import reconstruction
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.splices import kth_largest
from support import saes

ERROR, OF_MLP = "resid_post_error.1", "mlp_in_error.1"


@pytest.fixture(scope="module")
def out(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    sae = saes.write_sae(folder / "sae", "topk", hook="blocks.1.hook_resid_post")
    transcoders = saes.write_transcoders(folder / "transcoders", range(2))
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1,mlp_in:1,mlp_out:1", seq_len=64,
        encode=f"{sae},{transcoders}", encode_error=True, max_docs=3, compute_dtype="float32",
    )  # fmt: skip
    spile.extract(recipe, str(folder / "out"))
    return folder / "out"


def test_stored_errors_agree_with_the_reference_and_cost_is_told(out: Path) -> None:
    report = check(str(out), samples=2)
    assert report.ok and {ERROR, OF_MLP} <= {*report.taps}
    found, of_mlp = (report.taps[name].reconstruction for name in (ERROR, OF_MLP))
    assert found and of_mlp and found.loss == of_mlp.loss
    text = check_text("OUT", report)
    assert f"{ERROR}: {found.error:.3g} of the rows' length is not reconstructed" in text
    assert f"{found.replaced_loss:.4g} with its reconstructions in their place" in text
    told = json.loads(json.dumps(report.to_json()))["taps"][ERROR]["reconstruction"]
    assert told["replaced_loss"] == found.replaced_loss


def test_the_loss_is_that_of_the_same_splice(model: Path, out: Path) -> None:
    reference = Reference(transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float64"))
    own = spile.load_model(str(model), compute_dtype="float32")
    tokens = np.random.default_rng(0).integers(3, 250, 40)
    rows = {name: own(tokens[None], name)[name][0] for name in ("resid_post.1", "mlp_in.1")}
    rows = {name: np.asarray(values, np.float32) for name, values in rows.items()}
    for tap, target, folder in (
        ("resid_post.1", "resid_post.1", "sae"),
        ("mlp_in.1", "mlp_out.1", "transcoders"),
    ):
        sae = open_sae(str(out.parent / folder), layer=1, decodes=True)
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

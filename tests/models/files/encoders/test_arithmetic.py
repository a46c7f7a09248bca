"""What an encoder computes, compared with each formula written out."""

from pathlib import Path

import numpy as np
import pytest

from spile.models.files.encoders import open_sae
from spile.models.files.encoders.arithmetic import activations
from spile.models.files.encoders.sae import Sae
from spile.models.files.encoders.tensors import load_arrays
from support import saes

ROWS = np.random.default_rng(1).standard_normal((50, saes.WIDTH)).astype(np.float32)


def computed(sae: Sae, rows: np.ndarray = ROWS) -> np.ndarray:
    return activations(sae, load_arrays(sae)[0], rows, np, np.matmul)


@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu"])
def test_latents_are_the_formulas(tmp_path: Path, architecture: str, subtract: bool) -> None:
    sae = open_sae(str(saes.write_sae(tmp_path, architecture, apply_b_dec_to_input=subtract)))
    wanted = saes.plain_encode(
        ROWS, saes.random_tensors(architecture), architecture, subtract=subtract
    )
    assert 0 < np.count_nonzero(wanted) < wanted.size
    np.testing.assert_allclose(computed(sae), wanted, atol=1e-5)


@pytest.mark.parametrize("rescale", [True, False])
def test_of_topk_the_largest_are_the_formulas(tmp_path: Path, rescale: bool) -> None:
    folder = saes.write_sae(tmp_path, "topk", rescale_acts_by_decoder_norm=rescale)
    found = computed(open_sae(str(folder)))
    wanted = saes.plain_encode(ROWS, saes.random_tensors("topk"), "topk", rescale=rescale)
    chosen = wanted > 0
    np.testing.assert_allclose(found[chosen], wanted[chosen], rtol=1e-4)
    for row, kept in zip(found, chosen, strict=True):
        assert row[~kept].max() <= row[kept].min()


def test_rows_are_normalized_as_saelens_does(tmp_path: Path) -> None:
    plain = open_sae(str(saes.write_sae(tmp_path / "plain")))
    centred = ROWS - ROWS.mean(axis=1, keepdims=True)
    by_deviation = centred / (ROWS.std(axis=1, ddof=1, keepdims=True) + 1e-5)
    by_length = ROWS * np.sqrt(saes.WIDTH) / np.linalg.norm(ROWS, axis=1, keepdims=True)
    for name, rows in (("layer_norm", by_deviation), ("constant_norm_rescale", by_length)):
        sae = open_sae(str(saes.write_sae(tmp_path / name, normalize_activations=name)))
        np.testing.assert_allclose(computed(sae), computed(plain, rows), atol=1e-4)


@pytest.mark.parametrize("architecture", saes.ARCHITECTURES)
def test_what_is_no_number_stays_none(tmp_path: Path, architecture: str) -> None:
    rows = ROWS[:3].copy()
    rows[1, 5] = np.nan
    found = computed(open_sae(str(saes.write_sae(tmp_path, architecture))), rows)
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()

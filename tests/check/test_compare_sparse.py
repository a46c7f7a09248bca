"""Distances of sparse rows, against those of the same rows with every latent written out."""

from pathlib import Path

import numpy as np

from spile.check.compare import RowLatents, SparseTap
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.sae import SparseEncoder
from support import saes


def dense(top: RowLatents, latents: int) -> np.ndarray:
    out = np.zeros((len(top.values), latents))
    for row, (values, ids) in enumerate(zip(top.values, top.ids, strict=True)):
        out[row, ids] = values
    return out


def random_top(seed: int, rows: int = 30, kept: int = 5, latents: int = 12) -> RowLatents:
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(latents)[:kept] for _ in range(rows)])
    return RowLatents(np.maximum(rng.standard_normal((rows, kept)), 0).astype(np.float32), ids)


def test_distances_are_over_all_latents() -> None:
    ours, theirs = random_top(0), random_top(1)
    wanted = np.square(dense(ours, 12) - dense(theirs, 12)).sum(axis=1)
    np.testing.assert_allclose(ours.squares(theirs), wanted, rtol=1e-12)
    assert np.all(ours.squares(ours) < 1e-14)
    np.testing.assert_allclose(
        ours.squares(ours.nothing()), np.square(ours.values, dtype=np.float64).sum(axis=1)
    )


def test_the_order_of_latents_in_a_row_does_not_matter() -> None:
    ours = random_top(0)
    turned = RowLatents(ours.values[:, ::-1], ours.ids[:, ::-1].astype(np.int16))
    assert np.all(ours.squares(turned) < 1e-14)


def test_what_is_no_number_is_at_no_distance() -> None:
    ours, theirs = random_top(0), random_top(0)
    theirs.values[4, 2] = np.nan
    assert np.flatnonzero(np.isnan(ours.squares(theirs))).tolist() == [4]


def test_the_largest_latents_are_found(tmp_path: Path) -> None:
    encoder = SparseEncoder.of(open_sae(str(saes.write_sae(tmp_path, "gated"))), 6)
    rows = np.random.default_rng(5).standard_normal((150, saes.WIDTH)).astype(np.float32)
    wanted = saes.plain_encode(rows, saes.random_tensors("gated"), "gated")
    top = SparseTap("resid_post.0", encoder).encode(rows)
    least = -np.sort(-wanted, axis=1)[:, 5:6]
    np.testing.assert_allclose(dense(top, 80), np.where(wanted >= least, wanted, 0), atol=1e-5)

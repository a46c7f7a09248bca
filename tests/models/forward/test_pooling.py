"""Pooling on the device: sums and maxima of slots, equal to numpy's."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from spile.core.pool import COVARIANCE, MOMENTS
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.forward import pooling
from spile.models.forward.pooling import Pooling, products_by_label
from support import saes

SLOTS = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 0, 0]], np.int32)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("by", ["mean", "max"])
def test_slots_have_the_sum_or_maximum_of_their_tokens(by: str, dtype: str) -> None:
    values = jnp.asarray(RNG.standard_normal((2, 6, 3, 5)), dtype)
    found = np.asarray(Pooling(by, jnp.asarray(SLOTS), 4).each_slot(values))
    assert found.shape == (2, 4, 3, 5) and found.dtype == np.float32
    wide = np.asarray(values.astype(jnp.float32)).astype(np.float64)
    for row, used in enumerate((2, 3)):
        for slot in range(1, used + 1):
            own = wide[row][SLOTS[row] == slot]
            wanted = own.sum(axis=0) if by == "mean" else own.max(axis=0)
            np.testing.assert_allclose(found[row, slot - 1], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_are_the_sum_and_the_squares_around_the_mean(dtype: str) -> None:
    values = jnp.asarray(RNG.standard_normal((2, 6, 3, 5)) + 100.0, dtype)
    found = np.asarray(Pooling(MOMENTS, jnp.asarray(SLOTS), 4).each_slot(values))
    assert found.shape == (2, 4, 3, 5, 2) and found.dtype == np.float32
    wide = np.asarray(values.astype(jnp.float32)).astype(np.float64)
    for row, used in enumerate((2, 3)):
        for slot in range(1, used + 1):
            own = wide[row][SLOTS[row] == slot]
            np.testing.assert_allclose(found[row, slot - 1, ..., 0], own.sum(axis=0), rtol=1e-6)
            apart = ((own - own.mean(axis=0)) ** 2).sum(axis=0)
            np.testing.assert_allclose(found[row, slot - 1, ..., 1], apart, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("by", ["mean", "max"])
def test_a_value_that_is_not_finite_spoils_its_own_span_alone(by: str, bad: float) -> None:
    values = RNG.standard_normal((2, 6, 5)).astype(np.float32)
    clean = np.asarray(Pooling(by, jnp.asarray(SLOTS), 4).each_slot(jnp.asarray(values)))
    values[0, 3, 2] = bad
    values[1, 5, 0] = bad  # of no span
    found = np.asarray(Pooling(by, jnp.asarray(SLOTS), 4).each_slot(jnp.asarray(values)))
    assert np.isnan(found[0, 1, 2])
    assert np.array_equal(found[0, 0], clean[0, 0])
    assert np.array_equal(found[1, :3], clean[1, :3])


@pytest.mark.parametrize("at_once", [1 << 26, 2 * 80 * 4, 1])
@pytest.mark.parametrize("by", ["mean", "max"])
def test_latents_are_pooled_whatever_number_of_tokens_is_encoded_at_once(
    by: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "AT_ONCE", at_once)
    encoder = SparseEncoder.of(open_sae(str(saes.write_sae(tmp_path, "jumprelu"))), 6)
    values = RNG.standard_normal((2, 6, saes.WIDTH)).astype(np.float32)
    arrays = {name: jnp.asarray(array) for name, array in load_arrays(encoder.sae)[0].items()}
    pooled = Pooling(by, jnp.asarray(SLOTS), 4)
    found = np.asarray(pooled.each_slots_latents(jnp.asarray(values), arrays, encoder))
    assert found.shape == (2, 4, 80)
    flat = values.reshape(12, saes.WIDTH)
    latents = saes.plain_encode(flat, saes.random_tensors("jumprelu"), "jumprelu")
    latents = latents.reshape(2, 6, 80)
    for row, used in enumerate((2, 3)):
        for slot in range(1, used + 1):
            own = latents[row][SLOTS[row] == slot]
            wanted = own.sum(axis=0) if by == "mean" else own.max(axis=0)
            np.testing.assert_allclose(found[row, slot - 1], wanted, atol=1e-5)


@pytest.mark.parametrize("block", [1, 3, 512])
def test_products_are_numpys_of_each_labels_deviations(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "_BLOCK", block)
    values = (RNG.standard_normal((2, 6, 5)) + 100.0).astype(np.float32)
    pooled = Pooling(COVARIANCE, jnp.asarray(SLOTS), 4)
    # Label 0 has slots in both rows, label 1 in none, label 2 in one; slot 1 of row 1 has none.
    labels = jnp.asarray([[2, 0, 1, 0], [3, 0, 0, 0]], jnp.int32)
    sums = pooled.each_slot(jnp.asarray(values))
    apart, label = pooled.deviations(jnp.asarray(values), sums, labels)
    found = products_by_label(apart.reshape(12, 5), label.reshape(12), 4)
    assert found.shape == (1, 4, 5, 5)
    own = {0: np.r_[values[0, 2:5], values[1, 3:4]], 2: values[0, :2]}
    for number in range(4):
        tokens = own.get(number, np.zeros((1, 5))).astype(np.float64)
        centred = tokens - tokens.mean(axis=0)
        np.testing.assert_allclose(found[0, number], centred.T @ centred, rtol=1e-4, atol=1e-4)

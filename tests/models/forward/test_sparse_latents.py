"""The largest latents on a device, compared with a plain sort of all latents."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.files.encoders import open_sae
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.forward import sparse_latents as latents
from spile.models.forward.sparse_latents import device_arrays, top_latents
from support import saes

ROWS = np.random.default_rng(3).standard_normal((37, saes.WIDTH)).astype(np.float32)


def run(folder: Path, kept: int | None, rows: np.ndarray = ROWS, dtype: str = "float32") -> Any:
    encoder = SparseEncoder.of(open_sae(str(folder)), kept)
    arrays = device_arrays(load_arrays(encoder.sae)[0], dtype)
    with jax.default_matmul_precision("highest"):
        top = jax.jit(lambda a, x: top_latents(a, x, encoder=encoder))(arrays, rows)
    return jax.tree.map(np.asarray, top)


@pytest.mark.parametrize(
    ("architecture", "at_once"), [*((each, 1 << 26) for each in saes.ARCHITECTURES), ("gated", 640)]
)
def test_the_largest_come_first_with_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, at_once: int
) -> None:
    monkeypatch.setattr(latents, "AT_ONCE", at_once)
    top = run(saes.write_sae(tmp_path, architecture), 20)
    wanted = saes.plain_encode(ROWS, saes.random_tensors(architecture), architecture)
    kept = min(20, 9 if architecture == "topk" else 20)
    assert top.values.shape == top.ids.shape == (37, kept)
    dense = np.zeros_like(wanted)
    for row, (values, ids) in enumerate(zip(top.values, top.ids, strict=True)):
        assert len({*ids.tolist()}) == kept, "no latent twice, active or not"
        assert (np.diff(values) <= 0).all()
        dense[row, ids] = values
    least = -np.sort(-wanted, axis=1)[:, kept - 1 : kept]
    np.testing.assert_allclose(dense, np.where(wanted >= least, wanted, 0), atol=1e-5)
    assert np.array_equal(top.beyond, np.count_nonzero(wanted, axis=1) > kept)


def test_of_equals_the_lower_number_comes_first(tmp_path: Path) -> None:
    folder = saes.write_sae(tmp_path, "standard")
    tensors = saes.random_tensors("standard")
    tensors["W_enc"][:, ::2] = tensors["W_enc"][:, :1]
    tensors["b_enc"][::2] = 20.0
    (folder / "sae_weights.safetensors").unlink()
    saes.write_tensors(folder / "sae_weights.safetensors", tensors)
    top = run(folder, 30)
    assert np.array_equal(top.ids, np.broadcast_to(np.arange(0, 60, 2), (37, 30)))
    assert (top.values == top.values[:, :1]).all()


def test_rows_of_heads_are_read_as_one(tmp_path: Path) -> None:
    folder = saes.write_sae(tmp_path)
    flat, heads = run(folder, 8), run(folder, 8, ROWS.reshape(37, 4, 8))
    assert all(np.array_equal(a, b) for a, b in zip(flat, heads, strict=True))


def test_in_bfloat16_only_the_product_is_rounded(tmp_path: Path) -> None:
    folder = saes.write_sae(tmp_path, "standard")
    exact, rough = (run(folder, 4, ROWS, dtype) for dtype in ("float32", "bfloat16"))
    assert rough.values.dtype == np.float32
    assert 0 < np.abs(rough.values - exact.values).max() < 0.05 * exact.values.max()
    arrays = device_arrays(load_arrays(open_sae(str(folder)))[0], "bfloat16")
    assert [n for n, a in arrays.items() if a.dtype == jnp.bfloat16] == ["W_enc"]


def test_latents_that_norms_have_chosen_come_by_their_own_size() -> None:
    folder = Path(__file__).parents[2] / "fixtures/encoders/llama_scope_2_transcoder"
    with np.load(folder / "wanted.npz") as found:
        rows, wanted = found["rows"], found["latents"]
    top = run(folder, None, rows)
    assert top.values.shape == (20, 6) and not top.beyond.any()
    dense = np.zeros_like(wanted)
    np.put_along_axis(dense, top.ids.astype(np.int64), top.values, axis=1)
    np.testing.assert_allclose(dense, wanted, atol=1e-5)
    few = run(folder, 4, rows)
    np.testing.assert_allclose(few.values, -np.sort(-wanted, axis=1)[:, :4], atol=1e-5)
    assert np.array_equal(few.beyond, np.count_nonzero(wanted, axis=1) > 4)


@pytest.mark.parametrize(
    ("architecture", "normalize", "at_once"),
    [("jumprelu", "none", 1 << 26), ("topk", "none", 640), ("standard", "layer_norm", 1 << 26)],
)
def test_the_largest_attributions_come_first_with_their_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, normalize: str, at_once: int
) -> None:
    """Each is the latent times the gradient along what it adds to the reconstruction."""
    monkeypatch.setattr(latents, "AT_ONCE", at_once)
    folder = saes.write_sae(tmp_path, architecture, normalize_activations=normalize)
    encoder = SparseEncoder.of(open_sae(str(folder), decodes=True), 7)
    arrays = device_arrays(load_arrays(encoder.sae)[0], "float32")
    gradients = np.random.default_rng(4).standard_normal(ROWS.shape).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(lambda a, x, g: latents.top_attributions(a, x, g, encoder=encoder))
        top = jax.tree.map(np.asarray, run(arrays, ROWS, gradients))
    tensors, rows, scale = saes.random_tensors(architecture), ROWS, np.ones((len(ROWS), 1))
    if normalize == "layer_norm":
        apart = ROWS - ROWS.mean(axis=1, keepdims=True)
        scale = apart.std(axis=1, keepdims=True, ddof=1)
        rows = apart / (scale + 1e-5)
    toward = scale * (gradients @ tensors["W_dec"].T)
    wanted = saes.plain_encode(rows, tensors, architecture) * toward
    ids = top.ids.astype(np.int64)
    np.testing.assert_allclose(top.values, np.take_along_axis(wanted, ids, 1), atol=1e-4)
    sizes = -np.sort(-np.abs(wanted), axis=1)[:, :7]
    np.testing.assert_allclose(np.abs(top.values), sizes, atol=1e-4)
    assert np.array_equal(top.beyond, np.count_nonzero(wanted, axis=1) > 7)

"""A sparse autoencoder on the device: the largest latents of each row."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from spile.models.files.encoders.arithmetic import activations
from spile.models.files.encoders.sae import AT_ONCE, Arrays, SparseEncoder


class TopLatents(NamedTuple):
    """Latents of rows, largest first; ties go to the lower id."""

    values: Float[Array, "rows kept"]  # zero if fewer are active
    ids: Int[Array, "rows kept"]  # distinct within a row, whether active or not
    beyond: Bool[Array, " rows"]  # whether more were active


def device_arrays(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Cast arrays for the device: the matrix to the model's dtype, the rest to float32."""
    return {n: a.astype(jnp.dtype(dtype)) if n == "W_enc" else a for n, a in arrays.items()}


def top_latents(
    arrays: Arrays, rows: Shaped[Array, "rows ..."], *, encoder: SparseEncoder
) -> TopLatents:
    """Encode rows of any float dtype, a few at a time, since all latents would fill the memory."""
    sae = encoder.sae
    product = partial(jnp.dot, preferred_element_type=jnp.float32)

    def of_row(row: Float[Array, " width"]) -> TopLatents:
        found = activations(
            sae, arrays, row.astype(jnp.float32), jnp, lambda a, b: product(a.astype(b.dtype), b)
        )
        values, ids = jax.lax.top_k(found, encoder.kept)
        active = jnp.minimum((found > 0).sum(), sae.k or sae.latents)
        return TopLatents(values, ids.astype(jnp.dtype(encoder.id_dtype)), active > encoder.kept)

    flat = rows.reshape(len(rows), -1)
    size = max(1, AT_ONCE // sae.latents)
    return (
        jax.vmap(of_row)(flat) if len(flat) <= size else jax.lax.map(of_row, flat, batch_size=size)
    )

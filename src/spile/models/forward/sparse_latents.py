"""A sparse autoencoder on the device: the largest latents of each row, and its error."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from spile.models.files.encoders.arithmetic import activations, active_latents, decoded
from spile.models.files.encoders.sae import AT_ONCE, Arrays, SparseEncoder
from spile.models.forward.splice import kth_largest


class TopLatents(NamedTuple):
    """Latents of rows, largest first; ties go to the lower id."""

    values: Float[Array, "rows kept"]  # zero if fewer are active
    ids: Int[Array, "rows kept"]  # distinct within a row, whether active or not
    beyond: Bool[Array, " rows"]  # whether more were active
    error: Float[Array, "rows ..."] | None  # a row less its reconstruction, if that is stored
    # Of a layer of a cross-layer transcoder: what its latents write to other layers' rows.
    written: Float[Array, "rows outputs"] | None = None


def device_arrays(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Cast arrays for the device: matrices to the model's dtype, the rest to float32."""
    return {n: a.astype(jnp.dtype(dtype)) if a.ndim == 2 else a for n, a in arrays.items()}


def top_attributions(
    arrays: Arrays,
    rows: Shaped[Array, "rows ..."],
    gradients: Shaped[Array, "rows ..."],
    *,
    encoder: SparseEncoder,
) -> TopLatents:
    """Return how much each latent adds to an objective, to first order; the largest by magnitude.

    A latent's attribution is its value times the product of the row's gradient with what it adds
    to the reconstruction: its row of the decoder.
    """
    sae = encoder.sae

    def product(a: Array, b: Array) -> Array:
        return jnp.dot(a, b.astype(jnp.float32), precision="highest")

    def of_row(given: tuple[Array, Array]) -> TopLatents:
        row, gradient = (each.astype(jnp.float32) for each in given)
        found = activations(sae, arrays, row, jnp, typed_product)
        found = active_latents(sae, arrays, found, jnp, kth_largest)

        def made(own: Array) -> Array:
            added: Array = decoded(sae, arrays, row, own, jnp, product)
            return added

        _, pull = jax.vjp(made, found)
        attributions = found * pull(gradient)[0]
        _, ids = jax.lax.top_k(jnp.abs(attributions), encoder.kept)
        beyond = (attributions != 0).sum() > encoder.kept
        return TopLatents(attributions[ids], ids.astype(jnp.dtype(encoder.id_dtype)), beyond, None)

    flat = rows.reshape(len(rows), -1), gradients.reshape(len(rows), -1)
    size = max(1, AT_ONCE // sae.latents)
    if len(rows) <= size:
        return jax.vmap(of_row)(flat)
    return jax.lax.map(of_row, flat, batch_size=size)


def typed_product(a: Array, b: Array) -> Array:
    """Multiply in the dtype of a matrix; accumulate in float32."""
    return jnp.dot(a.astype(b.dtype), b, preferred_element_type=jnp.dtype("float32"))


def top_latents(
    arrays: Arrays,
    rows: Shaped[Array, "rows ..."],
    target: Shaped[Array, "rows ..."] | None = None,
    *,
    encoder: SparseEncoder,
) -> TopLatents:
    """Encode rows of any float dtype, a few at a time, since all latents would fill the memory.

    Args:
        target: the rows that it reconstructs, if the error is stored. (That of a cross-layer
            transcoder is computed from what all layers write.)
    """
    sae = encoder.sae

    product = typed_product

    def of_row(given: tuple[Array, Array | None]) -> TopLatents:
        row, wanted = given[0].astype(jnp.float32), given[1]
        found = activations(sae, arrays, row, jnp, product)
        if sae.weighted:  # otherwise the k are among the largest
            found = active_latents(sae, arrays, found, jnp, kth_largest)
        values, ids = jax.lax.top_k(found, encoder.kept)
        active = jnp.minimum((found > 0).sum(), sae.k or sae.latents)
        error = written = None
        if wanted is not None or sae.across:
            every = active_latents(sae, arrays, found, jnp, kth_largest)
            if sae.across:
                written = product(every, arrays["W_dec"])
            elif wanted is not None:
                error = wanted.astype(jnp.float32) - decoded(sae, arrays, row, every, jnp, product)
        ids = ids.astype(jnp.dtype(encoder.id_dtype))
        return TopLatents(values, ids, active > encoder.kept, error, written)

    flat = rows.reshape(len(rows), -1), None if target is None else target.reshape(len(rows), -1)
    size = max(1, AT_ONCE // sae.latents)
    top = (
        jax.vmap(of_row)(flat) if len(rows) <= size else jax.lax.map(of_row, flat, batch_size=size)
    )
    if target is None or top.error is None:
        return top
    return top._replace(error=top.error.reshape(target.shape))

"""How an encoder encodes a row of activations and reconstructs it. No jax.

The arithmetic is SAELens' `encode` and `decode`, written for both numpy and jax.numpy: the device
runs it in the compiled step, and `spile check` runs it on the activations of HF transformers.
"""

import math
from collections.abc import Callable
from typing import Any

from spile.models.files.encoders.sae import Arrays, Sae

_LAYER_NORM_EPS = 1e-5


def activations(
    sae: Sae, arrays: Arrays, rows: Any, xp: Any, product: Callable[[Any, Any], Any]
) -> Any:
    """Compute [..., latents] from [..., width] in float32; for `topk` before the choice of k.

    A nonfinite value in a row makes every latent that may depend on it nonfinite.

    Args:
        xp: numpy or jax.numpy, matching the arrays.
        product: multiplies two matrices, in float32.
    """
    if sae.centres:
        rows = rows - arrays["mean"]
    if sae.scale != 1.0:
        rows = rows * sae.scale
    if sae.normalize == "layer_norm":
        rows = rows - rows.mean(axis=-1, keepdims=True)
        deviation = xp.sqrt((rows * rows).sum(axis=-1, keepdims=True) / (sae.width - 1))
        rows = rows / (deviation + _LAYER_NORM_EPS)
    elif sae.normalize == "constant_norm_rescale":
        length = xp.sqrt((rows * rows).sum(axis=-1, keepdims=True))
        rows = rows * (math.sqrt(sae.width) / length)
    if sae.subtracts:
        rows = rows - arrays["b_dec"]
    found = product(rows, arrays["W_enc"])
    if sae.architecture == "gated":
        size = xp.maximum(found * xp.exp(arrays["r_mag"]) + arrays["b_mag"], 0.0)
        return xp.where(found + arrays["b_gate"] <= 0, 0.0, size)
    found = found + arrays["b_enc"]
    if sae.rescales:
        found = found * arrays["decoder_norm"]
    active = xp.maximum(found, 0.0)
    if sae.architecture != "jumprelu":
        return active
    # (Tests `<=` and not `>`, so that NaN does not become zero.)
    return xp.where(found <= arrays["threshold"], 0.0, active)


def latents_of(
    sae: Sae,
    arrays: Arrays,
    rows: Any,
    xp: Any,
    product: Callable[[Any, Any], Any],
    kth: Callable[[Any, int], Any],
) -> Any:
    """Compute all latents of rows, as `activations`; for `topk` with k of them active.

    Args:
        kth: returns the k-th largest of the last axis, which it keeps.
    """
    found = activations(sae, arrays, rows, xp, product)
    return active_latents(sae, arrays, found, xp, kth)


def active_latents(
    sae: Sae, arrays: Arrays, found: Any, xp: Any, kth: Callable[[Any, int], Any]
) -> Any:
    """Choose the active latents among those that `activations` returns."""
    if sae.k is None:
        return found
    compared = found * arrays["decoder_norm"] if sae.weighted else found
    return xp.where(compared < kth(compared, sae.k), 0.0, found)


def reconstruction(
    sae: Sae,
    arrays: Arrays,
    rows: Any,
    xp: Any,
    product: Callable[[Any, Any], Any],
    kth: Callable[[Any, int], Any],
) -> Any:
    """Compute the reconstruction of rows [..., width] in float32.

    The arguments are those of `latents_of`.
    """
    found = latents_of(sae, arrays, rows, xp, product, kth)
    return decoded(sae, arrays, rows, found, xp, product)


def completed(
    sae: Sae, arrays: Arrays, written: Any, rows: Any, product: Callable[[Any, Any], Any]
) -> Any:
    """Compute what a cross-layer transcoder reconstructs at a layer: [rows, width].

    Args:
        sae: of that layer, and its arrays.
        written: the sum of what the latents of all layers up to it write there.
        rows: that the layer's encoder reads.
    """
    made = written + arrays["b_dec"][None]
    return made + product(rows, arrays["W_skip"]) if sae.skips else made


def decoded(
    sae: Sae, arrays: Arrays, rows: Any, found: Any, xp: Any, product: Callable[[Any, Any], Any]
) -> Any:
    """Compute the reconstruction of rows from their latents, as `latents_of` returns them."""
    if sae.rescales:
        found = found / arrays["decoder_norm"]
    made = product(found, arrays["W_dec"]) + arrays["b_dec"]
    if sae.skips:
        made = made + product(rows, arrays["W_skip"])
    if sae.output_scale != 1.0:
        made = made / sae.output_scale
    if sae.centres:
        made = made + arrays["mean"]
    if sae.normalize == "layer_norm":
        return made * _deviation(sae, rows, xp) + rows.mean(axis=-1, keepdims=True)
    if sae.normalize == "constant_norm_rescale":
        return made / (math.sqrt(sae.width) / _length(rows, xp))
    return made


def along_decoder(
    sae: Sae,
    arrays: Arrays,
    rows: Any,
    gradients: Any,
    xp: Any,
    product: Callable[[Any, Any], Any],
) -> Any:
    """Multiply the gradient at each row with what each latent adds to its reconstruction."""
    found = product(gradients, arrays["W_dec"].T) / sae.output_scale
    if sae.rescales:
        found = found / arrays["decoder_norm"]
    if sae.normalize == "layer_norm":
        return found * _deviation(sae, rows, xp)
    if sae.normalize == "constant_norm_rescale":
        return found * _length(rows, xp) / math.sqrt(sae.width)
    return found


def _deviation(sae: Sae, rows: Any, xp: Any) -> Any:
    squares = xp.square(rows - rows.mean(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    return xp.sqrt(squares / (sae.width - 1))


def _length(rows: Any, xp: Any) -> Any:
    return xp.sqrt((rows * rows).sum(axis=-1, keepdims=True))

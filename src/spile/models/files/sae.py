"""Sparse autoencoders: what one computes of a row of activations. No jax.

The arithmetic is SAELens' `encode`, written for either of numpy and jax.numpy: the device runs it
in the compiled step, `spile check` on what HF transformers computed. How published ones lie on a
disk is in `sae_files.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spile.objects.paths import AnyPath

# What each kind of encoder is made of; a letter is an axis: width, latents.
_TENSORS: dict[str, dict[str, str]] = {
    "standard": {"W_enc": "wl", "b_enc": "l"},
    "topk": {"W_enc": "wl", "b_enc": "l"},
    "jumprelu": {"W_enc": "wl", "b_enc": "l", "threshold": "l"},
    "gated": {"W_enc": "wl", "b_gate": "l", "b_mag": "l", "r_mag": "l"},
}
ARCHITECTURES = tuple(_TENSORS)
NORMALIZATIONS = ("none", "layer_norm", "constant_norm_rescale")
AT_ONCE = 1 << 26  # latents held on a device, in float32: 256 MiB
_KEPT = 64  # latents of a row, where the encoder has no k of its own
_LAYER_NORM_EPS = 1e-5

Arrays = Mapping[str, Any]  # of numpy or of jax, by name


@dataclass(frozen=True, kw_only=True)
class Sae:
    """A published encoder: what it is made of, and where it lies."""

    directory: AnyPath
    file: AnyPath  # its tensors
    architecture: str
    width: int  # values of a row it reads
    latents: int
    k: int | None = None  # latents that are active at once, where that is a number
    normalize: str = "none"
    subtracts: bool = True  # the decoder's bias, from what it reads
    rescales: bool = False  # latents, by the length of their decoder's rows
    hook: str | None = None  # where it was trained to be used, as TransformerLens calls it
    raw: bool = False  # as Gemma Scope publishes it

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that are read, and the shape of each."""
        sizes = {"w": self.width, "l": self.latents}
        axes = dict(_TENSORS[self.architecture])
        if self.subtracts:
            axes["b_dec"] = "w"
        if self.rescales:
            axes["W_dec"] = "lw"
        return {name: tuple(sizes[axis] for axis in each) for name, each in axes.items()}

    def arithmetic(self) -> dict[str, Any]:
        """All that its latents depend on beside the tensors."""
        names = ("architecture", "width", "latents", "k", "normalize", "subtracts", "rescales")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Encoder:
    """An encoder, and how many latents of a row are kept."""

    sae: Sae
    kept: int

    @classmethod
    def of(cls, sae: Sae, asked: int | None) -> "Encoder":
        """`asked`: for so many; never more than can be active."""
        return cls(sae, min(asked or sae.k or _KEPT, sae.k or sae.latents))

    @property
    def id_dtype(self) -> str:
        return "int16" if self.sae.latents <= 1 << 15 else "int32"


def activations(
    sae: Sae, arrays: Arrays, rows: Any, xp: Any, product: Callable[[Any, Any], Any]
) -> Any:
    """[..., latents] of [..., width] in float32; of a `topk` encoder before the choice of k.

    What is not finite in a row is not finite in any latent that might depend on it.

    Args:
        xp: numpy or jax.numpy, whichever the arrays are of.
        product: of two matrices, in float32.
    """
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
    # (What is not above, not what is: NaN must not become zero.)
    return xp.where(found <= arrays["threshold"], 0.0, active)

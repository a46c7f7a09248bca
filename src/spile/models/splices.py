"""The changes of `--splice`: what each does to the values of a tap. No jax.

The arithmetic is written for both jax.numpy and torch: the device runs it in the compiled step
(`models/forward/splice.py`), and `spile check` runs it inside HF transformers
(`check/hf_splices.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from spile.core.tensors import as_bytes
from spile.models.files.encoders.arithmetic import reconstruction
from spile.models.files.encoders.sae import Arrays, Sae
from spile.models.files.encoders.tensors import load_arrays
from spile.models.taps import Tap

# The built-in changes, and what follows `=`.
KINDS = {
    "zero": None,
    "ablate": "FILE.npy",
    "steer": "FILE.npy*FACTOR",
    "mean": "FILE.npy or a dataset",
    "replace-with-sae": "DIR",
}
FUNCTION = "function"  # the kind of a user's own


@dataclass(frozen=True, kw_only=True, eq=False)
class Splice:
    """A change of one tap's values.

    Attributes:
        tap: the place: all heads of a layer, and `resid_post` of a block instead of the next one's
            `resid_pre`.
        identity: what it is, without paths: part of the recipe.
        arrays: what it is computed with, in the shape of a whole row, flat; see `changed_rows`.
        sae: of `replace-with-sae`.
        reads: the tap of the same block that a transcoder reads; None: the values it replaces.
        function: of the kind `function`: takes and returns values [rows, seq, ...].
    """

    kind: str
    tap: Tap
    identity: str
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    sae: Sae | None = None
    reads: Tap | None = None
    function: Any = None

    def load(self) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Return all arrays, and hashes of those that `identity` does not cover as a whole."""
        return load_arrays(self.sae) if self.sae else (dict(self.arrays), {})

    @property
    def values(self) -> int:
        """Number of values in the arrays."""
        if self.sae:
            return (self.sae.width + (self.sae.target or self.sae.width)) * self.sae.latents
        return sum(array.size for array in self.arrays.values())

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products for each token; those of a function are not known."""
        if self.sae:
            return 2 * self.values
        return 4 * self.arrays["basis"].size if self.kind == "ablate" else 0


def changed_rows(
    kind: str,
    sae: Sae | None,
    arrays: Arrays,
    rows: Any,
    xp: Any,
    product: Callable[[Any, Any], Any],
    kth: Callable[[Any, int], Any],
) -> Any:
    """Compute the new values of rows [tokens, width], in float32 or wider.

    Rows are the old values; those of a transcoder are the values that it reads.

    Args:
        xp: the functions of numpy that it uses, for these arrays.
        product: multiplies two matrices.
        kth: returns the k-th largest of the last axis, which it keeps.
    """
    if kind == "ablate":
        basis = arrays["basis"]  # [directions, width], orthonormal
        return rows - product(product(rows, basis.T), basis)
    if kind == "steer":
        return rows + arrays["direction"]
    if kind in ("zero", "mean"):
        return xp.where(arrays["chosen"], arrays["value"], rows)
    assert kind == "replace-with-sae" and sae
    return reconstruction(sae, arrays, rows, xp, product, kth)


def digest(array: np.ndarray) -> str:
    """A hash of an array's values and shape, whatever file they came from."""
    wide = np.ascontiguousarray(array, np.float32)
    return xxhash.xxh3_128_hexdigest(str(wide.shape).encode() + bytes(as_bytes(wide)))


def orthonormal(directions: np.ndarray) -> np.ndarray:
    """An orthonormal basis [directions, width] of what directions [any, width] span."""
    _, sizes, basis = np.linalg.svd(directions.astype(np.float64), full_matrices=False)
    return basis[sizes > 1e-6 * sizes.max(initial=0.0)].astype(np.float32)


def kth_largest(found: np.ndarray, k: int) -> np.ndarray:
    return np.partition(found, -k, axis=-1)[..., -k, None]

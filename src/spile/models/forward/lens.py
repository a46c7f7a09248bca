"""A lens's predictions: the model's norm and head, applied to a mapped stream."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from spile.models.config.arch import Arch
from spile.models.forward.ends import head_values
from spile.models.forward.forward_pass import SiteValues
from spile.models.forward.weights import WeightArrays

# The sites of a lens, by those of the head that have these values after the last block.
_SITES = {
    "lens_logsumexp": "logsumexp",
    "lens_top_ids": "top_token_ids",
    "lens_top_logprobs": "top_logprobs",
}


@dataclass(frozen=True)
class LensHead:
    """What turns a stream into predictions, beside the lens's own arrays."""

    arch: Arch
    adds: bool  # whether the map is added to the stream
    outer: WeightArrays  # the model's norm and head

    def predictions(
        self,
        arrays: Mapping[str, Array],
        stream: Float[Array, "rows kept width"],
        wanted: Collection[str],
        count: int,
    ) -> SiteValues:
        """Return the values of the wanted sites of a lens.

        Args:
            arrays: of the stream's layer: `matrix` [out, in], and `bias` if it has one.
            stream: after a block.
            count: how many tokens to keep.
        """
        matrix = arrays["matrix"]
        mapped = jnp.einsum(
            "rki,oi->rko",
            stream.astype(matrix.dtype),
            matrix,
            preferred_element_type=jnp.dtype("float32"),
        )
        if "bias" in arrays:
            mapped = mapped + arrays["bias"][None, None, :]
        if self.adds:
            mapped = mapped + stream.astype(jnp.float32)
        sites = [_SITES[site] for site in wanted]
        tops = {"top_token_ids": count, "top_logprobs": count}
        found = head_values(self.outer, mapped.astype(stream.dtype), self.arch, sites, tops)
        return {site: found[_SITES[site]] for site in wanted}

"""The decoder's weights on the device. Each array is declared in `specs.py`."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

# Arrays of one block have a leading axis of layers in `Params`, and none inside the scan.
Block = dict[str, Float[Array, "..."]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The weights on the device; `head` and `final_norm` only where a tap asks for them."""

    embed: Float[Array, "vocab width"]
    blocks: Block
    final_norm: Float[Array, " width"] | None
    head: Float[Array, "vocab width"] | None

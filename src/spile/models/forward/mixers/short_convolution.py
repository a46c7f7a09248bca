"""The gated short convolution: each token reads from a few before it, in the same document.

One projection gates the input of the convolution, channel by channel; another gates its output.
"""

from jaxtyping import Array, Int

from spile.models.forward.mixers.recurrence import convolution
from spile.models.forward.ops import Hidden, linear
from spile.models.forward.sharding import Shards
from spile.models.forward.splice import At
from spile.models.forward.weights import Block


def short_convolution(
    x: Hidden, block: Block, segments: Int[Array, "rows seq"], at: At, *, shards: Shards | None
) -> tuple[Hidden, dict[str, Array]]:
    """Mix tokens; return the mixer's output, and the values that can be tapped inside."""
    opened, gate, values = (linear(x, block[f"wc{name}"], block.get(f"bc{name}")) for name in "bcx")
    conv_in = at("conv_in", opened * values)
    convolved = convolution(
        conv_in, block["conv"], block.get("conv_bias"), segments, None, shards=shards
    )
    conv_out, gate = at("conv_out", convolved), at("conv_gate", gate)
    out = linear(conv_out * gate, block["wco"], block.get("bco"))
    return out, {"conv_in": conv_in, "conv_out": conv_out, "conv_gate": gate}

"""Every array of the decoder, declared once: shape and logical axes. No jax.

Loading, checking, sharding and memory accounting derive from these declarations. Block arrays are
stacked along a leading axis of layers, which the forward pass scans over. Matrices keep the
checkpoint's layout, [out, in], so loading is a plain copy.
"""

import math
from dataclasses import dataclass

from spile.models.arch import Arch


@dataclass(frozen=True)
class ParamSpec:
    """One array. `axes` are logical; a mesh assigns them (sharding.py)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


def block_specs(arch: Arch) -> tuple[ParamSpec, ...]:
    """The arrays of one block, without the layer axis."""
    d, f = arch.width, arch.mlp_width
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    specs = [
        ParamSpec("attn_norm", (d,), ("width",)),
        ParamSpec("wq", (q, d), ("heads", "width")),
        ParamSpec("wk", (kv, d), ("kv_heads", "width")),
        ParamSpec("wv", (kv, d), ("kv_heads", "width")),
        ParamSpec("wo", (d, q), ("width", "heads")),
        ParamSpec("mlp_norm", (d,), ("width",)),
        ParamSpec("w_gate", (f, d), ("mlp", "width")),
        ParamSpec("w_up", (f, d), ("mlp", "width")),
        ParamSpec("w_down", (d, f), ("width", "mlp")),
    ]
    if arch.qkv_bias:
        specs += [
            ParamSpec("bq", (q,), ("heads",)),
            ParamSpec("bk", (kv,), ("kv_heads",)),
            ParamSpec("bv", (kv,), ("kv_heads",)),
        ]
    if arch.out_bias:
        specs.append(ParamSpec("bo", (d,), ("width",)))
    if arch.mlp_bias:
        specs += [
            ParamSpec("b_gate", (f,), ("mlp",)),
            ParamSpec("b_up", (f,), ("mlp",)),
            ParamSpec("b_down", (d,), ("width",)),
        ]
    return tuple(specs)


def outer_specs(arch: Arch) -> tuple[ParamSpec, ...]:
    """The arrays outside the blocks; a tied head is not an array of its own."""
    specs = [
        ParamSpec("embed", (arch.vocab_size, arch.width), ("vocab", "width")),
        ParamSpec("final_norm", (arch.width,), ("width",)),
    ]
    if not arch.tied_head:
        specs.append(ParamSpec("head", (arch.vocab_size, arch.width), ("vocab", "width")))
    return tuple(specs)


def num_params(arch: Arch, layers: int, *, head: bool) -> int:
    """Parameters held when the first `layers` blocks are loaded, and the head if asked for."""
    outer = [s for s in outer_specs(arch) if head or s.name == "embed"]
    block = sum(math.prod(spec.shape) for spec in block_specs(arch))
    return layers * block + sum(math.prod(spec.shape) for spec in outer)

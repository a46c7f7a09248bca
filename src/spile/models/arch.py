"""What a decoder is made of, as plain numbers and switches; no jax, no weights, no file names.

`families.py` turns a published `config.json` into an `Arch`; everything downstream (parameters,
forward pass, tap widths, memory estimates) reads only this.
"""

from dataclasses import dataclass

from spile.models.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One decoder-only transformer."""

    family: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float
    activation: str
    rope: Rope
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied_head: bool
    max_positions: int

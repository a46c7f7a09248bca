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

    def num_params(self, layers: int, *, head: bool) -> int:
        """Parameters held when the first `layers` blocks are loaded."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        block = self.width * heads + self.num_heads * self.head_dim * self.width
        block += 3 * self.width * self.mlp_width + 2 * self.width
        block += self.qkv_bias * heads + self.out_bias * self.width
        block += self.mlp_bias * (2 * self.mlp_width + self.width)
        total = self.vocab_size * self.width + layers * block
        if head:
            total += self.width + (0 if self.tied_head else self.vocab_size * self.width)
        return total

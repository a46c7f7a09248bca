"""The architecture of a decoder, as plain numbers and switches; no jax, no weights, no file names.

`families.py` defines how a published `config.json` becomes an `Arch`; everything downstream
(parameters, forward pass, tap shapes, memory estimates) reads only this. A switch names a thing
that models do or do not do, never a family.
"""

from dataclasses import dataclass

from spile.models.config.rope import Rope


@dataclass(frozen=True)
class Layer:
    """Properties that may differ between the blocks of one model."""

    window: int | None = None  # keys a query sees, itself included; None: all before it
    rope: int | None = 0  # index into the model's rotary settings; None: q and k are not rotated


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: each token goes to `chosen` of `count`."""

    count: int
    chosen: int
    normalised: bool  # the chosen experts' weights sum to one


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One decoder-only transformer."""

    family: str
    vocab_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    layers: tuple[Layer, ...]
    max_positions: int  # the longest context
    rope_positions: int  # the longest context, as rotary scaling counts it
    tied_head: bool
    embed_scale: float = 1.0

    norm: str = "rms"  # how norms are computed: see `ops.NORMS`
    norm_eps: float
    pre_norm: bool = True  # before attention and MLP
    post_norm: bool = False  # after them, before their output is added to the stream
    parallel: bool = False  # attention and MLP both read the stream that enters the block

    ropes: tuple[Rope, ...]  # none: positions are learned and added to the embeddings
    attn_scale: float  # of the scores
    attn_softcap: float | None = None
    qk_norm: str | None = None  # over each head ("head"), or all heads together ("full")
    sinks: bool = False  # each head may attend to nothing: one more score, without a value
    qkv_bias: bool
    out_bias: bool

    activation: str
    gated: bool = True
    glu_limit: float | None = None  # gate and up are clamped, and one is added to up
    mlp_bias: bool
    experts: Experts | None = None
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def period(self) -> int:
        """Number of blocks after which their kinds repeat; the forward pass scans over it."""
        kinds = self.layers
        return next(
            p
            for p in range(1, len(kinds) + 1)
            if all(kind == kinds[i % p] for i, kind in enumerate(kinds))
        )

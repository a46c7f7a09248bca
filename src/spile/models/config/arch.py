"""The architecture of a decoder, as plain numbers and switches; no jax, no weights, no file names.

`hf_config.py` defines how a published `config.json` becomes an `Arch`; everything downstream
(parameters, forward pass, tap shapes, memory estimates) reads only this. A switch names a thing
that models do or do not do, never a family.
"""

from dataclasses import dataclass, replace
from functools import cache

from spile.models.config.rope import Rope

_MOST_LEFT = 8  # blocks after those that repeat; a config is untrusted, and may list thousands

# Mixers. The third is attention beside a state space: both read the same, and both are added.
ATTENTION, STATE_SPACE, SIDE_BY_SIDE = "attention", "state_space", "attention_and_state_space"
GATED_DELTA, SHORT_CONVOLUTION, NO_MIXER = "gated_delta", "short_convolution", "none"


@dataclass(frozen=True)
class Layer:
    """Properties that may differ between the blocks of one model."""

    window: int | None = None  # keys a query sees, itself included; None: all before it
    rope: int | None = 0  # index into the model's rotary settings; None: q and k are not rotated
    dense: bool = False  # a plain MLP, where other blocks have experts
    mixer: str = ATTENTION  # how tokens read from each other
    mlp: bool = True  # an MLP, or experts, follow the mixer
    chunk: int | None = None  # contexts are cut into this many tokens; none sees another's
    # Sizes that are not the model's.
    head_dim: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    keys_as_values: bool = False  # values are the keys, as projected
    borrows: bool = False  # keys and values are those of the last block with some and its window

    @property
    def shapes(self) -> str:
        """A name for the sizes of its values: blocks with the same one can share a buffer."""
        return f"{self.mixer} {self.head_dim} {self.kv_heads} {self.mlp_width}"

    @property
    def attends(self) -> bool:
        """Whether it has softmax attention, alone or beside a state space."""
        return self.mixer in (ATTENTION, SIDE_BY_SIDE)

    @property
    def has_state_space(self) -> bool:
        return self.mixer in (STATE_SPACE, SIDE_BY_SIDE)


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of the gated delta rule, in the layers that mix tokens by it (`mixers/gated_delta`)."""

    key_heads: int  # of queries, too; each serves the same number of value heads
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution before it sees, the current one included
    norm_eps: float  # of the norm behind it
    most_written: float = 1.0  # share of a key's old value that a token replaces; 2: it flips
    gate: str = "silu"  # the activation of the gate that multiplies the output
    by_channel: bool = False  # each dimension of a key has its own decay, not each head
    narrow: bool = False  # decay and gate are projected through key_dim dimensions
    pre_norm_only: bool = False  # its blocks have norms before mixer and MLP, and no others

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class StateSpace:
    """Sizes of the state space of Mamba-2, in the layers that have one (`mixers/state_space`)."""

    heads: int
    head_dim: int
    groups: int  # heads of a group share keys and queries
    state: int  # dimensions of keys and queries
    kernel: int  # tokens that the convolution before it sees, the current one included
    norm_eps: float  # of the norm behind it
    norm: str | None = "gated"  # after the gate; "ungated": before it; None: no norm
    norm_by_group: bool = False  # each group's channels are normalised separately
    least_step: float = 0.0  # steps are clamped
    most_step: float | None = None
    bias: bool = False  # of the projections
    conv_bias: bool = True
    activation: str = "silu"  # after the convolution
    in_scale: float = 1.0  # multiplies the input
    scales: tuple[float, ...] = (1.0,) * 5  # of the projected gate, values, keys, queries, steps
    out_scale: float = 1.0  # multiplies the output

    @property
    def inner(self) -> int:
        """Channels of the values that heads write and read."""
        return self.heads * self.head_dim

    @property
    def norm_groups(self) -> int:
        """Parts in which channels are normalised."""
        return self.groups if self.norm_by_group else 1

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True)
class ShortConvolution:
    """The gated convolution of the layers that mix tokens by it alone."""

    kernel: int  # tokens that it sees, the current one included
    bias: bool = False  # of the convolution, and of the projections


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention: keys and values of all heads are projected from one small vector.

    One part of each key does not come from it: all heads share that part, and only it is rotated.
    """

    rank: int  # of the latent
    query_rank: int | None  # of the queries' latent; None: they have none
    rope_dim: int  # the last dimensions of each query and key
    value_dim: int  # of a head
    norm_eps: float = 1e-6  # of the latents' norms
    regrouped: bool = False  # interleaved pairs become halves after the rotation


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: each token goes to `chosen` of `count`."""

    count: int
    chosen: int
    normalised: bool  # the chosen experts' weights sum to one
    scored: str = "softmax"  # how logits become weights; or "sigmoid", each separately
    corrected: bool = False  # each expert's bias affects the choice, but not the weight
    groups: int = 1  # only experts of the best groups can be chosen
    chosen_groups: int = 1
    group_best: int = 2  # a group's score: the sum of so many of its best experts'
    scale: float = 1.0  # of the weights
    wide: bool = False  # the router multiplies in float32
    weighs_input: bool = False  # the weight is applied before the expert, not after it
    shared: int = 0  # width of an expert that every token goes to, beside the chosen
    shared_gate: bool = False  # its output has a gate
    # Router and chosen experts read the stream through their own norms, the shared expert through
    # another; both results are normalised before they are added.
    apart: bool = False
    scaled: bool = False  # each expert's weight has a learned factor
    # A weight is a softmax over the remaining experts whose scores are within this share of it.
    margin: float | None = None


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
    embed_bare_norm: bool = False  # embeddings are normalised as they are read, without weights
    embed_norm: bool = False  # embeddings are normalised before the first block
    layer_embed: int = 0  # width of each block's own embedding of the token; 0: none
    position_offset: int = 0  # learned positions count from here
    residual_scale: float = 1.0  # of what attention and MLP add to the stream
    wide_stream: bool = False  # the stream is in float32, whatever else is computed in
    first_hidden: int = 0  # blocks before the first stream that transformers returns
    head_bias: bool = False
    logit_scale: float = 1.0

    norm: str = "rms"  # how norms are computed: see `ops.NORMS`
    last_norm: str | None = None  # the same for the last norm, if it differs
    norm_eps: float
    post_norm_eps: float | None = None  # of norms after attention and MLP, if it differs
    pre_norm: bool = True  # before attention and MLP
    post_norm: bool = False  # after them, before their output is added to the stream
    parallel: bool = False  # attention and MLP both read the stream that enters the block
    shared_norm: bool = False  # in parallel, they read it through one norm
    block_scale: bool = False  # the stream that leaves a block is multiplied by a learned number

    ropes: tuple[Rope, ...]  # none: nothing is rotated; see `learned_positions`
    rope_interleaved: bool = False  # rotated pairs are neighbours, not the halves of a head
    alibi: tuple[float, ...] = ()  # of each head: how much a score falls per token of distance
    attn_scale: float  # of the scores
    attn_in_scale: float = 1.0  # of the input of queries, keys and values
    attn_out_scale: float = 1.0  # of what attention adds to the stream
    key_scale: float = 1.0
    query_scale: float = 1.0  # after their norm
    attn_softcap: float | None = None
    # (share, step): queries that are not rotated grow by share * log(1 + tokens so far // step)
    attn_growth: tuple[float, int] | None = None
    # over each head ("head"; "heads" with weights for each, "bare" without weights), or all heads
    # together ("full")
    qk_norm: str | None = None
    qk_norm_last: bool = False  # after the rotation, not before it
    qk_norm_rotated: bool = False  # only where there is a rotation
    v_norm: bool = False  # each head's values are normalised, without weights
    qkv_limit: float | None = None  # q, k and v are clamped, before anything else
    sinks: bool = False  # each head has one more score, without a value
    attn_gate: bool = False  # a projection's sigmoid multiplies the mixed values
    delta: GatedDelta | None = None  # of the layers whose mixer it is
    state_space: StateSpace | None = None  # the same
    convolution: ShortConvolution | None = None  # the same
    latent: Latent | None = None  # the source of keys and values; None: the stream itself
    qkv_bias: bool
    out_bias: bool

    activation: str
    gated: bool = True
    glu_limit: float | None = None  # gate and up are clamped, and one is added to up
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # of the gate before its activation; of the output
    mlp_bias: bool
    experts: Experts | None = None
    dense_width: int = 0  # of the MLP in blocks without experts, where others have them
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values; `head_dim` has those of queries and keys."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head among which some are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def rope_dims(self) -> tuple[int, ...]:
        """The same, in the blocks with each of the rotary settings."""
        own = {layer.rope: self.of(layer).rope_dim for layer in self.layers}
        return tuple(own.get(number, self.rope_dim) for number in range(len(self.ropes)))

    def of(self, layer: Layer) -> "Arch":
        """The same model with the sizes of a block of this kind."""
        given = {"head_dim": layer.head_dim, "num_kv_heads": layer.kv_heads}
        given["mlp_width"] = layer.mlp_width
        own = {name: size for name, size in given.items() if size is not None}
        return replace(self, **own) if own else self

    @property
    def lends(self) -> bool:
        """Whether some blocks read the keys and values of earlier ones."""
        return any(layer.borrows for layer in self.layers)

    @property
    def learned_positions(self) -> bool:
        """Whether embeddings get positions, because nothing else shows the order of tokens."""
        return not (self.ropes or self.alibi or self.delta or self.state_space)

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a block that are over the whole width."""
        before = ("attn_norm",) if self.shared_norm else ("attn_norm", "mlp_norm")
        after = ("attn_post_norm", "mlp_post_norm")
        apart = ("experts_norm", "experts_post_norm", "shared_post_norm")
        beside = ("layer_embed_post_norm",)
        return (
            before * self.pre_norm
            + after * self.post_norm
            + apart * (self.experts is not None and self.experts.apart)
            + beside * (self.layer_embed > 0)
        )

    def norms_of(self, layer: Layer) -> tuple[str, ...]:
        """The same, for a block of this kind."""
        if layer.mixer == GATED_DELTA and self.delta and self.delta.pre_norm_only:
            return ("attn_norm", "mlp_norm")
        absent = ["attn"] * (layer.mixer == NO_MIXER) + ["mlp"] * (not layer.mlp)
        return tuple(name for name in self.norms if not name.startswith(tuple(absent)))

    def routed(self, layer: Layer) -> bool:
        """Whether a block has experts."""
        return self.experts is not None and layer.mlp and not layer.dense

    @property
    def lead(self) -> int:
        """Number of blocks before the repeating ones, including all that lend keys and values."""
        return self._lenders + _repetition(self.layers[self._lenders :])[0]

    @property
    def period(self) -> int:
        """Number of blocks after which their kinds repeat; the forward pass scans over it."""
        return _repetition(self.layers[self._lenders :])[1]

    @property
    def tail(self) -> int:
        """Number of blocks at the end that do not fill a period."""
        return _repetition(self.layers[self._lenders :])[2]

    @property
    def _lenders(self) -> int:
        """Number of blocks before the first that borrows keys and values."""
        return next((n for n, layer in enumerate(self.layers) if layer.borrows), 0)


@cache
def _repetition(kinds: tuple[Layer, ...]) -> tuple[int, int, int]:
    """Return the lengths of the lead, the period and the tail of kinds; the least in sum."""
    tails = range(min(_MOST_LEFT, len(kinds) - 1) + 1)
    found = ((*_repeated(kinds[: len(kinds) - tail]), tail) for tail in tails)
    return min(found, key=lambda each: (sum(each), each[2]))


def _repeated(kinds: tuple[Layer, ...]) -> tuple[int, int]:
    """Return the lengths of lead and period, without a tail.

    Uses the prefix function of Knuth, Morris and Pratt, from the end: constant time per suffix.
    """
    reverse = kinds[::-1]
    borders = [0]
    for kind in reverse[1:]:
        border = borders[-1]
        while border and reverse[border] != kind:
            border = borders[border - 1]
        borders.append(border + (reverse[border] == kind))
    periods = [length - border for length, border in enumerate(borders, 1)]
    return min(
        ((lead, periods[len(kinds) - lead - 1]) for lead in range(len(kinds))),
        key=lambda found: (sum(found), found[0]),
    )

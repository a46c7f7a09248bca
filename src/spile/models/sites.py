"""The table of sites: the kinds of place one can tap, one row each. No other file lists them.

A new site is a row here and its code: in `models/forward`, which computes it, and in
`check/hf_modules.py`, which finds the same values in HF transformers.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

from spile.models.config.arch import (
    ATTENTION,
    GATED_DELTA,
    SHORT_CONVOLUTION,
    SIDE_BY_SIDE,
    STATE_SPACE,
    Arch,
    Layer,
)

BEFORE, BLOCK, AFTER = "before the blocks", "in a block", "after the blocks"
TOP_LOGITS, ATTN_TOP = "top_logits", "attn_top"
SUMMARY = ("entropy", "first", "self", "before", "distance")  # the values of `attn_summary`


@dataclass(frozen=True)
class Site:
    """One kind of place to tap."""

    name: str
    meaning: str
    shape: tuple[str, ...]  # of one token's values; `axis_sizes` gives the length of each axis
    _: KW_ONLY
    stage: str = BLOCK  # which part of the model computes it; only those of blocks have layers
    lens: tuple[str, ...] = ()  # TransformerLens names of the same values; `{}`: the layer
    latent_lens: tuple[str, ...] | None = None  # with latent attention, if those differ
    # HF modules with this output: in a block the end of the path, elsewhere the whole path.
    modules: tuple[str, ...] = ()
    dtype: str | None = None  # if it is not the recipe's
    least: int = 0  # of integers: what is smaller stands for NaN
    requires: tuple[str, ...] = ()  # features the model must have: keys of `FEATURES`
    mixers: tuple[str, ...] = ()  # mixers of the layers that have it; empty: all layers
    # Operations that the deepest block runs for it: names of matrices, or `scores`, `mixing`,
    # `rule`, `space`. None: the whole block.
    reach: tuple[str, ...] | None = None
    spliced: bool = False  # its values can be changed before the model continues
    streams: bool = False  # its values are the residual stream's, or are added to it
    head: bool = False  # needs the head's product with the vocabulary
    # Whether a token's values are an axis `top`, the largest of another axis: that axis, and how
    # many if `--top-logits` does not say. `group`: what stands for these sites in `--taps`.
    largest_of: str = ""
    top: int = 0
    group: str = ""
    of_chosen: bool = False  # computed for the kept tokens and the chosen heads alone
    advice: str = ""  # what to do about its size, if its rows are large
    of: str = ""  # the site whose gradient, or attribution, it is
    summed: bool = False  # an attribution: the gradient times the values, summed over the last axis
    crossed: bool = False  # edges: the products of the gradient with the values of each writer

    @property
    def layered(self) -> bool:
        return self.stage == BLOCK

    @property
    def option(self) -> str:
        """The option that says how many of the largest it keeps."""
        return TOP_LOGITS if self.group == LENS_TOP else self.group

    @property
    def heads(self) -> bool:
        """Whether its first axis is heads, so that some of them can be chosen."""
        return self.shape[:1] in (("heads",), ("kv_heads",), ("ssm_heads",))


LENS_BLOCK = "blocks.{}."
_B = LENS_BLOCK
_HEADS, _KV_HEADS = ("heads", "head_dim"), ("kv_heads", "head_dim")
_MIXED_HEADS, _SSM_HEADS = ("heads", "value_dim"), ("ssm_heads", "ssm_dim")
# Mixers that attend; that have a state space; that read `attn_in`; and that have a convolution.
_ATTEND, _SPACE = (ATTENTION, SIDE_BY_SIDE), (STATE_SPACE, SIDE_BY_SIDE)
_ATTN = (*_ATTEND, GATED_DELTA, SHORT_CONVOLUTION)
_CONVOLVE = (*_SPACE, GATED_DELTA, SHORT_CONVOLUTION)
# Operations, for `reach`.
_Q, _K = ("wq", "wqa", "wqb"), ("wk", "wka", "wkr")
_MIXED = (
    *_Q, *_K, "wv", "wdq", "wdk", "wdv", "wdan", "wda", "wdb", "scores", "mixing", "rule"
)  # fmt: skip
_GATE = ("wg", "wdgn", "wdg")
_CONVOLVED, _SPACED = ("wcb", "wcx"), ("wmx", "wmb", "wmc")
_READ = (*_SPACED, "wmt", "space")
_ATTENTION = (*_MIXED, *_GATE, "wo", "wdo", *_CONVOLVED, "wcc", "wco")
ALL_MIXERS = (*_ATTENTION, *_READ, "wmz", "wmo")
_ROUTED = (*ALL_MIXERS, "w_router")

# In the order in which a forward pass computes them.
SITES = {
    site.name: site
    for site in (
        Site(
            "embed", "token embeddings, scaled where the model scales them; before learned "
            "positions are added", ("width",), stage=BEFORE, reach=(), spliced=True, streams=True,
            lens=("hook_embed", "embed.hook_out"),
            modules=("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in"),
        ),
        Site(
            "resid_pre", "residual stream entering the block", ("width",), reach=(), spliced=True,
            streams=True, lens=(_B + "hook_resid_pre", _B + "hook_in"),
        ),
        Site(
            "attn_in", "input of attention, or of another mixer: after its norm",
            ("width",), mixers=_ATTN, reach=(), spliced=True, lens=(_B + "attn.hook_in",),
        ),
        Site(
            "q", "queries as projected: before q-norm and rotary", _HEADS, mixers=_ATTEND,
            reach=_Q, spliced=True, lens=(_B + "attn.hook_q", _B + "attn.q.hook_out"),
            latent_lens=(), modules=(".self_attn.q_proj",),
        ),
        Site(
            "kv_latent", "vector that gives all heads' keys and values: after its norm",
            ("latent",), requires=("latent",), mixers=_ATTEND, reach=("wka",), spliced=True,
            lens=(_B + "attn.hook_kv_latent",),
        ),
        Site(
            "k", "keys as projected: before k-norm and rotary", _KV_HEADS, requires=("own_keys",),
            mixers=_ATTEND, reach=_K, spliced=True,
            lens=(_B + "attn.hook_k", _B + "attn.k.hook_out"), latent_lens=(),
            modules=(".self_attn.k_proj",),
        ),
        Site(
            "v", "values as projected", ("kv_heads", "value_dim"), requires=("own_keys",),
            mixers=_ATTEND, reach=("wv", "wka"), spliced=True,
            lens=(_B + "attn.hook_v", _B + "attn.v.hook_out"),
            latent_lens=(_B + "attn.hook_v",), modules=(".self_attn.v_proj",),
        ),
        Site(
            "q_rot", "queries as compared with keys: after q-norm and rotary", _HEADS,
            requires=("rotary",), mixers=_ATTEND, reach=_Q, lens=(_B + "attn.hook_rot_q",),
            latent_lens=(),
        ),
        Site(
            "k_rot", "keys as compared with queries: after k-norm and rotary", _KV_HEADS,
            requires=("rotary", "own_keys"), mixers=_ATTEND, reach=_K,
            lens=(_B + "attn.hook_rot_k",), latent_lens=(),
        ),
        Site(
            "attn_pattern", "attention weights of each head; keys count from the context's start",
            ("heads", "keys"), mixers=_ATTEND, reach=(*_Q, *_K, "scores"),
            lens=(_B + "attn.hook_pattern",),
            advice="it grows with --seq-len; choose few layers, shorter contexts, or --where",
        ),
        Site(
            "attn_top_keys", "the keys that each head weighs most, by their position in the "
            "context, largest weight first; -1 where the query has fewer; --attn-top says how many",
            ("heads", "top"), dtype="int32", mixers=_ATTEND, reach=(*_Q, *_K), group=ATTN_TOP,
            largest_of="keys", top=8, of_chosen=True, least=-1,
        ),
        Site(
            "attn_top_weights", "the weights of these keys", ("heads", "top"), dtype="float32",
            mixers=_ATTEND, reach=(*_Q, *_K), group=ATTN_TOP, largest_of="keys", top=8,
            of_chosen=True,
        ),
        Site(
            "attn_summary", "of each head's weights: entropy in nats, weight on the context's "
            "first token (BOS), on itself, on the token before, mean distance",
            ("heads", "summary"),
            dtype="float32", mixers=_ATTEND, reach=(*_Q, *_K), of_chosen=True,
        ),
        Site(
            "ssm_in", "input of a state space: after its norm", ("width",),
            mixers=_SPACE, reach=(), spliced=True,
            lens=(_B + "mixer.hook_in", _B + "hook_mixer_in", _B + "mamba.hook_in"),
        ),
        Site(
            "conv_in", "input of the short convolution: after one of its gates",
            ("channels",), mixers=(SHORT_CONVOLUTION,), reach=_CONVOLVED, spliced=True,
        ),
        Site(
            "conv_out", "queries, keys and values after the short convolution; of a state space: "
            "values, keys and queries (x, B, C)", ("channels",), mixers=_CONVOLVE,
            reach=("wdq", "wdk", "wdv", *_CONVOLVED, *_SPACED), spliced=True,
        ),
        Site(
            "conv_gate", "the gate that multiplies the convolution's output", ("channels",),
            mixers=(SHORT_CONVOLUTION,), reach=("wcc",), spliced=True,
        ),
        Site(
            "delta_state_norm", "Frobenius norm of each head's state, after the token", ("heads",),
            mixers=(GATED_DELTA,), reach=_MIXED,
        ),
        Site(
            "attn_gate", "the gate that multiplies mixed values: after its activation",
            _MIXED_HEADS, requires=("gate",), mixers=(*_ATTEND, GATED_DELTA), reach=_GATE,
            spliced=True,
        ),
        Site(
            "z", "values mixed by each head, gated where there is a gate: before the output "
            "projection", _MIXED_HEADS, mixers=(*_ATTEND, GATED_DELTA), reach=(*_MIXED, *_GATE),
            spliced=True, lens=(_B + "attn.hook_z", _B + "attn.o.hook_in"),
        ),
        Site(
            "attn_out", "what attention, or another mixer, adds to the residual stream", ("width",),
            mixers=_ATTN, reach=_ATTENTION, spliced=True, streams=True,
            lens=(_B + "hook_attn_out",),
            modules=(
                ".self_attn", ".self_attn.o_proj", ".linear_attn", ".linear_attn.out_proj",
                ".linear_attn.o_proj", ".conv", ".conv.out_proj", ".attn", ".attn.c_proj",
                ".attention", ".attention.dense",
            ),
        ),
        Site(
            "ssm_read", "what each head of a state space reads from its state, and past it: "
            "before its gate and norm", _SSM_HEADS, mixers=_SPACE, reach=_READ, spliced=True,
        ),
        Site(
            "ssm_gate", "the gate that multiplies the values read: after its activation",
            _SSM_HEADS, mixers=_SPACE, reach=("wmz",), spliced=True,
        ),
        Site(
            "ssm_z", "the same values, gated and normalised: before the output projection",
            _SSM_HEADS, mixers=_SPACE, reach=(*_READ, "wmz"), spliced=True,
        ),
        Site(
            "ssm_out", "what a state space adds to the residual stream", ("width",), mixers=_SPACE,
            reach=(*_READ, "wmz", "wmo"), spliced=True, streams=True,
            lens=(
                _B + "mixer.hook_out", _B + "mixer.hook_ssm_out", _B + "hook_mixer_out",
                _B + "mamba.hook_out", _B + "mamba.hook_ssm_out",
            ),
            modules=(".mamba", ".mamba.out_proj", ".mixer.out_proj"),
        ),
        Site(
            "resid_mid", "residual stream between attention, or another mixer, and MLP",
            ("width",), requires=("sequential", "mlp"), mixers=(*_ATTN, STATE_SPACE),
            reach=ALL_MIXERS, spliced=True, streams=True, lens=(_B + "hook_resid_mid",),
        ),
        Site(
            "mlp_in", "input of the MLP: after its norm", ("width",),
            requires=("mlp",), reach=ALL_MIXERS, spliced=True, lens=(_B + "mlp.hook_in",),
        ),
        Site(
            "router_logits", "scores of all experts", ("experts",), requires=("mlp", "experts"),
            reach=_ROUTED, lens=(_B + "mlp.gate.hook_out",),
        ),
        Site(
            "expert_weights", "weights of the chosen experts, largest first", ("chosen",),
            requires=("mlp", "experts"), reach=_ROUTED,
        ),
        Site(
            "expert_ids", "which experts were chosen, largest weight first", ("chosen",),
            dtype="int16", requires=("mlp", "experts"), reach=_ROUTED,
            lens=(_B + "mlp.hook_expert_indices",),
        ),
        Site(
            "mlp_hidden", "inside the MLP, after the gate: input of the down projection",
            ("mlp",), requires=("mlp", "dense"), spliced=True,
            reach=(*ALL_MIXERS, "w_gate", "w_up", "wd_gate", "wd_up", "ws_gate", "ws_up"),
            lens=(_B + "mlp.hook_post", _B + "mlp.out.hook_in"),
        ),
        Site(
            "shared_expert_out", "output of the shared expert, to which every token goes",
            ("width",), requires=("mlp", "shared"), spliced=True,
            reach=(*ALL_MIXERS, "ws_gate", "ws_up", "ws_down", "ws_router"),
        ),
        Site(
            "mlp_out", "what the MLP adds to the residual stream", ("width",), requires=("mlp",),
            spliced=True, streams=True, lens=(_B + "hook_mlp_out",),
            modules=(".mlp", ".mlp.down_proj", ".mlp.c_proj", ".mlp.dense_4h_to_h"),
        ),
        Site(
            "layer_embed", "the block's own embedding of the token", ("layer_embed",),
            requires=("layer_embed",), reach=(), spliced=True,
        ),
        Site(
            "layer_embed_out", "what the block's own embedding adds to the residual stream",
            ("width",), requires=("layer_embed",), spliced=True, streams=True,
        ),
        Site(
            "resid_post", "residual stream leaving the block", ("width",), spliced=True,
            streams=True, lens=(_B + "hook_resid_post", _B + "hook_out"), modules=("",),
        ),
        Site(
            "final_norm", "after the last norm: input of the head", ("width",), stage=AFTER,
            lens=("ln_final.hook_out", "unembed.hook_in"),
            modules=("model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm"),
        ),
        Site(
            "logits", "next-token logits", ("vocab",), stage=AFTER, head=True,
            lens=("unembed.hook_out",), modules=("lm_head", "embed_out"),
            advice="logprob and entropy, or --where, may be enough",
        ),
        Site(
            "logprob", "log-probability of the next token; 0 at a context's end (flag `last`)", (),
            stage=AFTER, head=True, dtype="float32",
        ),
        Site(
            "entropy", "entropy of the next-token distribution, in nats", (), stage=AFTER,
            head=True, dtype="float32",
        ),
        Site(
            "logsumexp", "logarithm of the sum of all tokens' exponentiated logits: a logit less "
            "this is a log-probability", (), stage=AFTER, head=True, dtype="float32",
            group=TOP_LOGITS,
        ),
        Site(
            "next_rank", "how many tokens the model ranks above the next one; 0 at a context's end "
            "(flag `last`)", (), stage=AFTER, head=True, dtype="int32", group=TOP_LOGITS,
        ),
        Site(
            "top_token_ids", "the most likely next tokens, most likely first; --top-logits says "
            "how many", ("top",), stage=AFTER, head=True, dtype="int32", group=TOP_LOGITS,
            largest_of="vocab", top=64,
        ),
        Site(
            "top_logprobs", "log-probabilities of these tokens", ("top",), stage=AFTER, head=True,
            dtype="float32", group=TOP_LOGITS, largest_of="vocab", top=64,
        ),
    )
}  # fmt: skip
# Sites that a lens computes from the stream after a block (`--lens`), by models that have none too.
LENS_TOP = "lens_top"
LENSES = {
    site.name: site
    for site in (
        Site(
            "lens_logsumexp", "of a lens's logits: logarithm of the sum of the exponentials", (),
            dtype="float32", group=LENS_TOP,
        ),
        Site(
            "lens_top_ids", "the next tokens that a lens says are most likely; --top-logits says "
            "how many", ("top",), dtype="int32", group=LENS_TOP, largest_of="vocab", top=64,
        ),
        Site(
            "lens_top_logprobs", "log-probabilities of these tokens", ("top",), dtype="float32",
            group=LENS_TOP, largest_of="vocab", top=64,
        ),
    )
}  # fmt: skip
AFTER_BLOCKS = tuple(site.name for site in SITES.values() if site.stage == AFTER)
SPLICED = tuple(site.name for site in SITES.values() if site.spliced)
STREAMS = tuple(site.name for site in SITES.values() if site.streams)
# Sites that a backward pass computes, each from one where values can be changed.
GRADIENT, ATTRIBUTION, EDGE = "_grad", "_attr", "_edge"
_GRADIENTS = {
    name + GRADIENT: replace(
        SITES[name],
        name=name + GRADIENT,
        meaning=f"gradient of the objective with respect to {name}",
        of=name,
        lens=(),
        latent_lens=None,
        modules=(),
        spliced=False,
        streams=False,
    )
    for name in SPLICED
}
_ATTRIBUTIONS = {
    name + ATTRIBUTION: replace(
        gradient,
        name=name + ATTRIBUTION,
        meaning=f"gradient of the objective with respect to {name}, times its values: their sum",
        shape=gradient.shape[:-1],
        dtype="float32",
        summed=True,
    )
    for name, gradient in zip(SPLICED, _GRADIENTS.values(), strict=True)
}
# The stream at several depths, and everything that is added to it: what edges lead to, and from.
READERS = ("resid_pre", "resid_mid", "resid_post")
WRITERS = ("embed", "attn_out", "ssm_out", "mlp_out", "layer_embed_out", *READERS)
HEADS_WRITE = "z"  # each of its heads is a writer, too: through its part of the output projection
_EDGES = {
    name + EDGE: replace(
        _GRADIENTS[name + GRADIENT],
        name=name + EDGE,
        meaning=f"product of the objective's gradient at {name} with the values of each of "
        "--writers",
        shape=("writers",),
        dtype="float32",
        crossed=True,
    )
    for name in READERS
}
BACKWARD = _GRADIENTS | _ATTRIBUTIONS | _EDGES
GROUPS = {  # names that stand for several sites in `--taps`
    group: tuple(site.name for site in SITES.values() if site.group == group)
    for group in dict.fromkeys(site.group for site in SITES.values() if site.group)
} | {LENS_TOP: (*LENSES,)}

# Features that only some models, or layers, have: how to tell, and what to say of one without it.
FEATURES: dict[str, tuple[Callable[[Arch, Layer], bool], str]] = {
    "rotary": (lambda arch, layer: bool(arch.ropes), "it rotates nothing"),
    "sequential": (
        lambda arch, layer: not arch.parallel, "attention and MLP run in parallel there"
    ),
    "mlp": (lambda arch, layer: layer.mlp, "the block has no MLP"),
    "experts": (lambda arch, layer: arch.routed(layer), "it has no experts"),
    "shared": (
        lambda arch, layer: arch.routed(layer) and arch.experts is not None
        and arch.experts.shared > 0, "it has no shared expert",
    ),
    "dense": (
        lambda arch, layer: not arch.routed(layer)
        or (arch.experts is not None and arch.experts.apart),
        "its MLP is a mixture of experts",
    ),
    "own_keys": (
        lambda arch, layer: not layer.borrows, "it reads the keys and values of an earlier layer"
    ),
    "layer_embed": (
        lambda arch, layer: arch.layer_embed > 0, "blocks have no embeddings of their own"
    ),
    "gate": (
        lambda arch, layer: arch.attn_gate or layer.mixer == GATED_DELTA,
        "what it mixes is not gated",
    ),
    "latent": (
        lambda arch, layer: arch.latent is not None,
        "keys and values are projected from the stream itself",
    ),
}  # fmt: skip


def axis_sizes(arch: Arch, seq_len: int, layer: Layer) -> dict[str, int]:
    """The length of each axis of `Site.shape`, in one layer of a model."""
    arch, experts = arch.of(layer), arch.experts
    beside = experts.shared if experts and experts.apart else 0
    sizes = {
        "width": arch.width,
        "heads": arch.num_heads,
        "kv_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "value_dim": arch.value_dim,
        "latent": arch.latent.rank if arch.latent else 0,
        # (Experts' inner values are not tapped.)
        "mlp": beside or arch.dense_width or arch.mlp_width,
        "layer_embed": arch.layer_embed,
        "keys": seq_len,
        "summary": len(SUMMARY),
        "vocab": arch.vocab_size,
        "experts": experts.count if experts else 0,
        "chosen": experts.chosen if experts else 0,
    }
    if layer.mixer == GATED_DELTA and (delta := arch.delta):
        sizes |= {"heads": delta.value_heads, "value_dim": delta.value_dim}
        sizes["channels"] = delta.channels
    if layer.has_state_space and (space := arch.state_space):
        sizes |= {"ssm_heads": space.heads, "ssm_dim": space.head_dim, "channels": space.channels}
    if layer.mixer == SHORT_CONVOLUTION:
        sizes["channels"] = arch.width
    return sizes

"""One block: its norms, its mixers and its MLP or experts, with every value that can be tapped."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spile.models.config.arch import (
    ATTENTION,
    GATED_DELTA,
    NO_MIXER,
    SHORT_CONVOLUTION,
    SIDE_BY_SIDE,
    STATE_SPACE,
    Arch,
    Layer,
)
from spile.models.config.specs import DENSE, MLP, SHARED
from spile.models.forward import moe
from spile.models.forward.attended import attended
from spile.models.forward.attention import (
    Keys,
    Queries,
    Scoring,
    TokenPlaces,
    chunked,
    mixed,
    pattern,
)
from spile.models.forward.forward_pass import (
    ForwardPass,
    Lent,
    SiteValues,
)
from spile.models.forward.kernels import rotary
from spile.models.forward.kernels.chunks import with_gradient_of
from spile.models.forward.kernels.grouped import Activation, inner_layer, mosaic_serves
from spile.models.forward.mixers.gated_delta import gated_delta
from spile.models.forward.mixers.latent_heads import latent_heads, rotate_last
from spile.models.forward.mixers.short_convolution import short_convolution
from spile.models.forward.mixers.state_space import state_space
from spile.models.forward.ops import (
    Float8Weight,
    Heads,
    Hidden,
    Places,
    activate,
    linear,
    norm,
    rotate,
    scaled,
    xielu,
)
from spile.models.forward.sharding import P
from spile.models.forward.splice import At, in_block
from spile.models.forward.weights import Block
from spile.models.layout import ROWS
from spile.models.sites import SITES

# Widths up to which one kernel for products and activation gains, with a gate and without.
_NARROW, _NARROW_UNGATED = 1536, 4096


def run_block(
    x: Hidden,
    block: Block,
    layer: Layer,
    run: ForwardPass,
    at: At,
    own: Array | None = None,
    lent: Lent | None = None,
) -> tuple[Hidden, Lent | None, SiteValues]:
    """Run one block.

    Args:
        own: its own embeddings of the tokens, if it has some.
        lent: the keys and values that it borrows, if it does.

    Returns:
        The stream that leaves it, the keys and values that later blocks can borrow, and the values
        that can be tapped inside.
    """
    run = replace(run, arch=run.arch.of(layer))
    arch, block = run.arch, run.used(block)
    normed = partial(own_norm, block=block, arch=arch)

    def entering(stream: Hidden, name: str) -> Hidden:
        own = run.again(partial(normed, name=name))
        return own(stream.astype(block[name].dtype) if arch.wide_stream else stream)

    def added(site: str, out: Hidden) -> Hidden:
        out = normed(out, site.replace("_out", "_post_norm"))
        return at(site, scaled(out, arch.residual_scale))

    # Without the barriers, XLA computes the norms after attention and MLP again in each kernel that
    # reads the stream, which then runs at half of the memory's rate.
    normed_after = "mlp_post_norm" in arch.norms_of(layer)
    materialized = jax.lax.optimization_barrier if normed_after else lambda stream: stream
    values: SiteValues = {}
    lends: Lent | None = None
    mixers = _MIXERS[layer.mixer]
    beside = bool(mixers) and layer.mlp and arch.parallel  # both read the same stream
    post = reads = to_mlp = x
    if mixers:
        reads = entering(x, "attn_norm")
        if beside:
            to_mlp = reads if arch.shared_norm else entering(x, "mlp_norm")
            if not run.shards:
                # Or a GPU's product would copy the stream before it adds to it, since it is read
                # later. (On a mesh, both norms at once would take memory.)
                post, reads, to_mlp = jax.lax.optimization_barrier((x, reads, to_mlp))
        for name, mix in mixers.items():
            given = at(f"{name}_in", reads)
            result, kept, inside = mix(given, block, layer, run, at, lent)
            lends = kept or lends
            out = added(f"{name}_out", result)
            post = post + out.astype(x.dtype)
            values |= {**inside, f"{name}_in": given, f"{name}_out": out}
        if layer.mlp and not beside:
            values["resid_mid"] = post = materialized(at("resid_mid", post))
    if layer.mlp:
        if not beside:
            to_mlp = entering(post, "mlp_norm")
        mlp_in = at("mlp_in", to_mlp)
        mlp, inside = _mlp(mlp_in, x if beside else post, block, run, at)
        mlp_out = added("mlp_out", mlp)
        post = mlp_out.astype(x.dtype) + post
        values |= {**inside, "mlp_in": mlp_in, "mlp_out": mlp_out}
    if own is not None:
        values["layer_embed"] = own = at("layer_embed", own)
        gated = activate(own, linear(post, block["wlg"]), arch.activation, None)
        embedded = added("layer_embed_out", linear(gated, block["wlo"]))
        values["layer_embed_out"] = embedded
        post = post + embedded.astype(x.dtype)
    if arch.block_scale:
        post = post * block["block_scale"].reshape(1, 1, 1)
    values["resid_post"] = post = materialized(run.by_rows(at("resid_post", post)))
    return post, lends, values


def own_norm(
    x: Float[Array, "rows seq *heads width"],
    name: str,
    *,
    block: Block,
    arch: Arch,
    rotated: bool = False,
) -> Float[Array, "rows seq *heads width"]:
    """Apply a norm of the block, if it has that one."""
    bare = arch.norm == "layer_bare" and name in (*arch.norms, "final_norm")
    if name not in block and not bare:
        return x
    weight, bias = block.get(name), block.get(f"{name}_bias")
    kind = arch.last_norm if name == "final_norm" and arch.last_norm else arch.norm
    eps = arch.norm_eps
    if arch.post_norm_eps is not None and name in ("attn_post_norm", "mlp_post_norm"):
        eps = arch.post_norm_eps
    return norm(x, weight, bias, kind, eps, rotated=rotated)


def _attend(
    x: Hidden, block: Block, layer: Layer, run: ForwardPass, at: At, lent: Lent | None
) -> tuple[Hidden, Lent, SiteValues]:
    arch = run.arch
    x = scaled(x, arch.attn_in_scale)
    values = (latent_heads if arch.latent else _heads)(x, block, arch, at)
    q = _met(values["q"], "q_norm", block, layer, run, arch.query_scale)
    if layer.borrows:
        assert lent is not None
        k, v = lent
    else:
        k = _met(scaled(values["k"], arch.key_scale), "k_norm", block, layer, run)
        v = _limited(values["v"], arch)
        v = norm(v, None, None, arch.norm, arch.norm_eps) if arch.v_norm else v
    rotated = _rotates(layer, run)
    if arch.attn_growth and not rotated:
        q = _grown(q, run.positions, *arch.attn_growth)
    values |= {"q_rot": q, "k_rot": k}
    slopes = jnp.asarray(arch.alibi, jnp.float32) if arch.alibi else None
    scoring = Scoring(
        arch.attn_scale, layer.window, arch.attn_softcap, sinks=block.get("sinks"), slopes=slopes
    )
    if run.scores_all:
        places = chunked(run.segments, run.positions, layer.chunk)
        weights = pattern(q, k, *places, scoring)
        if "attn_pattern" in run.wanted:
            values["attn_pattern"] = _from_context_start(weights, run.positions)
        z = mixed(weights, v)
    else:
        z = run.attends[layer.chunk](q, k, v, scoring)
    values |= _looked_at(q, k, layer, scoring, run)
    if arch.attn_gate:
        gate = jax.nn.sigmoid(linear(x, block["wg"], block.get("bg")))
        values["attn_gate"] = gate = at("attn_gate", gate.reshape(z.shape))
        z = z * gate
    values["z"] = z = at("z", z)
    out = linear(z.reshape(*x.shape[:2], -1), block["wo"], block.get("bo"))
    return scaled(out, arch.attn_out_scale), (k, v), values


def _looked_at(q: Queries, k: Keys, layer: Layer, scoring: Scoring, run: ForwardPass) -> SiteValues:
    """Where heads look, if it is tapped: only in the tapped layers, and for the chosen heads."""
    together: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for site, layers in run.wanted.items():
        if SITES[site].of_chosen:
            heads = run.heads.get((site, layer.shapes)) or range(q.shape[2])
            together.setdefault((tuple(heads), tuple(layers)), []).append(site)
    segments, positions = chunked(run.segments, run.positions, layer.chunk)
    order = jnp.broadcast_to(jnp.arange(q.shape[1]), segments.shape)
    keys = TokenPlaces(order, segments, positions)
    found: SiteValues = {}
    for (heads, layers), sites in together.items():

        def look(heads: tuple[int, ...] = heads, sites: list[str] = sites) -> SiteValues:
            chosen = np.array(heads)
            several = q.shape[2] // k.shape[2]
            whole = len(heads) == q.shape[2]
            own = scoring if whole else scoring.of_heads(chosen)
            return attended(
                run.kept(q if whole else q[:, :, chosen]),
                k if whole else k[:, :, chosen // several],
                TokenPlaces(*map(run.kept, keys)),
                keys,
                run.kept(run.positions),
                own,
                sites,
                max(run.tops.get(site, 0) for site in sites),
            )

        here = run.running.is_among(layers)
        if isinstance(here, bool):
            found |= look() if here else _zeros(look)
        else:
            found |= jax.lax.cond(here, look, partial(_zeros, look))
    return found


def _zeros(function: Callable[[], SiteValues]) -> SiteValues:
    return {n: jnp.zeros(a.shape, a.dtype) for n, a in jax.eval_shape(function).items()}


def _rotates(layer: Layer, run: ForwardPass) -> bool:
    return bool(run.angles) and layer.rope is not None


def _limited(x: Heads, arch: Arch) -> Heads:
    return x if arch.qkv_limit is None else jnp.clip(x, -arch.qkv_limit, arch.qkv_limit)


def _met(
    x: Heads, name: str, block: Block, layer: Layer, run: ForwardPass, scale: float = 1.0
) -> Heads:
    """Queries or keys as attention compares them: normalised and rotated, if the model does so."""
    arch, rotated = run.arch, _rotates(layer, run)
    normed = partial(_head_norm, block=block, name=name, arch=arch, rotated=rotated)
    x = _limited(x, arch)
    if rotated and _one_pass_serves(x, name, block, layer, run):
        return _met_in_one_pass(x, name, block, layer, run, scale)
    if not arch.qk_norm_last:
        x = normed(x)
    x = scaled(x, scale)
    if rotated:
        turn = partial(rotate, interleaved=arch.rope_interleaved)
        if arch.latent:
            turn = partial(
                rotate_last, interleaved=arch.rope_interleaved, regrouped=arch.latent.regrouped
            )
        x = turn(x, *run.angles[layer.rope or 0])
    return normed(x) if arch.qk_norm_last else x


def _one_pass_serves(x: Heads, name: str, block: Block, layer: Layer, run: ForwardPass) -> bool:
    """Whether a GPU's kernel can do what `_met` does.

    Without a norm, XLA rotates in the pass that adds the projection's bias.
    """
    arch, weight = run.arch, block.get(name)
    cos, _ = run.angles[layer.rope or 0]
    plain = arch.latent is None and not arch.rope_interleaved and not arch.qk_norm_last
    simple = arch.qk_norm == "bare" if weight is None else weight.ndim == 1
    whole = arch.qk_norm != "full" and 2 * cos.shape[-1] == x.shape[-1]
    normed = plain and simple and whole and arch.norm.startswith("rms")
    return normed and rotary.serves(x.dtype, x.shape[-1])


def _met_in_one_pass(
    x: Heads, name: str, block: Block, layer: Layer, run: ForwardPass, scale: float
) -> Heads:
    arch, weight, eps = run.arch, block.get(name), run.arch.norm_eps

    def definition(x: Heads, weight: Array | None, cos: Array, sin: Array) -> Heads:
        x = norm(x, weight, None, arch.norm, eps, rotated=True)
        return rotate(scaled(x, scale), cos, sin)

    def kernel(x: Heads, weight: Array | None, cos: Array, sin: Array) -> Heads:
        if weight is not None and arch.norm == "rms_plus_one":
            weight = weight.astype(jnp.float32) + jnp.ones_like(weight, jnp.float32)
        return rotary.normed_and_rotated(x, weight, cos, sin, eps=eps, scale=scale)

    fused = with_gradient_of(definition, kernel)

    def either(*given: Any) -> Heads:
        return jax.lax.platform_dependent(*given, cuda=fused, default=definition)

    if run.shards:
        heads = P(ROWS, None, run.shards.model_axis("heads" if name == "q_norm" else "kv_heads"))
        either = run.shards.each(either, (heads, P(), P(ROWS), P(ROWS)), heads)
    return either(x, weight, *run.angles[layer.rope or 0])


def _gated_delta(
    x: Hidden, block: Block, layer: Layer, run: ForwardPass, at: At, lent: Lent | None
) -> tuple[Hidden, None, SiteValues]:
    norms = "delta_state_norm" in run.wanted
    out, values = gated_delta(
        x, block, run.segments, run.arch, at, shards=run.shards, state_norms=norms
    )
    return out, None, values


def _state_space(
    x: Hidden, block: Block, layer: Layer, run: ForwardPass, at: At, lent: Lent | None
) -> tuple[Hidden, None, SiteValues]:
    out, values = state_space(x, block, run.segments, run.arch, at, shards=run.shards)
    return out, None, values


def _convolve(
    x: Hidden, block: Block, layer: Layer, run: ForwardPass, at: At, lent: Lent | None
) -> tuple[Hidden, None, SiteValues]:
    out, values = short_convolution(x, block, run.segments, at, shards=run.shards)
    return out, None, values


# The mixers of a block, by the sites before and after each. All mixers of a block read the same
# input, and their outputs are added. Attention reads the keys and values of an earlier block, if it
# borrows, and returns those that later ones can borrow.
_MIXERS: dict[str, dict[str, Callable[..., tuple[Hidden, Lent | None, SiteValues]]]] = {
    ATTENTION: {"attn": _attend},
    GATED_DELTA: {"attn": _gated_delta},
    SHORT_CONVOLUTION: {"attn": _convolve},
    STATE_SPACE: {"ssm": _state_space},
    SIDE_BY_SIDE: {"attn": _attend, "ssm": _state_space},
    NO_MIXER: {},
}


def _grown(q: Heads, positions: Places, share: float, step: int) -> Heads:
    """Sharpen attention with the number of keys (arXiv:2501.19399), step by step."""
    steps = jnp.floor((positions + 1).astype(jnp.float32) / step)
    growth = 1.0 + share * jnp.log1p(steps)
    return (q.astype(jnp.float32) * growth[:, :, None, None]).astype(q.dtype)


def _heads(x: Hidden, block: Block, arch: Arch, at: At) -> SiteValues:
    """Queries, keys and values, as projected from the stream; of a block that borrows, queries."""

    def heads(name: str) -> Heads:
        projected = linear(x, block[f"w{name}"], block.get(f"b{name}"))
        return projected.reshape(*x.shape[:2], -1, arch.head_dim)

    found = {name: heads(name) for name in "qkv" if f"w{name}" in block}
    if "k" in found:
        found.setdefault("v", found["k"])
    return {name: at(name, values) for name, values in found.items()}


def _head_norm(x: Heads, *, block: Block, name: str, arch: Arch, rotated: bool) -> Heads:
    if arch.qk_norm_rotated and not rotated:
        return x
    if arch.qk_norm == "bare":
        return norm(x, None, None, arch.norm, arch.norm_eps, rotated=rotated)
    normed = partial(own_norm, name=name, block=block, arch=arch, rotated=rotated)
    if arch.qk_norm != "full":
        return normed(x)
    return normed(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def _from_context_start(
    weights: Float[Array, "rows heads seq keys"], positions: Places
) -> Float[Array, "rows seq heads keys"]:
    """Index keys by their position in the query's own context, so that packing does not show."""
    seq = weights.shape[-1]
    starts = jnp.arange(seq)[None, :] - positions
    places = (starts[:, :, None] + jnp.arange(seq)[None, None, :])[:, None]
    visible = jnp.arange(seq)[None, None, None, :] <= positions[:, None, :, None]
    moved = jnp.take_along_axis(weights, jnp.minimum(places, seq - 1), axis=-1)
    return jnp.where(visible, moved, 0.0).swapaxes(1, 2)


def _mlp(
    x: Hidden, stream: Hidden, block: Block, run: ForwardPass, at: At
) -> tuple[Hidden, SiteValues]:
    """The MLP, or experts in its place. `stream`: the values whose norm is `x`."""
    arch, experts = run.arch, run.arch.experts
    if "w_router" not in block:
        out, hidden = _dense_mlp(x, block, DENSE if "wd_up" in block else MLP, run, at)
        return out, {"mlp_hidden": hidden}
    assert experts
    normed = partial(own_norm, block=block, arch=arch)
    asked = given = x
    if experts.apart:
        asked = norm(stream, None, None, arch.norm, arch.norm_eps)
        asked = scaled(asked * block["router_scale"].reshape(1, 1, -1), arch.width**-0.5)
        given = normed(stream, "experts_norm")
    logits, weights, ids = moe.route(asked, block, experts)
    # Where the router saw NaN it chose nothing: ids are the only values that could hide that.
    known = jnp.isfinite(logits).all(axis=-1, keepdims=True)
    chosen = jnp.where(known, ids, -1)
    values = {"router_logits": logits, "expert_weights": weights, "expert_ids": chosen}
    mixed = partial(moe.mixed_experts, shards=run.shards) if run.shards else moe.mix
    out = mixed(given, weights, ids, block, arch, differentiable=run.goes_back)
    out = normed(out, "experts_post_norm")
    if experts.shared:
        within = at if experts.apart else in_block({})
        shared, hidden = _dense_mlp(x, block, SHARED, run, within)
        values |= {"mlp_hidden": hidden} if experts.apart else {}
        shared = normed(shared, "shared_post_norm")
        if experts.shared_gate:
            shared = shared * jax.nn.sigmoid(linear(x, block["ws_router"]))
        values["shared_expert_out"] = shared = at("shared_expert_out", shared)
        out = out + shared
    return out, values


def _dense_mlp(
    x: Hidden, block: Block, stem: str, run: ForwardPass, at: At
) -> tuple[Hidden, Float[Array, "rows seq mlp"]]:
    """The MLP whose arrays' names begin with `stem`: its output, and what its last layer reads."""
    arch, bias = run.arch, stem.replace("w", "b")
    of_gate, of_output = arch.mlp_scales
    activation = Activation(arch.activation, arch.glu_limit)
    if _one_kernel_serves(x, block, stem, run, activation):
        given = block[f"{stem}up"], block.get(f"{stem}gate"), block.get(f"{bias}up")
        inner = inner_layer(x.reshape(-1, x.shape[-1]), *given, activation)
        inner = inner.reshape(*x.shape[:2], -1)
    else:
        gate = None
        if arch.gated:
            gate = scaled(linear(x, block[f"{stem}gate"], block.get(f"{bias}gate")), of_gate)
        up = linear(x, block[f"{stem}up"], block.get(f"{bias}up"))
        if arch.activation == "xielu":
            inner = xielu(up, block["xielu_up"], block["xielu_down"])
        else:
            active = partial(activate, name=arch.activation, limit=arch.glu_limit)
            inner = run.again(active)(up, gate)
    hidden = at("mlp_hidden", inner)
    if isinstance(block[f"{stem}down"], Float8Weight):
        # Or XLA computes it twice: for the largest value of each token, and to scale by that.
        hidden = jax.lax.optimization_barrier(hidden)
    out = linear(hidden, block[f"{stem}down"], block.get(f"{bias}down"))
    return scaled(out, of_output), hidden


def _one_kernel_serves(
    x: Hidden, block: Block, stem: str, run: ForwardPass, activation: Activation
) -> bool:
    """Whether a kernel for an MLP's inner layer runs: in narrow models it is the fastest.

    Without a gate, it is for the exact GELU: others are part of the product by XLA.
    """
    arch, names = run.arch, [f"{stem}up"]
    names += [f"{stem}gate"] if arch.gated else []
    widest = _NARROW if arch.gated else _NARROW_UNGATED
    if run.shards or run.goes_back or x.shape[-1] > widest:
        return False
    if arch.gated:
        simple = arch.mlp_scales[0] == 1.0 and f"{stem.replace('w', 'b')}up" not in block
    else:
        simple = arch.activation == "gelu"
    plain = all(name in block and not isinstance(block[name], Float8Weight) for name in names)
    return simple and plain and activation.serves(x.dtype) and mosaic_serves(block[names[0]][None])

"""The gated delta rule: each head keeps a matrix that maps keys to values, and forgets.

At every token, a head's state decays by a factor. Then the value that the state holds under the
token's key is replaced, in part, by the token's own value, and the token's query reads from the
result. Queries, keys and values come from a short convolution. State and convolution restart with
every document. Each dimension of a key may have its own decay (`decay_by_channel`).

`recurrent` is that definition, token by token. `chunked` is what runs: it computes the same values
by matrix products within chunks of tokens, and only the chunks run in sequence. Both compute in
float32. Where they serve, kernels do the same for 16-bit values: `kernels.gated_delta` on GPUs and
`kernels.gated_delta_tpu` on TPUs, or those of `decay_by_channel`.

Within a chunk, what each token writes depends on what the earlier ones wrote. This is a
triangular system, whose inverse is built from the inverses of its halves. (Its power series would
take fewer steps, but loses all precision if keys are similar.)
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spile.models.config.arch import Arch, GatedDelta
from spile.models.config.kernel_choice import BY_CHANNEL, DELTA
from spile.models.forward.kernels import decay_by_channel as by_channel_kernel
from spile.models.forward.kernels import decay_by_channel_tpu as by_channel_on_tpu
from spile.models.forward.kernels import gated_delta as kernel
from spile.models.forward.kernels import gated_delta_tpu as kernel_on_tpu
from spile.models.forward.kernels.chunks import (
    serves_on_tpu,
    serves_recurrence,
    with_gradient_of,
)
from spile.models.forward.mixers import decay_by_channel
from spile.models.forward.mixers.recurrence import (
    convolution,
    decays,
    in_chunks,
    inverse_of_unit_lower,
    out_of_chunks,
    shifted,
)
from spile.models.forward.ops import Channels, Heads, Hidden, Places, Scalars, linear, norm
from spile.models.forward.sharding import P, Shards
from spile.models.forward.splice import At
from spile.models.forward.weights import Block
from spile.models.layout import ROWS

CHUNK = 64  # tokens
_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
_NORM_EPS = 1e-6  # of queries and keys
_EXACT = jax.lax.Precision.HIGHEST

_Keys = Float[Array, "rows seq keys dim"]
_Kept = Float[Array, "rows seq heads *channels"]


class Read(NamedTuple):
    """What queries read, and, if requested, the norms of the states that they read."""

    values: Heads
    state_norms: Scalars | None


def gated_delta(
    x: Hidden,
    block: Block,
    segments: Places,
    arch: Arch,
    at: At,
    *,
    shards: Shards | None,
    state_norms: bool,
) -> tuple[Hidden, dict[str, Array]]:
    """Mix tokens; return the mixer's output, and the values that can be tapped inside.

    `state_norms`: whether these include the norms of the states.
    """
    delta = arch.delta
    assert delta
    convolved = [
        convolution(
            linear(x, block[f"wd{name}"]), block[f"conv_{name}"], None, segments, arch.activation,
            shards=shards,
        )
        for name in "qkv"
    ]  # fmt: skip
    conv_out = at("conv_out", jnp.concatenate(convolved, axis=-1))
    read = _by_heads(shards, _rule(delta, state_norms, conv_out.dtype))(
        *_split(conv_out, delta), *_strengths(x, block, delta), segments
    )
    gate = _projected(x, block, "g").reshape(read.values.shape).astype(jnp.float32)
    gate = at("attn_gate", _GATES[delta.gate](gate))
    z = norm(read.values.astype(x.dtype), block["delta_norm"], None, "rms", delta.norm_eps)
    z = at("z", (z.astype(jnp.float32) * gate).astype(x.dtype))
    out = linear(z.reshape(*x.shape[:2], -1), block["wdo"])
    inside = {"conv_out": conv_out, "attn_gate": gate, "z": z}
    if read.state_norms is not None:
        inside["delta_state_norm"] = read.state_norms
    return out, inside


def _split(convolved: Channels, delta: GatedDelta) -> tuple[_Keys, _Keys, Heads]:
    """Return queries, keys and values by head."""
    width = delta.key_heads * delta.key_dim
    q, k, v = jnp.split(convolved, (width, 2 * width), axis=-1)
    lead = convolved.shape[:2]
    q, k = (a.reshape(*lead, delta.key_heads, delta.key_dim) for a in (q, k))
    return q, k, v.reshape(*lead, delta.value_heads, delta.value_dim)


def _projected(x: Hidden, block: Block, name: str) -> Channels:
    """Project to the inputs of decay or gate, through a low rank if the block has one."""
    narrow = f"wd{name}n"
    return linear(linear(x, block[narrow]) if narrow in block else x, block[f"wd{name}"])


def _strengths(x: Hidden, block: Block, delta: GatedDelta) -> tuple[Scalars, _Kept]:
    """Return how much each token writes, and the state's log-decay, in float32."""
    written = jax.nn.sigmoid(linear(x, block["wdb"]))
    written = written * jnp.asarray(delta.most_written, written.dtype)
    bias = block["decay_bias"].astype(jnp.float32)[None, None]
    forgets = jax.nn.softplus(_projected(x, block, "a").astype(jnp.float32) + bias)
    if delta.by_channel:
        forgets = forgets.reshape(*x.shape[:2], delta.key_heads, delta.key_dim)
    rate = jnp.exp(block["decay"].astype(jnp.float32)).reshape(1, 1, -1, *[1] * delta.by_channel)
    return written.astype(jnp.float32), -rate * forgets


def _rule(delta: GatedDelta, state_norms: bool, dtype: jnp.dtype) -> Callable[..., Read]:
    """Return the rule, with queries and keys normalised: kernels on devices that they serve."""
    if not delta.by_channel:
        plain = partial(chunked, state_norms=state_norms)
    elif state_norms:
        # `chunked` gets norms from products of keys, which sum over channels and so lose their
        # decays.
        plain = recurrent
    else:
        plain = _by_channel
    exact = partial(_in_float32, rule=plain)
    kernels, sizes = dict[str, Callable[..., Heads]](), (delta.key_dim, delta.value_dim)
    if serves_recurrence(dtype, *sizes):
        kernels["cuda"] = by_channel_kernel.rule if delta.by_channel else kernel.rule
    if serves_on_tpu(BY_CHANNEL if delta.by_channel else DELTA, dtype, *sizes):
        kernels["tpu"] = by_channel_on_tpu.rule if delta.by_channel else kernel_on_tpu.rule
    if state_norms or not kernels:
        return exact

    def definition(*given: Array) -> Heads:
        return exact(*given).values.astype(dtype)

    ways = {
        platform: with_gradient_of(definition, partial(fused, eps=_NORM_EPS))
        for platform, fused in kernels.items()
    }
    return lambda *given: Read(jax.lax.platform_dependent(*given, **ways, default=definition), None)


def _in_float32(q: _Keys, k: _Keys, v: Heads, *rest: Array, rule: Callable[..., Read]) -> Read:
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + _NORM_EPS) for a in (q, k))
    return rule(q * q.shape[-1] ** -0.5, k, v, *rest)


def _by_channel(*given: Array) -> Read:
    return Read(decay_by_channel.chunked(*given, size=CHUNK), None)


def _by_heads(shards: Shards | None, rule: Callable[..., Read]) -> Callable[..., Read]:
    """Return the rule; on a mesh, each device applies it to its rows and its heads."""
    if shards is None:
        return rule
    heads = P(ROWS, None, shards.model_axis("delta_heads"))
    # One spec serves both parts of `Read`; it is unused if there are no norms.
    return shards.each(rule, (heads,) * 5 + (P(ROWS),), heads)


def recurrent(
    q: _Keys, k: _Keys, v: Heads, written: Scalars, kept: _Kept, segments: Places
) -> Read:
    """Compute the rule by definition, token by token.

    Args:
        written: the share of the value under its key that a token replaces.
        kept: the log-decay of a state, or of each of its channels.
    """
    rows, _, heads, dim = v.shape
    kept = kept.reshape(*kept.shape[:3], -1)
    q, k = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in (q, k))
    begins = shifted(segments, 1, fill=-1) != segments
    exact = partial(jnp.einsum, precision=_EXACT)

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Read]:
        q, k, v, written, kept, begins = token
        state = jnp.where(begins[:, None, None, None], 0.0, jnp.exp(kept)[..., None] * state)
        missing = v - exact("rhk,rhkv->rhv", k, state)
        state = state + exact("rhk,rhv->rhkv", k, missing * written[..., None])
        read = exact("rhk,rhkv->rhv", q, state)
        return state, Read(read, jnp.sqrt(jnp.sum(state * state, axis=(-1, -2))))

    tokens = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, written, kept, begins))
    begin = jnp.zeros((rows, heads, q.shape[-1], dim), jnp.float32)
    _, read = jax.lax.scan(step, begin, tokens)
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), read)


def chunked(
    q: _Keys,
    k: _Keys,
    v: Heads,
    written: Scalars,
    kept: Scalars,
    segments: Places,
    *,
    state_norms: bool = False,
) -> Read:
    """Compute the same by chunks of tokens; arguments as in `recurrent`.

    In the einsums: r rows, n chunks, g key heads, h value heads of each, t and j tokens of a chunk,
    k and v the dimensions of keys and values.
    """
    seq, groups = q.shape[1], q.shape[2]

    cut = partial(in_chunks, size=CHUNK)

    def grouped(a: Array) -> Array:
        """[..., value heads, ...] -> [rows, chunks, CHUNK, key heads, value heads of each, ...]."""
        a = cut(a)
        return a.reshape(*a.shape[:3], groups, -1, *a.shape[4:])

    places = cut(segments, fill=-1)
    q, k = cut(q), cut(k)
    v, written, kept = grouped(v), grouped(written), grouped(kept)

    between, since = decays(kept, places)

    by_key = jnp.einsum("rntgk,rnjgk->rngtj", k, k)[:, :, :, None]
    by_query = jnp.einsum("rntgk,rnjgk->rngtj", q, k)[:, :, :, None] * between
    strength = jnp.moveaxis(written, 2, -1)
    inverse = inverse_of_unit_lower(by_key * between * strength[..., None])
    solved = inverse * strength[..., None, :]
    # What each token writes if the chunk starts with an empty state, and the correction for each
    # value in the state at the chunk's start.
    fresh = jnp.einsum("rnghtj,rnjghv->rnghtv", solved, v)
    known = jnp.einsum("rnghtj,rnghj,rnjgk->rnghtk", solved, since, k)
    ends = between[..., -1, :]  # decay of what a token wrote until the chunk's end

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        q, k, fresh, known, by_query, since, ends = chunk
        wrote = fresh - jnp.einsum("rghtk,rghkv->rghtv", known, state)
        read = jnp.einsum("rghtj,rghjv->rghtv", by_query, wrote)
        read = read + since[..., None] * jnp.einsum("rtgk,rghkv->rghtv", q, state)
        after = state * since[..., -1, None, None]
        after = after + jnp.einsum("rtgk,rghtv->rghkv", k, ends[..., None] * wrote)
        return after, (read, wrote, state) if state_norms else (read,)

    by_chunk = (q, k, fresh, known, by_query, since, ends)
    begin = jnp.zeros((*fresh.shape[:1], *fresh.shape[2:4], k.shape[-1], v.shape[-1]), jnp.float32)
    _, found = jax.lax.scan(step, begin, tuple(jnp.moveaxis(a, 1, 0) for a in by_chunk))
    read, *rest = (jnp.moveaxis(a, 0, 1) for a in found)

    whole = partial(out_of_chunks, seq=seq)
    norms = _state_norms(k, by_key, between, since, *rest) if state_norms else None
    return Read(whole(read), None if norms is None else whole(norms))


def _state_norms(
    k: Array, by_key: Array, between: Array, since: Array, wrote: Array, state: Array
) -> Float[Array, "rows chunks groups heads chunk"]:
    """Return the norm of the state after each token, without the states, which are too large.

    A state is a sum of two parts: the decayed state from before the chunk, and the products of keys
    and values written since. So the square of its norm has three terms: the square of each part,
    and twice their inner product.
    """
    exact = partial(jnp.einsum, precision=_EXACT)
    first = jnp.sum(state * state, axis=(-1, -2))[..., None]
    met = exact("rnjgk,rnghkv,rnghjv->rnghj", k, state, wrote)
    crossed = exact("rnghtj,rnghj->rnght", between, met)
    pairs = by_key * exact("rnghiv,rnghjv->rnghij", wrote, wrote)
    own = jnp.sum(exact("rnghti,rnghij->rnghtj", between, pairs) * between, axis=-1)
    return jnp.sqrt(jnp.maximum(since * since * first + 2 * since * crossed + own, 0.0))

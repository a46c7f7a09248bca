"""The state space of Mamba-2: each head keeps a matrix that maps keys to values, and forgets.

At every token, a head's state decays, the token's value is added to it under the token's key, and
the token's query reads from the result. The token's step size scales both decay and value. Heads of
a group share keys and queries. (The literature calls the values x, the keys B, the queries C, the
step sizes dt.) Heads, keys and queries come from a short convolution. State and convolution
restart with every document.

`recurrent` is that definition, token by token. `chunked` is what runs: it computes the same values
by matrix products within chunks of tokens, and only the chunks run in sequence. Both compute in
float32. Where it serves, one kernel does the same for 16-bit values (`kernels.state_space` on GPUs,
`kernels.state_space_tpu` on TPUs).
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spile.models.config.arch import Arch, StateSpace
from spile.models.config.kernel_choice import STATE_SPACES
from spile.models.forward.kernels import state_space as kernel
from spile.models.forward.kernels import state_space_tpu as kernel_on_tpu
from spile.models.forward.kernels.chunks import (
    serves_on_tpu,
    serves_recurrence,
    with_gradient_of,
)
from spile.models.forward.mixers.recurrence import (
    convolution,
    decays,
    in_chunks,
    out_of_chunks,
    shifted,
)
from spile.models.forward.ops import Heads, Hidden, Places, Scalars, linear, norm, scaled
from spile.models.forward.sharding import P, Shards
from spile.models.forward.splice import At
from spile.models.forward.weights import Block
from spile.models.layout import ROWS

CHUNK = 64  # tokens
_EXACT = jax.lax.Precision.HIGHEST

_Keys = Float[Array, "rows seq groups state"]


def state_space(
    x: Hidden, block: Block, segments: Places, arch: Arch, at: At, *, shards: Shards | None
) -> tuple[Hidden, dict[str, Array]]:
    """Mix tokens; return the mixer's output, and the values that can be tapped inside."""
    space = arch.state_space
    assert space
    lead = x.shape[:2]
    scales = dict(zip("zxbct", space.scales, strict=True))

    def projected(name: str) -> Array:
        given = scaled(x, space.in_scale)
        return scaled(linear(given, block[f"wm{name}"], block.get(f"bm{name}")), scales[name])

    convolved = [
        convolution(
            projected(name), block[f"conv_{name}"], block.get(f"conv_bias_{name}"), segments,
            space.activation, shards=shards,
        )
        for name in "xbc"
    ]  # fmt: skip
    conv_out = at("conv_out", jnp.concatenate(convolved, axis=-1))
    values, keys, queries = _split(conv_out, space)
    steps = projected("t").astype(jnp.float32) + _per_head(block["step_bias"])
    steps = jnp.clip(jax.nn.softplus(steps), space.least_step, space.most_step)
    kept = -jnp.exp(_per_head(block["decay"])) * steps
    skip = block["skip"].astype(jnp.float32)
    read = _by_heads(shards, conv_out.dtype, space)(
        queries, keys, values, steps, kept, skip, segments
    )
    read = at("ssm_read", read.astype(jnp.float32))
    gate = at("ssm_gate", jax.nn.silu(projected("z").astype(jnp.float32)).reshape(read.shape))
    z = at("ssm_z", _gated(read, gate, block, space, x.dtype))
    out = linear(z.reshape(*lead, -1), block["wmo"], block.get("bmo"))
    inside = {"conv_out": conv_out, "ssm_read": read, "ssm_gate": gate, "ssm_z": z}
    return scaled(out, space.out_scale), inside


def _per_head(values: Float[Array, " heads"]) -> Float[Array, "1 1 heads"]:
    return values.astype(jnp.float32)[None, None]


def _split(
    convolved: Float[Array, "rows seq channels"], space: StateSpace
) -> tuple[Heads, _Keys, _Keys]:
    """Return values by head, and keys and queries by group."""
    ends = (space.inner, space.inner + space.groups * space.state)
    x, b, c = jnp.split(convolved, ends, axis=-1)
    lead = convolved.shape[:2]
    b, c = (each.reshape(*lead, space.groups, space.state) for each in (b, c))
    return x.reshape(*lead, space.heads, space.head_dim), b, c


def _gated(read: Heads, gate: Heads, block: Block, space: StateSpace, dtype: jnp.dtype) -> Heads:
    """Multiply the values read by their gate and normalise them, in either order."""
    if space.norm is None:
        return (read * gate).astype(dtype)
    wide = read * gate if space.norm == "gated" else read
    parts = wide.reshape(*read.shape[:2], space.norm_groups, -1)
    weight = block["ssm_norm"].reshape(space.norm_groups, -1)
    normed = norm(parts, weight, None, "rms_float32", space.norm_eps).reshape(read.shape)
    return (normed if space.norm == "gated" else normed * gate).astype(dtype)


def _by_heads(shards: Shards | None, dtype: jnp.dtype, space: StateSpace) -> Callable[..., Heads]:
    """Return the rule; on a mesh, each device applies it to its rows and its heads."""
    rule = _rule(dtype, space)
    if shards is None:
        return rule
    axis = shards.model_axis("ssm_heads")
    heads, groups = P(ROWS, None, axis), P(ROWS, None, shards.model_axis("ssm_groups"))
    return shards.each(rule, (groups, groups, heads, heads, heads, P(axis), P(ROWS)), heads)


def _rule(dtype: jnp.dtype, space: StateSpace) -> Callable[..., Heads]:
    """Return the rule: one kernel on devices that it serves, otherwise chunks in float32."""
    sizes, ways = (space.state, space.head_dim), dict[str, Callable[..., Heads]]()
    if serves_recurrence(dtype, *sizes):
        ways["cuda"] = with_gradient_of(_in_float32, kernel.rule)
    if serves_on_tpu(STATE_SPACES, dtype, *sizes):
        ways["tpu"] = with_gradient_of(_in_float32, kernel_on_tpu.rule)
    if not ways:
        return _in_float32
    return lambda *given: jax.lax.platform_dependent(*given, **ways, default=_in_float32)


def _in_float32(
    q: _Keys,
    k: _Keys,
    v: Heads,
    steps: Scalars,
    kept: Scalars,
    skip: Float[Array, " heads"],
    segments: Places,
) -> Heads:
    dtype = v.dtype
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    read = chunked(q, k, v * steps[..., None], kept, segments)
    return (read + v * skip[None, None, :, None]).astype(dtype)


def recurrent(q: _Keys, k: _Keys, v: Heads, kept: Scalars, segments: Places) -> Heads:
    """Compute the rule by definition, token by token.

    Args:
        v: what each token adds to the state under its key.
        kept: the log-decay of the state.
    """
    rows, _, heads, dim = v.shape
    q, k = (jnp.repeat(a, heads // a.shape[2], axis=2) for a in (q, k))
    begins = shifted(segments, 1, fill=-1) != segments
    exact = partial(jnp.einsum, precision=_EXACT)

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, kept, begins = token
        state = jnp.where(begins[:, None, None, None], 0.0, jnp.exp(kept)[..., None, None] * state)
        state = state + exact("rhk,rhv->rhkv", k, v)
        return state, exact("rhk,rhkv->rhv", q, state)

    tokens = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, kept, begins))
    begin = jnp.zeros((rows, heads, q.shape[-1], dim), jnp.float32)
    _, read = jax.lax.scan(step, begin, tokens)
    return jnp.moveaxis(read, 0, 1)


def chunked(q: _Keys, k: _Keys, v: Heads, kept: Scalars, segments: Places) -> Heads:
    """Compute the same by chunks of tokens; arguments as in `recurrent`.

    In the einsums: r rows, n chunks, g groups, h heads of each, t and j tokens of a chunk, k and v
    the dimensions of keys and values.
    """
    seq, groups = q.shape[1], q.shape[2]
    cut = partial(in_chunks, size=CHUNK)

    def grouped(a: Array) -> Array:
        """[rows, seq, heads, ...] -> [rows, chunks, CHUNK, groups, heads of each, ...]."""
        a = cut(a)
        return a.reshape(*a.shape[:3], groups, -1, *a.shape[4:])

    q, k, v = cut(q), cut(k), grouped(v)
    between, since = decays(grouped(kept), cut(segments, fill=-1))
    scores = jnp.einsum("rntgk,rnjgk->rngtj", q, k)[:, :, :, None] * between
    near = jnp.einsum("rnghtj,rnjghv->rnghtv", scores, v)
    ends = between[..., -1, :]  # decay of what a token wrote until the chunk's end

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, since, ends = chunk
        far = since[..., None] * jnp.einsum("rtgk,rghkv->rghtv", q, state)
        after = state * since[..., -1, None, None]
        return after + jnp.einsum("rtgk,rght,rtghv->rghkv", k, ends, v), far

    by_chunk = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, since, ends))
    begin = jnp.zeros((*v.shape[:1], *v.shape[3:5], k.shape[-1], v.shape[-1]), jnp.float32)
    _, far = jax.lax.scan(step, begin, by_chunk)
    return out_of_chunks(near + jnp.moveaxis(far, 0, 1), seq=seq)

"""Causal attention that never crosses a document: several implementations, one signature.

A token is identified by its segment (its context within the row; 0 is padding) and its position in
the segment. A token sees itself and the earlier tokens of its segment; with a window, only the
nearest of them.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spile.models.forward.ops import Places, softcap, to_float16
from spile.models.forward.sharding import P, Shards
from spile.models.layout import ROWS

Queries = Float[Array, "rows seq heads dim"]
Keys = Float[Array, "rows seq kv_heads dim"]
Values = Float[Array, "rows seq kv_heads value_dim"]
Mixed = Float[Array, "rows seq heads value_dim"]
Weights = Float[Array, "rows heads queries keys"]
SomeQueries = Float[Array, "rows queries heads dim"]
AllKeys = Float[Array, "rows keys kv_heads dim"]


@dataclass(frozen=True)
class Scoring:
    """How scores become weights, in one kind of layer."""

    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: Float[Array, " heads"] | None = None
    slopes: Float[Array, " heads"] | None = None  # each score's fall per token of distance (ALiBi)

    def of_heads(self, chosen: Int[np.ndarray, " some"]) -> "Scoring":
        """Return the same for some of the heads."""
        sinks, slopes = (None if a is None else a[chosen] for a in (self.sinks, self.slopes))
        return replace(self, sinks=sinks, slopes=slopes)


@runtime_checkable
class Attend(Protocol):
    def __call__(self, q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed: ...


# Called once per batch with segments and positions; every layer uses the returned function.
Attention = Callable[[Places, Places], Attend]

HIDDEN = -1e30  # finite, so that padding, which sees no key, gives no NaN


def chunked(segments: Places, positions: Places, size: int | None) -> tuple[Places, Places]:
    """Return segments and positions after cutting contexts into chunks, each its own context."""
    if size is None:
        return segments, positions
    most = -(-segments.shape[1] // size)  # chunks of a context
    apart = segments * most + positions // size
    return jnp.where(segments > 0, apart, 0), positions % size


def masked(segments: Places, positions: Places) -> Attend:
    """Attend by definition: score every pair, and mask the invisible ones."""

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        return mixed(pattern(q, k, segments, positions, scoring), v)

    return attend


def pattern(q: Queries, k: Keys, segments: Places, positions: Places, scoring: Scoring) -> Weights:
    """Return the attention weights, in float32; with sinks they sum to less than one."""
    places = TokenPlaces(jnp.arange(q.shape[1])[None], segments, positions)
    scores = masked_scores(q, k, places, places, scoring)
    if scoring.sinks is None:
        return jax.nn.softmax(scores)
    sink = scoring.sinks.astype(jnp.float32).reshape(1, -1, 1, 1)
    last = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, last], axis=-1))[..., :-1]


class TokenPlaces(NamedTuple):
    """Where tokens are: in their row, and as `chunked` returns it."""

    order: Int[Array, "#rows tokens"]
    segments: Int[Array, "rows tokens"]
    positions: Int[Array, "rows tokens"]


def masked_scores(
    q: SomeQueries, k: AllKeys, queries: TokenPlaces, keys: TokenPlaces, scoring: Scoring
) -> Weights:
    """Return the scores of some queries and all keys, in float32; `HIDDEN` of invisible keys."""
    between = queries.positions[:, :, None] - keys.positions[:, None, :]
    earlier = queries.order[:, :, None] >= keys.order[:, None, :]
    visible = (queries.segments[:, :, None] == keys.segments[:, None, :]) & earlier
    if scoring.window is not None:
        visible &= between < scoring.window
    rows, count, heads, dim = q.shape
    grouped = (q * jnp.asarray(scoring.scale, q.dtype)).reshape(rows, count, k.shape[2], -1, dim)
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", grouped, k, preferred_element_type=jnp.float32)
    scores = softcap(scores, scoring.cap).reshape(rows, heads, count, k.shape[1])
    if scoring.slopes is not None:
        fall = scoring.slopes.reshape(1, heads, 1, 1)
        scores = scores - fall * between.astype(jnp.float32)[:, None]
    return jnp.where(visible[:, None], scores, HIDDEN)


def mixed(weights: Weights, v: Values) -> Mixed:
    """Mix values by the weights."""
    rows, heads, queries, keys = weights.shape
    grouped = weights.astype(v.dtype).reshape(rows, v.shape[2], -1, queries, keys)
    out = jnp.einsum("rhgqk,rkhd->rqhgd", grouped, v)
    return out.reshape(rows, queries, heads, v.shape[-1])


def blocked(segments: Places, positions: Places, block: int = 128) -> Attend:
    """Attend block by block, with work proportional to document lengths; for lack of a kernel."""
    return partial(_blocked, segments, positions, min(block, segments.size))


class _Blocks(NamedTuple):
    """How blocks of queries look back."""

    tokens: int  # of a block
    lead: int  # tokens before the first, so that the widest look back stays inside the arrays
    widths: tuple[int, ...]  # in blocks
    scoring: Scoring  # without arrays


class _Operands(NamedTuple):
    """What blocks read besides queries, keys and values."""

    context: Int[Array, " tokens"]  # with `lead`; -1: padding
    choice: Int[Array, " blocks"]  # the width of each, as a place among `widths`
    sinks: Float[Array, " heads"] | None
    slopes: Float[Array, " heads"] | None


# Queries [blocks, key heads, their heads x tokens, dim]; keys and values [key heads, tokens, dim].
_Given = tuple[Array, Array, Array]


def _blocked(
    segments: Places,
    positions: Places,
    block: int,
    q: Queries,
    k: Keys,
    v: Values,
    scoring: Scoring,
) -> Mixed:
    """Attend over all rows, concatenated. A block of queries looks back only as far as the start of
    its earliest context, or its window; since shapes are fixed, that distance is rounded up to one
    of a few widths, each compiled once.
    """
    rows, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    total = rows * seq
    count = -(-total // block)
    pad = count * block - total

    def flat(x: Array) -> Array:
        x = x.reshape(total, *x.shape[2:])
        return jnp.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1)))

    place = jnp.arange(count * block)
    start = place - flat(positions)
    # Segments are numbered within a row; a context's first token is unique over all rows.
    context = jnp.where(flat(segments) > 0, start, -1)
    first = start if scoring.window is None else jnp.maximum(start, place - scoring.window + 1)
    earliest = jnp.min(jnp.where(context >= 0, first, total).reshape(count, block), axis=1)
    needed = jnp.arange(count) - jnp.minimum(earliest // block, jnp.arange(count)) + 1
    farthest = seq if scoring.window is None else min(seq, scoring.window)
    widths = tuple(_widths(min(count, -(-farthest // block) + 1)))
    choice = jnp.searchsorted(jnp.asarray(widths), needed)
    lead = (widths[-1] - 1) * block

    def by_head(x: Array) -> Array:
        return jnp.pad(flat(x), ((lead, 0), (0, 0), (0, 0))).swapaxes(0, 1)

    queries = flat(q * jnp.asarray(scoring.scale, q.dtype))
    queries = queries.reshape(count, block, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(count, kv_heads, group * block, dim)
    behind = jnp.pad(context, (lead, 0), constant_values=-1)
    operands = _Operands(behind, choice, scoring.sinks, scoring.slopes)
    blocks = _Blocks(block, lead, widths, replace(scoring, sinks=None, slopes=None))
    out: Array = _over_blocks(blocks, (queries, by_head(k), by_head(v)), operands)
    out = out.reshape(count, kv_heads, group, block, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(count * block, heads, -1)[:total].reshape(rows, seq, heads, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_blocks(blocks: _Blocks, given: _Given, operands: _Operands) -> Array:
    """Attend in every block. Queries, keys and values have gradients.

    The backward pass computes scores again, block by block. What jax would keep of all blocks is
    hundreds of times as large as the stream.
    """
    queries, keys, values = given

    def one(i: Array) -> Array:
        def back(width: int) -> Array:
            keyed, valued = (_behind(blocks, width, i, each) for each in (keys, values))
            return _look_back(blocks, width, operands, i, queries[i], keyed, valued)

        return jax.lax.switch(operands.choice[i], [partial(back, w) for w in blocks.widths])

    return jax.lax.map(one, jnp.arange(len(queries)))


def _kept(
    blocks: _Blocks, given: _Given, operands: _Operands
) -> tuple[Array, tuple[_Given, _Operands]]:
    return _over_blocks(blocks, given, operands), (given, operands)


def _back_over_blocks(
    blocks: _Blocks, kept: tuple[_Given, _Operands], cotangent: Array
) -> tuple[_Given, None]:
    (queries, keys, values), operands = kept
    # Every second width, up to the widest: a compiler takes long for each.
    widths = blocks.widths[::-2][::-1]
    enough = jnp.asarray([min(w for w in widths if w >= each) for each in blocks.widths])
    choice = jnp.searchsorted(jnp.asarray(widths), enough[operands.choice])
    widest = widths[-1]

    def one(totals: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        def back(width: int) -> _Given:
            run = partial(_look_back, blocks, width, operands, i)
            keyed, valued = (_behind(blocks, width, i, each) for each in (keys, values))
            own, *parts = jax.vjp(run, queries[i], keyed, valued)[1](cotangent[i])
            over = (widest - width) * blocks.tokens
            parts = [jnp.pad(each, ((0, 0), (over, 0), (0, 0))) for each in parts]
            return own, parts[0], parts[1]

        own, *parts = jax.lax.switch(choice[i], [partial(back, width) for width in widths])

        def added(total: Array, part: Array) -> Array:
            summed = _behind(blocks, widest, i, total) + part.astype(jnp.float32)
            first = _first(blocks, widest, i)
            return jax.lax.dynamic_update_slice_in_dim(total, summed, first, axis=1)

        return (added(totals[0], parts[0]), added(totals[1], parts[1])), own

    begin = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    (keyed, valued), own = jax.lax.scan(one, begin, jnp.arange(len(queries)))
    return (own, keyed.astype(keys.dtype), valued.astype(values.dtype)), None


_over_blocks.defvjp(_kept, _back_over_blocks)


def _first(blocks: _Blocks, width: int, i: Array) -> Array:
    """The place of the first token that a block sees, if it looks back over a width."""
    return blocks.lead + (i + 1 - width) * blocks.tokens


def _behind(blocks: _Blocks, width: int, i: Array, values: Array) -> Array:
    """What a block sees of values [..., tokens, dim]; of one number for each token, [tokens]."""
    axis = max(values.ndim - 2, 0)
    size = width * blocks.tokens
    return jax.lax.dynamic_slice_in_dim(values, _first(blocks, width, i), size, axis)


def _look_back(
    blocks: _Blocks,
    width: int,
    operands: _Operands,
    i: Array,
    queries: Array,
    keys: Array,
    values: Array,
) -> Array:
    """Attend in one block, whose queries come with all that they may see."""
    scoring, block, size = blocks.scoring, blocks.tokens, keys.shape[1]
    shape = (len(keys), queries.shape[1] // block, block)
    scores = jnp.einsum("hqd,hkd->hqk", queries, keys, preferred_element_type=jnp.float32)
    scores = softcap(scores.reshape(*shape, size), scoring.cap)
    ago = jnp.arange(block)[:, None] - (jnp.arange(size)[None, :] - (size - block))
    if operands.slopes is not None:
        fall = operands.slopes.reshape(*shape[:2], 1, 1)
        scores = scores - fall * ago.astype(jnp.float32)[None, None]
    seen = _behind(blocks, width, i, operands.context)
    visible = (seen[size - block :, None] == seen[None, :]) & (ago >= 0)
    if scoring.window is not None:
        visible &= ago < scoring.window
    scores = jnp.where(visible[None, None], scores, HIDDEN)
    highest, beside = scores.max(axis=-1, keepdims=True), 0.0
    if operands.sinks is not None:
        sink = operands.sinks.astype(jnp.float32).reshape(*shape[:2], 1, 1)
        highest = jnp.maximum(highest, sink)
        beside = jnp.exp(sink - highest)
    weights = jnp.exp(scores - highest)
    out = jnp.einsum(
        "hqk,hkd->hqd",
        weights.astype(values.dtype).reshape(*queries.shape[:2], size),
        values,
        preferred_element_type=jnp.float32,
    ).reshape(*shape, values.shape[-1])
    found = out / (weights.sum(axis=-1, keepdims=True) + beside)
    return found.astype(queries.dtype).reshape(*queries.shape[:2], -1)


def narrowed(segments: Places, positions: Places, *, attention: Attention) -> Attend:
    """Attend in float16 to queries, keys and values in float32; return float32."""
    attend = attention(segments, positions)

    def narrow(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        with jax.default_matmul_precision("default"):  # kernels of 16 bits take no other
            found = attend(to_float16(q), to_float16(k), to_float16(v), scoring)
            return found.astype(q.dtype)

    return narrow


def _widths(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to and including `most`."""
    widths = [1, 2, 3]
    while widths[-1] < most:
        widths.append(widths[-2] * 2)
    return sorted({min(width, most) for width in widths})


def attention_by_heads(
    attention: Attention, segments: Places, positions: Places, shards: Shards
) -> Attend:
    """Attend on a mesh: each device computes its rows and its heads.

    The compiler cannot partition this by itself, because a kernel is opaque to it.
    """
    along = shards.model_axis("heads")
    heads, places = P(ROWS, None, along), P(ROWS)
    repeat = along is not None and shards.model_axis("kv_heads") is None

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        if repeat:  # fewer key heads than devices: each device copies those its queries need
            group = q.shape[2] // k.shape[2]
            k, v = (jnp.repeat(array, group, axis=2) for array in (k, v))

        each = {"sinks": scoring.sinks, "slopes": scoring.slopes}
        given = {name: array for name, array in each.items() if array is not None}

        def local(q: Any, k: Any, v: Any, segments: Any, positions: Any, *arrays: Any) -> Any:
            own = replace(scoring, **dict(zip(given, arrays, strict=True)))
            return attention(segments, positions)(q, k, v, own)

        specs = (heads, heads, heads, places, places, *(P(along) for _ in given))
        return shards.each(local, specs, heads)(q, k, v, segments, positions, *given.values())

    return attend

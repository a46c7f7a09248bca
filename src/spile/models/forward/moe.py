"""Mixture of experts, dropless: every token reaches every expert it chose.

Tokens are sorted by expert, and each expert multiplies its own run of them. Only the chosen experts
cost work, and no token is dropped for lack of room.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spile.models.config.arch import Arch, Experts
from spile.models.forward.kernels.chunks import with_gradient_of
from spile.models.forward.kernels.expert_rows import spread
from spile.models.forward.kernels.grouped import (
    EIGHT,
    Activation,
    ExpertRows,
    Float8Rows,
    Grouped,
    Groups,
    Matrices,
    has_mosaic,
    mosaic,
    mosaic_activated,
    mosaic_serves,
    ragged,
    tiled,
    unscaled,
)
from spile.models.forward.kernels.routing import largest_scores, places_of
from spile.models.forward.ops import Float8Weight, activate, linear, to_float8, to_float16
from spile.models.forward.sharding import P, Shards
from spile.models.forward.weights import Block
from spile.models.layout import ROWS


def route(
    x: Float[Array, "*tokens width"], block: Block, experts: Experts
) -> tuple[
    Float[Array, "*tokens experts"], Float[Array, "*tokens chosen"], Int[Array, "*tokens chosen"]
]:
    """Return all scores, and the weights and ids of the chosen experts, largest first."""
    router, given = block["w_router"], x
    if experts.wide:
        given, router = x.astype(jnp.float32), router.astype(jnp.float32)
    logits = linear(given, router, block.get("b_router"))
    wide = logits.astype(jnp.float32)
    if experts.margin is not None:
        weights, ids = _largest_first(*_by_margin(wide, experts.margin, experts.chosen))
    elif experts.scored == "softmax" and experts.normalised and not experts.corrected:
        top, ids = _largest(wide, experts.chosen)
        weights = jax.nn.softmax(top)
    else:
        scores = jax.nn.softmax(wide) if experts.scored == "softmax" else jax.nn.sigmoid(wide)
        if experts.corrected or experts.groups > 1:
            weights, ids = _corrected(scores, block.get("correction"), experts)
        else:
            weights, ids = _largest(scores, experts.chosen)
        if experts.normalised:
            # (Sigmoids of very low logits may all be zero.)
            weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-20)
    if experts.scaled:
        scale = block["expert_scale"].astype(jnp.float32)
        weights, ids = _largest_first(weights * scale[ids], ids)
    return logits, (experts.scale * weights).astype(x.dtype), ids


def _largest(scores: Float[Array, "*tokens experts"], count: int) -> tuple[Array, Array]:
    """Return the largest scores and their experts."""

    def plain(scores: Array) -> tuple[Array, Array]:
        values, ids = jax.lax.top_k(scores, count)
        return values, ids

    ways = {}
    if has_mosaic() and scores.dtype == jnp.float32:
        ways["cuda"] = with_gradient_of(plain, partial(largest_scores, count=count))
    return jax.lax.platform_dependent(scores, **ways, default=plain)


def _corrected(
    scores: Float[Array, "*tokens experts"],
    correction: Float[Array, " experts"] | None,
    experts: Experts,
) -> tuple[Float[Array, "*tokens chosen"], Int[Array, "*tokens chosen"]]:
    """Choose experts by corrected scores, within the best groups; return their plain scores."""
    better = scores
    if correction is not None:
        wide = correction.astype(jnp.float32)
        better = scores + jnp.expand_dims(wide, tuple(range(scores.ndim - 1)))
    if experts.groups > 1:
        grouped = better.reshape(*better.shape[:-1], experts.groups, -1)
        best = jax.lax.top_k(grouped, experts.group_best)[0].sum(axis=-1)
        _, allowed = jax.lax.top_k(best, experts.chosen_groups)
        open_ = jax.nn.one_hot(allowed, experts.groups, dtype=bool).any(axis=-2)
        better = jnp.where(open_[..., None], grouped, -jnp.inf).reshape(better.shape)
    _, ids = _largest(better, experts.chosen)
    return _largest_first(jnp.take_along_axis(scores, ids, axis=-1), ids)


def _by_margin(
    scores: Float[Array, "*tokens experts"], margin: float, chosen: int
) -> tuple[Float[Array, "*tokens chosen"], Int[Array, "*tokens chosen"]]:
    """Choose the best expert repeatedly, without replacement (arXiv:2409.12136).

    Its weight comes from a softmax over the remaining experts whose scores are near the best.
    """
    left, weights, ids = scores, list[Array](), list[Array]()
    for _ in range(chosen):
        best = left.max(axis=-1, keepdims=True)
        far = (best - scores) / jnp.maximum(jnp.abs(scores), best) > 2 * margin
        shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left))
        ids.append(jnp.argmax(left, axis=-1))
        weights.append(jnp.take_along_axis(shares, ids[-1][..., None], axis=-1)[..., 0])
        taken = jax.nn.one_hot(ids[-1], scores.shape[-1], dtype=bool)
        left = jnp.where(taken, -jnp.inf, left)
    return jnp.stack(weights, axis=-1), jnp.stack(ids, axis=-1)


def _largest_first(
    weights: Float[Array, "*tokens chosen"], ids: Int[Array, "*tokens chosen"]
) -> tuple[Float[Array, "*tokens chosen"], Int[Array, "*tokens chosen"]]:
    weights, order = jax.lax.top_k(weights, weights.shape[-1])
    return weights, jnp.take_along_axis(ids, order, axis=-1)


def mix(
    x: Float[Array, "rows seq width"],
    weights: Float[Array, "rows seq chosen"],
    ids: Int[Array, "rows seq chosen"],
    block: Block,
    arch: Arch,
    *,
    first: Int[Array, ""] | int = 0,
    adds: Bool[Array, ""] | bool = True,
    differentiable: bool = False,
) -> Float[Array, "rows seq width"]:
    """Return the weighted sum of the chosen experts' outputs.

    If the block holds only some of the experts, `first` is the id of its first one; the others add
    nothing. `adds`: whether to add the output bias here. `differentiable`: whether to leave out
    the GPU's kernel, and its copies of words, through which jax has no gradient.
    """
    assert arch.experts
    activation = Activation(arch.activation, arch.glu_limit)
    weighs_input = arch.experts.weighs_input
    flat, lead, each = x.reshape(-1, x.shape[-1]), x.shape[:2], ids.shape[-1]
    held = len(unscaled(block["w_up"]))
    chosen = ids.reshape(-1, each) - first
    here = (chosen >= 0) & (chosen < held)
    by = weights.reshape(-1, each) if weighs_input else None
    float8 = isinstance(block["w_up"], Float8Weight)

    def product(grouped: Grouped, inputs: ExpertRows, name: str, of: Array | None) -> Array:
        """Multiply rows by their experts' matrices; add their biases, if `of` says whose rows."""
        weight, bias = block[f"w_{name}"], block.get(f"b_{name}")
        if not isinstance(inputs, Float8Rows):
            inputs = _as_taken(inputs, weight)
        out = grouped(inputs, weight).astype(x.dtype)
        return out if bias is None or of is None else out + bias[of]

    def inner(grouped: Grouped, tokens: ExpertRows, of: Array) -> Array:
        gate = product(grouped, tokens, "gate", of) if arch.gated else None
        up = product(grouped, tokens, "up", of)
        active = partial(activate, name=arch.activation, limit=arch.glu_limit)
        if differentiable:  # what it reads is smaller than what its derivative needs
            active = jax.checkpoint(active, prevent_cse=False)
        return active(up, gate)

    def gathered(out: Array, places: Array) -> Array:
        """Each token gathers its experts' outputs: they are read once and never written again."""
        found = out[places.reshape(here.shape)]
        if (bias := block.get("b_down")) is not None:
            found = found + jnp.where(adds, bias[jnp.clip(chosen, 0, held - 1)], 0)
        return jnp.where(here[..., None], found, 0).reshape(*lead, each, -1)

    def by_sorting(way: Callable[[Groups], Grouped]) -> Array:
        whose = jnp.where(here, chosen, held).reshape(-1)
        order = jnp.argsort(whose)  # stable: ties keep the tokens' order
        expert = jnp.minimum(whose[order], held - 1)
        # (Counting by `bincount` would add to the same few numbers from all tokens.)
        bounds = jnp.searchsorted(whose[order], jnp.arange(held + 1), method="scan_unrolled")
        runs = Groups(jnp.diff(bounds), len(order))
        token, share = order // each, None if by is None else by.reshape(-1)[order]
        rows = flat[token] if differentiable else None
        tokens = _gathered(flat, token, share, rows, float8=float8)
        grouped = way(runs)
        out = product(grouped, inner(grouped, tokens, expert), "down", None)
        return gathered(out, jnp.zeros_like(order).at[order].set(jnp.arange(len(order))))

    def by_kernels() -> Array:
        places, sizes = places_of(jnp.where(here, chosen, -1), held, EIGHT)
        runs = Groups(sizes, chosen.size, EIGHT)
        tokens = _spread(flat, places, runs.rows, by, float8=float8)
        if activation.serves(x.dtype):
            names = ("up", "gate") if arch.gated else ("up",)
            given = [block[f"w_{name}"] for name in names]
            biases = tuple(block[f"b_{name}"] for name in names if f"b_{name}" in block)
            mixed = mosaic_activated(runs, activation)(tokens, *given, biases=biases)
        else:
            at = jnp.where(here, places, runs.rows).reshape(-1)
            of = jnp.zeros(runs.rows, jnp.int32).at[at].set(chosen.reshape(-1), mode="drop")
            mixed = inner(mosaic(runs), tokens, of)
        return gathered(product(mosaic(runs), mixed, "down", None), jnp.maximum(places, 0))

    ways: dict[str, Callable[[], Array]] = {"tpu": partial(by_sorting, ragged)}
    matrices = [block[name] for name in ("w_up", "w_gate", "w_down") if name in block]
    if mosaic_serves(*matrices) and not differentiable:
        ways["cuda"] = by_kernels
    out = jax.lax.platform_dependent(**ways, default=partial(by_sorting, tiled))
    shares = jnp.ones_like(weights) if weighs_input else weights
    return jnp.einsum("rscd,rsc->rsd", out, shares)


def _spread(
    x: Float[Array, "tokens width"],
    places: Int[Array, "tokens chosen"],
    rows: int,
    weights: Float[Array, "rows seq chosen"] | None,
    *,
    float8: bool,
) -> ExpertRows:
    """Copy tokens to their places, as `_gathered` does, by a kernel. A negative place is none."""
    weights = None if weights is None else weights.reshape(places.shape)
    if not float8:
        return spread(x, places, rows, weights)
    values, scale = to_float8(x)
    scales = jnp.broadcast_to(scale[:, None], places.shape)
    scales = scales if weights is None else scales * weights.astype(jnp.float32)
    at = jnp.where(places < 0, rows, places).reshape(-1)
    laid = jnp.zeros(rows, jnp.float32).at[at].set(scales.reshape(-1), mode="drop")
    return Float8Rows(spread(values, places, rows), laid)


def _gathered(
    x: Float[Array, "tokens width"],
    token: Int[Array, " rows"],
    weights: Float[Array, " rows"] | None,
    rows: Float[Array, "rows width"] | None,
    *,
    float8: bool,
) -> ExpertRows:
    """Gather tokens for their experts, multiplied by their weights if there are any.

    Args:
        rows: the tokens, if they have been gathered.
    """
    if not float8:
        rows = _rows(x, token) if rows is None else rows
        return rows if weights is None else rows * weights[:, None]
    values, scale = to_float8(x)
    scale = scale[token] if weights is None else scale[token] * weights.astype(jnp.float32)
    return Float8Rows(_rows(values, token), scale)


def _as_taken(inputs: Float[Array, "rows in"], weight: Matrices) -> ExpertRows:
    """Return inputs in the form in which a product with these weights takes them."""
    if isinstance(weight, Float8Weight):
        return Float8Rows(*to_float8(inputs))
    return to_float16(inputs) if weight.dtype == jnp.float16 else inputs


def _rows(x: Float[Array, "rows width"], places: Int[Array, " wanted"]) -> Array:
    """Gather rows. A GPU does so a third faster in words of 32 bits than in 16-bit values."""
    ways = {}
    if x.dtype.itemsize < 4 and x.shape[1] * x.dtype.itemsize % 4 == 0:
        ways["cuda"] = _rows_by_words
    return jax.lax.platform_dependent(x, places, **ways, default=lambda x, places: x[places])


def _rows_by_words(x: Float[Array, "rows width"], places: Int[Array, " wanted"]) -> Array:
    each = 4 // x.dtype.itemsize
    words = jax.lax.bitcast_convert_type(x.reshape(len(x), -1, each), jnp.uint32)
    return jax.lax.bitcast_convert_type(words[places], x.dtype).reshape(len(places), -1)


def mixed_experts(
    x: Any,
    weights: Any,
    ids: Any,
    block: Block,
    arch: Arch,
    shards: Shards,
    *,
    differentiable: bool = False,
) -> jax.Array:
    """Run `mix` on a mesh: each device runs its experts, or its part of every expert.

    The results are added. The compiler cannot partition this by itself, since each token chooses
    its own experts.
    """
    names = [name for name in block if name[:2] in ("w_", "b_") and not name.endswith("router")]
    specs = [
        _spec(block[name], shards.cuts.along(shards.axes[name], gathered=True)) for name in names
    ]
    cut = shards.model_axis("experts") or shards.model_axis("mlp")

    def local(x: Any, weights: Any, ids: Any, *arrays: Any) -> Any:
        held: Mapping[str, Any] = dict(zip(names, arrays, strict=True))
        part = jax.lax.axis_index("model")
        first = part * len(unscaled(held["w_up"])) if shards.model_axis("experts") else 0
        # The bias is replicated, so only one device adds it.
        adds = part == 0 if cut and not shards.model_axis("experts") else True
        out = mix(
            x, weights, ids, dict(held), arch,
            first=first, adds=adds, differentiable=differentiable,
        )  # fmt: skip
        return jax.lax.psum(out, "model") if cut else out

    rows = P(ROWS)
    arrays = [block[name] for name in names]
    return shards.each(local, (rows, rows, rows, *specs), rows)(x, weights, ids, *arrays)


def _spec(array: Any, along: tuple[str | None, ...]) -> Any:
    """Return how an array is cut, or both parts of one in float8."""
    if not isinstance(array, Float8Weight):
        return P(*along)
    return Float8Weight(P(*along), P(*along[:-1]))  # type: ignore[arg-type]

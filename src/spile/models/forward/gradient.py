"""Gradients of an objective with respect to the values at chosen sites: one backward pass for all.

The model is linear in small changes of the values at its sites. `linearized` runs it and returns
that map's transpose, the pullback: from cotangents at the aims (the taps that an objective reads)
to gradients at the sites. No gradient of a weight is computed. With `Decoder.remat` each block is
computed again in the backward pass; otherwise the forward pass keeps what each block needs.

`stage_pulled_back` is the same for one stage of a model that runs block by block: it takes the
stream that entered the stage, and computes the stage again.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spile.core.errors import InputError, SpileError
from spile.models.config.arch import Layer
from spile.models.forward.decoder import Beside, Decoder, Inputs, SiteValues
from spile.models.forward.forward_pass import at_columns
from spile.models.forward.ops import Hidden
from spile.models.forward.sharding import Shards
from spile.models.forward.splice import Change
from spile.models.forward.weights import LayerSchedule, Params, WeightArrays
from spile.models.objectives import (
    DIRECTION,
    FUNCTION,
    LOGIT_DIFF,
    LOGPROB,
    LOSS,
    Objective,
)

# Cotangents of the aims [rows, seq, ...] -> gradients of the sites [rows x kept, ...], by tap.
Pullback = Callable[[SiteValues], SiteValues]


def linearized(
    decoder: Decoder, params: Params, inputs: Inputs, schedule: LayerSchedule
) -> tuple[SiteValues, SiteValues, Pullback]:
    """Run a model; return its taps, the values of its aims, and the pullback to its sites.

    The pullback can be called several times, and mapped by `jax.lax.map` or `jax.vmap`.

    Args:
        decoder: with `sites` and `aims`. Its attention must have a backward pass.
        schedule: of blocks as far as the last tap and the last aim.
    """
    decoder = replace(decoder, goes_back=True)
    probes = decoder.probes(inputs, schedule)

    def run(probes: Any) -> tuple[Any, SiteValues]:
        values, aims, after = decoder.differentiable(params, inputs, schedule, probes)
        return (aims, after), values

    (aims, _), pull, values = jax.vjp(run, probes, has_aux=True)

    def pullback(cotangents: SiteValues) -> SiteValues:
        typed = {name: cotangents[name].astype(value.dtype) for name, value in aims.items()}
        (found,) = pull((typed, jax.tree.map(jnp.zeros_like, probes)))
        return decoder.gradients(found, inputs, schedule)

    return values, aims, pullback


def cotangents_of(objective: Objective, aims: SiteValues, inputs: Inputs) -> SiteValues:
    """Return the derivatives of an objective with respect to the values that it reads."""
    return jax.grad(lambda aims: _total(objective, aims, inputs))(aims)


def _total(objective: Objective, aims: SiteValues, inputs: Inputs) -> Float[Array, ""]:
    """Sum an objective over all contexts of a batch, in float32."""
    if objective.kind == FUNCTION:
        return sum(
            (_own(objective, tap, values, inputs) for tap, values in aims.items()),
            jnp.zeros((), jnp.float32),
        )
    (values,) = (each.astype(jnp.float32) for each in aims.values())
    if objective.kind == DIRECTION:
        return jnp.sum(values * jnp.asarray(objective.vector, jnp.float32)[None, None])
    if objective.kind == LOGPROB:
        return jnp.sum(values)
    assert inputs.aimed is not None
    counts = inputs.aimed.astype(jnp.float32)
    if objective.kind == LOSS:
        return -jnp.sum(values * counts)
    assert objective.kind == LOGIT_DIFF
    return jnp.sum((values[..., 0] - values[..., 1]) * counts)


def _own(objective: Objective, tap: str, values: Array, inputs: Inputs) -> Float[Array, ""]:
    """Sum a user's own function of a tap's values over all tokens."""
    given = f"--objective: the function of {tap}"
    try:
        found = objective.functions[tap](values)
        shape = found.shape
    except SpileError:
        raise
    except Exception as error:
        told = str(error).strip().partition("\n")[0][:200]
        raise InputError(f"{given}: {type(error).__name__}: {told}") from error
    if shape != inputs.tokens.shape:
        raise InputError(
            f"{given} returned the shape {list(shape)}; return a number for each token: "
            f"{list(inputs.tokens.shape)}"
        )
    return jnp.sum(jnp.where(inputs.segments > 0, found.astype(jnp.float32), 0.0))


def mean_gradients(steps: int, gradients: Callable[[Array], SiteValues]) -> SiteValues:
    """Return the mean over a path in float32, by the rule of Gauss and Legendre.

    Args:
        gradients: at a share of the path, from 0 to 1.
    """
    places, weights = np.polynomial.legendre.leggauss(steps)
    points = jnp.asarray((places + 1) / 2, jnp.float32), jnp.asarray(weights / 2, jnp.float32)

    def add(total: SiteValues, point: tuple[Array, Array]) -> tuple[SiteValues, None]:
        share, weight = point
        found = gradients(share)
        return {n: total[n] + weight * own.astype(jnp.float32) for n, own in found.items()}, None

    shapes = jax.eval_shape(gradients, points[0][0])
    nothing = {name: jnp.zeros(each.shape, jnp.float32) for name, each in shapes.items()}
    return jax.lax.scan(add, nothing, points)[0]


def on_path(change: Change | None, share: Array, baseline: Array | None, values: Array) -> Array:
    """Return values between a baseline (None: zero) and these.

    Args:
        change: of the values, before.
        share: of the difference.
    """
    changed = values if change is None else change(values).astype(values.dtype)
    wide = changed.astype(jnp.float32)
    if baseline is None:
        return (share * wide).astype(values.dtype)
    return (baseline + share * (wide - baseline)).astype(values.dtype)


def attributed(values: Array, gradients: Array, baseline: Array | None) -> Array:
    """Return gradients times values (less a baseline), summed over the last axis, in float32."""
    wide = values.astype(jnp.float32)
    wide = wide if baseline is None else wide - baseline
    return jnp.sum(wide * gradients.astype(jnp.float32), axis=-1)


def kept_beside(inputs: Inputs, columns: Array, like: Array, shards: Shards | None) -> Array:
    """Return what stands beside the kept tokens, as the values `like` [rows x kept, ...].

    Args:
        columns: those of these values.
    """
    assert inputs.beside is not None
    own = at_columns(inputs.beside, inputs.columns)[:, :, columns]
    flat = own.reshape(-1, *like.shape[1:])
    return shards.runs(flat) if shards else flat


class Cotangents(NamedTuple):
    """Cotangents of what leaves a stage: of the stream, of what later stages read, of its aims."""

    stream: Hidden | None
    onward: Any
    aims: SiteValues


def stage_pulled_back(
    decoder: Decoder,
    kind: Layer | str,
    weights: WeightArrays,
    entering: tuple[Hidden | None, Beside],
    inputs: Inputs,
    cotangents: Cotangents,
    objective: Objective | None = None,
) -> tuple[Hidden | None, Beside, SiteValues, SiteValues]:
    """Return the cotangents of what entered a stage, gradients of its sites, and its taps' values.

    Args:
        entering: the stream that entered, and what the stage read beside it.
        cotangents: of what left the stage; None where nothing later depends on it.
        objective: the part that reads the stage's aims, instead of their cotangents.
    """
    decoder = replace(decoder, goes_back=True)
    probes = decoder.stage_probes(kind, inputs)

    def run(entering: Any, probes: Any) -> tuple[Cotangents, SiteValues]:
        stream, beside = entering
        stream, onward, values, aims = decoder.differentiable_stage(
            kind, weights, stream, beside, inputs, probes
        )
        return Cotangents(stream, onward, aims), values

    left, pull, values = jax.vjp(run, entering, probes, has_aux=True)
    if objective:
        cotangents = cotangents._replace(aims=cotangents_of(objective, left.aims, inputs))
    known = Cotangents(*map(_typed, left, cotangents))
    (stream, beside), found = pull(known)
    return stream, beside, decoder.stage_gradients(kind, found, inputs), values


def _typed(values: Any, cotangents: Any) -> Any:
    """Return cotangents in the dtypes of their values; zeros where none are known."""
    if cotangents is None:
        return jax.tree.map(jnp.zeros_like, values)
    return jax.tree.map(lambda value, own: own.astype(value.dtype), values, cotangents)

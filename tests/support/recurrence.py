"""Inputs for the kernels of recurrent layers, and their rules token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spile.models.forward.mixers import gated_delta, state_space

EPS = 1e-6  # of the norms of queries and keys


def segments(rows: tuple[tuple[int, ...], ...], seq: int) -> jax.Array:
    """Return the document of each token; padding is 0."""
    places = np.zeros((len(rows), seq), np.int32)
    for row, lengths in enumerate(rows):
        filled = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:seq]
        places[row, : len(filled)] = filled
    return jnp.asarray(places)


def error(found: Any, wanted: Any) -> float:
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def state_space_inputs(
    rows: int, seq: int, heads: int = 2, groups: int = 1, dims: Any = (16, 32)
) -> list[Any]:
    """Make queries, keys, values, steps, log-decays and skips; `dims`: of keys and of values."""
    rng = np.random.default_rng(0)
    state, dim = dims

    def halves(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((rows, seq, *shape)) / 2, jnp.bfloat16)

    steps = np.log1p(np.exp(rng.standard_normal((rows, seq, heads)) - 2))
    # One head keeps nearly everything, the last forgets within a few tokens.
    kept = -np.geomspace(1e-3, 10, heads) * steps
    scalars = [jnp.asarray(each, jnp.float32) for each in (steps, kept, rng.random(heads))]
    return [halves(groups, state), halves(groups, state), halves(heads, dim), *scalars]


def state_space_by_token(
    q: Any, k: Any, v: Any, steps: Any, kept: Any, skip: Any, places: Any
) -> jax.Array:
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    return (
        state_space.recurrent(q, k, v * steps[..., None], kept, places)
        + v * skip[None, None, :, None]
    )


def delta_inputs(rows: int, seq: int, *, alike: float, heads: int = 2, dim: int = 16) -> list[Any]:
    """Make queries, keys and values; `alike`: how large the part is that all keys share."""
    rng = np.random.default_rng(0)

    def halves(heads: int) -> np.ndarray:
        return rng.standard_normal((rows, seq, heads, dim))

    q, k, v = halves(heads // 2), halves(heads // 2) + alike, halves(heads)
    written = 1 / (1 + np.exp(-rng.standard_normal((rows, seq, heads))))
    # One head keeps nearly everything, the last forgets within a few tokens.
    kept = -np.geomspace(1e-3, 5, heads) * rng.exponential(size=(rows, seq, heads))
    qkv = [jnp.asarray(each, jnp.bfloat16) for each in (q, k, v)]
    return [*qkv, jnp.asarray(written, jnp.float32), jnp.asarray(kept, jnp.float32)]


def delta_by_token(q: Any, k: Any, v: Any, written: Any, kept: Any, places: Any) -> jax.Array:
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + EPS) for a in (q, k))
    return gated_delta.recurrent(q * q.shape[-1] ** -0.5, k, v, written, kept, places).values

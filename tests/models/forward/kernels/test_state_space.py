"""The kernel of Mamba-2's rule gives the values of the rule token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.kernels.chunks import with_gradient_of
from spile.models.forward.kernels.state_space import FASTEST, rule
from spile.models.forward.mixers import state_space as mixer

ON_GPU = jax.default_backend() == "gpu"
# The interpreter takes long for chunks as large as those that are fastest.
TILING = FASTEST if ON_GPU else FASTEST._replace(chunk=16)
SIZE = TILING.chunk
# Documents that end at every place of a chunk, an empty row, and one that begins in padding.
EVERY_PLACE = ((SIZE - 1,) * SIZE, (), (5, 1, SIZE * 3))


def segments(rows: tuple[tuple[int, ...], ...], seq: int) -> jax.Array:
    """Return the document of each token; padding is 0."""
    places = np.zeros((len(rows), seq), np.int32)
    for row, lengths in enumerate(rows):
        filled = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:seq]
        places[row, : len(filled)] = filled
    return jnp.asarray(places)


def inputs(rows: int, seq: int, heads: int = 2, groups: int = 1, dims: Any = (16, 32)) -> list[Any]:
    rng = np.random.default_rng(0)
    state, dim = dims

    def halves(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((rows, seq, *shape)) / 2, jnp.bfloat16)

    steps = np.log1p(np.exp(rng.standard_normal((rows, seq, heads)) - 2))
    # One head keeps nearly everything, the last forgets within a few tokens.
    kept = -np.geomspace(1e-3, 10, heads) * steps
    scalars = [jnp.asarray(each, jnp.float32) for each in (steps, kept, rng.random(heads))]
    return [halves(groups, state), halves(groups, state), halves(heads, dim), *scalars]


def by_token(q: Any, k: Any, v: Any, steps: Any, kept: Any, skip: Any, places: Any) -> jax.Array:
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    return mixer.recurrent(q, k, v * steps[..., None], kept, places) + v * skip[None, None, :, None]


def error(found: Any, wanted: Any) -> float:
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("seq", [SIZE * (SIZE - 1), SIZE * 2 + 7])
def test_documents_may_end_at_any_place_of_a_chunk(seq: int) -> None:
    given, places = inputs(3, seq), segments(EVERY_PLACE, seq)
    found = jax.jit(partial(rule, tiling=TILING, interpret=not ON_GPU))(*given, places)
    assert found.dtype == jnp.bfloat16
    assert error(found, jax.jit(by_token)(*given, places)) < 2.0**-8


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("seq", [8192, 32768])
def test_long_rows_have_the_values_of_short_ones(seq: int) -> None:
    given = inputs(2, seq, heads=8, groups=2, dims=(128, 64))
    places = segments(((seq,), (7, 3000, seq)), seq)
    found = jax.jit(rule)(*given, places)
    assert error(found, jax.jit(by_token)(*given, places)) < 2.0**-8


@pytest.mark.full
def test_the_gradient_is_that_of_the_definition() -> None:
    given, places = inputs(1, 70), segments(((30, 20),), 70)

    def rounded(*given: Any) -> jax.Array:
        return by_token(*given).astype(jnp.bfloat16)

    kernel = with_gradient_of(rounded, partial(rule, tiling=TILING, interpret=not ON_GPU))

    def total(run: Any, *given: Any) -> jax.Array:
        return jnp.sum(run(*given, places).astype(jnp.float32) ** 2)

    found, wanted = (
        jax.grad(partial(total, run), argnums=tuple(range(6)))(*given) for run in (kernel, rounded)
    )
    for own, exact in zip(found, wanted, strict=True):
        assert error(own, exact) < 2.0**-6

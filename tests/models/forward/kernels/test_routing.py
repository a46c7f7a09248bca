"""Choices and places are those of sorting."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.kernels.chunks import with_gradient_of
from spile.models.forward.kernels.routing import largest_scores, places_of
from support.marks import some

ON_GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize(("experts", "count"), some([(8, 2), (60, 4), (512, 10)], (60, 4)))
def test_the_largest_scores_are_those_of_top_k(experts: int, count: int) -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(-9, 9, (3, 50, experts)) / 4  # many are equal
    scores[0, 0, 3], scores[0, 1], scores[0, 2, 1] = np.nan, 0.0, -np.inf
    scores[0, 1, ::2] = -0.0
    given = jnp.asarray(scores, jnp.float32)
    for found, wanted in zip(
        largest_scores(given, count, interpret=not ON_GPU), jax.lax.top_k(given, count), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen"), some([(150, 8, 2), (70, 60, 4), (33, 512, 3)], (70, 60, 4))
)
def test_places_are_those_of_a_stable_sort(tokens: int, experts: int, chosen: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.random((tokens, experts)).argsort(axis=1)[:, :chosen].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1  # experts of another device
    places, sizes = places_of(jnp.asarray(ids), experts, 8, interpret=not ON_GPU)
    counted = np.bincount(ids[ids >= 0], minlength=experts)
    room = -(-counted // 8) * 8
    np.testing.assert_array_equal(sizes, counted)
    wanted = np.full(ids.size, -1)
    starts, seen = np.cumsum(room) - room, np.zeros(experts, int)
    for number, expert in enumerate(ids.reshape(-1)):
        if expert >= 0:
            wanted[number] = starts[expert] + seen[expert]
            seen[expert] += 1
    np.testing.assert_array_equal(np.asarray(places).reshape(-1), wanted)


def test_scores_have_the_gradients_of_top_k() -> None:
    def plain(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(scores, 2)
        return values, ids

    def total(scores: jax.Array, run: Callable[..., tuple[jax.Array, jax.Array]]) -> jax.Array:
        values, ids = run(scores)
        return jnp.sum(jnp.sin(values) * (ids + 1).astype(jnp.float32))

    scores = jax.random.normal(jax.random.key(0), (3, 5, 8))
    kernel = with_gradient_of(plain, partial(largest_scores, count=2, interpret=not ON_GPU))
    found, wanted = (jax.grad(total)(scores, run) for run in (kernel, plain))
    np.testing.assert_array_equal(found, wanted)

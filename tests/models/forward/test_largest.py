"""The largest values of a long axis are exactly those of a full sort, in its order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.largest import largest
from support.marks import some


def by_sorting(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    places = np.argsort(-values, axis=-1, kind="stable")[..., :count]
    return np.take_along_axis(values, places, axis=-1), places


@pytest.mark.parametrize(
    ("total", "count"),
    some(
        [(1000, 7), (4096, 64), (37, 5), (5, 5), (260, 1), (260, 200), (1009, 64)],
        (37, 5),
        (260, 200),
        (1009, 64),
    ),
)
def test_values_and_places_are_those_of_a_sort(total: int, count: int) -> None:
    values = np.random.default_rng(total).standard_normal((3, 2, total)).astype(np.float32)
    found = largest(jnp.asarray(values), count)
    for ours, wanted in zip(found, by_sorting(values, count), strict=True):
        assert np.array_equal(ours, wanted)


def test_of_ties_the_lower_place_comes_first() -> None:
    """Few distinct values: whole parts tie, and the last place is decided by a tie."""
    values = np.random.default_rng(0).integers(0, 3, (20, 1000)).astype(np.float32)
    values[0] = 0.0
    values[1, :-1] = -np.inf  # nothing that fills the last part may come before these
    for count in (1, 9, 64):
        found = largest(jnp.asarray(values), count)
        for ours, wanted in zip(found, by_sorting(values, count), strict=True):
            assert np.array_equal(ours, wanted)


def test_only_a_small_part_of_a_long_axis_is_sorted() -> None:
    program = jax.make_jaxpr(lambda x: largest(x, 64))(jnp.zeros((2, 151_936)))
    sorts = [each for each in program.jaxpr.eqns if each.primitive.name == "top_k"]
    assert sum(each.invars[0].aval.shape[-1] for each in sorts) < 151_936 // 20

"""The kernel of Mamba-2's rule gives the values of the rule token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spile.models.forward.kernels.chunks import with_gradient_of
from spile.models.forward.kernels.state_space import FASTEST, rule
from support.recurrence import error, segments, state_space_by_token, state_space_inputs

ON_GPU = jax.default_backend() == "gpu"
# The interpreter takes long for chunks as large as those that are fastest.
TILING = FASTEST if ON_GPU else FASTEST._replace(chunk=16)
SIZE = TILING.chunk
# Documents that end at every place of a chunk, an empty row, and one that begins in padding.
EVERY_PLACE = ((SIZE - 1,) * SIZE, (), (5, 1, SIZE * 3))


@pytest.mark.parametrize("seq", [SIZE * (SIZE - 1), SIZE * 2 + 7])
def test_documents_may_end_at_any_place_of_a_chunk(seq: int) -> None:
    given, places = state_space_inputs(3, seq), segments(EVERY_PLACE, seq)
    found = jax.jit(partial(rule, tiling=TILING, interpret=not ON_GPU))(*given, places)
    assert found.dtype == jnp.bfloat16
    assert error(found, jax.jit(state_space_by_token)(*given, places)) < 2.0**-8


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("seq", [8192, 32768])
def test_long_rows_have_the_values_of_short_ones(seq: int) -> None:
    given = state_space_inputs(2, seq, heads=8, groups=2, dims=(128, 64))
    places = segments(((seq,), (7, 3000, seq)), seq)
    found = jax.jit(rule)(*given, places)
    assert error(found, jax.jit(state_space_by_token)(*given, places)) < 2.0**-8


@pytest.mark.full
def test_the_gradient_is_that_of_the_definition() -> None:
    given, places = state_space_inputs(1, 70), segments(((30, 20),), 70)

    def rounded(*given: Any) -> jax.Array:
        return state_space_by_token(*given).astype(jnp.bfloat16)

    kernel = with_gradient_of(rounded, partial(rule, tiling=TILING, interpret=not ON_GPU))

    def total(run: Any, *given: Any) -> jax.Array:
        return jnp.sum(run(*given, places).astype(jnp.float32) ** 2)

    found, wanted = (
        jax.grad(partial(total, run), argnums=tuple(range(6)))(*given) for run in (kernel, rounded)
    )
    for own, exact in zip(found, wanted, strict=True):
        assert error(own, exact) < 2.0**-6

"""The kernels of the gated delta rule give the values of the rule token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from spile.models.forward.kernels.gated_delta import FASTEST, rule
from support.recurrence import EPS, delta_by_token, delta_inputs, error, segments

ON_GPU = jax.default_backend() == "gpu"
# The interpreter takes long for chunks as large as those that are fastest.
TILING = FASTEST if ON_GPU else FASTEST._replace(chunk=16)
SIZE = TILING.chunk
# Documents that end at every place of a chunk, an empty row, and one that begins in padding.
EVERY_PLACE = ((SIZE - 1,) * SIZE, (), (5, 1, SIZE * 3))


@pytest.mark.parametrize("alike", [0.0, 3.0])
@pytest.mark.parametrize("seq", [SIZE * (SIZE - 1), SIZE * 2 + 7])
def test_documents_may_end_at_any_place_of_a_chunk(seq: int, alike: float) -> None:
    given, places = delta_inputs(3, seq, alike=alike), segments(EVERY_PLACE, seq)
    found = jax.jit(partial(rule, eps=EPS, tiling=TILING, interpret=not ON_GPU))(*given, places)
    assert found.dtype == jnp.bfloat16
    assert error(found, jax.jit(delta_by_token)(*given, places)) < 2.0**-7


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("seq", [8192, 32768])
def test_long_rows_have_the_values_of_short_ones(seq: int) -> None:
    given = delta_inputs(2, seq, alike=1.0, heads=8, dim=128)
    places = segments(((seq,), (7, 3000, seq)), seq)
    found = jax.jit(partial(rule, eps=EPS))(*given, places)
    assert error(found, jax.jit(delta_by_token)(*given, places)) < 2.0**-6

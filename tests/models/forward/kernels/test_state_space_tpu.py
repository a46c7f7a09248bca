"""The TPU's kernel of Mamba-2's rule gives the values of the rule token by token."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spile.models.config.arch import StateSpace
from spile.models.forward.kernels.chunks import plain_recurrence
from spile.models.forward.kernels.chunks_tpu import CHUNK
from spile.models.forward.kernels.state_space_tpu import rule
from spile.models.forward.mixers import state_space as mixer
from support.libtpu import compiled, needs_libtpu
from support.marks import some
from support.recurrence import error, segments, state_space_by_token, state_space_inputs

# Documents of 13 tokens end at every place of a chunk; an empty row; documents of several chunks.
EVERY_PLACE = ((13,) * CHUNK, (), (5, 1, 3 * CHUNK, 300, CHUNK - 1, 200))
CODESTRAL = StateSpace(heads=128, head_dim=64, groups=8, state=128, kernel=4, norm_eps=1e-5)


def shapes(space: StateSpace, rows: int = 2, seq: int = 2 * CHUNK) -> list[jax.ShapeDtypeStruct]:
    def shape(*of: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of, dtype)

    keys = shape(rows, seq, space.groups, space.state)
    scalars = shape(rows, seq, space.heads, dtype=jnp.float32)
    values = shape(rows, seq, space.heads, space.head_dim)
    skip = shape(space.heads, dtype=jnp.float32)
    return [keys, keys, values, scalars, scalars, skip, shape(rows, seq, dtype=jnp.int32)]


@pytest.mark.parametrize("chunks", some([3, 13], 3))  # (in 13, at every place)
def test_documents_may_end_at_any_place_of_a_chunk(chunks: int) -> None:
    # The last chunk is not full, and the one head of a group does not fill the lanes.
    seq = chunks * CHUNK + 7
    given, places = state_space_inputs(3, seq, 2, 2, (128, 64)), segments(EVERY_PLACE, seq)
    found = jax.jit(partial(rule, interpret=True))(*given, places)
    assert found.dtype == jnp.bfloat16
    assert error(found, jax.jit(state_space_by_token)(*given, places)) < 2.0**-8


@pytest.mark.parametrize(
    ("dtype", "state", "plain", "fused"),
    [
        (jnp.bfloat16, 128, False, True),
        (jnp.bfloat16, 128, True, False),
        (jnp.bfloat16, 64, False, False),
        (jnp.float32, 128, False, False),
    ],
)
def test_a_tpu_runs_it_where_it_serves(dtype: Any, state: int, plain: bool, fused: bool) -> None:
    space = replace(CODESTRAL, heads=4, groups=2, state=state)
    with plain_recurrence(plain):
        traced = jax.jit(mixer._rule(jnp.dtype(dtype), space)).trace(*shapes(space))
    assert ("tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()) is fused
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


PROGRAMS = {
    "codestral": (rule, shapes(CODESTRAL)),
    "falcon-h1-34b": (
        rule,
        shapes(replace(CODESTRAL, heads=32, head_dim=128, groups=2, state=256)),
    ),
    "granite-tiny/16": (rule, shapes(replace(CODESTRAL, heads=3, groups=1))),
}


@needs_libtpu
@pytest.mark.parametrize("topology", ["v4-8", "v5e-8", "v6e-8", "v5p-8"])
def test_libtpu_compiles_it(topology: str) -> None:
    assert compiled("models.forward.kernels.test_state_space_tpu", topology) == [*PROGRAMS]

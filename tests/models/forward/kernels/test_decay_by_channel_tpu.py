"""The TPU's kernel of decays by channel gives the values of the rule token by token."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.config.arch import GatedDelta
from spile.models.forward.kernels.chunks import plain_recurrence
from spile.models.forward.kernels.chunks_tpu import CHUNK
from spile.models.forward.kernels.decay_by_channel_tpu import rule
from spile.models.forward.mixers import gated_delta as mixer
from support.libtpu import compiled, needs_libtpu
from support.marks import some
from support.recurrence import EPS, delta_by_token, delta_inputs, error, segments

# Documents of 13 tokens end at every place of a chunk; an empty row; documents of several chunks.
EVERY_PLACE = ((13,) * CHUNK, (), (5, 1, 3 * CHUNK, 300, CHUNK - 1, 200))
KIMI_LINEAR = GatedDelta(
    key_heads=32, value_heads=32, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-6,
    by_channel=True,
)  # fmt: skip


def shapes(delta: GatedDelta, rows: int = 2, seq: int = 2 * CHUNK) -> list[jax.ShapeDtypeStruct]:
    def shape(*of: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, seq, *of), dtype)

    decay = shape(delta.key_heads, delta.key_dim, dtype=jnp.float32)
    keys, scalars = (
        shape(delta.key_heads, delta.key_dim),
        shape(delta.value_heads, dtype=jnp.float32),
    )
    values = shape(delta.value_heads, delta.value_dim)
    return [keys, keys, values, scalars, decay, shape(dtype=jnp.int32)]


@pytest.mark.parametrize("chunks", some([3, 13], 3))  # (in 13, at every place)
def test_documents_may_end_at_any_place_of_a_chunk(chunks: int) -> None:
    seq = chunks * CHUNK + 7
    places, (q, k, v, written, _) = (
        segments(EVERY_PLACE, seq), delta_inputs(3, seq, alike=3.0, dim=128)
    )  # fmt: skip
    rng = np.random.default_rng(1)
    # Some channels keep nearly everything, others forget within a few tokens.
    rates = np.geomspace(1e-3, 5, 128) * rng.exponential(size=(3, seq, 1, 128))
    given = [q, k, v[:, :, :1], written[:, :, :1], jnp.asarray(-rates, jnp.float32)]
    found = jax.jit(partial(rule, eps=EPS, interpret=True))(*given, places)
    assert found.dtype == jnp.bfloat16
    assert error(found, jax.jit(delta_by_token)(*given, places)) < 2.0**-7


@pytest.mark.parametrize(
    ("changes", "norms", "plain", "fused"),
    [
        ({}, False, False, True),
        ({}, False, True, False),
        ({}, True, False, False),
        ({"key_dim": 64}, False, False, False),
    ],
)
def test_a_tpu_runs_it_where_it_serves(
    changes: dict[str, Any], norms: bool, plain: bool, fused: bool
) -> None:
    delta = replace(KIMI_LINEAR, key_heads=2, value_heads=2, **changes)
    with plain_recurrence(plain):
        rule = mixer._rule(delta, norms, jnp.dtype(jnp.bfloat16))
        traced = jax.jit(rule).trace(*shapes(delta))
    assert ("tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()) is fused
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


PROGRAMS = {
    "kimi-linear": (partial(rule, eps=EPS), shapes(KIMI_LINEAR)),
    "kimi-linear/32": (
        partial(rule, eps=EPS), shapes(replace(KIMI_LINEAR, key_heads=1, value_heads=1))
    ),
}  # fmt: skip


@needs_libtpu
@pytest.mark.parametrize("topology", ["v4-8", "v5e-8", "v6e-8", "v5p-8"])
def test_libtpu_compiles_it(topology: str) -> None:
    assert compiled("models.forward.kernels.test_decay_by_channel_tpu", topology) == [*PROGRAMS]

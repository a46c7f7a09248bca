"""The delta rule with a decay by channel, by Triton kernels, gives the values of token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.config.arch import GatedDelta
from spile.models.forward.kernels import chunks
from spile.models.forward.kernels.decay_by_channel import FASTEST, rule
from spile.models.forward.mixers import gated_delta as mixer
from support.marks import some
from support.recurrence import EPS, delta_by_token, delta_inputs, error, segments

ON_GPU = jax.default_backend() == "gpu"
SIZE = FASTEST.chunk
# Documents that end at every place of a chunk, an empty row, and one that begins in padding.
EVERY_PLACE = ((SIZE - 1,) * SIZE, (), (5, 1, SIZE * 3))


def inputs(rows: int, seq: int, *, alike: float, heads: int = 1, dim: int = 16) -> list[Any]:
    """Make queries, keys, values, shares and log-decays, all with as many heads."""
    q, k, v, written, _ = delta_inputs(rows, seq, alike=alike, heads=2 * heads, dim=dim)
    # Some channels keep nearly everything, others forget within a few tokens.
    forgotten = np.random.default_rng(1).exponential(size=(rows, seq, heads, dim))
    rates = np.geomspace(1e-3, 5, dim) * forgotten
    return [q, k, v[:, :, :heads], written[:, :, :heads], jnp.asarray(-rates, jnp.float32)]


@pytest.mark.parametrize("alike", some([0.0, 3.0], 3.0))
@pytest.mark.parametrize("seq", [SIZE * (SIZE - 1), SIZE * 2 + 7])
def test_documents_may_end_at_any_place_of_a_chunk(seq: int, alike: float) -> None:
    given, places = inputs(3, seq, alike=alike), segments(EVERY_PLACE, seq)
    found = jax.jit(partial(rule, eps=EPS, interpret=not ON_GPU))(*given, places)
    assert found.dtype == jnp.bfloat16
    assert error(found, jax.jit(delta_by_token)(*given, places)) < 2.0**-7


@pytest.mark.full
def test_each_of_several_wide_heads_has_its_own_decay() -> None:
    seq = SIZE * 4 + 7
    given = inputs(2, seq, alike=1.0, heads=2, dim=128)
    places = segments(((seq,), (7, 100, seq)), seq)
    found = jax.jit(partial(rule, eps=EPS, interpret=not ON_GPU))(*given, places)
    assert error(found, jax.jit(delta_by_token)(*given, places)) < 2.0**-7


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("seq", [8192, 32768])
def test_long_rows_have_the_values_of_short_ones(seq: int) -> None:
    given = inputs(2, seq, alike=1.0, heads=8, dim=128)
    places = segments(((seq,), (7, 3000, seq)), seq)
    found = jax.jit(partial(rule, eps=EPS))(*given, places)
    assert error(found, jax.jit(delta_by_token)(*given, places)) < 2.0**-6


@pytest.mark.parametrize(("capability", "fused"), [(9.0, True), (8.0, False)])
def test_a_gpu_runs_it_where_it_serves(
    capability: float, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "gpu_capability", lambda: capability)
    delta = GatedDelta(
        key_heads=2, value_heads=2, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-5,
        by_channel=True,
    )  # fmt: skip
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs(1, 64, alike=0.0, heads=2, dim=128)
    ]
    traced = jax.jit(mixer._rule(delta, False, jnp.dtype(jnp.bfloat16))).trace(
        *shapes, jax.ShapeDtypeStruct((1, 64), jnp.int32)
    )
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("decay_by_channel_rule" in lowered) is fused

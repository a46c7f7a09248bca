"""The kernels of the gated delta rule give the values of the rule token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.kernels.gated_delta import FASTEST, rule
from spile.models.forward.mixers import gated_delta as mixer

ON_GPU = jax.default_backend() == "gpu"
EPS = 1e-6
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


def inputs(rows: int, seq: int, *, alike: float, heads: int = 2, dim: int = 16) -> list[Any]:
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


def by_token(q: Any, k: Any, v: Any, written: Any, kept: Any, places: Any) -> jax.Array:
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + EPS) for a in (q, k))
    return mixer.recurrent(q * q.shape[-1] ** -0.5, k, v, written, kept, places).values


def error(found: Any, wanted: Any) -> float:
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("alike", [0.0, 3.0])
@pytest.mark.parametrize("seq", [SIZE * (SIZE - 1), SIZE * 2 + 7])
def test_documents_may_end_at_any_place_of_a_chunk(seq: int, alike: float) -> None:
    given, places = inputs(3, seq, alike=alike), segments(EVERY_PLACE, seq)
    found = jax.jit(partial(rule, eps=EPS, tiling=TILING, interpret=not ON_GPU))(*given, places)
    assert found.dtype == jnp.bfloat16
    assert error(found, jax.jit(by_token)(*given, places)) < 2.0**-7


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("seq", [8192, 32768])
def test_long_rows_have_the_values_of_short_ones(seq: int) -> None:
    given = inputs(2, seq, alike=1.0, heads=8, dim=128)
    places = segments(((seq,), (7, 3000, seq)), seq)
    found = jax.jit(partial(rule, eps=EPS))(*given, places)
    assert error(found, jax.jit(by_token)(*given, places)) < 2.0**-6

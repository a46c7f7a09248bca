"""The gated delta rule with decay by channel: chunks give the values of token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as theirs

from spile.models.forward.mixers.decay_by_channel import chunked
from spile.models.forward.mixers.gated_delta import recurrent
from support import quick

HEADS, KEY_DIM, DIM = 4, 6, 5
CHUNK, SEQ = 32, 88 + 3


@pytest.fixture(autouse=True)
def _exact() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def inputs(*, alike: bool = False) -> list[jax.Array]:
    """Queries, keys and values; how much is written, and the logarithm of what each channel keeps.

    Some channels keep nearly everything, others forget within a token: over a chunk, the sums of
    logarithms reach -10,000. `alike`: all channels of a head keep the same.
    """
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 3, SEQ, HEADS, KEY_DIM))
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    v = rng.standard_normal((3, SEQ, HEADS, DIM))
    written = 2 / (1 + np.exp(-rng.standard_normal((3, SEQ, HEADS))))
    rates = np.geomspace(1e-3, 20, HEADS)[:, None] * np.geomspace(0.1, 10, KEY_DIM)
    kept = -rates * rng.exponential(size=(3, SEQ, HEADS, KEY_DIM))
    kept = np.broadcast_to(kept[..., :1], kept.shape) if alike else kept
    return [jnp.asarray(each, jnp.float32) for each in (q, k, v, written, kept)]


def in_documents(*borders: int) -> np.ndarray:
    """Segments of a row whose documents begin at 0 and at these places."""
    return 1 + np.searchsorted(borders, np.arange(SEQ), side="right").astype(np.int32)


def error(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    found, wanted = np.asarray(found), np.asarray(wanted)  # (XLA's maximum passes over NaN)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


in_chunks = jax.jit(partial(chunked, size=CHUNK), compiler_options=quick.OPTIONS)
token_by_token = jax.jit(lambda *given: recurrent(*given).values, compiler_options=quick.OPTIONS)
# Documents that begin within a chunk, at its middle, at its border, and one after the other.
SEGMENTS = jnp.asarray([in_documents(), in_documents(11, CHUNK), in_documents(16, 70, 71)])


def test_chunks_give_what_the_recurrence_gives() -> None:
    given = inputs()
    wanted = token_by_token(*given, SEGMENTS)
    assert error(in_chunks(*given, SEGMENTS), wanted) <= 1e-6
    assert error(token_by_token(*given, jnp.ones_like(SEGMENTS)), wanted) > 1e-3, "borders show"


def test_the_recurrence_is_that_of_transformers() -> None:
    given = inputs()
    q, k, v, written, kept = (torch.tensor(np.asarray(each)) for each in given)
    out, _ = theirs.recurrent_kimi_delta_attention(
        q * KEY_DIM**0.5, k, v, g=kept, beta=written, initial_state=None, output_final_state=False
    )
    assert error(token_by_token(*given, jnp.ones_like(SEGMENTS)), out.numpy()) <= 1e-6


def test_channels_that_decay_alike_are_a_head_that_decays() -> None:
    given = inputs(alike=True)
    by_head = token_by_token(*given[:4], given[4][..., 0], SEGMENTS)
    assert error(in_chunks(*given, SEGMENTS), by_head) <= 1e-6

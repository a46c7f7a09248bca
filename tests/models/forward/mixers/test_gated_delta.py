"""The gated delta rule: chunks give the values of token by token; documents are isolated."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from spile.models.config.arch import GATED_DELTA, Arch, GatedDelta, Layer
from spile.models.config.specs import block_specs
from spile.models.forward.mixers import gated_delta as mixer
from spile.models.forward.mixers.gated_delta import Read, chunked, recurrent
from spile.models.forward.splice import in_block
from support import quick
from support.marks import some

KEYS, HEADS, KEY_DIM, DIM = 2, 4, 6, 5
CHUNK = mixer.CHUNK


@pytest.fixture(autouse=True)
def _exact() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def inputs(rows: int, seq: int, *, most: float = 1.0, seed: int = 0) -> list[jax.Array]:
    """Queries, keys, values, the share written, and the logarithm of the share kept."""
    rng = np.random.default_rng(seed)
    q, k = (_unit(rng.standard_normal((rows, seq, KEYS, KEY_DIM))) for _ in "qk")
    v = rng.standard_normal((rows, seq, HEADS, DIM))
    written = most / (1 + np.exp(-rng.standard_normal((rows, seq, HEADS))))
    # Some heads keep nearly everything, others forget within a token.
    kept = -np.geomspace(1e-3, 20, HEADS) * rng.exponential(size=(rows, seq, HEADS))
    return [jnp.asarray(each, jnp.float32) for each in (q, k, v, written, kept)]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def in_documents(seq: int, *borders: int) -> np.ndarray:
    """Segments of one row, whose documents begin at 0 and at these places."""
    return 1 + np.searchsorted(borders, np.arange(seq), side="right").astype(np.int32)


def error(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    found, wanted = jax.device_get((found, wanted))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def assert_same(found: Read, wanted: Read, tolerance: float = 1e-6) -> None:
    assert found.state_norms is not None
    assert wanted.state_norms is not None
    assert error(found.values, wanted.values) <= tolerance
    assert error(found.state_norms, wanted.state_norms) <= tolerance


in_chunks = jax.jit(lambda *given: chunked(*given, state_norms=True))
token_by_token = jax.jit(recurrent)


@pytest.mark.parametrize(
    ("seq", "most"), some([(1, 1.0), (CHUNK, 2.0), (CHUNK + 1, 1.0), (200, 2.0)], (200, 2.0))
)
def test_chunks_give_what_the_recurrence_gives(seq: int, most: float) -> None:
    given = inputs(3, seq, most=most)
    segments = jnp.asarray(
        [in_documents(seq), in_documents(seq, seq // 3), in_documents(seq, seq // 2, seq // 2 + 1)]
    )
    found = in_chunks(*given, segments)
    assert_same(found, token_by_token(*given, segments))
    assert jax.eval_shape(chunked, *given, segments).state_norms is None
    others = token_by_token(*given, jnp.ones_like(segments))
    if seq > 1:
        assert error(found.values, others.values) > 1e-3, "borders must show"


def test_the_recurrence_is_that_of_transformers() -> None:
    given = inputs(2, 30)
    found = token_by_token(*given, jnp.ones((2, 30), jnp.int32))
    q, k, v, written, kept = (torch.tensor(np.asarray(each)) for each in given)
    q, k = (each.repeat_interleave(HEADS // KEYS, dim=2) for each in (q, k))
    out, state = theirs.torch_recurrent_gated_delta_rule(
        q * KEY_DIM**0.5, k, v, g=kept, beta=written, output_final_state=True
    )
    assert error(found.values, out.numpy()) <= 1e-6
    assert found.state_norms is not None
    assert error(found.state_norms[:, -1], state.flatten(2).norm(dim=-1).numpy()) <= 1e-6


def test_equal_keys_and_nothing_forgotten_cost_no_digits() -> None:
    """With such keys, powers of the chunk's system have entries of 1e17."""
    q, k, v, written, kept = inputs(1, CHUNK, most=2.0)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    given = (q, k, v, jnp.ones_like(written), jnp.zeros_like(kept), jnp.ones((1, CHUNK), jnp.int32))
    assert_same(in_chunks(*given), token_by_token(*given), 1e-5)


DELTA = GatedDelta(
    key_heads=KEYS, value_heads=HEADS, key_dim=KEY_DIM, value_dim=DIM, kernel=4, norm_eps=1e-6
)
WIDTH = 16
ARCH = Arch(
    family="test", vocab_size=9, width=WIDTH, num_heads=2, num_kv_heads=2, head_dim=8, mlp_width=8,
    layers=(Layer(mixer=GATED_DELTA),), max_positions=99, rope_positions=99, tied_head=True,
    norm_eps=1e-6, ropes=(), attn_scale=1.0, qkv_bias=False, out_bias=False, activation="silu",
    mlp_bias=False, delta=DELTA,
)  # fmt: skip


def a_block(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        spec.name: jnp.asarray(0.5 * rng.standard_normal(spec.shape), jnp.float32)
        for spec in block_specs(ARCH, ARCH.layers[0])
    }


@partial(jax.jit, static_argnames="arch", compiler_options=quick.OPTIONS)
def mixed(x: jax.Array, segments: jax.Array, arch: Arch = ARCH) -> dict[str, jax.Array]:
    out, inside = mixer.gated_delta(
        x, a_block(), segments, arch, in_block({}), shards=None, state_norms=True
    )
    return {**inside, "out": out}


def test_a_document_is_the_same_alone_wherever_it_begins_in_a_chunk() -> None:
    """Checks the convolution and the states; one row for every place of the border."""
    length, seq = CHUNK + 9, 3 * CHUNK + 9
    starts = CHUNK + np.arange(CHUNK)  # a chunk of another document comes before
    rng = np.random.default_rng(1)
    document = rng.standard_normal((length, WIDTH))
    x = rng.standard_normal((CHUNK, seq, WIDTH))
    segments = np.stack([in_documents(seq, at, at + length) for at in starts.tolist()])
    for row, at in enumerate(starts):
        x[row, at : at + length] = document
    # (Read back: each slice of an array on a device would be a program of its own.)
    packed = jax.device_get(mixed(jnp.asarray(x, jnp.float32), jnp.asarray(segments)))
    alone = mixed(jnp.asarray(document[None], jnp.float32), jnp.ones((1, length), jnp.int32))
    alone = jax.device_get(alone)
    for name, values in packed.items():
        for row, at in enumerate(starts):
            assert error(values[row, at : at + length], alone[name][0]) <= 3e-6, (name, at)
    whole = jax.device_get(mixed(jnp.asarray(x, jnp.float32), jnp.ones(segments.shape, jnp.int32)))
    for name in ("conv_out", "delta_state_norm", "z", "out"):
        first = whole[name][1, CHUNK + 1 : CHUNK + 1 + length]
        assert error(first, alone[name][0]) > 1e-3, "the control must fail"


@pytest.mark.full
@pytest.mark.parametrize("changed", ["most_written", "norm_eps"])
def test_each_constant_tells(changed: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 20, WIDTH)), jnp.float32)
    segments = jnp.ones((1, 20), jnp.int32)
    other = replace(ARCH, delta=replace(DELTA, **{changed: 2 * getattr(DELTA, changed) + 0.1}))
    assert error(mixed(x, segments, other)["out"], mixed(x, segments)["out"]) > 1e-3


def test_in_16_bits_states_are_kept_in_float32() -> None:
    given = inputs(2, 200)
    segments = jnp.ones((2, 200), jnp.int32)
    shapes = jax.make_jaxpr(lambda x: mixer.gated_delta(
        x, {n: a.astype(jnp.bfloat16) for n, a in a_block().items()}, segments, ARCH,
        in_block({}), shards=None, state_norms=False,
    )[0])(jnp.zeros((2, 200, WIDTH), jnp.bfloat16))  # fmt: skip
    assert shapes.out_avals[0].dtype == jnp.bfloat16
    state = f"{KEYS},{HEADS // KEYS},{KEY_DIM},{DIM}]"
    assert f"f32[2,{state}" in str(shapes)
    assert f"bf16[2,{state}" not in str(shapes)
    rough = [each.astype(jnp.bfloat16).astype(jnp.float32) for each in given]
    assert error(in_chunks(*rough, segments).values, in_chunks(*given, segments).values) < 0.05

"""State spaces: chunks give the values of token by token; documents are isolated."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2 as theirs

from spile.models.config.arch import (
    SHORT_CONVOLUTION,
    STATE_SPACE,
    Arch,
    Layer,
    ShortConvolution,
    StateSpace,
)
from spile.models.config.specs import block_specs
from spile.models.forward.mixers import state_space as mixer
from spile.models.forward.mixers.short_convolution import short_convolution
from spile.models.forward.mixers.state_space import chunked, recurrent
from spile.models.forward.splice import in_block
from support import quick
from support.marks import some

GROUPS, HEADS, STATE, DIM = 2, 6, 5, 4
CHUNK = mixer.CHUNK


@pytest.fixture(autouse=True)
def _exact() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def inputs(rows: int, seq: int, seed: int = 0) -> list[jax.Array]:
    """Queries, keys, values, and the logarithm of the share kept."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((rows, seq, GROUPS, STATE)) for _ in "qk")
    v = rng.standard_normal((rows, seq, HEADS, DIM))
    # Some heads keep nearly everything, others forget within a token.
    kept = -np.geomspace(1e-3, 20, HEADS) * rng.exponential(size=(rows, seq, HEADS))
    return [jnp.asarray(each, jnp.float32) for each in (q, k, v, kept)]


def in_documents(seq: int, *borders: int) -> np.ndarray:
    """Segments of one row, whose documents begin at 0 and at these places."""
    return 1 + np.searchsorted(borders, np.arange(seq), side="right").astype(np.int32)


def error(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    found, wanted = jax.device_get((found, wanted))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


in_chunks, token_by_token = jax.jit(chunked), jax.jit(recurrent)


@pytest.mark.parametrize("seq", some([1, CHUNK, CHUNK + 1, 200], 200))
def test_chunks_give_what_the_recurrence_gives(seq: int) -> None:
    given = inputs(3, seq)
    segments = jnp.asarray(
        [in_documents(seq), in_documents(seq, seq // 3), in_documents(seq, seq // 2, seq // 2 + 1)]
    )
    found = in_chunks(*given, segments)
    assert error(found, token_by_token(*given, segments)) <= 1e-6
    if seq > 1:
        others = token_by_token(*given, jnp.ones_like(segments))
        assert error(found, others) > 1e-3, "borders must show"


def test_the_recurrence_is_that_of_transformers() -> None:
    q, k, v, _ = inputs(2, 30)
    rng = np.random.default_rng(1)
    steps, rates = rng.random((2, 30, HEADS)), -rng.random(HEADS)
    kept = jnp.asarray(steps * rates, jnp.float32)
    found = token_by_token(
        q, k, v * jnp.asarray(steps[..., None], jnp.float32), kept, jnp.ones((2, 30), jnp.int32)
    )
    q, k, v = (torch.tensor(np.asarray(each)) for each in (q, k, v))
    steps, rates = (torch.tensor(each, dtype=torch.float32) for each in (steps, rates))
    wanted = theirs.mamba2_chunk_scan(v, steps, rates, k, q, chunk_size=8)
    assert error(found, wanted.numpy()) <= 1e-6


SPACE = StateSpace(
    heads=HEADS, head_dim=DIM, groups=GROUPS, state=STATE, kernel=4, norm_eps=1e-2, bias=True
)
WIDTH = 16
ARCH = Arch(
    family="test", vocab_size=9, width=WIDTH, num_heads=2, num_kv_heads=2, head_dim=8, mlp_width=8,
    layers=(Layer(mixer=STATE_SPACE, mlp=False), Layer(mixer=SHORT_CONVOLUTION, mlp=False)),
    max_positions=99, rope_positions=99, tied_head=True, norm_eps=1e-6, ropes=(), attn_scale=1.0,
    qkv_bias=False, out_bias=False, activation="silu", mlp_bias=False, state_space=SPACE,
    convolution=ShortConvolution(kernel=3, bias=True),
)  # fmt: skip


def a_block(layer: int, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        spec.name: jnp.asarray(0.5 * rng.standard_normal(spec.shape), jnp.float32)
        for spec in block_specs(ARCH, ARCH.layers[layer])
    }


@partial(jax.jit, static_argnames="arch", compiler_options=quick.OPTIONS)
def mixed(x: jax.Array, segments: jax.Array, arch: Arch = ARCH) -> dict[str, jax.Array]:
    """The values inside and behind both mixers, which read the same input."""
    out, inside = mixer.state_space(x, a_block(0), segments, arch, in_block({}), shards=None)
    convolved, others = short_convolution(x, a_block(1), segments, in_block({}), shards=None)
    return {
        **inside, "ssm_out": out, "short_out": convolved,
        **{f"short_{name}": value for name, value in others.items()},
    }  # fmt: skip


def test_a_document_is_the_same_alone_wherever_it_begins_in_a_chunk() -> None:
    """Checks the convolutions and the states; one row for every place of the border."""
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
    for name in ("conv_out", "ssm_read", "ssm_z", "ssm_out", "short_conv_out", "short_out"):
        first = whole[name][1, CHUNK + 1 : CHUNK + 1 + length]
        assert error(first, alone[name][0]) > 1e-3, "the control must fail"


CHANGES = [
    ("norm_eps", 0.1), ("norm", None), ("norm", "ungated"), ("norm_by_group", True),
    ("least_step", 1.0), ("most_step", 0.5), ("activation", "relu"), ("in_scale", 1.5),
    ("out_scale", 0.5),
    *(("scales", tuple(1.5 if i == n else 1.0 for i in range(5))) for n in range(5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), some(CHANGES))
def test_each_constant_tells(name: str, value: Any) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 20, WIDTH)), jnp.float32)
    segments = jnp.ones((1, 20), jnp.int32)
    other = replace(ARCH, state_space=replace(SPACE, **{name: value}))
    assert error(mixed(x, segments, other)["ssm_out"], mixed(x, segments)["ssm_out"]) > 1e-3


def test_in_16_bits_states_are_kept_in_float32() -> None:
    segments = jnp.ones((2, 200), jnp.int32)
    shapes = jax.make_jaxpr(lambda x: mixer.state_space(
        x, {n: a.astype(jnp.bfloat16) for n, a in a_block(0).items()}, segments, ARCH,
        in_block({}), shards=None,
    )[0])(jnp.zeros((2, 200, WIDTH), jnp.bfloat16))  # fmt: skip
    assert shapes.out_avals[0].dtype == jnp.bfloat16
    state = f"{GROUPS},{HEADS // GROUPS},{STATE},{DIM}]"
    assert f"f32[2,{state}" in str(shapes)
    assert f"bf16[2,{state}" not in str(shapes)

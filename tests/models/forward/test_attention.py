"""Attention in packed rows: every implementation treats each document as if it were alone."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spile.models.forward.attention import (
    Attention,
    Scoring,
    blocked,
    chunked,
    masked,
    pattern,
)
from support import quick
from support.marks import some

ROWS, SEQ, DIM = 4, 37, 8  # 37 is divisible by no block size below
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
PLAIN = Scoring(DIM**-0.5)
IMPLEMENTATIONS: dict[str, Attention] = {
    "masked": masked,
    "blocked": blocked,
    **{f"blocked-{size}": partial(blocked, block=size) for size in (5, 16, 256)},
}


def compiled(attention: Attention) -> Any:
    def attend(
        q: Any, k: Any, v: Any, segments: Any, positions: Any,
        scoring: Scoring, sinks: Any = None, slopes: Any = None,
    ) -> Any:  # fmt: skip
        how = replace(scoring, sinks=sinks, slopes=slopes)
        return attention(segments, positions)(q, k, v, how)

    return jax.jit(attend, static_argnums=5, compiler_options=quick.OPTIONS)


FEW = ("masked", "blocked", "blocked-5")  # the suite's; the others are blocks of another size
each_implementation = pytest.mark.parametrize("name", some(IMPLEMENTATIONS, *FEW))
COMPILED = {name: compiled(each) for name, each in IMPLEMENTATIONS.items()}
# windows of one token, within a block, as long as one, across several, beyond the row
SCORINGS = {
    "plain": PLAIN,
    **{f"window-{size}": Scoring(DIM**-0.5, window=size) for size in (1, 3, 5, 17, 100)},
    "scaled": Scoring(1.0),
    "capped": Scoring(2.0, cap=1.5),
    "window and cap": Scoring(0.7, window=6, cap=2.0),
}
SINKS = np.array([-3.0, 0.5, 2.0, 8.0], np.float32)  # nothing to see in, up to nearly all


def places(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions of rows that hold contexts of these lengths; the rest is padding."""
    segments, positions = np.zeros((2, ROWS, SEQ), np.int32)
    for row, lengths in enumerate(rows):
        column = 0
        for segment, length in enumerate(lengths, 1):
            segments[row, column : column + length] = segment
            positions[row, column : column + length] = np.arange(length)
            column += length
    return segments, positions


@st.composite
def packings(draw: st.DrawFn) -> list[list[int]]:
    """Contexts of any lengths; a row may end in padding, or be padding alone."""
    rows: list[list[int]] = []
    for _ in range(ROWS):
        room, lengths = draw(st.integers(0, SEQ)), []
        while room > 0:
            lengths.append(draw(st.integers(1, room)))
            room -= lengths[-1]
        rows.append(lengths)
    return rows


def values(rng: np.random.Generator, heads: int = 4, kv: int = 2) -> Arrays:
    q = rng.standard_normal((ROWS, SEQ, heads, DIM))
    k, v = rng.standard_normal((2, ROWS, SEQ, kv, DIM))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def one_by_one(
    arrays: Arrays,
    segments: np.ndarray,
    scoring: Scoring = PLAIN,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
) -> np.ndarray:
    """The definition of attention: every head of every document alone, in float64."""
    q, k, v = (a.astype(np.float64) for a in arrays)
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for row, number in np.ndindex(ROWS, segments.max(initial=0)):
        own = segments[row] == number + 1
        ago = np.arange(own.sum())[:, None] - np.arange(own.sum())
        seen = (ago >= 0) & (ago < (scoring.window or SEQ))
        for head in range(q.shape[2]):
            scores = q[row, own, head] @ k[row, own, head // group].T * scoring.scale
            if scoring.cap:
                scores = scoring.cap * np.tanh(scores / scoring.cap)
            if slopes is not None:
                scores -= slopes[head] * ago
            nothing = 0.0 if sinks is None else np.exp(float(sinks[head]))
            weights = np.where(seen, np.exp(scores), 0.0)
            weights /= weights.sum(axis=1, keepdims=True) + nothing
            out[row, own, head] = weights @ v[row, own, head // group]
    return out


def run(
    name: str,
    arrays: Arrays,
    segments: np.ndarray,
    positions: np.ndarray,
    scoring: Scoring = PLAIN,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
) -> np.ndarray:
    given = [jnp.asarray(a) for a in (*arrays, segments, positions)]
    beside = [None if each is None else jnp.asarray(each) for each in (sinks, slopes)]
    return np.asarray(COMPILED[name](*given, scoring, *beside))


@each_implementation
def test_no_chunk_of_a_document_sees_another(name: str) -> None:
    """Chunks count from the document's start, whatever was packed before it."""
    rows = [[20, 9, 5], [37], [1, 36], []]
    cut = [[6, 6, 6, 2, 6, 3, 5], [6] * 6 + [1], [1] + [6] * 6, []]
    (whole, wanted), arrays = map(places, (rows, cut)), values(np.random.default_rng(6))
    segments, positions = (np.asarray(each) for each in chunked(*map(jnp.asarray, whole), size=6))
    found = run(name, arrays, segments, positions)
    real = segments > 0
    assert np.array_equal(real, whole[0] > 0)
    assert np.array_equal(positions[real], wanted[1][real])
    np.testing.assert_allclose(found[real], one_by_one(arrays, wanted[0])[real], atol=2e-6)


@each_implementation
def test_scores_fall_with_the_distance_inside_a_document(name: str) -> None:
    """Each head has its own slope; the last one has none."""
    rows = [[20, 9, 5], [37], [1, 36], []]
    segments, positions = places(rows)
    arrays = values(np.random.default_rng(5))
    slopes = np.array([0.5, 0.25, 2.0, 0.0], np.float32)
    found = run(name, arrays, segments, positions, PLAIN, slopes=slopes)
    real = segments > 0
    wanted = one_by_one(arrays, segments, slopes=slopes)
    np.testing.assert_allclose(found[real], wanted[real], atol=2e-6)
    without = one_by_one(arrays, segments)
    assert np.abs(wanted - without)[real][:, :3].max(axis=(0, 2)).min() > 0.1
    assert np.array_equal(wanted[:, :, 3], without[:, :, 3])


def assert_as_if_alone(
    name: str,
    rows: list[list[int]],
    arrays: Arrays,
    scoring: Scoring = PLAIN,
    sinks: np.ndarray | None = None,
) -> None:
    segments, positions = places(rows)
    found = run(name, arrays, segments, positions, scoring, sinks)
    assert found.shape == arrays[0].shape
    assert np.isfinite(found).all(), "padding must not make NaN"
    real = segments > 0
    wanted = one_by_one(arrays, segments, scoring, sinks)
    np.testing.assert_allclose(found[real], wanted[real], atol=3e-6)


@each_implementation
@settings(deadline=None, max_examples=25)
@given(rows=packings(), seed=st.integers(0, 1000))
def test_packed_documents_attend_as_if_alone(name: str, rows: list[list[int]], seed: int) -> None:
    assert_as_if_alone(name, rows, values(np.random.default_rng(seed)))


@pytest.mark.parametrize("name", some(["masked", "blocked-5", "blocked-16"], "blocked-5"))
@pytest.mark.parametrize(
    ("scoring", "sinks"),
    some(
        itertools.product(SCORINGS, (False, True)),
        *(("window-5", False), ("scaled", True), ("window and cap", True)),
    ),
)
@settings(deadline=None, max_examples=5)
@given(rows=packings(), seed=st.integers(0, 1000))
@example(rows=[[37], [20, 17], [6, 1, 30], []], seed=0)
def test_windows_caps_scales_and_sinks_are_as_defined(
    name: str, sinks: bool, scoring: str, rows: list[list[int]], seed: int
) -> None:
    arrays = values(np.random.default_rng(seed))
    assert_as_if_alone(name, rows, arrays, SCORINGS[scoring], SINKS if sinks else None)


@pytest.mark.parametrize("name", some(["masked", "blocked-5"], "blocked-5"))
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 1)], ids=["mha", "mqa"])
def test_heads_find_the_keys_and_sinks_of_their_own(name: str, heads: int, kv: int) -> None:
    rows = [[20, 9], [37], [1, 1, 30]]
    arrays = values(np.random.default_rng(kv), heads, kv)
    assert_as_if_alone(name, rows, arrays, Scoring(0.5, window=9), SINKS)


LAYOUTS: dict[str, list[list[int]]] = {
    "whole rows": [[37], [37], [37], [37]],
    "single tokens": [[1] * 37, [1] * 5],
    "one token at an end": [[36, 1], [1, 36]],
    "edges on block edges": [[16, 16], [5, 5, 5], [32]],
    "empty rows first": [[], [], [5]],
    "empty rows between": [[10], [], [37], [1]],
    "one token in all": [[1]],
}


@each_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_does_not_matter_how_documents_fall_on_blocks(name: str, layout: str) -> None:
    arrays = values(np.random.default_rng(5))
    for scoring in (PLAIN, SCORINGS["window-5"]):
        assert_as_if_alone(name, LAYOUTS[layout], arrays, scoring)


@each_implementation
def test_nothing_leaks_between_documents(name: str) -> None:
    rng = np.random.default_rng(7)
    segments, positions = places([[9, 14, 3], [20, 17], [30]])
    arrays = values(rng)
    before = run(name, arrays, segments, positions)
    for row, segment in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)]:
        own = np.zeros_like(segments, bool)
        own[row] = segments[row] == segment
        q, k, v = (
            np.where(own[..., None, None], a, 1e3 * b)
            for a, b in zip(arrays, values(rng), strict=True)
        )
        after = run(name, (q, k, v), segments, positions)
        assert np.array_equal(after[own], before[own]), "bit for bit"
        rest = ~own & (segments > 0)
        assert not np.array_equal(after[rest], before[rest])


@each_implementation
def test_no_token_sees_a_later_one(name: str) -> None:
    rng = np.random.default_rng(8)
    segments, positions = places([[20, 17]] * ROWS)
    arrays = values(rng)
    before = run(name, arrays, segments, positions)
    for place in (0, 5, 19, 25):
        later = np.arange(SEQ)[None, :, None, None] > place
        q, k, v = (np.where(later, b, a) for a, b in zip(arrays, values(rng), strict=True))
        after = run(name, (q, k, v), segments, positions)
        assert np.array_equal(after[:, : place + 1], before[:, : place + 1])
        assert not np.array_equal(after[:, place + 1 :], before[:, place + 1 :])


@each_implementation
def test_a_window_counts_the_token_itself_and_ends_where_it_should(name: str) -> None:
    rng = np.random.default_rng(10)
    segments, positions = places([[37]] * ROWS)
    arrays = values(rng)
    scoring = Scoring(DIM**-0.5, window=6)
    before = run(name, arrays, segments, positions, scoring)
    q, k, v = (a.copy() for a in arrays)
    k[:, 10], v[:, 10] = 3.0, -3.0
    after = run(name, (q, k, v), segments, positions, scoring)
    changed = (after != before).any(axis=(0, 2, 3))
    assert np.flatnonzero(changed).tolist() == [10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_weights_add_up_to_one_or_leave_the_sinks_their_part(sinks: np.ndarray | None) -> None:
    q, k, _ = values(np.random.default_rng(11))
    segments, positions = places([[20, 9], [37], [1] * 37])
    beside = None if sinks is None else jnp.asarray(sinks)
    places_ = (jnp.asarray(segments), jnp.asarray(positions))
    scoring = replace(SCORINGS["window-5"], sinks=beside)
    found = pattern(jnp.asarray(q), jnp.asarray(k), *places_, scoring)
    assert found.dtype == jnp.float32
    weights = np.asarray(found)
    order = np.arange(SEQ)
    ago = order[:, None] - order[None, :]
    own = segments[:, :, None] == segments[:, None, :]
    visible = own & ((ago >= 0) & (ago < 5))[None] & (segments > 0)[:, :, None]
    real = np.broadcast_to((segments > 0)[:, None], weights.shape[:3])
    shown = np.broadcast_to(visible[:, None], weights.shape)
    assert (weights[shown] > 0).all()
    assert not weights[real][~shown[real]].any()
    total = weights.sum(axis=-1)[real]
    if sinks is None:
        np.testing.assert_allclose(total, 1.0, atol=1e-6)
    else:
        assert (total < 1.0).all()


@each_implementation
def test_scores_and_sinks_of_any_size_stay_finite(name: str) -> None:
    q, k, v = values(np.random.default_rng(12))
    segments, positions = places([[20, 12], [37], [1]])
    sinks = np.array([-1e5, 1e5, 0.0, 50.0], np.float32)
    real = segments > 0
    for factor in (0.0, 1.0, 100.0):
        found = run(name, (q * np.float32(factor), k, v), segments, positions, PLAIN, sinks)
        assert np.isfinite(found).all()
        assert not found[real][:, 1].any(), "that head's sink takes all"
        plain = run(name, (q * np.float32(factor), k, v), segments, positions)
        np.testing.assert_allclose(found[real][:, 0], plain[real][:, 0], atol=1e-6)  # takes nothing


@pytest.mark.parametrize("name", some(["masked", "blocked-16"], "blocked-16"))
@pytest.mark.parametrize("sinks", [pytest.param(None, marks=pytest.mark.full), SINKS])
def test_bfloat16_stays_within_its_own_rounding(name: str, sinks: np.ndarray | None) -> None:
    rng = np.random.default_rng(9)
    segments, positions = places([[20, 12], [37]])
    coarse = [jnp.asarray(a, jnp.bfloat16) for a in values(rng)]
    scoring = Scoring(DIM**-0.5, window=30, cap=20.0)
    beside = None if sinks is None else jnp.asarray(sinks, jnp.bfloat16)
    places_ = (jnp.asarray(segments), jnp.asarray(positions))
    found = COMPILED[name](*coarse, *places_, scoring, beside)
    assert found.dtype == jnp.bfloat16
    q, k, v = (np.asarray(a, np.float32) for a in coarse)
    real = segments > 0
    wanted = one_by_one((q, k, v), segments, scoring, sinks)[real]
    assert np.abs(np.asarray(found, np.float32)[real] - wanted).max() < 2**-6


@pytest.mark.parametrize(
    ("size", "sinks"),
    [(5, None), pytest.param(16, None, marks=pytest.mark.full),
     pytest.param(5, SINKS, marks=pytest.mark.full), (16, SINKS)],
)  # fmt: skip
def test_gradients_in_blocks_are_those_of_the_definition(
    size: int, sinks: np.ndarray | None
) -> None:
    arrays = [jnp.asarray(a) for a in values(np.random.default_rng(3))]
    segments, positions = map(jnp.asarray, places([[20, 12], [37], [1, 9, 9]]))
    scoring = Scoring(0.7, window=17, cap=2.0, sinks=None if sinks is None else jnp.asarray(sinks))
    real = (segments > 0)[..., None, None]

    def found(attention: Attention) -> Any:
        def total(*arrays: jax.Array) -> jax.Array:
            out = attention(segments, positions)(*arrays, scoring)
            return jnp.sum(jnp.where(real, jnp.sin(3 * out), 0.0))

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arrays)

    for own, wanted in zip(found(partial(blocked, block=size)), found(masked), strict=True):
        np.testing.assert_allclose(own, wanted, atol=2e-5 * np.abs(np.asarray(wanted)).max())


def test_a_backward_pass_keeps_no_scores() -> None:
    """Its memory grows with the tokens, as that of the forward pass does, not with their pairs."""

    def memory(seq: int) -> int:
        segments, positions = jnp.ones((1, seq), jnp.int32), jnp.arange(seq)[None]

        def layers(q: jax.Array) -> jax.Array:
            def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                return blocked(segments, positions, block=32)(x, x, x, PLAIN), None

            return jnp.sum(jax.lax.scan(layer, q, None, length=4)[0])

        q = jax.ShapeDtypeStruct((1, seq, 2, DIM), jnp.float32)
        return jax.jit(jax.grad(layers)).lower(q).compile().memory_analysis().temp_size_in_bytes

    assert memory(2048) < 2.5 * memory(1024)

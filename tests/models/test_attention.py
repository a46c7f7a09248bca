"""Attention in packed rows: each document as if it were alone, in every implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.attention import Attention, blocked, masked

ROWS, SEQ, DIM = 4, 37, 8  # 37 is divisible by no block size below
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
IMPLEMENTATIONS: dict[str, Attention] = {
    "masked": masked,
    "blocked": blocked,
    **{f"blocked-{size}": partial(blocked, block=size) for size in (5, 16, 256)},
}
COMPILED = {name: jax.jit(attention) for name, attention in IMPLEMENTATIONS.items()}


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


def random_rows(rng: np.random.Generator) -> list[list[int]]:
    """Contexts of random lengths; rows end in padding or not, the last is padding alone."""
    rows: list[list[int]] = []
    for _ in range(ROWS - 1):
        lengths: list[int] = []
        while sum(lengths) < SEQ - rng.integers(0, SEQ // 2):
            lengths.append(int(rng.integers(1, SEQ - sum(lengths) + 1)))
        rows.append(lengths)
    return rows


def values(rng: np.random.Generator, heads: int = 4, kv: int = 2) -> Arrays:
    q = rng.standard_normal((ROWS, SEQ, heads, DIM))
    k, v = rng.standard_normal((2, ROWS, SEQ, kv, DIM))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def one_by_one(arrays: Arrays, segments: np.ndarray) -> np.ndarray:
    """Every token of every document alone, in float64: what attention is."""
    q, k, v = (a.astype(np.float64) for a in arrays)
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for row, column in zip(*np.nonzero(segments), strict=True):
        seen = [j for j in range(column + 1) if segments[row, j] == segments[row, column]]
        for head in range(q.shape[2]):
            scores = k[row, seen, head // group] @ q[row, column, head] / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            out[row, column, head] = weights @ v[row, seen, head // group] / weights.sum()
    return out


def run(name: str, arrays: Arrays, segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
    given = [jnp.asarray(a) for a in (*arrays, segments, positions)]
    return np.asarray(COMPILED[name](*given))


def assert_as_if_alone(name: str, rows: list[list[int]], arrays: Arrays) -> None:
    segments, positions = places(rows)
    found = run(name, arrays, segments, positions)
    assert found.shape == arrays[0].shape
    assert np.isfinite(found).all(), "padding must not make NaN"
    real = segments > 0
    np.testing.assert_allclose(found[real], one_by_one(arrays, segments)[real], atol=2e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_packed_documents_attend_as_if_alone(name: str) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        assert_as_if_alone(name, random_rows(rng), values(rng))


@pytest.mark.parametrize("name", ["masked", "blocked-5"])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 1)], ids=["mha", "mqa"])
def test_heads_find_the_keys_of_their_group(name: str, heads: int, kv: int) -> None:
    rng = np.random.default_rng(kv)
    assert_as_if_alone(name, random_rows(rng), values(rng, heads, kv))


LAYOUTS: dict[str, list[list[int]]] = {
    "whole rows": [[37], [37], [37], [37]],
    "single tokens": [[1] * 37, [1] * 5],
    "one token at an end": [[36, 1], [1, 36]],
    "edges on block edges": [[16, 16], [5, 5, 5], [32]],
    "empty rows first": [[], [], [5]],
    "empty rows between": [[10], [], [37], [1]],
    "one token in all": [[1]],
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_does_not_matter_how_documents_fall_on_blocks(name: str, layout: str) -> None:
    assert_as_if_alone(name, LAYOUTS[layout], values(np.random.default_rng(5)))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
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


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
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


@pytest.mark.parametrize("name", ["masked", "blocked-16"])
def test_bfloat16_stays_within_its_own_rounding(name: str) -> None:
    rng = np.random.default_rng(9)
    segments, positions = places([[20, 12], [37]])
    coarse = [jnp.asarray(a, jnp.bfloat16) for a in values(rng)]
    found = COMPILED[name](*coarse, jnp.asarray(segments), jnp.asarray(positions))
    assert found.dtype == jnp.bfloat16
    q, k, v = (np.asarray(a, np.float32) for a in coarse)
    real = segments > 0
    error = np.asarray(found, np.float32)[real] - one_by_one((q, k, v), segments)[real]
    assert np.abs(error).max() < 2**-6

"""Where heads look, against the whole pattern in float64: keys, weights and their summary."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.check.attended import attended as of_pattern
from spile.models.forward import attended as module
from spile.models.forward.attended import attended
from spile.models.forward.attention import Scoring, TokenPlaces, chunked, pattern

ROWS, SEQ, HEADS, KEY_HEADS, DIM, TOP = 2, 40, 4, 2, 8, 6
LENGTHS = ((17, 3, 20), (40,))
WANTED = ("attn_top_keys", "attn_top_weights", "attn_summary")
SINKS, SLOPES = np.array([0.5, 2.0, -1.0, 4.0]), np.array([0.5, 0.25, 0.1, 0.0])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "cap": {"cap": 3.0},
    "sinks": {"sinks": jnp.asarray(SINKS, jnp.float32)},
    "alibi": {"slopes": jnp.asarray(SLOPES, jnp.float32)},
}


def rows() -> tuple[np.ndarray, np.ndarray]:
    segments, positions = np.zeros((2, ROWS, SEQ), np.int32)
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True), 1):
            segments[row, end - length : end] = number
            positions[row, end - length : end] = np.arange(length)
    return segments, positions


SEGMENTS, POSITIONS = rows()
Q, K = (
    np.random.default_rng(heads).standard_normal((ROWS, SEQ, heads, DIM)).astype(np.float32) * 2
    for heads in (HEADS, KEY_HEADS)
)


def run(scoring: Scoring, size: int | None = None, columns: np.ndarray | None = None) -> Any:
    places = chunked(jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), size)
    keys = TokenPlaces(jnp.broadcast_to(jnp.arange(SEQ), SEGMENTS.shape), *places)
    kept = np.tile(np.arange(SEQ), (ROWS, 1)) if columns is None else columns

    def some(values: Any) -> Any:
        return jax.vmap(lambda row, at: row[at])(jnp.asarray(values), jnp.asarray(kept))

    queries = TokenPlaces(*map(some, keys))
    found = attended(
        some(Q), jnp.asarray(K), queries, keys, some(POSITIONS), scoring, WANTED, TOP
    )  # fmt: skip
    return {name: np.asarray(values) for name, values in found.items()}


def exact(scoring: Scoring, size: int | None = None) -> list[tuple[int, slice, Any]]:
    """The weights of each context in float64, and what follows from them."""
    with jax.enable_x64(True):
        places = chunked(jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), size)
        whole = np.asarray(pattern(jnp.asarray(Q, float), jnp.asarray(K, float), *places, scoring))
    found: list[tuple[int, slice, Any]] = []
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            own = slice(int(end) - length, int(end))
            weights = whole[row][:, own, own].swapaxes(0, 1).astype(np.float64)
            sink = scoring.sinks is not None
            found.append((row, own, of_pattern(weights, TOP, sink=sink)))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_whole_pattern(name: str) -> None:
    scoring = Scoring(DIM**-0.5, **KINDS[name])
    found = run(scoring)
    for row, own, wanted in exact(scoring):
        ours = {site: values[row, own] for site, values in found.items()}
        assert np.array_equal(ours["attn_top_keys"], wanted["attn_top_keys"])
        assert np.abs(ours["attn_top_weights"] - wanted["attn_top_weights"]).max() <= 2e-6
        for part in range(5):
            right = wanted["attn_summary"][..., part]
            gap = np.abs(ours["attn_summary"][..., part] - right).max()
            assert gap <= 2e-5 * max(1e-2, np.abs(right).max()), (part, gap)


def test_chunks_hide_keys_and_positions_count_from_the_contexts_start() -> None:
    scoring = Scoring(DIM**-0.5)
    found = run(scoring, size=8)
    for row, own, wanted in exact(scoring, size=8):
        assert np.array_equal(found["attn_top_keys"][row, own], wanted["attn_top_keys"])
        summary = found["attn_summary"][row, own]
        np.testing.assert_allclose(summary, wanted["attn_summary"], atol=2e-5)
        assert not summary[8:, :, 1].any(), "the first token is in another chunk"


def test_places_without_a_key_are_marked_and_weigh_nothing() -> None:
    found = run(Scoring(DIM**-0.5))
    fewer = np.arange(TOP)[None, None] > POSITIONS[..., None]
    fewer = np.broadcast_to(fewer[:, :, None], found["attn_top_keys"].shape)
    assert ((found["attn_top_keys"] == -1) == fewer).all()
    assert (found["attn_top_weights"][fewer] == 0).all()
    first = found["attn_summary"][POSITIONS == 0]
    assert np.array_equal(first, np.broadcast_to([0.0, 1.0, 1.0, 0.0, 0.0], first.shape))


def test_of_equal_weights_the_earlier_key_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.K", np.zeros_like(K))
    keys = run(Scoring(1.0))["attn_top_keys"]
    assert (keys[1, TOP:] == np.arange(TOP)).all()


@pytest.mark.full
def test_blocks_of_queries_and_chosen_queries_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scoring = Scoring(DIM**-0.5, **KINDS["sinks"])
    columns = np.sort(np.random.default_rng(0).permuted(np.tile(np.arange(SEQ), (ROWS, 1)), axis=1)[
        :, :13
    ])  # fmt: skip
    whole, some = run(scoring), run(scoring, columns=columns)
    monkeypatch.setattr(module, "_SCORES", 7 * ROWS * HEADS * SEQ)  # 40 is no multiple of 7
    for found, wanted in ((run(scoring), whole), (run(scoring, columns=columns), some)):
        for site, values in found.items():
            np.testing.assert_allclose(values, wanted[site], rtol=2e-6, atol=1e-6)
    for site, values in some.items():
        right = np.stack([whole[site][row, at] for row, at in enumerate(columns)])
        np.testing.assert_allclose(values, right, rtol=2e-6, atol=1e-6)


def test_no_array_has_the_square_of_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCORES", 7 * ROWS * HEADS * SEQ)
    text = str(jax.make_jaxpr(lambda: run_traced(Scoring(1.0)))())
    assert f"{SEQ},{SEQ}]" not in text and f"7,{SEQ}]" in text


def run_traced(scoring: Scoring) -> Any:
    places = jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS)
    keys = TokenPlaces(jnp.broadcast_to(jnp.arange(SEQ), SEGMENTS.shape), *places)
    return attended(jnp.asarray(Q), jnp.asarray(K), keys, keys, places[1], scoring, WANTED, TOP)


def test_nan_is_told_by_keys_as_by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt = K.copy()
    spoilt[1, 10, 0, 3] = np.nan
    monkeypatch.setattr(f"{__name__}.K", spoilt)
    found = run(Scoring(DIM**-0.5))
    assert (found["attn_top_keys"][1, 10:, :2] == -2).all()
    assert np.isnan(found["attn_top_weights"][1, 10:, :2]).all()
    assert np.isnan(found["attn_summary"][1, 10:, :2]).all()
    for row, where, heads in ((1, slice(0, 10), slice(None)), (1, slice(10, None), slice(2, None))):
        assert (found["attn_top_keys"][row, where, heads] > -2).all()
        assert np.isfinite(found["attn_summary"][row, where, heads]).all()

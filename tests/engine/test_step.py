"""The compiled step: one shape, one compilation, and statistics of what is stored."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.data.pack import Batch
from spile.engine.step import Step
from spile.models.checkpoint import open_checkpoint
from spile.models.taps import parse_taps
from spile.models.weights import load_params


def make_step(model: Path, taps: str, store_dtype: str = "float32") -> Step:
    checkpoint = open_checkpoint(str(model))
    chosen = parse_taps(taps, checkpoint.arch)
    params, _ = load_params(
        checkpoint,
        max(tap.layers_needed(checkpoint.arch) for tap in chosen),
        head=any(tap.site in ("final_norm", "logits") for tap in chosen),
        dtype=jnp.dtype("float32"),
    )
    return Step(
        params, checkpoint.arch, chosen,
        compute_dtype="float32", store_dtype=store_dtype, platform="cpu",
    )  # fmt: skip


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (40, 17, 0)) -> Batch:
    rng = np.random.default_rng(seed)
    shape = (len(lengths), 40)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    for row, length in enumerate(lengths):
        cut = length // 3
        tokens[row, :length] = rng.integers(0, 256, length)
        positions[row, :length] = [*range(cut), *range(length - cut)]
        segments[row, :length] = [1] * cut + [2] * (length - cut)
    return Batch(tokens, positions, segments, np.asarray(lengths, np.int32))


@pytest.mark.parametrize("store_dtype", ["float32", "bfloat16", "float16"])
def test_statistics_are_those_of_the_stored_values(model: Path, store_dtype: str) -> None:
    step = make_step(model, "resid_post:0+2,embed", store_dtype)
    output = step(make_batch())
    for tap in ("resid_post.0", "resid_post.2", "embed"):
        rows = output.rows_of(tap)
        assert rows.dtype.name == store_dtype
        stats = output.stats_of(tap)
        assert [s.count for s in stats] == [40, 17], "an empty row has no statistics"
        for row, found in zip(rows, stats, strict=False):
            real = row[: found.count].astype(np.float64)
            np.testing.assert_allclose(found.mean, real.mean(0), atol=1e-6)
            np.testing.assert_allclose(found.variance, real.var(0), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(
                found.mean_norm, np.linalg.norm(real, axis=1).mean(), rtol=1e-5
            )
            assert found.max_abs == np.abs(real).max()
            assert found.nonfinite == 0


def test_batches_of_one_shape_compile_once(model: Path) -> None:
    step = make_step(model, "resid_post:all,logits")
    jax.block_until_ready(step(make_batch(0)).rows)
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(step(make_batch(1, (3, 40, 40))).rows)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_a_tap_costs_only_the_layers_below_it(model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    params, digests = load_params(checkpoint, 1, head=False, dtype=jnp.dtype("float32"))
    assert all(array.shape[0] == 1 for array in params.blocks.values())
    assert not any(".layers.1." in name or ".layers.2." in name for name in digests)
    assert params.head is None
    assert params.final_norm is None


def test_only_the_embeddings_are_loaded_for_a_tap_on_them(model: Path) -> None:
    step = make_step(model, "embed")
    batch = make_batch()
    embed = load_params(
        open_checkpoint(str(model)), 0, head=False, dtype=jnp.dtype("float32")
    )[0].embed  # fmt: skip
    assert np.array_equal(step(batch).rows_of("embed"), np.asarray(embed)[batch.tokens])

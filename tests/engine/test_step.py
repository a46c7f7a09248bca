"""The compiled step: one shape, one compilation, and statistics of what is stored."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.data.pack import Batch
from spile.engine.step import Step, StepOutput
from spile.models.checkpoint import open_checkpoint
from spile.models.decoder import needs_whole_block
from spile.models.params import Params, Schedule
from spile.models.taps import AFTER_BLOCKS, parse_taps
from spile.models.weights import load_params

# A tap of every kind: vectors, heads, heads by keys, single numbers.
SHAPED = "embed,q:1,attn_pattern:0,z:all,resid_post:0+2,logprob,entropy"


def make_step(
    model: Path,
    taps: str,
    store_dtype: str = "float32",
    scales: dict[str, np.ndarray] | None = None,
) -> Step:
    checkpoint = open_checkpoint(str(model))
    chosen = parse_taps(taps, checkpoint.arch)
    depth = max(tap.layers_needed(checkpoint.arch) for tap in chosen)
    schedule = Schedule.of(checkpoint.arch, depth, whole=needs_whole_block(chosen, depth))
    params, _ = load_params(
        checkpoint,
        schedule,
        head=any(tap.site in AFTER_BLOCKS for tap in chosen),
        dtype=jnp.dtype("float32"),
    )
    return Step(
        params, checkpoint.arch, chosen, schedule,
        compute_dtype="float32", store_dtype=store_dtype, device=jax.devices()[0], scales=scales,
    )  # fmt: skip


def make_batch(
    seed: int = 0,
    lengths: tuple[int, ...] = (40, 17, 0),
    keep: list[list[int]] | None = None,
    most: int = 0,
) -> Batch:
    """Two documents in each row; `keep`: the places to keep of each, in `most` columns."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), 40)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    for row, length in enumerate(lengths):
        cut = length // 3
        tokens[row, :length] = rng.integers(0, 256, length)
        positions[row, :length] = [*range(cut), *range(length - cut)]
        segments[row, :length] = [1] * cut + [2] * (length - cut)
    filled = np.asarray(lengths, np.int32)
    if keep is None:
        return Batch(tokens, positions, segments, filled, None, filled, contexts=8)
    columns = np.zeros((len(lengths), most), np.int32)
    for row, places in enumerate(keep):
        columns[row, : len(places)] = places
    counts = np.array([len(places) for places in keep], np.int32)
    return Batch(tokens, positions, segments, filled, columns, counts, contexts=8)


def by_packed_row(rows: np.ndarray, output: StepOutput) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(output.counts)[:-1])


@pytest.mark.parametrize("store_dtype", ["float32", "bfloat16", "float16"])
def test_statistics_are_those_of_the_stored_values(model: Path, store_dtype: str) -> None:
    step = make_step(model, "resid_post:0+2,embed", store_dtype)
    output = step(make_batch())
    for tap in ("resid_post.0", "resid_post.2", "embed"):
        rows = output.rows_of(tap)
        assert (rows.dtype.name, rows.shape) == (store_dtype, (57, 32)), "padding stays behind"
        stats = output.stats_of(tap)
        assert [s.count for s in stats] == [40, 17], "an empty row has no statistics"
        for row, found in zip(by_packed_row(rows, output), stats, strict=False):
            real = row.astype(np.float64)
            np.testing.assert_allclose(found.mean, real.mean(0), atol=1e-6)
            np.testing.assert_allclose(found.variance, real.var(0), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(
                found.mean_norm, np.linalg.norm(real, axis=1).mean(), rtol=1e-5
            )
            assert found.max_abs == np.abs(real).max()
            assert found.nonfinite == 0


@pytest.mark.parametrize(
    ("store_dtype", "keep"), [("bfloat16", None), ("float32", [[0, 3, 12, 13, 39], [5], []])]
)
def test_statistics_of_shaped_taps_are_those_of_each_stored_value(
    model: Path, store_dtype: str, keep: list[list[int]] | None
) -> None:
    output = make_step(model, SHAPED, store_dtype)(make_batch(keep=keep, most=6))
    shapes = {
        "embed": (32,), "q.1": (4, 8), "attn_pattern.0": (4, 40), "z.0": (4, 8), "z.1": (4, 8),
        "z.2": (4, 8), "resid_post.0": (32,), "resid_post.2": (32,), "logprob": (), "entropy": (),
    }  # fmt: skip
    assert set(output.rows) == set(shapes)
    for tap, shape in shapes.items():
        rows = output.rows_of(tap)
        assert rows.shape == (57 if keep is None else 6, *shape)
        assert rows.dtype.name == ("float32" if tap in ("logprob", "entropy") else store_dtype)
        stats = output.stats_of(tap)
        assert [s.count for s in stats] == ([40, 17] if keep is None else [5, 1])
        for row, found in zip(by_packed_row(rows, output), stats, strict=False):
            real = row.reshape(found.count, -1).astype(np.float64)
            np.testing.assert_allclose(found.mean, real.mean(0), atol=1e-6)
            np.testing.assert_allclose(found.variance, real.var(0), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(
                found.mean_norm, np.linalg.norm(real, axis=1).mean(), rtol=1e-5
            )
            assert found.max_abs == np.abs(real).max()


def test_the_rows_that_are_kept_are_those_of_a_step_that_keeps_all(model: Path) -> None:
    step = make_step(model, SHAPED)
    keep = [[0, 3, 12, 13, 39], [5, 16], []]
    whole, some = step(make_batch()), step(make_batch(keep=keep, most=8))
    assert list(some.counts) == [5, 2, 0]
    assert list(some.lengths) == [40, 17, 0]
    for tap in whole.rows:
        pairs = zip(
            by_packed_row(some.rows_of(tap), some),
            by_packed_row(whole.rows_of(tap), whole),
            strict=True,
        )
        for (kept, row), places in zip(pairs, keep, strict=True):
            wanted = row[places]
            if tap in ("logprob", "entropy"):  # the head runs on the kept rows alone
                np.testing.assert_allclose(kept, wanted, rtol=1e-5)
            else:
                assert kept.tobytes() == wanted.tobytes(), tap


def test_batches_of_one_shape_compile_once(model: Path) -> None:
    step = make_step(model, "resid_post:all,logits")
    jax.block_until_ready(step(make_batch(0)).rows)
    jax.block_until_ready(step(make_batch(0, keep=[[1, 2], [3], []], most=4)).rows)
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(step(make_batch(1, (3, 14, 40))).rows)  # as many, elsewhere
        jax.block_until_ready(step(make_batch(2, keep=[[7, 8, 9], [0], []], most=4)).rows)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def load(model: Path, depth: int, *, whole: bool) -> tuple[Params, dict[str, str]]:
    checkpoint = open_checkpoint(str(model))
    schedule = Schedule.of(checkpoint.arch, depth, whole=whole)
    return load_params(checkpoint, schedule, head=False, dtype=jnp.dtype("float32"))


@pytest.mark.parametrize("whole", [True, False])
def test_a_tap_costs_only_the_layers_below_it(model: Path, whole: bool) -> None:
    params, digests = load(model, 1, whole=whole)
    # A block that runs to its end is scanned, another stands apart.
    assert (len(params.cycle), len(params.tail)) == ((1, 0) if whole else (0, 1))
    assert all(array.shape[0] == 1 for block in params.cycle for array in block.values())
    assert any(".layers.0." in name for name in digests)
    assert not any(".layers.1." in name or ".layers.2." in name for name in digests)
    assert set(params.outer) == {"embed"}, "neither the head nor the norm before it"


def test_only_the_embeddings_are_loaded_for_a_tap_on_them(model: Path) -> None:
    step = make_step(model, "embed")
    batch = make_batch()
    params, digests = load(model, 0, whole=False)
    assert (params.cycle, params.tail, len(digests)) == ((), (), 1)
    embed = np.asarray(params.outer["embed"])
    assert np.array_equal(step(batch).rows_of("embed"), embed[batch.tokens[batch.segments > 0]])

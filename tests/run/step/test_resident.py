"""The compiled step: one compilation for each shape, and statistics of the stored values."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.core.tensors import write_tensors
from spile.corpus.pack import Batch
from spile.dataset.codec.quantization import decode
from spile.dataset.codec.statistics import TapStats
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.forward.weight_loader import load_params
from spile.models.forward.weights import LayerSchedule, Params
from spile.run.step.output import StepOutput
from spile.run.step.resident import ResidentStep
from support import meshes, saes, tiny
from support.marks import some

# A tap of every kind: vectors, heads, heads by keys, single numbers.
SHAPED = "embed,q:1,attn_pattern:0,z:all,resid_post:0+2,logprob,entropy"


def make_step(
    model: Path,
    taps: str,
    store_dtype: str = "float32",
    scales: dict[str, np.ndarray] | None = None,
    **given: Any,
) -> ResidentStep:
    return meshes.make_step(model, taps, None, store_dtype, scales=scales, **given)


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


def scales_of(output: StepOutput, tap: str) -> np.ndarray | None:
    """One device has all rows."""
    ((_, scales),) = output.pieces_of(tap)
    return scales


@pytest.mark.parametrize("store_dtype", some(["float32", "bfloat16", "float16"], "bfloat16"))
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


def test_a_mean_is_as_exact_as_its_values_differ_however_large_it_is(tmp_path: Path) -> None:
    """The device's float32 sums alone would give channels of large means no variance."""
    model = tiny.write_model(tmp_path / "model")
    tensors = tiny.random_tensors(tiny.CONFIG)
    offsets = 10.0 ** np.arange(-16, 16) * np.where(np.arange(32) % 2, 1, -1)
    offsets[np.abs(offsets) > 1e6] = 7e5
    tensors["model.embed_tokens.weight"] += offsets.astype(np.float32)
    (model / "model.safetensors").unlink()
    write_tensors(model / "model.safetensors", tensors)
    output = make_step(model, "embed")(make_batch(lengths=(40, 40, 39)))
    rows = output.rows_of("embed").astype(np.float64)
    together = TapStats.empty(32)
    for row, found in zip(by_packed_row(rows, output), output.stats_of("embed"), strict=True):
        assert (np.abs(found.mean - row.mean(0)) <= 1e-7 * row.std(0)).all()
        np.testing.assert_allclose(found.variance, row.var(0), rtol=1e-6)
        together.merge(found)
    assert (np.abs(together.mean - rows.mean(0)) <= 1e-7 * rows.std(0)).all()
    np.testing.assert_allclose(together.variance, rows.var(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("store_dtype", "keep"),
    [
        pytest.param("bfloat16", None, marks=pytest.mark.full),
        ("float32", [[0, 3, 12, 13, 39], [5], []]),
    ],
)
def test_statistics_of_shaped_taps_are_those_of_each_stored_value(
    model: Path, store_dtype: str, keep: list[list[int]] | None
) -> None:
    output = make_step(model, SHAPED, store_dtype)(make_batch(keep=keep, most=6))
    shapes = {
        "embed": (32,), "q.1": (4, 8), "attn_pattern.0": (4, 40), "z.0": (4, 8), "z.1": (4, 8),
        "z.2": (4, 8), "resid_post.0": (32,), "resid_post.2": (32,), "logprob": (), "entropy": (),
    }  # fmt: skip
    assert set(output.batches[0].rows) == set(shapes)
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
    whole, few = step(make_batch()), step(make_batch(keep=keep, most=8))
    assert few.counts.tolist() == [5, 2, 0]
    assert few.tokens == whole.tokens == 57
    for tap in whole.batches[0].rows:
        pairs = zip(
            by_packed_row(few.rows_of(tap), few),
            by_packed_row(whole.rows_of(tap), whole),
            strict=True,
        )
        for (kept, row), places in zip(pairs, keep, strict=True):
            wanted = row[places]
            if tap in ("logprob", "entropy"):  # the head runs on the kept rows alone
                np.testing.assert_allclose(kept, wanted, rtol=1e-5)
            else:
                assert kept.tobytes() == wanted.tobytes(), tap


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Count the programs that are compiled inside the block."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.clear_event_listeners()


def test_a_step_is_compiled_while_its_model_is_loading(model: Path) -> None:
    ready = make_step(model, "resid_post:1")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), ready.params)
    loading: Future[Params] = Future()
    step = ResidentStep(loading, ready.settings, shapes=shapes)
    batch = make_batch()
    step.compile(batch)
    assert not step.loaded(0.01)
    loading.set_result(ready.params)
    assert step.loaded(0.01)
    with compilations() as compiled:
        found = step(batch).rows_of("resid_post.1")
    assert not compiled
    np.testing.assert_array_equal(found, ready(batch).rows_of("resid_post.1"))


def test_batches_of_one_shape_compile_once(model: Path) -> None:
    step = make_step(model, "resid_post:all,logits")
    jax.block_until_ready(step(make_batch(0)).batches[0].rows)
    jax.block_until_ready(step(make_batch(0, keep=[[1, 2], [3], []], most=4)).batches[0].rows)
    with compilations() as compiled:
        jax.block_until_ready(
            step(make_batch(1, (3, 14, 40))).batches[0].rows
        )  # as many, elsewhere
        jax.block_until_ready(
            step(make_batch(2, keep=[[7, 8, 9], [0], []], most=4)).batches[0].rows
        )
    assert compiled == []


QUANTIZED = ("float8_e4m3", "int8")
EIGHT = "embed,z:0,resid_post:0"


def channel_scales(output: StepOutput, share: float = 0.7) -> dict[str, np.ndarray]:
    """Scales from the rows of a float32 step; the largest values exceed them."""
    rows = {tap: output.rows_of(tap) for tap in output.batches[0].rows}
    return {
        tap: (share * np.abs(found).max(axis=0) / 127).astype(np.float32)
        for tap, found in rows.items()
    }


def decoded(
    output: StepOutput, tap: str, scales: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows as a reader decodes them, and the allowed error of each value."""
    rows, by_row = output.rows_of(tap), scales_of(output, tap)
    if by_row is not None:
        assert rows.dtype.name == "float8_e4m3fn" and by_row.shape == (len(rows),)
        values = decode(rows, by_row)
        apart = by_row.reshape(-1, *[1] * (rows.ndim - 1)) * 2.0**-10
        return values, np.maximum(np.abs(values) / 15, apart) * (1 + 1e-5)
    assert rows.dtype == np.int8
    values = decode(rows, scales[tap])
    return values, np.broadcast_to(scales[tap] * 0.5001, values.shape)


@pytest.mark.parametrize(
    ("store_dtype", "keep"),
    [
        pytest.param("float8_e4m3", None, marks=pytest.mark.full),
        ("int8", [[0, 3, 12, 13, 39], [5], []]),
    ],
)
def test_int8_rows_quantize_float32_rows_and_statistics_describe_reads(
    model: Path, store_dtype: str, keep: list[list[int]] | None
) -> None:
    batch = make_batch(keep=keep, most=6)
    plain = make_step(model, EIGHT)(batch)
    scales = channel_scales(plain) if store_dtype == "int8" else {}
    output = make_step(model, EIGHT, store_dtype, scales)(batch)
    clipped = 0
    for tap in ("embed", "z.0", "resid_post.0"):
        exact = plain.rows_of(tap)
        values, allowed = decoded(output, tap, scales)
        assert (values.dtype, values.shape) == (np.float32, exact.shape)
        beyond = np.zeros(exact.shape, bool)
        if tap in scales:
            beyond = np.abs(np.rint(exact / scales[tap])) > 127
            assert (np.abs(values[beyond]) < np.abs(exact[beyond])).all()
        assert (np.abs(values - exact) <= allowed)[~beyond].all(), tap
        assert not np.array_equal(values, exact)
        stats = output.stats_of(tap)
        assert [s.count for s in stats] == ([40, 17] if keep is None else [5, 1])
        for row, cut, found in zip(
            by_packed_row(values, output), by_packed_row(beyond, output), stats, strict=False
        ):
            real = row.reshape(found.count, -1).astype(np.float64)
            np.testing.assert_allclose(found.mean, real.mean(0), atol=1e-6)
            np.testing.assert_allclose(found.variance, real.var(0), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(
                found.mean_norm, np.linalg.norm(real, axis=1).mean(), rtol=1e-5
            )
            assert found.max_abs == np.abs(real).max()
            assert (found.nonfinite, found.clipped) == (0, int(cut.sum()))
            clipped += found.clipped
    assert (clipped > 0) == (store_dtype == "int8")


@pytest.mark.parametrize(
    "store_dtype", some(["float32", "bfloat16", *QUANTIZED], "bfloat16", "int8")
)
def test_what_is_not_finite_is_counted_as_it_was_computed(infinite: Path, store_dtype: str) -> None:
    scales = {"embed": np.full(32, 0.1, np.float32)} if store_dtype == "int8" else None
    step = make_step(infinite, "embed", store_dtype, scales)
    batch = make_batch(0)
    batch.tokens[batch.segments > 0] = 1 + batch.tokens[batch.segments > 0] % 6
    batch.tokens[0, [0, 39]], batch.tokens[1, 3] = 0, tiny.BOS
    found = step(batch).stats_of("embed")
    assert [s.nonfinite for s in found] == [6, 1]
    if store_dtype in ("float32", "bfloat16"):
        rows = by_packed_row(step(batch).rows_of("embed").astype(np.float64), step(batch))[0]
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(found[0].mean, rows.mean(0), atol=1e-6)
    few = make_batch(0, keep=[[1, 39], [2], [0]], most=6)  # what pads a row is its first token
    few.tokens[:] = batch.tokens
    assert [s.nonfinite for s in step(few).stats_of("embed")] == [3, 0, 3]


@pytest.mark.parametrize("store_dtype", some(["bfloat16", "float8_e4m3"], "float8_e4m3"))
def test_latents_of_what_is_not_finite_are_not_finite_either(
    infinite: Path, tmp_path: Path, store_dtype: str
) -> None:
    encoder = SparseEncoder.of(open_sae(str(saes.write_sae(tmp_path))), 5)
    encoders = {"embed": (encoder, load_arrays(encoder.sae)[0])}
    batch = make_batch(0)
    batch.tokens[batch.segments > 0] = 1 + batch.tokens[batch.segments > 0] % 6
    batch.tokens[0, [0, 39]] = 0
    output = make_step(infinite, "embed", store_dtype, encoders=encoders)(batch)
    rows = output.rows_of("embed_latents").astype(np.float32)
    spoiled = ~np.isfinite(rows).all(axis=1)
    assert np.flatnonzero(spoiled).tolist() == [0, 39]
    stats = output.stats_of("embed_latents")
    assert [each.nonfinite for each in stats] == [int((~np.isfinite(rows)).sum()), 0]
    assert [each.nonfinite for each in output.stats_of("embed_latent_ids")] == [0, 0]


COUNTS = [
    (40, 40, 40), (0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 40, 0), (5, 0, 10), (5, 0, 11), (40, 40, 39),
]  # fmt: skip


@pytest.mark.parametrize("store_dtype", some(["float32", "float8_e4m3"], "float8_e4m3"))
def test_rows_leave_the_device_without_padding(model: Path, store_dtype: str) -> None:
    """Any choice of rows works, with few compiled lengths; if all rows are kept, with one."""
    step, table = make_step(model, "embed", store_dtype), make_step(model, "embed").params
    embed = np.asarray(table.outer["embed"])
    lengths: dict[bool, set[int]] = {True: set(), False: set()}
    for counts, whole in itertools.product(COUNTS, (True, False)):
        if whole:
            batch = make_batch(3, counts)
            wanted = embed[batch.tokens[batch.segments > 0]]
        else:
            rng = np.random.default_rng(sum(counts))
            keep = [np.sort(rng.permutation(40)[:n]).tolist() for n in counts]
            batch = make_batch(3, (40, 40, 40), keep, most=40)
            wanted = np.concatenate([embed[batch.tokens[r, keep[r]]] for r in range(3)])
        output = step(batch)
        rows, scales = output.rows_of("embed"), scales_of(output, "embed")
        assert len(rows) == sum(counts)
        if scales is None:
            assert rows.tobytes() == wanted.tobytes(), counts
        else:
            found = decode(rows, scales)
            assert (np.abs(found - wanted) <= np.abs(wanted).max(initial=0) / 15).all(), counts
            largest = np.abs(wanted).max(axis=1, initial=0)
            np.testing.assert_allclose(np.abs(found).max(axis=1, initial=0), largest, rtol=1e-6)
        left = {len(array) for array in output.batches[0].rows.values()}
        assert len(left) == 1, "scales as many as rows"
        if not whole:
            assert sum(counts) <= max(left) < sum(counts) + 15, "an eighth of what there might be"
        assert [s.count for s in output.stats_of("embed")] == [n for n in counts if n]
        lengths[whole] |= left
    assert lengths[True] == {120} and lengths[False] <= {*range(0, 121, 15)}


def test_a_new_shape_is_compiled_once_and_never_if_compiled_ahead(model: Path) -> None:
    # Shapes of this test alone: jax itself remembers a program that another step has compiled.
    several, all_of_them, fewer = (40, 17, 0, 3, 3, 1, 2), (40,) * 7, (9, 40, 0, 3, 3, 1)
    step = make_step(model, "embed", "float8_e4m3")
    with compilations() as compiled:
        step.compile(make_batch(0, several))
    assert len(compiled) == 2, "the model, and leaving out what is not kept"
    with compilations() as compiled:
        step.compile(make_batch(1, several))
        jax.block_until_ready(step(make_batch(2, several)).batches[0].rows)
    assert compiled == []
    with compilations() as compiled:
        for seed in (3, 4):
            jax.block_until_ready(step(make_batch(seed, all_of_them)).batches[0].rows)
    assert compiled == [], "as many rows leave, some of them padding"
    with compilations() as compiled:
        for seed in (3, 4):
            some_of_them = make_batch(seed, all_of_them, [[0, 3]] * 7, most=40)
            jax.block_until_ready(step(some_of_them).batches[0].rows)
    assert len(compiled) == 2, "rows are chosen in the model's program, too"
    with compilations() as compiled:
        for seed in (5, 6):
            jax.block_until_ready(step(make_batch(seed, fewer)).batches[0].rows)
        step.compile(make_batch(7, fewer))
    assert len(compiled) == 2


def load(model: Path, depth: int, *, whole: bool) -> tuple[Params, dict[str, str]]:
    checkpoint = open_checkpoint(str(model))
    schedule = LayerSchedule.of(checkpoint.arch, depth, whole=whole)
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

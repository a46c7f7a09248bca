"""Values that the device stores in eight bits are read back unchanged."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.dataset.codec import quantization as quant
from spile.dataset.format import TapInfo
from spile.models.files.encoders import open_sae, with_decoders
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.taps import Tap
from spile.run.step.stored import Extras, StoredForm, encode_rows
from support.marks import some

FIXTURES = Path(__file__).parents[2] / "fixtures" / "encoders"
SHAPES = [(24,), (4, 6), ()]
TINY = np.finfo(np.float32).tiny


def random_values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Values of 3 packed rows with 7 tokens each, of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-30, 30, (3, 7))).reshape(3, 7, *[1] * len(shape))
    spread = np.exp(rng.uniform(-8, 0, (3, 7, *shape)))
    return (rng.standard_normal((3, 7, *shape)) * sizes * spread).astype(np.float32)


def channel_scale(values: np.ndarray) -> np.ndarray:
    """Scales that cover only half of each channel's largest value."""
    return (0.5 * np.abs(values).max(axis=(0, 1)) / 127).astype(np.float32)


def flat(values: Any) -> np.ndarray:
    """[rows, ...] on the host, as a shard holds them."""
    found = np.asarray(values)
    return found.reshape(-1, *found.shape[2:])


def on_device(
    values: np.ndarray, dtype: str, scale: np.ndarray | None = None, *, compiled: bool = True
) -> list[np.ndarray | None]:
    """Stored, scale, decoded, clipped; compiled, since a step's compiler may elide conversions."""

    def run(values: jax.Array, scale: jax.Array | None) -> list[jax.Array | None]:
        made = encode_rows(values, dtype, scale)
        return [made.stored, made.scale, made.decoded, made.clipped]

    given = None if scale is None else jnp.asarray(scale)
    made = (jax.jit(run) if compiled else run)(jnp.asarray(flat(values)), given)
    return [None if array is None else np.asarray(array) for array in made]


@pytest.mark.parametrize("compiled", some([True, False], True))
@pytest.mark.parametrize("shape", SHAPES)
def test_float8_is_what_reading_gives(shape: tuple[int, ...], compiled: bool) -> None:
    values = random_values(shape)
    stored, scale, decoded, clipped = on_device(values, "float8_e4m3", compiled=compiled)
    assert stored is not None and scale is not None and decoded is not None
    assert (stored.dtype, stored.shape, scale.shape) == (quant.FLOAT8, (21, *shape), (21,))
    assert (scale.dtype, clipped) == (np.float32, None)
    assert quant.decode(stored, scale).tobytes() == decoded.tobytes()
    plain = quant.encode(flat(values), TapInfo(shape, "float8_e4m3"), None)
    np.testing.assert_allclose(decoded, plain, rtol=1e-6)
    assert np.abs(decoded - flat(values)).max() > 0, "something was lost"


@pytest.mark.parametrize("compiled", some([True, False], True))
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_what_reading_gives_and_counts_what_it_cannot_hold(
    shape: tuple[int, ...], compiled: bool
) -> None:
    values = random_values(shape)
    given = channel_scale(values)
    values[0, :2] = np.stack([given, -given]) * np.float32(127)  # just what it can hold
    stored, scale, decoded, clipped = on_device(values, "int8", given, compiled=compiled)
    assert stored is not None and decoded is not None and clipped is not None
    assert (stored.dtype, stored.shape, scale) == (np.int8, (21, *shape), None)
    assert quant.decode(stored, given).tobytes() == decoded.tobytes()
    plain = quant.encode(flat(values), TapInfo(shape, "int8"), given)
    np.testing.assert_allclose(decoded, plain, rtol=1e-6)
    beyond = np.abs(np.rint(flat(values) / given)) > 127
    assert clipped.tolist() == beyond.reshape(21, -1).sum(axis=1).tolist()
    assert (np.abs(stored[beyond]) == 127).all(), "zero stays in the middle"
    assert beyond.any() and not beyond[:2].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int16"])
def test_other_forms_are_left_alone(dtype: str) -> None:
    values = np.asarray(jnp.asarray(np.arange(42).reshape(3, 7, 2)).astype(dtype))
    stored, scale, decoded, clipped = on_device(values, dtype)
    assert stored is not None and decoded is not None
    assert (stored.dtype.name, scale, clipped) == (dtype, None, None)
    assert stored.tobytes() == decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_only_itself_in_float8(bad: float) -> None:
    values = random_values((24,))
    healthy = on_device(values, "float8_e4m3")[2]
    small = np.abs(values).argmin(axis=-1)  # never the value that gives a row its scale
    spoiled = values.copy()
    spoiled[1, 2, small[1, 2]] = bad
    spoiled[2, 6, :] = bad
    decoded, scale = on_device(spoiled, "float8_e4m3")[2], on_device(spoiled, "float8_e4m3")[1]
    assert healthy is not None and decoded is not None and scale is not None
    wrong = np.zeros((21, 24), bool)
    wrong[9, small[1, 2]] = wrong[20] = True
    assert np.isnan(decoded[wrong]).all()
    assert decoded[~wrong].tobytes() == healthy[~wrong].tobytes()
    assert np.isfinite(scale).all() and scale[20] == 1, "a row of nothing finite"


@pytest.mark.parametrize("compiled", some([True, False], True))
def test_rows_too_small_for_a_scale_stay_finite(compiled: bool) -> None:
    sizes = [1e-38, 1e-45, 2e-38, 1e-37, 448 * float(TINY), 1e-35, 0.0]
    values = np.zeros((1, len(sizes), 8), np.float32)
    values[0] = np.array(sizes, np.float32)[:, None] * np.linspace(-1, 1, 8, dtype=np.float32)
    stored, scale, decoded, _ = on_device(values, "float8_e4m3", compiled=compiled)
    assert stored is not None and scale is not None and decoded is not None
    assert (scale >= TINY).all(), "a subnormal one would be flushed to zero"
    assert np.isfinite(scale).all() and np.isfinite(decoded).all()
    assert scale[-1] == 1 and not decoded[-1].any()
    # 1e-38 is less than half of what may be told from zero, were it stored with the smallest scale
    error = np.abs(decoded - flat(values))
    assert (error <= np.maximum(np.abs(flat(values)) / 16, float(TINY))).all()
    assert (np.abs(decoded[3:6]).max(axis=1) > 0).all()


@pytest.mark.parametrize("targets", [(0, 1, 2), (0, 2)])
@pytest.mark.parametrize("name", ["circuit_tracer_clt", "gemma_scope_2_clt"])
def test_errors_across_layers_are_those_of_the_projects_own_code(
    name: str, targets: tuple[int, ...]
) -> None:
    folder = FIXTURES / name
    with np.load(folder / "wanted.npz") as found:
        rows, latents, decoded = (found[each] for each in ("rows", "latents", "decoded"))
    outputs = np.random.default_rng(0).standard_normal(rows.shape).astype(np.float32)
    encoders: dict[str, SparseEncoder] = {}
    for layer in reversed(range(3)):  # in any order
        own = tuple(target for target in targets if target >= layer)
        sae = with_decoders(open_sae(str(folder), layer=layer), own)
        encoders[f"mlp_in.{layer}"] = SparseEncoder.of(
            sae, 5, error_of="mlp_out" if layer in targets else None
        )
    taps = {f"{site}.{n}": Tap(site, n) for n in range(3) for site in ("mlp_in", "mlp_out")}
    values = {tap: (rows if "in" in tap else outputs)[own.layer] for tap, own in taps.items()}
    arrays = {tap: load_arrays(each.sae)[0] for tap, each in encoders.items()}
    stored = jax.jit(
        lambda values, extras: StoredForm(taps, encoders, "float32", None).rows(
            values, extras, (jnp.asarray([10, 10]), None), 10, 10
        )
    )
    made, statistics = stored(values, Extras(encoders=arrays))
    errors = {f"mlp_in_error.{layer}" for layer in targets}
    assert {tap for tap in made if "error" in tap} == errors <= {*statistics}
    for layer in range(3):
        largest = -np.sort(-latents[layer], axis=1)[:, :5]
        np.testing.assert_allclose(made[f"mlp_in_latents.{layer}"], largest, atol=1e-5)
    for layer in targets:
        wanted = outputs[layer] - decoded[layer]
        np.testing.assert_allclose(made[f"mlp_in_error.{layer}"], wanted, atol=2e-5)

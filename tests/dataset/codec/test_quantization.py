"""Values in eight bits: the size of the error, and that nothing else changes."""

import base64
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import CorruptError
from spile.dataset.codec.quantization import (
    FLOAT8,
    decode,
    encode,
    scales_from_json,
    scales_to_json,
)
from spile.dataset.format import TapInfo
from support import stored
from support.marks import examples

SHAPES = [(64,), (4, 16), (1,), (), (3000,)]
INT8 = TapInfo((2, 3), "int8")
FLOAT32 = np.float32


def by_row(shape: tuple[int, ...]) -> TapInfo:
    return TapInfo(shape, "float8_e4m3")


def random_rows(count: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Rows of very different size, among them values that are much smaller than the rest."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-40, 40, count)).reshape(-1, *[1] * len(shape))
    spread = np.exp(rng.uniform(-8, 0, (count, *shape)))
    return (rng.standard_normal((count, *shape)) * sizes * spread).astype(FLOAT32)


def largest_of(rows: np.ndarray) -> np.ndarray:
    """Return the largest absolute value of each row, in a shape that broadcasts with the rows."""
    largest = np.abs(rows).reshape(len(rows), -1).max(axis=1)
    return largest.reshape(-1, *[1] * (rows.ndim - 1)).astype(np.float64)


# -- float8, scaled by row -------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_float8_loses_a_sixteenth_at_most(shape: tuple[int, ...]) -> None:
    rows = random_rows(200, shape)
    read = encode(rows, by_row(shape), None)
    assert (read.dtype, read.shape) == (np.dtype(FLOAT32), rows.shape)
    wide, error = rows.astype(np.float64), np.abs(read.astype(np.float64) - rows)
    scale = largest_of(rows) / 448
    normal = np.abs(wide) >= 2.0**-6 * scale
    assert (error <= np.abs(wide) * 2.0**-4 * (1 + 1e-6))[normal].all()
    # below that, values are an even 2^-9 of the scale apart
    assert (error <= 2.0**-10 * scale * (1 + 1e-5))[~normal].all()
    assert normal.any()
    if len(shape) and shape[0] > 1:
        assert error.max() > 0 and (~normal).any(), "the test data has both"


@pytest.mark.parametrize("shape", SHAPES)
def test_float8_keeps_a_rows_largest_value_and_signs(shape: tuple[int, ...]) -> None:
    rows = random_rows(50, shape, seed=1)
    read = encode(rows, by_row(shape), None)
    np.testing.assert_allclose(largest_of(read), largest_of(rows), rtol=1e-6)
    assert (np.signbit(read) == np.signbit(rows)).all()


def test_float8_of_powers_of_two_is_exact() -> None:
    rows = np.array([[448.0, 1.0, -0.5, 0.015625], [7.0, -3.5, 0.0, 2.0**-6]], FLOAT32)
    assert np.array_equal(encode(rows, by_row((4,)), None), rows)


def test_a_row_of_zeros_is_read_as_zeros_and_leaves_others_alone() -> None:
    rows = random_rows(6, (8,))
    wanted = encode(rows, by_row((8,)), None)
    rows[[0, 3]] = 0
    read = encode(rows, by_row((8,)), None)
    assert not read[[0, 3]].any()
    others = [1, 2, 4, 5]
    assert read[others].tobytes() == wanted[others].tobytes()


@pytest.mark.parametrize("value", [1e-45, 1e-44, 1e-40, 1e-38, 1e-30, 1e30, 3.4e38])
def test_values_at_the_ends_of_float32_stay_finite_and_small(value: float) -> None:
    rows = np.full((2, 4), value, FLOAT32)
    read = encode(rows, by_row((4,)), None)
    assert np.isfinite(read).all()
    error = np.abs(read.astype(np.float64) - rows)
    assert (error <= max(value * 2.0**-4, 2.0**-9 * 1.2e-38)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_nan_and_spoils_no_other(value: float) -> None:
    rows = random_rows(5, (8,), seed=2)
    rows[:, 3] = 0
    wanted = encode(rows, by_row((8,)), None)
    rows[2, 3] = value
    read = encode(rows, by_row((8,)), None)
    assert np.isnan(read[2, 3])
    read[2, 3] = 0
    assert read.tobytes() == wanted.tobytes()


# -- int8, scaled by channel -----------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_off_by_half_a_step_at_most_and_clipped_beyond(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    scale = np.exp(rng.uniform(-10, 10, shape)).astype(FLOAT32)
    rows = (rng.uniform(-200, 200, (300, *shape)) * scale).astype(FLOAT32)
    read = encode(rows, TapInfo(shape, "int8"), scale)
    assert (read.dtype, read.shape) == (np.dtype(FLOAT32), rows.shape)
    wide = np.broadcast_to(scale.astype(np.float64), rows.shape)
    inside = np.abs(rows) <= 127 * wide
    error = np.abs(read.astype(np.float64) - rows)
    assert (error <= wide / 2 * (1 + 1e-4))[inside].all()
    limit = 127 * np.broadcast_to(scale, rows.shape) * np.sign(rows)
    assert np.array_equal(read[~inside], limit[~inside].astype(FLOAT32))
    assert inside.any() and (~inside).any()


def test_int8_has_127_steps_on_either_side_and_ties_go_to_even() -> None:
    steps = np.array([[-1000, -128, -127.4, -126.6, -0.5, 0.5, 1.5, 127, 127.6, 128]], FLOAT32)
    read = encode(steps, TapInfo((10,), "int8"), np.ones(10, FLOAT32))
    assert read.tolist() == [[-127, -127, -127, -127, -0.0, 0, 2, 127, 127, 127]]


def test_int8_of_what_is_no_number_is_zero() -> None:
    rows = np.array([[np.nan, np.inf, -np.inf, 3.0]], FLOAT32)
    read = encode(rows, TapInfo((4,), "int8"), np.full(4, 2.0, FLOAT32))
    assert read.tolist() == [[0, 254, -254, 4]]


# -- a few channels are far larger than the others -------------------------------------------


def relative_errors(rows: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Return each channel's mean error over its mean size."""
    return np.abs(read - rows).mean(axis=0) / np.abs(rows).mean(axis=0)


def test_outlier_channels_ruin_int8_by_row_but_not_what_we_store() -> None:
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((2000, 512)).astype(FLOAT32)
    rows[:, [7, 100, 333]] *= 100
    scale = (1.25 * np.abs(rows[:500]).max(axis=0) / 127).astype(FLOAT32)
    int8 = relative_errors(rows, encode(rows, TapInfo((512,), "int8"), scale))
    float8 = relative_errors(rows, encode(rows, by_row((512,)), None))
    steps = np.abs(rows).max(axis=1, keepdims=True) / 127
    naive = relative_errors(rows, np.rint(rows / steps) * steps)
    assert np.median(int8) < 0.02 and int8.max() < 0.03
    assert np.median(float8) < 0.05 and float8.max() < 0.05
    assert np.median(naive) > 0.3, "most of the remaining signal would be rounding"


# -- plain values ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", stored.DTYPE_NAMES)
def test_plain_values_are_rounded_to_their_dtype(dtype: str) -> None:
    rows, info = np.array([[1.001, -2.7]], FLOAT32), TapInfo((2,), dtype)
    read = encode(rows, info, None)
    assert read.dtype == info.storage
    assert read.tobytes() == rows.astype(info.storage).tobytes()


# -- decoding --------------------------------------------------------------------------------


def test_every_code_of_float8_is_read_as_it_is_defined() -> None:
    codes = np.arange(256, dtype=np.uint8).view(FLOAT8)
    read = decode(codes.reshape(2, 128), np.array([1.0, 3.0], FLOAT32))
    plain = codes.astype(np.float64).reshape(2, 128) * [[1], [3]]
    np.testing.assert_array_equal(read, plain)
    assert np.isnan(read).sum() == 2
    assert np.nanmax(read) == 448


def test_every_code_of_int8_is_read_times_its_channels_scale() -> None:
    codes = np.arange(-128, 128).astype(np.int8).reshape(-1, 2)
    read = decode(codes, np.array([0.5, 4.0], FLOAT32))
    assert np.array_equal(read, codes.astype(np.float64) * [0.5, 4.0])


@pytest.mark.parametrize("shape", [(5,), (2, 3), ()])
@pytest.mark.parametrize("dtype", stored.SCALED_NAMES)
@pytest.mark.parametrize("out_dtype", ["float32", "float64", "float16", "bfloat16"])
def test_decoding_fills_a_part_of_a_buffer_and_no_more(
    shape: tuple[int, ...], dtype: str, out_dtype: str
) -> None:
    info = TapInfo(shape, dtype)
    values = np.random.default_rng(6).standard_normal((7, *shape)).astype(FLOAT32)
    coded = stored.code(values, info)
    wanted = decode(coded.codes, coded.scale)
    assert wanted.tobytes() == coded.decoded.tobytes()
    kind = np.dtype(getattr(ml_dtypes, out_dtype, out_dtype))
    for spread in (1, 2):  # contiguous, and not
        whole = np.full((20, *shape, spread), -9, kind)
        part = whole[4:11, ..., 0]
        assert decode(coded.codes, coded.scale, part) is part
        assert whole[4:11, ..., 0].tobytes() == wanted.astype(kind).tobytes()
        whole[4:11, ..., 0] = -9
        assert (whole == -9).all()


@pytest.mark.parametrize("dtype", stored.SCALED_NAMES)
def test_codes_that_are_not_contiguous_are_decoded_in_their_own_order(dtype: str) -> None:
    info = TapInfo((6,), dtype)
    coded = stored.code(np.random.default_rng(7).standard_normal((8, 6)).astype(FLOAT32), info)
    scale = coded.scale[::2] if coded.by_row else coded.scale
    assert np.array_equal(decode(coded.codes[::2], scale), coded.decoded[::2])
    transposed = np.asfortranarray(coded.codes)
    assert np.array_equal(decode(transposed, coded.scale), coded.decoded)


@pytest.mark.parametrize("dtype", stored.SCALED_NAMES)
def test_no_rows_are_decoded_as_none(dtype: str) -> None:
    info = TapInfo((2, 3), dtype)
    scale = np.ones(0 if dtype == "float8_e4m3" else (2, 3), FLOAT32)
    assert decode(np.zeros((0, 2, 3), info.storage), scale).shape == (0, 2, 3)
    rows = np.zeros((0, 2, 3), FLOAT32)
    assert encode(rows, info, scale).shape == (0, 2, 3)


@pytest.mark.parametrize("shape", [(64,), (4, 16), ()])
@pytest.mark.parametrize("dtype", stored.SCALED_NAMES)
def test_encoding_is_what_a_plain_loop_would_store(shape: tuple[int, ...], dtype: str) -> None:
    info = TapInfo(shape, dtype)
    values = random_rows(30, shape, seed=8) if dtype == "float8_e4m3" else (
        np.random.default_rng(8).standard_normal((30, *shape)).astype(FLOAT32)
    )  # fmt: skip
    coded = stored.code(values, info)
    scale = None if coded.by_row else coded.scale
    assert encode(values, info, scale).tobytes() == coded.decoded.tobytes()
    half = values.astype(np.float16 if dtype == "int8" else ml_dtypes.bfloat16)
    assert encode(half, info, scale).dtype == FLOAT32


# -- the record ------------------------------------------------------------------------------

TAPS = {"q.1": INT8, "embed": TapInfo((), "int8"), "v.1": TapInfo((4,), "float8_e4m3")}
POSITIVE = st.floats(width=32, min_value=2.0**-149, max_value=3.4028234663852886e38)


VALUES = (
    st.none()
    | st.integers()
    | st.text(max_size=40)
    | (st.binary(max_size=30) | st.binary(min_size=24, max_size=24)).map(
        lambda data: base64.b64encode(data).decode()
    )
)


def text(*values: float, dtype: str = "<f4") -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def test_the_record_is_these_texts() -> None:
    scales = {"q.1": np.arange(1, 7, dtype=FLOAT32).reshape(2, 3), "embed": FLOAT32(0.5)}
    assert scales_to_json({k: np.asarray(v) for k, v in scales.items()}) == {
        "embed": "AAAAPw==",
        "q.1": "AACAPwAAAEAAAEBAAACAQAAAoEAAAMBA",
    }


@examples(100)
@given(st.lists(POSITIVE, min_size=6, max_size=6), POSITIVE)
def test_scales_are_read_back_exactly(values: list[float], single: float) -> None:
    scales = {
        "q.1": np.array(values, FLOAT32).reshape(2, 3),
        "embed": np.array(single, FLOAT32),
    }
    read = scales_from_json(scales_to_json(scales), TAPS)
    assert read.keys() == scales.keys(), "only those of taps that are scaled by channel"
    for tap, scale in scales.items():
        assert (read[tap].dtype, read[tap].shape) == (scale.dtype, scale.shape)
        assert read[tap].tobytes() == scale.tobytes()


def test_scales_that_are_not_contiguous_are_stored_in_their_own_order() -> None:
    scale = np.arange(1, 7, dtype=FLOAT32).reshape(3, 2).T
    read = scales_from_json(scales_to_json({"q.1": scale}), {"q.1": INT8})
    assert np.array_equal(read["q.1"], scale)


HOSTILE: dict[str, Any] = {
    "nothing": None,
    "a number": 3,
    "a list": [1.0] * 6,
    "an object": {"0": 1.0},
    "truth": True,
    "empty": "",
    "too few": text(*[1] * 5),
    "too many": text(*[1] * 7),
    "one for all": text(1),
    "another dtype": text(*[1] * 6, dtype="<f8"),
    "half a number": base64.b64encode(bytes(23)).decode(),
    "no base64": "!" * 32,
    "beside base64": text(*[1] * 6)[:-1] + "\n",
    "more after it": text(*[1] * 6) + "\n",
    "cut short": text(*[1] * 6)[:-1],
    "no ascii": "é" * 32,
    "a lone surrogate": "\ud800" * 32,
    "zero": text(1, 1, 0, 1, 1, 1),
    "minus zero": text(1, 1, -0.0, 1, 1, 1),
    "negative": text(1, 1, 1, 1, 1, -1),
    "infinite": text(np.inf, 1, 1, 1, 1, 1),
    "no number": text(1, 1, 1, 1, 1, np.nan),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_hostile_scales_are_refused_with_our_own_error(value: object) -> None:
    good = scales_to_json({"q.1": np.ones((2, 3), FLOAT32), "embed": np.ones((), FLOAT32)})
    assert scales_from_json(good, TAPS).keys() == {"q.1", "embed"}
    with pytest.raises(CorruptError, match=r"^scales.json: holds (no )?scales of q\.1"):
        scales_from_json({**good, "q.1": value}, TAPS)


def test_scales_of_another_tap_are_not_taken() -> None:
    ones = np.ones((2, 3), FLOAT32)
    with pytest.raises(CorruptError, match=r"^scales.json: holds no scales of q\.1"):
        scales_from_json(scales_to_json({"q.2": ones}), {"q.1": INT8})
    assert scales_from_json({}, {"v.1": TAPS["v.1"]}) == {}


@examples(200)
@given(st.dictionaries(st.sampled_from(["q.1", "q.2"]), VALUES))
def test_any_record_is_sound_or_refused(body: dict[str, Any]) -> None:
    try:
        read = scales_from_json(body, {"q.1": INT8})
    except CorruptError as error:
        assert error.key == "scales.json"
    else:
        assert read["q.1"].shape == (2, 3)
        assert np.isfinite(read["q.1"]).all() and (read["q.1"] > 0).all()

"""Directions: vectors are accepted, and other values refused."""

import io
import json
import pickle
from typing import Any

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.serve.directions import MOST_BYTES, Directions, parse


def npy(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


VECTOR = np.array([3.0, 0, -4])


@pytest.mark.parametrize(
    "data",
    [
        npy(VECTOR),
        npy(VECTOR.astype(np.float16)),
        npy(VECTOR.astype(">i4")),
        npy(VECTOR.reshape(1, 3)),
        npy(VECTOR.reshape(3, 1), allow_pickle=False),
        json.dumps(VECTOR.tolist()).encode(),
        b" [3, 0, -4.0]\n",
    ],
)
def test_a_vector_is_taken_and_made_one_long(data: bytes) -> None:
    found = parse(data)
    np.testing.assert_allclose(found, [0.6, 0, -0.8], rtol=1e-6)
    assert found.dtype == np.float32


class _Hurts:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a pickle was read')",)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(pickle.dumps([1, 2]), id="pickle"),
        pytest.param(npy(np.array([_Hurts()], object), allow_pickle=True), id="npy of pickles"),
        pytest.param(npy(np.zeros((2, 2))), id="matrix"),
        pytest.param(npy(VECTOR)[:-1], id="cut"),
        pytest.param(npy(VECTOR) + b"x", id="longer"),
        pytest.param(npy(np.array(["a"])), id="texts"),
        pytest.param(npy(VECTOR)[:6] + b"\x09\x09" + npy(VECTOR)[8:], id="version"),
        pytest.param(npy(VECTOR).replace(b"'<f8'", b"'<f9'"), id="dtype"),
        pytest.param(npy(VECTOR).replace(b"(3,)", b"(-3)"), id="shape"),
        pytest.param(npy(np.array([np.nan, 1])), id="nan"),
        pytest.param(npy(np.zeros(3)), id="zero"),
        pytest.param(b"[]", id="empty"),
        pytest.param(b"[1, [2]]", id="nested"),
        pytest.param(b"[true]", id="boolean"),
        pytest.param(b"[NaN]", id="json nan"),
        pytest.param(b"[1e999]", id="infinite"),
        pytest.param(b"[" + b"9" * 5000 + b"]", id="digits"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"a": 1}', id="object"),
        pytest.param(b"\xff\xfe", id="bytes"),
        pytest.param(b"[" + b"1," * MOST_BYTES + b"1]", id="large"),
    ],
)
def test_whatever_else_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(data)
    assert "\n" not in str(caught.value)


def test_a_direction_fits_a_tap() -> None:
    directions = Directions()
    with pytest.raises(ConfigError, match="3 values, but the taps have 5, 8"):
        directions.add("x", npy(VECTOR), {5, 8})
    number = directions.add("of \x1bmine" + "x" * 200, npy(VECTOR), {3, 8})
    assert directions.get(number, 3).shape == (3,)
    with pytest.raises(ConfigError, match="3 values, but the tap has 8"):
        directions.get(number, 8)
    with pytest.raises(ConfigError, match="no direction 99"):
        directions.get(99, 3)
    (told,) = directions.listed()
    assert told["name"].startswith("of  mine")
    assert len(told["name"]) == 80


def test_the_oldest_make_room() -> None:
    directions = Directions()
    numbers = [directions.add(str(n), npy(VECTOR), {3}) for n in range(140)]
    assert [each["id"] for each in directions.listed()] == numbers[-128:]

"""Parameters as they are read, values as they are spelled."""

import json

import numpy as np
import pytest

from spile.core.errors import ConfigError, StoreError
from spile.serve.routes import Ready, number, plain


def test_values_become_json_and_what_is_not_finite_null() -> None:
    told = plain(
        {
            "floats": np.array([1 / 3, np.nan, np.inf], np.float32),
            "ints": np.arange(3, dtype=np.uint16),
            "table": np.eye(2),
            "one": np.float64(123456789.125),
            "flag": np.bool_(True),
            "text": "<é>",
            "none": None,
            "ready": Ready([1, {"a": 2}]),
            7: (1, 2.5),
        }
    )
    assert told == {
        "floats": [0.333333, None, None],
        "ints": [0, 1, 2],
        "table": [[1.0, 0.0], [0.0, 1.0]],
        "one": 123457000.0,
        "flag": True,
        "text": "<é>",
        "none": None,
        "ready": [1, {"a": 2}],
        "7": [1, 2.5],
    }
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    with pytest.raises(StoreError, match="a bytes cannot be shown"):
        plain([b"x"])


def test_numbers_are_whole_and_within_bounds() -> None:
    assert number({"n": "12"}, "n", None) == 12
    assert number({}, "n", 5) == 5
    for text in ("", "-1", "1.0", " 1", "1e3", "٣", "9" * 17, "0x10", "+1", "11"):
        with pytest.raises(ConfigError, match="n must be"):
            number({"n": text}, "n", None, 0, 10)
    with pytest.raises(ConfigError, match="n must be a whole number"):
        number({}, "n", None)

"""Directions from files: names, shapes, and what is no direction."""

from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import InputError
from spile.features.decoders import read_directions


def test_a_file_holds_one_direction_or_several(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.arange(1, 5, dtype=np.float64))
    np.save(tmp_path / "more.npy", np.ones((2, 4), np.float16))
    names, vectors = read_directions([str(tmp_path / "one.npy"), str(tmp_path / "more.npy")], 4)
    assert names == ("one", "more[0]", "more[1]")
    assert vectors.dtype == np.float32
    assert vectors.tolist() == [[1, 2, 3, 4], [1] * 4, [1] * 4]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.ones(3), r"holds \[3\], and rows of the tap have 4 values"),
        (np.ones(0), r"holds \[0\], and rows"),
        (np.zeros(4), "must be finite and not zero"),
        (np.array([1, np.nan, 0, 0]), "must be finite and not zero"),
        (np.array(["a"]), "cannot be read as .npy"),
    ],
)
def test_what_is_no_direction_is_refused(values: np.ndarray, why: str, tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", values)
    with pytest.raises(InputError, match=why):
        read_directions([str(tmp_path / "bad.npy")], 4)


def test_a_missing_file_and_a_name_given_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.npy: cannot be read as .npy"):
        read_directions([str(tmp_path / "none.npy")], 4)
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "x.npy", tmp_path / "a" / "x.npy"):
        np.save(path, np.ones(4))
    with pytest.raises(InputError, match="two directions are named x; rename a file"):
        read_directions([str(tmp_path / "x.npy"), str(tmp_path / "a" / "x.npy")], 4)

"""Bins of activations, and columns that are not what they should be."""

import numpy as np
import pytest

from spile.core.errors import CorruptError
from spile.dataset.codec.features import (
    BINS,
    LatentCounts,
    bin_edges,
    bins_of,
    ends_of_latents,
    flat_histogram,
)


@pytest.mark.parametrize("signed", [False, True])
def test_every_value_lies_between_the_edges_of_its_bin(signed: bool) -> None:
    rng = np.random.default_rng(0)
    values = (2.0 ** rng.uniform(-15.9, 15.9, 2000)).astype(np.float32)
    if signed:
        values *= rng.choice([-1, 1], 2000)
    edges, bins = bin_edges(signed=signed), bins_of(values, signed=signed)
    assert len(edges) - 1 == BINS * (2 if signed else 1)
    assert (np.diff(edges) > 0).all()
    assert (edges[bins] <= values).all() and (values <= edges[bins + 1]).all()
    upper = edges[edges > 0]
    assert (upper[1:] / upper[:-1]).max() <= 1.25


def test_values_beyond_the_edges_lie_in_the_outermost_bins() -> None:
    values = np.array([1e-30, 0.0, 1e30, np.inf], np.float32)
    assert bins_of(values, signed=False).tolist() == [0, 0, BINS - 1, BINS - 1]
    both = np.concatenate([values, -values])
    wanted = [BINS, BINS, 2 * BINS - 1, 2 * BINS - 1, BINS - 1, BINS - 1, 0, 0]
    assert bins_of(both, signed=True).tolist() == wanted


def counted(**changes: np.ndarray) -> dict[str, np.ndarray]:
    hist = np.zeros((2, 4), np.int64)
    hist[0, 1], hist[1, 3] = 5, 2
    entries = {
        f"{name}/{field}": np.zeros(3, np.float32 if field == "value" else np.int32)
        for name in ("top", "drawn")
        for field in ("value", "unit", "row", "token")
    }
    ends = ends_of_latents(np.array([0, 0, 1]), 2)
    return {
        "count": np.array([5, 2]),
        "sum": np.zeros(2),
        **flat_histogram(hist),
        "top/ends": ends,
        "drawn/ends": ends,
        **entries,
        **changes,
    }


def test_lists_are_found_by_latent() -> None:
    found = LatentCounts("key", counted(), 2)
    assert found["hist/bin"].tolist() == [1, 3] and found["hist/count"].tolist() == [5, 2]
    assert found.run("top", 0) == slice(0, 2) and found.run("top", 1) == slice(2, 3)
    assert found.latents_of("drawn").tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"count": np.zeros(3, np.int64)}, "does not hold count of 2 latents"),
        ({"sum": np.zeros(2, np.float32)}, "does not hold sum"),
        ({"top/ends": np.array([3, 2])}, "top/ends does not ascend"),
        ({"drawn/row": np.zeros(2, np.int32)}, "does not hold drawn/row"),
    ],
)
def test_other_columns_are_refused(changes: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(CorruptError, match=f"key: {why}"):
        LatentCounts("key", counted(**changes), 2)


def test_rows_of_other_units_are_refused() -> None:
    with pytest.raises(CorruptError, match="top names rows that do not exist"):
        LatentCounts("key", counted(**{"top/unit": np.array([0, 7, 0], np.int32)}), 2).check_places(
            7
        )

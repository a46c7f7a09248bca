"""A tap as an array that is read when it is sliced."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.dataset.read import tap_rows
from spile.dataset.read.dataset import Dataset
from support import stored


@pytest.fixture(scope="module", params=["shaped", "scaled"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> stored.Stored:
    path = tmp_path_factory.mktemp("stored") / "out"
    shaped = request.param == "shaped"
    return stored.copied(
        path, taps=stored.SHAPED if shaped else stored.SCALED, compress=not shaped, shard_bytes=24
    )


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return spile.open(stored.copied(tmp_path_factory.mktemp("plain") / "out").path)


KEYS: dict[str, Any] = {
    "slice": slice(20, 90),
    "from the end": slice(-10, None),
    "step": slice(3, 100, 7),
    "backwards": slice(90, 20, -3),
    "all": slice(None),
    "beyond": slice(100, 500),
    "empty": slice(50, 40),
    "one": 17,
    "the last": -1,
    "numpy's integer": np.int64(5),
    "numbers": np.array([40, 3, 3, 110, -2]),
    "a list": [7, 8, 9, 20],
    "no numbers": [],
    "booleans": np.arange(111) % 5 == 2,
    "with columns": (slice(20, 90), 1),
    "one value": (17, 1),
    "numbers and columns": ([9, 4], slice(0, 2)),
    "dots": (..., 0),
}


def test_it_is_indexed_as_numpy_does(written: stored.Stored) -> None:
    ds = spile.open(written.path)
    for tap in ("resid_post.0", "q.1"):
        everything = ds.read(tap)
        for name, key in KEYS.items():
            found, wanted = ds[tap][key], everything[key]
            assert (found.dtype, found.shape) == (everything.dtype, wanted.shape), name
            assert found.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize(
    "key", [111, -112, [0, 111], np.zeros(5, bool), 1.5, [0.5], None, "label", [[1], [2]]]
)
def test_what_numpy_refuses_is_refused(ds: Dataset, key: Any) -> None:
    with pytest.raises(IndexError, match="resid_post.0|do not choose|along one axis"):
        ds["resid_post.0"][key]


def test_it_knows_its_size_without_reading(ds: Dataset) -> None:
    rows = ds["resid_post.0"]
    assert (rows.shape, rows.ndim, rows.size, rows.nbytes) == ((111, 6), 2, 666, 2664)
    assert (len(rows), rows.dtype) == (len(ds), ds.read("resid_post.0").dtype)
    assert repr(rows) == f"<spile tap resid_post.0: 111 x 6 in float32 of {ds.url}>"
    assert np.array_equal(np.stack([*rows]), ds.read("resid_post.0"))


def test_numpy_takes_it_whole_up_to_a_limit(ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ds["resid_post.0"]
    assert np.array_equal(np.asarray(rows), ds.read("resid_post.0"))
    assert np.asarray(rows, np.float64).dtype == np.float64
    np.testing.assert_allclose(np.mean(rows), ds.read("resid_post.0").mean())
    with pytest.raises(ValueError, match="makes a copy"):
        np.asarray(rows, copy=False)
    monkeypatch.setattr(tap_rows, "LARGEST", 2663)
    told = re.escape(
        "111 rows of resid_post.0 take 2.7 kB, and at most 2.7 kB are read at once unless you say "
        "which rows; read a part, as in ds.read('resid_post.0', 0, 110), or all in pieces, as in "
        "ds.batches('resid_post.0', 4096, shuffle=False)"
    )
    for read in (lambda: np.asarray(rows), lambda: ds.read("resid_post.0")):
        with pytest.raises(ConfigError, match=told):
            read()
    assert len(ds.read("resid_post.0", 1)) == len(ds.read("resid_post.0", 0, 111)) - 1 == 110
    assert len(rows[:]) == 111


def test_a_dataset_is_as_long_as_its_taps_and_named_by_them(tmp_path: Path, ds: Dataset) -> None:
    assert len(ds) == ds.num_tokens == 111
    nothing = spile.open(stored.copied(tmp_path / "none", commit=()).path, partial=True)
    assert len(nothing) == 0 and nothing, "a dataset without rows is a dataset"
    assert nothing["resid_post.0"][:10].shape == (0, 6)
    for wrong in (0, slice(10)):
        with pytest.raises(ConfigError, match=r"name a tap, as in ds\['resid_post.0'\]\[:100\]"):
            ds[wrong]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="no tap 'resid_post.9' in"):
        ds["resid_post.9"]
    with pytest.raises(TypeError, match="not iterable"):
        iter(ds)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_the_end_of_with_drops_open_files_and_reading_opens_them_again(ds: Dataset) -> None:
    with spile.open(ds.url) as again:
        rows = again.read("resid_post.0", 0, 3)
        again.documents(unit=0)
    assert again._stored._file.cache_info().currsize == 0  # pyright: ignore[reportPrivateUsage]
    assert np.array_equal(again.read("resid_post.0", 0, 3), rows)

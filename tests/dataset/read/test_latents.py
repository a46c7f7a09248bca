"""Reading latents: sparse, dense, and the rows where one is largest."""

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, CorruptError
from spile.dataset.format import TapInfo
from spile.dataset.maintain.verify import verify
from spile.dataset.read import latents as module
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.latents import top_rows
from support import stored

VALUES, IDS = "mlp_out_latents.1", "mlp_out_latent_ids.1"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    path = tmp_path_factory.mktemp("out") / "out"
    return stored.build(path, taps=stored.LATENTS, **stored.ENCODED)


@pytest.fixture
def ds(written: stored.Stored) -> Dataset:
    return spile.open(str(written.path))


def all_latents(written: stored.Stored) -> np.ndarray:
    dense = np.zeros((len(written.index), 40), np.float32)
    for row, (values, ids) in enumerate(zip(written.rows[VALUES], written.rows[IDS], strict=True)):
        for value, number in zip(values, ids, strict=True):
            dense[row, number] = value
    return dense


def test_the_dataset_names_what_is_stored_and_the_recipe_what_was_tapped(ds: Dataset) -> None:
    assert ds.taps == ["resid_post.0", VALUES, IDS]
    assert ds.recipe.taps == ("mlp_out.1", "resid_post.0")
    assert [ds.num_latents(tap) for tap in ds.taps] == [0, 40, 40]
    assert [ds.shape(tap) for tap in ds.taps] == [(6,), (4,), (4,)]


@pytest.mark.parametrize("name", ["mlp_out.1", VALUES, IDS])
def test_sparse_rows_hold_what_is_active(ds: Dataset, written: stored.Stored, name: str) -> None:
    found = ds.latents(name, 3, 90)
    dense = all_latents(written)[3:90]
    assert (len(found), found.width) == (87, 40)
    assert np.array_equal(np.diff(found.indptr), np.count_nonzero(dense, axis=1))
    assert 0 in np.diff(found.indptr), "a row of which nothing is active is one of them"
    for row in range(87):
        part = slice(found.indptr[row], found.indptr[row + 1])
        assert (np.diff(found.values[part]) <= 0).all()
        assert np.array_equal(found.values[part], dense[row, found.ids[part]])
    assert np.array_equal(found.dense(), dense)
    assert np.array_equal(found.rows, np.nonzero(dense)[0])


def test_what_scipy_would_make_of_them_is_the_same(ds: Dataset, written: stored.Stored) -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
    found = ds.latents("mlp_out.1", 0, 111)
    array = sparse.csr_array((found.values, found.ids, found.indptr), shape=(111, 40))
    assert np.array_equal(array.toarray(), all_latents(written))


def test_no_rows_are_no_latents(ds: Dataset) -> None:
    found = ds.latents("mlp_out.1", 5, 5)
    assert (len(found), found.dense().shape) == (0, (0, 40))


def test_other_taps_have_none(ds: Dataset) -> None:
    with pytest.raises(ConfigError, match="no latents of 'resid_post.0'.*encoded: mlp_out.1"):
        ds.latents("resid_post.0", 0, 1)


def test_ids_that_cannot_be_are_found_out(tmp_path: Path) -> None:
    taps = {**stored.LATENTS, IDS: TapInfo((4,), "int16", latents=41)}
    made = stored.build(tmp_path / "out", taps=taps, **stored.ENCODED)
    assert verify(made.objects).ok
    table = dataclasses.replace(made.table, taps={
        **made.table.taps, IDS: TapInfo((4,), "int16", latents=30),
        VALUES: TapInfo((4,), "float32", latents=30),
    })  # fmt: skip
    stored.replace_table(made.objects, table)
    faults = verify(made.objects).faults
    assert faults and all("names latents that are not among 30" in fault for fault in faults)
    with pytest.raises(CorruptError, match="names latents that are not among 30"):
        spile.open(str(made.path)).latents("mlp_out.1", 0, 111)


def test_batches_give_ids_with_their_values(ds: Dataset, written: stored.Stored) -> None:
    pairs = np.concatenate([written.rows[VALUES], written.rows[IDS]], axis=1)
    found = [np.concatenate([b[VALUES], b[IDS]], axis=1) for b in ds.batches([VALUES, IDS], 20)]
    assert sorted(np.concatenate(found).tolist()) == sorted(pairs.tolist())


@pytest.mark.parametrize("window", [1, 300, 1 << 20])
@pytest.mark.parametrize(("tap", "channel"), [("mlp_out.1", 7), ("resid_post.0", 2)])
def test_the_rows_in_which_one_is_largest(
    ds: Dataset, written: stored.Stored, monkeypatch: pytest.MonkeyPatch,
    tap: str, channel: int, window: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "_WINDOW_BYTES", window)
    table = all_latents(written) if tap == "mlp_out.1" else written.rows[tap]
    order = sorted(range(111), key=lambda row: (-table[row, channel], row))
    if tap == "mlp_out.1":
        order = [row for row in order if table[row, channel] > 0]
        assert 2 < len(order) < 40
    for count in (1, 3, 200):
        found = top_rows(ds, tap, channel, count)
        assert found.rows.tolist() == order[:count]
        assert np.array_equal(found.values, table[order[:count], channel])
        assert np.array_equal(found.index, written.index[order[:count]])


def test_a_latent_that_is_never_active_has_no_rows(tmp_path: Path) -> None:
    taps = {**stored.LATENTS, VALUES: TapInfo((4,), "float32", latents=4000),
            IDS: TapInfo((4,), "int16", latents=4000)}  # fmt: skip
    made = stored.build(tmp_path / "out", taps=taps, **stored.ENCODED)
    never = next(n for n in range(4000) if not (made.rows[IDS] == n).any())
    found = top_rows(spile.open(str(made.path)), "mlp_out.1", never, 5)
    assert (len(found.rows), len(found.values), len(found.index)) == (0, 0, 0)


def test_what_does_not_exist_is_refused(ds: Dataset) -> None:
    for tap, channel, count, reason in (
        ("mlp_out.1", 40, 3, "has latents 0 to 39, not 40"),
        ("resid_post.0", -1, 3, "has channels 0 to 5, not -1"),
        ("resid_post.0", 0, 0, "at least one row"),
        ("resid_post.9", 0, 1, "no tap 'resid_post.9'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            top_rows(ds, tap, channel, count)


def test_memory_does_not_grow_with_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WINDOW_BYTES", 4096)
    peaks: list[int] = []
    for number, units in enumerate(([(2000,)] * 2, [(2000,)] * 12)):
        made = stored.build(
            tmp_path / str(number), units, taps={"resid_post.0": 64}, shard_bytes=1 << 16
        )
        ds = spile.open(str(made.path))
        top_rows(ds, "resid_post.0", 3, 10)  # files are mapped once
        tracemalloc.start()
        top_rows(ds, "resid_post.0", 3, 10)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] + (64 << 10), peaks

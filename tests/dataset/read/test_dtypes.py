"""Rows are float32 unless a dtype is named, so that numpy's obvious lines are right."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd  # `datasets` brings it
import pytest
import torch

import spile
from spile.core.errors import ConfigError
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.format import TapInfo
from spile.dataset.read.dtypes import convert, given_dtype
from support import stored

TAP, WIDTH, ROWS = "resid_post.0", 48, 4096
LABELS = np.arange(ROWS) % 2 == 0
MIXED: stored.Taps = {
    "resid_post.0": TapInfo((6,), "bfloat16"),
    "q.1": TapInfo((2, 3), "float16"),
    "v.1": TapInfo((2, 3), "int8"),
    "mlp_out.1": TapInfo((3,), "float8_e4m3"),
    "expert_ids.1": TapInfo((2,), "int16"),
    "attn_out_latents.1": TapInfo((4,), "bfloat16", latents=40),
    "attn_out_latent_ids.1": TapInfo((4,), "int16", latents=40),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    path, encoded = tmp_path_factory.mktemp("mixed") / "out", {"attn_out.1": "topk 40 1-ab"}
    return stored.build(path, taps=MIXED, encode=encoded, shard_bytes=300, compress=True)


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.dtype == wanted.dtype and np.array_equal(found, wanted)


# -- every way to read -----------------------------------------------------------------------


@pytest.mark.parametrize("tap", MIXED)
def test_every_way_to_read_gives_float32(mixed: stored.Stored, tap: str) -> None:
    """Eight bits are decoded; ids stay integers."""
    ds, wanted = spile.open(mixed.path), mixed.given[tap]
    assert ds.dtype(tap) == ds[tap].dtype == wanted.dtype
    assert same(ds.read(tap), wanted)
    assert same(ds[tap][5:50], wanted[5:50])
    assert same(ds[tap][[7, 3, 90]], wanted[[7, 3, 90]])
    assert same(np.asarray(ds[tap]), wanted)
    (batch,) = ds.batches(tap, 111, shuffle=False)
    assert same(batch[tap], wanted)
    pair = spile.align(one=ds, two=spile.open(mixed.path))
    assert same(pair.read(f"two/{tap}", 5, 50), wanted[5:50])
    (batch,) = pair.batches(tap, 111, shuffle=False)
    assert same(batch[f"two/{tap}"], wanted)
    out = np.zeros((45, *wanted.shape[1:]), wanted.dtype)
    ds.read_into(tap, 5, out)
    assert same(out, wanted[5:50])
    rows = np.flatnonzero(mixed.index["doc"] == 1)
    rows = rows[np.argsort(mixed.index["offset"][rows])]
    assert same(ds.document(1).read(tap), wanted[rows])
    assert same(ds.document(1)[tap], wanted[rows])


@pytest.mark.parametrize("dtype", ["stored", "float64", "float16", np.float32, "bfloat16"])
@pytest.mark.parametrize("tap", MIXED)
def test_every_way_to_read_takes_a_dtype(mixed: stored.Stored, tap: str, dtype: Any) -> None:
    ds, wanted = spile.open(mixed.path), mixed.rows[tap]
    if dtype != "stored" and wanted.dtype.kind != "i":
        wanted = wanted.astype(DTYPES_BY_NAME[np.dtype(dtype).name])
    assert ds.dtype(tap, dtype) == wanted.dtype
    assert same(ds.read(tap, 5, 50, dtype=dtype), wanted[5:50])
    (batch,) = ds.batches(tap, 111, shuffle=False, dtype=dtype)
    assert same(batch[tap], wanted)
    pair = spile.align(one=ds, two=spile.open(mixed.path))
    assert same(pair.read(f"two/{tap}", 5, 50, dtype=dtype), wanted[5:50])
    (batch,) = pair.batches(tap, 111, shuffle=False, dtype=dtype)
    assert same(batch[f"two/{tap}"], wanted)
    assert ds.document(1).read(tap, dtype=dtype).dtype == wanted.dtype


def test_latents_are_float32_and_their_ids_integers(mixed: stored.Stored) -> None:
    ds = spile.open(mixed.path)
    found = ds.latents("attn_out.1", 0, 111)
    assert (found.values.dtype, found.ids.dtype) == (np.float32, np.int16)
    assert found.dense().dtype == np.float32
    kept = ds.latents("attn_out.1", 0, 111, dtype="stored")
    assert kept.values.dtype == DTYPES_BY_NAME["bfloat16"]
    assert same(kept.values.astype(np.float32), found.values)


def test_what_is_no_float_dtype_is_refused(mixed: stored.Stored) -> None:
    ds = spile.open(mixed.path)
    for wrong in ("int8", np.int32, "float7", ">f4", "complex64", bool):
        with pytest.raises(ConfigError, match="no dtype .* 'stored', or one of float16, bfloat16"):
            ds.read(TAP, 0, 5, dtype=wrong)
        with pytest.raises(ConfigError, match="no dtype"):
            ds.batches(TAP, 5, dtype=wrong)
        with pytest.raises(ConfigError, match="no dtype"):
            spile.connect("grpc://127.0.0.1:1", dtype=wrong)
    with pytest.raises(ConfigError, match="int64 cannot hold resid_post.0; give a float32"):
        ds.read_into(TAP, 0, np.zeros((5, 6), int))


def test_float16_widens_to_the_bit() -> None:
    """Every code there is, in one row and in many."""
    for shape in ((1, 1 << 16), (1 << 16, 1), (1 << 12, 16), (1 << 16,)):
        codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(shape)
        out = np.zeros(shape, np.float32)
        convert(codes, out)
        assert out.tobytes() == codes.astype(np.float32).tobytes()
    assert given_dtype(TapInfo((3,), "float16"), None) == np.float32


# -- what a newcomer writes ------------------------------------------------------------------


def residual(rng: np.random.Generator, count: int, info: TapInfo) -> np.ndarray:
    """Rows like a residual stream's: a large common offset, and two classes apart along it."""
    rows = rng.standard_normal((count, WIDTH)) * np.geomspace(4, 1, WIDTH)
    rows[LABELS] += 1.5 * np.sin(np.arange(WIDTH))
    return (rows + 40 * np.cos(np.arange(WIDTH))).astype(info.storage)


@pytest.fixture(scope="module")
def offset(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    path, units = tmp_path_factory.mktemp("offset") / "out", [[64] * (ROWS // 128)] * 2
    taps = {TAP: TapInfo((WIDTH,), "bfloat16")}
    return stored.build(path, units, taps=taps, shard_bytes=1 << 20, rows_of=residual)


def difference(rows: Any) -> Any:
    return rows[LABELS].mean(0) - rows[~LABELS].mean(0)


def scores(rows: Any) -> Any:
    return (rows - rows.mean(0)) @ difference(rows)


def sorted_by(rows: Any) -> Any:
    found = scores(rows)
    return found[np.argsort(-found)]


def cosine(rows: Any) -> Any:
    mean = rows.mean(0)
    return (rows @ mean) / (np.linalg.norm(rows, axis=1) * np.linalg.norm(mean))


def principal(rows: Any) -> Any:
    """The projections on the first component, which has either sign."""
    left, sizes, _ = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return np.abs(left[:, 0]) * sizes[0]


def logistic(rows: Any) -> Any:
    x = (rows - rows.mean(0)) / rows.std(0)
    weights = np.zeros(WIDTH, x.dtype)
    for _ in range(100):
        chance = 1 / (1 + np.exp(-(x @ weights)))
        weights -= 0.5 * (x.T @ (chance - LABELS).astype(x.dtype)) / len(x)
    return weights


IDIOMS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda rows: rows.mean(0),
    "std": lambda rows: rows.std(0),
    "norm": lambda rows: np.linalg.norm(rows, axis=1).mean(),
    "argsort": sorted_by,
    "cosine": cosine,
    "dot": lambda rows: rows @ rows[0],
    "cov": lambda rows: np.cov(rows, rowvar=False),
    "PCA": principal,
    "logistic regression": logistic,
    "torch": lambda rows: torch.from_numpy(np.asarray(rows)).std(0).numpy(),
    "pandas": lambda rows: pd.DataFrame(rows).groupby(LABELS).mean().to_numpy(),
    "plotting": lambda rows: np.histogram(rows[:, 0], 40)[1],
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_a_newcomer_writes_is_right(offset: stored.Stored, idiom: str) -> None:
    """The mean of all rows, were they bfloat16, would be 90% off."""
    compute, rows = IDIOMS[idiom], spile.open(offset.path).read(TAP)
    assert (rows.shape, rows.dtype) == ((ROWS, WIDTH), np.float32)
    found, wanted = compute(rows), compute(offset.rows[TAP].astype(np.float64))
    assert np.asarray(found).dtype in (np.float32, np.float64)
    # numpy's float32 sums of 4,096 terms are good to 1e-5; their inputs are exact.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_sums_over_batches_are_right(offset: stored.Stored) -> None:
    ds, total, count = spile.open(offset.path), np.zeros(WIDTH), 0
    for batch in ds.batches(TAP, 1000, shuffle=True):
        total += batch[TAP].sum(0)
        count += len(batch[TAP])
    wanted = offset.rows[TAP].astype(np.float64).mean(0)
    np.testing.assert_allclose(total / count, wanted, rtol=1e-5, atol=1e-5)

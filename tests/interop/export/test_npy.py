"""Arrays in .npy files, opened by numpy."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from spile.interop.export import Exported
from support import stored

Run = Callable[..., tuple[Path, Exported]]


def same(values: np.ndarray, expected: np.ndarray) -> bool:
    wanted = expected.astype(np.float32) if expected.dtype.name == "bfloat16" else expected
    return values.dtype == wanted.dtype and np.array_equal(values, wanted)


def test_numpy_opens_npy_files(written: stored.Stored, exported: Run) -> None:
    dest, made = exported(written, "npy")
    assert np.array_equal(np.load(dest / "index.npy"), written.index)
    for tap, rows in written.rows.items():
        values = np.load(dest / f"{tap}.npy", allow_pickle=False)
        assert same(values, rows)
        assert made.taps[tap] == values.dtype.name


def test_floats_may_be_written_as_float16(floats: stored.Stored, exported: Run) -> None:
    dest, made = exported(floats, "npy", dtype="float16")
    assert made.taps["resid_post.0"] == "float16"
    assert made.taps["expert_ids.1"] == "int16"
    values = np.load(dest / "q.1.npy")
    assert np.array_equal(values, floats.rows["q.1"].astype(np.float16))

"""What an export reads: the chosen taps, and values in the dtype of the format."""

from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import DataError
from spile.dataset.format import TapInfo
from spile.interop.export.export_source import ExportSource
from support import stored


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    taps: stored.Taps = {"resid_post.0": TapInfo((4,), "float32")}
    made = stored.build(tmp_path / "out", taps=taps)
    ds = spile.open(str(made.path))
    source = ExportSource(ds, ("resid_post.0",), {"resid_post.0": np.dtype(np.float16)}, 1)
    with pytest.raises(DataError, match="resid_post.0 has values that float16 cannot hold"):
        source.convert("resid_post.0", np.full((2, 4), 70000, np.float32))
    kept = source.convert("resid_post.0", np.array([[np.inf, -np.inf, np.nan, 1]], np.float32))
    assert kept.dtype == np.float16, "what was infinite before is no loss"


def test_windows_are_whole_contexts_and_cover_all_of_them(floats: stored.Stored) -> None:
    ds = spile.open(str(floats.path))
    source = ExportSource(ds, ("resid_post.0",), {"resid_post.0": np.dtype(np.float32)}, 8)
    assert (source.contexts, source.rows) == (13, 104)
    windows = list(source.windows(0, source.rows, source.row_bytes(), 1000))
    assert windows[0] == (0, 40), "five contexts of 192 bytes are the most under a thousand"
    assert [a for a, _ in windows[1:]] == [b for _, b in windows[:-1]]
    assert windows[-1][1] == 104
    assert list(source.windows(0, 8, source.row_bytes(), 1)) == [(0, 8)], "one context at least"

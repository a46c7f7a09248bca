"""The checks of every format before anything is written."""

import sys
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.interop.export import FORMATS, export
from spile.interop.export.export_format import check_hooks, require
from spile.interop.export.export_source import ExportSource
from support import stored


def test_a_missing_library_is_one_line_that_says_what_to_install(
    floats: stored.Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="--to activault needs torch.*pip install torch"):
        export(str(floats.path), tmp_path / "dest", to="activault", taps="resid_post:all")


@pytest.mark.parametrize("to", ["npy", "zarr", "openmoss", "saev", "delphi"])
def test_a_format_that_is_written_by_hand_needs_no_library(
    to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pyarrow", "torch", "zarr", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    require(FORMATS[to])


def test_taps_of_one_transformerlens_name_are_refused(floats: stored.Stored) -> None:
    ds = spile.open(str(floats.path))

    def source(*taps: str) -> ExportSource:
        return ExportSource(ds, taps, dict.fromkeys(taps, np.dtype(np.float32)), 1)

    check_hooks(source("resid_post.0", "resid_post.1"))
    with pytest.raises(ConfigError, match="two of the taps have one TransformerLens name"):
        check_hooks(source("resid_post.0", "resid_post.0"))
    with pytest.raises(ConfigError, match="logprob has no TransformerLens name"):
        check_hooks(source("logprob"))

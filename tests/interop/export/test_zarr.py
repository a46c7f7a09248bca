"""A Zarr group, opened by zarr."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spile.interop.export import Exported, zarr
from support import stored

Run = Callable[..., tuple[Path, Exported]]


def same(values: np.ndarray, expected: np.ndarray) -> bool:
    wanted = expected.astype(np.float32) if expected.dtype.name == "bfloat16" else expected
    return values.dtype == wanted.dtype and np.array_equal(values, wanted)


@pytest.mark.parametrize("chunk", [50, 1 << 20])
def test_zarr_opens_the_group(
    written: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    library = pytest.importorskip("zarr", reason="zarr is not installed")
    monkeypatch.setattr(zarr, "_CHUNK_BYTES", chunk)
    dest, _ = exported(written, "zarr")
    group = library.open_group(dest, mode="r")
    assert {name for name, _ in group.members()} == {*written.rows, "index"}
    assert group.attrs["spile"]["fingerprint"] == written.table.fingerprint
    for tap, rows in written.rows.items():
        assert same(group[tap][:], rows)
        assert same(group[tap][40:43], rows[40:43])
    for name in written.index.dtype.names or ():
        assert np.array_equal(group[f"index/{name}"][:], written.index[name])


def test_a_chunk_of_zarr_is_its_rows_and_nothing_else(
    floats: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr, "_CHUNK_BYTES", 50 * 24)
    dest, _ = exported(floats, "zarr", taps="q.1")
    parts = [(dest / "q.1" / "c" / str(i) / "0" / "0").read_bytes() for i in range(3)]
    assert {len(part) for part in parts} == {1200}
    expected = floats.rows["q.1"].tobytes()
    assert b"".join(parts) == expected + bytes(39 * 24)

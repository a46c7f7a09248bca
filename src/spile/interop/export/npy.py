"""One .npy file per tap, and the index; written without numpy.save, so that rows stream."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.tensors import as_bytes
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource


def write_npy(
    path: Path, dtype: np.dtype[Any], shape: Sequence[int], pieces: Iterable[np.ndarray]
) -> None:
    """Write a .npy file, streaming its rows after the header."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tuple(shape),
    }
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            file.write(as_bytes(piece))


def _write(source: ExportSource, to: Path) -> int:
    for tap in source.taps:
        windows = source.windows(0, source.rows, source.row_bytes(tap))
        shape = (source.rows, *source.dataset.shape(tap))
        pieces = (source.read(tap, a, b) for a, b in windows)
        write_npy(to / f"{tap}.npy", source.dtypes[tap], shape, pieces)
    entries = source.dataset.index_dtype
    windows = source.windows(0, source.rows, entries.itemsize)
    pieces = (source.dataset.index(a, b) for a, b in windows)
    write_npy(to / "index.npy", entries, (source.rows,), pieces)
    write_json(to / "spile.json", source.about())
    return source.rows


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    index = len(np.load(at / "index.npy", mmap_mode="r"))
    # A file that is too short cannot be mapped.
    return {tap: min(index, len(np.load(at / f"{tap}.npy", mmap_mode="r"))) for tap in source.taps}


NPY = ExportFormat(
    name="npy",
    about="one .npy file per tap, and index.npy",
    write=_write,
    count=_count,
    integers=True,
)
